"""Several processes make the steps of one: every method, its draws over processes, its errors, its traffic."""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from filelock import FileLock
from killed_runs import assert_equal
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from builds import ATTACK, BUILDS, COUNTED, FOUR, RESUMED_BY_FOUR, SEVERAL, SEVERAL_OF_FOUR, SINGLE  # noqa: E402
from forks import load  # noqa: E402

sys.path.pop(0)

State = dict[str, Tensor]
DOUBLE = 8  # bytes
POINTS = ("map", "ogn", "kfac", "swag", "sghmc")
# Entries of the Kronecker factors and squares: (inputs + 1)² + outputs² of each layer, and BatchNorm's parameters.
FACTORS_OF_NORMED = (5**2 + 6**2) + (7**2 + 5**2) + (6**2 + 3**2) + 12
VARIANCES_OF_NORMED = 5 * 6 + 7 * 5 + 6 * 3
FACTORS_OF_CONV = (10**2 + 4**2) + (37**2 + 4**2) + (65**2 + 3**2) + 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the results are; all workers of a parallel test run share one set of processes."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    place = shared / "several processes"
    with FileLock(shared / "several processes.lock"):
        if not place.exists():
            place.mkdir()
            run(place)
    return place


def run(place: Path) -> None:
    done = forked.run(HERE / "worker.py", str(place), folder=place, timeout=400)
    assert done.returncode == 0, done.stdout
    failed = [line for line in done.stdout.splitlines() if re.search(r"\[.*[1-9].*\]", line)]
    assert [line.split()[0] for line in failed] == ["killed"], done.stdout


def distance(a: State, b: State) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a if a[name].numel())


def differing(a: State, b: State) -> set[str]:
    return {name for name in a if not torch.equal(a[name], b[name])}


def learned(state: State) -> State:
    """Without running statistics, which are each process's own between settlements."""
    return {name: value for name, value in state.items() if "running" not in name}


def check_same(found: list[dict[str, Any]], one: dict[str, Any], names: Iterable[str], tolerance: float) -> None:
    for name in names:
        first = found[0][name]
        assert all(differing(first["state"], other[name]["state"]) == set() for other in found), name
        assert all(first["terms"] == other[name]["terms"] for other in found), name
        assert distance(first["state"], one[name]["state"]) < tolerance, name
        for ours, theirs in zip(first["terms"], one[name]["terms"], strict=True):
            assert [v is None for v in ours] == [v is None for v in theirs]
            assert [v or 0.0 for v in ours] == pytest.approx([v or 0.0 for v in theirs], rel=max(tolerance, 1e-9))


# Twelve steps in double precision: what is left are roundings, which single precision would make 1e-6.
@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_make_the_steps_of_one(folder: Path, world: int) -> None:
    one = load(folder, "same_as_one", 1)[0]
    check_same(load(folder, "same_as_one", world), one, FOUR if world == 4 else BUILDS, tolerance=1e-8)


@pytest.mark.parametrize(
    ("job", "tolerance"),
    [("laplace_pass", 1e-8), ("laplace_noise", 2e-3), ("last_layer_pass", 1e-6), ("swag_statistics", 1e-8)],
)
def test_a_pass_of_several_processes_finds_the_spread_of_one(folder: Path, job: str, tolerance: float) -> None:
    one = load(folder, job, 1)[0]
    first, second = load(folder, job, 2)
    for case in one:
        assert differing(first[case], second[case]) == set(), case
        assert distance(first[case], one[case]) < tolerance, case


def test_a_pass_that_was_killed_resumes_in_each_process(folder: Path) -> None:
    for found in load(folder, "laplace_pass_killed", 2):
        assert found["files"] == ["pass.pt", "pass.rank-1.pt"]
        assert found["killed"] == {}
        assert_equal(found["resumed"], found["whole"])


def test_processes_write_the_same_samples(folder: Path) -> None:
    first, second = load(folder, "samples_in_files", 2)
    assert torch.equal(first["digests"], second["digests"])
    for one, other in zip(first["draws"], second["draws"], strict=True):
        assert differing(one, other) == set()
    names = {file.name for file in (folder / "samples").iterdir()}
    assert names >= {f"{bytes(digest.tolist()).hex()}.safetensors" for digest in first["digests"]}
    assert all(name.endswith(".safetensors") for name in names)


def test_in_single_precision_only_roundings_differ(folder: Path) -> None:
    one = load(folder, "same_as_one", 1)[0]
    check_same(load(folder, "same_as_one", 2), one, [f"{name} single" for name in SINGLE], tolerance=5e-6)


@pytest.mark.parametrize(("world", "names"), [(2, SEVERAL), (4, SEVERAL_OF_FOUR)])
def test_draws_over_processes_are_the_draws_of_one(folder: Path, world: int, names: tuple[str, ...]) -> None:
    # Two processes with a draw each; two times two with two draws each, over two halves of the data.
    one = load(folder, "same_as_one", 1)[0]
    check_same(load(folder, "same_as_one", world), one, [f"{name} × {world}" for name in names], tolerance=1e-8)


