"""Experiments from tables: defaults, mistakes named before anything runs, and what is built from them."""

import inspect
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from credo import BBB, MAP, Ensemble
from credo.data import DATASETS, DatasetSpec
from credo.experiments.config import Experiment, Training, make_experiment, prepare, read_experiment
from credo.experiments.options import method_options
from credo.methods import METHODS
from credo.models import MODELS, build_model
from credo.models.registry import model_options

Small = Callable[..., Experiment]


def test_defaults_are_written_out() -> None:
    experiment = make_experiment({})
    assert experiment.data == {"name": "digits"}
    assert experiment.model["name"] == "mlp"
    assert experiment.model["hidden"] == [100, 100]
    assert experiment.training == Training()
    assert experiment.method["name"] == "bbb"
    assert experiment.method["lr"] == method_options("bbb")["lr"].default
    assert {"noise", "draws", "temperature", "kl_term", "optimizer"} <= set(experiment.method)
    assert "seed" not in experiment.method  # the experiment's own
    assert not {"inputs", "classes", "seed"} & set(experiment.model)  # from the data and the experiment


@pytest.mark.parametrize("name", DATASETS)
def test_a_record_holds_every_option_of_the_data(name: str) -> None:
    options = {"path": "table.csv"} if name in ("csv", "images", "arrays") else {}
    table = make_experiment({"data": {"name": name, **options}}).to_dict()["data"]
    parameters = inspect.signature(DATASETS[name].load).parameters.values()
    assert set(table) == {"name", *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)}


@pytest.mark.parametrize("name", MODELS)
def test_a_record_holds_every_option_of_the_network(name: str) -> None:
    table = make_experiment({"model": {"name": name}}).to_dict()["model"]
    assert table["normalize"] == "auto", "the numbers are those of the training inputs"
    own = {**table, "normalize": json.loads(json.dumps(model_options(name)["normalize"].default))}
    model = build_model(name, **{key: value for key, value in own.items() if key != "name"})
    built = vars(model)["credo_spec"]["options"]  # with all defaults
    assert {**own, **{key: built[key] for key in ("inputs", "classes", "seed")}} == {"name": name, **built}


@pytest.mark.parametrize("name", [name for name in METHODS if name != "ensemble"])
def test_a_record_holds_every_option_of_the_method(name: str) -> None:
    parameters = inspect.signature(METHODS[name]).parameters
    known = {"name", *parameters} - {"self", "model", "data_size", "batches", "seed"}
    assert set(make_experiment({"method": {"name": name}}).to_dict()["method"]) == known
    of = make_experiment({"method": {"name": "ensemble", "of": {"name": name}}}).to_dict()["method"]["of"]
    assert set(of) == known


