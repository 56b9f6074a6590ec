"""Other libraries as contenders of the quality benchmark, used as their READMEs say.

Each gets our network with our initial weights, our batches and rates, and as many trainings and draws as our methods.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.methods import Step
from benchmarks.peers import installed
from benchmarks.quality_methods import OURS, grid
from benchmarks.quality_tasks import DRAWS, Contender, Options, Task, Trained
from credo.data import Batches, Split
from credo.training import make_schedule

INSTALL = "pip install --no-deps -r benchmarks/peers.txt"


def missing(names: Iterable[str]) -> list[str]:
    """Those that are not installed."""
    return [name for name in names if installed(name) is None]


def descend(task: Task, seed: int, optimizer: torch.optim.Optimizer, step: Step) -> None:
    """All epochs: batches and rates are those that `credo.fit` gives our methods."""
    torch.manual_seed(seed)  # the peers draw from torch's global generator
    loader = Batches(task.train, batch_size=task.batch_size, seed=seed)
    scale = make_schedule(task.schedule, epochs=task.epochs, warmup=None)
    base = optimizer.param_groups[0]["lr"]
    for epoch in range(task.epochs):
        for index, (x, y) in enumerate(loader):
            optimizer.param_groups[0]["lr"] = base * scale(epoch + index / len(loader))
            step(x, y)


def averaged(draw: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Probabilities averaged over a loop of `DRAWS` noisy passes."""

    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        batches = (sum(F.softmax(draw(part), dim=-1) for _ in range(DRAWS)) / DRAWS for part in x.split(500))
        return torch.cat([*batches])

    return predict


# -- ivon-opt: an optimiser ----------------------------------------------------------------------------------


def train_ivon(task: Task, options: Options, seed: int) -> Trained:
    """The options of our IVON in its words: ess = N/τ, weight decay = τ·precision/N."""
    net, size = task.network(seed), len(task.train) / options["temperature"]
    optimizer: Any = import_module("ivon").IVON(
        net.parameters(),
        lr=options["lr"],
        ess=size,
        weight_decay=options["prior_precision"] / size,
        hess_init=options["curvature"]["init"],
        beta2=options["curvature"]["decay"],
    )

    def step(x: Tensor, y: Tensor) -> None:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
        optimizer.step()

    def draw(x: Tensor) -> Tensor:
        with optimizer.sampled_params():
            output: Tensor = net(x)
        return output

    descend(task, seed, optimizer, step)
    net.eval()
    return Trained(averaged(draw))


# -- bayesian-torch: converts the network --------------------------------------------------------------------


def train_bayesian_torch(task: Task, options: Options, seed: int) -> Trained:
    """`dnn_to_bnn`, then cross-entropy + KL / batch and Adam, as in its README."""
    convert = import_module("bayesian_torch.models.dnn_to_bnn")
    net = task.network(seed)
    weights = dict(net.named_parameters())
    convert.dnn_to_bnn(
        net,
        {
            "prior_mu": 0.0,
            "prior_sigma": options["prior_sigma"],
            "posterior_mu_init": 0.0,
            "posterior_rho_init": -3.0,
            "type": "Reparameterization",
            "moped_enable": False,
            "moped_delta": 0.5,
        },
    )
    _copy_means(net, weights)
    optimizer = torch.optim.Adam(net.parameters(), lr=options["lr"])

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        (F.cross_entropy(net(x), y) + convert.get_kl_loss(net) / len(x)).backward()
        optimizer.step()

    descend(task, seed, optimizer, step)
    return Trained(averaged(net.eval()))


@torch.no_grad()
def _copy_means(net: nn.Module, weights: dict[str, nn.Parameter]) -> None:
    """The converted layers' means become the network's initial weights, which the conversion draws anew."""
    means = dict(net.named_parameters())
    for name, value in weights.items():
        layer, _, kind = name.rpartition(".")
        names = [f"{layer}.mu_{word}" for word in ((kind, "kernel") if kind == "weight" else (kind,))]
        means[next(one for one in names if one in means)].copy_(value)


# -- laplace-torch: a Gaussian around the trained network ----------------------------------------------------


@cache
def trained_by_adam(task: Task, lr: float, prior: float, seed: int) -> nn.Module:
    """The MAP network; kept, since several approximations are made of each."""
    net = task.network(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr, weight_decay=prior**-2 / len(task.train))

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    descend(task, seed, optimizer, step)
    return net.eval()


def train_laplace(task: Task, options: Options, seed: int) -> Trained:
    """MAP, then Laplace; the prior's precision is found as `method` says, probabilities by the probit approximation."""
    net = trained_by_adam(task, options["lr"], options["prior"], seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports, and about defaults
        build = import_module("laplace").Laplace
        posterior = build(net, "classification", subset_of_weights=options["subset"], hessian_structure="kron")
        posterior.fit(_loader(task.train, 256))
        posterior.optimize_prior_precision(
            pred_type="glm",
            method=options["method"],
            link_approx="probit",
            val_loader=_loader(task.validation, 500),
            grid_size=21 if options["subset"] == "last_layer" else 11,
        )

    def predict(x: Tensor) -> Tensor:
        return torch.cat([posterior(part, pred_type="glm", link_approx="probit").detach() for part in x.split(100)])

    return Trained(predict)


def _loader(split: Split, batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(split.x, split.y), batch_size=batch_size)


_MAP = {"lr": [3e-3, 1e-2], "prior": [0.3, 1.0]}
PEERS = {
    "ivon-opt": Contender(train_ivon, OURS["ivon"].settings),
    # Four trainings, like everybody's; on each, the approximations are compared. Over all weights a prediction takes
    # the Jacobian of every output by every weight: 75 ms an image for LeNet-5, too much for thousands of them.
    "laplace-torch": Contender(
        train_laplace,
        grid(**_MAP, subset="last_layer", method=["marglik", "gridsearch"]),
        slow_settings=grid(**_MAP, subset="all", method=["marglik", "gridsearch"]),
    ),
    "bayesian-torch": Contender(train_bayesian_torch, grid(lr=[1e-2, 2e-2], prior_sigma=[0.3, 1.0])),
}
