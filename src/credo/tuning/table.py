"""The evidence of `auto`: a row for each candidate, from the results of the race and the rows that decided nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from credo.core.held_out.evidence import AutoEvidence, Tried
from credo.core.posterior import Posterior
from credo.evaluate.intervals import bootstrap
from credo.tuning.jobs import HALF, Entry, Job
from credo.tuning.portfolio import PLAIN
from credo.tuning.race import Race, losses_of
from credo.tuning.rows import Pairs, count_rows
from credo.tuning.rules import DROP_LEVEL, cross_fitted, difference
from credo.tuning.scoring import calibrated_by

_ORDER = ("chosen", "kept", "dropped", "not possible", "left out")


def evidence_of(race: Race, chosen: Job, last: Job, posterior: Posterior, report: Pairs) -> AutoEvidence:
    """The table behind a choice, without the time that it took.

    Args:
        race: After its rounds.
        chosen: What was chosen.
        last: The job that ended its training.
        posterior: Its posterior, calibrated.
        report: Rows that decided nothing.
    """
    plain, alive, scoring = race.plain(), race.alive(), race.trials.scoring
    rows = [_row(race, job, race.results[job], plain, chosen) for job in race.results if _is_shown(race, job, chosen)]
    names = {row.name for row in rows}
    rows += [Tried(name, state, why) for name, (state, why) in race.out.items() if name not in names]
    reports: dict[str, dict[str, Any]] = {}
    if report:
        reports[chosen.name] = scoring.report(posterior, report)
        if plain is not None and chosen != plain and chosen.name != PLAIN:
            other = calibrated_by(race.trials.posterior(plain), race.results[plain])
            reports[PLAIN] = scoring.report(other, report)
    rows = [_with_report(row, reports) for row in rows]
    if last != chosen:
        rows = [_lengthened(race, row, last) if row.state == "chosen" else row for row in rows]
    rows.sort(key=lambda row: (_ORDER.index(row.state), row.nll is None, row.nll))
    losses = {job.key: losses_of(entry) for job, entry in alive.items()}
    fitted = cross_fitted(losses, race.rule, race.trials.seed)
    ends = bootstrap(fitted, level=DROP_LEVEL)
    return AutoEvidence(
        statement=_statement(race, chosen, plain) + _below_constant(race, chosen, posterior),
        chosen=chosen.name,
        rows=tuple(rows),
        train_rows=race.trials.data_size,
        selection_rows=count_rows(scoring.selection),
        report_rows=count_rows(report),
        given_back_rows=count_rows(scoring.selection) if last != chosen else 0,
        cross_fitted_nll=(ends.value, ends.low, ends.high),
        passes=race.trials.budget.spent,
        seconds=0.0,
    )


def _is_shown(race: Race, job: Job, chosen: Job) -> bool:
    """One row for each name: what was chosen, or its best length."""
    if job.name == chosen.name:
        return job == chosen
    own = {other: entry.nll for other, entry in race.results.items() if other.name == job.name}
    return job == min(own, key=lambda other: own[other])


def _row(race: Race, job: Job, entry: Entry, plain: Job | None, chosen: Job) -> Tried:
    trials, losses = race.trials, losses_of(entry)
    ends = bootstrap(losses, level=DROP_LEVEL)
    against = None if plain is None or job == plain else difference(losses, losses_of(race.results[plain]))
    state, reason = race.out.get(job.name, ("chosen" if job == chosen else "kept", ""))
    each = job.candidate.cost_of_pass(trials.outputs)
    return Tried(
        name=job.name,
        state=state,
        reason=reason,
        epochs=entry.epochs,
        nll=ends.value,
        interval=(ends.low, ends.high),
        difference=None if against is None else (against.value, against.low, against.high),
        scores=entry.scores,
        train_passes=each * (job.members * entry.epochs if job.candidate.trains else 1),
        prediction_passes=job.candidate.networks(trials.outputs, trials.scoring.draws, job.members),
        bytes=entry.bytes,
    )


def _lengthened(race: Race, row: Tried, last: Job) -> Tried:
    """The row of a choice that was measured before its held-out rows were given back."""
    entry = race.trials.done(last)
    epochs = last.epochs if entry is None else entry.epochs
    when = f"after {row.epochs} of {epochs} epochs, before" if row.epochs < epochs else "before"
    reason = f"measured {when} it was trained on all rows"
    return replace(row, epochs=epochs, train_passes=row.train_passes * epochs / row.epochs, reason=reason)


def _with_report(row: Tried, reports: dict[str, dict[str, Any]]) -> Tried:
    return replace(row, report=reports[row.name]) if row.name in reports else row


def _statement(race: Race, chosen: Job, plain: Job | None) -> str:
    if plain is None:
        return f"{chosen.name} was chosen; the plain network could not be scored."
    if chosen == plain or chosen.name == PLAIN:
        return "Nothing beat your plain network with temperature scaling: that is what is returned."
    found = difference(losses_of(race.results[chosen]), losses_of(race.results[plain]))
    network = "your plain network with calibration" + _trained_for(plain)
    when = ", halfway through its training," if chosen.stage == HALF else ""
    return (
        f"{chosen.name} was chosen: its NLL is{when} lower than that of {network} by {-found.value:.4f} nats "
        f"(90 % interval {-found.high:.4f} to {-found.low:.4f})."
    )


def _trained_for(plain: Job) -> str:
    """How long the plain network was trained: the others may have had more of the budget."""
    return f", trained for {plain.epochs} epoch{'s' if plain.epochs != 1 else ''}," if plain.epochs else ""


def _below_constant(race: Race, chosen: Job, posterior: Posterior) -> str:
    """A sentence if the choice predicts no better than a constant; else nothing."""
    constant, losses = race.trials.scoring.constant(posterior), losses_of(race.results[chosen])
    if constant is None or float(losses.mean()) < constant:
        return ""
    return (
        f" But it is no better than a constant prediction (NLL {float(losses.mean()):.4f}, a constant {constant:.4f}): "
        "scale inputs and targets to mean 0 and standard deviation 1, or give a larger budget."
    )
