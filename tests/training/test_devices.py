"""Devices by name, batches that go there, and posteriors that move."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.core.network.inputs import Inputs
from credo.training.hardware import devices
from credo.training.hardware.devices import Placement, choose_device, possible_devices


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with two CUDA devices, of which nothing but the names is used."""
    found = SimpleNamespace(
        is_available=lambda: True, current_accelerator=lambda: torch.device("cuda"), device_count=lambda: 2
    )
    monkeypatch.setattr(devices.torch, "accelerator", found)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(8 * count, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return [*zip(x.split(8), x.flatten(1)[:, :3].argmax(1).split(8), strict=True)]


def test_auto_is_the_cpu_where_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.torch.accelerator, "is_available", lambda: False)
    assert possible_devices() == ["auto", "cpu"]
    assert choose_device("auto") == choose_device(None) == choose_device("cpu:0") == torch.device("cpu")


def test_auto_is_the_accelerator_where_there_is_one(two_gpus: None) -> None:
    assert possible_devices() == ["auto", "cpu", "cuda", "cuda:0", "cuda:1"]
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "training.device='gpu' is no name of a device. Possible: auto, cpu"),
        ("mps", "'mps' is not available here. Possible: auto, cpu"),
        ("meta", "'meta' is not available here"),
        ("cuda:2", "'cuda:2' has no number 2 here. Possible: auto, cpu, cuda, cuda:0, cuda:1"),
    ],
)
def test_what_is_not_there_is_an_error_with_what_is(two_gpus: None, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_device(name, "training.device")


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_batches_of_every_form_are_moved() -> None:
    """To the meta device, which every torch has."""
    place = Placement(torch.device("meta"))
    x, y = batches(1)[0]
    moved: list[Any] = [
        place(x),
        place((x, y))[1],
        place([x, {"a": y}])[1]["a"],
        place(OrderedDict(x=x))["x"],
        place(Pair(x, y)).y,
        place(Inputs({"x": x})).tensors()[0],
    ]
    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert isinstance(place(Pair(x, y)), Pair)
    assert isinstance(place(OrderedDict(x=x)), OrderedDict)
    assert place("text") == "text"
    assert x.device.type == "cpu"


def test_batches_for_a_cpu_are_left_alone() -> None:
    batch = batches(1)[0]
    assert Placement(torch.device("cpu"))(batch) is batch
    assert Placement(None)(batch) is batch


def test_images_get_their_channels_last() -> None:
    x = torch.randn(4, 3, 5, 5)
    moved, y = Placement(None, channels_last=True)((x, torch.zeros(4)))
    assert moved.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(moved, x, rtol=0, atol=0)
    assert y.shape == (4,)


@pytest.mark.parametrize("method", [credo.MAP, credo.BBB, credo.VOGN, credo.IVON, credo.NoisyKFAC, credo.NodeBNN])
def test_channels_last_trains_as_well(method: Any) -> None:
    plain, other = (method(net(), data_size=32) for _ in range(2))
    wanted = [*credo.train(plain, batches(), epochs=2)]
    found = [*credo.train(other, batches(), epochs=2, channels_last=True)]
    assert other.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert found[-1].nll == pytest.approx(wanted[-1].nll, rel=0.2)  # draws may lie in memory in another order


def test_channels_last_needs_images() -> None:
    posterior = credo.MAP(nn.Linear(2, 2), data_size=8)
    with pytest.raises(credo.UnsupportedModelError, match="no weights with four dimensions"):
        credo.fit(posterior, [(torch.randn(8, 2), torch.zeros(8, dtype=torch.long))], epochs=1, channels_last=True)


def test_fit_takes_a_device() -> None:
    posterior = credo.fit(credo.BBB(net(), data_size=32), batches(), epochs=1, device="auto", progress=False)
    assert posterior.device == choose_device("auto")
    with pytest.raises(ValueError, match="device='gpu' is no name of a device"):
        credo.fit(posterior, batches(), epochs=1, device="gpu")


@pytest.mark.parametrize("method", [credo.MAP, credo.BBB, credo.VOGN, credo.IVON, credo.NodeBNN])
def test_the_optimiser_moves_with_the_posterior(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = method(net(), data_size=32)
    # Parameters that go from a CPU to a GPU stay the same objects; to the meta device, only so.
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    credo.fit(posterior, batches(), epochs=1, progress=False)
    posterior.to("meta")
    assert posterior.device.type == "meta"
    tensors = {**dict(posterior.named_parameters()), **dict(posterior.named_buffers())}
    assert {name for name, tensor in tensors.items() if tensor.device.type != "meta"} == set()
    optimizer = posterior._optimizer()
    for parameter, state in (optimizer.state if optimizer is not None else {}).items():
        shaped = [value for value in state.values() if isinstance(value, Tensor) and value.shape == parameter.shape]
        assert {value.device.type for value in shaped} <= {"meta"}


def test_a_generator_of_another_kind_of_device_starts_a_sequence_of_its_own() -> None:
    """The state of a CUDA generator has 16 bytes."""
    posterior = credo.BBB(net(), data_size=32)
    state = posterior.get_extra_state()
    draws = []
    for foreign in (torch.arange(16, dtype=torch.uint8), torch.arange(16, dtype=torch.uint8), None):
        saved = state["generator"] if foreign is None else foreign
        posterior.set_extra_state({**state, "generator": saved})
        draws.append(posterior.draw()["0.weight"])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_a_generator_follows_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = credo.BBB(net(), data_size=32)
    before = posterior.generator
    made: list[torch.device] = []

    class Fake:
        def __init__(self, device: torch.device) -> None:
            self.device = device
            made.append(device)

        def manual_seed(self, seed: int) -> "Fake":
            return self

    monkeypatch.setattr(torch, "Generator", Fake)
    assert posterior.generator is before
    for device in (torch.device("cuda", 0), torch.device("cuda", 1)):
        monkeypatch.setattr(type(posterior), "device", device)
        assert posterior.generator.device == device
        assert posterior.generator is posterior.generator
    assert made == [torch.device("cuda", 0), torch.device("cuda", 1)]
