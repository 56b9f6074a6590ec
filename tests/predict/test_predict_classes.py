"""Class predictions against a slow loop over the same draws."""

import math
from collections.abc import Callable

import decompositions
import pytest
import torch
from torch import Tensor, nn

import credo
from credo.core.likelihood import Likelihood
from credo.predict import DECOMPOSITIONS, predict_classes, predict_values

SPLITS = {
    "entropy": decompositions.entropy_decomposition,
    "covariance": decompositions.covariance_decomposition,
    "entropy-deviation": decompositions.entropy_deviation_decomposition,
}
Slow = Callable[..., Tensor]


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


def test_probabilities_are_averaged_not_logits(bbb: credo.BBB, x: Tensor, slow_outputs: Slow) -> None:
    outputs = slow_outputs(bbb, x, draws=25)
    prediction = credo.predict(bbb, x, draws=25, strategy="loop")
    close(prediction.probs, outputs.softmax(-1).mean(0))
    assert (prediction.probs - outputs.mean(0).softmax(-1)).abs().max() > 0.01  # the draws do disagree
    close(prediction.probs.sum(-1), torch.ones(len(x)))


def test_printed_it_has_shapes_and_no_numbers(bbb: credo.BBB, x: Tensor, y: Tensor) -> None:
    shown = repr(credo.predict(bbb, [(x, y)], draws=3))
    assert shown.startswith(
        f"ClassPrediction(draws_used [{len(x)}], targets [{len(x)}], log_likelihood [{len(x)}], probs"
    )
    assert "tensor" not in shown
    assert "targets" not in repr(credo.predict(bbb, x, draws=3))


def test_log_likelihood_is_that_of_the_mixture(bbb: credo.BBB, x: Tensor, y: Tensor, slow_outputs: Slow) -> None:
    draws = 25
    log_probs = slow_outputs(bbb, x, draws=draws).log_softmax(-1).double()
    prediction = credo.predict(bbb, [(x, y)], draws=draws, strategy="loop")
    expected = [torch.logsumexp(log_probs[:, i, y[i]], 0).item() - math.log(draws) for i in range(len(x))]
    close(prediction.log_likelihood, torch.tensor(expected))
    assert torch.equal(prediction.targets, y)


def test_log_likelihood_survives_where_the_probability_underflows() -> None:
    """Each draw gives the target e⁻²⁰⁰, which no float32 holds."""
    model = nn.Linear(1, 2)
    nn.init.zeros_(model.weight)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.0, -200.0]))
    posterior = credo.BBB(model, data_size=1, init=1e-4)
    prediction = credo.predict(posterior, [(torch.zeros(3, 1), torch.ones(3, dtype=torch.long))], draws=12)
    close(prediction.log_likelihood, torch.full((3,), -200.0), 1e-4)


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_decompositions_are_those_of_the_stored_draws(name: str, bbb: credo.BBB, x: Tensor, slow_outputs: Slow) -> None:
    probs = slow_outputs(bbb, x, draws=25).softmax(-1).double()
    actual = credo.predict(bbb, x, draws=25, strategy="loop").uncertainty(name)
    expected = SPLITS[name](probs)
    for part in ("total", "aleatoric", "epistemic"):
        close(getattr(actual, part), getattr(expected, part), 1e-5)
    assert expected.epistemic.min() > 1e-3  # something to find


def test_parts_by_class_and_plain_names(bbb: credo.BBB, x: Tensor, slow_outputs: Slow) -> None:
    probs = slow_outputs(bbb, x, draws=25).softmax(-1).double()
    prediction = credo.predict(bbb, x, draws=25, strategy="loop")
    aleatoric, epistemic = (m.diagonal(dim1=-2, dim2=-1) for m in decompositions.covariance_matrices(probs))
    close(prediction.aleatoric_by_class, aleatoric, 1e-5)
    close(prediction.epistemic_by_class, epistemic, 1e-5)
    split = prediction.uncertainty("entropy")
    assert torch.equal(prediction.total, split.total)
    assert torch.equal(prediction.aleatoric, split.aleatoric)
    assert torch.equal(prediction.epistemic, split.epistemic)
    assert torch.equal(prediction.labels, prediction.probs.argmax(-1))
    assert torch.equal(prediction.confidence, prediction.probs.max(-1).values)


