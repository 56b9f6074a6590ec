"""Files and copies of a posterior that another thread trains hold the state between two steps."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import credo
from credo.core.posterior import Posterior
from credo.core.support.tensor_files import digest_of
from credo.methods import BBB, MAP, VOGN, Ensemble
from credo.training.files import saving


def saved(posterior: Posterior, folder: Path) -> Posterior:
    return credo.load(credo.save(posterior, folder / "p.safetensors"), model=nn.Linear(2, 3))


TAKING: dict[str, Callable[[Posterior, Path], Posterior]] = {
    "save": saved,
    "deepcopy": lambda posterior, folder: copy.deepcopy(posterior),
}


@pytest.mark.parametrize("way", TAKING)
def test_nothing_is_taken_within_a_step(way: str, tmp_path: Path) -> None:
    posterior = BBB(nn.Linear(2, 3), data_size=10)
    began, asked = threading.Event(), threading.Event()

    @torch.no_grad()
    def step() -> None:
        with posterior.guard.exclusive(posterior):
            posterior.model.weight.fill_(2.0)
            began.set()
            asked.wait(0.3)  # nobody sets it: time for the other thread to come by
            posterior.model.bias.fill_(2.0)

    thread = threading.Thread(target=step)
    thread.start()
    began.wait()
    taken = TAKING[way](posterior, tmp_path)
    asked.set()
    thread.join()
    assert all((p == 2.0).all() for p in taken.model.parameters())


def test_a_step_while_the_file_is_written_does_not_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = BBB(nn.Linear(2, 3), data_size=10)
    before = posterior.model.weight.detach().clone()

    def digest_then_step(*given: object) -> str:
        digest = digest_of(*given)  # type: ignore[arg-type]
        posterior.step(lambda net: F.cross_entropy(net(torch.ones(2, 2)), torch.tensor([0, 1])))
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(saving, "digest_of", digest_then_step)
        path = credo.save(posterior, tmp_path / "p.safetensors")
    assert not posterior.model.weight.equal(before)
    assert credo.load(path, model=nn.Linear(2, 3)).model.weight.equal(before)


def test_a_draw_in_the_network_is_not_saved_as_its_mean(tmp_path: Path) -> None:
    posterior = BBB(nn.Linear(2, 3), data_size=10)
    with posterior.sampled_in_place(), pytest.raises(RuntimeError, match="Sampled weights are currently loaded"):
        credo.save(posterior, tmp_path / "p.safetensors")


def test_a_deepcopy_keeps_what_it_shares_with_other_copies() -> None:
    posterior = VOGN(nn.Linear(2, 3), data_size=10)
    again, model, alias = copy.deepcopy((posterior, posterior.model, posterior))
    assert again is alias
    assert again.model is model
    assert model is not posterior.model
    assert again.guard is not posterior.guard


def test_members_of_a_copied_ensemble_step_on_their_own() -> None:
    ensemble = Ensemble([MAP(nn.Linear(2, 3), data_size=10) for _ in range(2)])
    before = [p.detach().clone() for p in ensemble.parameters()]
    copy.deepcopy(ensemble).step(lambda net: F.cross_entropy(net(torch.ones(2, 2)), torch.tensor([0, 1])))
    assert all(p.equal(old) for p, old in zip(ensemble.parameters(), before, strict=True))
