"""The Bayesian last layer in use: before and after a pass, its state, its networks, its errors."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.core.likelihood import GaussianNoise
from credo.core.saved.finite_state import unsound

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 3
VALUES = X[:, :3] + 0.3 * torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
TARGETS = {"categorical": LABELS, "gaussian": VALUES}
TASKS = pytest.mark.parametrize("task", TARGETS)


def network(index: int = 0) -> nn.Sequential:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def made(task: str = "categorical", net: nn.Module | None = None, **options: Any) -> credo.LastLayer:
    options = {"likelihood": task, "data_size": 24, **options}
    return credo.LastLayer(network() if net is None else net, **options)


def loader(task: str = "categorical", x: Tensor = X) -> list[tuple[Tensor, Tensor]]:
    return [(x[:16], TARGETS[task][:16]), (x[16:], TARGETS[task][16:])]


def nll(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), LABELS)


def same_draws(one: Any, other: Any) -> bool:
    with one.seeded(3), other.seeded(3):
        first, second = one.draw(), other.draw()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# -- before and after a pass ------------------------------------------------------------------------------------------


@TASKS
def test_a_pass_changes_the_last_layer_alone_and_a_step_drops_the_posterior(task: str) -> None:
    posterior = made(task).train()
    before = copy.deepcopy(posterior.model.state_dict())
    assert posterior.draw() == {}
    assert not posterior.is_random
    assert not posterior.function_moments(X)[1].any()
    assert not any(std.any() for std in posterior.std().values())
    assert posterior.fit(loader(task)) is posterior
    changed = [n for n, value in posterior.model.state_dict().items() if not torch.equal(value, before[n])]
    assert changed == ["3.weight", "3.bias"]
    assert posterior.model.training
    assert posterior.is_random
    assert all(bool((std > 0).all()) for std in posterior.std().values())
    posterior.step(lambda net: posterior.likelihood.nll(net(X), TARGETS[task]))
    assert posterior.draw() == {}
    with pytest.raises(credo.CredoError, match=r"call fit\(loader\) first"):
        posterior.log_marginal_likelihood()


@TASKS
def test_training_ends_with_a_pass(task: str) -> None:
    posterior = made(task, lr=0.02)
    credo.fit(posterior, loader(task), epochs=2, progress=False)
    again = made(task, copy.deepcopy(posterior.model))
    again.likelihood.load_state_dict(posterior.likelihood.state_dict())
    assert float(posterior.gaussian.rows) == 24
    # What depends on the features alone, which the second pass finds as the first left them.
    torch.testing.assert_close(again.fit(loader(task)).std(), posterior.std(), rtol=0.02, atol=1e-4)


def test_the_plain_network_predicts_with_the_posterior_mean() -> None:
    posterior = made("gaussian").fit(loader("gaussian"))
    assert torch.equal(posterior.function_moments(X)[0], posterior.model.eval()(X))


def test_a_regression_is_predicted_in_closed_form() -> None:
    posterior = made("gaussian").fit(loader("gaussian"))
    outputs, variances = posterior.function_moments(X, diagonal=True)
    noise = F.softplus(posterior.likelihood.noise_rho).item()
    prediction = credo.predict(posterior, loader("gaussian"))
    torch.testing.assert_close(prediction.mean, outputs)
    torch.testing.assert_close(prediction.epistemic, variances.sqrt())
    torch.testing.assert_close(prediction.aleatoric, torch.full_like(variances, noise))
    wanted = torch.distributions.Normal(outputs, (variances + noise**2).sqrt()).log_prob(VALUES).sum(1)
    torch.testing.assert_close(prediction.log_likelihood.float(), wanted)


def test_classes_are_predicted_by_the_probit_which_changes_no_label() -> None:
    posterior = made().fit(loader())
    outputs, variances = posterior.function_moments(X, diagonal=True)
    prediction = credo.predict(posterior, X, link="probit")
    torch.testing.assert_close(prediction.probs, (outputs / (1 + math.pi / 8 * variances).sqrt()).softmax(-1))
    assert torch.equal(prediction.labels, outputs.argmax(-1))
    assert bool((credo.predict(posterior, X).epistemic > 0).all())


@TASKS
def test_draws_are_predicted_and_calibrated(task: str) -> None:
    posterior = made(task).fit(loader(task))
    plain = credo.predict(posterior, X, draws=4)
    assert len(plain) == 24
    credo.calibrate(posterior, loader(task, X + 0.01), draws=4, progress=False)
    assert posterior.calibration is not None
    with pytest.warns(credo.CalibrationWarning):
        posterior.update_(X[:4], TARGETS[task][:4])
    assert posterior.calibration is None


# -- state ------------------------------------------------------------------------------------------------------------


@TASKS
@pytest.mark.parametrize("prior", [None, 0.5, {"kind": "gaussian", "mean": 0.1, "std": {"*bias": 2.0, "*": 1.0}}])
def test_files_and_states_keep_the_posterior_and_can_be_added_to(task: str, prior: Any, tmp_path: Path) -> None:
    posterior = made(task, prior=prior).fit(loader(task))
    loaded = credo.load(credo.save(posterior, tmp_path / "layer"), model=network(1))
    restored = made(task, network(2), prior=prior)
    restored.load_state_dict(posterior.state_dict())
    for other in (loaded, restored):
        assert isinstance(other, credo.LastLayer)
        assert other.log_marginal_likelihood() == posterior.log_marginal_likelihood()
        assert same_draws(posterior, other)
    posterior.update_(X[:4], TARGETS[task][:4])
    for other in (loaded, restored):
        other.update_(X[:4], TARGETS[task][:4])
        assert same_draws(posterior, other)


def test_a_prior_by_weight_is_loaded_from_files(tmp_path: Path) -> None:
    prior = credo.priors.Gaussian(0.0, {"3.weight": torch.rand(3, 5) + 0.5, "*": 1.0})
    posterior = made("gaussian", prior=prior).fit(loader("gaussian"))
    loaded = credo.load(credo.save(posterior, tmp_path / "layer"), model=network(1))
    assert same_draws(posterior, loaded)


def test_a_chosen_prior_is_described_and_stays_open_in_files(tmp_path: Path) -> None:
    loaded = credo.load(credo.save(made().fit(loader()), tmp_path / "layer"), model=network(1))
    assert loaded.prior is None
    assert loaded.describe().prior.std == pytest.approx(float(loaded.gaussian.alpha) ** -0.5)
    assert float(loaded.gaussian.alpha) != 1.0


@TASKS
def test_updates_alone_choose_nothing(task: str) -> None:
    posterior, given = made(task), made(task, prior=1.0)
    for one in (posterior, given):
        one.step(lambda net: F.mse_loss(net(X), VALUES))
        for row in range(0, 24, 6):
            one.update_(X[row : row + 6], TARGETS[task][row : row + 6])
    assert float(posterior.gaussian.alpha) == 1.0
    torch.testing.assert_close(posterior.std(), given.std(), rtol=0.1, atol=0)


@pytest.mark.parametrize(("name", "value"), [("gram", -1.0), ("squares", -1.0), ("rows", -1.0), ("cross", math.nan)])
def test_states_of_no_posterior_are_found(name: str, value: float) -> None:
    posterior = made("gaussian").fit(loader("gaussian"))
    state = posterior.state_dict()
    assert unsound(posterior, state) == []
    state[f"gaussian.{name}"].view(-1)[0] = value
    assert f"gaussian.{name} holds" in unsound(posterior, state)[0]


@TASKS
def test_copies_for_predictions_keep_what_they_have(task: str) -> None:
    posterior = made(task, prior=1.0).fit(loader(task))
    frozen, wanted = posterior.frozen_copy(), posterior.function_moments(X)
    posterior.update_(X, TARGETS[task])
    torch.testing.assert_close(frozen.function_moments(X), wanted, rtol=0, atol=0)
    assert bool((posterior.function_moments(X, diagonal=True)[1] < wanted[1].diagonal(dim1=1, dim2=2)).all())


def test_threads_that_add_data_lose_none() -> None:
    together, alone = (made("gaussian", prior=1.0, likelihood=GaussianNoise(0.3)) for _ in range(2))
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(together.update_, X[i : i + 1], VALUES[i : i + 1]) for i in range(24)]:
            done.result()
    alone.fit(loader("gaussian"))
    assert float(together.gaussian.rows) == 24
    torch.testing.assert_close(together.mean(), alone.mean())


def test_the_global_generator_is_left_alone() -> None:
    posterior, batches = made(), DataLoader(TensorDataset(X, LABELS), batch_size=8, shuffle=True)
    torch.manual_seed(4)
    wanted = torch.rand(3)
    torch.manual_seed(4)
    posterior.fit(batches)
    assert torch.equal(torch.rand(3), wanted)


# -- networks ---------------------------------------------------------------------------------------------------------


class Headed(nn.Module):
    """A head that is registered first, deep inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(5, 3)]), "body": nn.Linear(4, 5)})

    def forward(self, x: Tensor) -> Tensor:
        return self.inner["heads"][0](self.inner["body"](x).tanh())


