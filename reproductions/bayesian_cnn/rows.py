"""The networks of Shridhar et al. (2019): printed numbers, and how each is trained here.

The preset `paper` has the settings of the published program where it states them: 200 epochs, Adam with 1e-3, reduced
on plateaus, a prior N(0, 0.1²), local reparameterisation, and a KL weight of a tenth. `cpu` has a cosine schedule,
fewer epochs, and weight draws for AlexNet, the most expensive network, whose step takes 2.3 times as long with local
reparameterisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CIFAR_STATS = [[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]]
MNIST_STATS = [0.1307, 0.3081]
DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
OOD = {"mnist": ("fashion-mnist", "notmnist"), "digits": ("photo-patches",)}
NETWORKS = {"alexnet": "AlexNet", "alexnet-half": "AlexNet, half the filters", "lenet5": "LeNet-5"}
DRAWS = {"paper": 25, "cpu": 25, "smoke": 5}
PRUNED_DRAWS = {"paper": 25, "cpu": 10, "smoke": 5}
COMPARED_DRAWS: dict[str, tuple[int, ...]] = {"paper": (25, 100), "cpu": (25,), "smoke": (25, 100)}
RATES = (0.0, 0.5, 0.75, 0.9)


@dataclass(frozen=True)
class Row:
    """A network with one kind of weights, a key of `KINDS`."""

    network: str
    kind: str

    @property
    def key(self) -> str:
        """Its name in records."""
        return f"{self.network}-{self.kind}"

    @property
    def title(self) -> str:
        """Its name in tables."""
        return f"{NETWORKS[self.network]}, {KINDS[self.kind]}"


KINDS = {
    "bayesian": "Bayesian",
    "frequentist": "frequentist",
    "equal": "frequentist, epochs and rate of the Bayesian",
    "dropout-1": "one dropout layer",
    "dropout-3": "three dropout layers",
}
# The longest first, so that two workers end at nearly the same time.
ROWS = (
    *(Row(network, kind) for network in NETWORKS for kind in ("bayesian", "frequentist")),
    Row("lenet5", "equal"),
)
COMPARED_KINDS = ("frequentist", "dropout-1", "dropout-3", "bayesian")
# Noise and form of σ; the first is the row of table 1 with `paper` and, for LeNet-5, with `cpu`.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "lrt-free": ("local reparameterisation, free σ", {}),
    "weights-free": ("weight draws, free σ", {"noise": "weights"}),
    "lrt-relative": (
        "local reparameterisation, σ² = αμ²",
        {"spread": "relative", "kl_term": "ard", "prior": None},
    ),
    "weights-relative": (
        "weight draws, σ² = αμ²",
        {"spread": "relative", "kl_term": "ard", "prior": None, "noise": "weights"},
    ),
}
# Validation accuracy in %, printed as whole numbers: MNIST, CIFAR-10, CIFAR-100.
PRINTED: dict[str, tuple[int | None, int | None, int | None]] = {
    "alexnet-bayesian": (99, 73, 36),
    "alexnet-frequentist": (99, 73, 38),
    "lenet5-bayesian": (98, 69, 31),
    "lenet5-frequentist": (98, 68, 33),
    "alexnet-half-bayesian": (99, 79, 38),
    "alexnet-half-frequentist": (None, None, None),
    "lenet5-equal": (None, None, None),
}
PRINTED_PRUNED: dict[str, int] = {"mnist": 99, "cifar10": 71}
# Training and validation accuracy of AlexNet on CIFAR-100; Bayesian by draws.
PRINTED_DROPOUT: dict[str, tuple[int, int]] = {
    "frequentist": (83, 38),
    "dropout-1": (72, 40),
    "dropout-3": (39, 38),
    "bayesian-25": (54, 37),
    "bayesian-100": (48, 37),
}
# Aleatoric and epistemic of LeNet-5. Theirs are of one maximum per batch, not of images: a different quantity.
PRINTED_UNCERTAINTY: dict[str, tuple[float, float]] = {"mnist": (0.0096, 0.0026), "cifar10": (0.1920, 0.0404)}

_BAYESIAN = {"name": "bbb", "lr": 1e-3, "prior": 0.1, "temperature": 0.1, "noise": "lrt"}
_PAPER_TRAINING = {
    "epochs": 200,
    "batch_size": 256,
    "schedule": "plateau",
    "wait": 6,
    "validation": 0.2,
    "validation_draws": 1,
}
_CPU_EPOCHS = {
    ("lenet5", "mnist"): (8, 8),
    ("lenet5", "cifar10"): (32, 24),
    ("lenet5", "cifar100"): (16, 12),
    ("alexnet", "mnist"): (4, 3),
    # Enough to overfit without noise; AlexNet on CIFAR-100 would take too long, half of its filters stand for it.
    ("alexnet", "cifar10"): (20, 20),
    ("alexnet-half", "mnist"): (6, 4),
    ("alexnet-half", "cifar10"): (30, 30),
    ("alexnet-half", "cifar100"): (30, 30),
}


def compared(scale: str) -> tuple[Row, ...]:
    """Return the networks beside dropout on CIFAR-100: AlexNet, with half of its filters if the preset is `cpu`.

    Args:
        scale: The preset.
    """
    network = "alexnet-half" if scale == "cpu" else "alexnet"
    return tuple(Row(network, kind) for kind in COMPARED_KINDS)


def trained(row: Row, data: str, scale: str) -> bool:
    """Whether the preset trains this network on these data.

    Args:
        row: The network and its kind of weights.
        data: A key of `DATA`.
        scale: The preset.
    """
    return scale != "cpu" or (row.network, data) in _CPU_EPOCHS


def experiment_for(row: Row, data: str, scale: str, form: str = "lrt-free", seed: int = 0) -> dict[str, Any]:
    """Return the experiment of one network as TOML tables.

    Args:
        row: The network and its kind of weights.
        data: A key of `DATA`.
        scale: The preset.
        form: A key of `FORMS`, for Bayesian networks.
        seed: Seed of weights, batches and draws.
    """
    if scale == "smoke":
        return _tiny(row, data, form, seed)
    bayesian = row.kind == "bayesian"
    model: dict[str, Any] = {"name": row.network, "normalize": MNIST_STATS if data == "mnist" else CIFAR_STATS}
    model |= {"activation": "softplus"} if bayesian else _dropout(row)
    training = {**(_PAPER_TRAINING if scale == "paper" else _cpu_training(row, data)), "seed": seed}
    training["augment"] = "none" if data == "mnist" else "flip"
    return {"data": {"name": data}, "model": model, "method": _method(row, data, scale, form), "training": training}


def _method(row: Row, data: str, scale: str, form: str) -> dict[str, Any]:
    rate = 2e-3 if scale == "cpu" and row.network == "lenet5" else 1e-3
    if row.kind != "bayesian":
        return {"name": "map", "lr": rate if row.kind == "equal" else 1e-3}
    method: dict[str, Any] = {**_BAYESIAN, **({"init": {"rho": [-5.0, 0.1], "mean": 0.1}} if scale == "paper" else {})}
    if scale == "cpu":
        # From a smaller σ the KL makes it grow during training, and epistemic uncertainty with it.
        method |= {"init": 0.05 if (row.network, data) == ("lenet5", "mnist") else 0.01, "lr": rate}
        method |= {} if row.network == "lenet5" else {"noise": "weights"}
    changes = FORMS[form][1]
    method |= changes
    if changes.get("spread"):  # its σ follows from the means
        first = method.pop("init")
        method |= {"init": {"mean": first["mean"]}} if scale == "paper" else {}
    return {key: value for key, value in method.items() if value is not None}


def form_of(method: dict[str, Any]) -> str | None:
    """Return the key in `FORMS` of a method's settings; None for a point estimate."""
    if method["name"] != "bbb":
        return None
    return f"{method['noise']}-{method.get('spread', 'free')}"


