"""Split conformal prediction: sets of classes and intervals that miss a stated part of new rows (Vovk et al. 2005).

Scores s(x, y) of n calibration rows, which training has not seen, give the threshold t, the ⌈(n + 1)(1 − α)⌉-th
smallest of them; the set of a new row is {y: s(x, y) ≤ t}. Whatever the network, it contains the target with
probability 1 − α or more, if new rows and calibration rows are exchangeable; under shift it does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from credo.core.errors import CredoWarning, FewRowsWarning, unknown
from credo.core.held_out.conformal import (
    INTERVAL_KINDS,
    SET_KINDS,
    Conformal,
    ConformalIntervals,
    ConformalSets,
)
from credo.core.held_out.conformal_inputs import (
    as_tensor,
    both_classes,
    check_alpha,
    numbers,
    one_label,
    outputs_of,
    value_parts,
)
from credo.core.held_out.conformal_scores import quantile_scores, residual_scores, rows_needed, threshold
from credo.core.held_out.ledger import row_digests
from credo.core.held_out.risk_sets import RISK_KINDS
from credo.core.network.inputs import Forward, Target, read_batches
from credo.core.posterior import Posterior
from credo.core.support.keywords import checked_keywords
from credo.core.support.loader_checks import as_batches
from credo.core.support.user_warnings import warn
from credo.core.support.validate import is_count, is_number
from credo.evaluate.checks import check_labels, check_probs
from credo.evaluate.guarantees.raps import choose_penalty, rows_for_choice, rows_to_choose
from credo.evaluate.guarantees.risk import risk_sets
from credo.predict import (
    ClassPrediction,
    DenseClassPrediction,
    MultiLabelPrediction,
    Prediction,
    RegressionPrediction,
    predict,
)
from credo.predict.run import checked_predictive

_MOST_NAMED = 5
# Above this alpha, more targets are missed than covered: likely the coverage was meant.
_MOST_MISSED = 0.5


@checked_keywords()
def conformal(
    prediction: Any,
    y: Any = None,
    alpha: float = 0.1,
    kind: str | None = None,
    *,
    by_class: bool = False,
    randomised: bool = True,
    allow_empty: bool = False,
    penalty: float | None = None,
    k_reg: int | None = None,
    confidence: float | None = None,
    classes: int | Sequence[int] | None = None,
    ignore_index: int | None = None,
    draws: int = 32,
    seed: int = 0,
    shared_draws: bool = False,
    tolerance: float | None = None,
    predictive: str | None = None,
    link: str | None = None,
    forward: Forward | None = None,
    target: Target | None = None,
) -> Conformal:
    """Choose thresholds on calibration rows: `ConformalSets` of classes, `ConformalIntervals`, `RiskControlledSets`.

    With a posterior and batches, the result is also stored in `posterior.conformal`: files keep it, and `predict`
    applies it (`prediction.sets`, `prediction.lower`, `prediction.upper`), with a warning for fewer draws or another
    `predictive` or `link`. The rows are recorded in `posterior.ledger`, with a warning if they were used before. What
    is done to a posterior later (a step, `calibrate`) drops it.

    Args:
        prediction: A prediction of calibration rows (classes, values, several labels, classes at positions); plain
            arrays: probabilities [n, classes] (or [n] of a yes), means [n] or [n, outputs], (means, standard
            deviations), (lower, upper) quantiles, for `"fnr"` probabilities [n, labels] or [n, *positions, classes];
            or a posterior.
        y: Labels [n], or targets in the shape of the means or of the labels' probabilities, or classes
            [n, *positions]; None takes those of the prediction. For a posterior, batches of (inputs, targets).
        alpha: Probability that a set or interval misses the target; for `"fnr"` the part of its true labels.
        kind: Classes: `"lac"` (1 − p, the smallest sets on average, the default), `"aps"` (adapts to the difficulty
            of a row), `"raps"` (APS with a penalty on long sets). Regression: `"normalised"` (mean ± t·std, the
            default of predictions), `"split"` (mean ± t), `"cqr"` (given quantiles, moved by t). Several outputs are
            covered together. Several labels, and classes at positions: `"fnr"`, sets of all labels of probability t
            or more, t the largest that keeps the false-negative rate, the part of the true labels (or pixels) of a
            row that are not in its sets; rows without any do not count (conformal risk control). Of plain arrays it
            must be given, except for probabilities [n, classes].
        by_class: Guarantee every class by itself, from its own rows (Mondrian); for `"fnr"` every label.
        randomised: Count a random part u of a class's own probability in APS and RAPS, so that coverage is exact; u is
            a function of the row's probabilities. Otherwise sets are larger, and cover more than 1 − alpha.
        allow_empty: Let sets be empty, which makes coverage exact where alpha exceeds the error rate. Otherwise they
            contain at least the most probable class, and may cover more.
        penalty: λ of RAPS, added for every class of a row beyond the first `k_reg`, above 0. None: the one with the
            smallest sets on a third of the rows, which the threshold then does not use; 0, which is APS, if no penalty
            makes them smaller.
        k_reg: Number of classes that RAPS does not penalise. None: chosen on the same rows; 1 if they are too few and a
            penalty is given.
        confidence: For `"fnr"`: probability, over the choice of the calibration rows, that the mean rate of new rows
            is at most alpha, such as 0.95. None: that it is so on average over such choices.
        classes: For `"fnr"`: the label or labels, or classes of positions, that count; others are then in no set.
            None: all.
        ignore_index: For `"fnr"` of arrays: the label of positions that do not count, −100 by default; predictions
            know that of their likelihood.
        draws: Networks to average over, for a posterior.
        seed: Seed of these draws.
        shared_draws: Use the same draws for all batches, as in `predict`.
        tolerance: Of the Monte-Carlo error, as in `predict`.
        predictive: What is averaged, as in `predict`.
        link: How linear logits become probabilities, as in `predict`.
        forward: `forward(net, batch)` returns the network's outputs, as in `predict`.
        target: `target(batch)` returns the targets, as in `predict`.
    """
    if isinstance(prediction, Posterior) and not is_number(alpha):
        raise ValueError(f"alpha={alpha!r:.40} must be a number: give a posterior one argument, [(inputs, targets)].")
    alpha = check_alpha(alpha)
    risk: dict[str, Any] = {"confidence": confidence, "classes": classes, "ignore_index": ignore_index}
    if isinstance(prediction, Posterior):
        options: dict[str, Any] = {"by_class": by_class, "randomised": randomised, "allow_empty": allow_empty}
        options |= {"penalty": penalty, "k_reg": k_reg, **risk}
        y = as_batches(y)
        predicting: dict[str, Any] = {
            "draws": draws,
            "seed": seed,
            "shared_draws": shared_draws,
            "tolerance": tolerance,
        }
        predicting |= {"predictive": predictive, "link": link}
        return _of_posterior(prediction, read_batches(y, forward, target), alpha, kind, options, predicting)
    if alpha > _MOST_MISSED:
        warn(
            f"alpha={alpha:g} is the part of new targets that may be missed, so these sets or intervals cover about "
            f"{100 * (1 - alpha):.3g} % of them. To cover {100 * alpha:.3g} %, give alpha={1 - alpha:.3g}.",
            CredoWarning,
        )
    y = getattr(prediction, "targets", None) if y is None else y
    if y is None:
        raise ValueError("Conformal prediction needs targets: give y, or predict from batches of (inputs, targets).")
    kind = _checked_kind(prediction, y, kind)
    if kind != "raps" and (penalty is not None or k_reg is not None):
        raise ValueError(f"penalty and k_reg are for kind='raps'; kind={kind!r} has none.")
    if kind in RISK_KINDS:
        return risk_sets(prediction, y, alpha, by_class=by_class, **risk)
    if any(value is not None for value in risk.values()):
        raise ValueError(f"confidence, classes and ignore_index are for kind='fnr'; kind={kind!r} has none of them.")
    if kind in INTERVAL_KINDS:
        if by_class:
            raise ValueError(f"by_class=True is for classes; kind={kind!r} is an interval.")
        return _intervals(prediction, y, alpha, kind)
    probs, labels = _class_rows(prediction, y)
    shape = ConformalSets(
        kind, alpha, (0.0,), (0,), probs.shape[1], randomised=randomised and kind != "lac", allow_empty=allow_empty
    )
    groups = [(labels == label).nonzero()[:, 0] for label in range(probs.shape[1])]
    groups = groups if by_class else [torch.arange(len(labels))]
    if kind == "raps":
        shape, groups = _regularised(probs, labels, shape, groups, penalty, k_reg)
    return _sets(probs, labels, shape, groups)


def _of_posterior(
    posterior: Posterior,
    batches: Iterable[Any] | None,
    alpha: float,
    kind: str | None,
    options: dict[str, Any],
    predicting: dict[str, Any],
) -> Conformal:
    if batches is None:
        raise ValueError(
            "Conformal prediction with a posterior needs batches of (inputs, targets) that it has not seen."
        )
    if kind == "cqr":
        raise ValueError("kind='cqr' is for arrays of quantiles; a posterior has 'normalised' and 'split'.")
    batches = list(batches) if isinstance(batches, Iterator) else batches
    digests = row_digests(batches)
    predicting["predictive"] = checked_predictive(posterior, predicting["predictive"], predicting["link"])
    plain = posterior.frozen_copy()
    plain.conformal = None  # sets are of no use here
    prediction: Prediction = predict(plain, batches, **predicting)
    way = {name: predicting[name] for name in ("draws", "predictive", "link", "tolerance")}
    found = replace(conformal(prediction, None, alpha, kind, **options), **way)
    posterior.ledger.record("conformal", digests)
    if posterior.process_group is not None:  # rounding may differ between machines
        found = posterior.process_group.share(found)
    posterior.conformal = found
    return found


def _checked_kind(prediction: Any, y: Any, kind: str | None) -> str:
    """The kind that is meant; raises ValueError for one that does not fit the prediction."""
    possible = _possible_kinds(prediction)
    if kind is not None:
        if kind not in possible:
            raise ValueError(unknown("kind", str(kind), possible))
        return kind
    if isinstance(prediction, Prediction):
        return "normalised" if possible == INTERVAL_KINDS else possible[0]
    if not isinstance(prediction, tuple):
        targets = one_label(as_tensor(y))
        is_label = targets.dim() == 1 and not targets.is_floating_point()
        if is_label and as_tensor(prediction).dim() == 2:
            return "lac"
    raise ValueError(
        "Plain arrays may be many things: give kind='lac', 'aps' or 'raps' for probabilities, 'split' for means, "
        "'normalised' for (means, standard deviations), 'cqr' for (lower, upper) quantiles, 'fnr' for probabilities of "
        "several labels or of classes at positions."
    )


def _possible_kinds(prediction: Any) -> tuple[str, ...]:
    if isinstance(prediction, MultiLabelPrediction | DenseClassPrediction):
        return RISK_KINDS
    if isinstance(prediction, ClassPrediction):
        return SET_KINDS
    if isinstance(prediction, RegressionPrediction):
        return INTERVAL_KINDS
    if isinstance(prediction, Prediction):
        raise ValueError(
            f"There are no sets or intervals of a {type(prediction).__name__}: of quantiles pass the tuple (lower, "
            "upper) of two of them, with kind='cqr'."
        )
    return (*SET_KINDS, *INTERVAL_KINDS, *RISK_KINDS)


def _class_rows(prediction: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Probabilities [n, classes] and labels [n] of the calibration rows."""
    given = as_tensor(getattr(prediction, "probs", prediction)).cpu()
    probs = check_probs(both_classes(given))
    labels = one_label(as_tensor(y).cpu())
    # The probabilities as they are: `predict` does not clamp those of new rows.
    return both_classes(given), check_labels(labels, batch=len(probs), classes=probs.shape[1], device=probs.device)


