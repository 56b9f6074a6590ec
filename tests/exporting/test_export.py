"""Exported files predict what the posterior predicts with the same draws."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.core.held_out.calibration import Calibration
from credo.exporting import export
from credo.exporting.closed_form import traced_root
from credo.exporting.export import _run_file, closed_form, fixed_draws
from credo.models import build_model

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))


def mlp(outputs: int = 3) -> nn.Module:
    return build_model("mlp", inputs=(5,), classes=outputs, hidden=[8], seed=0)


def posteriors() -> dict[str, credo.Posterior]:
    ivon = credo.IVON(mlp(2), data_size=20, likelihood=credo.GaussianNoise(0.7))
    ensemble = credo.Ensemble([credo.BBB(mlp(), data_size=20, seed=i, init=0.1) for i in range(2)])
    laplace = credo.Laplace(mlp(), data_size=6).fit([(X, torch.tensor([0, 1, 2, 0, 1, 2]))])
    return {
        "bbb": credo.BBB(mlp(), data_size=20, init=0.1),
        "regression": ivon,
        "ensemble": ensemble,
        "laplace of the last layer": laplace,
        "point": credo.MAP(mlp(), data_size=20),
        "yes or no": credo.BBB(mlp(1), data_size=20, likelihood="bernoulli", init=0.1),
        "node": credo.NodeBNN(mlp(), data_size=20),
    }


@pytest.mark.parametrize("name", posteriors())
@pytest.mark.parametrize("calibrated", [False, True])
def test_fixed_draws_give_the_prediction_of_the_same_draws(name: str, calibrated: bool) -> None:
    posterior = posteriors()[name]
    if calibrated:
        is_class = posterior.likelihood.task == "classification"
        scales = {"temperature": 1.7} if is_class else {"std_factor": 1.3}
        posterior.calibration = Calibration(noise_scale=0.5, **scales)
    graph = fixed_draws(posterior, draws=8, seed=3)
    options: dict[str, Any] = {"draws": 8, "seed": 3, "shared_draws": True, "strategy": "loop"}
    if posterior.parts[0].default_predictive == "linear":  # a last layer is linear in its weights
        options["predictive"] = "weights"
    wanted = credo.predict(posterior, X, **options)
    with torch.no_grad():
        found = dict(zip(graph.outputs, graph(X), strict=True))
    for key, value in found.items():
        torch.testing.assert_close(value, getattr(wanted, key), rtol=1e-4, atol=1e-5)


Y = torch.tensor([0, 1, 2, 0, 1, 2])


def last_layers() -> dict[str, Callable[[], credo.Posterior]]:
    def laplace(outputs: int = 3, y: Tensor = Y, seed: int = 0, **options: Any) -> Any:
        net = build_model("mlp", inputs=(5,), classes=outputs, hidden=[8], seed=seed)
        return credo.Laplace(net, data_size=6, **options).fit([(X, y)])

    def last_layer(outputs: int = 3, y: Tensor = Y, **options: Any) -> Any:
        return credo.LastLayer(mlp(outputs), data_size=6, **options).fit([(X, y)])

    values = X[:, :2].sin()
    return {
        **{name: partial(laplace, structure=name) for name in ("kron", "diag", "full", "low-rank")},
        "two parts": lambda: credo.Ensemble([laplace(seed=seed) for seed in range(2)]),
        "yes or no": partial(laplace, 1, (Y > 0).float().unsqueeze(1), likelihood="bernoulli"),
        "values": partial(laplace, 2, values, likelihood="gaussian"),
        "last layer": last_layer,
        "values of a last layer": partial(last_layer, 2, values, likelihood="gaussian"),
    }


@pytest.mark.parametrize("name", last_layers())
def test_a_last_layer_needs_no_draws(name: str) -> None:
    posterior = last_layers()[name]()
    is_class = posterior.likelihood.task == "classification"
    posterior.calibration = Calibration(noise_scale=1.5, **({"temperature": 0.7} if is_class else {"std_factor": 1.3}))
    wanted = credo.predict(posterior, X)
    graph = closed_form(posterior, [X])
    assert graph is not None
    found = dict(zip(graph.outputs, graph(X), strict=True))
    assert found["epistemic"].min() > 1e-4
    for key, value in found.items():
        torch.testing.assert_close(value, getattr(wanted, key), rtol=1e-4, atol=1e-5)
    assert torch.equal(credo.predict(posterior, X).total, wanted.total)  # the original is untouched


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("name", "suffix"),
    [("kron", ".pt2"), ("kron", ".onnx"), ("values of a last layer", ".pt2"), ("values of a last layer", ".onnx")],
)
def test_a_file_without_draws(name: str, suffix: str, tmp_path: Path) -> None:
    if suffix == ".onnx":
        pytest.importorskip("onnxruntime")
    posterior = last_layers()[name]()
    path = export(posterior, X[:2], tmp_path / f"model{suffix}")  # which compares with torch
    found, wanted = _run_file(path, suffix, (X,)), credo.predict(posterior, X)
    assert wanted.draws_used.max() <= 32
    first = "mean" if isinstance(wanted, credo.RegressionPrediction) else "probs"
    for value, key in zip(found, (first, "total", "aleatoric", "epistemic"), strict=True):
        torch.testing.assert_close(value, getattr(wanted, key), rtol=1e-4, atol=1e-5)


def test_a_root_of_any_rank() -> None:
    factor = torch.randn(4, 5, 3, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    factor[0] = 0
    covariance = factor @ factor.mT
    root = traced_root(covariance)
    torch.testing.assert_close(root @ root.mT, covariance)


def test_what_needs_draws_has_no_closed_form() -> None:
    unfitted = credo.Laplace(mlp(), data_size=6)
    assert closed_form(unfitted, [X]) is None
    assert closed_form(posteriors()["bbb"], [X]) is None


def test_the_mean_has_no_epistemic_uncertainty() -> None:
    posterior = credo.MCDropout(mlp(), data_size=20, rate=0.2)
    graph = fixed_draws(posterior, draws=8, mean=True)
    with torch.no_grad():
        probs, total, aleatoric, epistemic = graph(X)
        assert torch.allclose(probs, posterior.model.eval()(X).softmax(-1), atol=1e-6)
    assert torch.allclose(total, aleatoric, atol=1e-6)
    assert epistemic.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: credo.MCDropout(mlp(), data_size=20, rate=0.2), "draws of MCDropout are masks"),
        (
            lambda: credo.Laplace(mlp(), data_size=6, random="all").fit([(X, torch.zeros(6, dtype=torch.long))]),
            "Laplace of all layers predicts with a linearised network",
        ),
    ],
)
def test_what_cannot_be_drawn_as_weights_is_an_error(build: Callable[[], credo.Posterior], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fixed_draws(build(), draws=4)


def test_a_recalibration_is_an_error() -> None:
    posterior = credo.MAP(mlp(), data_size=20)
    y = (torch.arange(200) % 20 == 0).long()  # hardly ever what the network expects
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(1))
    credo.recalibrate(posterior, [(x, y)], kind="vector")
    with pytest.raises(ValueError, match="The posterior has a recalibration"):
        fixed_draws(posterior, draws=1)
    fixed_draws(posterior.uncalibrated(), draws=1)


def test_wrong_arguments() -> None:
    posterior = credo.MAP(mlp(), data_size=20)
    with pytest.raises(ValueError, match=r"Unknown suffix of an exported file '\.pb'"):
        export(posterior, X, "model.pb")
    with pytest.raises(ValueError, match="example has 1 rows: give at least two"):
        export(posterior, X[:1], "model.pt2")
    with pytest.raises(TypeError, match="example must be a tensor"):
        export(posterior, [], "model.pt2")


@pytest.mark.slow
def test_a_program_runs_on_any_number_of_rows(tmp_path: Path) -> None:
    posterior = credo.BBB(mlp(), data_size=20, init=0.1)
    path = export(posterior, X, tmp_path / "model.pt2", draws=3)
    program = torch.export.load(str(path)).module()
    graph = fixed_draws(posterior, draws=3)
    assert not program(X)[0].requires_grad  # so that users may take `.numpy()` of it
    for rows in (1, 4, 6):
        for found, wanted in zip(program(X[:rows]), graph(X[:rows]), strict=True):
            torch.testing.assert_close(found, wanted)
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_a_failed_check_leaves_the_old_file(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if suffix == ".onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package)
    path = tmp_path / f"model{suffix}"
    path.write_text("old")
    monkeypatch.setattr(sys.modules[fixed_draws.__module__], "TOLERANCE", -1.0)
    with pytest.raises(credo.CredoError, match="is not written"):
        export(credo.MAP(mlp(), data_size=20), X, path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bbb", "regression"])
def test_an_onnx_file_agrees_in_onnxruntime(name: str, tmp_path: Path) -> None:
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    posterior = posteriors()[name]
    path = export(posterior, X, tmp_path / "model.onnx", draws=3)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    graph = fixed_draws(posterior, draws=3)
    for rows in (1, 5):
        found = dict(
            zip([o.name for o in session.get_outputs()], session.run(None, {"input": X[:rows].numpy()}), strict=True)
        )
        for key, wanted in zip(graph.outputs, graph(X[:rows]), strict=True):
            torch.testing.assert_close(torch.from_numpy(found[key]), wanted, rtol=1e-5, atol=1e-5)
    facts = {entry.key: entry.value for entry in onnx.load(str(path)).metadata_props}
    assert json.loads(facts["credo"])["draws"] == 3


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.lstm(x)[0][:, -1])
        return outputs


@pytest.mark.grid
@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
@pytest.mark.parametrize("name", ["lenet5", "resnet20", "lstm"])
def test_networks(name: str, suffix: str, tmp_path: Path) -> None:
    if suffix == ".onnx":
        pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    net = Recurrent() if name == "lstm" else build_model(name, inputs=[3, 32, 32], classes=10, seed=0)
    x = torch.randn(3, 6, 4) if name == "lstm" else torch.randn(3, 3, 32, 32)
    export(credo.BBB(net, data_size=10), x, tmp_path / f"model{suffix}", draws=2)  # which compares with torch


class Masked(nn.Module):
    """A text classifier in the manner of Hugging Face, which takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        mask = attention_mask.unsqueeze(-1)
        return {"logits": self.head((self.embedding(input_ids) * mask).sum(1) / mask.sum(1))}


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
@pytest.mark.parametrize("method", ["bbb", "laplace"])
def test_inputs_by_name(method: str, suffix: str, tmp_path: Path) -> None:
    if suffix == ".onnx":
        pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime") if suffix == ".onnx" else None
    torch.manual_seed(0)
    mask = torch.ones(6, 4).tril(1)
    batch = {"input_ids": torch.randint(9, (6, 4)), "attention_mask": mask, "labels": torch.randint(3, (6,))}
    posterior: credo.Posterior = credo.BBB(Masked(), data_size=6, init=0.1)
    if method == "laplace":
        posterior = credo.Laplace(Masked(), data_size=6, prior=1.0).fit([batch])
    draws = {"draws": 4} if method == "bbb" else {}
    path = credo.export(posterior, batch, tmp_path / f"m{suffix}", **draws)
    inputs = [batch["input_ids"], batch["attention_mask"]]
    if runtime is None:
        found = torch.export.load(path).module()(*inputs)[0]
    else:
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        given = {key: batch[key].numpy() for key in ("attention_mask", "input_ids")}
        found = torch.from_numpy(session.run(None, given)[0])
    way = {**draws, "shared_draws": True, "strategy": "loop"} if method == "bbb" else {}
    wanted = credo.predict(posterior, [batch], **way)
    assert isinstance(wanted, credo.ClassPrediction)
    torch.testing.assert_close(found, wanted.probs, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Nothing has learned")
@pytest.mark.part(2)
@pytest.mark.parametrize("kind", ["poisson", "student-t", "mixture-density", "multi-label", "ordinal", "pixels"])
def test_targets_of_other_kinds(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network: nn.Module = nn.Linear(5, {"mixture-density": 9, "ordinal": 1}.get(kind, 2))
    likelihood: Any = {"kind": kind, **({"classes": 4} if kind == "ordinal" else {})}
    x = torch.randn(6, 5)
    if kind == "pixels":
        network, x, likelihood = nn.Conv2d(2, 3, 1), torch.randn(6, 2, 4, 4), credo.Categorical(class_dim=-3)
    posterior = credo.BBB(network, data_size=20, init=0.1, likelihood=likelihood)
    path = credo.export(posterior, x[:2], tmp_path / "m.pt2", draws=4, seed=3)
    found = torch.export.load(path).module()(x)
    wanted = credo.predict(posterior, x, draws=4, seed=3, shared_draws=True, strategy="loop")
    first = "mean" if isinstance(wanted, credo.RegressionPrediction) else "probs"
    for value, name in zip(found, (first, "total", "aleatoric", "epistemic"), strict=True):
        torch.testing.assert_close(value, getattr(wanted, name), atol=2e-5, rtol=1e-4)


def test_eight_bits_are_a_smaller_file_near_the_mean(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    posterior = credo.BBB(build_model("mlp", inputs=(64,), classes=10, hidden=[128], seed=0), data_size=20)
    x = torch.rand(6, 64)
    plain = credo.export(posterior, x, tmp_path / "plain.onnx", mean=True)
    small = credo.export(posterior, x, tmp_path / "small.onnx", mean=True, int8=True)
    assert small.stat().st_size < 0.5 * plain.stat().st_size
    wanted, found = (_run_file(path, ".onnx", (x,)) for path in (plain, small))
    assert not torch.equal(wanted[0], found[0])
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=0.02)
    facts = pytest.importorskip("onnx").load(str(small)).metadata_props
    assert any(entry.key == "credo" for entry in facts)


@pytest.mark.parametrize(("name", "options"), [("m.onnx", {}), ("m.pt2", {"mean": True})])
def test_eight_bits_of_anything_else_are_an_error(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"int8=True is for an .onnx file with mean=True"):
        credo.export(posteriors()["bbb"], X, tmp_path / name, int8=True, **options)


@pytest.mark.grid
@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_adapters_of_a_transformer(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    net = credo.lora(
        nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(96, 3)), rank=2, target=["*linear*"]
    )
    export(credo.BBB(net, data_size=10), torch.randn(3, 6, 16), tmp_path / f"model{suffix}", draws=2)


@pytest.mark.parametrize(
    "record", [torch.jit.trace, lambda net, x: torch.export.export(net, (x,), strict=False)], ids=["jit", "export"]
)
@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_recording_a_posterior_itself_is_an_error_that_names_export(record: Any) -> None:
    """It would be one draw for ever; points have only one."""
    x = torch.randn(3, 4)
    with pytest.raises(credo.UnsupportedModelError, match=r"would be one draw.*credo\.export\(posterior, example"):
        record(credo.BBB(nn.Linear(4, 2), data_size=10), x)


def test_examples_that_the_network_does_not_take(tmp_path: Path) -> None:
    posterior = credo.BBB(nn.Linear(3, 2), data_size=8)
    x, path = torch.zeros(4, 3), tmp_path / "m.pt2"
    with pytest.raises(TypeError, match="example has x: give the inputs of the network alone"):
        credo.export(posterior, {"x": x, "labels": x[:, 0]}, path)
    with pytest.raises(TypeError, match="example has 2 inputs: give the inputs of the network alone, without targets"):
        credo.export(posterior, (x, x[:, 0]), path)
    with pytest.raises(credo.InputsError, match=r"give inputs of torch\.float32"):
        credo.export(posterior, x.double(), path)
    with pytest.warns(credo.PredictiveWarning, match="needs a pass over the training data"):
        credo.export(credo.Laplace(nn.Linear(3, 2), data_size=8), x, path)
