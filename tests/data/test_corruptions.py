"""Corruptions: repeatable, in range, stronger with severity, and each what its name says."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from credo.data import CORRUPTIONS, SEVERITIES, corrupt, corruption_kinds
from credo.data.corruptions.blur import defocus, motion, moved, smooth, zoom

KINDS = list(CORRUPTIONS)
FIXED = {"defocus-blur", "zoom-blur", "brightness", "contrast", "pixelate", "jpeg", "gaussian-blur", "saturate"}


def photographs(count: int = 8, side: int = 32, channels: int = 3) -> Tensor:
    """Something with structure at several scales: smooth shapes and an edge."""
    generator = torch.Generator().manual_seed(0)
    x = smooth(torch.rand(count, channels, side, side, generator=generator), 0.06 * side)
    x = (x - x.amin((1, 2, 3), keepdim=True)) / (x.amax((1, 2, 3), keepdim=True) - x.amin((1, 2, 3), keepdim=True))
    x[:, :, side // 3 : side // 2, side // 4 : side // 2] = 0.9
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_repeats_stays_in_range_and_grows_with_severity(kind: str) -> None:
    x = photographs()
    changes = []
    for severity in SEVERITIES:
        first, again = corrupt(x, kind, severity), corrupt(x, kind, severity)
        assert torch.equal(first, again)
        assert first.shape == x.shape
        assert first.dtype == x.dtype
        assert first.min() >= 0
        assert first.max() <= 1
        changes.append((first - x).square().mean().item())
    assert changes == sorted(changes)
    assert changes[0] > 1e-6
    assert changes[4] > 2 * changes[0]
    assert torch.equal(corrupt(x, kind, 3), corrupt(x, kind, 3, seed=1)) == (kind in FIXED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("side", "channels"), [(8, 1), (8, 3), (65, 3)])
def test_sizes_and_bytes(kind: str, side: int, channels: int) -> None:
    x = photographs(2, side, channels)
    if kind == "saturate" and channels == 1:
        with pytest.raises(ValueError, match="changes colours"):
            corrupt(x, kind, 1)
        return
    whole = (x * 255).round().to(torch.uint8)
    given = whole.clone()
    changed = corrupt(whole, kind, 5)
    assert changed.dtype == torch.uint8
    assert changed.shape == whole.shape
    assert torch.equal(whole, given), "the images given stay as they are"
    close = (corrupt(whole.float() / 255, kind, 5) * 255).round().to(torch.uint8)
    assert (changed.int() - close.int()).abs().max() <= 1
    assert not torch.equal(changed, whole)


def test_noise_has_the_moments_that_are_said() -> None:
    """A million values: relative errors of a standard deviation are near 0.001, the bounds are ten times that."""
    grey = torch.full((40, 1, 160, 160), 0.5)
    for kind, severity, std in [
        ("gaussian-noise", 1, 0.04),
        ("shot-noise", 1, (0.5 / 220) ** 0.5),
        ("speckle-noise", 1, 0.5 * 0.08),
    ]:
        noise = corrupt(grey, kind, severity) - grey
        assert noise.mean().abs() < 1e-3
        assert noise.std().item() == pytest.approx(std, rel=0.01)
    hit = corrupt(grey, "impulse-noise", 5)
    assert (hit != 0.5).float().mean().item() == pytest.approx(0.18, rel=0.02)
    assert hit[hit != 0.5].mean().item() == pytest.approx(0.5, abs=0.01)


def test_light_and_colours() -> None:
    x = photographs() * 0.5
    torch.testing.assert_close(corrupt(x, "brightness", 2), x + 0.16)
    flat = corrupt(x, "contrast", 5)
    torch.testing.assert_close(flat.mean((1, 2, 3)), x.mean((1, 2, 3)))
    torch.testing.assert_close(flat.std((1, 2, 3)), 0.18 * x.std((1, 2, 3)))
    grey = x.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    torch.testing.assert_close(corrupt(grey, "saturate", 5), grey)


def test_blurs_keep_the_mean_and_take_off_detail() -> None:
    x = photographs(4, 64)
    for kind in ("gaussian-blur", "defocus-blur", "motion-blur", "zoom-blur", "glass-blur"):
        blurred = corrupt(x, kind, 3)
        assert (blurred.mean() - x.mean()).abs() < 0.02
        assert blurred.diff(dim=-1).square().mean() < 0.9 * x.diff(dim=-1).square().mean()


def test_the_normal_kernel_is_scipys() -> None:
    from scipy import ndimage

    x = photographs(1, 24, 1).double()
    expected = ndimage.gaussian_filter(x[0, 0].numpy(), 1.5, mode="mirror", radius=5)
    np.testing.assert_allclose(smooth(x, 1.5)[0, 0].numpy(), expected, atol=1e-12)


def test_moving_by_whole_pixels_is_a_shift() -> None:
    x = photographs(2, 16)
    shifted = moved(x, torch.tensor([2.0, 1.0]))
    torch.testing.assert_close(shifted[:, :, :-1, :-2], x[:, :, 1:, 2:], atol=1e-5, rtol=0)


def test_a_lone_pixel_becomes_a_disc() -> None:
    x = torch.zeros(1, 1, 65, 65)
    x[0, 0, 32, 32] = 1.0
    disc = corrupt(x, "defocus-blur", 5)
    radius = 0.078 * 65
    assert disc.sum().item() == pytest.approx(1.0, rel=1e-5)
    assert (disc > 0.5 * disc.max()).sum().item() == pytest.approx(math.pi * radius**2, rel=0.05)
    assert disc[0, 0, 32, 32].item() == pytest.approx(1 / (math.pi * radius**2), rel=0.05)
    torch.testing.assert_close(disc, disc.flip(2))
    torch.testing.assert_close(disc, disc.mT)


def test_a_disc_smaller_than_a_pixel_blurs_by_its_mean_shift() -> None:
    """Of a disc of radius r, the mean of max(u, 0) over its points (u, v) is 2r/3π: what a column gives to the next."""
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 4, 4] = 1.0
    for severity, radius in ((1, 0.022), (4, 0.06)):
        columns = corrupt(x, "defocus-blur", severity).sum((0, 1, 2))
        given = 2 * radius * 9 / (3 * math.pi)
        assert columns[3:6].tolist() == pytest.approx([given, 1 - 2 * given, given], rel=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_changes_small_images_at_every_severity(kind: str) -> None:
    x = photographs(8, 12)
    for severity in SEVERITIES:
        assert not torch.equal(corrupt(x, kind, severity), x)


def test_pixelate_and_jpeg_on_what_they_do_not_change() -> None:
    blocks = torch.rand(1, 3, 16, 16).repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(corrupt(blocks, "pixelate", 3), blocks)
    flat = torch.full((2, 3, 16, 16), 128, dtype=torch.uint8)
    assert (corrupt(flat, "jpeg", 5).int() - 128).abs().max() <= 2


def test_spatter_covers_the_share_that_is_said() -> None:
    white = torch.ones(20, 1, 64, 64)
    covered = corrupt(white, "spatter", 5) < 1 - 0.45 * 0.82
    assert covered.float().mean().item() == pytest.approx(0.32, abs=0.02)


def cover_and_colour(kind: str, severity: int) -> tuple[Tensor, Tensor]:
    """How much of each pixel the weather hides, and its own colour: black and white images get the same weather."""
    black, white = (corrupt(torch.full((16, 3, 32, 32), value), kind, severity) for value in (0.0, 1.0))
    cover = 1 - (white - black)
    return cover, black / cover


@pytest.mark.parametrize("severity", SEVERITIES)
def test_fog_is_a_light_grey_veil_at_least_half_as_thick_everywhere(severity: int) -> None:
    cover, colour = cover_and_colour("fog", severity)
    torch.testing.assert_close(colour, torch.full_like(colour, 0.8))
    opacity = torch.full([16], CORRUPTIONS["fog"].strengths[severity - 1])
    torch.testing.assert_close(cover.amax((1, 2, 3)), opacity)
    torch.testing.assert_close(cover.amin((1, 2, 3)), opacity / 2)
    x = photographs()
    fogged = corrupt(x, "fog", severity)
    assert bool(((fogged - 0.8).abs() <= (x - 0.8).abs() + 1e-6).all()), "towards light grey, from both sides"
    assert bool((fogged.std((1, 2, 3)) < 0.9 * x.std((1, 2, 3))).all())


@pytest.mark.parametrize("severity", SEVERITIES)
def test_frost_is_bright_and_thicker_towards_the_border(severity: int) -> None:
    cover, ice = cover_and_colour("frost", severity)
    assert ice.min() >= 0.75 - 1e-4
    assert ice.max() <= 1 + 1e-4
    assert bool((ice.amax((1, 2, 3)) - ice.amin((1, 2, 3)) > 0.2).all()), "veins are brighter than what is between"
    border = torch.ones(32, 32, dtype=torch.bool)
    border[4:-4, 4:-4] = False
    # With veins of the same thickness everywhere the ratio would be 0.94 to 1.0 in these images; it is 1.27 to 1.36.
    assert cover[:, :, border].mean() > 1.15 * cover[:, :, 8:-8, 8:-8].mean()


@pytest.mark.parametrize("severity", SEVERITIES)
def test_snow_is_white_streaks_on_a_paler_image(severity: int) -> None:
    x = photographs()
    assert bool((corrupt(x, "snow", severity) >= x - 1e-6).all()), "nothing gets darker"
    grey = torch.full((16, 1, 32, 32), 0.5)
    snowy = corrupt(grey, "snow", severity)
    assert snowy.min() > 0.5
    assert bool((snowy.amax((1, 2, 3)) > 0.8).all())
    white = (snowy > 0.9).float().mean()
    assert 0.002 < white < 0.2, "some pixels, not all"
    # Slopes are steep across the streaks and gentle along them: 0 for no direction, 1 for a single one.
    right = snowy[..., 1:-1, 2:] - snowy[..., 1:-1, :-2]
    down = snowy[..., 2:, 1:-1] - snowy[..., :-2, 1:-1]
    rr, dd, rd = ((a * b).mean((1, 2, 3)) for a, b in ((right, right), (down, down), (right, down)))
    assert bool((((rr - dd).square() + 4 * rd.square()).sqrt() / (rr + dd) > 0.2).all())


@pytest.mark.parametrize("severity", SEVERITIES)
def test_elastic_moves_parts_smoothly_and_changes_no_colours(severity: int) -> None:
    flat = torch.full((2, 3, 32, 32), 0.3)
    torch.testing.assert_close(corrupt(flat, "elastic", severity), flat)
    x = photographs(16, 64)
    levels = torch.linspace(0.05, 0.95, 19)
    before, after = (images.flatten().quantile(levels) for images in (x, corrupt(x, "elastic", severity)))
    torch.testing.assert_close(after, before, atol=0.06, rtol=0)
    # On a ramp, the change of a value is the way to the place it was taken from, in both directions.
    right = (torch.arange(64) / 63).expand(16, 1, 64, 64)
    ways = [63 * (corrupt(ramp, "elastic", severity) - ramp) for ramp in (right, right.mT)]
    inside = torch.cat(ways, dim=1)[..., 16:-16, 16:-16]
    # Ways are longer near the border, where the blur of the field reflects: inside they are a little below the std.
    assert inside.std().item() == pytest.approx(0.8 * CORRUPTIONS["elastic"].strengths[severity - 1] * 64, rel=0.15)
    for direction in (-1, -2):
        assert inside.diff(dim=direction).std() < 0.2 * inside.std(), "neighbours go nearly the same way"


def test_a_call_in_parts_is_the_same_for_every_image(monkeypatch: pytest.MonkeyPatch) -> None:
    x = photographs(6)
    whole = corrupt(x, "contrast", 4)
    monkeypatch.setattr("credo.data.corruptions.registry._PART", 2 * x[:1].numel())
    assert torch.equal(corrupt(x, "contrast", 4), whole)
    noisy = corrupt(x, "gaussian-noise", 4)
    assert torch.equal(noisy, corrupt(x, "gaussian-noise", 4))
    assert not torch.equal(noisy[0] - x[0], noisy[2] - x[2])


def test_choosing_kinds() -> None:
    assert len(corruption_kinds()) == 15
    assert len(corruption_kinds("all")) == 19
    assert len(corruption_kinds("all", channels=1)) == 18
    assert corruption_kinds("fog, jpeg,fog") == ("fog", "jpeg")
    common, extra = corruption_kinds("common"), corruption_kinds("extra")
    assert corruption_kinds("common,fog") == common
    assert corruption_kinds("fog, common") == ("fog", *(kind for kind in common if kind != "fog"))
    assert corruption_kinds("extra,common,extra") == extra + common
    assert corruption_kinds("fog,extra", channels=1) == ("fog", *extra[:-1])
    assert corruption_kinds("all,") == common + extra
    with pytest.raises(ValueError, match="mean 'common'"):
        corruption_kinds("comon,fog")
    with pytest.raises(ValueError, match="changes colours"):
        corruption_kinds("extra,saturate", channels=1)
    with pytest.raises(ValueError, match="mean 'fog'"):
        corruption_kinds("fogg")
    with pytest.raises(ValueError, match="No kind of corruption"):
        corruption_kinds(" ,")
    with pytest.raises(ValueError, match="changes colours"):
        corruption_kinds("saturate", channels=1)


@pytest.mark.parametrize(
    ("images", "kind", "severity", "message"),
    [
        (photographs(1), "fogg", 1, "mean 'fog'"),
        (photographs(1), "fog", 6, "severity=6: possible are 1 to 5"),
        (photographs(1), "fog", True, "severity=True"),
        (photographs(1), "fog", 2.0, r"severity=2\.0: possible are 1 to 5, as whole numbers"),
        (photographs(1), "fog", "2", "severity='2': possible are 1 to 5"),
        (photographs(1), "fog", torch.tensor(2.0), "possible are 1 to 5"),
        (photographs(1)[0], "fog", 1, "got shape"),
        (torch.rand(2, 4, 8, 8), "fog", 1, "got shape"),
        (2 * photographs(1), "fog", 1, "undo any normalisation"),
        (photographs(1).long(), "fog", 1, "bytes, or floats"),
    ],
)
def test_what_cannot_be_corrupted_is_refused(images: Tensor, kind: str, severity: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corrupt(images, kind, severity)


def test_what_is_no_tensor_is_refused_with_the_way_to_one() -> None:
    x = photographs(1)
    with pytest.raises(TypeError, match=r"got ndarray: torch\.as_tensor converts it"):
        corrupt(x.numpy(), "fog", 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got list"):
        corrupt(x.tolist(), "fog", 1)


def test_a_severity_may_be_a_whole_number_of_numpy_or_torch() -> None:
    x = photographs(1)
    for severity in (np.int64(2), torch.tensor(2)):
        assert torch.equal(corrupt(x, "fog", severity), corrupt(x, "fog", 2))  # type: ignore[arg-type]


def test_motion_and_zoom_leave_no_ghosts_of_large_images() -> None:
    """One bright pixel becomes a line without gaps: of twelve copies, those at 224 pixels would stand apart."""
    x = torch.zeros(1, 1, 225, 225)
    x[..., 112, 112] = 1
    line = motion(x, 0.31, torch.Generator().manual_seed(0))
    assert line.sum() == pytest.approx(1, rel=0.02)
    assert line.max() < 2.5 / (0.31 * 225)
    x = torch.zeros(1, 1, 225, 225)
    x[..., 112, 192] = 1
    ray = zoom(x, 0.34, torch.Generator().manual_seed(0))[0, 0, 112, 194:217]
    assert ray.min() > 0.5 * ray.max()


def test_a_large_disc_has_no_holes() -> None:
    x = torch.zeros(1, 1, 601, 601)
    x[..., 300, 300] = 1
    radius = 0.078 * 601
    disc = defocus(x, 0.078, torch.Generator())[0, 0]
    rows, columns = torch.meshgrid(*2 * [torch.arange(601) - 300], indexing="ij")
    inside = disc[(rows**2 + columns**2).sqrt() < radius - 2]
    torch.testing.assert_close(inside, torch.full_like(inside, 1 / (math.pi * radius**2)), rtol=0.05, atol=0)
