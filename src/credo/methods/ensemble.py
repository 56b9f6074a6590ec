"""Ensembles: several posteriors of one architecture as an equal mixture (Lakshminarayanan et al. 2017).

Deep ensembles when the members are `MAP`, mixtures of Gaussians when they are `BBB`. Every member sees every batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.description import Description
from credo.core.errors import NonFiniteError, UnsupportedModelError
from credo.core.example_counts import Counted
from credo.core.likelihood import GaussianNoise
from credo.core.network.inplace_inputs import same_inputs
from credo.core.posterior import Nll, Posterior, Terms
from credo.core.saved.posterior_tensors import checkpoint_files, load_checkpoint_


class Ensemble(Posterior):
    """Equal mixture of posteriors. Distributed, each member is trained by some of the processes.

    A draw is a complete set of weights and buffers (running statistics too) of one member, put into the first
    member's network.

    Args:
        members: Posteriors of one method and architecture, each with a network of its own. Ensembles of equal size are
            replaced by their members, which gives the same mixture.
    """

    averages_over_processes = True

    def __init__(self, members: Sequence[Posterior]) -> None:
        given = list(members)
        for member in given:
            if not isinstance(member, Posterior):
                raise ValueError(
                    f"An ensemble needs posteriors, such as credo.MAP(model, data_size=N) for each network; got a "
                    f"{type(member).__name__}."
                )
        members = _flattened(given)
        _check(members)
        first = members[0]
        super().__init__(first.model, data_size=first.data_size, likelihood=first.likelihood, seed=first.seed)
        self.members = nn.ModuleList(members)
        self._use(first)
        for posterior in given:
            self.ledger.add(posterior.ledger)

    @classmethod
    def from_checkpoints(cls, files: Path | str | Sequence[Path | str], build: Callable[[], Posterior]) -> Ensemble:
        """The states that one training went through as members: a snapshot ensemble (Huang et al. 2017).

        Members of one training differ less than those of several; a rate that rises again between the checkpoints (a
        cyclical schedule) moves them apart. With files of `credo.save`: `Ensemble([credo.load(path) for path in …])`.

        Args:
            files: A checkpoint of `fit(..., checkpoint=, keep=5)`, which stands for itself and the older ones beside
                it, a folder of checkpoints, or a list of files.
            build: `build()` returns a posterior like the one that was trained, each time with a new network.
        """
        paths = checkpoint_files(Path(files)) if isinstance(files, Path | str) else [Path(file) for file in files]
        members = [build() for _ in paths]
        for member, path in zip(members, paths, strict=True):
            load_checkpoint_(member, path)
        return cls(members).eval()

    @property
    def parts(self) -> list[Posterior]:
        """The members."""
        return list(self.members)  # type: ignore[arg-type]

    @property
    def default_predictive(self) -> str:  # type: ignore[override]
        """That of the members."""
        return self.parts[0].default_predictive

    @property
    def is_random(self) -> bool:
        """Whether any member is random."""
        return any(part.is_random for part in self.parts)

    @property
    def uncertainty_needs(self) -> str:
        """Members that differ, unless they do or have noise of their own; what parts need is their own."""
        if self.is_random or not _are_equal(self.parts):
            return ""
        return (
            f"members that differ: all {len(self.parts)} have the same weights, and the same batches leave them alike. "
            "Build each network after torch.manual_seed of another number"
        )

    def draw(self) -> dict[str, Tensor]:
        """One member's draw, the member chosen at random."""
        index = int(torch.randint(len(self.parts), (), generator=self.generator, device=self.device))
        return self._filled(index, self.parts[index].draw())

    def iter_draws(self, count: int) -> Iterator[dict[str, Tensor]]:
        """Draws of the members in turn, so that as many as there are members give the classical ensemble.

        A member that is a mixture goes through its own components.

        Args:
            count: Number of draws.
        """
        members = len(self.parts)
        sources = [part.iter_draws(-(-count // members)) for part in self.parts]
        for index in range(count):
            yield self._filled(index % members, next(sources[index % members]))

    def whole_draws(self, wanted: int) -> int:
        """At least `wanted` draws, equally many from every member and every component of a member."""
        count = len(self.parts)
        if not self.is_random:
            return count
        count *= math.lcm(*(part.whole_draws(1) for part in self.parts))
        return -(-wanted // count) * count

    def activation_noise(self) -> AbstractContextManager[None]:
        """The members' activation noise, of the same kind for all."""
        return self.parts[0].activation_noise()

    def lr_factor(self, step: int) -> float:
        """That of the first member in a `step`; the members have their own."""
        first = self.parts[0]
        first.lr_scale = self.lr_scale
        return first.lr_factor(step)

    def reseed_(self, seed: int) -> None:
        """Restart the random numbers of the ensemble and of each member."""
        super().reseed_(seed)
        for index, part in enumerate(self.parts):
            part.reseed_(seed + 1 + index)

    def step(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> Terms:
        """Make every member's step on this batch, or none if one fails; returns averages.

        `nll`, `examples` and `weights` are as in `Posterior.step`.
        """
        with self.prepared(nll, examples=examples, weights=weights) as update:
            return update()

    @contextmanager
    def prepared(
        self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None
    ) -> Iterator[Callable[[], Terms]]:
        """Prepare every member's step, with `nll`, `examples` and `weights` as in `step`.

        Until the update, the gradients of all members are in memory.
        """
        with self.process_group.watched() if self.process_group is not None else nullcontext(), ExitStack() as stack:
            updates, given = [], Counted(examples, weights).given()
            nll = same_inputs(nll)
            failed: dict[int, NonFiniteError] = {}
            for index in self._own():
                part = self.parts[index]
                part.lr_scale = self.lr_scale
                try:
                    updates.append(stack.enter_context(part.prepared(nll, **given)))
                except NonFiniteError as error:
                    failed[index] = error
                    break
            self._agree(failed)
            yield partial(self._update, updates)

    def _own(self) -> Sequence[int]:
        """Indices of the members that this process trains."""
        members = None if self.process_group is None else self.process_group.members
        return range(len(self.parts)) if members is None else members.own

    def _agree(self, failed: Mapping[int, NonFiniteError]) -> None:
        """Raise NonFiniteError in all processes if a member's step failed in one of them."""
        if self.process_group is None or not self.process_group.defers:
            for error in failed.values():
                raise error
            return
        flags = self.process_group.average_([], [float(index in failed) for index in range(len(self.parts))])
        bad = next((index for index, flag in enumerate(flags) if flag), None)
        if bad is not None:
            raise NonFiniteError(
                f"The loss, gradient or step of member {bad} is not finite at step {self.steps}; no member has "
                "changed. Try a smaller lr, or check the inputs of this batch."
            ) from failed.get(bad)

    def _update(self, updates: Sequence[Callable[[], Terms]]) -> Terms:
        terms = self._together(updates)
        self.steps += 1
        has_kl = all(t.kl is not None for t in terms)
        sums = [sum(t.loss for t in terms), sum(t.nll for t in terms), sum(t.penalty for t in terms)]
        sums.append(sum(t.kl or 0.0 for t in terms))
        count = float(len(terms))
        if self.process_group is not None and self.process_group.defers:
            *sums, count = self.process_group.average_([], [*sums, count])
        loss, nll, penalty, kl = (value / count for value in sums)
        return Terms(loss=loss, nll=nll, penalty=penalty, kl=kl if has_kl else None)

    def _together(self, updates: Sequence[Callable[[], Terms]]) -> list[Terms]:
        """Update the members of this process; an error here leaves the processes apart, so the group is closed."""
        try:
            return [update() for update in updates]
        except NonFiniteError as error:
            if self.process_group is not None and self.process_group.defers:
                self.process_group.close(
                    f"Process {self.process_group.rank} left the process group when the update of a member failed "
                    f"({error}). "
                    "Start all processes again from the last checkpoint."
                )
            raise

    def config(self) -> dict[str, Any]:
        """Empty: saving adds the members' descriptions."""
        return {}

    def describe(self) -> Description:
        """What members have in common; they are described one by one as `parts`."""
        members = [part.describe() for part in self.parts]
        return Description(
            has_prior=any(one.has_prior for one in members), spread_count=sum(one.spread_count for one in members)
        )

    def _filled(self, index: int, draw: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A member's draw with the rest of its network."""
        model = self.parts[index].model
        return {**dict(model.named_parameters()), **dict(model.named_buffers()), **draw}


def _flattened(members: Sequence[Posterior]) -> list[Posterior]:
    """Replace ensembles by their members; raises UnsupportedModelError if these would not be equally probable."""
    sizes = sorted({len(member.parts) for member in members})
    if len(sizes) > 1:
        raise UnsupportedModelError(
            f"Members that are ensembles of {' and '.join(map(str, sizes))} networks: those of the larger would count "
            "less each. Give all networks in one list, Ensemble([*first.parts, *second.parts]), to count them equally."
        )
    return [part for member in members for part in member.parts]


def _check(members: Sequence[Posterior]) -> None:
    if not members:
        raise ValueError("An ensemble needs at least one member.")
    if len({id(m.model) for m in members}) < len(members):
        raise ValueError("Members share one network: build a new one for each, so that it has weights of its own.")
    shapes = [{n: t.shape for n, t in m.model.state_dict().items()} for m in members]
    if any(shape != shapes[0] for shape in shapes):
        raise UnsupportedModelError("Members must have the same architecture: parameter names or shapes differ.")
    likelihoods = [m.likelihood for m in members]
    kinds = {(type(one), isinstance(one, GaussianNoise) and one.heteroscedastic) for one in likelihoods}
    if len(kinds) > 1:
        raise UnsupportedModelError("Members must have the same kind of likelihood (their noise may differ).")
    learned = [id(m.likelihood) for m in members if any(p.requires_grad for p in m.likelihood.parameters())]
    if len(set(learned)) < len(learned):
        raise ValueError("Members share one likelihood that learns its noise: give each its own.")
    if len({type(m) for m in members}) > 1:
        raise UnsupportedModelError(
            f"Members must be of one method, got {sorted({type(m).__name__ for m in members})}."
        )


def _are_equal(members: Sequence[Posterior]) -> bool:
    """Whether all members are one and the same network."""
    first, *others = (dict(member.model.named_parameters()) for member in members)
    return bool(others) and all(torch.equal(p, other[name]) for other in others for name, p in first.items())
