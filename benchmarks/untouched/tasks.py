"""The development tasks: tables, images, sequences, text and a pretrained network, as a user would bring them.

Tables are standardised, with the training rows' `input_statistics`; every contender of a task sees the same rows,
network and initial weights. A seed chooses the rows (or the noise, where data are made) and the initial weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn

from credo.data import Split, load_dataset
from credo.models import build_model, input_statistics

TABLE_STEPS = 800  # of a table's training, in epochs that are whole


@dataclass(frozen=True, eq=False)
class Problem:
    """Data, network and effort of one task and seed.

    Attributes:
        train: All rows that a contender may use; those that choose something on held-out rows take them from here.
        test: Rows that are measured.
        network: Makes the network with this seed's initial weights.
        epochs: Passes over all rows of `train`.
        batch_size: Rows of a step.
    """

    train: Split
    test: Split
    network: Callable[[], nn.Module]
    epochs: int
    batch_size: int = 32

    @property
    def is_regression(self) -> bool:
        """Whether targets are numbers."""
        return self.train.y.is_floating_point()


@dataclass(frozen=True)
class Task:
    """A named task; `needs` is the data set that must be on disk."""

    title: str
    make: Callable[[int], Problem]
    needs: str | None = None

    def check(self) -> None:
        """Raise DataMissingError if the data set is not on disk."""
        if self.needs is not None:
            load_dataset(self.needs)


# -- tables ------------------------------------------------------------------------------------------------------------


def _table(x: np.ndarray, y: np.ndarray, seed: int, *, hidden: tuple[int, ...], test: int | None = None) -> Problem:
    """Shuffle, hold a fifth (at most `test`) of the rows out, standardise, and take a ReLU perceptron."""
    order = np.random.default_rng(seed).permutation(len(x))
    held = min(len(x) // 5, test or len(x))
    inside, outside = order[held:], order[:held]
    statistics = input_statistics(torch.from_numpy(x[inside]))
    assert statistics is not None  # no integers
    mean, scale = map(np.asarray, statistics)
    inputs = torch.from_numpy((x - mean) / scale).float()
    if y.dtype.kind == "f":
        targets = torch.from_numpy((y - y[inside].mean()) / y[inside].std()).float().reshape(len(y), -1)
        outputs = targets.shape[1]
    else:
        targets, outputs = torch.from_numpy(y).long(), int(y.max()) + 1
    train, rest = (Split(inputs[torch.from_numpy(i)], targets[torch.from_numpy(i)]) for i in (inside, outside))
    epochs = math.ceil(TABLE_STEPS / math.ceil(len(train) / 32))

    def network() -> nn.Module:
        return build_model("mlp", inputs=[x.shape[1]], classes=outputs, hidden=list(hidden), seed=seed)

    return Problem(train, rest, network, epochs)


def _bundled(load: Callable[..., tuple[np.ndarray, np.ndarray]], *hidden: int) -> Callable[[int], Problem]:
    def make(seed: int) -> Problem:
        x, y = load(return_X_y=True)
        return _table(x.astype(float), y, seed, hidden=hidden)

    return make


def made_table(
    rows: int, data: Callable[[int, np.random.Generator], tuple[np.ndarray, np.ndarray]], *hidden: int
) -> Callable[[int], Problem]:
    """Made data: `rows` training rows and 2,000 test rows from the same distribution."""

    def make(seed: int) -> Problem:
        x, y = data(rows + 2000, np.random.default_rng(1000 + seed))
        problem = _table(x, y, seed, hidden=hidden)
        inputs, targets = (torch.cat([getattr(problem.train, n), getattr(problem.test, n)]) for n in ("x", "y"))
        epochs = math.ceil(TABLE_STEPS / math.ceil(rows / 32))
        return Problem(
            Split(inputs[:rows], targets[:rows]), Split(inputs[rows:], targets[rows:]), problem.network, epochs
        )

    return make


def _friedman(which: int) -> Callable[[int, np.random.Generator], tuple[np.ndarray, np.ndarray]]:
    noise = {1: 1.0, 2: 125.0, 3: 0.1}[which]  # the usual ones (Breiman 1996)

    def data(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        state = int(rng.integers(2**31))
        x, y = getattr(datasets, f"make_friedman{which}")(rows, noise=noise, random_state=state)
        return x, y

    return data


def _heteroscedastic(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Noise that grows with the first input."""
    x = rng.uniform(-2, 2, (rows, 4))
    return x, np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + rng.normal(size=rows) * (0.05 + 0.25 * (x[:, 0] + 2) / 2)


