"""Steps in bfloat16 and float16: nearly those of single precision, with parameters that stay as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.optimizer_step import scaled_backward
from credo.core.per_example.api import batch_gradients
from credo.core.per_example.plan import PerExamplePlan
from credo.training.hardware.precision import Precision
from credo.training.state import Progress

METHODS = [credo.MAP, credo.BBB, credo.VOGN, credo.OGN, credo.IVON, credo.NodeBNN, credo.NoisyKFAC, credo.SGHMC]
SCALED = [credo.MAP, credo.BBB, credo.IVON, credo.NodeBNN, credo.SGHMC, credo.SWAG, credo.Laplace]


def net() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(128, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return [*zip(x.split(32), x.flatten(1)[:, :3].argmax(1).split(32), strict=True)]


def trained(method: Any, **options: Any) -> tuple[Any, list[credo.training.EpochRecord]]:
    posterior = method(net(), data_size=128)
    return posterior, [*credo.train(posterior, batches(), epochs=4, **options)]


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_trains_to_nearly_the_same_loss(method: Any) -> None:
    (_, wanted), (posterior, found) = trained(method), trained(method, precision="bfloat16")
    assert found[-1].nll == pytest.approx(wanted[-1].nll, abs=0.01)
    assert found[-1].nll != wanted[-1].nll  # autocast was on
    assert {p.dtype for p in posterior.parameters()} == {torch.float32}


@pytest.mark.parametrize("method", SCALED)
def test_float16_trains_to_nearly_the_same_loss(method: Any) -> None:
    (_, wanted), (posterior, found) = trained(method), trained(method, precision="float16")
    assert found[-1].nll == pytest.approx(wanted[-1].nll, abs=0.01)
    assert {p.dtype for p in posterior.parameters()} == {torch.float32}
    assert posterior.loss_scale == 1.0


@pytest.mark.parametrize("method", [credo.VOGN, credo.OGN, credo.NoisyKFAC, credo.KFAC])
def test_methods_that_square_gradients_on_the_way_raise_in_float16(method: Any) -> None:
    with pytest.raises(ValueError, match=r"squares gradients inside the backward pass.*precision='bfloat16'"):
        trained(method, precision="float16")


def test_an_unknown_precision_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Unknown precision 'half'. Possible: bfloat16, float16, float32"):
        trained(credo.MAP, precision="half")


@pytest.mark.parametrize("scale", [2.0**4, 2.0**16])
@pytest.mark.parametrize("method", SCALED)
def test_a_scaled_loss_gives_the_same_step(method: Any, scale: float) -> None:
    """A power of two changes no digit as long as nothing overflows: in single precision, not one."""
    x, y = batches()[0]
    found = []
    for factor in (1.0, scale):
        posterior = method(net(), data_size=128)
        for part in posterior.all_posteriors():
            part.loss_scale = factor
        terms = [posterior.step(lambda net: F.cross_entropy(net(x), y)) for _ in range(3)]
        found.append((terms, posterior.state_dict()))
    assert found[0][0] == found[1][0]
    for name, tensor in found[0][1].items():
        if isinstance(tensor, Tensor):
            torch.testing.assert_close(found[1][1][name], tensor, rtol=0, atol=0, msg=name)


def test_a_scaled_backward_pass_adds_to_what_was_there() -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    w.grad = torch.tensor([10.0, 20.0])
    scaled_backward((w * w).sum(), 1024.0, [], fraction=0.5)
    assert w.grad.tolist() == [11.0, 22.0]


def test_small_gradients_survive_in_float16_only_with_a_scale() -> None:
    x, y = torch.randn(64, 16), torch.zeros(64, 1)
    norms = []
    for scale in (1.0, 2.0**16):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = 1e-7 * (net(x).float() - y).square().mean()
        scaled_backward(loss, scale, [*net.parameters()])
        norms.append(float(net[0].weight.grad.norm()))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    (1e-7 * (net(x) - y).square().mean()).backward()
    exact = float(net[0].weight.grad.norm())
    assert norms[1] == pytest.approx(exact, rel=0.01)
    assert abs(norms[0] / exact - 1) > 0.05


def test_an_overflow_halves_the_scale_and_repeats_the_step() -> None:
    posterior, progress = credo.BBB(net(), data_size=128), Progress()
    precision = Precision("float16", posterior, progress)
    x, y = batches()[0]
    scales = []

    def loss(net: nn.Module) -> Tensor:
        scales.append(posterior.loss_scale)
        # As large as a gradient may be in float16, at a scale of 2**14.
        return 16 * F.cross_entropy(net(x) * 4, y)

    state = posterior.generator.get_state()
    precision.step(lambda: posterior.step(loss))
    assert posterior.steps == 1
    assert scales[0] == 2.0**16
    assert progress.loss_scale == scales[-1] < 2.0**16
    assert sorted(set(scales), reverse=True) == [2.0**16 / 2**k for k in range(len(set(scales)))]
    after = posterior.generator.get_state()
    plain = credo.BBB(net(), data_size=128)
    assert torch.equal(plain.generator.get_state(), state)
    plain.step(lambda net: F.cross_entropy(net(x), y))
    assert torch.equal(plain.generator.get_state(), after)  # one draw, however often it was tried


def test_a_scale_grows_again_after_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("credo.training.hardware.precision._STEADY", 3)
    posterior, progress = credo.MAP(nn.Linear(2, 2), data_size=8), Progress(loss_scale=4.0)
    precision = Precision("float16", posterior, progress)
    x, y = torch.randn(8, 2), torch.arange(8) % 2
    for _ in range(7):
        precision.step(lambda: posterior.step(lambda net: F.cross_entropy(net(x), y)))
    assert (progress.loss_scale, progress.steady) == (16.0, 1)


def test_what_is_not_finite_at_any_scale_raises() -> None:
    posterior = credo.MAP(nn.Linear(2, 2), data_size=8)
    before = posterior.model.weight.clone()
    data = [(torch.full((8, 2), torch.nan), torch.arange(8) % 2)]
    with pytest.raises(credo.NonFiniteError, match=r"rows 0, 1, .* are NaN or infinite.*unchanged"):
        credo.fit(posterior, data, epochs=1, precision="float16", progress=False)
    assert torch.equal(posterior.model.weight, before)


def test_squares_of_single_rows_are_right_in_bfloat16() -> None:
    """Against those of one row at a time, in the same precision."""
    x, y = batches()[0]
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

    def loss(rows: slice) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(net(x[rows]).float(), y[rows])

    plan = PerExamplePlan(net, [name for name, _ in net.named_parameters()])
    weights = {name: p.detach() for name, p in net.named_parameters()}
    found = batch_gradients(plan, weights, lambda net: loss(slice(0, 32))).squares
    wanted = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for row in range(32):
        net.zero_grad()
        loss(slice(row, row + 1)).backward()
        for name, p in net.named_parameters():
            wanted[name] += p.grad.square()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0.05, atol=0.01 * float(value.max()), msg=name)


def test_a_training_resumed_in_another_precision_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    credo.fit(credo.MAP(net(), data_size=128), batches(), epochs=1, checkpoint=path, progress=False)
    with pytest.warns(credo.CheckpointWarning, match="precision float32 is now bfloat16"):
        records = [
            *credo.train(
                credo.MAP(net(), data_size=128), batches(), epochs=2, schedule="constant", checkpoint=path,
                precision="bfloat16",
            )
        ]  # fmt: skip
    assert len(records) == 2


def test_float16_resumes_bit_for_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 3, "precision": "float16", "schedule": "constant"}
    whole = credo.fit(credo.BBB(net(), data_size=128), batches(), progress=False, **options)
    stopped = credo.BBB(net(), data_size=128)
    for record in credo.train(stopped, batches(), checkpoint=tmp_path / "run.pt", **options):
        if record.epoch == 2:
            break
    resumed = credo.BBB(net(), data_size=128)
    credo.fit(resumed, batches(), checkpoint=tmp_path / "run.pt", progress=False, **options)
    assert all(torch.equal(resumed.mean()[name], value) for name, value in whole.mean().items())
