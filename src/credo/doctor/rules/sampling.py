"""Rules on Markov chains: whether they agree about functions, and whether there are enough samples."""

from __future__ import annotations

from collections.abc import Iterator

from credo.doctor import thresholds as limits
from credo.doctor.findings import Finding
from credo.doctor.measurements import Measurements


def chains(measured: Measurements) -> Iterator[Finding]:
    """Chains that disagree, since they are too short or since each is in a mode of its own; or too few samples."""
    found = measured.chains
    if found is None:
        return
    size = min(found.ess_bulk, found.ess_tail)
    if not found.rhat <= max(limits.RHAT_WARNING, found.rhat_noise):
        severity = "alarm" if found.rhat > limits.RHAT_ALARM else "warning"
        who = "The two halves of the chain" if found.chains == 1 else f"{found.chains} chains"
        text = f"{who} disagree about predictions: R̂ is {found.rhat:.2f}, 1 where they agree"
        if found.chains > 1 and found.rhat_within <= limits.RHAT_WARNING:
            text += ". Each by itself has settled: the posterior has several modes."
            advice = "Run more chains and take them as a mixture: their weights are unknown. Longer chains hardly help."
            yield Finding("chains-disagree", severity, text, advice, _more(measured, "chains"))
        else:
            text += ", and they still drift."
            yield Finding("chains-too-short", severity, text, "Run longer.", _longer(measured))
    elif size < limits.ESS_LEAST:
        text = f"Some predictions have {size:.0f} effective samples: their intervals are rough"
        noise = found.rhat_noise
        text += "." if noise <= limits.RHAT_ALARM else ", and too few to tell whether the chains have converged."
        yield Finding("few-samples", "note", text, "Run longer.", _longer(measured))


def _longer(measured: Measurements) -> dict[str, int]:
    """Twice the samples, if the method takes their number."""
    return _more(measured, "samples")


def _more(measured: Measurements, name: str) -> dict[str, int]:
    """Twice the number that was measured, if the method takes this argument."""
    found = measured.chains
    if found is None or name not in measured.method.arguments:
        return {}
    return {name: 2 * found.chains * (found.draws if name == "samples" else 1)}
