"""Attack sets: made in chunks, resumed to the same bytes, provenance kept, damage noticed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from credo import FileFormatError, __version__
from credo.attacks import AttackResult, load_attack_set, make_attack_set, pgd
from credo.attacks import sets as module

ABOUT = {"source": "a linear network", "attack": "pgd", "options": {"epsilon": 0.1}}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(25, 1, 3, 4, generator=generator), torch.randint(3, (25,), generator=generator)


class Attack:
    """PGD that counts its chunks and can be killed."""

    def __init__(self, *, killed_at: int | None = None) -> None:
        self.chunks: list[int] = []
        self.killed_at = killed_at

    def __call__(self, x: Tensor, y: Tensor, seed: int) -> AttackResult:
        if len(self.chunks) == self.killed_at:
            raise KeyboardInterrupt
        self.chunks.append(len(x))
        return pgd(network(), x, y, epsilon=0.1, steps=2, seed=seed)


def make(path: Path, attack: Any = None, **options: Any) -> Any:
    x, y = data()
    return make_attack_set(path, attack or Attack(), x, y, **{"about": ABOUT, "chunk": 10, **options})


def test_what_is_in_it(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    made = make(tmp_path / "a.safetensors", on_progress=lambda *state: seen.append(state))
    assert seen == [(10, 25), (20, 25), (25, 25)]
    loaded = load_attack_set(tmp_path / "a.safetensors")
    x, y = data()
    assert torch.equal(loaded.inputs, made.inputs)
    assert torch.equal(loaded.labels, y)
    wanted = pgd(network(), x[10:20], y[10:20], epsilon=0.1, steps=2, seed=module.chunk_seed(0, 1))
    for name in ("inputs", "success", "distortion", "queries"):
        assert torch.equal(getattr(loaded.result, name)[10:20], getattr(wanted, name))
    assert {key: loaded.about[key] for key in ABOUT} == ABOUT
    assert (loaded.about["seed"], loaded.about["count"], loaded.about["chunk"]) == (0, 25, 10)
    assert loaded.about["versions"]["credo"] == __version__
    assert len(loaded) == 25
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("killed_at", [0, 1, 2])
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path, killed_at: int) -> None:
    make(tmp_path / "whole" / "a.safetensors")
    path = tmp_path / "resumed" / "a.safetensors"
    with pytest.raises(KeyboardInterrupt):
        make(path, Attack(killed_at=killed_at))
    assert not path.exists()
    rest = Attack()
    make(path, rest)
    assert rest.chunks == [10, 10, 5][killed_at:]
    assert path.read_bytes() == (tmp_path / "whole" / "a.safetensors").read_bytes()
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]


def test_killed_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the last moment: all chunks are there, the file is not, and something half-written lies about."""
    path = tmp_path / "a.safetensors"
    write = module._write

    def killed(to: Path, *rest: Any) -> None:
        if to == path:
            (tmp_path / ".a.safetensors.abcd_123.part").write_bytes(b"half")
            raise KeyboardInterrupt
        write(to, *rest)

    monkeypatch.setattr(module, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        make(path)
    monkeypatch.undo()
    rest = Attack()
    make(path, rest)
    assert rest.chunks == []
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_damaged_chunk_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(KeyboardInterrupt):
        make(path, Attack(killed_at=2))
    chunk = tmp_path / ".a.safetensors.chunks" / "00000.safetensors"
    chunk.write_bytes(chunk.read_bytes()[:-7])
    rest = Attack()
    make(path, rest)
    assert rest.chunks == [10, 5]


def test_a_finished_set_is_only_read(tmp_path: Path) -> None:
    first = make(tmp_path / "a.safetensors")
    again = Attack()
    assert torch.equal(make(tmp_path / "a.safetensors", again).inputs, first.inputs)
    assert again.chunks == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"about": {**ABOUT, "options": {"epsilon": 0.2}}}, "options is {'epsilon': 0.1} there, {'epsilon': 0.2} now"),
        ({"seed": 1}, "seed is 0 there, 1 now"),
        ({"chunk": 5}, "chunk is 10 there, 5 now"),
    ],
)
def test_another_set_is_not_overwritten_nor_continued(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    make(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=words):
        make(tmp_path / "a.safetensors", **change)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "b.safetensors", Attack(killed_at=1))
    with pytest.raises(ValueError, match=words):
        make(tmp_path / "b.safetensors", **change)