def _dropout(row: Row) -> dict[str, Any]:
    count = {"dropout-1": 1, "dropout-3": 3}.get(row.kind)
    return {} if count is None else {"dropout": 0.5, "dropout_layers": count}


def _cpu_training(row: Row, data: str) -> dict[str, Any]:
    epochs = _CPU_EPOCHS[row.network, data][row.kind not in ("bayesian", "equal")]
    return {"epochs": epochs, "batch_size": 128, "schedule": "cosine", "warmup": 0.0, "validation": 0.0}


def _tiny(row: Row, data: str, form: str, seed: int) -> dict[str, Any]:
    """Digits, a small network, two epochs: only shows that the pipeline works."""
    channels = [4, 4] if row.network == "alexnet-half" else [8, 8]
    model: dict[str, Any] = {"name": "convnet", "channels": channels, "hidden": [16], "normalize": "none"}
    model |= {"activation": "softplus", "beta": 10.0} if row.kind == "bayesian" else {}
    model |= {"dropout": 0.3} if row.kind.startswith("dropout") else {}
    method = _method(row, data, "cpu", form)
    training = {"epochs": 2, "batch_size": 64, "schedule": "cosine", "warmup": 0.0, "validation": 0.0, "seed": seed}
    return {
        "data": {"name": "digits"},
        "model": model,
        "method": {**method, "lr": 5e-3, **({"temperature": 0.01} if row.kind == "bayesian" else {})},
        "training": training,
    }
