"""What Credo costs, as ratios that one run measures side by side: `step_cost` for training, `predict_cost` after it."""

import os

# Torch's profiler announces itself on stderr, and reads this when torch is imported: so before any other module here.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
