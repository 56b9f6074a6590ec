import pytest
import torch

from credo.data import AUGMENTATIONS, augment_flip_crop
from credo.data.augment import draw_flip_crop


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_by_one(x, mirrored, down, right, pad):
    """The slow obvious way: one image after the other."""
    out = []
    for image, mirror, top, left in zip(x, mirrored.tolist(), down.tolist(), right.tolist(), strict=True):
        image = torch.flip(image, dims=[2]) if mirror else image
        canvas = torch.zeros(image.shape[0], image.shape[1] + 2 * pad, image.shape[2] + 2 * pad, dtype=x.dtype)
        canvas[:, pad : pad + image.shape[1], pad : pad + image.shape[2]] = image
        out.append(canvas[:, top : top + image.shape[1], left : left + image.shape[2]])
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize(("pad", "shape"), [(4, (64, 3, 9, 7)), (1, (40, 1, 5, 5)), (0, (40, 2, 4, 6))])
def test_agrees_with_a_loop_over_images(pad, shape, flip, dtype):
    x = torch.randint(0, 256, shape, generator=generator(1)).to(dtype)
    offsets = draw_flip_crop(len(x), generator(2), pad=pad, flip=flip)
    got = augment_flip_crop(x, generator(2), pad=pad, flip=flip)
    assert got.dtype == dtype
    assert torch.equal(got, one_by_one(x, *offsets, pad))


def test_about_half_are_mirrored_and_every_crop_is_equally_likely():
    mirrored, down, right = draw_flip_crop(40_000, generator(3), pad=1, flip=True)
    # Standard deviation of the share is 0.0025; five of them: false alarm 6e-7 (and the seed is fixed).
    assert abs(mirrored.double().mean() - 0.5) < 0.0125
    counts = (down * 3 + right).bincount(minlength=9).double()
    # Chi-square with 8 degrees of freedom exceeds 45.1 with probability 3.5e-7.
    assert ((counts - 40_000 / 9) ** 2 / (40_000 / 9)).sum() < 45.1


def test_without_flip_nothing_is_mirrored():
    assert not draw_flip_crop(1000, generator(), pad=4, flip=False)[0].any()


def test_flip_alone_only_mirrors():
    x = torch.rand(100, 1, 4, 4, generator=generator())
    out = AUGMENTATIONS["flip"](x, generator(1))
    kept = (out == x).flatten(1).all(1)
    turned = (out == x.flip(-1)).flatten(1).all(1)
    assert (kept ^ turned).all()
    assert kept.any()
    assert turned.any()


def test_none_gives_the_batch_back():
    x = torch.rand(3, 1, 4, 4)
    assert AUGMENTATIONS["none"](x, generator()) is x


def test_the_input_is_not_changed():
    x = torch.rand(10, 1, 4, 4, generator=generator())
    before = x.clone()
    augment_flip_crop(x, generator())
    assert torch.equal(x, before)


def test_tables_are_refused():
    with pytest.raises(ValueError, match=r"got shape \[5, 3\]"):
        augment_flip_crop(torch.zeros(5, 3), generator())
