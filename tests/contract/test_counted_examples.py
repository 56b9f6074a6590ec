"""Every method takes `examples` and `weights`: all rows once is the plain step, and nonsense is refused in words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.posterior import Posterior

Build = Callable[..., Posterior]
Network = Callable[[int], nn.Module]


def numbers(posterior: Posterior) -> dict[str, Tensor]:
    state = posterior.state_dict()
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.is_floating_point()}


@pytest.mark.parametrize("options", [{"examples": 12}, {"weights": torch.ones(12)}])
def test_all_rows_once_is_the_plain_step(
    build: Build, normed: Network, batch: tuple[Tensor, Tensor], options: dict[str, Any]
) -> None:
    x, y = batch[0].double(), batch[1]
    one, other = (build(lambda index: normed(index).double()) for _ in range(2))
    for _ in range(2):
        terms = one.step(lambda net: F.cross_entropy(net(x), y))
        counted = other.step(lambda net: F.cross_entropy(net(x), y), **options)
    assert counted.loss == pytest.approx(terms.loss, rel=1e-9)
    found = numbers(other)
    for name, value in numbers(one).items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("options", [{"examples": 0}, {"examples": float("nan")}, {"weights": -torch.ones(12)}])
def test_what_cannot_be_counted_is_refused_before_anything_changes(
    build: Build, plain: Network, batch: tuple[Tensor, Tensor], options: dict[str, Any], same: Callable[..., bool]
) -> None:
    x, y = batch
    posterior = build(plain)
    posterior.step(lambda net: F.cross_entropy(net(x), y))
    before = {name: value.clone() for name, value in numbers(posterior).items()}
    with pytest.raises(ValueError, match=r"examples=|weights "):
        posterior.step(lambda net: F.cross_entropy(net(x), y), **options)
    assert same(numbers(posterior), before)
    posterior.step(lambda net: F.cross_entropy(net(x), y))


@pytest.mark.parametrize("entries", [5, 13])
def test_weights_of_another_length_than_the_batch_are_refused_before_anything_changes(
    build: Build, normed: Network, batch: tuple[Tensor, Tensor], entries: int, same: Callable[..., bool]
) -> None:
    x, y = batch
    posterior = build(normed)
    posterior.step(lambda net: F.cross_entropy(net(x), y))
    before = {name: value.clone() for name, value in numbers(posterior).items()}
    hooks = [len(module._forward_pre_hooks) for module in posterior.modules()]
    with pytest.raises(ValueError, match=rf"weights has {entries} entries, but the network's batch has 12 rows"):
        posterior.step(lambda net: F.cross_entropy(net(x), y), weights=torch.ones(entries))
    assert same(numbers(posterior), before)
    assert [len(module._forward_pre_hooks) for module in posterior.modules()] == hooks
    posterior.step(lambda net: F.cross_entropy(net(x), y), weights=torch.ones(12))
