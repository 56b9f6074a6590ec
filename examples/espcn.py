"""ESPCN for super-resolution (Shi et al. 2016): convolutions on the small image, then channels shuffled into pixels."""

from torch import Tensor, nn
from torch.nn import functional as F

from credo.models.blocks import activation_layer, init_from, is_count


class ESPCN(nn.Module):
    """Enlarge images [batch, 1, h, w] in [0, 1]: convolutions 5x5-64, 3x3-64, 3x3-32 and 3x3-upscale².

    Args:
        upscale: Factor of enlargement.
        activation: "relu" or "softplus".
        beta: Sharpness of softplus.
        residual: Add the output to the bicubic enlargement, so that only detail is learned; not in the published
            network.
    """

    def __init__(
        self, upscale: int = 3, *, activation: str = "relu", beta: float = 1.0, residual: bool = False
    ) -> None:
        super().__init__()
        if not is_count(upscale):
            raise ValueError(f"upscale must be a positive whole number, got {upscale!r}.")
        self.upscale, self.residual = upscale, residual
        self.conv1 = nn.Conv2d(1, 64, 5, padding=2)
        self.activation1 = activation_layer(activation, beta)
        self.conv2 = nn.Conv2d(64, 64, 3, padding=1)
        self.activation2 = activation_layer(activation, beta)
        self.conv3 = nn.Conv2d(64, 32, 3, padding=1)
        self.activation3 = activation_layer(activation, beta)
        self.conv4 = nn.Conv2d(32, upscale**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(upscale)

    def forward(self, x: Tensor) -> Tensor:
        """Images [batch, 1, upscale·h, upscale·w]."""
        hidden = self.activation1(self.conv1(x))
        hidden = self.activation2(self.conv2(hidden))
        hidden = self.activation3(self.conv3(hidden))
        detail: Tensor = self.shuffle(self.conv4(hidden))
        return detail + enlarged(x, self.upscale) if self.residual else detail


def espcn(
    upscale: int = 3,
    *,
    activation: str = "relu",
    beta: float = 1.0,
    residual: bool = False,
    seed: int | None = None,
) -> ESPCN:
    """Build an `ESPCN` with torch's default initialisation.

    Args:
        upscale: Factor of enlargement.
        activation: "relu" or "softplus".
        beta: Sharpness of softplus.
        residual: Add the output to the bicubic enlargement.
        seed: Seed of the initial weights; None uses torch's global generator.
    """
    with init_from(seed):
        return ESPCN(upscale, activation=activation, beta=beta, residual=residual)


def enlarged(x: Tensor, upscale: int) -> Tensor:
    """Enlarge images [batch, channels, h, w] by bicubic interpolation, the usual baseline."""
    return F.interpolate(x, scale_factor=float(upscale), mode="bicubic", align_corners=False)


def reduced(x: Tensor, upscale: int) -> Tensor:
    """Reduce images by bicubic interpolation with anti-aliasing; sides must be multiples of `upscale`."""
    height, width = x.shape[-2:]
    if height % upscale or width % upscale:
        raise ValueError(f"Images of {height}x{width} cannot be made {upscale} times smaller: cut them first.")
    return F.interpolate(
        x, size=(height // upscale, width // upscale), mode="bicubic", align_corners=False, antialias=True
    )
