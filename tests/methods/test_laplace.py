"""Laplace in use: before and after a pass, its state, its errors, and what other parts of the library do with it."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.compress import prune
from credo.core.likelihood import GaussianNoise

STRUCTURES = ["kron", "diag", "full", "low-rank"]
X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
LOADER = [(X[:16], Y[:16]), (X[16:], Y[16:])]


def network(index: int = 0) -> nn.Sequential:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def made(structure: str = "kron", net: nn.Module | None = None, **options: Any) -> credo.Laplace:
    options = {"random": "all", "data_size": 24, "rank": 8, **options}
    return credo.Laplace(network() if net is None else net, structure=structure, **options)


def nll(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), Y)


def same_draws(one: credo.Laplace, other: credo.Laplace) -> bool:
    with one.seeded(3), other.seeded(3):
        first, second = one.draw(), other.draw()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# -- before and after a pass -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_pass_leaves_the_network_as_it_is_and_a_step_drops_the_curvature(structure: str) -> None:
    posterior = made(structure).train()
    before = copy.deepcopy(posterior.model.state_dict())
    mean, covariance = posterior.function_moments(X)
    assert posterior.draw() == {}
    assert not posterior.is_random
    assert torch.equal(covariance, torch.zeros(24, 3, 3))
    assert not any(std.any() for std in posterior.std().values())
    assert posterior.fit(LOADER) is posterior
    assert all(torch.equal(value, before[name]) for name, value in posterior.model.state_dict().items())
    assert posterior.model.training
    assert posterior.is_random
    assert all(bool((std > 0).all()) for std in posterior.std().values())
    assert torch.equal(posterior.function_moments(X)[0], mean)
    posterior.step(nll)
    assert posterior.draw() == {}
    with pytest.raises(credo.CredoError, match=r"call posterior.fit\(loader\) first"):
        posterior.log_marginal_likelihood()


def test_calibrated_predictions_scale_the_covariance_of_functions() -> None:
    posterior = made().fit(LOADER)
    with posterior.snapshot() as frozen:
        frozen.noise_scale = 0.5
        assert torch.allclose(frozen.function_moments(X)[1], 0.25 * posterior.function_moments(X)[1])


def test_training_ends_with_a_pass() -> None:
    posterior = made(random="last", lr=0.02)
    credo.fit(posterior, LOADER, epochs=2, progress=False)
    assert posterior.has_curvature
    assert float(posterior.totals[0]) == 24
    assert posterior.prior is not None


def test_linearised_predictions_are_the_default() -> None:
    assert credo.Laplace.default_predictive == "linear"
    assert credo.MAP.default_predictive == "weights"


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("evidence", ["one", "layer"])
def test_files_and_states_keep_curvature_and_prior(structure: str, evidence: str, tmp_path: Path) -> None:
    posterior = made(structure, evidence=evidence).fit(LOADER)
    loaded = credo.load(credo.save(posterior, tmp_path / "laplace"), model=network(1))
    restored = made(structure, network(2), evidence=evidence)
    restored.load_state_dict(posterior.state_dict())
    for other in (loaded, restored):
        assert isinstance(other, credo.Laplace)
        assert other.log_marginal_likelihood() == pytest.approx(posterior.log_marginal_likelihood(), rel=1e-6)
        assert torch.equal(torch.as_tensor(other.precision), torch.as_tensor(posterior.precision))
        assert same_draws(posterior, other)
        assert other.config()["prior"] == posterior.config()["prior"]


def test_training_resumes_with_the_prior_that_was_chosen_on_the_way(tmp_path: Path) -> None:
    options = {"evidence": {"every": 1}, "random": "last", "lr": 0.02}
    whole, stopped, resumed = (made(**options) for _ in range(3))
    schedule = credo.training.schedule.make_schedule("cosine", epochs=4)
    credo.fit(stopped, LOADER, epochs=2, checkpoint=tmp_path / "c.pt", schedule=schedule, progress=False)
    credo.fit(whole, LOADER, epochs=4, schedule=schedule, progress=False)
    credo.fit(resumed, LOADER, epochs=4, checkpoint=tmp_path / "c.pt", schedule=schedule, progress=False)
    assert resumed.precision == whole.precision
    assert same_draws(resumed, whole)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_copies_for_predictions_share_the_curvature_and_keep_it(structure: str) -> None:
    posterior = made(structure, prior=1.0).fit(LOADER)
    frozen, wanted = posterior.frozen_copy(), posterior.function_moments(X)[1]
    own = [buffer.data_ptr() for buffer in posterior.structure.buffers()]
    assert [buffer.data_ptr() for buffer in frozen.structure.buffers()] == own
    posterior.fit([(3 * X, Y)])
    assert torch.equal(frozen.function_moments(X)[1], wanted)
    assert not torch.equal(posterior.function_moments(X)[1], wanted)
    posterior.load_state_dict(made(structure, prior=1.0).fit([(2 * X, Y)]).state_dict())
    assert torch.equal(frozen.function_moments(X)[1], wanted)


def test_a_copy_is_a_posterior_of_its_own() -> None:
    posterior = made().fit(LOADER)
    other = copy.deepcopy(posterior)
    assert same_draws(posterior, other)
    other.step(nll)
    assert posterior.has_curvature


# -- networks ---------------------------------------------------------------------------------------------------------


class Global(nn.Module):
    """Reads its weights through a global variable, past private copies of it."""

    def forward(self, x: Tensor) -> Tensor:
        return HIDDEN["net"](x)

    def __init__(self) -> None:
        super().__init__()
        self.net = HIDDEN["net"] = network()


HIDDEN: dict[str, nn.Module] = {}


def test_a_network_that_cannot_be_isolated_runs_itself() -> None:
    posterior = made(net=Global(), prior=1.0).fit(LOADER)
    wanted = made(net=network(), prior=1.0).fit(LOADER)
    torch.testing.assert_close([*posterior.std().values()], [*wanted.std().values()])


def test_what_follows_the_last_layer_is_differentiated() -> None:
    """In closed form only if the network's output is the layer's own."""

    class Scaled(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.net, self.how = network(), how

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            return {"new": out * 2, "in place": out.mul_(2) if self.how == "in place" else out}[self.how]

    options = {"random": ["net.3.*"], "prior": 1.0}
    doubled = network()
    with torch.no_grad():
        for parameter in doubled[3].parameters():
            parameter.mul_(2)
    plain = made(net=doubled, random=["3.*"], prior=2.0).fit(LOADER)  # W = 2V has twice the standard deviation
    for how in ("new", "in place"):
        found = made(net=Scaled(how), **options).fit(LOADER).function_moments(X)
        torch.testing.assert_close(found, plain.function_moments(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_logit_without_a_dimension_of_its_own(structure: str) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    flat = nn.Sequential(net, nn.Flatten(0))
    options = {"likelihood": "bernoulli", "random": "last", "prior": 1.0}
    y = (Y == 1).float()
    wanted, found = (made(structure, each, **options).fit([(X, y)]) for each in (net, flat))
    assert found.function_moments(X)[1].shape == (24, 1, 1)
    torch.testing.assert_close(found.function_moments(X), wanted.function_moments(X))


def test_batchnorm_without_running_statistics_is_an_error_unless_only_the_last_layer_is_random() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))
    with pytest.raises(credo.UnsupportedModelError, match="no running statistics"):
        made(net=net).fit(LOADER)
    made(net=net, random="last").fit(LOADER)


def test_affine_parameters_of_norms_are_points_unless_they_are_asked_for() -> None:
    assert not any(name.startswith("1.") for name in made().layout.names)
    assert "1.weight" in made(random="*").fit(LOADER).std()


def test_rows_that_depend_on_each_other_warn() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x - x.mean(0)) * 1.0

    with pytest.warns(credo.ExampleCountWarning, match="depends on the inputs of others"):
        made(net=Centred(), prior=1.0).fit(LOADER)


class Largest(TorchDispatchMode):
    """Records the most entries that a tensor has had."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.entries = max(self.entries, tensor.untyped_storage().nbytes() // max(1, tensor.element_size()))
        return out


