"""Parts of packages that are compared with, without what the packages import beside them."""

import importlib
import importlib.util
import sys
import types
from typing import Any

import pytest


def peer_part(name: str) -> Any:
    """A module of a package, or the test is skipped; the code of the folders above it, which loads all, is not run.

    torchcp loads data sets of graphs and language models, and pytorch-ood image models, which are not installed.
    """
    above = name.split(".")[:-1]
    for count in range(1, len(above) + 1):
        folder = ".".join(above[:count])
        if folder in sys.modules:
            continue
        found = importlib.util.find_spec(folder)
        if found is None or found.submodule_search_locations is None:
            pytest.skip(f"{above[0]} is not installed (benchmarks/peers.txt)")
        bare = types.ModuleType(folder)
        bare.__path__ = list(found.submodule_search_locations)
        sys.modules[folder] = bare
    return importlib.import_module(name)
