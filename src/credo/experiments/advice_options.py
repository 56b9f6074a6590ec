"""The doctor's arguments as the command line takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# What a finding names that is no option of the method.
_OF_TRAINING = ("epochs", "batch_size")
_NOISE = re.compile(r"credo\.GaussianNoise\(std=([^,]+), learn=True\)")


def setting_of(name: str, argument: str | None, method: Mapping[str, Any]) -> str | None:
    """The argument of the finding `name` as commands take it: `method.std_init=0.05`, `--draws 64`.

    `method` is the run's own section, since an ensemble keeps its members' options in `method.of`. What cannot be given
    to a command (a call) stays as it is.
    """
    key, equals, value = (argument or "").partition("=")
    if not equals or not key.isidentifier():
        return argument
    if key == "twin":
        return "--baseline runs/plain"
    if key == "draws" and name == "few-draws":
        return f"--draws {value}"
    if key in _OF_TRAINING:
        return f"training.{argument}"
    section = "method.of" if method.get("name") == "ensemble" else "method"
    noise = _NOISE.fullmatch(value)
    if noise is not None:
        options = (("kind", "gaussian"), ("std", noise[1]), ("learn", "true"))
        return " ".join(f"{section}.likelihood.{option}={text}" for option, text in options)
    plain = value.strip("'")
    return f"{section}.{key}={plain}"
