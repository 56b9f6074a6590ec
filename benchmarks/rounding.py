"""What bfloat16 does to the exchange of two processes: the error of one reduced vector, and of a short training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

import credo
from benchmarks.methods import posterior_of
from benchmarks.networks import Net, random_batches
from credo.core.distributed.setup import distribute
from credo.data import Batches, load_dataset
from credo.models import build_model


def rounding(net: Net, *, epochs: int, seeds: int) -> dict[str, float]:
    """Both measurements; each of the two processes must call it."""
    return {**vector_errors(net), **training_errors(epochs, seeds)}


def vector_errors(net: Net) -> dict[str, float]:
    """|rounded mean − mean| / |mean| over two processes of one VOGN step's gradients, of its squares, and of both."""
    posterior: credo.VOGN = posterior_of("vogn", net.build())  # type: ignore[assignment]
    process_group = distribute(posterior, compress="bfloat16")
    x, y = random_batches(net.shape, net.batch // 2, 2)[process_group.rank]
    posterior.gather(lambda network: F.cross_entropy(network(x), y))
    found = posterior._gathered
    exact = _flat(found.gradients), _flat(found.curvatures)
    rounded = [vector.clone() for vector in exact]
    wide = [vector.double() for vector in exact]
    process_group.average_(wide)
    process_group.average_step_(rounded, [0.0])
    process_group.close()
    errors = {name: _relative([r], [w]) for name, r, w in zip(("gradients", "squares"), rounded, wide, strict=True)}
    return {**errors, "vector": _relative(rounded, wide)}


def training_errors(epochs: int, seeds: int) -> dict[str, float]:
    """Test NLL on scikit-learn's digits after VOGN with and without rounding, the same seeds; and how seeds differ."""
    rows = [[_trained(seed, compress, epochs) for compress in (None, "bfloat16")] for seed in range(seeds)]
    plain, rounded = (torch.tensor(column) for column in zip(*rows, strict=True))
    return {
        "nll": float(plain.mean()),
        "nll_rounded": float(rounded.mean()),
        "largest_difference": float((rounded - plain).abs().max()),
        "std_over_seeds": float(plain.std()),
    }


def _trained(seed: int, compress: str | None, epochs: int) -> float:
    digits = load_dataset("digits")
    model = build_model("mlp", inputs=digits.input_shape, classes=10, hidden=[64], seed=seed)
    posterior = credo.VOGN(model, data_size=len(digits.train), lr=3e-3, prior_precision=10.0, seed=seed)
    process_group = distribute(posterior, compress=compress)
    loader = Batches(digits.train, batch_size=64, seed=seed).shard(process_group.data_rank, process_group.data_groups)
    for _ in range(epochs):
        for x, y in loader:
            posterior.step(lambda net, x=x, y=y: F.cross_entropy(net(x), y))  # type: ignore[misc]
    process_group.settle_(posterior)
    prediction = credo.predict(posterior, Batches(digits.test, batch_size=512, shuffle=False), draws=32)
    process_group.close()
    return float(credo.measure(prediction)["nll"])


def _flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def _relative(found: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    one, other = (torch.cat([*vectors]).double() for vectors in (found, exact))
    return float((one - other).norm() / other.norm())
