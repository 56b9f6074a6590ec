"""`auto`: the best uncertainty for a network, data and a budget, chosen by measurement, with the evidence."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from credo.core.distributed.wrapped_networks import process_count
from credo.core.errors import unknown
from credo.core.held_out.ledger import row_digests
from credo.core.likelihood import Likelihood
from credo.core.likelihood.end_of_network import warn_of_last_function
from credo.core.network.inputs import Forward, Target
from credo.core.posterior import Posterior
from credo.core.support.files import finite, write_json
from credo.core.support.keywords import checked_keywords
from credo.core.support.progress import make_progress
from credo.core.support.validate import checked_count, checked_seed, is_number
from credo.methods import MAP
from credo.training.epoch_batches import seeded_epoch
from credo.tuning.budget import DEFAULT_STEPS, DEFAULT_TIME, Budget, seconds_of
from credo.tuning.jobs import HALF, Job
from credo.tuning.nonfinite import check_finite, rows_named
from credo.tuning.portfolio import PLAIN, TRAINED, UNTRAINED, Candidate
from credo.tuning.race import Constraints, Race
from credo.tuning.rows import Rows, count_rows, given_rows, held_out, read_inputs, read_rows
from credo.tuning.scoring import Scoring, calibrated_by
from credo.tuning.starts import NetworkOrFactory, Starts, likelihood_of, outputs_of
from credo.tuning.table import evidence_of
from credo.tuning.trials import Trials, agreed, search_file

GOALS = ("nll",)
DRAWS = 32
# Rows of the training data that the noise of a trained regression network is taken from.
_RESIDUAL_ROWS = 5000

OnTrial = Callable[[str], None]


@checked_keywords()
def auto(
    model: NetworkOrFactory,
    train: Any,
    validation: Iterable[Any] | None = None,
    *,
    ood: Any = None,
    budget: str | float | None = None,
    passes: float | None = None,
    trained: bool = False,
    goals: Sequence[str] = GOALS,
    latency: int | None = None,
    memory: float | None = None,
    likelihood: Likelihood | Mapping[str, Any] | str | None = None,
    run: Path | str | None = None,
    seed: int = 0,
    forward: Forward | None = None,
    target: Target | None = None,
    progress: bool = True,
    on_trial: OnTrial | None = None,
) -> Posterior:
    """Try what is possible within a budget, and return the best posterior on held-out rows, calibrated.

    The plain network with calibration is always a candidate, and is what is returned unless another has a lower NLL on
    the held-out rows by at least 0.001 nats. Where it is trained already, or the other is measured halfway through its
    training, before held-out rows return to it, the gain must be beyond noise, too, row by row (the 80 % interval of
    the difference). `posterior.evidence` is the table of all that was tried;
    `print(posterior.evidence)`. The choice holds for data like the held-out rows, not for inputs from elsewhere.

    Args:
        model: The network, or a function without arguments that makes one. Ensembles need several initial weights:
            those of the function, or of layers that all have `reset_parameters`. A network that is given is not
            changed.
        train: Training batches with a length (a DataLoader, `credo.data.Batches`, a list), or a data set.
        validation: Batches of held-out rows, or a data set of them, read once. None: a tenth of the training rows (of
            fewer than 1,000 rows 100, but at most a fifth) is held out, which a trained network has seen: there it is
            needed. Of 150 rows or more a third decides nothing and is reported on. Rows that `auto` held out and that
            chose are trained on in the end, those of `validation` are not.
        ood: Out-of-distribution inputs: a tensor, batches, or a data set; targets are not looked at. The table then has
            the AUROC of telling them from held-out rows by the total uncertainty. They choose nothing.
        budget: Wall time, such as "90s", "10min" or "2h". Trainings are planned from the time of a few steps, and the
            clock is checked after each epoch. None, and no `passes`: 10,000 steps, but at most ten minutes.
        passes: The budget as a number of passes over the training rows, forward and backward, instead: that of all
            trainings together, as epochs of a plain one. The same seed then gives the same choice. Predictions of
            held-out rows are not counted.
        trained: Whether the network has its trained weights: they are then only fine-tuned, if at all.
        goals: What the choice is made by; only `("nll",)`.
        latency: Most networks that may run for one input; 1 allows a single pass only. Methods with draws average over
            this many, and are left out below 4.
        memory: Most memory of the weights: a whole number of bytes, or a float, as a multiple of the plain network's.
        likelihood: What the outputs mean; None: Gaussian with a learned noise for targets that are floats, else
            categorical.
        run: Folder for what is finished; the same call resumes there. Needed under `torchrun`, where processes share
            the candidates.
        seed: Seed of everything.
        forward: `forward(net, batch)` returns the network's outputs, as in `credo.fit`.
        target: `target(batch)` returns the targets of a batch, as in `credo.fit`.
        progress: Show a progress bar with the passes and the time that are left; only on an interactive terminal.
        on_trial: Called with a line of text before it starts, which says what it takes, and before each training: what
            is tried, and what leads.
    """
    start = time.monotonic()
    _check(model, goals, latency, memory, (budget, passes), run)
    seed, is_open = checked_seed(seed), budget is None and passes is None
    seconds = None if passes is not None else seconds_of(DEFAULT_TIME if budget is None else budget)
    starts = Starts(model, seed, trained)
    with seeded_epoch(train, seed, 0, torch.device("cpu")):  # data sets may shuffle, or draw
        rows = _rows(train, validation, trained, seed, forward, target)
        loader, selection, report, outside = rows.loader, rows.selection, rows.report, read_inputs(ood, forward)
        data_size = _data_size(loader, forward, target)
        some, network = _some_rows(loader, forward, target), starts.network()
        check_finite([*selection, *report, *some], network, train, validation)
        made = likelihood_of(likelihood, starts, some)
    outputs = outputs_of(network, selection[:1])[0]
    warn_of_last_function(made(), network, outputs)  # the trainings' own warnings are not shown
    constraints = Constraints(latency, _bytes(memory, starts))
    with _folder(run) as folder:
        trials = Trials(
            starts,
            loader,
            rows.whole,
            data_size,
            outputs[0].numel(),
            made,
            Scoring(selection, outside, DRAWS if latency is None else min(DRAWS, latency), seed),
            seed,
            folder,
            Budget(passes or 0.0, seconds, start=start, most=DEFAULT_STEPS / len(loader) if is_open else math.inf),
            forward,
            target,
        )
        if seconds is not None:
            trials.budget.passes = agreed(_passes_in(trials, seconds))
        settings = {"seed": seed, "passes": passes, "budget": None if is_open else seconds}
        settings |= {"trained": trained, "rows": data_size}
        settings |= {"latency": latency, "memory": memory, "selection": _digest(selection), "ood": _digest(outside)}
        search_file(folder, settings)
        with _shown(progress, on_trial, trials) as on_job, rows_named(train, validation):
            race = Race(trials, constraints, on_job)
            chosen = race.run(TRAINED if trained else UNTRAINED)
            last = race.returned(chosen)
        went_on = chosen.stage == HALF and last != chosen
        posterior = calibrated_by(trials.posterior(last), race.results[chosen], went_on=went_on)
        evidence = evidence_of(race, chosen, last, posterior, report)
        posterior.evidence = replace(evidence, seconds=time.monotonic() - start)
        write_json(folder / "evidence.json", finite(posterior.evidence.to_dict()))
    posterior.ledger.record("calibration", selection)
    posterior.ledger.record("selection", selection)
    if last != chosen:
        posterior.ledger.record("training", selection)
    if report:
        posterior.ledger.record("report", report)
    return posterior.eval()


def _check(
    model: Any, goals: Sequence[str], latency: Any, memory: Any, budgets: tuple[Any, Any], run: Path | str | None
) -> None:
    budget, passes = budgets
    if isinstance(model, Posterior) or not (isinstance(model, torch.nn.Module) or callable(model)):
        raise ValueError(f"auto needs a network or a function that makes one, got a {type(model).__name__}.")
    if isinstance(goals, str) or not goals:
        raise ValueError(f"goals={goals!r} must be a sequence of names, such as ('nll',).")
    for goal in goals:
        if goal not in GOALS:
            raise ValueError(f"{unknown('goal', str(goal), GOALS)} Other scores are in posterior.evidence.")
    if latency is not None:
        checked_count("latency", latency, what="networks")
    if memory is not None and not (is_number(memory) and memory > 0):
        raise ValueError(f"memory={memory!r} must be a number of bytes, or a float: a multiple of the plain network.")
    if passes is not None and not (is_number(passes) and 0 < passes < float("inf")):
        raise ValueError(f"passes={passes!r} must be a positive number of passes over the training rows.")
    if passes is not None and budget is not None:
        raise ValueError(f"budget={budget!r} and passes={passes!r} are two budgets: give one of them.")
    if run is None and process_count() > 1:
        raise ValueError("Several processes share their candidates in a folder that all of them see: give run=.")


def _rows(
    train: Any, validation: Any, trained: bool, seed: int, forward: Forward | None, target: Target | None
) -> Rows:
    if validation is not None:
        return given_rows(train, validation, seed, forward, target)
    if trained:
        raise ValueError(
            "trained=True needs validation=, batches of rows that the network was not trained on: held out of train, "
            "they would have been."
        )
    return held_out(train, seed, forward, target)


def _data_size(loader: Any, forward: Forward | None, target: Target | None) -> int:
    """Number of training rows; batches are read once where they do not know it."""
    known = getattr(loader, "data_size", None)
    if known is None and not getattr(loader, "drop_last", False) and hasattr(loader, "dataset"):
        known = len(loader.dataset)
    return int(known) if known is not None else count_rows(read_rows(loader, forward, target))


def _some_rows(loader: Any, forward: Forward | None, target: Target | None) -> Any:
    found: list[Any] = []
    for batch in loader:
        found += read_rows([batch], forward, target)
        if count_rows(found) >= _RESIDUAL_ROWS:
            break
    return found


def _digest(batches: list[Any]) -> int | None:
    return int(row_digests(batches).astype("uint64").sum()) if batches else None


def _bytes(memory: float | None, starts: Starts) -> float | None:
    if memory is None or isinstance(memory, int):
        return memory
    net = starts.network()
    return memory * sum(t.numel() * t.element_size() for t in [*net.parameters(), *net.buffers()])


def _passes_in(trials: Trials, seconds: float) -> float:
    """Epochs of plain training that the time has room for, by the time of a few steps."""
    epoch = trials.epoch_seconds(Candidate(PLAIN, MAP))
    passes = 0.8 * trials.budget.seconds_left / epoch  # the rest is for held-out rows
    if passes < 1:
        raise ValueError(
            f"budget: an epoch takes about {epoch:.3g} s, which does not fit into {seconds:.3g} s. Give a larger one: "
            f"with budget={math.ceil(20 * epoch)}, in seconds, there is time for more than ten; or give passes=."
        )
    return min(trials.budget.most, passes)


@contextmanager
def _folder(run: Path | str | None) -> Iterator[Path]:
    if run is not None:
        yield Path(run)
        return
    with tempfile.TemporaryDirectory(prefix="credo-auto-") as name:
        yield Path(name)


@contextmanager
def _shown(progress: bool, on_trial: OnTrial | None, trials: Trials) -> Iterator[Callable[[Job, str | None], None]]:
    """A bar over the passes of the budget, with what is tried and what leads, where it can be seen."""
    bar, budget = make_progress(), trials.budget
    bar.disable = bar.disable or not progress
    say = on_trial or (lambda _: None)
    say(_plan(budget))
    with bar:
        task = bar.add_task("choosing", total=budget.passes, text=_plan(budget))

        def on_job(job: Job, leader: str | None) -> None:
            text = f"{job.name}, {job.epochs} epochs" if job.candidate.trains else job.name
            text += f"; {leader} leads" if leader else ""
            bar.update(task, text=text, total=budget.passes, completed=budget.spent)
            say(text)

        trials.on_epoch = lambda passes: bar.update(task, completed=budget.spent + passes)
        yield on_job


def _plan(budget: Budget) -> str:
    """What it takes, before it starts."""
    planned = f"{budget.passes:.4g} passes over the training rows"
    if budget.seconds is None:
        return planned
    if budget.passes < budget.most:
        return f"{budget.seconds:.4g} s, about {planned}"
    return f"{planned}, {DEFAULT_STEPS:,} steps, since no budget is given; at most {DEFAULT_TIME}"
