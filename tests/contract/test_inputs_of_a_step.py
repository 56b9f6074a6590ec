"""Several passes of one step on a batch that the network writes into: refused, with nothing changed, or right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo import optim
from credo.core.errors import CredoError
from credo.core.network.inplace_inputs import InputWatch
from credo.core.posterior import Posterior
from credo.methods import BBB, IVON, MAP, VOGN, Ensemble, MCDropout, NoisyKFAC


class Minus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x -= 1.0
        return x


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Minus(), nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))


SEVERAL: dict[str, Callable[[], Posterior]] = {
    "bbb": lambda: BBB(network(), data_size=20, draws=2),
    "bbb lrt": lambda: BBB(network(), data_size=20, draws=2, noise="lrt"),
    "bbb mixture": lambda: BBB(network(), data_size=20, draws=2, prior={"kind": "scale-mixture"}),
    "bbb adversarial": lambda: BBB(network(), data_size=20, noise="adversarial"),
    "vogn": lambda: VOGN(network(), data_size=20, draws=2, curvature={"init": 0.5}),
    "vogn adversarial": lambda: VOGN(network(), data_size=20, noise="adversarial", curvature={"init": 0.5}),
    "ivon": lambda: IVON(network(), data_size=20, draws=2),
    "ensemble": lambda: Ensemble([MAP(network(), data_size=20), MAP(network(), data_size=20)]),
}
SINGLE: dict[str, Callable[[], Posterior]] = {
    "map": lambda: MAP(network(), data_size=20),
    "mc-dropout": lambda: MCDropout(network(), data_size=20, rate=0.1),
    "bbb": lambda: BBB(network(), data_size=20),
    "bbb lrt": lambda: BBB(network(), data_size=20, noise="lrt"),
    "vogn": lambda: VOGN(network(), data_size=20),
    "ivon": lambda: IVON(network(), data_size=20),
    "noisy-kfac": lambda: NoisyKFAC(network(), data_size=20),
}


@pytest.mark.parametrize("method", SEVERAL)
def test_a_batch_that_an_earlier_pass_changed_is_refused(
    method: str, batch: tuple[Tensor, Tensor], same: Callable[[Any, Any], bool]
) -> None:
    posterior, (x, y) = SEVERAL[method](), batch
    before = {name: p.detach().clone() for name, p in posterior.named_parameters()}
    with pytest.raises(CredoError, match=r"changes its input in place.*x\.clone\(\)"):
        posterior.step(lambda net: F.cross_entropy(net(x), y))
    assert same({name: p.detach() for name, p in posterior.named_parameters()}, before)
    assert posterior.steps == 0


@pytest.mark.parametrize("method", SEVERAL)
def test_a_copy_for_each_pass_makes_the_step_that_of_an_unchanged_input(
    method: str, batch: tuple[Tensor, Tensor]
) -> None:
    (x, y), losses = batch, []
    for copy in (True, False):
        posterior = SEVERAL[method]()
        nets = [part.model for part in posterior.parts]
        if not copy:
            for net in nets:
                net[0] = nn.Identity()
        given = x.clone() if copy else x - 1.0
        terms = posterior.step(lambda net, given=given: F.cross_entropy(net(given.clone()), y))
        losses.append(terms.nll)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("method", SINGLE)
def test_a_single_pass_may_change_its_batch(method: str, batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    terms = SINGLE[method]().step(lambda net: F.cross_entropy(net(x), y))
    assert 0 < terms.nll < 10


def test_a_buffer_that_is_filled_anew_is_no_changed_input(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    buffer = torch.empty_like(x)
    posterior = BBB(network(), data_size=20, draws=3)
    assert posterior.step(lambda net: F.cross_entropy(net(buffer.copy_(x)), y)).nll > 0


def test_parts_of_a_batch_in_one_loss_are_no_changed_input(batch: tuple[Tensor, Tensor]) -> None:
    net, watch = network(), InputWatch()
    with watch.over(net):
        assert len([net(part) for part in batch[0].split(6)]) == 2
    with watch.over(net), pytest.raises(CredoError, match="an earlier pass has changed"):
        net(batch[0][6:])


def test_labels_of_the_network_itself_cannot_be_drawn_for_a_changed_input(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    posterior = NoisyKFAC(network(), data_size=20, curvature={"fisher": "sampled"})
    with pytest.raises(CredoError, match=r"second time.*let its forward work on a copy"):
        posterior.step(lambda net: F.cross_entropy(net(x.clone()), y))


def test_the_closure_of_an_optimiser_is_watched(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    net = network()
    optimizer = optim.IVON(net, data_size=20, draws=2)
    with pytest.raises(CredoError, match="changes its input in place"):
        optimizer.step(lambda: F.cross_entropy(net(x), y))
    assert optimizer.step(lambda: F.cross_entropy(net(x.clone()), y)) > 0
