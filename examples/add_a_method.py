"""A whole new method in one file: diagonal SWAG (Maddox et al. 2019), mean and spread of the path that SGD takes."""

import torch
from torch import Tensor, nn

import credo
from credo.core.network.flat_layout import Layout
from credo.core.optimizer_step import OptimizerStep
from credo.core.posterior import Nll
from credo.data import Batches, load_dataset


class DiagonalSWAG(credo.GaussianPosterior):
    """Gaussian with the moments of SGD's weights after each step from `start` on; the network holds the last ones."""

    def __init__(self, model: nn.Module, *, lr: float = 0.1, start: int = 0, **options: object) -> None:
        super().__init__(model, **options)  # data_size, likelihood, seed
        self.lr, self.start, self.layout = lr, start, Layout(dict(model.named_parameters()))
        self.optimizer_step = OptimizerStep(dict(self.named_parameters()), "sgd", lr)
        self.register_buffer("centre", self._weights())  # buffers are part of state_dict() and of saved files
        self.register_buffer("variance", torch.zeros_like(self.centre))

    def draw(self) -> dict[str, Tensor]:
        """Mean + std·ε; randomness comes from the posterior's own generator."""
        eps = torch.randn(self.layout.size, generator=self.generator, device=self.device)
        return self.layout.split(self.centre + self.variance.sqrt() * eps)

    def mean(self) -> dict[str, Tensor]:
        """Average of the visited weights."""
        return self.layout.split(self.centre.clone())

    def std(self) -> dict[str, Tensor]:
        """Standard deviation of the visited weights."""
        return self.layout.split(self.variance.sqrt())

    def step(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> credo.Terms:
        """One step of SGD, then the running moments (Welford 1962): count 1 until `start` forgets what was before."""
        loss = nll(self.model)
        self.optimizer_step.step(loss, at=self.steps, scale=self.lr_scale)
        self.steps += 1
        count, delta = max(1, self.steps - self.start), self._weights() - self.centre
        self.variance.add_(delta.square() / count).mul_(1 - 1 / count)
        self.centre.add_(delta / count)
        return credo.Terms(loss=loss.item(), nll=loss.item())

    def _weights(self) -> Tensor:
        return self.layout.flatten(dict(self.model.named_parameters())).detach()


credo.METHODS["diagonal-swag"] = DiagonalSWAG  # now `credo.save` and `credo.load` know it
digits = load_dataset("digits")
network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
posterior = DiagonalSWAG(network, data_size=len(digits.train), start=250)
credo.fit(posterior, Batches(digits.train, batch_size=32), epochs=12)
print("accuracy", credo.evaluate.accuracy(credo.predict(posterior, digits.test.x).probs, digits.test.y))