def test_mc_error_is_the_standard_error_of_the_worst_class(bbb: credo.BBB, x: Tensor, slow_outputs: Slow) -> None:
    probs = slow_outputs(bbb, x, draws=25).softmax(-1).double()
    mean = probs.mean(0)
    # One more draw of the largest variance a probability of this mean can have.
    variance = ((probs - mean).square().sum(0) + mean * (1 - mean)) / 25
    expected = (variance / 25).sqrt().amax(-1)
    close(credo.predict(bbb, x, draws=25, strategy="loop").mc_error, expected, 1e-5)


def test_unknown_decomposition_names_the_nearest(bbb: credo.BBB, x: Tensor) -> None:
    with pytest.raises(ValueError, match="Did you mean 'covariance'"):
        credo.predict(bbb, x, draws=1).uncertainty("covarience")


def test_one_draw_is_one_network(bbb: credo.BBB, x: Tensor, slow_outputs: Slow) -> None:
    prediction = credo.predict(bbb, x, draws=1, strategy="loop")
    close(prediction.probs, slow_outputs(bbb, x, draws=1)[0].softmax(-1))
    close(prediction.epistemic, torch.zeros(len(x)))


def test_ensemble_takes_its_members_in_turn(x: Tensor, mlp: Callable[..., nn.Module]) -> None:
    """However many draws are asked for, point estimates run once each and count the same, in every batch."""
    networks = [mlp(seed=s) for s in range(3)]
    ensemble = credo.Ensemble([credo.MAP(n, data_size=10) for n in networks])
    each = [n(x).softmax(-1) for n in networks]
    even = credo.predict(ensemble, x, draws=3, batch_size=5)
    close(even.probs, sum(each) / 3)
    for draws in (1, 2, 7):
        other = credo.predict(ensemble, x, draws=draws, batch_size=5)
        assert set(other.draws_used.tolist()) == {3}
        assert torch.equal(other.probs, even.probs)
        assert other.mc_error.max() == 0


def test_random_members_get_the_same_number_of_draws(x: Tensor, mlp: Callable[..., nn.Module]) -> None:
    members = [credo.BBB(mlp(seed=s), data_size=10, init={"rho": -200.0}, seed=s) for s in range(3)]  # hardly random
    prediction = credo.predict(credo.Ensemble(members), x, draws=7, batch_size=5)
    assert set(prediction.draws_used.tolist()) == {9}
    close(prediction.probs, sum(m.model(x).softmax(-1) for m in members) / 3)


def test_map_has_no_epistemic_uncertainty(x: Tensor, mlp: Callable[..., nn.Module]) -> None:
    network = mlp()
    prediction = credo.predict(credo.MAP(network, data_size=10), x, draws=4)
    close(prediction.probs, network(x).softmax(-1))
    close(prediction.epistemic, torch.zeros(len(x)))
    close(prediction.mc_error, torch.zeros(len(x)), 5e-4)


def test_dropout_masks_are_on_while_predicting(x: Tensor, slow_outputs: Slow) -> None:
    network = nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Dropout(0.5), nn.Linear(30, 4))
    posterior = credo.MCDropout(network, data_size=10)
    probs = slow_outputs(posterior, x, draws=25).softmax(-1)
    prediction = credo.predict(posterior, x, draws=25)
    close(prediction.probs, probs.mean(0))
    assert prediction.epistemic.max() > 1e-3


