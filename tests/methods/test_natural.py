"""VOGN, OGN and IVON against their formulas, written out slowly; learned noise; saving."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import credo
from credo.data import Batches, load_dataset

N = 30


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def normed(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Statistics are fixed, so that single examples have gradients of their own."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5).eval()
    for tensor, low in ((norm.running_mean, -0.5), (norm.running_var, 0.5), (norm.weight, 0.5), (norm.bias, -0.5)):
        nn.init.uniform_(tensor, low, low + 1)  # type: ignore[arg-type]
    return nn.Sequential(nn.Linear(3, 5), norm, nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(8, 3, generator=generator, dtype=torch.float64), torch.randint(2, (8,), generator=generator)


# -- the slow way --------------------------------------------------------------------------------------------------


def record(posterior: Any) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """One step; the means before it and the weights of its passes."""
    x, y = data()
    means = {name: p.detach().clone() for name, p in posterior.model.named_parameters()}
    passes: list[dict[str, Tensor]] = []

    def nll(net: nn.Module) -> Tensor:
        passes.append({name: p.detach().clone() for name, p in net.named_parameters()})
        return F.cross_entropy(net(x), y)

    posterior.step(nll)
    return means, passes


def example_gradients(model: nn.Module, weights: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    for x, y in zip(*data(), strict=True):
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        loss = F.cross_entropy(functional_call(model, leaves, (x.unsqueeze(0),)), y.unsqueeze(0))
        yield dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def average(model: nn.Module, passes: list[dict[str, Tensor]], power: int) -> dict[str, Tensor]:
    found = [gradients for weights in passes for gradients in example_gradients(model, weights)]
    return {name: sum(g[name] ** power for g in found) / len(found) for name in found[0]}  # type: ignore[misc]


VOGN_SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "curvature given": {"curvature": {"init": 0.3, "decay": 0.9}, "draws": 3},
    "averaged": {"momentum": {"decay": 0.8, "averaged": True}, "draws": 2, "curvature": 0.5},
    "tempered": {"temperature": 0.03, "prior_precision": 4.0, "damping": 0.01},
    "warm-up": {"temperature": {"start": 0.1, "steps": 3}, "prior_precision": 2.0},
    "paper's CIFAR runs": {"curvature": 0.001},
    "by name": {"lr": {"0.*": 0.05, "*": 0.2}, "prior_precision": {"*bias": 0.5, "*": 6.0}},
    "centred prior": {"prior": credo.priors.Gaussian({"0.*": 0.4, "*": -0.2}, 0.7)},
    "norm": {"prior_precision": 4.0, "curvature": {"init": 0.3, "decay": 0.9}},
    "norm, first at the mean": {"draws": 2, "momentum": 0.5, "lr": {"1.*": 0.05, "*": 0.2}},
    "random norm": {"random": "*", "prior_precision": 4.0, "curvature": {"init": 0.3, "decay": 0.9}},
    "random": {"random": ["2.weight", "0.bias"], "prior_precision": 4.0, "curvature": {"init": 0.3}, "draws": 2},
}


def network_for(name: str) -> nn.Module:
    return normed() if "norm" in name else network()


@pytest.mark.part(5)
@pytest.mark.parametrize("name", VOGN_SETTINGS)
def test_vogn_is_its_formula(name: str) -> None:
    options = {"lr": 0.1, **VOGN_SETTINGS[name]}
    posterior = credo.VOGN(network_for(name), data_size=N, seed=1, **options)
    chosen = options.get("random", "all")
    # Affine parameters of normalisation layers by default, and what random= leaves out: neither noise nor prior.
    plain = {n for n, _ in posterior.model.named_parameters() if n not in chosen} if isinstance(chosen, list) else set()
    plain |= {"1.weight", "1.bias"} if "norm" in name and chosen == "all" else set()
    random = {n for n, _ in posterior.model.named_parameters()} - plain
    assert posterior.mean().keys() == posterior.std().keys() == random
    momentum, curvature = (
        credo.Momentum.of(options.get("momentum", {})),
        credo.Curvature.of(options.get("curvature", {})),
    )
    beta, decay, s0 = momentum.decay, 0.999 if curvature.decay is None else curvature.decay, curvature.init
    gamma, size, given = options.get("damping", 0.1), N, options.get("temperature", 1.0)
    start = given["start"] if isinstance(given, dict) else None
    m, s = {}, {n: torch.full_like(p, s0) for n, p in posterior.model.named_parameters()} if s0 else {}
    centre = posterior.layout.split(torch.zeros(posterior.layout.size) + posterior.prior.mean)
    for step in range(5):
        tau = given if start is None else start + (1 - start) * min(1.0, step / 3)
        assert posterior.temperature == pytest.approx(tau)
        known = bool(s)
        means, passes = record(posterior)
        assert len(passes) == (options.get("draws", 1) if known else 1)
        for key, mean in means.items():
            # The first curvature is taken at the mean.
            assert torch.equal(passes[0][key], mean) != (known and key not in plain)
            g = average(posterior.model, passes, 1)[key]
            h = average(posterior.model, passes, 2)[key]
            delta = tau / size * by_name(options.get("prior_precision", 0.7**-2 if "prior" in options else 1.0), key)
            delta *= key not in plain
            g = g + delta * (mean - centre.get(key, 0.0))
            if momentum.averaged:
                m[key] = beta * m.get(key, 0) + (1 - beta) * g
                debias = 1 / (1 - beta ** (step + 1))
            else:
                m[key], debias = beta * m.get(key, 0) + g, 1.0
            s[key] = decay * s[key] + (1 - decay) * h if known else h
            moved = mean - by_name(options["lr"], key) * debias * m[key] / (s[key] + delta + gamma)
            torch.testing.assert_close(posterior.model.get_parameter(key).detach(), moved, rtol=1e-9, atol=1e-12)
            if key in plain:
                continue
            # What it draws from now on, at the temperature of the next step.
            tau_next = tau if start is None else start + (1 - start) * min(1.0, (step + 1) / 3)
            delta = delta * tau_next / tau
            variance = tau_next / size / (s[key] + delta + gamma)
            torch.testing.assert_close(posterior.std()[key], variance.sqrt(), rtol=1e-9, atol=1e-12)


def by_name(value: Any, key: str) -> float:
    if not isinstance(value, dict):
        return float(value)
    return float(next(v for pattern, v in value.items() if pattern == "*" or pattern.strip("*") in key))


IVON_SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "fast": {"curvature": {"decay": 0.8, "init": 0.2}, "draws": 3, "momentum": 0.5},
    "tempered": {"temperature": 0.3, "prior_precision": 4.0, "curvature": 0.9},
    "weight decay": {"weight_decay": 0.01, "clip": 0.02, "curvature": 0.9},
    "raw": {"momentum": {"debias": False}, "curvature": {"decay": 0.9, "rescale_lr": False}},
    "squares": {"curvature": {"estimator": "squares", "decay": 0.9}, "draws": 2},
    "by name": {"lr": {"0.*": 0.05, "*": 0.2}, "prior_precision": {"*bias": 0.5, "*": 6.0}},
    "norm": {"prior_precision": 4.0, "curvature": {"decay": 0.9, "init": 0.2}},
    "norm is not random": {"random": "all", "curvature": {"decay": 0.9, "init": 0.2}, "draws": 2},
    "random": {"random": ["2.weight", "0.bias"], "curvature": 0.9, "momentum": {"decay": 0.5, "debias": False}},
    "random, raw": {"random": ["0.weight"], "curvature": {"init": 0.2, "decay": 0.9, "rescale_lr": False}},
}


@pytest.mark.parametrize("name", IVON_SETTINGS)
def test_ivon_is_its_formula(name: str) -> None:
    options = {"lr": 0.1, "clip": None, **IVON_SETTINGS[name]}
    posterior = credo.IVON(network_for(name), data_size=N, seed=1, **options)
    chosen = options.get("random", "*")
    plain = {n for n, _ in posterior.model.named_parameters() if n not in chosen} if isinstance(chosen, list) else set()
    plain |= {"1.weight", "1.bias"} if chosen == "all" else set()
    assert posterior.mean().keys() == {n for n, _ in posterior.model.named_parameters()} - plain
    momentum = credo.IVONMomentum.of(options.get("momentum", {}))
    curvature = credo.IVONCurvature.of(options.get("curvature", {}))
    beta, decay, h0 = momentum.decay, 0.9999 if curvature.decay is None else curvature.decay, curvature.init
    size = N / options.get("temperature", 1.0)
    m: dict[str, Tensor] = {}
    h = {n: torch.full_like(p, h0) for n, p in posterior.model.named_parameters()}
    for step in range(5):
        means, passes = record(posterior)
        assert len(passes) == options.get("draws", 1)
        slopes = [average(posterior.model, [weights], 1) for weights in passes]
        for key, mean in means.items():
            precision = options["weight_decay"] * N if "weight_decay" in options else options.get("prior_precision", 1)
            delta = by_name(precision, key) / size
            if curvature.estimator == "squares":
                new = sum(one[key] ** 2 for one in slopes) / len(slopes)
            else:  # ĝ·ε/σ, ε = (w − μ)/σ
                each = [one[key] * (w[key] - mean) for one, w in zip(slopes, passes, strict=True)]
                new = size * (h[key] + delta) * sum(each) / len(each)
            m[key] = beta * m.get(key, 0) + (1 - beta) * sum(one[key] for one in slopes) / len(slopes)
            debias = 1 / (1 - beta ** (step + 1)) if momentum.debias else 1.0
            if key in plain:  # SGD with momentum, over h₀ where the rate is not rescaled by it
                assert all(torch.equal(w[key], mean) for w in passes)
                rate = by_name(options["lr"], key) / (1.0 if curvature.rescale_lr else h0)
                moved = mean - rate * debias * m[key]
                torch.testing.assert_close(posterior.model.get_parameter(key).detach(), moved, rtol=1e-8, atol=1e-11)
                continue
            assert not any(torch.equal(w[key], mean) for w in passes)
            old = h[key]
            h[key] = decay * old + (1 - decay) * new + 0.5 * ((1 - decay) * (old - new)) ** 2 / (old + delta)
            rate = by_name(options["lr"], key) * ((h0 + delta) if curvature.rescale_lr else 1.0)
            clip = options["clip"] or math.inf
            direction = ((debias * m[key] + delta * mean) / (h[key] + delta)).clamp(-clip, clip)
            torch.testing.assert_close(posterior.mean()[key], mean - rate * direction, rtol=1e-8, atol=1e-11)
            torch.testing.assert_close(posterior.std()[key], (size * (h[key] + delta)).rsqrt(), rtol=1e-8, atol=1e-11)


def test_the_first_step_of_ivon_is_one_of_sgd() -> None:
    """`rescale_lr` and debiasing, where the prior has no say: the rate is SGD's."""
    posterior = credo.IVON(network(), data_size=10**9, lr=0.3, curvature={"decay": 0.0, "init": 0.05}, clip=None)
    posterior.curvature_decay = 1.0  # the curvature stays
    means, passes = record(posterior)
    slopes = average(posterior.model, passes, 1)
    for key, mean in posterior.mean().items():
        torch.testing.assert_close(mean, means[key] - 0.3 * slopes[key], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("correct", [True, False])
def test_momentum_is_rescaled_when_the_rate_changes(correct: bool) -> None:
    """Osawa et al. 2019: a momentum that was made of long steps is shortened with them."""
    posterior = credo.VOGN(network(), data_size=N, lr=0.1, momentum={"correction": correct}, prior_precision=1e-9)
    m: dict[str, Tensor] = {}
    last = None
    for scale in (1.0, 1.0, 0.1, 0.0, 0.5):
        posterior.lr_scale = scale
        _, passes = record(posterior)
        change = scale / last if correct and last else 1.0
        for key, g in average(posterior.model, passes, 1).items():
            m[key] = 0.9 * change * m.get(key, 0) + g
        found = posterior.vector.layout.split(posterior.momentum)
        for key, value in found.items():
            torch.testing.assert_close(value, m[key], rtol=1e-6, atol=1e-9)
        last = scale


@pytest.mark.parametrize("make", [network, normed])
def test_ogn_is_vogn_without_noise(make: Callable[[], nn.Module]) -> None:
    options: dict[str, Any] = {"data_size": N, "lr": 0.1, "prior_precision": 3.0, "curvature": 0.7, "damping": 0.1}
    ogn, vogn, noisy = (method(make(), **options) for method in (credo.OGN, credo.VOGN, credo.VOGN))
    vogn.noisy = False
    for _ in range(4):
        for posterior in (ogn, vogn, noisy):
            means, passes = record(posterior)
            if posterior is not noisy:
                assert all(torch.equal(passes[0][key], means[key]) for key in means)
    for key, value in ogn.model.named_parameters():
        assert torch.equal(value, vogn.model.get_parameter(key))
        assert not torch.equal(value, noisy.model.get_parameter(key))


# -- learned noise, saving -----------------------------------------------------------------------------------------


@pytest.mark.part(2)
@pytest.mark.parametrize("method", ["vogn", "ivon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_learned_noise_is_learned(method: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 1, generator=generator, dtype=dtype)
    y = 2 * x - 1 + 0.3 * torch.randn(400, 1, generator=generator, dtype=dtype)
    model = nn.Linear(1, 1, dtype=dtype)
    nn.init.constant_(model.weight, 1.5)  # not far off: a bad fit would be taken for noise first
    nn.init.constant_(model.bias, -0.5)
    posterior = getattr(credo, method.upper())(
        model, data_size=400, lr=0.05, likelihood=credo.GaussianNoise(1.0, learn=True), curvature={"init": 5.0}
    )
    for step in range(500):
        posterior.lr_scale = min(1.0, 2 - step / 250)
        posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    residual = (y - model(x)).square().mean().sqrt().item()  # what maximum likelihood would say
    assert F.softplus(posterior.likelihood.noise_rho).item() == pytest.approx(residual, rel=0.03)
    assert posterior.likelihood.noise_rho.grad is None
    assert residual == pytest.approx(0.3, rel=0.1)


BUILDERS: dict[str, Callable[[], Any]] = {
    "vogn": lambda: credo.VOGN(network(torch.float32), data_size=N, lr=0.05, temperature={"start": 0.1, "steps": 9}),
    "vogn by name": lambda: credo.VOGN(network(), data_size=N, lr={"*": 0.05}, prior_precision={"0.*": 2.0, "*": 1.0}),
    "ogn": lambda: credo.OGN(network(), data_size=N, lr=0.05),
    "ivon": lambda: credo.IVON(network(torch.float32), data_size=N, curvature=0.9, draws=2),
    "ivon averaged": lambda: credo.IVON(network(), data_size=N, prior=credo.priors.Gaussian({"*": 0.1}, 0.5)),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_saved_posterior_continues_exactly(name: str, tmp_path: Path) -> None:
    whole = BUILDERS[name]()
    x, y = data()

    def run(posterior: Any, steps: int) -> list[credo.Terms]:
        inputs = x.to(next(posterior.model.parameters()).dtype)
        return [posterior.step(lambda net: F.cross_entropy(net(inputs), y)) for _ in range(steps)]

    run(whole, 3)
    path = credo.save(whole, tmp_path / "posterior.safetensors")
    by_state = BUILDERS[name]()
    by_state.load_state_dict(whole.state_dict())
    loaded = credo.load(path, model=BUILDERS[name]().model)
    probs = [credo.predict(one, x.to(one.model[0].weight.dtype)).probs for one in (whole, loaded)]
    assert torch.equal(*probs)
    assert probs[0].unique().numel() > 2
    loaded.generator.set_state(whole.generator.get_state())  # belongs to checkpoints, not to files for prediction
    wanted = run(whole, 3)
    for one in (by_state, loaded):
        assert run(one, 3) == wanted
        for key, value in whole.state_dict().items():
            if isinstance(value, Tensor):
                assert torch.equal(one.state_dict()[key], value), key


def test_what_a_file_holds_is_what_was_saved(tmp_path: Path) -> None:
    """Not VOGN before its first step, nor the temperature of step 0: both would predict without noise, or with less."""
    posterior = BUILDERS["vogn"]()
    x, y = data()
    for _ in range(4):
        posterior.step(lambda net: F.cross_entropy(net(x.float()), y))
    path = credo.save(posterior, tmp_path / "posterior.safetensors")
    loaded = credo.load(path, model=network())
    assert loaded.temperature == posterior.temperature > 0.4
    assert loaded.steps == 4
    for key, std in posterior.std().items():
        assert torch.equal(loaded.std()[key], std)
        assert (std > 0).all()


@pytest.mark.parametrize("method", [credo.VOGN, credo.IVON])
def test_a_learned_noise_whose_gradient_is_not_finite_changes_nothing(method: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    posterior = method(nn.Linear(3, 1), data_size=20, likelihood={"kind": "gaussian", "std": 0.5, "learn": True})
    posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    (noise,) = posterior.likelihood.parameters()
    before = {name: tensor.clone() for name, tensor in posterior.state_dict().items() if isinstance(tensor, Tensor)}
    spoiled = noise.register_hook(lambda g: g * math.inf)
    with pytest.raises(credo.NonFiniteError, match=r"gradient of likelihood\..* is not finite at step 1"):
        posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    spoiled.remove()
    assert all(torch.equal(posterior.state_dict()[name], tensor) for name, tensor in before.items())
    assert math.isfinite(posterior.step(lambda net: posterior.likelihood.nll(net(x), y)).loss)


@pytest.mark.parametrize("method", [credo.VOGN, credo.OGN])
def test_defaults_learn(method: Any) -> None:
    """With the papers' rates and damping a small network was still at chance after this many epochs."""
    dataset = load_dataset("digits")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    posterior = method(network, data_size=len(dataset.train))
    credo.fit(posterior, Batches(dataset.train, batch_size=64), epochs=12)
    predicted = credo.predict(posterior, Batches(dataset.test, batch_size=500, shuffle=False), draws=16)
    assert (predicted.labels == predicted.targets).float().mean() > 0.9
