"""DCGAN with a Bayesian discriminator beside its plain twin: 32x32 digits from noise.

    python gan.py [--quick]

Of MNIST if it is there (see `credo data`), else of scikit-learn's digits, enlarged. A classifier judges the samples.
"""

import argparse
from collections.abc import Iterator
from itertools import islice

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.data import Batches, DataMissingError, Dataset, Split, as_float, load_dataset
from credo.models import build_model, dcgan_discriminator, dcgan_generator

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="a few seconds, only to see it run")
quick = parser.parse_args().quick
SIZE, LATENT, WIDTH = 32, 100, 4 if quick else 16
# Steps, not epochs: 936 are three epochs of 20,000 images of MNIST and some 43 of scikit-learn's 1,438.
EXAMPLES, STEPS = (256, 4) if quick else (20_000, 936)


def load() -> Dataset:
    """Digits in classes."""
    try:
        return load_dataset("mnist")
    except DataMissingError:
        return load_dataset("digits")


def prepared(split: Split, most: int) -> Split:
    """Images of 32x32 pixels in [0, 1]."""
    x = as_float(split.x[:most])
    x = F.pad(x, (2, 2, 2, 2)) if x.shape[-1] == 28 else F.interpolate(x, scale_factor=4.0, mode="bilinear")
    return Split(x, split.y[:most])


def forever(data: Split) -> Iterator[Tensor]:
    """Batches of 64 images without end, in a new order each epoch."""
    batches = Batches(data, batch_size=64, drop_last=True)
    while True:
        yield from (x for x, _ in batches)


def train(discriminator: credo.Posterior, data: Split, steps: int) -> nn.Module:
    """A generator that has learned to deceive every network the discriminator may be."""
    generator = dcgan_generator(LATENT, width=WIDTH, size=SIZE, seed=0)
    adam = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    noise = torch.Generator().manual_seed(0)
    for x in islice(forever(data), steps):
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
    """Mean negative log-likelihood of all of a batch being real (1) or made (0)."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


@torch.no_grad()
def scores(images: Tensor, truth: Tensor, classifier: nn.Sequential) -> tuple[float, float]:
    """The classifier's inception score (1 to 10, larger is better) and Fréchet distance (smaller is better)."""
    features, other = (classifier[:-1](x) for x in (images, truth))
    probs = classifier[-1](features).softmax(-1)
    inception = torch.special.xlogy(probs, probs / probs.mean(0)).sum(-1).mean().exp()
    first, second = features.T.cov(), other.T.cov()
    roots = torch.linalg.eigvals(first @ second).sqrt().real.sum()
    distance = (features.mean(0) - other.mean(0)).square().sum() + first.trace() + second.trace() - 2 * roots
    return float(inception), float(distance)


digits = load()
data, held_out = prepared(digits.train, EXAMPLES), prepared(digits.test, 2000)
judge = credo.MAP(build_model("lenet5", inputs=(1, SIZE, SIZE), classes=10, seed=1), data_size=len(data))
batches = Batches(data, batch_size=64)
credo.fit(judge, batches, epochs=round(STEPS / len(batches)))

adam = {"lr": 5e-4, "optimizer_options": {"betas": (0.5, 0.999)}, "data_size": len(data), "likelihood": "bernoulli"}
networks = [dcgan_discriminator(width=WIDTH, size=SIZE, seed=0) for _ in range(2)]
discriminators = {
    "plain": credo.MAP(networks[0], **adam),
    "Bayesian": credo.BBB(networks[1], prior=0.1, std_init=0.005, temperature=1e-3, **adam),
}
real = scores(held_out.x, data.x[-2000:], judge.model)
print(f"real images: inception score {real[0]:.2f}, Fréchet distance {real[1]:.2f}")
results = {}
for name, discriminator in discriminators.items():
    generator = train(discriminator, data, STEPS)
    with torch.no_grad():
        images = (generator(torch.randn(2000, LATENT, generator=torch.Generator().manual_seed(1))) + 1) / 2
    results[name] = scores(images, held_out.x, judge.model)
    print(f"{name}: inception score {results[name][0]:.2f}, Fréchet distance {results[name][1]:.2f}")
    grid = images[:64, 0].reshape(8, 8, SIZE, SIZE).transpose(1, 2).reshape(8 * SIZE, 8 * SIZE)
    Image.fromarray(grid.mul(255).byte().numpy()).save(f"gan_{name.lower()}.png")
    print(f"picture: gan_{name.lower()}.png")
