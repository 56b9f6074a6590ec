"""Mistakes without a traceback: training and predictions run, and are worth little. Each is named by a warning."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import credo

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
FRESH = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(60) % 3


def network(*ends: nn.Module, outputs: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs), *ends)


def trained(method: Any = credo.MAP, net: nn.Module | None = None, y: torch.Tensor = Y, **options: Any) -> Any:
    posterior = method(network() if net is None else net, data_size=60, **options)
    return credo.fit(posterior, [(X, y)], epochs=1, progress=False)


# -- rows that training has seen ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("choose", [credo.calibrate, credo.recalibrate, credo.conformal])
def test_choices_on_training_rows(choose: Callable[..., Any], tmp_path: Path) -> None:
    posterior = trained(credo.BBB)
    loaded = credo.load(credo.save(posterior, tmp_path / "p.safetensors"), model=network())
    for given in (posterior, loaded):
        with pytest.warns(credo.ReusedRowsWarning, match=r"have served training \(100 %\).*hold out"):
            choose(given, [(X, Y)])
    choose(trained(credo.BBB), (FRESH, Y))  # one batch, of rows that are fresh: warnings are errors


def test_early_stopping_by_training_rows() -> None:
    options: dict[str, Any] = {"epochs": 2, "patience": 1, "progress": False}
    with pytest.warns(credo.ReusedRowsWarning, match="validation rows are trained on"):
        credo.fit(credo.MAP(network(), data_size=60), [(X, Y)], validation=[(X, Y)], **options)
    credo.fit(credo.MAP(network(), data_size=60), [(X, Y)], validation=[(FRESH, Y)], **options)


# -- posteriors without their spread -----------------------------------------------------------------------------------

UNFITTED: dict[str, tuple[Any, str]] = {
    "laplace": (credo.Laplace, r"needs a pass over the training data: posterior\.fit\(loader\)"),
    "last-layer": (credo.LastLayer, r"needs a pass over the training data: posterior\.fit\(loader\)"),
    "low-rank-noise": (credo.LowRankNoise, r"needs a width: posterior\.fit\(loader\)"),
    "hmc": (lambda net, **o: credo.HMC(net, samples=10, warmup=10, **o), r"needs samples: posterior\.fit"),
    "swag": (credo.SWAG, r"needs weights that were collected: train it by credo\.fit"),
    "sgld": (credo.SGLD, "needs samples, which are kept after the burn-in"),
    "sghmc": (credo.SGHMC, "needs samples, which are kept after the burn-in"),
    "vogn": (credo.VOGN, "needs a training step"),
    "noisy-kfac": (credo.NoisyKFAC, "needs a training step"),
}
POINTS = ("map", "ogn", "kfac")


def test_no_method_that_draws_the_mean_at_first_is_missing() -> None:
    for name, method in credo.METHODS.items():
        if name == "ensemble":
            continue
        posterior = method(network(), data_size=60)
        with torch.no_grad(), posterior.sampled() as net:
            is_mean = torch.equal(net.eval()(X), network()(X))
        assert bool(posterior.uncertainty_needs) == (name in UNFITTED)
        assert is_mean == (name in UNFITTED or name in POINTS)


@pytest.mark.parametrize("name", UNFITTED)
def test_methods_without_their_spread_say_what_they_need(name: str) -> None:
    build, message = UNFITTED[name]
    posterior = build(network(), data_size=60)
    ways: list[Callable[[], Any]] = [
        lambda: credo.predict(posterior, X, draws=2),
        lambda: credo.predictor(posterior, draws=2),
        lambda: credo.calibrate(posterior, [(FRESH, Y)]),
    ]
    for way in ways:
        with pytest.warns(credo.PredictiveWarning, match=f"without any uncertainty of its weights. It {message}"):
            way()


@pytest.mark.parametrize("name", ["laplace", "last-layer", "swag", "vogn"])
def test_training_gives_them_what_they_need(name: str) -> None:
    posterior = UNFITTED[name][0](network(), data_size=60)
    credo.fit(
        posterior, DataLoader(TensorDataset(X, Y), batch_size=8), epochs=2, validation=[(FRESH, Y)], progress=False
    )  # without any warning
    assert float(credo.predict(posterior, X, draws=4).epistemic.max()) > 0


def test_an_ensemble_of_them_says_it_too() -> None:
    members = [credo.Laplace(network(seed=seed), data_size=60) for seed in range(2)]
    with pytest.warns(credo.PredictiveWarning, match="This Laplace predicts with the network as it is"):
        credo.predict(credo.Ensemble(members), X)


def test_an_ensemble_of_equal_networks() -> None:
    alike = credo.Ensemble([credo.MAP(copy.deepcopy(network()), data_size=60, seed=seed) for seed in range(3)])
    credo.fit(alike, [(X, Y)], epochs=2, validation=[(FRESH, Y)], progress=False)
    with pytest.warns(credo.PredictiveWarning, match=r"members that differ: all 3 have the same weights.*manual_seed"):
        credo.predict(alike, X)
    credo.predict(credo.Ensemble([credo.MAP(network(seed=seed), data_size=60) for seed in range(3)]), X)


# -- the number of examples --------------------------------------------------------------------------------------------


class Sized:
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return iter([(X[:30], Y[:30]), (X[30:], Y[30:])])


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: list(Sized()),
    "tuple of mappings": lambda: ({"input": X, "labels": Y},),
    "own class": Sized,
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=30),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_another_number_of_examples_than_the_loader_has(kind: str) -> None:
    with pytest.warns(credo.DataSizeWarning, match=r"data_size=10, but the loader has 60 examples.*Give data_size=60"):
        credo.fit(credo.BBB(network(), data_size=10), LOADERS[kind](), epochs=1, progress=False)
    credo.fit(credo.BBB(network(), data_size=60), LOADERS[kind](), epochs=1, progress=False)


# -- functions at the end of a network ---------------------------------------------------------------------------------


class Functional(nn.Module):
    def __init__(self, outputs: int, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.net, self.function = network(outputs=outputs), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.net(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.softmax, self.values = nn.Linear(4, 5), nn.Softmax(-1), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.values(self.softmax(self.scores(x)))
        return out


WRONG: dict[str, tuple[Callable[[], nn.Module], Any, torch.Tensor, str]] = {
    "softmax": (lambda: network(nn.Softmax(-1)), None, Y, "ends in softmax, and Categorical takes logits"),
    "functional": (lambda: Functional(3, lambda out: out.softmax(1)), None, Y, "ends in softmax, and Categorical"),
    "sigmoid of classes": (lambda: network(nn.Sigmoid()), None, Y, "ends in sigmoid, and Categorical"),
    "sigmoid": (lambda: network(nn.Sigmoid(), outputs=1), "bernoulli", Y % 2, "ends in sigmoid, and Bernoulli takes"),
    "sigmoid, squeezed": (
        lambda: Functional(1, lambda out: out.sigmoid().squeeze(-1)),
        "bernoulli",
        Y % 2,
        "ends in sigmoid, and Bernoulli",
    ),
    "several labels": (lambda: network(nn.Sigmoid()), "multi-label", F.one_hot(Y), "ends in sigmoid, and MultiLabel"),
    "rates": (lambda: network(nn.Softplus(), outputs=1), "poisson", Y[:, None], "ends in softplus, and Poisson takes"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("method", [credo.MAP, credo.BBB, credo.VOGN])
def test_functions_that_the_likelihood_applies_itself(case: str, method: Any) -> None:
    build, likelihood, y, message = WRONG[case]
    with pytest.warns(credo.LikelihoodWarning, match=message):
        trained(method, build(), y, likelihood=likelihood)


@pytest.mark.parametrize("case", ["softmax", "functional", "sigmoid"])
def test_trained_networks_with_them_are_told_by_their_predictions(case: str) -> None:
    build, likelihood, _, message = WRONG[case]
    with pytest.warns(credo.LikelihoodWarning, match=message):
        credo.predict(credo.MAP(build(), data_size=60, likelihood=likelihood), X)


RIGHT: dict[str, tuple[Callable[[], nn.Module], Any, torch.Tensor]] = {
    "attention": (Attention, None, Y),
    "log-softmax": (lambda: network(nn.LogSoftmax(-1)), None, Y),
    "values from 0 to 1": (lambda: network(nn.Sigmoid(), outputs=1), "gaussian", torch.rand(60, 1)),
    "rates": (lambda: network(outputs=1), "poisson", Y[:, None]),
    "yes or no": (lambda: network(outputs=1), "bernoulli", Y % 2),
}


@pytest.mark.parametrize("case", RIGHT)
def test_functions_that_belong_there(case: str) -> None:
    build, likelihood, y = RIGHT[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        credo.predict(trained(credo.MAP, build(), y, likelihood=likelihood), X)


def test_scores_of_logits_that_have_lost_their_scale() -> None:
    posterior = trained(credo.MAP, network(nn.LogSoftmax(-1)))
    for score in ("energy", "max-logit"):
        with pytest.warns(credo.LikelihoodWarning, match="ends in a log-softmax, after which the energy"):
            credo.OodDetector(posterior, score)(X)
    credo.OodDetector(posterior, "knn").fit(X)(X)  # features are as they were
    credo.OodDetector(trained(), "energy")(X)


# -- conformal prediction, checkpoints ---------------------------------------------------------------------------------


def test_the_coverage_in_the_place_of_alpha() -> None:
    with pytest.warns(credo.CredoWarning, match=r"cover about 10 % of them\. To cover 90 %, give alpha=0\.1"):
        credo.conformal(trained(), [(FRESH, Y)], alpha=0.9)
    with pytest.warns(credo.CredoWarning, match="give alpha=0.05"):
        credo.conformal(torch.full((60, 3), 1 / 3), Y, alpha=0.95)
    for alpha in (0.0, 1.0, 10, -0.1):
        with pytest.raises(ValueError, match=r"must lie between 0 and 1"):
            credo.conformal(trained(), [(FRESH, Y)], alpha=alpha)


SAME: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda x: [(x, Y)],
    "loader": lambda x: DataLoader(TensorDataset(x, Y), batch_size=60, shuffle=True),
    "batches": lambda x: credo.data.Batches(credo.data.Split(x, Y), batch_size=60),
}


@pytest.mark.parametrize("kind", SAME)
def test_resuming_with_other_data(kind: str, tmp_path: Path) -> None:
    make, options = SAME[kind], {"checkpoint": tmp_path / "state.pt", "progress": False}
    credo.fit(credo.BBB(network(), data_size=60), make(X), epochs=1, **options)
    credo.fit(credo.BBB(network(), data_size=60), make(X), epochs=2, **options)  # warnings are errors
    with pytest.warns(credo.CheckpointWarning, match=r"trained on other rows.*another checkpoint="):
        credo.fit(credo.BBB(network(), data_size=60), make(FRESH), epochs=3, **options)
