"""Draws of linearised networks against dense Jacobians."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from laplace_dense import Attention, Recurrent, conv, jacobian, mlp
from linear_oracle import DenseLinear, dense_jacobian, dense_linear, dense_moments, ensemble, network, rows
from torch import Tensor, nn

import credo
from credo.attacks.posterior import posterior_logits
from credo.core.sampling import evaluating
from credo.predict import linear
from credo.predict.draw_loop import DrawLoop, draw_loop
from credo.predict.linear import FunctionLoop, LinearNetworks, covariance_root

NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(4, 4)),
    "conv": (conv, lambda: torch.randn(4, 2, 6, 6)),
    "recurrent": (Recurrent, lambda: torch.randint(7, (4, 5))),
    "attention": (Attention, lambda: torch.randn(4, 3, 4)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("random", ["all", "last"])
def test_values_are_f_plus_jacobian_times_change(name: str, random: str) -> None:
    """Of all inputs at once and for the same weights: so they are joint over inputs."""
    torch.manual_seed(0)
    build, inputs = NETWORKS[name]
    net, x = build().double().eval(), inputs()
    x = x.double() if x.is_floating_point() else x
    posterior = credo.BBB(net, data_size=10, init=0.3, random=random)
    with torch.no_grad(), evaluating(posterior, 5) as frozen:
        networks = LinearNetworks(frozen)
        draws = list(networks.iter_draws(3))
        found = networks.outputs(draws, x)
    names = list(posterior.std())
    change = torch.stack([torch.cat([(d[n] - net.get_parameter(n)).flatten() for n in names]) for d in draws]).detach()
    own = torch.stack([jacobian(net, row, names) for row in x])
    torch.testing.assert_close(found, net(x).detach() + torch.einsum("bow,dw->dbo", own, change))


def test_random_numbers_are_those_of_weight_draws() -> None:
    """Of a linear layer, both predictives are the same."""
    posterior = credo.BBB(nn.Linear(4, 3).double(), data_size=10, init=0.3)
    x, y = rows(12), torch.arange(12) % 3
    options: dict[str, Any] = {"draws": 13, "strategy": "loop", "seed": 3}
    for more in ({}, {"shared_draws": True, "batch_size": 5}, {"shard": "draws"}, {"tolerance": 0.05}):
        found = credo.predict(posterior, [(x, y)], predictive="linear", **options, **more)
        wanted = credo.predict(posterior, [(x, y)], predictive="weights", **options, **more)
        for name in ("probs", "mean_entropy", "epistemic", "log_likelihood", "draws_used"):
            torch.testing.assert_close(getattr(found, name), getattr(wanted, name))


@pytest.mark.parametrize("batch_size", [1, 5, 12])
def test_shared_draws_are_the_same_functions_for_all_batches(batch_size: int) -> None:
    posterior, x = credo.BBB(network(), data_size=10, init=0.3), rows(12)
    options: dict[str, Any] = {"draws": 7, "predictive": "linear", "shared_draws": True}
    whole = credo.predict(posterior, x, **options)
    torch.testing.assert_close(credo.predict(posterior, x, batch_size=batch_size, **options).probs, whole.probs)


def test_joint_draws_have_the_joint_covariance() -> None:
    """Over inputs and outputs; false alarm 1e-5: 5 standard errors of each of 36 covariances."""
    posterior, x, count = credo.BBB(network(2), data_size=10, init=0.3), rows(3), 400
    posterior.eval()
    with torch.no_grad(), evaluating(posterior, 0) as frozen:
        loop = draw_loop(frozen, x, draws=count, shared=True, predictive="linear")
        loop.begin()
        values = loop.outputs(x, count).flatten(1)
    own = dense_jacobian(posterior, x).flatten(0, 1)
    variance = torch.cat([std.flatten() for std in posterior.std().values()]).square()
    wanted = (own * variance) @ own.T
    found = torch.cov(values.T)
    error = ((wanted.square() + wanted.diagonal().outer(wanted.diagonal())) / count).sqrt()
    assert ((found - wanted).abs() / error).max() < 5
    assert ((values.mean(0) - posterior.model(x).flatten()).abs() / (wanted.diagonal() / count).sqrt()).max() < 5


def test_draws_by_moments_have_these_moments() -> None:
    """False alarm 1e-5: 5 standard errors."""
    posterior, x, count = dense_linear(3), rows(4), 20000
    with torch.no_grad(), evaluating(posterior, 0) as frozen:
        loop = draw_loop(frozen, x, draws=count, shared=False)
        assert isinstance(loop, FunctionLoop)
        loop.begin()
        values = loop.outputs(x, count)
    mean, wanted = dense_moments(posterior, x)
    scale = wanted.diagonal(dim1=1, dim2=2)
    assert ((values.mean(0) - mean).abs() / (scale / count).sqrt()).max() < 5
    found = torch.einsum("dbi,dbj->bij", values - mean, values - mean) / count
    error = ((wanted.square() + scale.unsqueeze(1) * scale.unsqueeze(2)) / count).sqrt()
    assert ((found - wanted).abs() / error).max() < 5


def test_members_of_an_ensemble_are_linearised_at_their_own_means() -> None:
    posterior, x = ensemble(std=1e-6), rows(5)
    outputs = torch.stack([part.model(x).detach() for part in posterior.parts])
    for options in ({"shared": False}, {"shared": True}):
        with torch.no_grad(), evaluating(posterior, 0) as frozen:
            loop = draw_loop(frozen, x, draws=4, predictive="linear", **options)
            loop.begin(skip=1)  # as one of several processes does
            found = loop.outputs(x, 3)
        torch.testing.assert_close(found, outputs[[1, 0, 1]], rtol=0, atol=1e-3)


@pytest.mark.parametrize("shared", [False, True])
def test_noise_scale_scales_the_change(shared: bool) -> None:
    posterior, x = dense_linear(), rows(5)
    spread = []
    for scale in (1.0, 0.5):
        posterior.calibration = credo.Calibration(noise_scale=scale)
        with torch.no_grad(), evaluating(posterior, 0) as frozen:
            loop = draw_loop(frozen, x, draws=6, shared=shared)
            loop.begin()
            spread.append(loop.outputs(x, 6) - posterior.model(x))
    torch.testing.assert_close(spread[1], 0.5 * spread[0])


def test_many_classes_are_drawn_by_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their covariances would not fit; both have the same distribution."""
    posterior, x = dense_linear(8), rows(5)
    monkeypatch.setattr(linear, "COVARIANCE_BYTES", 8 * 64 * 4)
    with torch.no_grad(), evaluating(posterior, 0) as frozen:
        assert isinstance(draw_loop(frozen, x, draws=2, shared=False), DrawLoop)
        assert isinstance(draw_loop(frozen, x[:4], draws=2, shared=False), FunctionLoop)


