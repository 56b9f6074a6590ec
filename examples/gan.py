"""DCGAN with a Bayesian discriminator beside a deterministic one: 32x32 digits from noise.

    python gan.py [--seed 0] [--json FILE] [--quick]

With MNIST if its files are found (see `credo data`), else enlarged digits of scikit-learn. A classifier scores samples.
Writes pictures gan_*.png into the current folder.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from dcgan import dcgan_discriminator, dcgan_generator
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.support.files import write_json
from credo.data import Batches, DataMissingError, Dataset, Split, as_float, load_dataset
from credo.experiments.runs import versions
from credo.models import build_model

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--seed", type=int, default=0, help="of both GANs: networks, noise, order of images")
parser.add_argument("--json", type=Path, metavar="FILE", help="where to store all scores, with seed and versions")
parser.add_argument(
    "--quick", action="store_true", help="few images and steps, five seconds of one core: only to see it run"
)
given = parser.parse_args()
SIZE, LATENT, WIDTH = 32, 100, 4 if given.quick else 16
# 936 steps are three epochs of 20,000 MNIST images, or about 43 of scikit-learn's 1,438.
EXAMPLES, HELD_OUT, STEPS = (256, 512, 4) if given.quick else (20_000, 10_000, 936)


def load() -> Dataset:
    """Load MNIST, or scikit-learn's digits."""
    try:
        return load_dataset("mnist")
    except DataMissingError:
        return load_dataset("digits")


def prepared(split: Split, most: int) -> Split:
    """Images of 32x32 pixels in [0, 1]."""
    x = as_float(split.x[:most])
    x = F.pad(x, (2, 2, 2, 2)) if x.shape[-1] == 28 else F.interpolate(x, scale_factor=4.0, mode="bilinear")
    return Split(x, split.y[:most])


def halves(split: Split) -> tuple[Split, Split]:
    """Split into two disjoint parts of equal size.

    Alternating images: the first half of MNIST's test images is easier than the second.
    """
    even = len(split) // 2 * 2
    return Split(split.x[0:even:2], split.y[0:even:2]), Split(split.x[1:even:2], split.y[1:even:2])


def trained_judge(data: Split, features: int) -> nn.Sequential:
    """Train a classifier with this number of features before its last layer; the same for all seeds of the GANs."""
    layers = {"channels": (6, 16), "hidden": (120, features)}
    network = build_model("convnet", inputs=(1, SIZE, SIZE), classes=10, seed=1, **layers)
    batches = Batches(data, batch_size=64)
    credo.fit(credo.MAP(network, data_size=len(data)), batches, epochs=round(STEPS / len(batches)))
    return network.eval()


def forever(data: Split, seed: int) -> Iterator[Tensor]:
    """Yield batches of 64 images endlessly, reshuffled every epoch."""
    batches = Batches(data, batch_size=64, drop_last=True, seed=seed)
    while True:
        yield from (x for x, _ in batches)


def make_discriminators(data_size: int, seed: int) -> dict[str, credo.Posterior]:
    """Return a deterministic and a Bayesian discriminator with the same initial weights."""
    networks = [dcgan_discriminator(width=WIDTH, size=SIZE, seed=seed) for _ in range(2)]
    adam = {"lr": 5e-4, "optimizer": {"betas": (0.5, 0.999)}}
    common = {**adam, "data_size": data_size, "likelihood": "bernoulli", "seed": seed}
    return {
        "plain": credo.MAP(networks[0], **common),
        "Bayesian": credo.BBB(networks[1], prior=0.1, init=0.005, temperature=1e-3, **common),
    }


