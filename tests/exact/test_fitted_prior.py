"""`kl_term="ard"` has a prior fitted to each weight: everything that asks for the prior gets that one, or a refusal."""

from typing import Any

import pytest
import torch
from torch import nn

import credo
from credo.data import Batches, Split
from credo.doctor.measure.layers import layer_states, whole_state
from credo.doctor.measure.objective import noise_pull
from credo.methods import BBB

FORMS = pytest.mark.parametrize("spread", ["free", "relative", "relative-layer"])


def make(spread: str = "free", **options: Any) -> BBB:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    return BBB(network, data_size=10, kl_term="ard", spread=spread, **{"init": {"rho": -1.5}, **options})


@FORMS
def test_the_doctors_layers_add_up_to_the_kl(spread: str) -> None:
    posterior = make(spread)
    mean, std = (posterior.layout.flatten(values) for values in (posterior.mean(), posterior.std()))
    whole = whole_state(posterior)
    assert whole is not None
    assert sum(state.kl or 0.0 for state in layer_states(posterior)) == pytest.approx(posterior.kl().item(), rel=1e-4)
    assert whole.std_ratio == pytest.approx(float((std / torch.hypot(mean, std)).median()), rel=1e-4)
    # −d/dt ½ Σ log(1 + μ²/(σ²(1 + t)²)) at t = 0
    wanted = float((mean.square() / (mean.square() + std.square())).sum())
    assert noise_pull(posterior) == pytest.approx(wanted, rel=1e-4)


@FORMS
def test_a_wrong_number_of_examples_is_said(spread: str) -> None:
    """The KL is divided by it, whichever prior it is from."""
    generator = torch.Generator().manual_seed(1)
    split = Split(torch.randn(40, 5, generator=generator), torch.randint(3, (40,), generator=generator))
    with pytest.warns(credo.DataSizeWarning, match="data_size=10, but the loader has 40 examples"):
        credo.fit(make(spread), Batches(split, batch_size=20), epochs=1, progress=False)


def test_there_is_no_one_prior_to_begin_from_or_to_divide_by() -> None:
    with pytest.raises(ValueError, match=r"fits a prior to each weight.*'mean': 'he'"):
        make(init={"mean": "prior"})
    with pytest.raises(ValueError, match="is not Gaussian"):
        credo.merge([make(), make()])
