"""Fitted scores on disk: safetensors with a JSON description in the header. Loading never runs code from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from credo.core.errors import FileFormatError
from credo.core.posterior import Posterior
from credo.core.saved.posterior_tensors import tensors_of
from credo.core.support.files import write_atomically
from credo.core.support.tensor_files import digest_of, read_safetensors, write_safetensors
from credo.detection.scores import FittedScore
from credo.version import __version__

FORMAT = 1
_KEY = "credo_detector"


def write_fitted(
    path: Path, posterior: Posterior, options: Mapping[str, Any], fitted: Sequence[Mapping[str, FittedScore]]
) -> Path:
    """Write the scores of every network.

    Args:
        path: The file.
        posterior: The posterior that they were fitted for, of which the file holds a digest only.
        options: Of the detector, as JSON.
        fitted: By network and name.
    """
    tensors: dict[str, Tensor] = {}
    for number, network in enumerate(fitted):
        for name, score in network.items():
            is_first = number == 0 or score is not fitted[0][name]
            for field, value in vars(score).items():
                if isinstance(value, Tensor) and is_first:  # numbers are among the options
                    tensors[f"{number}.{name}.{field}"] = value.detach().cpu().contiguous().clone()
    about = {
        "format": FORMAT,
        "credo": __version__,
        "options": dict(options),
        "networks": len(fitted),
        "posterior": _networks_digest(posterior, options),
    }
    text = json.dumps(about)
    header = {_KEY: text, "digest": digest_of(tensors, text)}
    write_atomically(path, lambda temporary: write_safetensors(temporary, tensors, header))
    return path


def read_fitted(
    path: Path, posterior: Posterior, kinds: Mapping[str, type[Any]]
) -> tuple[dict[str, Any], list[dict[str, FittedScore]]]:
    """The options of a detector, and its scores by network and name.

    Args:
        path: A file that `write_fitted` wrote.
        posterior: The posterior that it was written for; raises ValueError if its weights, or their noise, are others.
        kinds: Classes of the scores by name.
    """
    header, tensors = read_safetensors(path)
    if _KEY not in header:
        raise FileFormatError(f"{path} was not written by OodDetector.save: it has no description of a detector.")
    if digest_of(tensors, header[_KEY]) != header.get("digest"):
        raise FileFormatError(f"{path} was changed after it was written: its digest does not match.")
    about = json.loads(header[_KEY])
    if about.get("format") != FORMAT:
        raise FileFormatError(
            f"{path} has format {about.get('format')!r} (Credo {about.get('credo')}); this version reads {FORMAT}."
        )
    options: dict[str, Any] = about["options"]
    if about["posterior"] != _networks_digest(posterior, options):
        raise ValueError(
            f"{path} was fitted to the features of other weights than this posterior's, or of another scale of their "
            "noise: load the posterior that it was made for, with its calibration, or fit a new detector."
        )
    names = [name for name in options["names"] if name in kinds]
    device = posterior.device

    def score(number: int, name: str) -> FittedScore:
        own = [field.name for field in fields(kinds[name])]
        made: FittedScore = kinds[name](
            **{f: options[f] if f in options else tensors[f"{number}.{name}.{f}"].to(device) for f in own}
        )
        return made

    networks: list[dict[str, FittedScore]] = []
    for number in range(about["networks"]):
        own = {name for name in names if any(key.startswith(f"{number}.{name}.") for key in tensors)}
        networks.append({name: score(number, name) if name in own else networks[0][name] for name in names})
    return options, networks


def _networks_digest(posterior: Posterior, options: Mapping[str, Any]) -> str:
    """A digest of all that the drawn networks depend on beside the seed."""
    calibration = posterior.calibration
    scale = 0.0 if not options["draws"] else 1.0 if calibration is None else calibration.noise_scale
    descriptions = [(type(part).__name__, part.data_size, part.describe()) for part in posterior.parts]
    methods = [(name, size, about.temperature, about.rate) for name, size, about in descriptions]
    return digest_of(tensors_of(posterior), json.dumps({"noise_scale": scale, "methods": methods}))
