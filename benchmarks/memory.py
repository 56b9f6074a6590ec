"""Peak memory of a training step: live bytes of torch's CPU allocator.

A process's resident memory is a poor measure: the C library keeps freed pages, so peaks of a few MB vanish in what
earlier work left behind. Instead the profiler reports every allocation and release of the allocator, with address and
size, also temporaries inside an operation. Network, gradients and optimiser are made while it listens, so that the
sum is everything that the method keeps or touches; two measurements agree to the byte. Not seen: the batch itself
(made before), Python objects, and the scratch memory that oneDNN manages for itself inside convolutions.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.timing import Work

_LAST = "the measured step"


def peak_bytes(make: Callable[[], Work], *, warmup: int = 2) -> int:
    """Most bytes alive at once during one call of what `make` returns, everything that `make` allocated included.

    Gradients and the optimiser's state exist only after the first steps: `warmup` calls come before the one measured.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work = make()
        for _ in range(warmup):
            work()
        with record_function(_LAST):
            work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    step = next(event for event in events if event.get("name") == _LAST)
    return peak_of(events, start=step["ts"], end=step["ts"] + step["dur"])


def peak_of(events: Iterable[dict[str, Any]], *, start: float, end: float) -> int:
    """Most live bytes between two moments of a profiler trace.

    Releases are matched by address: what was allocated before the trace began must not count as negative.
    """
    changes = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    live: dict[int, int] = {}
    total = peak = 0
    for event in sorted(changes, key=lambda event: float(event["ts"])):
        # Also what was alive when the step began counts, even if the step's first act is to release it.
        if start <= event["ts"] <= end:
            peak = max(peak, total)
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            live[address] = size
            total += size
        else:
            total -= live.pop(address, 0)
        if start <= event["ts"] <= end:
            peak = max(peak, total)
    return peak
