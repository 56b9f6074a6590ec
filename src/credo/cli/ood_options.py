"""The option `--ood-scores`, and the table of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from credo.cli.output import print_table
from credo.core.errors import unknown
from credo.detection import DETECTOR_SCORES

HELP = (
    "Also detect OOD inputs by scores of logits and features: all, or some of "
    f"{', '.join(DETECTOR_SCORES)}, separated by commas. At most 8 of the drawn networks, each of which also runs over "
    "up to 10,000 training examples."
)


def checked_scores(given: str | None, ood: Sequence[str] | None) -> tuple[str, ...]:
    """The scores that were asked for; raises ValueError if one is unknown, or if there is nothing to detect.

    Args:
        given: The option's value.
        ood: The OOD data sets.
    """
    if given is None:
        return ()
    if not ood:
        raise ValueError(f"--ood-scores {given} needs --ood: name a data set to detect, such as --ood photo-patches.")
    names = DETECTOR_SCORES if given == "all" else tuple(name.strip() for name in given.split(","))
    for name in names:
        if name not in DETECTOR_SCORES:
            raise ValueError(unknown("score in --ood-scores", name, ["all", *DETECTOR_SCORES]))
    return names


def print_scores(found: Mapping[str, Any]) -> None:
    """Print a table for each OOD data set, the best score first.

    Args:
        found: `ood_scores` of `evaluate_run`.
    """
    for name, study in found.items():
        rows = []
        for score, area in sorted(study["auroc"].items(), key=lambda each: -each[1]["value"]):
            gain = study["auroc_gain"].get(score)
            rows.append([score, _shown(area), _shown(study["fpr95"][score]), "" if gain is None else _shown(gain)])
        columns = ["score", "AUROC", "FPR95", f"AUROC − {study['reference']}"]
        print_table(f"detection of {name}, with 95 % intervals", columns, rows)


def _shown(interval: Mapping[str, float]) -> str:
    return f"{interval['value']:.4f} ({interval['low']:.4f} … {interval['high']:.4f})"
