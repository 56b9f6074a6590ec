"""Options of natural-gradient methods that cannot be meant: refused at construction, by the name that was given."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo import optim
from credo.methods.kfac.blocks import DiagonalBlock, KroneckerBlock

WARM = {"start": 0.1, "steps": 10}
WARMUPS = [
    ({"start": 0.0}, r"temperature\.start=0\.0 must be one number, positive"),
    ({"start": -0.5}, r"temperature\.start=-0\.5 must be one number, positive"),
    ({"start": math.inf}, r"temperature\.start=inf must be one number, positive and finite"),
    ({"start": math.nan}, r"temperature\.start=nan must be one number, positive and finite"),
    ({"start": "a"}, r"temperature\.start='a' must be one number"),
    ({"start": None}, r"temperature\.start=None and temperature\.steps=10 belong together"),
    ({"steps": 0}, r"temperature\.start=0\.1 and temperature\.steps=0 belong together"),
    ({"steps": -10}, r"temperature\.steps=-10 must be a whole number"),
    ({"steps": 2.5}, r"temperature\.steps=2\.5 must be a whole number"),
    ({"stpes": 2}, r"Unknown field of temperature 'stpes'\. Did you mean 'steps'"),
]


@pytest.mark.parametrize("method", [credo.VOGN, credo.NoisyKFAC])
@pytest.mark.parametrize(("options", "message"), WARMUPS)
def test_a_warm_up_that_cannot_be_meant_is_refused(method: Any, options: dict[str, Any], message: str) -> None:
    method(nn.Linear(2, 2), data_size=10, temperature=WARM)
    with pytest.raises(ValueError, match=message):
        method(nn.Linear(2, 2), data_size=10, temperature={**WARM, **options})


def test_the_temperature_of_the_papers_text_was_removed() -> None:
    with pytest.raises(ValueError, match="paper_tau=True was removed"):
        credo.VOGN(nn.Linear(2, 2), data_size=10, paper_tau=True)


@pytest.mark.parametrize("decay", [0, 0.0, -1e-4, math.inf, math.nan])
def test_weight_decay_is_called_by_its_name(decay: float) -> None:
    for method in (credo.IVON, optim.IVON):
        with pytest.raises(ValueError, match=rf"^weight_decay={decay} must be positive"):
            method(nn.Linear(2, 2), data_size=10, weight_decay=decay)
    with pytest.raises(ValueError, match=r"^prior_precision=0 must be positive"):
        credo.IVON(nn.Linear(2, 2), data_size=10, prior_precision=0)


def nll(net: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return F.cross_entropy(net(torch.randn(8, 3, generator=generator)), torch.arange(8) % 2)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", [KroneckerBlock, DiagonalBlock])
def test_a_kl_that_fails_changes_nothing(steps: int, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = credo.NoisyKFAC(network(), data_size=10, random="*")
    for _ in range(steps):
        posterior.step(nll)
    before = {key: t.clone() for key, t in posterior.state_dict().items() if isinstance(t, Tensor)}

    def fail(*_: Any) -> float:
        raise ArithmeticError("no KL")

    with monkeypatch.context() as patched:
        patched.setattr(kind, "trace_and_log_determinant", fail)
        with pytest.raises(ArithmeticError, match="no KL"):
            posterior.step(nll)
    assert all(torch.equal(posterior.state_dict()[key], tensor) for key, tensor in before.items())
    assert posterior.steps == steps
    assert math.isfinite(posterior.step(nll).loss)


def test_the_first_kl_is_that_of_the_first_posterior() -> None:
    """Before the first step there is none; with a diagonal for all it is a sum over independent weights."""
    posterior = credo.NoisyKFAC(network(), data_size=10, curvature={"diagonal": "*"}, random="*", prior_precision=4.0)
    kl = posterior.step(nll).kl
    prior = torch.distributions.Normal(0.0, 0.5)
    means, stds = posterior.mean(), posterior.std()
    each = [
        torch.distributions.kl_divergence(torch.distributions.Normal(means[n], stds[n]), prior).sum() for n in means
    ]
    assert kl == pytest.approx(float(sum(each)), rel=1e-5)
