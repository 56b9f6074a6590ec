"""What `examples/gan.py` shows, checked from the names that it leaves."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from credo.data import Split


def check_gan(names: dict[str, Any], out: str) -> None:
    assert list(names["results"]) == ["real images", "plain", "Bayesian"]
    # The score is the exponential of a KL, which rounding may take below 0.
    assert all(1 - 1e-5 <= result["inception"] <= 10 for result in names["results"].values())
    truth = names["reference"].x
    assert abs(names["scores"](truth, truth, names["judge"])["distance"]) < 1e-6, "a set is at no distance from itself"
    check_halves(names["halves"])
    check_rows_are_alike(names, out)
    assert names["results"]["plain"] != names["results"]["Bayesian"]
    for picture in re.findall(r"^picture: (\S+)$", out, flags=re.MULTILINE):
        with Image.open(picture) as image:
            assert image.size == (256, 256)
    assert out.count("picture: ") == 2
    assert names["discriminators"]["Bayesian"].steps == names["discriminators"]["plain"].steps == 4
    check_scores(names["scores"])
    check_who_is_called_real(names["train"])
    check_seeds(names)


def check_halves(halves: Any) -> None:
    for count in (2, 7, 10):
        first, second = halves(Split(torch.arange(count), -torch.arange(count)))
        assert len(first) == len(second) == count // 2
        assert not set(first.x.tolist()) & set(second.x.tolist())
        assert max(*first.x.tolist(), *second.x.tolist()) >= count - 2, "from the whole set, not its beginning"
        assert all(torch.equal(part.y, -part.x) for part in (first, second))


def check_rows_are_alike(names: dict[str, Any], out: str) -> None:
    """Real and made images: as many of each, against the same ones, that no network has been trained on."""
    reference, others, judge = names["reference"], names["others"], names["judge"]
    assert len(reference) == len(others) == len(names["images"]) == 359 // 2
    seen = {image.numpy().tobytes() for image in names["data"].x}
    assert not seen & {image.numpy().tobytes() for part in (reference, others) for image in part.x}
    assert names["results"]["real images"] == names["scores"](others.x, reference.x, judge)
    assert names["results"]["Bayesian"] == names["scores"](names["images"], reference.x, judge)
    assert judge[-1].in_features == names["features"] == 17, "a covariance of 17 features from 179 images"
    pairs = zip(names["held_out"].x, names["held_out"].y, strict=True)
    right = sum(int(judge(x[None]).argmax()) == int(y) for x, y in pairs)
    assert names["accuracy"] == pytest.approx(right / 359)
    assert f"judge: 17 features, accuracy {right / 359:.4f} on 359 test images" in out
    assert "each row: 179 images against 179 test images" in out


def flat(network: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def check_seeds(names: dict[str, Any]) -> None:
    """Weights, draws, noise and order of images: the same of one seed, others of another."""
    split = Split(torch.rand(128, 1, 32, 32, generator=torch.Generator().manual_seed(0)), torch.zeros(128))

    def begun(seed: int) -> list[torch.Tensor]:
        pair, seen = names["make_discriminators"](128, seed), Brightness()
        plain, bayesian = (flat(pair[name].model) for name in ("plain", "Bayesian"))
        assert torch.equal(plain, bayesian)
        draw = torch.cat([w.detach().flatten() for w in pair["Bayesian"].draw().values()])
        weights = flat(names["train"](seen, split, 1, seed))
        order, noise = next(names["forever"](split, seed)), names["samples"](nn.Identity(), 600, seed)
        return [plain, draw, weights, order, noise, torch.tensor(seen.verdicts)]

    first, again, other = begun(0), begun(0), begun(1)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(first, other, strict=True))
    assert len(first[4]) == 600


def check_scores(scores: Any) -> None:
    """Sure of k classes that are equally frequent: inception score k. Shifted by c in d features: distance d·c²."""
    judge = nn.Sequential(nn.Flatten(), nn.Linear(10, 10, bias=False))
    with torch.no_grad():
        judge[1].weight.copy_(100 * torch.eye(10))
    for count in (1, 2, 10):
        images = torch.eye(10)[torch.arange(40) % count]
        assert scores(images, images, judge)["inception"] == pytest.approx(count, rel=1e-4)
    truth = torch.randn(500, 10, generator=torch.Generator().manual_seed(0))
    assert scores(truth + 3, truth, judge)["distance"] == pytest.approx(10 * 9, rel=1e-3)
    # Of twice the spread: Σ (2s − s)² = Σ s², the sum of the variances.
    doubled = truth.mean(0) + 2 * (truth - truth.mean(0))
    assert scores(doubled, truth, judge)["distance"] == pytest.approx(float(truth.var(0).sum()), rel=1e-3)


class Brightness:
    """In a discriminator's place: bright images are real, whatever it is taught; keeps what it is asked."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.verdicts: list[float] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 10 * x.mean((1, 2, 3)) - 5

    def step(self, nll: Any) -> None:
        self.losses.append(float(nll(self)))

    def draw(self) -> str:
        return "a draw"

    @contextlib.contextmanager
    def sampled(self, draw: str) -> Iterator[Any]:
        assert draw == "a draw"
        yield self.judge

    def judge(self, x: torch.Tensor) -> torch.Tensor:
        logits = self(x)
        self.verdicts.append(float(logits.detach().mean()))
        return logits


def check_who_is_called_real(train: Any) -> None:
    """White images are real and the first made ones grey: one who mixes up labels trains towards black."""
    discriminator = Brightness()
    train(discriminator, Split(torch.ones(64, 1, 32, 32), torch.zeros(64, dtype=torch.long)), 20, 0)
    assert len(discriminator.losses) == len(discriminator.verdicts) == 20, "more steps than an epoch has"
    assert discriminator.losses[0] < 0.1
    assert discriminator.verdicts[0] == pytest.approx(-5, abs=0.2)
    assert discriminator.verdicts[-1] > discriminator.verdicts[0] + 0.3
