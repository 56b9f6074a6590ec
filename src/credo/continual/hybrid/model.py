"""One flow for all classes and tasks (HCL; Kirichenko et al. 2021), a generative model that classifies.

Every pair of a class y and a task t owns a Gaussian of unit covariance in the flow's latent space, with a mean that is
drawn once and stays:

    log p(x | y, t) = log N(f(x); μ_yt, I) + log |det ∂f/∂x|

Classes follow by Bayes' rule with the tasks summed out, p(t) uniform over the tasks and p(y | t) over the classes seen
in a task. Latent means lie about r·√(2·features) apart, so that these probabilities are close to 0 and 1 whether right
or wrong; a temperature, chosen on held-out rows, divides the latent distances.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from credo.calibration.minimise import golden_section
from credo.continual.hybrid.flow import Flow
from credo.core.errors import FileFormatError
from credo.core.support.files import write_atomically
from credo.core.support.tensor_files import digest_of, read_safetensors, write_safetensors
from credo.core.support.validate import checked_count, checked_seed
from credo.data.batches import as_float

FORMAT = "credo-hybrid-flow-1"
_ROWS = 1000  # rows of one pass outside training
_DISTANCE = 7.5  # typical distance of latent means in few dimensions


class HybridFlow(nn.Module):
    """Density, classes and samples of all tasks from one flow.

    Args:
        features: Features of an input; images are flattened.
        classes: Number of classes, over all tasks.
        radius: Standard deviation of the entries of the latent means. None: 1, and in fewer than 29 dimensions as much
            more as puts means 7.5 apart, as for the two classes of Izmailov et al. (2020): nearer, classes overlap.
        noise: Width of the uniform noise that training adds to inputs: 1/256 dequantises bytes, more smooths them.
        seed: Seed of the means, of permutations and of the first weights.
        **flow: Options of `Flow`: `couplings`, `hidden`, `layers`, `scale`, `order`, `actnorm`, `squeeze`,
            `low`. High frequencies have mean 0 in every class.
    """

    means: Tensor
    counts: Tensor
    temperature: Tensor

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        radius: float | None = None,
        noise: float = 0.0,
        seed: int = 0,
        **flow: Any,
    ) -> None:
        super().__init__()
        self.classes = checked_count("classes", classes)
        if radius is not None and not radius > 0:
            raise ValueError(f"radius={radius} must be positive: the standard deviation of the entries of the means.")
        if not noise >= 0:
            raise ValueError(f"noise={noise} must be 0 or more: the width of the noise added to inputs.")
        self.noise, self.seed = noise, checked_seed(seed)
        self.flow = Flow(features, seed=seed, **flow)
        self.radius = max(1.0, _DISTANCE / math.sqrt(2 * self.flow.leading)) if radius is None else radius
        self.arguments = {
            "features": features, "classes": classes, "radius": self.radius, "noise": noise, "seed": seed, **flow
        }  # fmt: skip
        self.register_buffer("means", torch.zeros(0, classes, features))
        self.register_buffer("counts", torch.zeros(0, classes, dtype=torch.int64))
        self.register_buffer("temperature", torch.ones(()))

    # -- tasks -------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> int:
        """Number of tasks so far."""
        return len(self.means)

    def add_task(self) -> int:
        """Draw means for a new task; returns its index."""
        generator = torch.Generator().manual_seed(self.seed * 100_003 + self.tasks + 1)
        drawn = self.radius * torch.randn(1, self.classes, self.flow.features, generator=generator)
        drawn[..., self.flow.leading :] = 0
        self._spread_(drawn[0], generator)
        self.means = torch.cat([self.means, drawn.to(self.means)])
        self.counts = torch.cat([self.counts, self.counts.new_zeros(1, self.classes)])
        return self.tasks - 1

    def _spread_(self, drawn: Tensor, generator: torch.Generator) -> None:
        """Draw means again that lie too near to another one, as they may in few dimensions.

        The farthest of 100 is taken if none of them has distance radius·√features, which is 1/√2 of the typical one.
        """
        leading = self.flow.leading
        least = self.radius * math.sqrt(leading)
        others = self.means.flatten(0, 1).cpu()
        for label in range(self.classes):
            near = torch.cat([others, drawn[:label]])[:, :leading]
            if not len(near) or float((near - drawn[label, :leading]).norm(dim=1).min()) >= least:
                continue
            candidates = self.radius * torch.randn(100, leading, generator=generator)
            distances = torch.cdist(candidates, near).amin(1)
            enough = (distances >= least).nonzero()[:, 0]
            drawn[label, :leading] = candidates[int(enough[0]) if len(enough) else int(distances.argmax())]

    def count_(self, y: Tensor, task: int) -> None:
        """Count the labels `y` as seen in a `task`."""
        self.counts[task] += torch.bincount(y, minlength=self.classes).to(self.counts)

    def pairs(self) -> Tensor:
        """Every (task, class) that was seen, as rows."""
        return self.counts.nonzero()

    # -- densities ---------------------------------------------------------------------------------------------

    def prepared(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Inputs as rows of floats, with the training noise if there is a `generator`; [0, 1] is kept for a squeeze."""
        if x.ndim < 2:
            raise ValueError(f"Inputs of shape {tuple(x.shape)} are one input: x[None] is a batch of it.")
        x = as_float(x).flatten(1).to(self.means)
        if x.shape[1] != self.flow.features:
            raise ValueError(f"An input has {x.shape[1]} features; this flow was made for {self.flow.features}.")
        squeezed = bool(self.arguments.get("squeeze"))
        if squeezed and bool(((x < 0) | (x > 1)).any()):
            raise ValueError(f"Inputs from {x.min():.4g} to {x.max():.4g}: squeeze= is for pixels in [0, 1].")
        if generator is None or not self.noise:
            return x
        drawn = torch.rand(x.shape, generator=generator).to(x)
        if squeezed:
            return x * (1 - self.noise) + self.noise * drawn
        return x + self.noise * (drawn - 0.5)

    def parts(self, x: Tensor, y: Tensor, task: int | Tensor, flow: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """log N(f(x); μ_yt, I) and log |det ∂f/∂x| of each row.

        Args:
            x: Prepared inputs.
            y: Their classes.
            task: Their task, or one for each row.
            flow: Stands for this model's flow, such as a draw from a posterior.
        """
        z, log_det = (flow or self.flow)(x)
        return log_normal(z, self.means[task, y]), log_det

    @torch.no_grad()
    def statistics(self, x: Tensor, y: Tensor, task: int | Tensor) -> Tensor:
        """Means over a batch of log p(x | y, t), of its latent part and of its log-determinant."""
        latent, log_det = self.parts(x, y, task)
        return torch.stack([(latent + log_det).mean(), latent.mean(), log_det.mean()])

    def log_joint(self, x: Tensor, flow: nn.Module | None = None, *, temperature: float = 1.0) -> Tensor:
        """log p(x, y, t) of every row and seen pair, `[rows, pairs]`; the temperature divides latent distances."""
        pairs = self.pairs()
        if not len(pairs):
            raise RuntimeError("No class was learned: train on a stream first.")
        z: Tensor
        log_det: Tensor
        z, log_det = (flow or self.flow)(x)
        means = self.means[pairs[:, 0], pairs[:, 1]]
        squared = (z.pow(2).sum(1, keepdim=True) - 2 * z @ means.T + means.pow(2).sum(1)).clamp_min(0)
        latent = -0.5 * squared / temperature - 0.5 * z.shape[1] * math.log(2 * math.pi)
        seen = self.counts[pairs[:, 0]].gt(0).sum(1)  # classes of the pair's task
        return latent + log_det[:, None] - seen.log() - math.log(int(self.counts.sum(1).gt(0).sum()))

    def class_log_probs(self, x: Tensor, flow: nn.Module | None = None) -> Tensor:
        """log p(y | x) with the tasks summed out and the recalibrated temperature; −∞ for classes never seen."""
        joint = self.log_joint(x, flow, temperature=float(self.temperature))
        return self._by_class(joint).log_softmax(1)

    def _by_class(self, joint: Tensor) -> Tensor:
        owners = self.pairs()[:, 1]
        columns = [
            joint[:, owners == label].logsumexp(1)
            if bool((owners == label).any())
            else joint.new_full((len(joint),), -math.inf)
            for label in range(self.classes)
        ]
        return torch.stack(columns, 1)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Class probabilities `[rows, classes]`."""
        return torch.cat([self.class_log_probs(self.prepared(rows)).exp() for rows in x.split(_ROWS)])

    @torch.no_grad()
    def log_prob(self, x: Tensor) -> Tensor:
        """log p(x) in nats, all classes and tasks summed out: low for out-of-distribution inputs."""
        return torch.cat([self.log_joint(self.prepared(rows)).logsumexp(1) for rows in x.split(_ROWS)])

    @torch.no_grad()
    def recalibrate_(self, x: Tensor, y: Tensor) -> float:
        """Choose the temperature by the likelihood of held-out labels; returns it.

        Args:
            x: Held-out inputs.
            y: Their labels.
        """
        if not len(x):
            raise ValueError("No held-out rows: the temperature is chosen by the likelihood of their labels.")
        y = y.long()
        # Distances alone depend on it, and the rest of a row is the same for all of its pairs.
        scores = torch.cat([self.log_joint(self.prepared(rows)) for rows in x.split(_ROWS)])
        scores = scores - scores.amax(1, keepdim=True)
        seen = self._by_class(scores[:1])[0].isfinite()
        if not bool(seen[y].all()):
            raise ValueError(f"Held-out rows of classes that were never learned: {sorted(set(y[~seen[y]].tolist()))}.")
        priors = -(self.counts[self.pairs()[:, 0]].gt(0).sum(1).double().log())

        def cost(log_temperature: float) -> float:
            tempered = (scores.double() - priors) / math.exp(log_temperature) + priors
            log_probs = self._by_class(tempered).log_softmax(1)
            return -float(log_probs[torch.arange(len(y)), y].mean())

        self.temperature.fill_(math.exp(golden_section(cost, 0.0, math.log(1e4))))
        return float(self.temperature)

    # -- samples and files -------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, pairs: Tensor, generator: torch.Generator, flow: Flow | None = None) -> tuple[Tensor, Tensor]:
        """Inputs x = f⁻¹(z) with z ~ N(μ_yt, I), and z.

        Args:
            pairs: (task, class) of each sample, as rows.
            generator: Source of the noise.
            flow: Stands for this model's flow, such as a snapshot of it.
        """
        means = self.means[pairs[:, 0], pairs[:, 1]]
        z = means + torch.randn(means.shape, generator=generator).to(means)
        return (flow or self.flow).inverse(z), z

    def save(self, path: Path | str) -> Path:
        """Write weights, means and settings as safetensors; returns the path."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        text = json.dumps(self.arguments)
        header = {"format": FORMAT, "arguments": text, "digest": digest_of(tensors, text)}
        write_atomically(Path(path), lambda temporary: write_safetensors(temporary, tensors, header))
        return Path(path)

    @classmethod
    def load(cls, path: Path | str) -> HybridFlow:
        """The model in a file that `save` wrote; runs no code from it. Raises FileFormatError for any other file."""
        header, tensors = read_safetensors(Path(path))
        if header.get("format") != FORMAT:
            raise FileFormatError(f"{path} is not a file of HybridFlow.save.")
        text = header.get("arguments", "")
        if digest_of(tensors, text) != header.get("digest"):
            raise FileFormatError(f"{path} is damaged: its contents do not have the digest in its header.")
        model = cls(**json.loads(text))
        model.load_tensors_(tensors)
        return model.eval()

    def load_tensors_(self, tensors: dict[str, Tensor]) -> None:
        """Load a `state_dict` with any number of tasks."""
        self.means, self.counts = tensors["means"].clone(), tensors["counts"].clone()
        self.load_state_dict(tensors)


def log_normal(z: Tensor, mean: Tensor) -> Tensor:
    """log N(z; mean, I) of each row."""
    return -0.5 * (z - mean).pow(2).sum(1) - 0.5 * z.shape[1] * math.log(2 * math.pi)