def _heavy_tailed(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Student's noise with three degrees of freedom."""
    x = rng.normal(size=(rows, 8))
    return x, np.tanh(x[:, 0] + x[:, 1]) + 0.5 * x[:, 2] ** 2 - 0.5 * x[:, 3] + 0.3 * rng.standard_t(3, rows)


def _arm(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Distance of a robot arm's hand from the origin, from four angles and four lengths, with little noise."""
    angles, lengths = rng.uniform(0, 2 * np.pi, (rows, 4)), rng.uniform(0, 1, (rows, 4))
    total = angles.cumsum(1)
    hand = np.hypot((lengths * np.cos(total)).sum(1), (lengths * np.sin(total)).sum(1))
    return np.concatenate([angles, lengths], 1), hand + 0.02 * rng.normal(size=rows)


def _moons(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x, y = datasets.make_moons(rows, noise=0.3, random_state=int(rng.integers(2**31)))
    return x, y


def _clusters(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x, y = datasets.make_classification(
        rows, 20, n_informative=8, n_classes=4, flip_y=0.1, random_state=int(rng.integers(2**31))
    )
    return x, y


def _ripples(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rings around the origin of a plane, with little noise."""
    x = rng.uniform(-3, 3, (rows, 2))
    radius = np.hypot(x[:, 0], x[:, 1])
    return x, np.cos(3 * radius) * np.exp(-0.2 * radius) + 0.05 * rng.normal(size=rows)


def _stairs(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A function with jumps."""
    x = rng.uniform(-1, 1, (rows, 3))
    return x, np.floor(3 * x[:, 0]) + 2.0 * ((x[:, 1] > 0.2) & (x[:, 2] < 0)) + 0.1 * rng.normal(size=rows)


def _spheres(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Three classes by the distance from the origin."""
    state = int(rng.integers(2**31))
    x, y = datasets.make_gaussian_quantiles(n_samples=rows, n_features=6, n_classes=3, random_state=state)
    return x, y


def _counts(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of counts."""
    x = rng.normal(size=(rows, 6))
    rate = np.exp(1 + 0.8 * np.sin(x[:, 0]) + 0.5 * x[:, 1] * (x[:, 2] > 0))
    return x, np.log1p(rng.poisson(rate))


# -- images ------------------------------------------------------------------------------------------------------------


def small_convnet(channels: int, side: int, classes: int, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (side // 4) ** 2, 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        )


def _digit_images(seed: int) -> Problem:
    x, y = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    images = torch.from_numpy(x).float().reshape(-1, 1, 8, 8)[order] / 16
    labels = torch.from_numpy(y).long()[order]
    train, test = Split(images[500:], labels[500:]), Split(images[:500], labels[:500])
    return Problem(train, test, lambda: small_convnet(1, 8, 10, seed), epochs=15)


def some_images(name: str, rows: int, epochs: int, network: Callable[[int], nn.Module]) -> Callable[[int], Problem]:
    """`rows` images of a set chosen by the seed, in [0, 1], and 2,000 of its test images."""

    def make(seed: int) -> Problem:
        data = load_dataset(name)
        generator = torch.Generator().manual_seed(seed)

        def some(split: Split, count: int) -> Split:
            chosen = torch.randperm(len(split), generator=generator)[:count]
            return Split(split.x[chosen].float() / 255, split.y[chosen])

        return Problem(some(data.train, rows), some(data.test, 2000), lambda: network(seed), epochs, batch_size=64)

    return make


def _resnet8(seed: int) -> nn.Module:
    return build_model("resnet-cifar", inputs=[3, 32, 32], classes=10, depth=8, seed=seed)


# -- sequences and text ------------------------------------------------------------------------------------------------


class LastState(nn.Module):
    """An LSTM and a linear layer on its last state."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, classes] of sequences [batch, time, inputs]."""
        outputs, _ = self.lstm(x)
        logits: Tensor = self.head(outputs[:, -1])
        return logits


def _waves(seed: int) -> Problem:
    """Which of four wave forms a noisy series of 30 values has."""
    rng = np.random.default_rng(seed)
    rows = 2500
    time = np.linspace(0, 1, 30)[None] * rng.uniform(1.5, 3, (rows, 1)) + rng.uniform(0, 1, (rows, 1))
    phase, y = time % 1, rng.integers(0, 4, rows)
    forms = np.stack([np.sin(2 * np.pi * phase), np.sign(phase - 0.5), 2 * phase - 1, np.abs(4 * phase - 2) - 1])
    x = forms[y, np.arange(rows)] + 0.6 * rng.normal(size=(rows, 30))
    inputs, labels = torch.from_numpy(x).float().unsqueeze(-1), torch.from_numpy(y)

    def network() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return LastState(1, 32, 4)

    return Problem(Split(inputs[:1000], labels[:1000]), Split(inputs[1000:], labels[1000:]), network, epochs=25)


class NextCharacter(nn.Module):
    """A transformer of two layers that predicts the character after a window."""

    def __init__(self, characters: int, window: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.positions = nn.Embedding(window, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, characters] of windows [batch, window]."""
        places = torch.arange(x.shape[1], device=x.device)
        hidden = self.encoder(self.embedding(x) + self.positions(places))
        logits: Tensor = self.head(hidden[:, -1])
        return logits


def _text(seed: int) -> Problem:
    """The next character of Python's own documentation strings (the pydoc topics, which every Python has)."""
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics[key].split()) for key in sorted(topics)).lower()
    kept = "abcdefghijklmnopqrstuvwxyz .,()'_"
    codes = torch.tensor([kept.find(c) if c in kept else len(kept) for c in text[:400_000]])
    window, generator = 24, torch.Generator().manual_seed(seed)
    starts = torch.randperm(len(codes) - window - 1, generator=generator)[:12_000]
    x = torch.stack([codes[s : s + window] for s in starts])
    y = codes[starts + window]

    def network() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return NextCharacter(len(kept) + 1, window)

    return Problem(Split(x[:10_000], y[:10_000]), Split(x[10_000:], y[10_000:]), network, epochs=6, batch_size=64)


# -- a pretrained network ----------------------------------------------------------------------------------------------


def _pretrained(seed: int) -> Problem:
    """A convnet that was trained on the digits 0 to 4 in full, then fine-tuned on 200 images of 5 to 9."""
    x, y = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    images = torch.from_numpy(x).float().reshape(-1, 1, 8, 8)[order] / 16
    labels = torch.from_numpy(y).long()[order]
    old, new = labels < 5, labels >= 5
    net = small_convnet(1, 8, 5, seed)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(10):
        for rows in torch.randperm(int(old.sum()), generator=generator).split(32):
            loss = nn.functional.cross_entropy(net(images[old][rows]), labels[old][rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}

    def network() -> nn.Module:
        again = small_convnet(1, 8, 5, seed)
        again.load_state_dict(state)
        return again

    x_new, y_new = images[new], labels[new] - 5
    return Problem(Split(x_new[:200], y_new[:200]), Split(x_new[200:], y_new[200:]), network, epochs=30)


TASKS: dict[str, Task] = {
    "diabetes": Task("diabetes, 353 rows, MLP 50", _bundled(datasets.load_diabetes, 50)),
    "friedman1": Task("Friedman 1, 300 rows, MLP 50", made_table(300, _friedman(1), 50)),
    "friedman1-large": Task("Friedman 1, 5,000 rows, MLP 50", made_table(5000, _friedman(1), 50)),
    "friedman2": Task("Friedman 2, 500 rows, MLP 50", made_table(500, _friedman(2), 50)),
    "friedman3": Task("Friedman 3, 500 rows, MLP 50", made_table(500, _friedman(3), 50)),
    "heteroscedastic": Task("noise that grows, 600 rows, MLP 50-50", made_table(600, _heteroscedastic, 50, 50)),
    "heavy-tailed": Task("Student's noise, 1,000 rows, MLP 50", made_table(1000, _heavy_tailed, 50)),
    "robot-arm": Task("robot arm, 4,000 rows, MLP 50-50", made_table(4000, _arm, 50, 50)),
    "breast-cancer": Task("breast cancer, 456 rows, MLP 100-100", _bundled(datasets.load_breast_cancer, 100, 100)),
    "wine": Task("wine, 143 rows, MLP 100-100", _bundled(datasets.load_wine, 100, 100)),
    "iris": Task("iris, 120 rows, MLP 50", _bundled(datasets.load_iris, 50)),
    "digits": Task("digits, 1,438 rows, MLP 100-100", _bundled(datasets.load_digits, 100, 100)),
    "moons": Task("two moons, 300 rows, MLP 50-50", made_table(300, _moons, 50, 50)),
    "clusters": Task("clusters, 2,000 rows, 10 % wrong labels, MLP 100", made_table(2000, _clusters, 100)),
    "ripples": Task("rings with little noise, 1,000 rows, MLP 50-50", made_table(1000, _ripples, 50, 50)),
    "stairs": Task("a function with jumps, 600 rows, MLP 50-50", made_table(600, _stairs, 50, 50)),
    "spheres": Task("nested spheres, 800 rows, MLP 50-50", made_table(800, _spheres, 50, 50)),
    "counts": Task("logarithms of counts, 400 rows, MLP 50", made_table(400, _counts, 50)),
    "digit-images": Task("digits as images, 1,297 images, convnet", _digit_images),
    "mnist": Task(
        "MNIST, 2,000 images, convnet", some_images("mnist", 2000, 10, lambda s: small_convnet(1, 28, 10, s)), "mnist"
    ),
    "fashion-mnist": Task(
        "Fashion-MNIST, 5,000 images, convnet",
        some_images("fashion-mnist", 5000, 8, lambda s: small_convnet(1, 28, 10, s)),
        "fashion-mnist",
    ),
    "cifar10": Task("CIFAR-10, 10,000 images, ResNet-8", some_images("cifar10", 10_000, 10, _resnet8), "cifar10"),
    "waves": Task("wave forms, 1,000 series, LSTM", _waves),
    "text": Task("next character, 10,000 windows, transformer", _text),
    "pretrained": Task("digits 5 to 9 by a network trained on 0 to 4, 200 images", _pretrained),
}
