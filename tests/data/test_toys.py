import math

import pytest
import torch
from sklearn.datasets import load_digits

from credo.data import load_dataset
from credo.data.toys import GAP_HALF_WIDTH, GAP_SPAN, blob_centres, gap_mean


def test_digits_are_the_bundled_ones_in_zero_one():
    digits = load_dataset("digits")
    theirs = load_digits()
    x, y = torch.cat([digits.train.x, digits.test.x]), torch.cat([digits.train.y, digits.test.y])
    assert x.dtype == torch.float32
    assert digits.input_shape == (1, 8, 8)
    assert x.aminmax() == (0, 1)
    ours = torch.cat([x.flatten(1) * 16, y.unsqueeze(1)], dim=1)
    expected = torch.cat([torch.from_numpy(theirs.data), torch.from_numpy(theirs.target).unsqueeze(1)], dim=1)
    assert sorted(ours.tolist()) == sorted(expected.tolist())


def test_digits_split_is_stratified_and_always_the_same():
    one, two = load_dataset("digits"), load_dataset("digits")
    assert torch.equal(one.test.x, two.test.x)
    assert len(one.test) == 359  # 20 % of 1797
    shares = one.test.y.bincount() / (one.test.y.bincount() + one.train.y.bincount())
    assert (shares - 0.2).abs().max() < 1 / 174  # the smallest class has 174: less than one example off


def test_moons_without_noise_lie_on_their_half_circles():
    moons = load_dataset("moons", n=400, noise=0.0)
    x, y = moons.train.x, moons.train.y
    centre = torch.tensor([[0.0, 0.0], [1.0, 0.5]])[y]
    assert torch.allclose((x - centre).norm(dim=1), torch.ones(400), atol=1e-6)
    assert (x[y == 0, 1] >= -1e-6).all()
    assert (x[y == 1, 1] <= 0.5 + 1e-6).all()
    assert y.bincount().tolist() == [200, 200]
    # Covered from end to end: 200 uniform angles miss one of the two ends (a seventh each) with probability 7e-14.
    assert x[y == 0, 0].min() < -0.9
    assert x[y == 0, 0].max() > 0.9


def test_blobs_scatter_around_their_centres_with_the_stated_noise():
    blobs = load_dataset("blobs", n=5000, noise=0.5, seed=1)
    assert blobs.classes == 5
    rest = blobs.train.x - blob_centres()[blobs.train.y]
    # Ten cloud means with standard deviation 0.5/sqrt(1000); five of those: false alarm below 6e-6.
    means = torch.stack([rest[blobs.train.y == k].mean(0) for k in range(5)])
    assert means.abs().max() < 5 * 0.5 / 1000**0.5
    # The spread of 10,000 numbers is known to 0.7 %; five of those: false alarm 6e-7.
    assert abs(rest.std() / 0.5 - 1) < 0.035
    assert torch.allclose(blob_centres().norm(dim=1), torch.full((5,), 3.0))


def test_gap_has_a_hole_in_training_and_none_in_testing():
    gap = load_dataset("gap", n=300)
    assert gap.task == "regression"
    assert gap.train.x.shape == gap.train.y.shape == (300, 1)
    inside = gap.train.x.abs()
    assert inside.min() >= GAP_HALF_WIDTH
    assert inside.max() <= GAP_SPAN
    assert (gap.train.x < 0).any()
    assert (gap.train.x > 0).any()
    assert torch.allclose(gap_mean(torch.tensor(math.pi / 6)), torch.tensor(1 + math.pi / 18))
    assert torch.allclose(gap.test.x.flatten().sort().values.diff(), torch.tensor(2 * GAP_SPAN / 299), atol=1e-5)


@pytest.mark.parametrize("part", ["train", "test"])
def test_gap_noise_is_the_stated_one(part):
    split = getattr(load_dataset("gap", n=5000, noise=0.3, seed=2), part)
    rest = (split.y - gap_mean(split.x)).flatten()
    # The spread of 5,000 numbers is known to 1 %, the mean to 0.0042; five of those each: false alarm 1.2e-6.
    assert abs(rest.std() / 0.3 - 1) < 0.05
    assert abs(rest.mean()) < 5 * 0.3 / 5000**0.5


@pytest.mark.parametrize("name", ["moons", "blobs", "gap"])
def test_seeds_decide_and_test_points_are_fresh(name):
    one, again, other = (load_dataset(name, n=50, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.train.x, again.train.x)
    assert torch.equal(one.test.y, again.test.y)
    assert not torch.equal(one.train.x, other.train.x)
    assert not torch.equal(one.train.x, one.test.x)
    assert one.train.x.dtype == torch.float32


@pytest.mark.parametrize("name", ["moons", "blobs", "gap"])
@pytest.mark.parametrize("options", [{"n": 0}, {"noise": -0.1}, {"noise": float("nan")}])
def test_bad_options_are_refused(name, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        load_dataset(name, **options)