class Flat(nn.Module):
    """One output for each input, without a dimension of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(-1, 2, 2)).mean(1)


class Direct(nn.Module):
    """Uses the weights of its layer, not the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight, self.layer.bias)


def test_the_network_may_be_the_layer() -> None:
    posterior = made("gaussian", nn.Linear(4, 3), prior=1.0, likelihood=GaussianNoise(0.3)).fit(loader("gaussian"))
    phi = torch.cat([X, torch.ones(24, 1)], 1).double()
    precision = phi.T @ phi / 0.09 + torch.eye(6 - 1)
    wanted = torch.linalg.solve(precision, phi.T @ VALUES.double() / 0.09)
    torch.testing.assert_close(posterior.mean()["weight"].double(), wanted[:-1].T, rtol=0, atol=1e-6)
    assert list(posterior.draw()) == ["weight", "bias"]


def test_a_head_that_is_not_the_last_is_named() -> None:
    with pytest.raises(credo.UnsupportedModelError, match=r"nn.Linear 'inner.body', run once.*name it: layer="):
        made(net=Headed()).fit(loader())
    posterior = made(net=Headed(), layer="inner.heads.0").fit(loader())
    assert list(posterior.mean()) == ["inner.heads.0.weight", "inner.heads.0.bias"]


@pytest.mark.parametrize("task", ["gaussian", "bernoulli"])
def test_outputs_may_be_squeezed(task: str) -> None:
    y = (VALUES[:, 0] > 0).float() if task == "bernoulli" else VALUES[:, 0]
    posterior = made(task, Flat()).fit([(X, y)])
    outputs, covariance = posterior.function_moments(X)
    assert outputs.shape == (24, 1)
    assert covariance.shape == (24, 1, 1)