def _regularised(
    probs: Tensor, labels: Tensor, shape: ConformalSets, groups: list[Tensor], penalty: float | None, k_reg: int | None
) -> tuple[ConformalSets, list[Tensor]]:
    """The sets with a penalty, and the rows of each threshold that have not chosen it."""
    if not ((penalty is None or is_number(penalty)) and (k_reg is None or is_count(k_reg, least=0))):
        raise ValueError(f"penalty={penalty!r:.40} must be a number and k_reg={k_reg!r:.40} a count of classes.")
    if penalty is not None and not penalty > 0:
        raise ValueError(
            f"kind='raps' with penalty={penalty} is APS: give a penalty above 0, None to choose one, or 'aps'."
        )
    if penalty is not None and k_reg is not None:
        return replace(shape, penalty=float(penalty), k_reg=int(k_reg)), groups
    choosing = rows_to_choose(groups, shape.alpha)
    if not len(choosing):
        given = shape if penalty is None else replace(shape, penalty=float(penalty), k_reg=1)
        instead = "these sets are those of APS" if penalty is None else "k_reg is 1"
        warn(
            f"{len(labels)} calibration rows are too few to choose what RAPS penalises for alpha={shape.alpha:g}, "
            f"which needs {rows_for_choice(shape.alpha)}: {instead}. Give more rows, or penalty and k_reg.",
            FewRowsWarning,
        )
        return given, groups
    chosen = choose_penalty(probs[choosing], labels[choosing], shape, penalty, k_reg)
    is_used = torch.ones(len(labels), dtype=torch.bool)
    is_used[choosing] = False
    return replace(chosen, chosen_on=len(choosing)), [group[is_used[group]] for group in groups]


