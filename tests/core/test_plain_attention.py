"""The switch of attention's kernels, which is one for all threads."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from credo.core.kernels.attention import plain_attention


def test_the_last_thread_to_leave_restores_the_kernels() -> None:
    assert torch.backends.cuda.flash_sdp_enabled()
    both, first_left = Barrier(2), Barrier(2)

    def enter(leaves_first: bool) -> bool:
        with plain_attention():
            both.wait(10)
            if not leaves_first:
                first_left.wait(10)
                return torch.backends.cuda.flash_sdp_enabled()
        first_left.wait(10)
        return False

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(enter, [True, False])) == [False, False]
    assert torch.backends.cuda.flash_sdp_enabled()


def test_an_error_restores_them() -> None:
    with pytest.raises(RuntimeError, match="inside"), plain_attention():
        raise RuntimeError("inside")
    assert torch.backends.cuda.flash_sdp_enabled()
