"""The tensors of a posterior's state, and those of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from credo.core.errors import FileFormatError
from credo.core.posterior import Posterior
from credo.core.saved.finite_state import listed, unsound
from credo.core.support.files import earlier
from credo.core.support.tensor_files import read_torch_file


def tensors_of(posterior: Posterior) -> dict[str, Tensor]:
    """Parameters and buffers by name, without the states of optimiser and generator."""
    return {name: value for name, value in posterior.state_dict().items() if isinstance(value, Tensor)}


def check_fit(path: Path, posterior: Posterior, given: Mapping[str, Tensor]) -> None:
    """Raise FileFormatError unless the tensors of a file have the names and shapes of the posterior's.

    Args:
        path: The file, for the message.
        posterior: The posterior.
        given: Tensors by name.
    """
    wanted = tensors_of(posterior)
    missing = sorted(set(wanted) - set(given))
    surplus = sorted(set(given) - set(wanted))
    shapes = [n for n in wanted if n in given and wanted[n].shape != given[n].shape]
    if missing or surplus or shapes:
        raise FileFormatError(f"{path} does not fit: missing {missing}, not expected {surplus}, other shape {shapes}.")


def checkpoint_files(given: Path) -> list[Path]:
    """A checkpoint and the older ones beside it, newest first; of a folder, all checkpoints in it.

    Args:
        given: A file that `fit` wrote, or a folder.
    """
    if given.is_dir():
        found = sorted(given.glob("*.pt"), key=lambda file: (-file.stat().st_mtime_ns, file.name))
        if not found:
            raise FileNotFoundError(f"There is no checkpoint, *.pt, in {given}.")
        return found
    found, age = [given], 1
    while earlier(given, age).exists():
        found.append(earlier(given, age))
        age += 1
    return found


def load_checkpoint_(posterior: Posterior, path: Path) -> None:
    """Give a posterior the parameters and buffers of a checkpoint; optimiser and generator stay as they are.

    Args:
        posterior: One like that of the checkpoint. Raises FileFormatError if names, shapes or dtypes differ.
        path: A file that `fit` wrote.
    """
    if path.suffix == ".safetensors":
        raise FileFormatError(f"{path} is a file of credo.save, not a checkpoint: read it with credo.load.")
    content = read_torch_file(path)
    state = content.get("posterior") if isinstance(content, dict) else None
    if not isinstance(state, Mapping):
        raise FileFormatError(f"{path} is not a checkpoint that credo.fit wrote: it holds no posterior.")
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    check_fit(path, posterior, tensors)
    other = [name for name, tensor in tensors_of(posterior).items() if tensor.dtype != tensors[name].dtype]
    if other:
        raise FileFormatError(f"{path} does not fit: it has another dtype of {listed(other)}.")
    problems = unsound(posterior, tensors)
    if problems:
        raise FileFormatError(f"{path} holds no valid state: {listed(problems)}.")
    posterior.load_state_dict(tensors, strict=False)
