import itertools

import pytest
import torch

from credo.data import Batches, Split, as_float


def numbered(n: int) -> Split:
    return Split(torch.arange(n, dtype=torch.float32).unsqueeze(1), torch.arange(n))


def images(n: int) -> Split:
    pixels = torch.randint(0, 256, (n, 3, 6, 5), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return Split(pixels, torch.arange(n))


def seen(batches: Batches) -> list[int]:
    return [int(label) for _, y in batches for label in y]


@pytest.mark.parametrize(
    ("n", "size", "drop_last", "expected"), [(23, 5, False, 5), (23, 5, True, 4), (20, 5, False, 4)]
)
def test_length_is_the_number_of_batches(n, size, drop_last, expected):
    batches = Batches(numbered(n), batch_size=size, drop_last=drop_last)
    sizes = [len(y) for _, y in batches]
    assert len(batches) == len(sizes) == expected
    assert sizes[:-1] == [5] * (expected - 1)
    assert sum(sizes) == (min(n, size * expected))
    assert batches.data_size == n


def test_each_epoch_is_a_permutation_and_inputs_stay_with_labels():
    batches = Batches(numbered(50), batch_size=7)
    for _ in range(3):
        for x, y in batches:
            assert torch.equal(x[:, 0].long(), y)
    orders = [seen(batches) for _ in range(2)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    # Two given permutations of 50 agree with probability 1/50!.
    assert orders[0] != orders[1]
    assert orders[0] != list(range(50))


def test_without_shuffling_the_order_is_kept():
    batches = Batches(numbered(10), batch_size=4, shuffle=False)
    assert seen(batches) == seen(batches) == list(range(10))


def test_same_seed_and_epoch_give_the_same_batches():
    plain = Batches(images(20), batch_size=6, seed=5, augment="flip-crop")
    epochs = [list(plain) for _ in range(4)]
    resumed = Batches(images(20), batch_size=6, seed=5, augment="flip-crop")
    resumed.set_epoch(2)
    for epoch in (2, 3):  # the second one without set_epoch: it moves on by itself
        for (x, y), (x_again, y_again) in zip(epochs[epoch], resumed, strict=True):
            assert torch.equal(x, x_again)
            assert torch.equal(y, y_again)


def test_seed_and_epoch_are_not_interchangeable():
    orders = {
        (seed, epoch): tuple(Batches(numbered(30), batch_size=30, seed=seed).indices(epoch).tolist())
        for seed, epoch in itertools.product((0, 1, 11), (0, 1, 11))
    }
    assert len(set(orders.values())) == len(orders)


def test_a_broken_off_epoch_counts():
    batches = Batches(numbered(30), batch_size=3)
    first = next(iter(batches))[1]
    assert torch.equal(first, batches.indices(0)[:3])
    assert torch.equal(next(iter(batches))[1], batches.indices(1)[:3])


def test_epochs_do_not_disturb_each_other():
    batches = Batches(images(12), batch_size=4, augment="flip-crop")
    interleaved = [x for pair in zip(batches, batches, strict=True) for x, _ in pair]
    batches.set_epoch(0)
    apart = [[x for x, _ in batches] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(interleaved[0::2], apart[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(interleaved[1::2], apart[1], strict=True))


def test_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    list(Batches(images(12), batch_size=4, augment="flip-crop"))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("world", [2, 3, 4])
def test_shards_are_disjoint_and_cover(world):
    n = 12 * world
    shards = [seen(Batches(numbered(n), batch_size=5, rank=rank, world=world)) for rank in range(world)]
    assert sorted(itertools.chain(*shards)) == list(range(n))


@pytest.mark.parametrize(("n", "world"), [(23, 4), (25, 2), (3, 5), (1, 4)])
def test_uneven_shards_are_padded_to_the_same_length(n, world):
    ranks = [Batches(numbered(n), batch_size=2, rank=rank, world=world) for rank in range(world)]
    shards = [seen(batches) for batches in ranks]
    assert len({len(shard) for shard in shards}) == 1
    assert len({len(batches) for batches in ranks}) == 1
    assert set(itertools.chain(*shards)) == set(range(n))
    assert len(shards[0]) * world - n < world  # no more padding than needed
    assert ranks[0].data_size == n


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [64, 65, 127, 128, 130])
def test_every_number_of_ranks_makes_as_many_batches(n, drop_last):
    whole = Batches(numbered(n), batch_size=64, drop_last=drop_last)
    for world in (1, 2, 4):
        shares = [whole.shard(rank, world) for rank in range(world)]
        assert [len(share) for share in shares] == [len(whole)] * world
        sizes = [[len(y) for _, y in share] for share in shares]
        assert sizes == [[64 // world] * (len(whole) - 1) + [shares[0].last_size]] * world


def test_ranks_together_make_the_batches_of_one_process():
    whole = Batches(numbered(24), batch_size=6, seed=1)
    parts = [Batches(numbered(24), batch_size=3, seed=1, rank=rank, world=2) for rank in range(2)]
    for (_, y), (_, first), (_, second) in zip(whole, *parts, strict=True):
        assert sorted(y.tolist()) == sorted(first.tolist() + second.tolist())


def test_ranks_augment_differently():
    same = torch.randint(0, 256, (1, 1, 32, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    split = Split(same.expand(64, 1, 32, 32), torch.zeros(64, dtype=torch.long))
    one, two = (Batches(split, batch_size=32, augment="flip-crop", rank=rank, world=2) for rank in range(2))
    # 32 images alike, 162 equally likely outcomes each: all equal by chance with probability 162^-32.
    assert not torch.equal(next(iter(one))[0], next(iter(two))[0])


@pytest.mark.parametrize("augment", ["none", "flip", "flip-crop"])
def test_shards_of_any_number_make_the_same_augmented_batches(augment):
    whole = Batches(images(24), batch_size=12, seed=3, augment=augment)
    expected = [dict(zip(y.tolist(), x, strict=True)) for x, y in whole]
    for world in (2, 3, 4):
        parts = [
            Batches(images(24), batch_size=12, seed=3, augment=augment).shard(rank, world) for rank in range(world)
        ]
        for wanted, *shares in zip(expected, *parts, strict=True):
            found = {label: image for x, y in shares for label, image in zip(y.tolist(), x, strict=True)}
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[label], wanted[label]) for label in wanted)


@pytest.mark.parametrize("augment", ["none", "flip-crop", lambda x, g: x * torch.rand(len(x), 1, 1, 1, generator=g)])
@pytest.mark.parametrize("skipped", [0, 1, 3, 4])
def test_skipped_batches_leave_the_others_as_they_are(augment, skipped):
    batches = Batches(images(20), batch_size=6, augment=augment)
    batches.set_epoch(3)
    expected = list(batches)[skipped:]
    batches.set_epoch(3)
    batches.skip(skipped)
    found = list(batches)
    assert len(found) == 4 - skipped
    for (x, y), (x_again, y_again) in zip(expected, found, strict=True):
        assert torch.equal(x, x_again)
        assert torch.equal(y, y_again)
    assert len(list(batches)) == 4  # only the next iteration skips


def test_skipped_batches_are_not_loaded(monkeypatch):
    loaded = []
    monkeypatch.setattr("credo.data.batches.as_float", lambda x: loaded.append(len(x)) or x.float())
    batches = Batches(images(20), batch_size=6, augment="flip-crop")
    batches.skip(3)
    assert [len(y) for _, y in batches] == loaded == [2]
    with pytest.raises(ValueError, match=r"skip\(5\): an epoch has 4 batches"):
        batches.skip(5)


def test_augmenting_what_are_no_images_is_refused():
    with pytest.raises(ValueError, match="images are"):
        Batches(numbered(8), batch_size=2, augment="flip")


def test_bytes_become_floats_between_zero_and_one():
    split = images(9)
    x, _ = next(iter(Batches(split, batch_size=9, shuffle=False)))
    assert x.dtype == torch.float32
    assert torch.equal(x, split.x.double().div(255).float())
    assert split.x.dtype == torch.uint8


def test_floats_and_whole_numbers_pass_unchanged():
    values = torch.tensor([[3.0, 400.0]])
    assert as_float(values) is values
    tokens = torch.tensor([[1, 2]])
    assert as_float(tokens) is tokens


def test_augmentation_sees_floats_and_may_be_a_function():
    def darker(x, generator):
        assert x.dtype == torch.float32
        return x * torch.rand(len(x), 1, 1, 1, generator=generator)

    split = images(8)
    x, _ = next(iter(Batches(split, batch_size=8, shuffle=False, augment=darker)))
    ratio = x / as_float(split.x).clamp_min(1e-6)
    brightest = ratio.flatten(1).max(dim=1).values
    assert torch.allclose(x, as_float(split.x) * brightest[:, None, None, None], atol=1e-6)
    assert brightest.unique().numel() == 8


def test_augmenting_leaves_the_split_alone():
    split = images(8)
    before = split.x.clone()
    list(Batches(split, batch_size=4, augment=lambda x, generator: x.zero_()))
    assert torch.equal(split.x, before)
    table = numbered(8)
    list(Batches(table, batch_size=4, augment=lambda x, generator: x.zero_()))
    assert torch.equal(table.x, numbered(8).x)


@pytest.mark.parametrize("options", [{"augment": "none"}, {"augment": None}, {"device": "cpu"}])
def test_names_and_device(options):
    x, _ = next(iter(Batches(images(4), batch_size=4, shuffle=False, **options)))
    assert torch.equal(x, as_float(images(4).x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2, "rank": 2, "world": 2}, "rank=2 of world=2"),
        ({"batch_size": 2, "rank": -1}, "rank=-1"),
        ({"batch_size": 6, "drop_last": True, "world": 2}, "10 examples, a batch of all ranks has 12"),
        ({"batch_size": 2, "augment": "flipp"}, "possible are none, flip, flip-crop"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Batches(numbered(10), **options)


def test_an_empty_split_is_refused():
    with pytest.raises(ValueError, match="empty"):
        Batches(numbered(0), batch_size=2)
