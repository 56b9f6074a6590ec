"""`diagnose` as a whole: what it returns, that it changes nothing, and what it does with unusual posteriors."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.core.posterior import GaussianPosterior, Nll, Posterior, Terms
from credo.doctor import STAGES, Diagnosis, Finding, diagnose
from credo.doctor.findings import SEVERITIES
from credo.models import build_model

Trained = Callable[..., Posterior]
Examine = Callable[..., Diagnosis]


def snapshot(posterior: Posterior) -> dict[str, Any]:
    """Everything that evaluation could change, copied."""
    return {
        "state": copy.deepcopy(posterior.state_dict()),
        "modes": [module.training for module in posterior.modules()],
        "generators": [part.generator.get_state() for part in posterior.parts],
        "gradients": [parameter.grad for parameter in posterior.parameters()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in posterior.modules()],
        "rates": [getattr(module, "p", None) for module in posterior.modules()],
        "momenta": [getattr(module, "momentum", None) for module in posterior.modules()],
        "tensors": [id(tensor) for tensor in (*posterior.parameters(), *posterior.buffers())],
        "global": torch.get_rng_state(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.part(4)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("bbb", "conv"),
        ("dropout", "conv"),
        ("ensemble", "conv"),
        ("ensemble-bbb", "mlp"),
        ("map", "conv"),
        ("bbb", "curve"),
    ],
)
def test_nothing_is_changed(trained: Trained, loaders: Any, method: str, kind: str, training: bool) -> None:
    posterior = trained(method, kind, fresh=True).train(training)
    loader, test = loaders(kind)
    loader.set_epoch(5)
    before, baseline = snapshot(posterior), trained("map", kind)
    baseline_before = snapshot(baseline)
    diagnose(posterior, loader, test=test, baseline=baseline, draws=4, examples=150)
    assert same(snapshot(posterior), before)
    assert same(snapshot(baseline), baseline_before)
    assert loader.epoch == 5


def test_training_goes_on_as_if_nothing_had_happened(trained: Trained, loaders: Any) -> None:
    examined, alone = (trained("bbb", "conv", fresh=True) for _ in range(2))
    diagnose(examined, loaders("conv")[0], draws=3, examples=100)
    for posterior in (examined, alone):
        credo.fit(posterior, loaders("conv")[0], epochs=1, progress=False)
    assert same(examined.state_dict(), alone.state_dict())


def test_layers_with_a_state_of_their_own_are_left_alone() -> None:
    """Spectral norm moves its vectors at every pass in train mode; torch's dropout reads the global generator."""
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
    model = nn.Sequential(normed, nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    posterior = credo.BBB(model, data_size=60, random="last")
    data = TensorDataset(torch.randn(60, 6), torch.randint(3, (60,)))
    loader = DataLoader(data, batch_size=20)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = snapshot(posterior)
        found.append(diagnose(posterior, loader, draws=4).measurements["gradient"])
        assert same(snapshot(posterior), before)
    assert found[0] == found[1]


def test_an_error_inside_changes_nothing_either(trained: Trained, loaders: Any) -> None:
    posterior = trained("bbb", "conv", fresh=True).train()
    before = snapshot(posterior)

    stages = []

    def fail(stage: str, done: int, total: int) -> None:
        stages.append(stage)

    def broken(module: nn.Module, inputs: Any) -> None:
        if STAGES[4] in stages:
            raise RuntimeError("out of memory")

    posterior.model.fc1.register_forward_pre_hook(broken)

    with pytest.raises(RuntimeError, match="out of memory"):
        diagnose(posterior, loaders("conv")[0], draws=2, examples=100, on_stage=fail)
    posterior.model.fc1._forward_pre_hooks.clear()
    assert same(snapshot(posterior), before)


def test_the_same_twice(trained: Trained, examine: Examine) -> None:
    posterior = trained("bbb", "conv")
    assert examine(posterior, "conv", draws=4).to_dict() == examine(posterior, "conv", draws=4).to_dict()
    other = examine(posterior, "conv", draws=4, seed=1)
    assert other.measurements["scores"] != examine(posterior, "conv", draws=4).measurements["scores"]


@pytest.mark.parametrize(("method", "kind"), [("bbb", "conv"), ("bbb", "curve"), ("map", "mlp"), ("ensemble", "mlp")])
def test_the_agreed_form(trained: Trained, examine: Examine, method: str, kind: str) -> None:
    diagnosis = examine(trained(method, kind), kind, draws=4)
    found = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert set(found) == {"verdict", "findings", "measurements", "layers"}
    assert isinstance(found["verdict"], str)
    for finding in found["findings"]:
        assert set(finding) == {"name", "severity", "text", "advice", "arguments", "target", "argument"}
        assert finding["severity"] in SEVERITIES
        assert finding["text"].endswith(".")
        assert finding["advice"].endswith(".")
    for layer in found["layers"]:
        assert {"name", "snr", "std_ratio", "collapsed"} <= set(layer)
    assert bool(found["layers"]) == (method == "bbb")
    names = {"method", "data", "objective", "weights", "gradient", "scores", "statistics", "dispersion"}
    assert names | {
        "train_dispersion",
        "monte_carlo",
        "history",
        "inputs",
        "targets",
        "detection",
        "prior_scales",
        "chains",
        "far",
    } == set(found["measurements"])


def test_findings_are_sorted_and_known_severities_only(trained: Trained, examine: Examine) -> None:
    diagnosis = examine(trained("bbb", "mlp", temperature=1.0), baseline=trained("map", "mlp"), draws=4)
    places = [SEVERITIES.index(finding.severity) for finding in diagnosis.findings]
    assert places == sorted(places)
    assert len(places) > 1
    with pytest.raises(ValueError, match="alarm, warning, note"):
        Finding("x", "panic", "x.", "x.")


def test_the_text(trained: Trained, examine: Examine) -> None:
    text = str(examine(trained("bbb", "mlp", temperature=1000.0), draws=4))
    for part in (
        "Not healthy: The KL has",
        "alarm: prior-too-strong",
        "→ temperature=1",
        "mean weights",
        "fc1.weight",
    ):
        assert part in text
    assert "Healthy" in str(examine(trained("map", "mlp"), draws=4))


def test_missing_inputs_are_notes(trained: Trained, examine: Examine) -> None:
    posterior = trained("bbb", "mlp")
    bare = {f.name for f in examine(posterior, test=None, draws=4).findings}
    full = {f.name for f in examine(posterior, baseline=trained("map", "mlp"), draws=4).findings}
    assert {"no-test-data", "no-baseline"} <= bare
    assert not {"no-test-data", "no-baseline"} & full
    scores = examine(posterior, test=None, draws=4).measurements["scores"]
    assert (scores["baseline"], scores["ensemble_over_baseline"]) == (None, None)


def test_confidence_is_not_judged_on_training_data(trained: Trained, examine: Examine) -> None:
    posterior = trained("bbb", "mlp", init=0.1, temperature=1.0)
    assert "underconfident" in {f.name for f in examine(posterior, draws=8).findings}
    assert "underconfident" not in {f.name for f in examine(posterior, test=None, draws=8).findings}


def test_the_true_size_of_the_data_can_be_given(trained: Trained, examine: Examine, loaders: Any) -> None:
    posterior = trained("bbb", "mlp")
    part = list(loaders("mlp")[0])[:5]
    found = diagnose(posterior, part, draws=4)
    assert found.findings[0].name == "data-size"
    assert diagnose(posterior, part, draws=4, data_size=1438).alarms == ()


def test_stages_are_reported_in_order(trained: Trained, examine: Examine) -> None:
    seen: list[tuple[str, int, int]] = []
    examine(trained("map", "mlp"), draws=2, on_stage=lambda *stage: seen.append(stage))
    assert seen == [(name, index, len(STAGES)) for index, name in enumerate(STAGES)]


def test_a_log_of_training(trained: Trained, examine: Examine) -> None:
    falling = [{"nll": 2 * 0.9**i, "penalty": 0.1, "kl": 100.0} for i in range(16)]
    flat = [{"nll": 0.5, "penalty": 0.1, "kl": 100.0} for _ in range(16)]
    posterior = trained("bbb", "mlp")
    (finding,) = [f for f in examine(posterior, draws=4, history=falling).findings if f.name == "still-falling"]
    assert finding.argument == "epochs=32"
    assert "still-falling" not in {f.name for f in examine(posterior, draws=4, history=flat).findings}


def test_values_that_are_not_finite(trained: Trained, examine: Examine) -> None:
    posterior = trained("bbb", "mlp", fresh=True)
    with torch.no_grad():
        posterior.model.fc1.weight[0, 0] = float("nan")
    diagnosis = examine(posterior)
    assert [(f.name, f.severity) for f in diagnosis.findings] == [("not-finite", "alarm")]
    assert "model.fc1.weight" in diagnosis.verdict
    assert diagnosis.to_dict()["layers"] == []
    assert "not-finite" in str(diagnosis)


def test_outputs_that_overflow(trained: Trained, examine: Examine) -> None:
    posterior = trained("bbb", "mlp", fresh=True)
    with torch.no_grad():
        posterior.model.fc1.weight.fill_(1e20)
        posterior.model.fc2.weight.fill_(1e20)
    assert examine(posterior).findings[0].name == "not-finite"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draws": 1}, "at least two"),
        ({"examples": 0}, "examples=0"),
        ({"baseline": nn.Linear(1, 1)}, "baseline must be"),
    ],
)
def test_bad_arguments(trained: Trained, examine: Examine, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        examine(trained("bbb", "mlp"), **options)


def test_a_baseline_of_another_task(trained: Trained, examine: Examine) -> None:
    with pytest.raises(ValueError, match="The baseline does regression, the posterior classification"):
        examine(trained("bbb", "mlp"), baseline=trained("map", "curve"))


def test_the_old_name_of_the_baseline(trained: Trained, examine: Examine) -> None:
    plain = trained("map", "mlp")
    with pytest.warns(DeprecationWarning, match=r"diagnose\(twin=…\) is now baseline=…"):
        old = examine(trained("bbb", "mlp"), draws=4, twin=plain)
    assert old.to_dict() == examine(trained("bbb", "mlp"), draws=4, baseline=plain).to_dict()
    with pytest.raises(TypeError, match="both twin= and baseline="):
        examine(trained("bbb", "mlp"), twin=plain, baseline=plain)


def test_node_variables_have_a_prior(loaders: Any) -> None:
    """A wrong data_size matters to NodeBNN, whose KL is that of its nodes; without a prior it is only a note."""
    train, test = loaders("mlp")
    for method, severity in ((credo.NodeBNN, "alarm"), (credo.MAP, "note")):
        model = build_model("mlp", inputs=(1, 8, 8), classes=10, hidden=[8], seed=0)
        found = diagnose(method(model, data_size=100), train, test=test, draws=4, examples=50)
        (finding,) = [f for f in found.findings if f.name == "data-size"]
        assert (finding.severity, finding.arguments) == (severity, {"data_size": 1438})


class Bare(GaussianPosterior):
    """A Gaussian posterior that tells nothing of prior or temperature, as other methods may."""

    def draw(self) -> dict[str, Tensor]:
        z = {n: torch.randn(m.shape, generator=self.generator) for n, m in self.mean().items()}
        return {n: m + 0.05 * z[n] for n, m in self.mean().items()}

    def mean(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def std(self) -> dict[str, Tensor]:
        return {name: torch.full_like(m, 0.05) for name, m in self.mean().items()}

    def step(self, nll: Nll) -> Terms:
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        return {}


def test_a_posterior_that_tells_little(trained: Trained, examine: Examine) -> None:
    posterior = Bare(copy.deepcopy(trained("map", "mlp").model), data_size=1438)
    diagnosis = examine(posterior)
    assert diagnosis.alarms == ()
    objective = diagnosis.measurements["objective"]
    assert {objective[key] for key in ("kl", "temperature", "noise_balance", "penalty")} == {None}
    assert [layer["std_ratio"] for layer in diagnosis.layers] == [None] * 4
    assert [layer["collapsed"] for layer in diagnosis.layers] == [None] * 4
    assert all(layer["snr"] > 0 for layer in diagnosis.layers)
    json.dumps(diagnosis.to_dict(), allow_nan=False)
    wrong = Bare(copy.deepcopy(trained("map", "mlp").model), data_size=10)
    assert examine(wrong).findings[0].name == "data-size"


@pytest.mark.parametrize(("kind", "predicts_by_draws"), [("classes", False), ("positions", True)])
def test_predictions_without_draws_have_no_monte_carlo_error(kind: str, predicts_by_draws: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    net: nn.Module = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    if kind == "positions":
        x, y = torch.randn(40, 5, 6), torch.arange(200).view(40, 5) % 3
        y[:3, 2:], y[3] = -100, -100  # labels that do not count, and an example without any
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    likelihood = {"kind": "categorical", "class_dim": -1}
    posterior = credo.Laplace(net, data_size=40, likelihood=likelihood).fit(loader)
    found = credo.diagnose(posterior, loader, loader)
    assert (found.measurements["monte_carlo"] is not None) is predicts_by_draws


def test_very_little_data() -> None:
    torch.manual_seed(0)
    posterior = credo.BBB(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), data_size=2)
    for count in (1, 2, 3):
        batch = (torch.randn(count, 2), torch.arange(count) % 2)
        assert isinstance(diagnose(posterior, [batch], draws=2), Diagnosis)