def test_parameters_that_nothing_depends_on_change_nothing() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    posterior = credo.BBB(Unused(), data_size=10, init=0.3, random="unused.*")
    found = credo.predict(posterior, rows(5).float(), predictive="linear", draws=5)
    torch.testing.assert_close(found.probs, posterior.model(rows(5).float()).softmax(-1).detach())
    assert found.epistemic.max() < 1e-6


def test_points_are_their_network() -> None:
    x = rows(5)
    for posterior in (credo.MAP(network(), data_size=10), dense_linear()):
        posterior.calibration = credo.Calibration(noise_scale=0.0)
        found = credo.predict(posterior, x, predictive="linear")
        torch.testing.assert_close(found.probs, posterior.model(x).softmax(-1).detach())
        assert found.draws_used.tolist() == [1] * 5


def test_roots_of_singular_and_of_broken_covariances() -> None:
    vector = torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.double)
    singular = torch.cat([vector.mT @ vector, torch.zeros(3, 3)]).view(2, 3, 3)
    root = covariance_root(singular)
    torch.testing.assert_close(root @ root.mT, singular)
    broken = covariance_root(torch.tensor([[[1.0]], [[float("nan")]], [[float("inf")]]]))
    assert broken.isnan().flatten().tolist() == [False, True, True]


def test_nothing_of_the_posterior_changes() -> None:
    posterior, x = credo.BBB(network(), data_size=10, init=0.3).train(), rows(6)
    before = {name: value.clone() for name, value in posterior.state_dict().items() if isinstance(value, Tensor)}
    state = posterior.generator.get_state()
    given = x.clone()
    credo.predict(posterior, x, predictive="linear", draws=3)
    assert torch.equal(posterior.generator.get_state(), state)
    assert all(torch.equal(posterior.state_dict()[name], value) for name, value in before.items())
    assert posterior.model.training
    assert torch.equal(x, given)
    assert all(p.grad is None and p.requires_grad for p in posterior.model.parameters())


def test_inputs_changed_in_place_are_copies() -> None:
    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            x -= 1
            return self.net(x)

    x = rows(6)
    given = x.clone()
    options: dict[str, Any] = {"predictive": "linear", "draws": 12, "link": "draws", "seed": 2}
    shifting = credo.predict(DenseLinear(Shifts(), data_size=10, init=0.3), x, shared_draws=True, **options)
    assert torch.equal(x, given)
    plain = credo.predict(dense_linear(), x - 1, shared_draws=True, **options)
    torch.testing.assert_close(shifting.probs, plain.probs)