@pytest.mark.parametrize(("world", "names"), [(1, tuple(BUILDS)), (4, RESUMED_BY_FOUR)])
def test_another_number_of_processes_goes_on(folder: Path, world: int, names: tuple[str, ...]) -> None:
    uninterrupted = load(folder, "same_as_one", 1)[0]
    for found in load(folder, "gone_on", world):
        assert found.keys() == set(names)
        for name in names:
            assert distance(found[name]["state"], uninterrupted[name]["state"]) < 1e-8, name
            assert found[name]["terms"][-1][0] == pytest.approx(uninterrupted[name]["terms"][-1][0], abs=1e-9)


def test_parts_with_different_numbers_of_examples_make_the_steps_of_one(folder: Path) -> None:
    check_same(load(folder, "counted", 2), load(folder, "counted", 1)[0], COUNTED, tolerance=1e-8)


def test_own_noise_differs_and_updates_do_not(folder: Path) -> None:
    first, second = load(folder, "own_noise", 2)
    for name in first:
        alike = torch.equal(first[name]["outputs"], second[name]["outputs"])
        assert alike == (name in POINTS), name
        assert differing(learned(first[name]["state"]), learned(second[name]["state"])) == set(), name


def test_running_statistics_are_settled_as_means(folder: Path) -> None:
    first, second = load(folder, "own_noise", 2)
    for name in first:
        settled = first[name]["settled"]
        assert differing(settled, second[name]["settled"]) == set(), name
        assert differing(learned(settled), learned(first[name]["state"])) == set(), name
        for key in settled.keys() - learned(settled).keys():
            mean = (first[name]["state"][key] + second[name]["state"][key]) / 2
            torch.testing.assert_close(settled[key], mean)


def test_wrong_divisions_are_refused_by_all(folder: Path) -> None:
    for found in load(folder, "refused", 2):
        assert found["different"].startswith("ValueError: The processes have different posteriors")
        assert found["divided"] == "ValueError: mc_groups=3 does not divide the 2 processes."
        assert found["members"] == "ValueError: mc_groups=2 does not divide the 1 processes of each member."


def test_without_distribute_no_process_makes_a_pass_over_its_own_data(folder: Path) -> None:
    for found in load(folder, "apart", 2):
        assert found.keys() == {"laplace", "last-layer", "swag", "hmc"}
        for name, message in found.items():
            assert message.startswith("RuntimeError: This is one of 2 processes"), name
            line = "credo.distribute(posterior, independent=True)" if name == "hmc" else "credo.distribute(posterior)"
            assert line in message


def test_a_loss_that_is_not_finite_on_one_process_is_the_error_of_all(folder: Path) -> None:
    first, second = load(folder, "not_finite", 2)
    assert first.keys() == BUILDS.keys()
    for name in first:
        message = first[name]["message"]
        assert message == second[name]["message"]
        assert message.startswith("NonFiniteError: The loss"), name
        assert "at step 2" in message
        assert first[name]["same"], name
        assert second[name]["same"], name
        assert all(bool(torch.isfinite(value).all()) for value in first[name]["state"].values())
        if not name.startswith("ensemble"):  # of which each process has trained another member
            assert differing(learned(first[name]["state"]), learned(second[name]["state"])) == set(), name


def test_parts_of_a_batch_are_gathered_and_reduced_once(folder: Path) -> None:
    one = load(folder, "gathered", 1)[0]
    for found in load(folder, "gathered", 2):
        for name in one:
            assert distance(found[name]["state"], one[name]["state"]) < 1e-8, name
            layers = 2 if name == "vogn" else 1
            assert found[name]["reductions"] == 1 + 2 * 2 * layers, name  # BatchNorm: two a layer and pass


@pytest.mark.parametrize("way", ["closure", "block"])
def test_optimizers_make_the_steps_of_one_posterior(folder: Path, way: str) -> None:
    one = load(folder, "same_as_one", 1)[0]
    first, second = load(folder, "by_optimizer", 2)
    for name in ("vogn", "ogn", "ivon", "kfac", "noisy-kfac"):
        found = first[f"{name} by {way}"]
        assert differing(found, second[f"{name} by {way}"]) == set(), name
        assert distance(found, one[name]["state"]) < 1e-8, name


def test_an_optimizers_loss_that_is_not_finite_on_one_process_is_the_error_of_all(folder: Path) -> None:
    first, second = load(folder, "optimizer_fails", 2)
    assert first["not finite"].startswith("NonFiniteError: The loss")
    assert first["not finite"] == second["not finite"]
    assert second["alone"] == "KeyError: 'no such label'"
    assert first["alone"].startswith("LostProcessError: ")
    assert first["seconds"] < 20  # of a timeout of 60


def expected_entries(name: str, sizes: list[int]) -> int:
    """What the documentation says of the vector that a step reduces."""
    total, tensors = sum(sizes), len(sizes)
    if name.startswith(("vogn", "ogn", "ivon")):
        return 2 * total + 1
    if name == "ekfac":
        return total + 1 + FACTORS_OF_NORMED + VARIANCES_OF_NORMED
    if "kfac" in name:
        return total + 1 + (FACTORS_OF_CONV if name == "kfac" else FACTORS_OF_NORMED)
    return total + tensors + (1 if name.startswith("node") else 2)


