"""Other libraries with the settings of their READMEs; those that are not installed are left out.

Each gets our network, initial weights, rows and number of passes, and Adam at 1e-3 or the optimiser that it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers import installed
from benchmarks.untouched.contenders import DRAWS, Result, Run, of_classes, of_normals, outputs_of, train_plain
from benchmarks.untouched.tasks import Problem
from credo.data import Batches


def _averaged(draw: Callable[[Tensor], Tensor], problem: Problem, noise: Tensor | None) -> Result:
    """Measure the average of `DRAWS` noisy passes."""
    with torch.no_grad():
        outputs = torch.stack([torch.cat([draw(x) for x in problem.test.x.split(500)]) for _ in range(DRAWS)]).double()
    if noise is None:
        return of_classes(outputs.softmax(-1).mean(0), problem.test.y)
    return of_normals(outputs.mean(0), (outputs.var(0) + noise.square()).sqrt(), problem.test.y)


def _loss(problem: Problem, outputs: Tensor, y: Tensor) -> Tensor:
    """Mean NLL; for regression with unit noise, the only one that their examples have."""
    return 0.5 * (outputs - y).square().sum(1).mean() if problem.is_regression else F.cross_entropy(outputs, y)


def _residual(problem: Problem, outputs: Tensor) -> Tensor | None:
    return (outputs - problem.train.y).square().mean(0).sqrt().double() if problem.is_regression else None


def ivon_opt(problem: Problem, seed: int) -> Result:
    """IVON with lr=0.1 and ess=N."""
    torch.manual_seed(seed)
    net = problem.network()
    optimizer: Any = import_module("ivon").IVON(net.parameters(), lr=0.1, ess=len(problem.train))
    loader = Batches(problem.train, batch_size=problem.batch_size, seed=seed)
    for _ in range(problem.epochs):
        for x, y in loader:
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                _loss(problem, net(x), y).backward()
            optimizer.step()
    net.eval()

    def draw(x: Tensor) -> Tensor:
        with optimizer.sampled_params():
            output: Tensor = net(x)
        return output

    return _averaged(draw, problem, _residual(problem, outputs_of(net, problem.train.x)))


def bayesian_torch(problem: Problem, seed: int) -> Result:
    """`dnn_to_bnn` with N(0, 1) and ρ = −3, then the loss + KL / batch and Adam."""
    torch.manual_seed(seed)
    convert = import_module("bayesian_torch.models.dnn_to_bnn")
    net = problem.network()
    convert.dnn_to_bnn(
        net,
        {
            "prior_mu": 0.0,
            "prior_sigma": 1.0,
            "posterior_mu_init": 0.0,
            "posterior_rho_init": -3.0,
            "type": "Reparameterization",
            "moped_enable": False,
            "moped_delta": 0.5,
        },
    )
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    loader = Batches(problem.train, batch_size=problem.batch_size, seed=seed)
    for _ in range(problem.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            (_loss(problem, net(x), y) + convert.get_kl_loss(net) / len(x)).backward()
            optimizer.step()
    net.eval()
    return _averaged(net, problem, _residual(problem, outputs_of(net, problem.train.x)))


def laplace_torch(problem: Problem, seed: int) -> Result:
    """Adam, then Kronecker-factored Laplace of the last layer, prior precision by marginal likelihood, probit."""
    net = train_plain(problem, problem.train, 1e-3, seed, problem.epochs, problem.network())
    kind = "regression" if problem.is_regression else "classification"
    options = {"subset_of_weights": "last_layer", "hessian_structure": "kron"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        noise = _residual(problem, outputs_of(net, problem.train.x))
        if noise is not None:
            options["sigma_noise"] = float(noise.square().mean().sqrt())
        posterior = import_module("laplace").Laplace(net, kind, **options)
        posterior.fit(DataLoader(TensorDataset(problem.train.x, problem.train.y), batch_size=256))
        posterior.optimize_prior_precision(method="marglik")
        parts = [posterior(x) if noise is not None else posterior(x, link_approx="probit") for x in _batches(problem)]
    if noise is None:
        return of_classes(torch.cat(parts).detach(), problem.test.y)
    mean = torch.cat([part[0] for part in parts]).detach()
    variance = torch.cat([part[1].diagonal(dim1=1, dim2=2) for part in parts]).detach() + noise.square()
    return of_normals(mean, variance.sqrt(), problem.test.y)


def _batches(problem: Problem) -> list[Tensor]:
    return [*problem.test.x.split(100)]


_ALL: dict[str, tuple[str, Run]] = {
    "laplace-torch": ("laplace-torch", laplace_torch),
    "ivon-opt": ("ivon-opt", ivon_opt),
    "bayesian-torch": ("bayesian-torch", bayesian_torch),
}
PEERS: dict[str, Run] = {name: run for name, (package, run) in _ALL.items() if installed(package) is not None}
