"""torchrun's own launcher around `credo`, with workers that are forks: `launcher.py WORKERS MAX_RESTARTS ARGUMENTS…`.

torchrun starts every worker as a new Python, which imports torch for seconds; here one process imports it for all.
"""

import sys

import sklearn.datasets  # noqa: F401 - the digits come from there, and workers should not import it each
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from credo.cli.app import app


def work(arguments: list[str]) -> None:
    app(arguments)


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(sys.argv[1]),
        max_restarts=int(sys.argv[2]),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="test",
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, work)(sys.argv[3:])
