"""The doctor on Markov chains: too short, in several modes, too few samples."""

import pytest
import torch
from doctor_measurements import ARGUMENTS, changed
from torch import nn

import credo
from credo.doctor.run_rules import run_rules
from credo.evaluate.fidelity.chain_study import ChainStudy

GOOD = ChainStudy(4, 100, 1.01, 1.02, 1.0, 1.01, 300.0, 200.0, 1.0, 300.0)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, None),
        ({"rhat": 1.1, "rhat_within": 1.1}, ("chains-too-short", "warning", {"samples": 800})),
        ({"rhat": 1.5, "rhat_within": 1.3}, ("chains-too-short", "alarm", {"samples": 800})),
        ({"rhat": 1.5, "rhat_within": 1.01}, ("chains-disagree", "alarm", {"chains": 8})),
        ({"ess_tail": 20.0}, ("few-samples", "note", {"samples": 800})),
        ({"rhat": 1.5, "rhat_noise": 1.6, "ess_tail": 20.0}, ("few-samples", "note", {"samples": 800})),
        ({"rhat": 1.7, "rhat_noise": 1.6, "rhat_within": 1.01}, ("chains-disagree", "alarm", {"chains": 8})),
        ({"chains": 1, "rhat": 1.5, "rhat_within": 1.01}, ("chains-too-short", "alarm", {"samples": 200})),
    ],
)
def test_rules(changes: dict, wanted: tuple | None) -> None:
    names = {"chains-too-short", "chains-disagree", "few-samples"}
    measured = changed(chains=GOOD._replace(**changes), method={"arguments": ARGUMENTS | {"chains", "samples"}})
    found = [(f.name, f.severity, dict(f.arguments)) for f in run_rules(measured) if f.name in names]
    assert found == ([] if wanted is None else [wanted])


def test_a_posterior_of_chains_in_two_modes() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 2)
    y = (x[:, 0] > 0).long()
    posterior = credo.HMC(
        nn.Linear(2, 2), data_size=40, chains=4, warmup=45, samples=240, settings={"thin": 1, "start_steps": 50}
    ).fit([(x, y)])
    posterior.samples[:2] *= -1.0
    found = credo.diagnose(posterior, [(x, y)])
    assert "chains-disagree" in {finding.name for finding in found.findings}
    assert found.measurements["chains"]["rhat"] > 1.2
    assert found.measurements["scores"]["mean"] is None  # the network's own weights are where the chains began
