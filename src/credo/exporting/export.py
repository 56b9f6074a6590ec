"""Write a posterior as an ONNX graph or a torch.export program, with fixed draws inside."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.errors import CredoError, unknown
from credo.core.held_out.calibration import Calibration
from credo.core.likelihood import ClassLikelihood, DistributionLikelihood, GaussianNoise, MultiLabel
from credo.core.network.failed_pass import explain_failed_pass
from credo.core.network.inputs import TARGET_KEYS
from credo.core.posterior import Posterior
from credo.core.sampling import noise_scaled, warn_if_unfitted
from credo.core.support.extras import needs
from credo.core.support.files import write_atomically
from credo.core.support.keywords import checked_keywords
from credo.core.support.validate import checked_count, checked_seed
from credo.exporting.closed_form import ClosedFormGraph, closed_form_graph
from credo.exporting.graph import FixedDraws
from credo.exporting.int8 import TOLERANCE as INT8_TOLERANCE
from credo.exporting.int8 import quantize_
from credo.predict.run import check_posterior
from credo.version import __version__

SUFFIXES = (".onnx", ".pt2")
# More rows than a batch has: without a bound torch 2.6 finds no range that its own guards accept.
MOST_ROWS = 2**31
# Of the largest output; other runtimes sum in another order.
TOLERANCE = 1e-5
_DRAWS = 16

Graph = FixedDraws | ClosedFormGraph


@checked_keywords()
@torch.no_grad()
def export(
    posterior: Posterior,
    example: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    path: Path | str,
    *,
    draws: int | None = None,
    mean: bool = False,
    seed: int = 0,
    check: bool = True,
    int8: bool = False,
) -> Path:
    """Write a posterior to a file that predicts without Credo; returns the path.

    The file holds `draws` networks that are drawn once, or, of a posterior of the last layer that predicts without
    draws, the closed form of its predictions. So it gives the same prediction for the same input, of any number of
    rows: class probabilities `probs`, or `mean`, and the uncertainties `total`, `aleatoric` and `epistemic`, as
    `credo.predict` defines them. Input scaling inside the network and the posterior's calibration are part of it;
    conformal sets are not.

    Args:
        posterior: A posterior whose draws are weights.
        example: Inputs of a batch of at least two rows, a tensor or several, or a mapping if the network takes them by
            name (a target in it is left out); they are not stored.
        path: `.onnx` for ONNX, `.pt2` for `torch.export`.
        draws: Networks in the file, whose size they multiply. A mixture takes equally many of every member. None: no
            draws where `credo.predict` needs none for a last layer (`Laplace`, `LastLayer`), else 16.
        mean: Write the network at the mean alone: one pass, and no epistemic uncertainty.
        seed: Seed of the draws.
        check: Run the file on the example and on fewer rows, and raise CredoError if its outputs differ from torch's
            by more than 1e-5; a file that was there stays. Of an ONNX file this needs onnxruntime.
        int8: Round the weights of an ONNX file with `mean=True` to eight bits, and activations as it runs: a quarter of
            the size. Outputs may then differ by a tenth of the largest one.
    """
    check_posterior(posterior)
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(unknown("suffix of an exported file", path.suffix, SUFFIXES))
    if int8 and not (mean and path.suffix == ".onnx"):
        raise ValueError(
            "int8=True is for an .onnx file with mean=True: eight bits would round away what draws differ in."
        )
    keys, inputs = _named(example)
    _check_inputs(posterior.model, keys, inputs)
    draws, seed = None if draws is None else checked_count("draws", draws), checked_seed(seed)
    rows = torch.export.Dim("batch", min=1, max=MOST_ROWS)
    dynamic = {"inputs": tuple({0: rows} for _ in inputs)}
    device = posterior.device
    moved = tuple(tensor.to(device) for tensor in inputs)
    graph: Graph | None = None
    if draws is None and not mean:
        graph = closed_form(posterior, moved, keys)
    if graph is None:
        graph = fixed_draws(posterior, draws=draws or _DRAWS, mean=mean, seed=seed, keys=keys)
    if not mean:
        warn_if_unfitted(posterior)
    try:
        graph(*moved)  # the first pass of a private copy is watched for what it reads of the original
    except RuntimeError as error:
        explain_failed_pass(posterior.model, moved, error, is_one=len(moved) == 1 and not keys)
        raise
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(graph, moved, dynamic_shapes=dynamic, strict=False)
    except Exception as error:  # the network's own forward runs inside, and raises what it likes
        raise CredoError(
            f"torch.export cannot trace {type(posterior.model).__name__}: {_first_line(error)}. A forward that "
            "branches on values or on the number of rows cannot be exported."
        ) from error
    save = partial(_save_program, program)
    if path.suffix == ".onnx":
        save = _onnx_writer(program, graph, len(moved), _facts(posterior, graph))

    def write(temporary: Path) -> None:
        save(temporary)
        if check:
            _check_file(temporary, path, graph, moved, TOLERANCE)
        if int8:
            quantize_(temporary)
            if check:
                _check_file(temporary, path, graph, moved, INT8_TOLERANCE)

    write_atomically(path, write)
    return path


@torch.no_grad()
def fixed_draws(
    posterior: Posterior, *, draws: int, mean: bool = False, seed: int = 0, keys: Sequence[str] = ()
) -> FixedDraws:
    """The module that is exported: networks that are drawn once, and averages over them.

    Args:
        posterior: The posterior.
        draws: Number of networks.
        mean: Take the network at the mean instead.
        seed: Seed of the draws.
        keys: Names of the inputs, if the network is called by keyword.
    """
    likelihood = posterior.likelihood
    if not isinstance(likelihood, ClassLikelihood | GaussianNoise | DistributionLikelihood | MultiLabel):
        raise TypeError(f"export cannot average {type(likelihood).__name__}, which has no mean or probabilities.")
    frozen = _frozen(posterior)
    calibration = frozen.calibration or Calibration()
    scale = 0.0 if mean else calibration.noise_scale
    _check_drawable(frozen, scale)
    count = frozen.whole_draws(draws if scale and frozen.is_random else 1)
    with frozen.snapshot(seed=seed, copies="none") as view, noise_scaled(view, scale):
        made = [{name: tensor.clone() for name, tensor in draw.items()} for draw in view.iter_draws(count)]
    likelihoods = [part.likelihood for part in frozen.parts]
    return FixedDraws(frozen.model, made, likelihoods, calibration, keys).eval().requires_grad_(False)


@torch.no_grad()
def closed_form(posterior: Posterior, inputs: Sequence[Tensor], keys: Sequence[str] = ()) -> ClosedFormGraph | None:
    """The module that is exported where predictions need no draws but those of a last layer; else None.

    Args:
        posterior: The posterior.
        inputs: Those of a batch.
        keys: Their names, if the network is called by keyword.
    """
    graph = closed_form_graph(_frozen(posterior), inputs, keys)
    return None if graph is None else graph.eval().requires_grad_(False)


def _frozen(posterior: Posterior) -> Posterior:
    """A private copy. Raises ValueError for a recalibration."""
    frozen = posterior.frozen_copy().eval()
    calibration = frozen.calibration
    if calibration is not None and calibration.recalibration is not None and calibration.recalibration.map is not None:
        raise ValueError(
            "The posterior has a recalibration, which is a map of whole predictions and no part of an exported graph: "
            "calibrate it without credo.recalibrate, or export posterior.uncalibrated()."
        )
    return frozen


def _check_drawable(frozen: Posterior, scale: float) -> None:
    """Raise ValueError if the posterior's predictions are not averages over networks with drawn weights."""
    part = frozen.parts[0]
    if not (scale and frozen.is_random):
        return
    if part.default_predictive == "linear" and not getattr(part, "last", None):
        raise ValueError(
            f"{type(part).__name__} of all layers predicts with a linearised network, and drawn weights would be "
            "worse: export it with mean=True, or make the last layer random, random='last'."
        )
    if any(not sub.draw() for sub in frozen.parts):
        raise ValueError(
            f"The draws of {type(part).__name__} are masks, not weights: export it with mean=True, or another method."
        )


