"""Groups of constructor arguments in all their forms, and the names of 0.1."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import credo
from credo.core.arguments import current_config
from credo.core.posterior import Posterior
from credo.experiments.config import make_experiment, read_experiment
from credo.training.files.checkpoint import check_fingerprint

X, Y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def weights_after(posterior: Posterior, steps: int = 4) -> torch.Tensor:
    for _ in range(steps):
        posterior.step(lambda net: F.cross_entropy(net(X), Y))
    return torch.cat([p.detach().reshape(-1) for p in posterior.parameters()])


# (method, the old arguments, the new ones in several forms)
FORMS: dict[str, tuple[Any, dict[str, Any], list[dict[str, Any]]]] = {
    "first σ": (
        credo.BBB,
        {"std_init": 0.05},
        [{"init": 0.05}, {"init": {"std": 0.05}}, {"init": credo.Init(std=0.05)}],
    ),
    "first moments": (
        credo.BBB,
        {"mean_init": "he", "rho_init": (-3.0, 0.1)},
        [{"init": {"mean": "he", "rho": [-3.0, 0.1]}}, {"init": credo.Init(mean="he", rho=(-3.0, 0.1))}],
    ),
    "KL": (
        credo.BBB,
        {"kl": "monte-carlo", "kl_weight": "warmup", "warmup_steps": 3},
        [{"kl_term": credo.KLTerm("monte-carlo", "warmup", warmup_steps=3)}],
    ),
    "optimiser": (
        credo.MAP,
        {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}, "clip_norm": 0.1, "lr": 0.1},
        [
            {"optimizer": {"name": "sgd", "momentum": 0.9, "clip_norm": 0.1}, "lr": 0.1},
            {"optimizer": credo.Optimizer("sgd", {"momentum": 0.9}, 0.1), "lr": 0.1},
        ],
    ),
    "momentum": (
        credo.VOGN,
        {"momentum": 0.5, "averaged": True, "curvature_decay": 0.9, "curvature_init": 0.2},
        [{"momentum": {"decay": 0.5, "averaged": True}, "curvature": credo.Curvature(0.9, 0.2)}],
    ),
    "warm-up": (
        credo.NoisyKFAC,
        {"temperature": 0.5, "temperature_start": 0.1, "warmup_steps": 3, "fisher": "sampled", "inverse_every": 2},
        [
            {
                "temperature": {"to": 0.5, "start": 0.1, "steps": 3},
                "curvature": {"fisher": "sampled", "inverse_every": 2},
            }
        ],
    ),
    "ivon": (
        credo.IVON,
        {"curvature_init": 0.3, "estimator": "squares", "rescale_lr": False, "debias": False},
        [
            {
                "curvature": credo.IVONCurvature(init=0.3, estimator="squares", rescale_lr=False),
                "momentum": {"debias": False},
            }
        ],
    ),
    "nodes": (
        credo.NodeBNN,
        {"side": "out", "prior_std": 0.2, "spread": 0.1, "std_init": 0.05, "gamma": 1.0, "node_lr": 0.02}
        | {"optimizer": "sgd", "node_options": {"momentum": 0.5}},
        [
            {
                "nodes": "out",
                "prior": 0.2,
                "init": {"std": 0.05, "spread": 0.1},
                "kl_term": {"gamma": 1.0},
                "lr": {"nodes.*": 0.02, "*": 1e-3},
                "optimizer": {"name": "sgd", "nodes": {"momentum": 0.5}},
            }
        ],
    ),
}


@pytest.mark.parametrize("case", FORMS)
def test_all_forms_and_the_old_names_train_alike(case: str) -> None:
    method, old, forms = FORMS[case]
    with pytest.warns(DeprecationWarning, match=r"\(.*=…\) is now .*; the old name goes in 0\.3"):
        reference = method(network(), data_size=20, **old)
    wanted = weights_after(reference)
    for form in forms:
        posterior = method(network(), data_size=20, **form)
        assert posterior.config() == reference.config()
        assert torch.equal(weights_after(posterior), wanted)


@pytest.mark.parametrize("case", FORMS)
def test_a_config_comes_back_through_json(case: str) -> None:
    method, _, forms = FORMS[case]
    posterior = method(network(), data_size=20, **forms[0])
    config = json.loads(json.dumps(posterior.config()))
    assert method(network(), data_size=20, **config).config() == config == current_config(method, config)


@pytest.mark.parametrize("method", [credo.VOGN, credo.OGN, credo.KFAC, credo.NoisyKFAC])
def test_augmentation_is_a_lower_temperature(method: Any) -> None:
    with pytest.warns(DeprecationWarning, match="temperature=temperature/augmentation"):
        augmented = method(network(), data_size=20, augmentation=4.0)
    cold = method(network(), data_size=20, temperature=0.25)
    assert augmented.config() == cold.config()
    # What 0.1 computed: N·k in the place of N.
    more = method(network(), data_size=80)
    torch.testing.assert_close(weights_after(cold), weights_after(more), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        (credo.BBB, {"init": "x"}, "init.std='x' must be a positive and finite number"),
        (credo.BBB, {"init": {"sdt": 0.1}}, "Unknown field of init 'sdt'. Did you mean 'std'"),
        (credo.BBB, {"init": credo.NodeInit()}, "must be of the class Init"),
        (credo.BBB, {"temperature": [1]}, r"temperature=\[1\] must be one number"),
        (credo.VOGN, {"temperature": [1]}, r"temperature=\[1\] must be one number"),
        (credo.MCDropout, {"rate": "a"}, "rate='a' must be a number between 0 and 1"),
        (credo.MAP, {"optimizer": {"clip_norm": "a"}}, "optimizer.clip_norm='a' must be a positive number"),
        (credo.MAP, {"optimizer": {"name": "sgdd"}}, "Unknown optimizer 'sgdd'. Did you mean 'sgd'"),
        (credo.MAP, {"optimizer": {"name": torch.optim.SGD, "momentum": 0.9}}, "for optimisers by name"),
        (credo.BBB, {"kl_term": {"weight": "warmup"}}, "needs warmup_steps"),
        (credo.BBB, {"lr": {"rho": 0.1}}, "lr gives no rate for '0.weight'"),
        (credo.BBB, {"lr": {"rhoo": 0.1, "*": 0.1}}, "Unknown parameter or glob in lr 'rhoo'. Did you mean 'rho'"),
        (credo.MAP, {"lr": {"*": "a"}}, "must be a non-negative number"),
        (credo.VOGN, {"momentum": {"averaged": 1}}, "momentum.averaged=1 must be True or False"),
        (credo.MAP, {"prior": 1.0, "prior_precision": 1.0}, "exclude each other"),
        (credo.BBB, {"prior": 1.0, "prior_precision": 1.0}, "exclude each other"),
        (credo.NodeBNN, {"prior": 1.0, "prior_precision": 1.0}, "exclude each other"),
    ],
)
def test_wrong_values_are_explained(method: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        method(network(), data_size=20, **options)


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"Unknown argument of BBB 'temprature'\. Did you mean 'temperature'"):
        credo.BBB(network(), data_size=20, temprature=0.1)  # type: ignore[call-arg]


def test_both_names_of_an_argument_are_a_contradiction() -> None:
    with pytest.raises(TypeError, match=r"got both std_init= and init\.std"):
        credo.BBB(network(), data_size=20, std_init=0.1, init=0.2)  # type: ignore[call-arg]


@pytest.mark.parametrize("method", [credo.MAP, credo.BBB, credo.VOGN, credo.IVON])
def test_a_precision_means_the_same_in_every_method(method: Any) -> None:
    given, prior = (method(network(), data_size=20, **one) for one in ({"prior_precision": 4.0}, {"prior": 0.5}))
    assert given.config() == prior.config()
    assert given.config()["prior"]["std"] == 0.5


def test_parameters_have_rates_of_their_own() -> None:
    posterior = credo.BBB(
        network(),
        data_size=20,
        optimizer="sgd",
        lr={"rho": 0.0, "likelihood.*": 0.5, "2.*": 0.1, "*": 0.0},
        likelihood=credo.GaussianNoise(0.5, learn=True),
    )
    before = {name: p.detach().clone() for name, p in posterior.named_parameters()}
    posterior.step(lambda net: posterior.likelihood.nll(net(X), torch.zeros(6, 2)))
    moved = {name for name, p in posterior.named_parameters() if not torch.equal(p, before[name])}
    assert {name.split(".")[0] for name in moved} == {"model", "likelihood"}
    assert {name for name in moved if name.startswith("model.")} == {"model.2.weight", "model.2.bias"}


def test_one_rate_by_name_is_that_rate_and_a_saved_state_continues() -> None:
    one, named = (credo.BBB(network(), data_size=20, lr=lr) for lr in (0.01, {"rho": 0.01, "*": 0.01}))
    assert torch.equal(weights_after(one), weights_after(named))
    again = credo.BBB(network(), data_size=20, lr={"rho": 0.01, "*": 0.01})
    again.load_state_dict(named.state_dict())
    assert torch.equal(weights_after(again, 2), weights_after(named, 2))


# -- files and tables ------------------------------------------------------------------------------------------------


def test_tables_complete_groups_and_accept_old_names() -> None:
    old = {"name": "bbb", "std_init": 0.05, "kl_weight": "blundell", "clip_norm": "none", "prior_precision": 4.0}
    new = {
        "init": {"std": 0.05},
        "kl_term": {"weight": "blundell"},
        "prior": {"kind": "gaussian", "mean": 0.0, "std": 0.5},
    }
    experiments = [make_experiment({"method": one}) for one in (old, {"name": "bbb", **new})]
    assert experiments[0] == experiments[1]
    method = experiments[0].method
    assert method["init"] == {"mean": "keep", "std": 0.05, "relative_std": None, "rho": None}
    assert method["optimizer"] == {"name": "adam", "clip_norm": None}
    with pytest.raises(ValueError, match="Unknown field of init 'sdt'"):
        make_experiment({"method": {"name": "bbb", "init": {"sdt": 0.1}}})


def test_a_written_table_reads_back(tmp_path: Path) -> None:
    given = {"name": "vogn", "temperature": {"start": 0.1, "steps": 5}, "lr": {"*bias": 0.1, "*": 0.2}, "momentum": 0.5}
    experiment = make_experiment({"method": given})
    path = tmp_path / "experiment.toml"
    path.write_text(experiment.to_toml())
    assert read_experiment(path).method == experiment.method
    assert experiment.method["momentum"]["decay"] == 0.5


def test_the_command_line_notes_an_old_name() -> None:
    with pytest.warns(
        credo.CredoWarning, match=r"method\.std_init is now method\.init\.std; the old name goes in 0\.3"
    ):
        experiment = read_experiment(None, ["method.std_init=0.05"])
    assert experiment.method["init"]["std"] == 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_experiment(None, ["method.init=0.05"]) == experiment


def test_a_checkpoint_of_0_1_has_the_settings_that_it_had() -> None:
    posterior = credo.BBB(network(), data_size=20, kl_term="monte-carlo", optimizer={"name": "sgd", "momentum": 0.9})
    options = posterior.config()
    del options["kl_term"], options["optimizer"]
    options |= {"kl": "monte-carlo", "kl_weight": "constant", "batches": None, "warmup_steps": None}
    options |= {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}, "clip_norm": None}
    state = {"fingerprint": {"posterior": {"method": "BBB", "options": options, "members": {}}}}
    now = {"posterior": {"method": "BBB", "options": posterior.config(), "members": {}}}
    check_fingerprint(Path("old.pt"), state, now)
    options["clip_norm"] = 1.0
    with pytest.raises(credo.FileFormatError, match=r"optimizer\.clip_norm: 1\.0 there, None now"):
        check_fingerprint(Path("old.pt"), state, now)


def test_changes_at_loading_keep_the_rest_of_a_group(tmp_path: Path) -> None:
    posterior = credo.BBB(network(), data_size=20, kl_term="monte-carlo", optimizer={"name": "sgd", "clip_norm": 1.0})
    path = credo.save(posterior, tmp_path / "p.safetensors")
    loaded = credo.load(path, model=network(), kl_term={"weight": "warmup", "warmup_steps": 2}, optimizer="adam")
    assert loaded.config()["kl_term"] == {
        "estimator": "monte-carlo",
        "weight": "warmup",
        "batches": None,
        "warmup_steps": 2,
    }
    assert loaded.config()["optimizer"] == {"name": "adam", "clip_norm": 1.0}
    with pytest.warns(DeprecationWarning, match=r"credo\.load\(clip_norm=…\) is now optimizer="):
        assert credo.load(path, model=network(), clip_norm=2.0).config()["optimizer"]["clip_norm"] == 2.0


def test_methods_have_no_name_of_an_argument() -> None:
    """But for the old names `draws` and `noise`, until 0.3."""
    for method in credo.METHODS.values():
        arguments = set(method.__init__.__wrapped__.__kwdefaults__ or {})
        methods = {name for name in arguments if callable(getattr(method, name, None))}
        assert methods <= {"draws", "noise"}, method


def test_old_method_names_work_for_callers_and_subclasses() -> None:
    posterior = credo.BBB(network(), data_size=20)
    with pytest.warns(DeprecationWarning, match=r"draws\(\) is now iter_draws\(\)"):
        assert len(list(posterior.draws(2))) == 2
    with pytest.warns(DeprecationWarning, match=r"noise\(\) is now activation_noise\(\)"), posterior.noise():
        pass
    with pytest.warns(DeprecationWarning, match=r"Own\.draws\(\) is now iter_draws"):

        class Own(credo.MAP):
            def draws(self, count: int) -> Any:
                yield from ({"own": torch.tensor(math.pi)} for _ in range(count))

    assert len(list(Own(network(), data_size=20).iter_draws(3))) == 3