def _sets(probs: Tensor, labels: Tensor, shape: ConformalSets, groups: list[Tensor]) -> ConformalSets:
    scores = shape.scores(probs).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    rows = tuple(len(group) for group in groups)
    _warn_of_few(rows, shape.alpha, "set is all classes" if len(groups) == 1 else "sets contain these classes always")
    return replace(shape, thresholds=tuple(threshold(scores[group], shape.alpha) for group in groups), rows=rows)


def _intervals(prediction: Any, y: Any, alpha: float, kind: str) -> ConformalIntervals:
    first, second = value_parts(prediction, kind)
    targets = numbers(y)
    if targets.numel() == first.numel() == len(first):  # [n] and [n, 1] are alike
        targets = targets.reshape(first.shape)
    if targets.shape != first.shape or not len(targets):
        raise ValueError(f"y has shape {list(targets.shape)}, predictions have {list(first.shape)}; make them alike.")
    parts = [part.reshape(len(targets), -1) for part in (targets, first, *(() if second is None else (second,)))]
    if not all(bool(part.isfinite().all()) for part in parts):
        raise ValueError("Predictions or targets of the calibration rows are NaN or infinite; leave these rows out.")
    scores = (quantile_scores if kind == "cqr" else residual_scores)(*parts)
    _warn_of_few((len(scores),), alpha, "intervals are infinite")
    found = threshold(scores, alpha)
    if kind == "normalised" and not math.isinf(found):
        missed = ((parts[2] == 0) & (parts[0] != parts[1])).any(1)
        if bool(missed[scores <= found].any()):
            raise ValueError(
                f"Standard deviations of {int(missed.sum())} of {len(targets)} calibration rows are 0, and their means "
                "are wrong: intervals in units of them would be infinite. Give kind='split'."
            )
    return ConformalIntervals(kind, alpha, (found,), (len(scores),), outputs_of(first))


def _warn_of_few(rows: tuple[int, ...], alpha: float, effect: str) -> None:
    needed = rows_needed(alpha)
    few = [index for index, count in enumerate(rows) if count < needed]
    if not few:
        return
    if len(rows) == 1:
        which = f"{rows[0]} calibration rows are"
    else:
        listed = ", ".join(map(str, few[:_MOST_NAMED])) + (" …" if len(few) > _MOST_NAMED else "")
        which = f"The calibration rows of {len(few)} of {len(rows)} classes ({listed}) are"
    warn(
        f"{which} too few for alpha={alpha:g}, which needs {needed}{' of each' if len(rows) > 1 else ''}: {effect}.",
        FewRowsWarning,
    )
