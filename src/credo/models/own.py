"""Networks of the user's own: `file.py:function` or `package.module:Class`.

To use one, its code runs. So a name alone, in a settings file or in a trained run, never does it: somebody must have
called `use_own_model` in this process, as the command line does for names that are typed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# By name, those that the user of this process has asked for.
OWN: dict[str, Callable[..., Any]] = {}


def is_own(name: object) -> bool:
    """Whether a name is one of the user's code, not of Credo's networks."""
    return isinstance(name, str) and ":" in name


def use_own_model(name: str, *also: str) -> None:
    """Import what `name` stands for, so that `build_model` builds networks of this name; this runs its code.

    Args:
        name: `file.py:function` or `package.module:Class`. A file may import from its own folder.
        *also: Other names for the same, such as that of a file which was moved since.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ValueError(f"{name!r} is not a network of your own: write file.py:function or package.module:Class.")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where, name)
    build = getattr(module, attribute, None)
    if not callable(build):
        found = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(
            f"{where} has no class or function {attribute!r}; it has {', '.join(found) or 'none'}. Give one that "
            "returns the network."
        )
    OWN.update(dict.fromkeys((name, *also), build))


def own_model(name: str) -> Callable[..., Any]:
    """Return the class or function of that name; raises ValueError unless `use_own_model` was called."""
    if name not in OWN:
        raise ValueError(
            f"The network {name!r} is not Credo's, and its code is not run because a file names it. If you trust it, "
            f"say so: model.name={name} with `credo train`, --model {name} with other commands, "
            f"credo.models.use_own_model({name!r}) in Python."
        )
    return OWN[name]


def _from_file(path: Path) -> Any:
    path = path.expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}: give the path of the file that has your network.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.absolute().parent))  # as if Python ran it
    # Classes find their module by its name, but a file called json.py must not replace another module.
    stands = sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code
        if stands is module:
            del sys.modules[path.stem]
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.absolute().parent))
    return module


def _from_package(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{name!r}: {error}. Give a module that Python finds, or the path of a file, such as "
            f"{module.rpartition('.')[2]}.py:{name.rpartition(':')[2]}."
        ) from error
