"""The published tables and figures, run again. Run `python -m reproductions` from a checkout."""