def test_other_inputs_are_another_set(tmp_path: Path) -> None:
    make(tmp_path / "a.safetensors")
    x, y = data()
    with pytest.raises(ValueError, match="source_inputs is"):
        make_attack_set(tmp_path / "a.safetensors", Attack(), x.flip(0), y, about=ABOUT, chunk=10)


def test_it_knows_what_it_was_made_from(tmp_path: Path) -> None:
    made = make(tmp_path / "a.safetensors")
    x, y = data()
    assert made.made_from(x, y)
    assert not made.made_from(made.inputs, y)
    assert not made.made_from(x, y.flip(0))
    assert not made.made_from(x[:24], y[:24])


def test_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    make(path)
    good = path.read_bytes()
    with pytest.raises(FileNotFoundError, match="There is no file"):
        load_attack_set(tmp_path / "b.safetensors")
    for cut in (0, 4, 100, len(good) - 1):
        path.write_bytes(good[:cut])
        with pytest.raises(FileFormatError, match="not a complete safetensors file"):
            load_attack_set(path)
    changed = bytearray(good)
    changed[-50] ^= 1
    path.write_bytes(changed)
    with pytest.raises(FileFormatError, match="digest does not match"):
        load_attack_set(path)
    path.write_bytes(good.replace(b"a linear network", b"a linear netwerk"))
    with pytest.raises(FileFormatError, match="digest does not match"):
        load_attack_set(path)


def test_other_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(FileFormatError, match="is not an attack set"):
        load_attack_set(path)
    save_file({"weight": torch.zeros(2)}, path, metadata={"credo": "[1"})
    with pytest.raises(FileFormatError, match="is not an attack set"):
        load_attack_set(path)
    make(tmp_path / "b.safetensors")
    header = {"attack_set": 99, "about": {"versions": {"credo": "9.0"}}}
    save_file(load_file(tmp_path / "b.safetensors"), path, metadata={"credo": json.dumps(header)})
    with pytest.raises(FileFormatError, match=r"format 99 \(Credo 9\.0\)"):
        load_attack_set(path)


def test_nothing_to_attack(tmp_path: Path) -> None:
    x, y = data()
    with pytest.raises(ValueError, match="chunk=0"):
        make(tmp_path / "a.safetensors", chunk=0)
    with pytest.raises(ValueError, match="25 inputs, 24 labels"):
        make_attack_set(tmp_path / "a.safetensors", Attack(), x, y[1:], about=ABOUT)


FORGERIES: dict[str, dict[str, Tensor | None]] = {
    "no labels": {"labels": None},
    "no inputs": {"inputs": None},
    "fewer labels": {"labels": torch.zeros(24, dtype=torch.int64)},
    "labels in two dimensions": {"labels": torch.zeros(25, 1, dtype=torch.int64)},
    "one label": {"labels": torch.tensor(0)},
    "more inputs": {"inputs": torch.zeros(26, 1, 3, 4)},
    "one query": {"queries": torch.tensor([3])},
    "labels that are no whole numbers": {"labels": torch.zeros(25)},
    "complex inputs": {"inputs": torch.zeros(25, 1, 3, 4, dtype=torch.complex64)},
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_tensors_that_do_not_fit_each_other_are_named(forgery: str, tmp_path: Path) -> None:
    """With a digest that fits, as another program could write it."""
    path = tmp_path / "a.safetensors"
    make(path)
    tensors, about = load_file(path), load_attack_set(path).about
    for name, value in FORGERIES[forgery].items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    header = {"attack_set": 1, "about": about, "digest": module._digest(about, tensors)}
    save_file(tensors, path, metadata={"credo": json.dumps(header)})
    with pytest.raises(FileFormatError, match=rf"a\.safetensors is not .*({'|'.join(FORGERIES[forgery])})"):
        load_attack_set(path)