def test_many_classes_need_no_more_than_a_matrix_of_the_classes() -> None:
    """φ ⊗ I has batch · classes² · inputs entries, a covariance for each input batch · classes²."""
    classes, inputs, batch = 120, 10, 64
    net, x = nn.Linear(inputs, classes), torch.randn(batch, inputs)
    posterior = credo.Laplace(net, data_size=batch, prior=1.0)
    with Largest() as largest:
        posterior.fit([(x, torch.arange(batch))])
        posterior.draw()
        posterior.function_moments(x, diagonal=True)
    assert largest.entries <= classes**2


# -- errors and warnings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "error", "message"),
    [
        (TensorDataset(X, Y), TypeError, r"DataLoader\(data, batch_size=128\)"),
        ([{"x": X}], TypeError, "batches with targets.*got inputs alone"),
        ([(X, Y, Y)], TypeError, "of Tensor, Tensor, Tensor"),
        ([X], TypeError, "got inputs alone"),
        ([(X, Y[:3])], ValueError, "24 inputs and 3 targets"),
        ([], ValueError, "no batches"),
        ([(X, torch.full((24,), -100))], ValueError, "All labels"),
        ([(X * math.nan, Y)], credo.NonFiniteError, "inputs of rows 0, 1, .* of batch 0 are NaN"),
    ],
)
def test_wrong_batches_say_what_is_wrong_and_change_nothing(loader: Any, error: type, message: str) -> None:
    posterior = made(prior=1.0).fit(LOADER)
    with pytest.raises(error, match=message):
        posterior.fit(loader)
    assert same_draws(posterior, made(prior=1.0).fit(LOADER))


