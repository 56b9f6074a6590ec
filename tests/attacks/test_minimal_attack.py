"""The smallest perturbation: distances that are known, inputs that leave the batch, confidence, targets, the box."""

import pytest
import torch
from torch import Tensor, nn

from credo.attacks import minimal

FEATURES = 20


def linear(classes: int = 4, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(FEATURES, classes).double()


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 4)).double()


def inputs(count: int = 30, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.3 + 0.4 * torch.rand(count, FEATURES, generator=generator, dtype=torch.float64)


def distances_to(net: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    """Distance to the boundary between the label and each other class, (z_y − z_j)/‖w_y − w_j‖; inf for the label."""
    z = net(x).detach()
    gaps = z.gather(1, y[:, None]) - z
    lengths = (net.weight[y][:, None] - net.weight[None]).detach().norm(dim=2)
    return (gaps / lengths.clamp_min(1e-12)).scatter(1, y[:, None], torch.inf)


def test_any_other_class_of_a_linear_network() -> None:
    net, x = linear(), inputs()
    y = net(x).argmax(1)
    found = minimal(net, x, y, targets=None, confidence=0.0, bounds=(-99.0, 99.0))
    nearest = distances_to(net, x, y).amin(1)
    assert bool(found.success.all())
    ratio = (found.inputs - x).norm(dim=1) / nearest
    assert float(ratio.min()) >= 1 - 1e-9
    assert float(ratio.median()) < 1.002
    assert float(ratio.quantile(0.9)) < 1.02
    # An input between two classes may end at the second nearest.
    assert float(ratio.max()) < 1.25


def test_the_runner_up_of_a_linear_network() -> None:
    """Headed for the second most probable class, it is never further than that class, and may meet another before."""
    net, x = linear(), inputs()
    z = net(x)
    y, second = z.topk(2).indices.T
    found = minimal(net, x, y, confidence=0.0, bounds=(-99.0, 99.0))
    way = distances_to(net, x, y).gather(1, second[:, None])[:, 0]
    ratio = (found.inputs - x).norm(dim=1) / way
    assert bool(found.success.all())
    assert float(ratio.max()) < 1.02
    assert 0.99 < float(ratio.median()) < 1.002


def test_targets_of_a_linear_network_of_two_classes() -> None:
    net, x = linear(classes=2), inputs()
    y = net(x).argmax(1)
    found = minimal(net, x, y, targets=1 - y, confidence=0.0, bounds=(-99.0, 99.0))
    ratio = (found.inputs - x).norm(dim=1) / distances_to(net, x, y).amin(1)
    assert float(ratio.min()) >= 1 - 1e-9
    assert float(ratio.max()) < 1.005
    torch.testing.assert_close(found.distortion, (found.inputs - x).square().mean(1).sqrt())


def test_targets_must_be_reached() -> None:
    net, x = network(), inputs()
    y, targets = net(x).argmax(1), net(x).argmin(1)
    found = minimal(net, x, y, targets=targets, bounds=(-20.0, 20.0))
    labels = net(found.inputs).argmax(1)
    assert torch.equal(found.success, labels == targets)
    assert float(found.success.double().mean()) > 0.9
    free = minimal(net, x, y, targets=None, bounds=(-20.0, 20.0))
    assert float(free.distortion.mean()) < float(found.distortion[found.success].mean())


@pytest.mark.parametrize("confidence", [0.5, 3.0, 8.0])
def test_confidence_goes_beyond_the_boundary(confidence: float) -> None:
    """On two classes the distance is (margin + confidence)/‖w‖."""
    net, x = linear(classes=2), inputs()
    z = net(x).detach()
    y = z.argmax(1)
    found = minimal(net, x, y, confidence=confidence, bounds=(-99.0, 99.0))
    gap = z.amax(1) - z.amin(1)
    wanted = (gap + confidence) / (net.weight[0] - net.weight[1]).detach().norm()
    ratio = (found.inputs - x).norm(dim=1) / wanted
    assert float(ratio.min()) >= 1 - 1e-9
    assert float(ratio.max()) < 1.01


def test_the_box_is_kept_and_used() -> None:
    """With w = (1, 1, …) and x near the upper bound in half of the features, only the other half can move."""
    net = nn.Linear(4, 2).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.0] * 4, [1.0] * 4]))
        net.bias.copy_(torch.tensor([3.0, 0.0]))
    x = torch.tensor([[1.0, 1.0, 0.2, 0.2]], dtype=torch.float64)
    found = minimal(net, x, torch.tensor([0]), confidence=0.0)
    torch.testing.assert_close(found.inputs, torch.tensor([[1.0, 1.0, 0.5, 0.5]]).double(), rtol=0, atol=0.005)
    assert float(found.inputs.max()) <= 1.0
    impossible = minimal(net, x, torch.tensor([0]), confidence=2.0)
    assert not bool(impossible.success.any() and net(impossible.inputs).diff().item() > 2)