class OneLogit(nn.Module):
    """A network whose outputs are [batch], or [batch, 1]."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.flat = flat
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).squeeze(-1) if self.flat else self.layer(x)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("batch_size", [23, 22, 1])  # 22 leaves a last batch of one
def test_bernoulli(flat: bool, batch_size: int, x: Tensor, y: Tensor, slow_outputs: Slow) -> None:
    posterior = credo.BBB(OneLogit(flat), data_size=10, likelihood="bernoulli", init=0.7)
    yes = slow_outputs(posterior, x, draws=9).reshape(9, len(x)).sigmoid().double()
    labels = y % 2
    batches = list(zip(x.split(batch_size), labels.split(batch_size), strict=True))
    prediction = credo.predict(posterior, batches, draws=9, shared_draws=True, strategy="loop")
    close(prediction.probs, torch.stack([1 - yes.mean(0), yes.mean(0)], -1))
    chosen = torch.where(labels == 1, yes, 1 - yes)
    close(prediction.log_likelihood, chosen.mean(0).log())
    close(prediction.epistemic, decompositions.entropy_decomposition(torch.stack([1 - yes, yes], -1)).epistemic, 1e-5)


@pytest.mark.parametrize("shape", [(23,), (23, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_bernoulli_targets_of_every_kind_that_training_takes(
    shape: tuple[int, ...], dtype: torch.dtype, x: Tensor, y: Tensor
) -> None:
    """As many draws as inputs: a target [batch, 1] must not be taken for [draws, 1]."""
    posterior = credo.BBB(OneLogit(False), data_size=10, likelihood="bernoulli", init=0.7)
    labels = y % 2
    expected = credo.predict(posterior, [(x, labels)], draws=23)
    actual = credo.predict(posterior, [(x, labels.reshape(shape).to(dtype))], draws=23)
    assert torch.equal(actual.log_likelihood, expected.log_likelihood)
    assert torch.equal(actual.targets, labels)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.zeros(23, 4), r"shape \[23\]"),
        (torch.full((23,), 4), "there are 4 classes"),
        (torch.full((23,), -1), "run from -1"),
        (torch.full((23,), 0.5), "whole numbers"),
    ],
)
def test_labels_that_cannot_be(targets: Tensor, message: str, bbb: credo.BBB, x: Tensor) -> None:
    with pytest.raises(ValueError, match=message):
        credo.predict(bbb, [(x, targets)], draws=2)


def test_float64_networks_keep_their_precision(x: Tensor, mlp: Callable[..., nn.Module], slow_outputs: Slow) -> None:
    posterior = credo.BBB(mlp().double(), data_size=10, init=0.5)
    for strategy in ("loop", "activation"):
        assert credo.predict(posterior, x.double(), draws=3, strategy=strategy).probs.dtype == torch.float64
    probs = slow_outputs(posterior, x.double(), draws=25).softmax(-1)
    prediction = credo.predict(posterior, x.double(), draws=25, strategy="loop")
    close(prediction.probs, probs.mean(0), 1e-13)
    close(prediction.epistemic, decompositions.entropy_decomposition(probs).epistemic, 1e-12)


def test_half_precision_networks_are_summed_in_float32(
    x: Tensor, mlp: Callable[..., nn.Module], slow_outputs: Slow
) -> None:
    """Sums of 300 probabilities in bfloat16 would stop growing."""
    posterior = credo.BBB(mlp().bfloat16(), data_size=10, init=0.5)
    probs = slow_outputs(posterior, x.bfloat16(), draws=300).float().softmax(-1)
    close(credo.predict(posterior, x.bfloat16(), draws=300, strategy="loop").probs, probs.mean(0), 1e-5)


def test_outputs_with_positions_are_predicted_at_each_position() -> None:
    posterior = credo.BBB(nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (2, 4))), data_size=10)
    found = credo.predict(posterior, torch.randn(23, 3), draws=2)
    assert isinstance(found, credo.DenseClassPrediction)
    assert found.probs.shape == (23, 2, 4)
    assert len(found) == 23


def test_wrong_kind_of_prediction(bbb: credo.BBB, x: Tensor) -> None:
    assert isinstance(predict_classes(bbb, x, draws=1), credo.ClassPrediction)
    with pytest.raises(TypeError, match=r"Gaussian likelihood is needed.*Categorical"):
        predict_values(bbb, x, draws=1)


def test_a_likelihood_that_predict_does_not_know(x: Tensor, mlp: Callable[..., nn.Module]) -> None:
    class Poisson(Likelihood):
        task = "counts"

        def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
            return nn.functional.poisson_nll_loss(outputs, y)

        def config(self) -> dict[str, str]:
            return {"kind": "poisson"}

    with pytest.raises(TypeError, match="cannot average Poisson"):
        credo.predict(credo.BBB(mlp(), data_size=10, likelihood=Poisson()), x, draws=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draws": 0}, "draws=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"tolerance": 0.0}, "tolerance=0.0"),
        ({"tolerance": -1.0}, "tolerance=-1.0"),
        ({"tolerance": math.nan}, "tolerance=nan"),
        ({"strategy": "activations"}, "Did you mean 'activation'"),
    ],
)
def test_impossible_options(options: dict[str, float], message: str, bbb: credo.BBB, x: Tensor) -> None:
    with pytest.raises(ValueError, match=message):
        credo.predict(bbb, x, **options)


def test_rows_without_a_label_are_named_with_the_way_out() -> None:
    posterior = credo.MAP(torch.nn.Linear(3, 2), data_size=4)
    with pytest.raises(ValueError, match=r"-100 marks rows without a label: leave these out"):
        credo.predict(posterior, [(torch.zeros(3, 3), torch.tensor([0, -100, 1]))])