def test_one_reduction_a_step_of_the_documented_size(folder: Path) -> None:
    for found in load(folder, "own_noise", 2):
        assert found.keys() == {name for name in BUILDS if not name.startswith("ensemble")}
        for name, row in found.items():
            assert row["traffic"] == (1, DOUBLE * expected_entries(name, row["parameters"])), name


def test_shared_ascents_and_shared_statistics_are_counted(folder: Path) -> None:
    found = load(folder, "same_as_one", 2)[0]
    entries = expected_entries("map", found["map"]["parameters"])
    channels = 6
    assert found["map"]["traffic"] == (1 + 2, DOUBLE * (entries + 2 * 2 * channels))
    row = found["bbb adversarial"]
    weights, tensors, passes = 83, 6, ATTACK.steps + 2
    entries = expected_entries("bbb", row["parameters"]) + ATTACK.steps * (weights + tensors)
    expected = 1 + ATTACK.steps + 2 * passes, DOUBLE * (entries + passes * 2 * 2 * channels)
    assert row["traffic"] == expected


@pytest.mark.parametrize("world", [2, 4])
def test_compression_rounds_twice(folder: Path, world: int) -> None:
    found = load(folder, "compressed", world)
    own = torch.stack([row["own"].double() for row in found])
    error = (found[0]["mean"].double() - own.mean(0)).abs()
    # Half a unit of the last of 8 bits, 2⁻⁸ of a number at most: once for what is sent, once for the mean of it.
    sent = own.abs().mean(0)
    bound = 2**-8 * (sent + own.mean(0).abs() + 2**-8 * sent) + 1e-6 * sent
    assert bool((error <= bound).all())
    relative = float(error.norm() / own.mean(0).norm())
    assert 1e-3 < relative < 3e-3  # 2.2e-3 was measured; without compression it would be 1e-7
    by_gloo = (found[0]["direct"].double() - own.mean(0)).norm() / own.mean(0).norm()
    assert relative <= float(by_gloo) * 1.001
    assert found[0]["losses"] == pytest.approx([1 / 3 + (world - 1) / 2], rel=1e-14)
    assert found[0]["traffic"] == (1, 2 * 10_001 + 8)
    for row in found:
        assert differing(learned(found[0]["state"]), learned(row["state"])) == set()
        assert row["terms"] == found[0]["terms"]


def test_a_killed_process_is_an_error_of_the_others_at_once(folder: Path) -> None:
    first, second = load(folder, "killed", 2)
    assert second is None
    assert len(first["messages"]) == 2
    assert all(m.startswith("LostProcessError: Process 0 of 2: another process was lost") for m in first["messages"])
    assert "torchrun --max-restarts" in first["messages"][0]
    assert first["same"]
    assert first["seconds"] < 20  # of a timeout of 60


def test_a_process_that_does_not_answer_is_an_error_after_the_timeout(folder: Path) -> None:
    first, _ = load(folder, "hanging", 2)
    assert first["messages"][0].startswith("LostProcessError: Process 0 of 2: another process was lost or timed out")
    assert first["same"]
    assert 0.9 < first["seconds"] < 20


def test_a_process_that_fails_alone_leaves_at_once(folder: Path) -> None:
    first, second = load(folder, "wrong_batch", 2)
    assert second["messages"][0] == "KeyError: 'no such label'"
    assert first["messages"][0].startswith("LostProcessError: ")
    assert first["seconds"] < 20  # of a timeout of 60
    assert first["same"]
    assert second["same"]


def test_buffers_of_the_networks_own_are_settled_as_the_first_has_them(folder: Path) -> None:
    first, second = load(folder, "own_buffers", 2)
    for name, owner in {"one": first, "two": second}.items():
        # The second member of two is the second process's.
        assert all(not torch.equal(*pair) for pair in zip(first[name]["before"], second[name]["before"], strict=True))
        for row in (first, second):
            assert all(map(torch.equal, row[name]["after"], owner[name]["before"])), name
        assert differing(first[name]["running"], second[name]["running"]) == set()


def test_eval_mode_without_running_statistics_is_each_processs_own(folder: Path) -> None:
    first, _ = load(folder, "evaluated_apart", 2)
    torch.testing.assert_close(first["output"], first["expected"])


def test_an_update_of_one_member_that_overflows_is_no_step_of_any(folder: Path) -> None:
    for found in load(folder, "one_member_overflows", 2):
        assert "member 1 is not finite at step 1; no member has changed" in found["message"]
        assert found["same"]
        assert found["steps"] == 2


def test_a_member_that_fails_in_its_update_alone_ends_the_process_group(folder: Path) -> None:
    first, second = load(folder, "late_failure", 2)
    assert second["messages"][0] == "NonFiniteError: too late"
    assert second["messages"][1].startswith(
        "LostProcessError: Process 1 left the process group when the update of a member"
    )
    assert first["messages"][0].startswith("LostProcessError: Process 0 of 2: another process was lost")
    assert first["seconds"] < 20  # of a timeout of 60
