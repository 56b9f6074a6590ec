import pytest
import torch
from sklearn.model_selection import StratifiedShuffleSplit

from credo.data import Dataset, Split, split_validation


def numbered(n: int, classes: int = 3) -> Split:
    """Examples that carry their own index, so that one can see where they went."""
    return Split(torch.arange(n, dtype=torch.float32).unsqueeze(1), torch.arange(n) % classes)


def ids(split: Split) -> list[int]:
    return [int(value) for value in split.x[:, 0]]


def test_subset_takes_examples_with_their_labels():
    chosen = numbered(10).subset([7, 2, 2])
    assert ids(chosen) == [7, 2, 2]
    assert chosen.y.tolist() == [1, 2, 2]
    assert len(numbered(10).subset([])) == 0


def test_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match=r"3 examples and y has 2"):
        Split(torch.zeros(3, 1), torch.zeros(2, dtype=torch.long))


def test_dataset_knows_its_task_and_shape():
    split = Split(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.long))
    assert Dataset("a", split, split, classes=10).task == "classification"
    assert Dataset("a", split, split, classes=None).task == "regression"
    # Of the test split, because an out-of-distribution set may have no training split.
    assert Dataset("a", split.subset([]), split, classes=10).input_shape == (3, 8, 8)


@pytest.mark.parametrize("stratify", [False, True])
@pytest.mark.parametrize(("size", "expected"), [(7, 7), (0.25, 26), (0.5, 52), (102, 102)])
def test_validation_and_train_are_disjoint_and_cover_all(size, expected, stratify):
    train, validation = split_validation(numbered(103), size=size, seed=3, stratify=stratify)
    assert len(validation) == expected
    assert sorted(ids(train) + ids(validation)) == list(range(103))
    assert ids(train) == sorted(ids(train))
    assert ids(validation) == sorted(ids(validation))


def test_the_seed_decides():
    first, again, other = (ids(split_validation(numbered(100), size=20, seed=seed)[1]) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    split_validation(numbered(100), size=20, seed=1, stratify=True)
    assert torch.equal(before, torch.get_rng_state())


def test_stratified_shares_agree_with_scikit_learn():
    y = torch.tensor([0] * 50 + [1] * 30 + [4] * 21)  # labels need not be consecutive
    split = Split(torch.zeros(101, 1), y)
    _, validation = split_validation(split, size=20, seed=0, stratify=True)
    _, theirs = next(StratifiedShuffleSplit(1, test_size=20, random_state=0).split(y, y))
    assert validation.y.bincount().tolist() == y[torch.from_numpy(theirs)].bincount().tolist() == [10, 6, 0, 0, 4]


@pytest.mark.parametrize("size", [0, 10, 11, -1, 0.0, 1.0, 0.01, 0.99, 1.5, True])
def test_a_size_that_leaves_one_side_empty_is_refused(size):
    with pytest.raises(ValueError, match=r"size=.*10 examples"):
        split_validation(numbered(10), size=size, seed=0)


def test_targets_cannot_be_stratified():
    split = Split(torch.zeros(10, 1), torch.zeros(10, 1))
    with pytest.raises(ValueError, match="class labels"):
        split_validation(split, size=2, seed=0, stratify=True)
