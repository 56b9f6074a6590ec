"""Segmentation with a small U-Net: a class for each pixel, and how sure the network is of it.

    python examples/segmentation.py [--quick] [--output segmentation.png]

Images show discs and squares in noise; classes are background, disc and square. The picture has a row for each of three
test images: input, labels, prediction, epistemic uncertainty.
"""

import argparse

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import credo

SIZE = 24


def shapes(images: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images [n, 1, 24, 24] of a disc and a square, and their labels [n, 24, 24]; borders are not labelled."""
    generator = torch.Generator().manual_seed(seed)
    row, column = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    y = torch.zeros(images, SIZE, SIZE, dtype=torch.long)
    place = torch.randint(5, SIZE - 5, (images, 4), generator=generator)
    radius = torch.randint(3, 6, (images, 2), generator=generator)
    for i in range(images):
        disc = (row - place[i, 0]) ** 2 + (column - place[i, 1]) ** 2 <= radius[i, 0] ** 2
        square = ((row - place[i, 2]).abs() < radius[i, 1]) & ((column - place[i, 3]).abs() < radius[i, 1])
        y[i][disc], y[i][square] = 1, 2
    shade = torch.tensor([0.0, 1.0, 0.6])[y].unsqueeze(1)  # squares are a little darker
    x = shade + 0.3 * torch.randn(images, 1, SIZE, SIZE, generator=generator)
    y[:, 0], y[:, -1] = 255, 255  # as where two annotators disagree
    return x, y


class UNet(nn.Module):
    """Two levels: features at full and at half size."""

    def __init__(self, classes: int, width: int = 12) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU())
        self.middle2 = nn.Sequential(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.head = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, classes, height, width]."""
        full = self.down(x)
        half = self.middle2(self.middle(full))
        logits: Tensor = self.head(torch.cat([full, self.up(half)], 1))
        return logits


def main() -> dict[str, float]:
    """Train, measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer images and epochs, to see that it runs")
    parser.add_argument("--output", default="segmentation.png")
    options = parser.parse_args()
    x, y = shapes(200 if options.quick else 400, seed=0)
    train = [(x[i : i + 20], y[i : i + 20]) for i in range(0, len(x), 20)]
    torch.manual_seed(0)
    likelihood = credo.Categorical(class_dim=-3, ignore_index=255)
    posterior = credo.IVON(UNet(3), data_size=len(x), likelihood=likelihood)
    credo.fit(posterior, train, epochs=10 if options.quick else 20)

    new, truth = shapes(60, seed=1)
    prediction = credo.predict(posterior, [(new, truth)], draws=16)
    metrics = credo.measure(prediction)
    wrong = (prediction.labels != truth) & (truth != 255)
    sure = prediction.epistemic[~wrong].mean()
    print(f"pixel accuracy {metrics['accuracy']:.3f}, mean IoU {metrics['mean_iou']:.2f}, ECE {metrics['ece']:.3f}")
    print(f"epistemic uncertainty: {prediction.epistemic[wrong].mean() / sure:.0f} times larger at wrong pixels")
    draw(new[:3, 0], truth[:3], prediction.labels[:3], prediction.epistemic[:3], options.output)
    return metrics


def draw(x: Tensor, truth: Tensor, labels: Tensor, epistemic: Tensor, path: str) -> None:
    """Write the picture."""
    figure, axes = plt.subplots(len(x), 4, figsize=(8, 2 * len(x)), layout="constrained")
    titles = ("input", "labels", "prediction", "epistemic uncertainty")
    columns = (x, truth.where(truth != 255, 0), labels, epistemic)
    for column, images, title in zip(axes.T, columns, titles, strict=True):
        column[0].set_title(title, fontsize=10)
        for axis, image in zip(column, images, strict=True):
            axis.imshow(image.numpy(), cmap="gray" if title == "input" else "viridis")
            axis.set_axis_off()
    figure.savefig(path, dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    metrics = main()
