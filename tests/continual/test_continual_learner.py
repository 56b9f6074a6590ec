"""Task sequences, what a learner keeps of them, its baselines, and going on after a stop."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.continual import (
    Learner,
    Task,
    backward_transfer,
    forward_transfer,
    learn_jointly,
    mean_accuracy,
    permuted_tasks,
    run_sequence,
    split_tasks,
    tasks_of,
)
from credo.core.example_counts import Counted
from credo.core.likelihood import Categorical
from credo.data import Split, load_dataset

DIGITS = load_dataset("digits")


def network(classes: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))


def vogn(**options: Any) -> Any:
    curvature = {"damping": 0.0, "curvature": {"init": 0.1, "decay": 0.98}}
    return partial(credo.VOGN, lr=0.01, **curvature, **options)


def test_metrics_are_their_definitions() -> None:
    matrix = [[0.9], [0.7, 0.8], [0.6, 0.5, 1.0]]
    assert mean_accuracy(matrix) == pytest.approx(0.7)
    assert backward_transfer(matrix) == pytest.approx(((0.6 - 0.9) + (0.5 - 0.8)) / 2)
    assert forward_transfer(matrix, [0.5, 0.9, 0.8]) == pytest.approx(((0.8 - 0.9) + (1.0 - 0.8)) / 2)
    assert backward_transfer([[0.9]]) == 0
    with pytest.raises(ValueError, match="Row i"):
        mean_accuracy([[0.9], [0.1]])
    with pytest.raises(ValueError, match="one for each"):
        forward_transfer(matrix, [0.5])


def test_permuted_tasks_hold_the_same_pixels_in_one_other_order_each() -> None:
    tasks = permuted_tasks(DIGITS, 3)
    firsts = [task.load()[0].x.flatten(1) for task in tasks]
    original = DIGITS.train.x.flatten(1)
    for x in firsts:
        assert not torch.equal(x, original)
        assert torch.equal(x.sort(dim=1).values, original.sort(dim=1).values)
    assert not torch.equal(firsts[0], firsts[1])
    train, test = tasks[0].load()
    order = [
        int(torch.nonzero((train.x.flatten(1)[:, [i]] == original).all(0))[0])
        for i in range(64)
        if original[:, i].any()
    ]
    assert len(set(order)) > 40  # one permutation for all examples, and for the test ones the same
    again = permuted_tasks(DIGITS, 3)[0].load()[1]
    assert torch.equal(again.x, test.x)
    assert {task.head for task in tasks} == {"shared"}


def test_split_tasks_divide_the_classes() -> None:
    multi, single = split_tasks(DIGITS, 5), split_tasks(DIGITS, 5, heads="single")
    assert [task.classes for task in multi] == [2] * 5
    assert len({task.head for task in multi}) == 5
    assert multi[2].load()[0].y.unique().tolist() == [0, 1]
    assert single[2].load()[0].y.unique().tolist() == [4, 5]
    assert {task.head for task in single} == {"shared"}
    assert sum(len(task.load()[1]) for task in multi) == len(DIGITS.test)
    with pytest.raises(ValueError, match="equal size"):
        split_tasks(DIGITS, 3)
    with pytest.raises(ValueError, match="multi and single"):
        split_tasks(DIGITS, 5, heads="two")
    with pytest.raises(ValueError, match="is a regression"):
        permuted_tasks(load_dataset("gap"), 2)


def test_data_sets_as_tasks() -> None:
    tasks = tasks_of([DIGITS, DIGITS])
    assert [task.name for task in tasks] == ["digits 1", "digits 2"]
    assert [task.head for task in tasks] == ["digits 1", "digits 2"]
    assert len(tasks[0].load()[0]) == len(DIGITS.train)
    with pytest.raises(ValueError, match="different shapes"):
        tasks_of([DIGITS, load_dataset("moons")])


def learned(learner: Learner, tasks: list[Task]) -> list[list[float]]:
    *_, last = run_sequence(learner, tasks)
    return last.matrix


def test_the_posterior_remembers_what_fine_tuning_forgets() -> None:
    tasks = permuted_tasks(DIGITS, 3)
    bayes = learned(Learner(network, vogn(), epochs=15, batch_size=64, prior=1.0), tasks)
    forgetting = learned(
        Learner(network, partial(credo.MAP, lr=1e-2), epochs=15, batch_size=64, carry="nothing"), tasks
    )
    assert min(row[-1] for row in bayes) > 0.85
    assert backward_transfer(forgetting) < -0.4  # it does forget
    assert backward_transfer(bayes) > -0.15
    assert mean_accuracy(bayes) > 0.8


def test_consolidation_adds_the_fisher_information() -> None:
    task = Task("some", lambda: (DIGITS.train.subset(range(50)), DIGITS.test), 10)
    learner = Learner(
        network, partial(credo.MAP, lr=1e-2), epochs=2, batch_size=16, carry="fisher", strength=3.0, prior=0.5
    )
    list(learner.learn(task))
    net = network(10)
    learner.memory.fill_(net, task, means=True)
    slow = torch.zeros(10)
    for x, y in zip(*(DIGITS.train.subset(range(50)).x, DIGITS.train.subset(range(50)).y), strict=True):
        x = x.float() / 255 if x.dtype == torch.uint8 else x
        loss = nn.functional.cross_entropy(net(x.unsqueeze(0)), y.unsqueeze(0))
        slow += torch.autograd.grad(loss, net[3].bias)[0].square()
    precision = learner.memory.std["3.bias@shared"].pow(-2)
    torch.testing.assert_close(precision, 0.5**-2 + 3.0 * slow, rtol=1e-4, atol=1e-4)


def test_consolidation_leaves_out_what_the_likelihood_does_not_count() -> None:
    class WithGaps(Categorical):
        def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(outputs, y)

        def counted(self, y: Tensor) -> Counted:
            return Counted(float((y >= 0).sum()))

    some = DIGITS.train.subset(range(24))
    gaps = Split(some.x, some.y.where(torch.arange(24) % 3 == 0, -100))
    known = DIGITS.train.subset(range(0, 24, 3))
    learner = Learner(network, credo.MAP, epochs=1, batch_size=12, carry="fisher")
    squares = learner._summed_squares(credo.MAP(network(10), data_size=8, likelihood=WithGaps()), gaps)
    for name, wanted in learner._summed_squares(credo.MAP(network(10), data_size=8), known).items():
        torch.testing.assert_close(squares[name], wanted)


def test_heads_of_other_tasks_stay_as_they_were() -> None:
    tasks = split_tasks(DIGITS, 5)[:2]
    learner = Learner(network, vogn(), epochs=3, batch_size=64)
    list(learner.learn(tasks[0]))
    before = {key: value.clone() for key, value in learner.memory.mean.items()}
    list(learner.learn(tasks[1]))
    head, other = (f"3.weight@{task.head}" for task in tasks)
    assert torch.equal(learner.memory.mean[head], before[head])
    assert other in learner.memory.mean
    assert not torch.equal(learner.memory.mean["1.weight"], before["1.weight"])
    assert learner.posterior(tasks[0]).mean()["3.weight"].equal(before[head])
    assert learner.accuracy(tasks[0]) > 0.75  # of two classes, after three epochs


def test_a_coreset_is_learned_last_and_is_not_trained_on_before() -> None:
    task = split_tasks(DIGITS, 5)[0]
    sizes: list[int] = []

    def make(model: nn.Module, *, data_size: int, prior: credo.priors.Gaussian) -> credo.BBB:
        sizes.append(data_size)
        return credo.BBB(model, data_size=data_size, prior=prior, lr=1e-2)

    learner = Learner(network, make, epochs=2, batch_size=64, coreset=20)
    list(learner.learn(task))
    known = learner.memory.mean["1.weight"].clone()
    final = learner.posterior(task)
    assert sizes == [len(task.load()[0]) - 20, 20]
    assert torch.equal(learner.memory.mean["1.weight"], known)  # predicting changes nothing that is known
    assert not torch.equal(final.mean()["1.weight"], known)
    with pytest.raises(ValueError, match="needs carry='posterior'"):
        Learner(network, make, epochs=1, carry="nothing", coreset=5)


def test_restart_begins_with_new_means_and_the_old_ones_as_prior() -> None:
    seen: list[tuple[torch.Tensor, Any]] = []

    def make(model: nn.Module, *, data_size: int, prior: credo.priors.Gaussian) -> credo.BBB:
        posterior = credo.BBB(model, data_size=data_size, prior=prior, lr=1e-2)
        seen.append((posterior.mean()["1.weight"], posterior.prior))
        return posterior

    tasks = permuted_tasks(DIGITS, 2)
    for restart in (True, False):
        seen.clear()
        learner = Learner(network, make, epochs=1, batch_size=64, restart=restart)
        list(learner.learn(tasks[0]))
        known = learner.memory.mean["1.weight"].clone()
        list(learner.learn(tasks[1]))
        (first, prior), (second, later) = seen
        assert prior.std == 1.0
        assert torch.equal(second, first if restart else known)
        assert torch.equal(later.mean[: known.numel()], known.flatten())


def test_a_stopped_sequence_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    tasks = split_tasks(DIGITS, 5)[:3]

    def make(model: nn.Module, *, data_size: int, prior: credo.priors.Gaussian) -> credo.BBB:
        return credo.BBB(model, data_size=data_size, prior=prior, lr=1e-2)

    def learner() -> Learner:
        return Learner(network, make, epochs=2, batch_size=64, coreset=10)

    *_, whole = run_sequence(learner(), tasks)
    first = run_sequence(learner(), tasks, tmp_path)
    next(first)
    stopped = learner()
    stopped_records = iter(run_sequence(stopped, tasks, tmp_path))
    assert next(stopped_records).matrix == whole.matrix[:1]
    # Stopped in the middle of the second task: after its first epoch.
    middle = stopped.learn(tasks[1], checkpoint=tmp_path / "1-task.pt")
    next(middle)
    *_, resumed = run_sequence(learner(), tasks, tmp_path)
    assert resumed.matrix == whole.matrix
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3-learned.safetensors", "tasks.json"]
    with pytest.raises(ValueError, match="other tasks"):
        next(iter(run_sequence(learner(), permuted_tasks(DIGITS, 2), tmp_path)))


def test_bad_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="posterior"):
        Learner(network, vogn(), epochs=1, carry="memory")
    with pytest.raises(ValueError, match="strength"):
        Learner(network, vogn(), epochs=1, strength=0.0)
    for prior in (credo.priors.Gaussian(torch.zeros(5), 1.0), credo.priors.Gaussian(0.0, {"1.*": 0.5, "*": 1.0})):
        for carry in ("posterior", "fisher"):
            with pytest.raises(ValueError, match="first prior must have one mean and one std"):
                Learner(network, vogn(), epochs=1, prior=prior, carry=carry)
        assert Learner(network, vogn(), epochs=1, prior=prior, carry="nothing").prior is prior
    with pytest.raises(RuntimeError, match="was not learned"):
        Learner(network, vogn(), epochs=1).posterior(permuted_tasks(DIGITS, 1)[0])
    with pytest.raises(ValueError, match="draws"):
        Learner(network, vogn(), epochs=1, draws=0)
    scaled = Learner(lambda classes: nn.Sequential(network(classes), nn.PReLU()), vogn(), epochs=1)
    assert len(list(scaled.learn(split_tasks(DIGITS, 5)[0]))) == 1
    assert any(key.startswith("0.3.weight@") for key in scaled.memory.mean)  # the head is the layer with the classes


@pytest.mark.part(2)
@pytest.mark.parametrize("carry", ["posterior", "nothing"])
@pytest.mark.parametrize("heads", ["multi", "single"])
def test_all_tasks_at_once_is_an_upper_bound(carry: str, heads: str) -> None:
    tasks = split_tasks(DIGITS, 5, heads=heads)
    make = partial(credo.BBB, lr=1e-2, temperature=0.1) if carry == "posterior" else partial(credo.MAP, lr=1e-2)
    learner, in_turn = (Learner(network, make, epochs=8, batch_size=64, carry=carry) for _ in range(2))
    assert len(list(learn_jointly(learner, tasks))) == 8
    accuracies = [learner.accuracy(task) for task in tasks]
    assert min(accuracies) > 0.85
    *_, sequence = run_sequence(in_turn, tasks)
    last = sequence.matrix[-1]
    assert sum(accuracies) > sum(last)  # of 5: by 0.05 where heads are apart and the posterior is carried
    if heads == "single":
        assert sum(last) < 1  # where the last task is all that is known


def test_joint_training_judges_examples_by_their_own_head() -> None:
    """With one class a head there is nothing to decide: the loss is 0 from the start."""
    tasks = split_tasks(DIGITS, 10)
    learner = Learner(network, partial(credo.MAP, lr=0.0), epochs=1, batch_size=64, carry="nothing")
    (record,) = learn_jointly(learner, tasks)
    assert record.nll == pytest.approx(0.0, abs=1e-6)


def normed(classes: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes))


@pytest.mark.parametrize("random", ["all", "weights", "1.*"])
def test_heads_without_noise_are_not_mixed_up(random: str) -> None:
    tasks = split_tasks(DIGITS, 5)[:2]
    learner = Learner(normed, partial(credo.BBB, lr=1e-2, random=random), epochs=4, batch_size=64, restart=False)
    list(learner.learn(tasks[0]))
    own = {name: p.detach().clone() for name, p in learner.posterior(tasks[0]).model[4].named_parameters()}
    with pytest.raises(RuntimeError, match="was not learned"):
        learner.posterior(tasks[1])
    list(learner.learn(tasks[1]))
    assert learner.accuracy(tasks[1]) > 0.75
    for name, parameter in learner.posterior(tasks[0]).model[4].named_parameters():
        assert torch.equal(parameter, own[name])


@pytest.mark.parametrize("carry", ["posterior", "nothing"])
def test_joint_training_keeps_running_statistics_and_points(carry: str) -> None:
    data = [Split(2 * s.x + 1, s.y) for s in (DIGITS.train, DIGITS.test)]  # far from statistics that were never seen
    tasks = [Task("all", lambda: (data[0], data[1]), 10)]
    make: Any = partial(credo.BBB, lr=1e-2, random="weights", temperature=0.1)
    learner = Learner(
        normed, make if carry == "posterior" else partial(credo.MAP, lr=1e-2), epochs=6, batch_size=64, carry=carry
    )
    list(learn_jointly(learner, tasks))
    assert learner.accuracy(tasks[0]) > 0.85
    statistics = learner.posterior(tasks[0]).model[2].running_mean
    assert statistics is not None
    assert statistics.abs().max() > 0.05


def test_tied_weights_restart_too() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)
            self.second = nn.Linear(64, 64)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            return self.last(self.second(self.first(x).relu()).relu())  # type: ignore[no-any-return]

    def build(_: int) -> nn.Module:
        torch.manual_seed(1)
        return Tied()

    starts: list[torch.Tensor] = []

    def make(model: nn.Module, *, data_size: int, prior: credo.priors.Gaussian) -> credo.BBB:
        starts.append(model.get_parameter("first.weight").detach().clone())
        return credo.BBB(model, data_size=data_size, prior=prior, lr=1e-2)

    learner = Learner(build, make, epochs=1, batch_size=64)
    for task in permuted_tasks(DIGITS, 2):
        list(learner.learn(task))
    assert torch.equal(starts[0], starts[1])
    assert not any(key.startswith("others") for key in learner.state())


def test_many_coresets_come_back_in_their_order() -> None:
    task = permuted_tasks(DIGITS, 1)[0]
    learner = Learner(network, vogn(), epochs=1, coreset=2)
    learner.coresets["shared"] = [Split(torch.full((1, 1), float(i)), torch.tensor([i])) for i in range(12)]
    again = Learner(network, vogn(), epochs=1, coreset=2)
    again.load_state(dict(sorted(learner.state().items())))
    assert [int(part.y) for part in again.coresets["shared"]] == list(range(12))
    assert task.head == "shared"


@pytest.mark.parametrize("method", ["ivon", "noisy-kfac"])
def test_other_posteriors_carry_on(method: str) -> None:
    tasks = split_tasks(DIGITS, 5)[:2]
    options = {"lr": 0.1, "curvature": {"init": 0.1, "decay": 0.98}, "clip": None} if method == "ivon" else {"lr": 1e-3}
    learner = Learner(network, partial(credo.METHODS[method], **options), epochs=20, batch_size=32)
    for task in tasks:
        list(learner.learn(task))
    assert min(learner.accuracy(task) for task in tasks) > 0.75


def test_data_sets_with_heads_of_their_own_are_learned_in_turn() -> None:
    halves = [Split(s.x[s.y < 4], s.y[s.y < 4]) for s in (DIGITS.train, DIGITS.test)]
    few = dataclasses.replace(DIGITS, name="few", train=halves[0], test=halves[1], classes=4)
    tasks = tasks_of([DIGITS, few])
    learner = Learner(network, vogn(), epochs=8, batch_size=64)
    *_, last = run_sequence(learner, tasks)
    assert min(last.matrix[-1]) > 0.8
    with pytest.raises(ValueError, match="not possible"):
        tasks_of([DIGITS, few], heads="single")