def test_a_later_default_does_not_change_what_a_record_means(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: dict[str, Any] = {"data": {"name": "gap"}, "model": {"name": "mlp"}}
    experiment = make_experiment(tables)
    texts = (experiment.to_toml(), json.dumps(experiment.to_dict()))

    def load_gap(*, n: int = 999, noise: float = 0.9, seed: int = 9, new: str = "option") -> Any: ...

    def mlp(
        inputs: Any = (), *, hidden: Any = (7,), normalize: Any | None = 0.5, input_range: Any | None = 1
    ) -> Any: ...

    monkeypatch.setitem(DATASETS, "gap", DatasetSpec("", "regression", load_gap))
    monkeypatch.setitem(MODELS, "mlp", mlp)
    changed = make_experiment({"data": {"name": "gap"}, "model": {"name": "mlp"}})
    assert (changed.data["n"], changed.model["hidden"]) == (999, [7])
    for record in (tomllib.loads(texts[0]), json.loads(texts[1])):
        again = make_experiment(record)
        assert again.data == {**experiment.data, "new": "option"}
        assert again.model == experiment.model


def test_a_record_without_defaults_still_loads() -> None:
    old = {"data": {"name": "moons"}, "model": {"name": "mlp", "hidden": [3]}, "method": {"name": "map", "lr": 0.1}}
    experiment = make_experiment(old)
    assert experiment.data == {"name": "moons", "n": 500, "noise": 0.1, "seed": 0}
    assert (experiment.model["hidden"], experiment.model["activation"]) == ([3], "relu")


def test_none_can_be_said_where_it_means_something() -> None:
    switched_off = make_experiment({"method": {"name": "noisy-kfac", "clip": "none"}})
    assert switched_off.method["clip"] is None
    assert make_experiment({"method": {"name": "noisy-kfac", "clip": None}}) == switched_off
    assert make_experiment(tomllib.loads(switched_off.to_toml())) == switched_off
    assert make_experiment({"data": {"name": "csv", "path": "none", "target": "none"}}).data["target"] == "none"
    assert make_experiment({"training": {"patience": "none", "augment": "none"}}).training == Training()
    for tables, message in (
        ({"method": {"name": "bbb", "lr": "none"}}, "method.lr='none' must be a number"),
        ({"training": {"epochs": "none"}}, "training.epochs='none' must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            make_experiment(tables)


def test_given_values_win_over_defaults() -> None:
    method = {"name": "map", "lr": 0.5, "prior": {"kind": "gaussian", "std": 2.0}}
    experiment = make_experiment({"method": method, "training": {"epochs": 7}})
    assert experiment.method["lr"] == 0.5
    assert experiment.method["prior"] == {"kind": "gaussian", "std": 2.0}
    assert experiment.method["optimizer"]["name"] == "adam"
    assert experiment.training == Training(epochs=7)


def test_the_given_tables_are_not_shared() -> None:
    tables: dict[str, Any] = {"method": {"name": "bbb", "prior": {"kind": "laplace", "b": 0.1}}}
    experiment = make_experiment(tables)
    tables["method"]["prior"]["b"] = 9.0
    assert experiment.method["prior"]["b"] == 0.1


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"modle": {}}, "Unknown section 'modle'. Did you mean 'model'?"),
        ({"training": {"epoch": 3}}, "Unknown training option 'epoch'. Did you mean 'epochs'?"),
        ({"training": {"schedule": "cosin"}}, "Unknown schedule 'cosin'. Did you mean 'cosine'?"),
        ({"method": {"name": "bbbb"}}, "Unknown method 'bbbb'. Did you mean 'bbb'?"),
        ({"continual": {"count": 3}}, "Use `credo continual` for a sequence of tasks."),
        ({"method": {"nam": "map"}}, "Unknown option of bbb 'nam'. Did you mean 'name'?"),
        ({"method": {"name": "bbb", "lrr": 1}}, "Unknown option of bbb 'lrr'. Did you mean 'lr'?"),
        ({"method": {"name": "ensemble", "member": 3}}, "Unknown option of ensemble 'member'. Did you mean 'members'?"),
        ({"method": {"name": "ensemble", "of": {"nam": "bbb"}}}, "Unknown option of map 'nam'"),
        ({"method": {"name": "ensemble", "of": {"name": "bb"}}}, "Unknown method 'bb'. Did you mean 'bbb'?"),
        ({"model": {"name": "mpl"}}, "Unknown model 'mpl'. Did you mean 'mlp'?"),
        ({"data": {"name": "didgits"}}, "data set 'didgits'. Did you mean 'digits'?"),
        # What the experiment fills in by itself cannot be given.
        ({"method": {"name": "ivon", "noise": "weights"}}, "noise is an option of bbb, "),
        ({"method": {"name": "bbb", "kl_term": {"batches": 3}}}, "method.kl_term.batches: leave it out"),
        ({"method": {"name": "bbb", "data_size": 3}}, "Unknown option of bbb 'data_size'"),
    ],
)
def test_an_unknown_name_gets_the_nearest(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_experiment(tables)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"data": 3}, "data must be a section: [data] in TOML"),
        ({"training": []}, "training must be a section"),
        ({"data": {"name": 3}}, "data.name=3 must be a name"),
        ({"model": {"name": None}}, "model.name=None must be a name"),
        ({"method": {"name": ["bbb"]}}, "method.name=['bbb'] must be a name"),
        ({"training": {"epochs": "many"}}, "training.epochs='many' must be a whole number"),
        ({"training": {"epochs": 2.5}}, "training.epochs=2.5 must be a whole number"),
        ({"training": {"epochs": True}}, "training.epochs=True must be a whole number"),
        ({"training": {"batch_size": []}}, "training.batch_size=[] must be a whole number"),
        ({"training": {"validation": "x"}}, "training.validation='x' must be a number"),
        ({"training": {"milestones": 3}}, "training.milestones=3 must be a list"),
        ({"training": {"patience": "x"}}, "training.patience='x' must be a whole number"),
        ({"training": {"seed": "x"}}, "training.seed='x' must be a whole number"),
        ({"training": {"epochs": -1}}, "training.epochs=-1: at least 0"),
        ({"training": {"epochs": 0}}, "training.epochs=0: bbb needs training; these do not: map,"),
        (
            {"training": {"epochs": 0}, "method": {"name": "laplace"}},
            "training.epochs=0 needs a trained network: set model.weights",
        ),
        ({"training": {"warmup": 99.0}}, "warmup=99.0 must lie between 0 and epochs=20"),
        ({"training": {"schedule": "steps"}}, "needs milestones"),
        ({"method": {"name": "bbb", "lr": "x"}}, "method.lr='x' must be a number"),
        ({"model": {"name": "alexnet", "width": "abc"}}, "model.width='abc' must be a number; the default is 1.0"),
        ({"model": {"name": "resnet-cifar", "depth": "x"}}, "model.depth='x' must be a whole number"),
        ({"method": {"name": "bbb", "draws": 1.5}}, "method.draws=1.5 must be a whole number"),
        ({"method": {"name": "ensemble", "members": "x"}}, "method.members='x' must be a whole number"),
        ({"method": {"name": "ensemble", "of": "map"}}, "method.of describes one member"),
        ({"method": {"name": "ensemble", "of": {"name": "ensemble"}}}, "cannot be an ensemble"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_experiment(tables)
    assert message in str(caught.value)


def test_whole_numbers_are_numbers() -> None:
    experiment = make_experiment({"method": {"lr": 1}, "training": {"validation": 10, "warmup": 1}})
    assert (experiment.method["lr"], experiment.training.validation, experiment.training.warmup) == (1, 10, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"n": "x"}}, r"\[data\] does not work with .*n='x'"),
        ({"data": {"m": 3}}, "blobs has no option m"),
        ({"model": {"dropout": "x"}}, "model.dropout='x' must be a number; the default is 0.0"),
        ({"model": {"seed": "x"}}, r"\[model\] does not work with .*seed='x'"),
        ({"model": {"hiden": [3]}}, "Unknown option of mlp 'hiden'. Did you mean 'hidden'?"),
        ({"method": {"prior": "laplace"}}, "prior='laplace' is not a prior: give a Gaussian's standard deviation"),
        ({"method": {"optimizer": {"clip_norm": "x"}}}, r"optimizer\.clip_norm='x' must be a positive number"),
        ({"method": {"optimizer": "adm"}}, "Unknown optimizer 'adm'. Did you mean 'adam'?"),
        ({"method": {"prior": {"kind": "laplac"}}}, "Unknown prior 'laplac'. Did you mean 'laplace'?"),
        ({"training": {"augment": "flp"}}, "augment='flp': possible are"),
        ({"training": {"validation": 100}}, "leaves nothing on one side of 100"),
    ],
)
def test_what_only_the_constructors_know_is_still_a_clear_error(small: Small, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        prepare(small(**changes))


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"data": {"name": "gap", "n": 50}, "method": {"likelihood": {"kind": "gaussian", "heteroscedastic": True}}},
        {"method": {"name": "ensemble", "members": 2, "of": {"name": "bbb", "prior": {"kind": "scale-mixture"}}}},
        {"method": {"name": "bbb", "init": {"rho": [-3.0, 0.1]}, "optimizer": {"betas": [0.9, 0.99]}}},
        {
            "method": {"name": "mc-dropout", "rate": 0.1},
            "training": {"patience": 3, "schedule": "steps", "milestones": [1, 2.5]},
        },
    ],
)
def test_the_resolved_file_and_the_record_rebuild_the_same_experiment(tables: dict[str, Any]) -> None:
    experiment = make_experiment(tables)
    assert make_experiment(tomllib.loads(experiment.to_toml())) == experiment
    assert make_experiment(json.loads(json.dumps(experiment.to_dict()))) == experiment


