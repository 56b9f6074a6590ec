"""Saved posteriors come back exactly: the same predictions, priors, noise, buffers and precision."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.models import build_model

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (12,), generator=torch.Generator().manual_seed(1))


def mlp(seed: int = 0) -> nn.Module:
    return build_model("mlp", inputs=(6,), classes=3, hidden=(8, 8), dropout=0.2, seed=seed)


def trained(posterior: credo.Posterior, x: Tensor = X, y: Tensor = Y, steps: int = 3) -> credo.Posterior:
    posterior.train()
    for _ in range(steps):
        posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    return posterior


def predictions(posterior: credo.Posterior, x: Tensor) -> Tensor:
    result = credo.predict(posterior, x, draws=5, strategy="loop", seed=3)
    return result.probs if isinstance(result, credo.ClassPrediction) else torch.cat([result.mean, result.total])


def there_and_back(posterior: credo.Posterior, path: Path, **options: Any) -> credo.Posterior:
    loaded = credo.load(credo.save(posterior, path / "p.safetensors"), **options)
    assert type(loaded) is type(posterior)
    mine, theirs = posterior.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        if isinstance(tensor, Tensor):
            assert theirs[name].dtype == tensor.dtype, name
            assert torch.equal(theirs[name], tensor), name
    assert not any(module.training for module in loaded.modules())
    return loaded


METHODS: dict[str, Callable[[Callable[..., nn.Module]], credo.Posterior]] = {
    "map": lambda net: credo.MAP(net(), data_size=12, prior=0.7),
    "layer-l2": lambda net: credo.MAP(net(), data_size=12, prior=credo.priors.LayerL2(0.01)),
    "mc-dropout": lambda net: credo.MCDropout(net(), data_size=12),
    "mc-dropout rate": lambda net: credo.MCDropout(net(), data_size=12, rate=0.3, prior=credo.priors.Laplace(0.0, 0.5)),
    "bbb": lambda net: credo.BBB(net(), data_size=12, init={"rho": (-2.0, 0.5)}, noise="lrt", temperature=0.5),
    "bbb mixture": lambda net: credo.BBB(
        net(), data_size=12, prior=credo.priors.ScaleMixture(0.25, 1.0, 0.01), random="last"
    ),
    "ensemble of map": lambda net: credo.Ensemble([credo.MAP(net(s), data_size=12, seed=s) for s in range(3)]),
    "ensemble of bbb": lambda net: credo.Ensemble(
        [credo.BBB(net(s), data_size=12, init=0.2, seed=s) for s in range(2)]
    ),
    "ensemble of mc-dropout": lambda net: credo.Ensemble([credo.MCDropout(net(s), data_size=12) for s in range(2)]),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str, tmp_path: Path) -> None:
    posterior = trained(METHODS[method](mlp))
    loaded = there_and_back(posterior, tmp_path)
    assert torch.equal(predictions(loaded, X), predictions(posterior, X))
    assert loaded.config() == posterior.config()
    assert loaded.data_size == posterior.data_size


@pytest.mark.parametrize(
    ("name", "inputs"),
    [("lenet5", (1, 28, 28)), ("convnet", (3, 16, 16)), ("resnet20", (3, 8, 8)), ("alexnet-half", (3, 32, 32))],
)
def test_models_of_the_registry(name: str, inputs: tuple[int, ...], tmp_path: Path) -> None:
    """With running statistics that have moved; the network is built from the file alone."""
    network = build_model(name, inputs=inputs, classes=4, seed=0)
    x = torch.randn(3, *inputs, generator=torch.Generator().manual_seed(0))
    network.train()(x)
    posterior = credo.BBB(network, data_size=10, init=0.1)
    loaded = there_and_back(posterior, tmp_path)
    assert torch.equal(predictions(loaded, x), predictions(posterior, x))


class Own(nn.Module):
    """Tied weights, running statistics, a scalar, an empty and an integer buffer, and one that is not saved."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.second(torch.tanh(self.first(x)))))
        return self.scale * self.last(self.drop(hidden))


@pytest.mark.parametrize("method", METHODS)
def test_own_modules(method: str, tmp_path: Path) -> None:
    posterior = trained(METHODS[method](Own))
    posterior.model.count += 1
    loaded = there_and_back(posterior, tmp_path, model=Own(seed=99))
    assert loaded.model.first.weight is loaded.model.second.weight
    assert loaded.model.count == 8
    assert torch.equal(predictions(loaded, X), predictions(posterior, X))
    if isinstance(loaded, credo.Ensemble):
        assert len({id(part.model) for part in loaded.parts}) == len(loaded.parts)


def test_the_given_module_is_the_one_used(tmp_path: Path) -> None:
    mine = Own(seed=99)
    assert there_and_back(trained(METHODS["bbb"](Own)), tmp_path, model=mine).model is mine


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["map", "bbb", "ensemble of map"])
@pytest.mark.parametrize("own", [True, False])
def test_precision_is_kept(dtype: torch.dtype, method: str, own: bool, tmp_path: Path) -> None:
    posterior = METHODS[method](lambda seed=0: (Own(seed) if own else mlp(seed)).to(dtype))
    if dtype == torch.float64:
        trained(posterior, X.double())
    loaded = there_and_back(posterior, tmp_path, **({"model": Own()} if own else {}))
    assert all(p.dtype == dtype for p in loaded.model.parameters())
    assert torch.equal(predictions(loaded, X.to(dtype)), predictions(posterior, X.to(dtype)))