def test_a_data_size_far_from_what_the_pass_saw_warns() -> None:
    with pytest.warns(credo.DataSizeWarning, match=r"data_size=240, but the pass saw 24 examples.*data_size=24"):
        made(data_size=240).fit(LOADER)
    made(data_size=30).fit(DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structure": "block"}, "Unknown structure 'block'"),
        ({"curvature": "hessian"}, "Unknown curvature 'hessian'"),
        ({"temperature": 0.0}, "temperature=0.0 must be a positive number"),
        ({"rank": 0}, "rank=0 must be a whole number of eigenpairs"),
        ({"prior": credo.priors.Laplace(b=0.1)}, "needs a Gaussian prior; got Laplace"),
        ({"prior": 1.0, "prior_precision": 1.0}, "exclude each other"),
        ({"evidence": "weights"}, r"Unknown evidence.groups 'weights'"),
        ({"evidence": {"every": 0}}, r"evidence.every=0 must be a number of epochs"),
        ({"evidence": {"burn_in": -1}}, r"evidence.burn_in=-1 must be a number of epochs"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**{"structure": "kron", **options})


def test_one_output_needs_another_likelihood() -> None:
    with pytest.raises(ValueError, match=r"one class only.*likelihood='bernoulli'"):
        made(net=nn.Linear(4, 1)).fit(LOADER)


def test_tuning_needs_a_curvature_and_a_loss_of_held_out_data() -> None:
    with pytest.raises(credo.CredoError, match="no curvature yet"):
        made().tune_prior_()
    posterior = made().fit(LOADER)
    with pytest.raises(ValueError, match="Unknown by 'grid'"):
        posterior.tune_prior_(by="grid")
    with pytest.raises(ValueError, match="needs nll="):
        posterior.tune_prior_(by="validation")


def test_a_matrix_that_does_not_fit_is_an_error_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(1000, 2000), nn.Linear(2000, 10))
    monkeypatch.setattr("credo.methods.laplace.make.available_bytes", lambda _: 10e9)
    with pytest.raises(
        credo.UnsupportedModelError, match=r"2,022,010 random weights needs about 130,8\d\d.\d GB.*kron"
    ):
        made("full", net)
    wide = nn.Linear(30_000, 10)
    with pytest.raises(credo.UnsupportedModelError, match="structure='diag', or random='last'"):
        made("kron", wide)


def test_an_exact_curvature_of_too_many_outputs_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 30), nn.Unflatten(1, (10, 3)))
    y = torch.randint(3, (24, 10))
    monkeypatch.setattr("credo.methods.laplace.output_curvature.available_bytes", lambda _: 1e4)
    with pytest.raises(credo.UnsupportedModelError, match=r"30 outputs needs as many backward.*curvature='sampled'"):
        made("diag", net).fit([(X, y)])
    made("diag", net, curvature="sampled").fit([(X, y)])


