"""`OodDetector`: out-of-distribution scores of a posterior's logits and features, averaged over its draws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from credo.core.errors import CredoError
from credo.core.likelihood import ClassLikelihood
from credo.core.likelihood.end_of_network import warn_of_last_function, warn_of_normalised_logits
from credo.core.network.inputs import AnyInputs, Forward, Target, read_batches
from credo.core.posterior import Posterior
from credo.core.support.validate import checked_count, checked_seed
from credo.detection.files import read_fitted, write_fitted
from credo.detection.kinds import (
    FEATURE_SCORES,
    LOGIT_SCORES,
    OF_FEATURES_ALONE,
    checked_names,
    fit_scores,
)
from credo.detection.networks import Networks
from credo.detection.passes import Pass, class_logits, with_head
from credo.detection.sample import Sample
from credo.detection.scores import FittedScore, Mahalanobis, Training
from credo.methods.training_pass import shown
from credo.predict.run import batches_of, check_posterior

_Batches = Tensor | Mapping[str, Any] | Iterable[Any]


class OodDetector:
    """Detects out-of-distribution inputs: `OodDetector(posterior, "knn").fit(loader)(x)` gives scores [n].

    A larger score means more unusual. A score of features compares with the training data, to which it is fitted once
    for every drawn network: features of one network mean nothing to another. So draws are fixed, by `seed`, and inputs
    of all calls are scored by the same networks. It works from any number of threads, on a copy of the posterior as
    it is now (on itself if it cannot be copied: fit again after training it). Of a
    calibration only the noise scale matters.

    Args:
        posterior: Any posterior; a regression only has `"knn"`.
        score: A name in `DETECTOR_SCORES`, `"all"`, or several names, of which `scores` gives all in one pass.
        draws: Networks to average over. A mixture takes equally many of every member, rounded up; a point estimate is
            one network. 0: the mean network, one of every member.
        layer: Name of the layer whose *inputs* are the features; None: the last `nn.Linear` that runs. Images
            [batch, channels, height, width] are averaged over positions.
        examples: Most training examples to keep features of, a random choice of all. `"knn"` keeps
            draws · examples · features numbers.
        k: Which neighbour counts for `"knn"`; None: the 50th (Sun et al. 2022), of fewer than 1,000 training examples
            the one after a twentieth of them.
        directions: Principal directions of `"vim"`; None: one half of the features, from 768 features on 512, from
            2048 on 1000.
        seed: Seed of the draws and of the choice of examples.
        forward: `forward(net, batch)` returns the network's outputs; None: by the form of the batch, as in `predict`.
        target: `target(batch)` returns the labels of training batches; None: by the form of the batch.
    """

    def __init__(
        self,
        posterior: Posterior,
        score: str | Sequence[str] = "knn",
        *,
        draws: int = 8,
        layer: str | None = None,
        examples: int = 10_000,
        k: int | None = None,
        directions: int | None = None,
        seed: int = 0,
        forward: Forward | None = None,
        target: Target | None = None,
    ) -> None:
        check_posterior(posterior)
        self.names = checked_names(score, posterior.likelihood)
        self.draws = 0 if draws == 0 else checked_count("draws", draws)
        self.examples = checked_count("examples", examples)
        self.k = None if k is None else checked_count("k", k)
        self.directions = None if directions is None else checked_count("directions", directions)
        self.layer, self.seed = layer, checked_seed(seed)
        self._forward, self._target = forward, target
        self._networks = Networks(posterior, self.draws, self.seed)
        self._fitted: list[dict[str, FittedScore]] | None = None  # by network and name

    @property
    def needs_fit(self) -> bool:
        """Whether a score is one of features, so that `fit` must be called first."""
        return any(name in FEATURE_SCORES for name in self.names)

    @property
    def _uses_logits(self) -> bool:
        return any(name in LOGIT_SCORES or name == "vim" for name in self.names)

    @torch.no_grad()
    def fit(self, loader: Tensor | Iterable[Any], *, progress: bool = True) -> Self:
        """Fit the scores to the features of training examples, those of every network; returns itself.

        Args:
            loader: The training batches: (inputs, labels), for `"knn"` and `"vim"` also inputs alone, or one tensor of
                them, which is split into batches. Two tensors, (inputs, labels), are one batch.
            progress: Show a progress bar; only on an interactive terminal.
        """
        if not self.needs_fit:
            return self
        if isinstance(loader, Tensor):
            loader = loader.split(1024)
        elif isinstance(loader, tuple) and len(loader) == 2 and all(isinstance(part, Tensor) for part in loader):
            loader = [loader]
        sample = Sample(self.examples, self.seed)
        heads: list[tuple[Tensor | None, Tensor | None]] = []
        with shown(loader, progress=progress, what="features") as batches:
            for x, y in batches_of(read_batches(batches, self._forward, self._target), 1024):
                rows = sample.wanted(len(x))
                if len(rows):
                    if not heads:
                        self.layer = self._networks.layer(x, self.layer)
                    labels = self._labels(y, len(x))[rows]
                    passes = self._networks.passes(x[rows], self.layer)
                    sample.add([labels.cpu(), *(t for each in passes for t in _columns(each))])
                    heads = heads or [(each.weight, each.bias) for each in passes]
        if not heads:
            raise ValueError("The loader is empty: there are no features to fit to.")
        labels, *columns = sample.columns()
        likelihood = self._networks.likelihood
        pairs = zip(columns[::2], columns[1::2], heads, strict=True)
        trainings = [with_head(Training(f, class_logits(o, likelihood), labels), h, likelihood) for f, o, h in pairs]
        names = [name for name in self.names if name in FEATURE_SCORES]
        self._fitted = fit_scores(names, trainings, k=self.k, directions=self.directions)
        return self

    def _labels(self, y: Tensor | None, rows: int) -> Tensor:
        if y is not None and isinstance(self._networks.likelihood, ClassLikelihood):
            return y.reshape(rows, -1)[:, 0].long()
        wanting = [name for name in self.names if FEATURE_SCORES.get(name) is Mahalanobis]
        if wanting:
            raise ValueError(f"{' and '.join(wanting)} need labels: give a loader of (inputs, labels), or target=.")
        return torch.zeros(rows, dtype=torch.long)

    def __call__(self, inputs: _Batches, *, batch_size: int = 1024) -> Tensor:
        """Scores [n] of a tensor of inputs, or of an iterable of batches; larger means more unusual.

        Args:
            inputs: A tensor, which is split into batches, or an iterable of batches of any form, whose targets are not
                used.
            batch_size: Rows per batch when `inputs` is a tensor.
        """
        if len(self.names) > 1:
            raise ValueError(f"This detector has several scores, {', '.join(self.names)}: call scores(inputs).")
        return self.scores(inputs, batch_size=batch_size)[self.names[0]]

    def scores(self, inputs: _Batches, *, batch_size: int = 1024) -> dict[str, Tensor]:
        """The same for all scores, by name, from one pass of every network.

        Args:
            inputs: A tensor, which is split into batches, or an iterable of batches.
            batch_size: Rows per batch when `inputs` is a tensor.
        """
        found = self.each(inputs, batch_size=batch_size)
        return {name: by_network.mean(0) for name, by_network in found.items()}

    @torch.no_grad()
    def each(self, inputs: _Batches, *, batch_size: int = 1024) -> dict[str, Tensor]:
        """Scores [networks, n] of every network by itself, by name: their spread tells how far draws disagree.

        Args:
            inputs: A tensor, which is split into batches, or an iterable of batches.
            batch_size: Rows per batch when `inputs` is a tensor.
        """
        if self.needs_fit and self._fitted is None:
            raise CredoError(f"{', '.join(self.names)}: call fit(loader) with the training data first.")
        parts: dict[str, list[Tensor]] = {name: [] for name in self.names}
        for x, _ in batches_of(read_batches(inputs, self._forward), checked_count("batch_size", batch_size)):
            found = self._scored(x)
            for name, column in parts.items():
                column.append(torch.stack([scores[name] for scores in found]))
        if not all(parts.values()):
            raise ValueError("There are no inputs to score.")
        return {name: torch.cat(column, 1) for name, column in parts.items()}

    def _scored(self, x: AnyInputs) -> list[dict[str, Tensor]]:
        """All scores of one batch by every network; rows that are not finite have an infinite score."""
        scored: list[dict[str, Tensor]] = []
        first: Pass | None = None
        for number, found in enumerate(self._networks.passes(x, self.layer if self.needs_fit else None)):
            first = found if first is None else first
            logits = class_logits(found.outputs, self._networks.likelihood)
            values = [t.reshape(len(t), -1) for t in (found.features, found.outputs) if t is not None]
            finite = torch.cat([each.isfinite() for each in values], 1).all(-1)
            if logits is not None and not number and self._uses_logits:
                warn_of_last_function(self._networks.likelihood, self._networks.posterior.model, logits)
                warn_of_normalised_logits(self._networks.likelihood, logits)
            scores = {}
            for name in self.names:
                if number and name in OF_FEATURES_ALONE and found.features is first.features:
                    scores[name] = scored[0][name]
                else:
                    scores[name] = self._score(name, number, found.features, logits).where(finite, torch.inf)
            scored.append(scores)
        return scored

    def _score(self, name: str, number: int, features: Tensor | None, logits: Tensor | None) -> Tensor:
        if name in LOGIT_SCORES:
            assert logits is not None
            return LOGIT_SCORES[name](logits)
        assert self._fitted is not None
        assert features is not None
        return self._fitted[number][name](features, logits)

    def save(self, path: Path | str) -> Path:
        """Write what was fitted, without the posterior, as safetensors; returns the path.

        Args:
            path: The file to write; an old one is replaced when the new one is complete.
        """
        if self._fitted is None and self.needs_fit:
            raise CredoError("There is nothing to save: call fit(loader) first.")
        keys = ("names", "draws", "layer", "examples", "k", "directions", "seed")
        options = {key: getattr(self, key) for key in keys}
        return write_fitted(Path(path), self._networks.posterior, options, self._fitted or [])

    @classmethod
    def load(
        cls, path: Path | str, posterior: Posterior, *, forward: Forward | None = None, target: Target | None = None
    ) -> Self:
        """A detector that `save` wrote; no code of the file is run.

        Args:
            path: The file.
            posterior: The one that it was fitted for; raises ValueError if its weights, or their noise, are others.
            forward: How batches are run; a file holds no functions.
            target: What of a batch are the labels.
        """
        options, fitted = read_fitted(Path(path), posterior, FEATURE_SCORES)
        detector = cls(posterior, options.pop("names"), **options, forward=forward, target=target)
        detector._fitted = fitted or None
        return detector


def _columns(found: Pass) -> list[Tensor]:
    assert found.features is not None
    return [found.features, found.outputs]
