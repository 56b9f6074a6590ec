"""The kernel of attention that can be batched by `vmap` and differentiated twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode

_lock = Lock()
_users = 0
_switched: AbstractContextManager[None] | None = None


@contextmanager
def plain_attention() -> Iterator[None]:
    """While open, in any thread, `scaled_dot_product_attention` is computed by its formula.

    Torch's switch is one for all threads, and each would restore what another had set: the last to leave restores it.
    """
    global _users, _switched
    with _lock:
        if _users == 0:
            _switched = sdpa_kernel(SDPBackend.MATH)
            _switched.__enter__()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _switched is not None:
                _switched.__exit__(None, None, None)


def plain_attention_modules() -> AbstractContextManager[None]:
    """While open, in this thread, attention modules in eval mode run as in train mode, not by their fused operator.

    That operator has no derivative and no batching rule, and inside `vmap` the modules do not see that gradients are
    wanted. They leave it whenever a mode watches the calls of torch's functions.
    """
    return BaseTorchFunctionMode()