@pytest.mark.parametrize(
    ("net", "labels"),
    [
        (Twice(), LABELS),
        (Positions(), LABELS),
        (Direct(), LABELS),
        (nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(-1)), LABELS),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True)), LABELS),
    ],
    ids=["used twice", "on positions", "past the layer", "softmax behind it", "in place behind it"],
)
def test_networks_whose_output_is_not_the_layers_are_refused(net: nn.Module, labels: Tensor) -> None:
    before = copy.deepcopy(net.state_dict())
    posterior = made(net=net)
    with pytest.raises(credo.UnsupportedModelError, match="run once, on one row for each input, with no function"):
        posterior.fit([(X, labels)])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not posterior.is_random


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    return net


@pytest.mark.parametrize(
    ("net", "options", "message"),
    [
        (tied(), {}, "the weights of '2' in Sequential are shared with another layer"),
        (nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten()), {}, "Sequential has none"),
        (network(), {"layer": "2"}, "Unknown nn.Linear in layer= '2'"),
        (network(), {"likelihood": GaussianNoise(heteroscedastic=True)}, "no closed form for .*heteroscedastic"),
        (nn.Linear(4, 1), {}, "1 output, and Categorical needs one for each class: use Bernoulli"),
        (network(), {"prior": credo.priors.Laplace(b=0.1)}, "needs a Gaussian prior; got Laplace"),
        (network(), {"prior": 1.0, "prior_precision": 1.0}, "exclude each other"),
    ],
)
def test_what_has_no_closed_form_raises_at_once(net: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(net=net, **options)


def test_a_network_that_reads_a_global_variable_runs_itself() -> None:
    inner = network()

    class Global(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = inner

        def forward(self, x: Tensor) -> Tensor:
            return HIDDEN["net"](x)

    HIDDEN["net"] = inner
    posterior = made(net=Global(), prior=1.0).fit(iter(loader()))
    torch.testing.assert_close([*posterior.std().values()], [*made(prior=1.0).fit(loader()).std().values()])


HIDDEN: dict[str, nn.Module] = {}


def test_half_precision_is_summed_in_double() -> None:
    half = made("gaussian", network().bfloat16(), prior=1.0).fit([(X.bfloat16(), VALUES.bfloat16())])
    wide = made("gaussian", network().bfloat16().float(), prior=1.0).fit([(X.bfloat16().float(), VALUES)])
    torch.testing.assert_close(half.std()["3.weight"].float(), wide.std()["3.weight"], rtol=0.03, atol=1e-3)


# -- errors and warnings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        (TensorDataset(X, LABELS), TypeError, r"DataLoader\(data, batch_size=128\)"),
        ([{"x": X}], TypeError, "batches with targets.*got inputs alone"),
        ([(X, LABELS[:3])], ValueError, "24 inputs and 3 targets"),
        ([(X, LABELS + 1)], ValueError, "Labels run from 1 to 3"),
        ([], ValueError, "no batches"),
        ([(X * math.nan, LABELS)], credo.NonFiniteError, "batch 0 of the pass is NaN"),
    ],
)
def test_wrong_batches_say_what_is_wrong_and_change_nothing(batches: Any, error: type, message: str) -> None:
    posterior = made(prior=1.0).fit(loader())
    with pytest.raises(error, match=message):
        posterior.fit(batches)
    assert same_draws(posterior, made(prior=1.0).fit(loader()))


