"""Generator and discriminator of DCGAN (Radford et al. 2016)."""

from torch import Tensor, nn

from credo.models.blocks import init_from, is_count

_INIT_STD = 0.02


def dcgan_generator(
    latent: int = 100, *, channels: int = 1, width: int = 64, size: int = 32, seed: int | None = None
) -> nn.Sequential:
    """Build a network from normal noise [batch, latent] to images [batch, channels, size, size] in [−1, 1].

    4x4 transposed convolutions; each doubles the side and halves the channels.

    Args:
        latent: Number of noise inputs.
        channels: Channels of the images.
        width: Channels of the last hidden layer.
        size: Side of the images, a power of two from 8.
        seed: Seed of the initial weights, N(0, 0.02²); None uses torch's global generator.
    """
    doublings = _doublings(size)
    _check(latent=latent, channels=channels, width=width)
    with init_from(seed):
        inside = width * 2 ** (doublings - 1)
        layers: list[nn.Module] = [
            nn.Unflatten(1, (latent, 1, 1)),
            nn.ConvTranspose2d(latent, inside, 4, bias=False),
            nn.BatchNorm2d(inside),
            nn.ReLU(),
        ]
        for _ in range(doublings - 1):
            layers += [
                nn.ConvTranspose2d(inside, inside // 2, 4, 2, 1, bias=False),
                nn.BatchNorm2d(inside // 2),
                nn.ReLU(),
            ]
            inside //= 2
        layers += [nn.ConvTranspose2d(inside, channels, 4, 2, 1, bias=False), nn.Tanh()]
        return _initialised(nn.Sequential(*layers))


class _Discriminator(nn.Sequential):
    """Layers for images of one shape; others would give several logits each, or none."""

    def __init__(self, *layers: nn.Module, shape: tuple[int, int, int]) -> None:
        super().__init__(*layers)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(
                f"This discriminator takes images [batch, {', '.join(map(str, self.shape))}], got {list(x.shape)}: "
                "build it with their channels= and size=, or resize them."
            )
        for layer in self:
            x = layer(x)
        return x


def dcgan_discriminator(
    *, channels: int = 1, width: int = 64, size: int = 32, seed: int | None = None
) -> nn.Sequential:
    """Build a network from images [batch, channels, size, size] in [−1, 1] to one logit [batch]: real or generated.

    4x4 convolutions with stride 2, LeakyReLU 0.2, and BatchNorm except after the first; the channels double.

    Args:
        channels: Channels of the images.
        width: Channels of the first hidden layer.
        size: Side of the images, a power of two from 8.
        seed: Seed of the initial weights, N(0, 0.02²); None uses torch's global generator.
    """
    doublings = _doublings(size)
    _check(channels=channels, width=width)
    with init_from(seed):
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
        for _ in range(doublings - 1):
            layers += [
                nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
                nn.BatchNorm2d(2 * width),
                nn.LeakyReLU(0.2),
            ]
            width *= 2
        layers += [nn.Conv2d(width, 1, 4, bias=False), nn.Flatten(0)]
        return _initialised(_Discriminator(*layers, shape=(channels, size, size)))


def _doublings(size: int) -> int:
    """Number of doublings from 4 pixels."""
    if not is_count(size) or size < 8 or size & (size - 1):
        raise ValueError(f"size must be 8, 16, 32, 64 or a higher power of two, got {size!r}.")
    return size.bit_length() - 3


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if not is_count(count):
            raise ValueError(f"{name} must be a positive whole number, got {count!r}.")


def _initialised(net: nn.Sequential) -> nn.Sequential:
    for layer in net:
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor):
            nn.init.normal_(weight, mean=float(isinstance(layer, nn.BatchNorm2d)), std=_INIT_STD)
    return net
