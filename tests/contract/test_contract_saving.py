"""Saving, copying and rebuilding, for every method: what continues must continue exactly."""

import copy
import io
import json

import pytest
import torch
from torch import nn

from credo.methods import BBB, MAP, Ensemble, MCDropout


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_run_resumed_at_step_five_equals_the_uninterrupted_one_bit_for_bit(build, normed, batch, train, same) -> None:
    whole, first_half = build(normed), build(normed)
    train(whole, 10)
    train(first_half, 5)
    state = through_a_file(first_half.state_dict())
    train(first_half, 3)  # what came after the file was written must not matter

    resumed = build(lambda index: normed(index + 10), seed=99)  # other weights, another seed: all comes from the file
    resumed.load_state_dict(state)
    assert resumed.steps == 5
    train(resumed, 5)
    assert same(resumed.state_dict(), whole.state_dict())  # tensors, generators, optimiser state, counts
    assert same(resumed(batch[0]), whole(batch[0]))


def test_loading_shares_no_memory_with_the_source(build, plain, train, same) -> None:
    source = build(plain)
    train(source, 3)
    before = copy.deepcopy(source.state_dict())
    other = build(lambda index: plain(index + 10), seed=5)
    other.load_state_dict(source.state_dict())
    train(other, 3)
    assert same(source.state_dict(), before)


def test_a_deep_copy_continues_independently_and_identically(build, normed, batch, train, same) -> None:
    posterior = build(normed)
    train(posterior, 3)
    before = copy.deepcopy(posterior.state_dict())
    twin = copy.deepcopy(posterior)
    twin_terms = train(twin, 3)
    assert same(posterior.state_dict(), before)
    assert same(train(posterior, 3), twin_terms)
    assert same(posterior.state_dict(), twin.state_dict())
    assert same(posterior(batch[0]), twin(batch[0]))
    assert not {id(p) for p in posterior.parameters()} & {id(p) for p in twin.parameters()}


def test_a_copy_made_before_the_first_step_and_after_an_exception_still_trains(build, plain, train, same) -> None:
    posterior = build(plain)
    with pytest.raises(ZeroDivisionError):
        posterior.step(lambda net: 1 / 0)
    twin = copy.deepcopy(posterior)
    assert same(train(posterior, 2), train(twin, 2))


def test_config_survives_json_and_rebuilds_the_posterior(build, normed, batch, train, same) -> None:
    posterior = build(normed)
    train(posterior, 3)
    config = json.loads(json.dumps(posterior.config(), allow_nan=False))
    assert config == posterior.config()
    parts = posterior.parts if isinstance(posterior, Ensemble) else [posterior]
    rebuilt = []
    for index, part in enumerate(parts):
        network = nn.Sequential(normed(index), nn.Dropout(0.3)) if "own" in _kind(part) else normed(index)
        options = json.loads(json.dumps(part.config(), allow_nan=False))
        rebuilt.append(type(part)(network, data_size=part.data_size, **options))
    again = Ensemble(rebuilt) if isinstance(posterior, Ensemble) else rebuilt[0]
    again.load_state_dict(through_a_file(posterior.state_dict()))
    assert again.config() == posterior.config()
    assert same(train(again, 3), train(posterior, 3))
    assert same(again.state_dict(), posterior.state_dict())


def _kind(posterior) -> str:
    return "own" if isinstance(posterior, MCDropout) and posterior.rate is None else type(posterior).__name__


@pytest.mark.parametrize("method", [MAP, BBB])
def test_config_of_a_choice_by_predicate_or_globs_names_what_was_chosen(method: type, plain) -> None:
    for random in (["0.*", "4.weight"], lambda name, _: name in ("0.weight", "0.bias", "4.weight")):
        posterior = method(plain(0), data_size=20, prior=0.5, random=random)
        assert json.loads(json.dumps(posterior.config()))["random"] == ["0.weight", "0.bias", "4.weight"]


def test_a_state_of_another_architecture_is_refused(build, plain) -> None:
    posterior = build(plain)
    wider = build(lambda index: nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)))
    with pytest.raises((RuntimeError, ValueError), match=r"state.dict"):
        wider.load_state_dict(posterior.state_dict())