def test_several_precisions_in_one_network(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 4).bfloat16(), nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x.bfloat16()).double())

    posterior = credo.BBB(Mixed(), data_size=12, init=0.2)
    loaded = there_and_back(posterior, tmp_path, model=Mixed().float())
    assert torch.equal(predictions(loaded, X), predictions(posterior, X))


def test_priors_by_parameter_come_back_as_vectors(tmp_path: Path) -> None:
    means = {"*.weight": 0.1, "*": -0.2}
    prior = credo.priors.Gaussian(mean=means, std={"*.bias": 0.5, "*": 2.0})
    posterior = trained(credo.BBB(mlp(), data_size=12, prior=prior))
    loaded = there_and_back(posterior, tmp_path)
    assert torch.equal(loaded.prior.mean, posterior.prior.mean)
    assert torch.equal(loaded.prior.scale, posterior.prior.scale)
    assert posterior.prior.scale.unique().tolist() == [0.5, 2.0]
    assert torch.equal(loaded.kl(), posterior.kl())


def test_the_last_posterior_as_prior(tmp_path: Path) -> None:
    first = trained(credo.BBB(mlp(), data_size=12, init=0.2))
    second = credo.BBB(mlp(1), data_size=12, prior=credo.priors.Laplace(first.mean(), first.std()))
    loaded = there_and_back(trained(second), tmp_path)
    assert torch.equal(loaded.kl(), second.kl())


@pytest.mark.parametrize("method", ["map", "bbb", "mc-dropout"])
def test_learned_noise(method: str, tmp_path: Path) -> None:
    cls = {"map": credo.MAP, "bbb": credo.BBB, "mc-dropout": credo.MCDropout}[method]
    posterior = cls(mlp(), data_size=12, likelihood=credo.GaussianNoise(0.4, learn=True), lr=0.1)
    trained(posterior, y=torch.randn(12, 3, generator=torch.Generator().manual_seed(2)))
    loaded = there_and_back(posterior, tmp_path)
    assert loaded.likelihood.noise_rho.requires_grad
    assert loaded.likelihood.config()["std"] != pytest.approx(0.4, abs=0.01)
    assert torch.equal(predictions(loaded, X), predictions(posterior, X))


@pytest.mark.parametrize("likelihood", ["bernoulli", {"kind": "gaussian", "std": 0.3}, "heteroscedastic"])
def test_likelihoods(likelihood: Any, tmp_path: Path) -> None:
    if likelihood == "heteroscedastic":
        likelihood = credo.GaussianNoise(heteroscedastic=True)
    outputs = 1 if likelihood == "bernoulli" else 2
    network = build_model("mlp", inputs=(6,), classes=outputs, hidden=(4,), seed=0)
    posterior = credo.BBB(network, data_size=12, likelihood=likelihood)
    loaded = there_and_back(posterior, tmp_path)
    assert loaded.likelihood.config() == posterior.likelihood.config()
    assert torch.equal(predictions(loaded, X), predictions(posterior, X))


@pytest.mark.parametrize("method", METHODS)
def test_a_loaded_posterior_can_go_on_training(method: str, tmp_path: Path) -> None:
    posterior = trained(METHODS[method](mlp))
    loaded = there_and_back(posterior, tmp_path)
    before = loaded.likelihood.nll(loaded.model(X), Y).item()
    trained(loaded, steps=60)
    assert loaded.eval().likelihood.nll(loaded.model(X), Y).item() < before


def test_arguments_can_be_changed_when_loading(tmp_path: Path) -> None:
    posterior = trained(credo.MAP(mlp(), data_size=12, optimizer=lambda p: torch.optim.SGD(p, lr=0.5)))
    path = credo.save(posterior, tmp_path / "p.safetensors")
    loaded = credo.load(path, optimizer="sgd", lr=0.25)
    assert type(loaded.optimizer_step.optimizer) is torch.optim.SGD
    assert loaded.optimizer_step.optimizer.param_groups[0]["lr"] == 0.25
    with pytest.raises(ValueError, match="learning_rate"):
        credo.load(path, learning_rate=1.0)


FORGOTTEN = {
    "map": ("optimizer", lambda: credo.MAP(mlp(), data_size=12, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))),
    "mc-dropout": (
        "optimizer",
        lambda: credo.MCDropout(mlp(), data_size=12, rate=0.2, optimizer=lambda p: torch.optim.SGD(p, lr=0.5)),
    ),
    "bbb": ("optimizer", lambda: credo.BBB(mlp(), data_size=12, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))),
    "bbb weight": ("kl_term", lambda: credo.BBB(mlp(), data_size=12, kl_term={"weight": lambda step: 0.01})),
    "ensemble": (
        "kl_term",
        lambda: credo.Ensemble(
            [credo.BBB(mlp(), data_size=12, seed=s, kl_term={"weight": lambda step: 0.01}) for s in range(2)]
        ),
    ),
}


