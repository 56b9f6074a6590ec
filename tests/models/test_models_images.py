"""Networks that make images: ESPCN and DCGAN."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from examples.dcgan import dcgan_discriminator, dcgan_generator
from examples.espcn import enlarged, espcn, reduced


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_espcn_is_the_published_network() -> None:
    model = espcn(3, seed=0)
    assert count(model) == 25 * 64 + 64 + 9 * 64 * 64 + 64 + 9 * 64 * 32 + 32 + 9 * 32 * 9 + 9
    x = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0))
    hidden = x
    for layer in (model.conv1, model.conv2, model.conv3):
        hidden = F.conv2d(hidden, layer.weight, layer.bias, padding=layer.weight.shape[-1] // 2).clamp(min=0)
    channels = F.conv2d(hidden, model.conv4.weight, model.conv4.bias, padding=1)
    out = model(x)
    assert out.shape == (2, 1, 15, 21)
    # Channel 3·i + j becomes row i and column j of each 3x3 block.
    for i in range(3):
        for j in range(3):
            torch.testing.assert_close(out[:, 0, i::3, j::3], channels[:, 3 * i + j])


def test_espcn_can_add_to_the_bicubic_image() -> None:
    plain, added = espcn(2, seed=1), espcn(2, seed=1, residual=True)
    x = torch.rand(1, 1, 6, 6)
    torch.testing.assert_close(added(x) - plain(x), enlarged(x, 2))


def test_smaller_and_larger_images() -> None:
    slope = torch.linspace(0, 1, 24).expand(1, 1, 24, 24)
    small = reduced(slope, 3)
    assert small.shape == (1, 1, 8, 8)
    # A straight ramp stays one, away from the border (enlarged, nearly: a pixel is a step of 0.04).
    torch.testing.assert_close(small[0, 0, 4, 2:6], slope[0, 0, 0].view(8, 3).mean(1)[2:6], atol=1e-5, rtol=0)
    torch.testing.assert_close(enlarged(small, 3)[..., 9:15], slope[..., 9:15], atol=0.01, rtol=0)
    with pytest.raises(ValueError, match="25x24 cannot be made 3 times smaller"):
        reduced(torch.zeros(1, 1, 25, 24), 3)


@pytest.mark.parametrize(("size", "width", "channels"), [(32, 4, 1), (64, 2, 3), (8, 3, 1)])
def test_dcgan_shapes(size: int, width: int, channels: int) -> None:
    generator = dcgan_generator(10, channels=channels, width=width, size=size, seed=0)
    discriminator = dcgan_discriminator(channels=channels, width=width, size=size, seed=0)
    images = generator(torch.randn(3, 10, generator=torch.Generator().manual_seed(0)))
    assert images.shape == (3, channels, size, size)
    assert images.abs().max() <= 1
    assert discriminator(images).shape == (3,)


def test_dcgan_for_64_pixels_is_the_published_network() -> None:
    generator = dcgan_generator(100, channels=3, width=64, size=64, seed=0)
    convs = [layer for layer in generator if isinstance(layer, nn.ConvTranspose2d)]
    assert [(c.in_channels, c.out_channels) for c in convs] == [
        (100, 512),
        (512, 256),
        (256, 128),
        (128, 64),
        (64, 3),
    ]
    discriminator = dcgan_discriminator(channels=3, width=64, size=64, seed=0)
    convs2 = [layer for layer in discriminator if isinstance(layer, nn.Conv2d)]
    assert [c.out_channels for c in convs2] == [64, 128, 256, 512, 1]
    weights = torch.cat([c.weight.detach().flatten() for c in convs2])
    # 2.8 million numbers: their std is off by a thousandth of itself once in more than 10 runs of a million.
    assert float(weights.std()) == pytest.approx(0.02, rel=0.003)


@pytest.mark.parametrize("size", [0, 4, 28, 33])
def test_dcgan_wants_a_power_of_two(size: int) -> None:
    with pytest.raises(ValueError, match="a higher power of two"):
        dcgan_generator(size=size)


def test_wrong_sizes() -> None:
    with pytest.raises(ValueError, match="width must be a positive whole number"):
        dcgan_discriminator(width=0)
    with pytest.raises(ValueError, match="upscale must be a positive whole number"):
        espcn(0)


@pytest.mark.parametrize("shape", [(3, 1, 64, 64), (3, 1, 28, 28), (3, 3, 32, 32), (3, 1, 32)])
def test_a_discriminator_refuses_other_images(shape: tuple[int, ...]) -> None:
    """Three images twice as large would have 75 logits, and a loss over all of them hides it."""
    with pytest.raises(ValueError, match=r"images \[batch, 1, 32, 32\], got \[3, .*size="):
        dcgan_discriminator(width=2)(torch.zeros(shape))


def test_seeds_make_weights() -> None:
    for build in (espcn, dcgan_generator, dcgan_discriminator):
        first, same, other = (next(build(seed=seed).parameters()) for seed in (0, 0, 1))  # type: ignore[operator]
        assert torch.equal(first, same)
        assert not torch.equal(first, other)