@pytest.mark.parametrize("method", [name for name in METHODS if name != "mc-dropout"])
def test_the_same_experiment_gives_the_same_objects_and_leaves_global_generators_alone(
    small: Small, method: str
) -> None:
    before = torch.get_rng_state()
    first, second = (prepare(small(method={"name": method})) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    for (name, a), b in zip(first.posterior.named_parameters(), second.posterior.parameters(), strict=True):
        assert torch.equal(a, b), name
    for (x, y), (u, v) in zip(first.loader, second.loader, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
    other = prepare(small(method={"name": method}, training={"seed": 1})).posterior
    assert not torch.equal(other.model.get_parameter("fc1.weight"), first.posterior.model.get_parameter("fc1.weight"))


@pytest.mark.parametrize(("validation", "held_out"), [(0.2, 20), (25, 25), (0, 0)])
def test_the_objective_counts_only_what_is_trained_on(small: Small, validation: float, held_out: int) -> None:
    prepared = prepare(small(training={"validation": validation}))
    assert prepared.posterior.data_size == prepared.loader.data_size == 100 - held_out
    assert (0 if prepared.validation is None else prepared.validation.data_size) == held_out
    assert prepared.test_batches().data_size == 100


def test_blundell_gets_its_batches(small: Small) -> None:
    prepared = prepare(small(method={"kl_term": {"weight": "blundell"}}, training={"batch_size": 7}))
    posterior, count = prepared.posterior, len(prepared.loader)
    assert isinstance(posterior, BBB)
    weights = [posterior.kl_weight(step) for step in range(2 * count)]
    assert count == 13  # 90 examples in sevens
    assert weights == pytest.approx([count * 2.0 ** (count - i - 1) / (2**count - 1) for i in range(count)] * 2)


def test_an_ensemble_of_bbb(small: Small) -> None:
    of = {"name": "bbb", "kl_term": {"weight": "blundell"}, "init": 0.1}
    posterior = prepare(small(method={"name": "ensemble", "members": 3, "of": of})).posterior
    assert isinstance(posterior, Ensemble)
    assert [type(part) for part in posterior.parts] == [BBB] * 3
    for part in posterior.parts:
        assert isinstance(part, BBB)
        assert torch.allclose(part.std()["fc1.weight"], torch.tensor(0.1))
    assert [part.seed for part in posterior.parts] == [0, 1000, 2000]


@pytest.mark.parametrize("seeds", [{}, {"model": {"seed": 5}}, {"of": {"seed": 5}}])
@pytest.mark.parametrize("name", ["map", "bbb"])
def test_members_start_apart_whatever_seeds_are_given(small: Small, name: str, seeds: dict[str, Any]) -> None:
    of = {"name": name, **seeds.get("of", {})}
    model = seeds.get("model", {})
    posterior = prepare(small(method={"name": "ensemble", "members": 2, "of": of}, model=model)).posterior
    assert isinstance(posterior, Ensemble)
    first, second = posterior.parts
    assert not torch.equal(first.model.get_parameter("fc1.weight"), second.model.get_parameter("fc1.weight"))
    assert first.seed != second.seed


def test_an_ensemble_is_of_five_networks_by_default() -> None:
    experiment = make_experiment({"method": {"name": "ensemble"}})
    assert experiment.method["members"] == method_options("ensemble")["members"].default == 5
    assert experiment.method["of"]["name"] == "map"
    posterior = prepare(make_experiment({"data": {"name": "blobs", "n": 40}, "method": experiment.method})).posterior
    assert isinstance(posterior, Ensemble)
    assert [type(part) for part in posterior.parts] == [MAP] * 5


def test_a_file_with_changes_on_top(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('[method]\nname = "map"\nlr = 0.5\n[method.prior]\nstd = 2.0\n[training]\nepochs = 9\n')
    experiment = read_experiment(path, ["training.epochs=4", "method.prior.kind=laplace", "method.prior.std=3"])
    assert experiment.training.epochs == 4
    assert experiment.method["lr"] == 0.5
    assert experiment.method["prior"] == {"kind": "laplace", "std": 3}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[method\n", "is not valid TOML"), (b"\xff\xfe", "is not a text file in UTF-8"), (b"a = 1\n", "a")],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "experiment.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_experiment(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no file .*nothing\.toml"):
        read_experiment(tmp_path / "nothing.toml")


def test_a_value_is_no_section() -> None:
    with pytest.raises(ValueError, match="'name' is a value, not a section"):
        read_experiment(None, ["method.name=bbb", "method.name.x=1"])