def test_soft_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        made("bernoulli", nn.Linear(4, 1)).fit([(X, torch.rand(24))])


def test_a_pass_over_other_data_than_the_training_set_warns() -> None:
    """Such as a calibration set, of which the posterior would be taken for that of the training data."""
    with pytest.warns(credo.DataSizeWarning, match=r"data_size=240, but the pass saw 24 examples"):
        made(data_size=240).fit(loader())


def test_an_error_of_the_solver_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = made("gaussian").fit(loader("gaussian"))
    before = copy.deepcopy(posterior.state_dict())
    monkeypatch.setattr(posterior.gaussian, "refresh_", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        posterior.fit([(2 * X, VALUES + 1)])
    monkeypatch.undo()
    after = posterior.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items() if isinstance(value, Tensor))
    posterior.draw()


def test_a_step_during_a_pass_is_found() -> None:
    posterior = made()

    def batches() -> Any:
        yield X, LABELS
        posterior.step(nll)

    with pytest.raises(credo.CredoError, match="A training step was made during the pass"):
        posterior.fit(batches())
    assert not posterior.has_curvature


# -- other parts of the library ---------------------------------------------------------------------------------------


def test_an_ensemble_finds_the_posterior_of_each_member() -> None:
    ensemble = credo.Ensemble([made(net=network(i)) for i in range(2)])
    credo.fit(ensemble, loader(), epochs=1, progress=False)
    assert all(part.has_curvature for part in ensemble.parts)


def test_it_cannot_be_pruned() -> None:
    with pytest.raises(credo.UnsupportedModelError, match="LastLayer cannot be pruned"):
        made().fit(loader()).keep_({})


def test_tasks_one_after_the_other_are_learned_as_if_at_once() -> None:
    """Continual learning on fixed features: nothing is forgotten."""
    posterior, net = made("gaussian", prior=1.0, likelihood=GaussianNoise(0.3)), network()
    for task in range(3):
        rows = slice(8 * task, 8 * task + 8)
        posterior.update_(X[rows], VALUES[rows])
    together = made("gaussian", net, prior=1.0, likelihood=GaussianNoise(0.3)).fit(loader("gaussian"))
    torch.testing.assert_close(posterior.function_moments(X), together.function_moments(X))
