"""What the backward pass that is running is about."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_tensor = torch.zeros((), device="cpu", requires_grad=True)


def _goal(tensor: Tensor) -> Any:
    """The node of the graph that takes the tensor's gradient."""
    with torch.enable_grad():
        node: Any = tensor.view_as(tensor).grad_fn
    return node.next_functions[0][0]


_ELSEWHERE = _goal(_tensor)  # of a tensor that is in no graph


def computes_gradient_of(weight: Tensor) -> bool:
    """Whether the pass computes gradients by the weight; an attack's, inside a loss, is about inputs only."""
    # A pass that is not restricted to some tensors would execute every node, could it only reach it.
    if torch._C._will_engine_execute_node(_ELSEWHERE):
        return True
    try:
        return bool(torch._C._will_engine_execute_node(_goal(weight)))
    except RuntimeError:  # torch.autograd.grad by this very weight
        return True


def is_running() -> bool:
    """Whether a backward pass is running: a forward pass then is a checkpoint's recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)