def _named(example: Any) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    """The inputs of an example and, of a mapping, their names; targets in it are left out."""
    if not isinstance(example, Mapping):
        return (), (example,) if isinstance(example, Tensor) else tuple(example)
    keys = tuple(key for key in example if key not in TARGET_KEYS)
    return keys, tuple(example[key] for key in keys)


def _check_inputs(model: nn.Module, keys: Sequence[str], inputs: Sequence[Tensor]) -> None:
    if not inputs or not all(isinstance(tensor, Tensor) and tensor.dim() for tensor in inputs):
        raise TypeError("example must be a tensor, or a list of tensors, with a first dimension of rows.")
    if any(len(tensor) < 2 or len(tensor) != len(inputs[0]) for tensor in inputs):
        raise ValueError(
            f"example has {', '.join(str(len(tensor)) for tensor in inputs)} rows: give at least two, as many of each "
            "input, so that the number of rows stays open in the file."
        )
    signature, given = inspect.signature(model.forward), ", ".join(keys) or f"{len(inputs)} inputs"
    try:
        signature.bind(**dict(zip(keys, inputs, strict=True))) if keys else signature.bind(*inputs)
    except TypeError as error:
        raise TypeError(
            f"{type(model).__name__}.forward takes {signature}, and example has {given}: give the inputs of the "
            "network alone, without targets."
        ) from error


