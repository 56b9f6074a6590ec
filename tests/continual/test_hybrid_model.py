"""The hybrid model: Bayes' rule against brute force, the temperature, files that hold no code."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.continual import HybridFlow
from credo.continual.hybrid.learner import StreamLearner
from credo.core.errors import FileFormatError


def model_with_tasks(features: int = 4, radius: float = 1.0) -> HybridFlow:
    """Two tasks: classes 0 and 1, then 1 and 2; class 3 is never seen."""
    model = HybridFlow(features, 4, couplings=2, hidden=8, radius=radius)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.flow.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    for labels in ([0, 0, 1], [1, 2]):
        model.count_(torch.tensor(labels), model.add_task())
    return model


def rows(count: int, features: int = 4) -> Tensor:
    return torch.randn(count, features, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def density(model: HybridFlow, row: Tensor, task: int, label: int) -> float:
    """p(x | y, t) the slow way: the Jacobian by autograd and the normal density by torch."""
    with torch.enable_grad():
        jacobian = torch.autograd.functional.jacobian(lambda one: model.flow(one[None])[0][0], row)
    z = model.flow(row[None])[0][0]
    normal = torch.distributions.MultivariateNormal(model.means[task, label], torch.eye(len(row)).to(row))
    return float((normal.log_prob(z) + torch.linalg.slogdet(jacobian).logabsdet).exp())


def test_class_probabilities_and_density_equal_brute_force() -> None:
    model, x = model_with_tasks().double(), rows(6).double()
    probs, log_prob = model.predict(x), model.log_prob(x)
    for row, found, total in zip(x, probs, log_prob, strict=True):
        joint = [0.0] * 4
        for task, labels in ((0, (0, 1)), (1, (1, 2))):
            for label in labels:
                joint[label] += 0.5 * 0.5 * density(model, row, task, label)
        expected = torch.tensor(joint, dtype=torch.float64) / sum(joint)
        torch.testing.assert_close(found, expected)
        assert float(total) == pytest.approx(math.log(sum(joint)), rel=1e-6)


def test_log_prob_integrates_to_one() -> None:
    model = model_with_tasks(features=2)
    axis = torch.linspace(-30, 30, 1201)
    grid = torch.cartesian_prod(axis, axis)
    total = float(model.log_prob(grid).exp().sum()) * float(axis[1] - axis[0]) ** 2
    assert total == pytest.approx(1.0, abs=0.01)


def test_means_are_fixed_by_the_seed_and_the_task() -> None:
    first, second = (HybridFlow(4, 2, seed=7) for _ in range(2))
    for model in (first, second):
        model.add_task()
        model.add_task()
    assert torch.equal(first.means, second.means)
    assert not torch.equal(first.means[0], first.means[1])
    wide = HybridFlow(500, 3, radius=2.0)
    wide.add_task()
    assert float(wide.means.std()) == pytest.approx(2.0, rel=0.1)


def test_by_default_means_are_farther_apart_in_few_dimensions(tmp_path: Path) -> None:
    for features, options, radius in ((784, {"low": 12}, 1.0), (64, {}, 1.0), (784, {"low": 4}, 7.5 / 32**0.5)):
        assert HybridFlow(features, 2, **options).radius == pytest.approx(radius)
    flat = HybridFlow(3, 4)
    for _ in range(2):
        flat.add_task()
    distances = torch.pdist(flat.means.flatten(0, 1))
    assert float(distances.min()) > 0.9 * 7.5 / 2**0.5
    assert float(distances.median()) == pytest.approx(7.5, rel=0.25)
    assert HybridFlow.load(flat.save(tmp_path / "flat.safetensors")).radius == flat.radius


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.bool])
def test_labels_may_be_whole_numbers_of_any_type(dtype: torch.dtype) -> None:
    found = []
    for kind in (torch.int64, dtype):
        learner = StreamLearner(HybridFlow(4, 2, couplings=2, hidden=8))
        x = rows(40)
        y = (x[:, 0] > 0).to(kind)
        for start in range(0, 40, 8):
            learner.step(x[start : start + 8], y[start : start + 8])
        found.append((learner.model.recalibrate_(x, y), learner.predict(x)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("options", [{}, {"actnorm": True}, {"low": 2, "actnorm": True}])
def test_batches_of_one_row_are_learned(options: dict[str, Any]) -> None:
    learner = StreamLearner(HybridFlow(9, 2, couplings=2, hidden=8, **options))
    x = rows(20, 9)
    for row in range(20):
        learner.step(x[row : row + 1], torch.tensor([row % 2]))
    assert bool(learner.predict(x).isfinite().all())


def test_means_keep_their_distance_in_few_dimensions_and_are_plain_draws_in_many() -> None:
    for seed in range(20):
        model = HybridFlow(2, 2, radius=3.0, seed=seed)
        for _ in range(3):
            model.add_task()
        distances = torch.pdist(model.means.flatten(0, 1))
        assert float(distances.min()) > 2.5, "five standard deviations between the centres of neighbours"
    wide = HybridFlow(144, 10, seed=0)
    wide.add_task()
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(wide.means, torch.randn(1, 10, 144, generator=generator))


def test_high_frequencies_have_mean_0_in_every_class() -> None:
    model = HybridFlow(64, 3, low=4)
    model.add_task()
    assert torch.equal(model.means[..., 16:], torch.zeros(1, 3, 48))
    assert bool((model.means[..., :16] != 0).all())


def test_the_temperature_is_the_one_of_the_best_held_out_likelihood_and_keeps_the_labels() -> None:
    model = model_with_tasks(radius=3.0)
    x = rows(400)
    before = model.predict(x)
    y = before.argmax(1)
    y[::5] = torch.where(y[::5] == 0, 1, 0)  # a fifth of the labels are wrong: the model must become less sure

    def nll(temperature: float) -> float:
        model.temperature.fill_(temperature)
        return float(-model.predict(x)[torch.arange(400), y].log().mean())

    chosen = model.recalibrate_(x, y)
    best = nll(chosen)
    assert chosen > 1.5
    assert best < nll(1.0)
    assert all(best <= nll(chosen * factor) + 1e-6 for factor in (0.8, 0.95, 1.05, 1.25))
    with pytest.raises(ValueError, match=r"never learned: \[3\]"):
        model.recalibrate_(x, torch.full((400,), 3))


def test_the_gradient_of_the_functional_penalty_is_zero_at_the_snapshot_only() -> None:
    model = model_with_tasks().double()
    learner = StreamLearner(model, forgetting="functional")
    generator = torch.Generator().manual_seed(0)
    pairs = model.pairs()
    x, z = model.sample(pairs, generator)
    penalty = learner.penalty(x, z, pairs)
    penalty.backward()
    assert penalty.item() < 1e-18
    gradients = nn.utils.parameters_to_vector([p.grad for p in model.flow.parameters() if p.grad is not None])
    assert float(gradients.abs().max()) < 1e-9
    with torch.no_grad():
        for parameter in model.flow.parameters():
            parameter.add_(0.01)
    model.flow.zero_grad()
    learner.penalty(x, z, pairs).backward()
    gradients = nn.utils.parameters_to_vector([p.grad for p in model.flow.parameters() if p.grad is not None])
    assert float(gradients.abs().max()) > 1e-2


def test_a_file_has_the_same_predictions_and_another_or_damaged_one_is_an_error(tmp_path: Path) -> None:
    model, x = model_with_tasks(), rows(5)
    model.temperature.fill_(2.5)
    path = model.save(tmp_path / "flow.safetensors")
    loaded = HybridFlow.load(path)
    assert torch.equal(loaded.predict(x), model.predict(x))
    assert torch.equal(loaded.log_prob(x), model.log_prob(x))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(FileFormatError, match="damaged"):
        HybridFlow.load(path)
    other = credo.save(
        credo.MAP(credo.models.build_model("mlp", inputs=[2], classes=2), data_size=1), tmp_path / "other"
    )
    with pytest.raises(FileFormatError, match="not a file of HybridFlow"):
        HybridFlow.load(other)


def test_bad_input_raises() -> None:
    with pytest.raises(RuntimeError, match="No class was learned"):
        HybridFlow(4, 2).predict(rows(2))
    with pytest.raises(ValueError, match="An input has 3 features; this flow was made for 4"):
        model_with_tasks().predict(rows(2, 3))
    with pytest.raises(ValueError, match="radius=0"):
        HybridFlow(4, 2, radius=0)
    for use in (model_with_tasks().predict, model_with_tasks().log_prob, model_with_tasks().prepared):
        with pytest.raises(ValueError, match=r"Inputs of shape \(4,\) are one input"):
            use(torch.zeros(4))
    learner = StreamLearner(HybridFlow(4, 2, squeeze=0.9))
    with pytest.raises(ValueError, match=r"Inputs from -2 to 3: squeeze= is for pixels in \[0, 1\]"):
        learner.step(torch.tensor([[-2.0, 0, 0, 3]]), torch.tensor([0]))
    with pytest.raises(ValueError, match="Labels from 5 to 6: this model has 2 classes, numbered from 0"):
        learner.step(rows(2), torch.tensor([5, 6]))