def test_failures_stay_as_they_are() -> None:
    def stubborn(x: Tensor) -> Tensor:
        return torch.stack([x.sum(1) * 0 + 5, x.sum(1) * 1e-3], dim=1)

    x = inputs(3)
    found = minimal(stubborn, x, torch.zeros(3, dtype=torch.int64), steps=20)
    assert not bool(found.success.any())
    assert torch.equal(found.inputs, x)
    assert found.queries.tolist() == [22] * 3


@pytest.mark.parametrize("confidence", [1e-3, 50.0])
def test_wrong_labels_need_no_attack(confidence: float) -> None:
    net, x = network(), inputs()
    y = (net(x).argmax(1) + 1) % 4
    found = minimal(net, x, y, confidence=confidence)
    assert torch.equal(found.inputs, x)
    assert bool(found.success.all())
    assert float(found.distortion.max()) == 0.0
    assert found.queries.tolist() == [3] * 30


@pytest.mark.parametrize("targets", ["runner-up", None])
def test_inputs_leave_the_batch_without_a_trace(targets: str | None) -> None:
    """Each alone gives what all together give; rounding differs between sizes of matrix products."""
    net, x = network(), inputs(12)
    y = net(x).argmax(1)
    together = minimal(net, x, y, targets=targets)
    assert len(set(together.queries.tolist())) > 3
    for row in range(12):
        alone = minimal(net, x[row : row + 1], y[row : row + 1], targets=targets)
        torch.testing.assert_close(alone.inputs[0], together.inputs[row], rtol=1e-8, atol=1e-8)
        assert alone.queries[0] == together.queries[row]


def test_less_work_for_inputs_that_are_done() -> None:
    """The function sees each input as often as `queries` says, no more."""
    net, x = network(), inputs()
    y = net(x).argmax(1)
    seen: list[int] = []

    def counted(x: Tensor) -> Tensor:
        seen.append(len(x))
        return net(x)

    found = minimal(counted, x, y)
    assert sum(seen) == int(found.queries.sum())
    assert sorted(seen[:-1], reverse=True) == seen[:-1]
    assert min(seen) < len(x)


def test_against_a_long_descent_for_each_c() -> None:
    """The slow obvious way: Adam on c·‖r‖ + loss for ten values of c, the smallest success of all."""
    net, x = network(), inputs(6)
    z = net(x)
    y, second = z.topk(2).indices.T
    best = torch.full((6,), torch.inf, dtype=torch.float64)
    for c in torch.logspace(-2, 0.5, 10).tolist():
        r = torch.full_like(x, 1e-4).requires_grad_()
        optimizer = torch.optim.Adam([r], lr=0.01)
        for _ in range(60):
            scores = net((x + r).clamp(0, 1))
            length = ((x + r).clamp(0, 1) - x).norm(dim=1)
            changed = (scores.argmax(1) != y) & (length < best)
            best = torch.where(changed, length, best).detach()
            loss = c * length.sum() + nn.functional.cross_entropy(scores, second, reduction="sum")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = minimal(net, x, y, confidence=0.0)
    ratio = (found.inputs - x).norm(dim=1) / best
    assert bool(found.success.all())
    assert float(ratio.max()) < 1.05


def test_refusals() -> None:
    net, x, y = network(), inputs(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="Unknown targets 'second'"):
        minimal(net, x, y, targets="second")
    with pytest.raises(ValueError, match=r"precision=1\.0"):
        minimal(net, x, y, precision=1.0)
    with pytest.raises(ValueError, match="A target equals"):
        minimal(net, x, y, targets=y)