def _facts(posterior: Posterior, graph: Graph) -> dict[str, Any]:
    return {
        "credo": __version__,
        "method": type(posterior.parts[0]).__name__,
        "draws": graph.draws,
        "likelihood": posterior.likelihood.config(),
        "calibration": graph.calibration.to_dict(),
    }


def _save_program(program: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.export.save(program, file)


def _onnx_writer(program: Any, graph: Graph, inputs: int, facts: dict[str, Any]) -> partial[None]:
    with needs("export", "A file in the ONNX format"):
        import onnx
        import onnxscript  # noqa: F401
    names = list(graph.keys) or ([f"input_{index}" for index in range(inputs)] if inputs > 1 else ["input"])
    with warnings.catch_warnings():  # of the exporter about itself
        warnings.simplefilter("ignore")
        made = torch.onnx.export(
            program, input_names=names, output_names=list(graph.outputs), dynamo=True, verbose=False, optimize=True
        )
    assert made is not None
    ends = {id(value) for value in made.model.graph.outputs}
    for value in (value for node in made.model.graph for value in node.outputs):
        if id(value) not in ends and value.name in graph.outputs:  # operators are named after what they do
            value.name = f"{value.name}_inside"
    proto = made.model_proto
    proto.metadata_props.add(key="credo", value=json.dumps(facts))
    return partial(onnx.save, proto)


def _check_file(written: Path, path: Path, graph: Graph, inputs: tuple[Tensor, ...], tolerance: float) -> None:
    """Raise CredoError if what was written, and is to become `path`, predicts differently from torch."""
    for rows in (len(inputs[0]), 1):
        part = tuple(tensor[:rows] for tensor in inputs)
        wanted, found = graph(*part), _run_file(written, path.suffix, part)
        for name, one, other in zip(graph.outputs, wanted, found, strict=True):
            error = float((one.cpu() - other).abs().max()) / max(1.0, float(one.abs().max()))
            if not error <= tolerance:
                raise CredoError(
                    f"{path} is not written: it would differ from torch in {name!r} by {error:.1e} of its largest "
                    f"value, more than {tolerance:g}. check=False writes it anyway."
                )


def _run_file(path: Path, suffix: str, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    if suffix == ".pt2":
        with path.open("rb") as file:  # a temporary file, whose name has another suffix
            return [output.cpu() for output in torch.export.load(file).module()(*inputs)]
    with needs("export", "Without check=False, a file in the ONNX format"):
        import onnxruntime
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = {entry.name: tensor.cpu().numpy() for entry, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, given)]


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]
