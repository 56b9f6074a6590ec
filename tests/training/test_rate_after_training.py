"""What training leaves behind of a schedule, and what it asks for."""

import pytest
import torch

import credo
from credo.models import build_model
from credo.training.epoch_batches import seeded_epoch


def posterior() -> credo.MAP:
    return credo.MAP(build_model("mlp", inputs=[3], classes=2, seed=0), data_size=10)


def test_the_rate_is_whole_again_after_a_schedule() -> None:
    trained = posterior()
    batch = (torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    credo.fit(trained, [batch] * 3, epochs=2, schedule="cosine", progress=False)
    assert trained.lr_scale == 1.0


def test_steps_by_name_says_how_to_give_milestones() -> None:
    with pytest.raises(ValueError, match=r"make_schedule\('steps'"):
        credo.fit(posterior(), [(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))], epochs=2, schedule="steps")


def test_a_sampler_that_wants_the_epoch_is_told() -> None:
    told = []

    class Sampler:
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    class Loader(list):
        sampler = Sampler()

    with seeded_epoch(Loader(), seed=0, epoch=7, device=torch.device("cpu")):
        pass
    assert told == [7]


def test_what_cannot_be_trained_or_predicted_says_so() -> None:
    with pytest.raises(ValueError, match="epochs=-1 must be a whole number, 0 or more"):
        credo.fit(posterior(), [(torch.randn(4, 3), torch.zeros(4, dtype=torch.long))], epochs=-1)
    with pytest.raises(ValueError, match="predict needs a posterior"):
        credo.predict(torch.nn.Linear(3, 2), torch.randn(4, 3))


def test_an_epoch_has_the_stream_of_its_seed_and_gives_the_old_one_back() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with seeded_epoch([1], seed=2, epoch=5, device=torch.device("cpu")):
        found = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2 * 1_000_003 + 5)
    assert torch.equal(found, torch.rand(4))
