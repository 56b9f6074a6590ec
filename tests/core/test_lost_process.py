"""The message when a process is lost: whether torchrun restarts all processes, or the user must."""

import pytest
import torch

from credo.core.distributed.collectives import Communicator
from credo.core.errors import LostProcessError


@pytest.mark.parametrize(
    ("most", "done", "said", "unsaid"),
    [
        (None, None, "Restart all processes from the last checkpoint; torchrun --max-restarts=3 does", "restart 1"),
        ("0", "0", "torchrun --max-restarts=3 does so automatically", "restart 1"),
        ("3", "0", r"torchrun restarts all processes from the last checkpoint \(restart 1 of 3\)", "--max-restarts"),
        ("3", "2", r"restart 3 of 3", "--max-restarts"),
        ("3", "3", r"torchrun has used up its 3 restarts: restart all processes", "restarts all"),
    ],
)
def test_who_starts_again(
    most: str | None, done: str | None, said: str, unsaid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in (("MAX_RESTARTS", most), ("RESTART_COUNT", done)):
        monkeypatch.delenv(f"TORCHELASTIC_{key}", raising=False)
        if value is not None:
            monkeypatch.setenv(f"TORCHELASTIC_{key}", value)
    comm = Communicator(None, torch.device("cpu"))
    with pytest.raises(LostProcessError, match=said) as caught, comm._translated_errors():
        raise RuntimeError("[gloo.cc:1] Connection closed by peer")
    assert unsaid not in str(caught.value)
    assert str(caught.value).endswith("(Connection closed by peer)")