@pytest.mark.parametrize("case", FORGOTTEN)
def test_functions_are_not_in_a_file_and_training_asks_for_them(case: str, tmp_path: Path) -> None:
    argument, build = FORGOTTEN[case]
    posterior = trained(build())
    path = credo.save(posterior, tmp_path / "p.safetensors")
    loaded = credo.load(path)
    assert torch.equal(credo.predict(loaded, X).probs, credo.predict(posterior, X).probs)
    before = {name: p.detach().clone() for name, p in loaded.named_parameters()}
    with pytest.raises(ValueError, match=rf"to train with: it was.*load\(path, {argument}="):
        trained(loaded, steps=1)
    assert all(torch.equal(p, before[name]) for name, p in loaded.named_parameters())
    assert all(p.grad is None for p in loaded.parameters())
    again = credo.load(path, **{argument: {"optimizer": "sgd", "kl_term": {"weight": lambda step: 0.01}}[argument]})
    trained(again, steps=1)
    assert again.steps == 1


def test_a_kl_weight_given_again_is_the_objective_of_before(tmp_path: Path) -> None:
    posterior = credo.BBB(mlp(), data_size=12, kl_term={"weight": lambda step: 0.01})
    loaded = credo.load(credo.save(posterior, tmp_path / "p.safetensors"), kl_term={"weight": lambda step: 0.01})
    terms = [one.step(lambda net: F.cross_entropy(net(X), Y)) for one in (posterior, loaded)]
    assert terms[0].penalty == pytest.approx(terms[1].penalty)
    assert terms[0].penalty == pytest.approx(0.01 * terms[0].kl / 12)


def test_describe_gives_extra_and_the_settings(tmp_path: Path) -> None:
    extra = {"dataset": "digits", "metrics": {"nll": 0.25}, "tags": ["a", None]}
    path = credo.save(credo.BBB(mlp(), data_size=12, lr=0.02), tmp_path / "deep" / "p.safetensors", extra=extra)
    about = credo.describe(path)
    assert about["extra"] == extra
    assert about["posterior"]["method"] == "bbb"
    assert about["posterior"]["options"]["lr"] == 0.02
    assert about["architecture"]["spec"]["name"] == "mlp"
    assert set(about["architecture"]["dtypes"].values()) == {"float32"}
    assert json.loads(json.dumps(about)) == about
    assert [entry.name for entry in path.parent.iterdir()] == ["p.safetensors"]


def test_saving_and_loading_leave_random_numbers_and_the_posterior_alone(tmp_path: Path) -> None:
    network = build_model("mlp", inputs=(6,), classes=3, hidden=(8,))  # no seed: built from the global generator
    posterior = trained(credo.BBB(network, data_size=12))
    generator, rng = posterior.generator.get_state(), torch.get_rng_state()
    before = {name: p.clone() for name, p in posterior.named_parameters()}
    credo.load(credo.save(posterior, tmp_path / "p.safetensors"))
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(posterior.generator.get_state(), generator)
    assert all(torch.equal(p, before[name]) for name, p in posterior.named_parameters())
    assert all(module.training for module in posterior.modules())


def test_posteriors_that_are_not_in_the_table_are_refused(tmp_path: Path) -> None:
    class Mine(credo.MAP):
        pass

    with pytest.raises(ValueError, match="Mine is not in METHODS"):
        credo.save(Mine(mlp(), data_size=12), tmp_path / "p.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_values_by_glob_keep_their_order(tmp_path: Path) -> None:
    """The first glob that matches wins: sorted, "*" would take all."""
    given = {"weight": 0.1, "*": 0.001}
    posterior = credo.VOGN(nn.Linear(3, 2), data_size=8, lr=given, prior_precision=given)
    loaded = credo.load(credo.save(posterior, tmp_path / "model.safetensors"), model=nn.Linear(3, 2))
    assert isinstance(loaded, credo.VOGN)
    assert list(loaded.config()["lr"]) == ["weight", "*"]
    assert torch.equal(torch.as_tensor(loaded.rates), torch.as_tensor(posterior.rates))
    assert torch.equal(torch.as_tensor(loaded.prior.std), torch.as_tensor(posterior.prior.std))


def test_the_same_posterior_is_always_the_same_bytes(tmp_path: Path) -> None:
    """A writer that orders its two entries at random would pass once in 2048 times."""
    posterior = credo.BBB(build_model("mlp", inputs=(3,), classes=2, hidden=(4,), seed=0), data_size=10)
    extra = {"note": 'Grüße \u0001 \U0001f600 \\ "', "classes": ["b", "a"]}
    contents = {credo.save(posterior, tmp_path / f"{i}.safetensors", extra=extra).read_bytes() for i in range(12)}
    assert len(contents) == 1
    assert credo.describe(tmp_path / "0.safetensors")["extra"] == extra
