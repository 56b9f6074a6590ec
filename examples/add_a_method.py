"""A whole new method in one file: SGLD (Welling and Teh 2011), noisy SGD whose path is a sample from the posterior."""

import math

import torch
from torch import Tensor, nn

import credo
from credo.core.network.flat_layout import Layout
from credo.core.optimizer_step import OptimizerStep
from credo.core.posterior import Nll
from credo.data import Batches, load_dataset


class PathSGLD(credo.Posterior):
    """The last `keep` weights that were visited, one every `every` steps; the network holds the current ones."""

    def __init__(
        self, model: nn.Module, *, lr: float = 0.1, temperature: float = 0.1, every: int = 20, keep: int = 16, **options
    ) -> None:
        super().__init__(model, **options)  # data_size, likelihood, seed
        self.lr, self.temperature, self.every = lr, temperature, every
        self.layout = Layout(dict(model.named_parameters()))
        self.optimizer_step = OptimizerStep(dict(self.named_parameters()), "sgd", lr)
        self.register_buffer("visited", self._weights().repeat(keep, 1))  # buffers are part of state_dict() and files

    def draw(self) -> dict[str, Tensor]:
        """One of the visited weights; randomness comes from the posterior's own generator."""
        index = torch.randint(len(self.visited), (), generator=self.generator, device=self.device)
        return self.layout.split(self.visited[int(index)].clone())

    def step(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> credo.Terms:
        """w ← w − lr·∇(mean NLL − temperature·log p(w)/N) + √(2·lr·temperature/N)·ε, with the prior p = N(0, 1)."""
        loss = nll(self.model)
        squares = sum(p.square().sum() for p in self.model.parameters())
        penalty = self.temperature * squares / (2 * self.data_size)
        self.optimizer_step.step(loss + penalty, at=self.steps, scale=self.lr_scale)
        std = math.sqrt(2 * self.lr * self.lr_scale * self.temperature / self.data_size)
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(torch.randn(p.shape, generator=self.generator, device=p.device), alpha=std)
        self.steps += 1
        if self.steps % self.every == 0:
            self.visited[self.steps // self.every % len(self.visited)] = self._weights()
        return credo.Terms(loss=(loss + penalty).item(), nll=loss.item(), penalty=penalty.item())

    def _weights(self) -> Tensor:
        return self.layout.flatten(dict(self.model.named_parameters())).detach()


credo.METHODS["path-sgld"] = PathSGLD  # now `credo.save` and `credo.load` know it
digits = load_dataset("digits")
network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
posterior = PathSGLD(network, data_size=len(digits.train))
credo.fit(posterior, Batches(digits.train, batch_size=32), epochs=20, schedule="constant")
print("accuracy", credo.evaluate.accuracy(credo.predict(posterior, digits.test.x).probs, digits.test.y))
