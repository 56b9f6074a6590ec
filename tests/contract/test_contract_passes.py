"""What a pass may and may not do, for every method."""

import copy

import pytest
import torch
from torch import Tensor, nn

from credo.core.posterior import GaussianPosterior


class Bomb(nn.Module):
    """Raises when armed."""

    armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise RuntimeError("bomb")
        return x


def bombed(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), Bomb(), nn.Tanh(), nn.Linear(6, 3))


def arm(posterior: nn.Module, armed: bool) -> None:
    for module in posterior.modules():
        if isinstance(module, Bomb):
            module.armed = armed


def tensors(posterior: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in posterior.state_dict().items() if isinstance(value, Tensor)}


def hooks(module: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


def rates(module: nn.Module) -> list[float]:
    return [m.p for m in module.modules() if isinstance(m, nn.Dropout)]


def test_a_pass_leaves_parameters_bit_equal_and_the_very_same_objects(build, plain, batch, same) -> None:
    posterior = build(plain)
    before, identities = tensors(posterior), [id(p) for p in posterior.parameters()]
    for _ in range(3):
        posterior(batch[0])
    for draw in posterior.iter_draws(3):
        with posterior.sampled(draw) as net:
            net(batch[0])
    assert same(tensors(posterior), before)
    assert [id(p) for p in posterior.parameters()] == identities
    assert hooks(posterior) == 0


@pytest.mark.parametrize("way", ["forward", "step"])
def test_a_network_that_raises_half_way_is_left_as_it_was_and_works_afterwards(build, batch, train, same, way) -> None:
    posterior = build(bombed)
    train(posterior, 2)
    before, identities = tensors(posterior), [id(p) for p in posterior.parameters()]
    before_rates, steps, expected = rates(posterior), posterior.steps, posterior.model.eval()(batch[0])
    posterior.model.train()
    arm(posterior, True)
    with pytest.raises(RuntimeError, match="bomb"):
        train(posterior, 1) if way == "step" else posterior(batch[0])
    arm(posterior, False)
    assert same(tensors(posterior), before)
    assert [id(p) for p in posterior.parameters()] == identities
    assert (hooks(posterior), rates(posterior), posterior.steps) == (0, before_rates, steps)
    assert torch.equal(posterior.model.eval()(batch[0]), expected)
    train(posterior, 1)


def test_an_exception_of_any_kind_inside_sampled_restores_the_network(build, plain, same) -> None:
    posterior = build(plain)
    before = tensors(posterior)
    with pytest.raises(KeyboardInterrupt), posterior.sampled():
        raise KeyboardInterrupt
    assert same(tensors(posterior), before)
    assert hooks(posterior) == 0


def test_the_global_generator_is_untouched_by_construction_steps_draws_and_passes(build, normed, batch, train) -> None:
    networks = [normed(0), normed(1)]
    torch.manual_seed(123)
    before = torch.get_rng_state()
    posterior = build(lambda index: networks[index])
    train(posterior, 2)
    posterior(batch[0])
    list(posterior.iter_draws(2))
    posterior.eval()
    posterior(batch[0])
    posterior.state_dict()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_global_generator_has_no_say(build, normed, batch, train, same) -> None:
    def run(noise: int) -> tuple[list, Tensor]:
        posterior = build(normed)
        torch.manual_seed(noise)
        terms = train(posterior, 3)
        return terms, posterior(batch[0])

    assert same(run(1), run(2))


def test_seeded_repeats_and_leaves_the_own_generator_untouched(build, plain, batch, train, same) -> None:
    posterior, other = build(plain), build(plain)
    outputs = []
    for _ in range(2):
        with posterior.seeded(5):
            outputs.append([posterior(batch[0]) for _ in range(3)])
    with pytest.raises(ZeroDivisionError), posterior.seeded(6):
        posterior(batch[0]) / (1 / 0)
    assert same(outputs[0], outputs[1])
    assert same(train(posterior, 3), train(other, 3))
    assert same(posterior.state_dict(), other.state_dict())


def test_another_seed_gives_other_passes(build_stochastic, plain, batch) -> None:
    posterior = build_stochastic(plain)
    outputs = []
    for seed in range(8):
        with posterior.seeded(seed):
            outputs.append(posterior(batch[0]))
    # An ensemble of two point estimates gives eight equal ones with a chance of 2/256; the seeds are fixed.
    assert any(not torch.equal(outputs[0], other) for other in outputs[1:])


def test_gradients_reach_inputs_through_the_average_of_several_draws(build, plain, batch) -> None:
    posterior = build(lambda index: plain(index).double()).eval()
    x = batch[0].double().requires_grad_()
    with posterior.seeded(3):
        average = torch.stack([posterior(x).softmax(1) for _ in range(4)]).mean(0)
    (together,) = torch.autograd.grad(average[:, 0].log().sum(), x)
    with posterior.seeded(3):
        parts = [
            torch.autograd.grad((posterior(x).softmax(1)[:, 0] / average[:, 0].detach()).sum(), x)[0] for _ in range(4)
        ]
    assert together.abs().max() > 0
    torch.testing.assert_close(together, torch.stack(parts).mean(0), rtol=1e-10, atol=1e-14)


def test_two_draws_live_in_one_graph_and_their_average_has_a_gradient_for_every_parameter(build, plain, batch) -> None:
    posterior = build(plain)
    outputs = []
    for draw in posterior.iter_draws(4):
        with posterior.sampled(draw) as net:
            outputs.append(net(batch[0]).softmax(1))
    torch.stack(outputs).mean(0)[:, 0].log().sum().backward()
    for name, parameter in posterior.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name


def test_a_given_draw_fixes_the_weights(build_weights, plain, batch) -> None:
    posterior = build_weights(plain)
    draw = posterior.draw()
    with posterior.sampled(draw) as net:
        first = net(batch[0])
    posterior.draw()
    with posterior.sampled(draw) as net:
        assert torch.equal(net(batch[0]), first)


def test_mean_and_std_are_detached_copies(build_gaussian, plain, train, same) -> None:
    posterior = build_gaussian(plain)
    parts = [p for p in [posterior, *getattr(posterior, "parts", [])] if isinstance(p, GaussianPosterior)]
    assert parts
    before = tensors(posterior)
    for part in parts:
        for values in (part.mean(), part.std()):
            kept = copy.deepcopy(values)
            assert not any(value.requires_grad for value in values.values())
            assert {n: v.shape for n, v in values.items()} == {n: p.shape for n, p in part.model.named_parameters()}
            train(posterior, 1)
            assert same(values, kept)
            posterior.load_state_dict({**posterior.state_dict(), **before})
            for value in values.values():
                value.fill_(7.0)
            assert same(tensors(posterior), before)