def train(discriminator: credo.Posterior, data: Split, steps: int, seed: int) -> nn.Module:
    """Train a generator against draws of the discriminator."""
    generator = dcgan_generator(LATENT, width=WIDTH, size=SIZE, seed=seed)
    adam = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    noise = torch.Generator().manual_seed(seed)
    for x in islice(forever(data, seed), steps):
        real, fake = 2 * x - 1, generator(torch.randn(len(x), LATENT, generator=noise))
        made = fake.detach()
        discriminator.step(lambda net, r=real, m=made: (verdict(net(r), 1) + verdict(net(m), 0)) / 2)
        with torch.no_grad():
            draw = discriminator.draw()
        with discriminator.sampled(draw) as net:
            loss = verdict(net(fake), 1)
        adam.zero_grad()
        loss.backward()
        adam.step()
    return generator.eval()


def verdict(logits: Tensor, real: int) -> Tensor:
    """Mean negative log-likelihood of the batch being real (1) or generated (0)."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


@torch.no_grad()
def accuracy_of(classifier: nn.Module, split: Split) -> float:
    """Fraction of correctly classified images."""
    logits = torch.cat([classifier(part) for part in split.x.split(500)])
    return float((logits.argmax(-1) == split.y).double().mean())


@torch.no_grad()
def samples(generator: nn.Module, count: int, seed: int) -> Tensor:
    """Generate images in [0, 1] from noise not used in training."""
    noise = torch.randn(count, LATENT, generator=torch.Generator().manual_seed(1000 + seed))
    return torch.cat([(generator(part) + 1) / 2 for part in noise.split(500)])


@torch.no_grad()
def scores(images: Tensor, truth: Tensor, classifier: nn.Sequential) -> dict[str, float]:
    """The classifier's inception score (1 to 10, larger is better) and Fréchet distance (smaller is better)."""
    features, other = (torch.cat([classifier[:-1](part) for part in x.split(500)]) for x in (images, truth))
    probs = classifier[-1](features).softmax(-1)
    inception = torch.special.xlogy(probs, probs / probs.mean(0)).sum(-1).mean().exp()
    features, other = features.double(), other.double()
    first, second = features.T.cov(), other.T.cov()
    roots = torch.linalg.eigvals(first @ second).sqrt().real.sum()
    distance = (features.mean(0) - other.mean(0)).square().sum() + first.trace() + second.trace() - 2 * roots
    return {"inception": float(inception), "distance": float(distance)}


def formatted(result: dict[str, float]) -> str:
    """Format scores as one line."""
    return f"inception score {result['inception']:.2f}, Fréchet distance {result['distance']:.2f}"


digits = load()
data, held_out = prepared(digits.train, EXAMPLES), prepared(digits.test, HELD_OUT)
# All rows are compared with `reference`; the row of real images is `others`. Neither is used in training.
reference, others = halves(held_out)
# Ten images per feature: the covariance of more features would be mostly noise.
features = min(84, len(reference) // 10)
judge = trained_judge(data, features)
accuracy = accuracy_of(judge, held_out)
print(f"judge: {features} features, accuracy {accuracy:.4f} on {len(held_out)} test images")
if accuracy < 0.9:
    print("  too low: the scores below mean nothing without longer training")
print(f"each row: {len(reference)} images against {len(reference)} test images")

discriminators = make_discriminators(len(data), given.seed)
results = {"real images": scores(others.x, reference.x, judge)}
print("real images:", formatted(results["real images"]))
for name, discriminator in discriminators.items():
    generator = train(discriminator, data, STEPS, given.seed)
    images = samples(generator, len(reference), given.seed)
    results[name] = scores(images, reference.x, judge)
    print(f"{name}: {formatted(results[name])}")
    grid = images[:64, 0].reshape(8, 8, SIZE, SIZE).transpose(1, 2).reshape(8 * SIZE, 8 * SIZE)
    Image.fromarray(grid.mul(255).byte().numpy()).save(f"gan_{name.lower()}.png")
    print(f"picture: gan_{name.lower()}.png")
if given.json:
    record = {"data": digits.name, "seed": given.seed, "quick": given.quick, "steps": STEPS}
    record |= {"images": len(reference), "features": features, "judge_accuracy": accuracy}
    write_json(given.json, record | {"scores": results, "versions": versions()})
    print(f"scores: {given.json}")
