"""What the processes of the distributed tests do: `python worker.py FOLDER` runs every job and leaves results there."""

import sys
import warnings
from pathlib import Path

import torch
from forks import Job, run
from jobs_failures import apart, hanging, killed, late_failure, not_finite, one_member_overflows, refused, wrong_batch
from jobs_training import (
    by_optimizer,
    compressed,
    counted,
    evaluated_apart,
    gathered,
    gone_on,
    laplace_noise,
    laplace_pass,
    laplace_pass_killed,
    last_layer_pass,
    optimizer_fails,
    own_buffers,
    own_noise,
    same_as_one,
    samples_in_files,
    stopped_halfway,
    swag_statistics,
)

JOBS: list[tuple[Job, tuple[int, ...]]] = [
    (same_as_one, (1, 2, 4)),
    (laplace_noise, (1, 2)),
    (laplace_pass, (1, 2)),
    (laplace_pass_killed, (2,)),
    (last_layer_pass, (1, 2)),
    (swag_statistics, (1, 2)),
    (samples_in_files, (2,)),
    (stopped_halfway, (2,)),
    (gone_on, (1, 4)),
    (own_noise, (2,)),
    (refused, (2,)),
    (apart, (2,)),
    (not_finite, (2,)),
    (gathered, (1, 2)),
    (counted, (1, 2)),
    (by_optimizer, (2,)),
    (optimizer_fails, (2,)),
    (compressed, (2, 4)),
    (killed, (2,)),
    (hanging, (2,)),
    (wrong_batch, (2,)),
    (own_buffers, (2,)),
    (evaluated_apart, (2,)),
    (one_member_overflows, (2,)),
    (late_failure, (2,)),
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    run(Path(sys.argv[1]), *sys.argv[2:], jobs=JOBS)