def test_networks_whose_gradients_cannot_be_told_apart_are_an_error_at_construction() -> None:
    net = nn.TransformerEncoderLayer(4, 2, 8)
    with pytest.raises(credo.UnsupportedModelError, match="batch_first=True"):
        made("diag", net)


def test_a_step_during_a_pass_is_found() -> None:
    posterior = made()

    def batches() -> Any:
        yield X, Y
        posterior.step(nll)

    with pytest.raises(credo.CredoError, match="A training step was made during the pass"):
        posterior.fit(batches())
    assert not posterior.has_curvature


# -- other parts of the library --------------------------------------------------------------------------------------


def test_an_ensemble_finds_the_curvature_of_each_member() -> None:
    ensemble = credo.Ensemble([made(net=network(i), random="last") for i in range(2)])
    credo.fit(ensemble, LOADER, epochs=1, progress=False)
    assert all(part.has_curvature for part in ensemble.parts)


def test_a_diagonal_one_is_pruned_and_stays_so(tmp_path: Path) -> None:
    posterior = made("diag", prior=1.0).fit(LOADER)
    evidence = posterior.log_marginal_likelihood()
    masks = prune(posterior, rate=0.5)
    pruned = ~masks["3.weight"]
    assert bool(pruned.any())
    for draw in (posterior.draw(), posterior.fit(LOADER).draw(), posterior.std()):
        assert not draw["3.weight"][pruned].any()
    assert math.isfinite(posterior.log_marginal_likelihood())
    assert posterior.log_marginal_likelihood() != evidence
    loaded = credo.load(credo.save(posterior, tmp_path / "pruned"), model=network(1))
    assert same_draws(posterior, loaded)
    with pytest.raises(credo.UnsupportedModelError, match="structure='diag' only"):
        prune(made("kron", prior=1.0).fit(LOADER))


def test_its_moments_are_the_next_prior() -> None:
    first = made("diag", prior=1.0).fit(LOADER)
    prior = credo.priors.Gaussian(first.mean(), first.std())
    second = made("diag", copy.deepcopy(first.model), prior=prior).fit(LOADER)
    expected = {name: (2 * std**-2 - 1.0) ** -0.5 for name, std in first.std().items()}  # the data twice, and the prior
    torch.testing.assert_close(second.std(), expected)


def test_a_change_of_the_spread_drops_a_calibration() -> None:
    posterior = made().fit(LOADER)
    posterior.calibration = credo.Calibration(noise_scale=0.5)
    with pytest.warns(credo.CalibrationWarning):
        posterior.fit(LOADER)
    assert posterior.calibration is None


def test_half_precision_sums_in_single() -> None:
    net = network().bfloat16()
    posterior = credo.Laplace(net, data_size=24, prior=1.0).fit([(X.bfloat16(), Y)])
    wanted = credo.Laplace(network().bfloat16().float(), data_size=24, prior=1.0).fit([(X.bfloat16().float(), Y)])
    torch.testing.assert_close(posterior.std()["3.weight"].float(), wanted.std()["3.weight"], rtol=0.03, atol=1e-3)


def test_a_noise_for_each_output_stays_as_training_left_it() -> None:
    likelihood = GaussianNoise([0.3, 0.6], learn=True)
    y = torch.randn(24, 2)
    posterior = credo.Laplace(nn.Linear(4, 2), data_size=24, likelihood=likelihood).fit([(X, y)])
    std = posterior.likelihood.moments(torch.zeros(1, 2))[1]
    torch.testing.assert_close(std[0].detach(), torch.tensor([0.3, 0.6]))


@pytest.mark.parametrize("structure", ["kron", "diag", "full", "low-rank"])
def test_files_of_all_weights_are_loaded_whatever_rank_is_given(structure: str, tmp_path: Path) -> None:
    """The rank of eigenpairs counts in the file's size only where there are some."""
    posterior = made(structure, rank=60).fit(LOADER)
    loaded = credo.load(credo.save(posterior, tmp_path / "all"), model=network(1))
    assert same_draws(posterior, loaded)