@pytest.mark.parametrize("shared", [False, True])
def test_rows_that_are_not_finite_are_marked_alone(shared: bool) -> None:
    posterior, x = dense_linear(), rows(6)
    options: dict[str, Any] = {"draws": 4, "shared_draws": shared, "link": "draws"}
    clean = credo.predict(posterior, x, **options)
    x[2, 1] = float("nan")
    with pytest.raises(credo.NonFiniteError, match="row 2"):
        credo.predict(posterior, x, **options)
    for link in ("draws", None):
        marked = credo.predict(posterior, x, **{**options, "link": link}, on_nonfinite="mark")
        assert marked.finite.tolist() == [True, True, False, True, True, True]
    marked = credo.predict(posterior, x, **options, on_nonfinite="mark")
    if shared:
        torch.testing.assert_close(marked.probs[3:], clean.probs[3:])


def test_threads_get_the_same() -> None:
    posteriors = [credo.BBB(network(), data_size=10, init=0.3), dense_linear()]
    for posterior in posteriors:
        alone = credo.predict(posterior, rows(4), predictive="linear", draws=5).probs
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(credo.predict, posterior, rows(4), predictive="linear", draws=5) for _ in range(8)]
            assert all(torch.equal(job.result().probs, alone) for job in jobs)


def test_inference_mode_is_left_for_it() -> None:
    for posterior in (credo.BBB(network(), data_size=10, init=0.3), dense_linear()):
        wanted = credo.predict(posterior, rows(4), predictive="linear", draws=5, shared_draws=True, link="draws")
        with torch.inference_mode():
            found = credo.predict(
                posterior, rows(4) * 1.0, predictive="linear", draws=5, shared_draws=True, link="draws"
            )
        torch.testing.assert_close(found.probs, wanted.probs)


def test_attacks_differentiate_the_linearised_network() -> None:
    """The gradient by the inputs of the averaged probabilities, against finite differences."""
    posterior, x = dense_linear(std=0.2), rows(2).requires_grad_()
    for threat in ("fixed", "one", "mixture"):
        attacked = posterior_logits(posterior, threat, draws=3)
        value = attacked(x)[..., 0].sum()
        (gradient,) = torch.autograd.grad(value, x)
        step = torch.zeros_like(x)
        step[1, 2] = 1e-5
        values = []
        for sign in (1, -1):
            attacked = posterior_logits(posterior, threat, draws=3)
            values.append(attacked(x.detach() + sign * step)[..., 0].sum().item())
        assert gradient[1, 2].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda: credo.BBB(network(), data_size=5), {"predictive": "liner"}, "Did you mean 'linear'"),
        (lambda: credo.BBB(network(), data_size=5), {"link": "probit"}, "link='probit' is for predictive='linear'"),
        (lambda: dense_linear(), {"link": "probitt"}, "Did you mean 'probit'"),
        (lambda: dense_linear(), {"strategy": "activation"}, "leave it out"),
        (
            lambda: dense_linear(likelihood=credo.GaussianNoise(1.0)),
            {"link": "bridge"},
            "GaussianNoise: leave link out",
        ),
        (
            lambda: credo.BBB(network(), data_size=5),
            {"predictive": "linear", "link": "probit"},
            "BBB does not compute: leave link out, or use link='draws'",
        ),
        (
            lambda: credo.MCDropout(network(), data_size=5),
            {"predictive": "linear"},
            "those of MCDropout are not. Use predictive='weights'",
        ),
        (
            lambda: credo.NodeBNN(network(), data_size=5),
            {"predictive": "linear"},
            "those of NodeBNN are not. Use predictive='weights'",
        ),
    ],
)
def test_what_cannot_be_is_said(build: Callable[[], credo.Posterior], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        credo.predict(build(), rows(3), **options)


def test_draws_without_weights_are_not_taken_for_the_mean() -> None:
    class Hidden(credo.MAP):
        is_random = True  # type: ignore[assignment]

    with pytest.raises(ValueError, match="those of Hidden are not"):
        credo.predict(Hidden(network(), data_size=5), rows(3), predictive="linear")


def test_moments_that_a_method_does_not_have() -> None:
    with pytest.raises(TypeError, match="BBB does not compute moments"):
        credo.BBB(network(), data_size=5).function_moments(rows(3))


def test_networks_that_take_whole_graphs_only_are_linearised() -> None:
    """One row alone does not fit to the matrix of edges."""
    torch.manual_seed(0)
    edges, x, y = torch.rand(12, 12).softmax(1), torch.randn(12, 4), torch.arange(12) % 3

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, nodes: Tensor) -> Tensor:
            out: Tensor = self.last(edges @ self.first(edges @ nodes).relu())
            return out

    posterior = credo.Laplace(Graph(), data_size=12).fit([(x, y)])
    assert credo.predict(posterior, x).probs.shape == (12, 3)
