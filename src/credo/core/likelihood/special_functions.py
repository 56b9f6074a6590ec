"""Distribution functions that torch lacks, by SciPy on the CPU; they have no gradient."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from credo.core.support.extras import needs


def regularised_beta(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """The regularised incomplete beta function I_x(a, b).

    Args:
        a: First parameter.
        b: Second parameter.
        x: From 0 to 1.
    """
    with needs("sklearn", "This distribution function"):
        from scipy import special

    return _by_numpy(special.betainc, a, b, x)


def student_cdf(df: float, value: Tensor) -> Tensor:
    """Distribution function of Student's t.

    Args:
        df: Degrees of freedom.
        value: Where, in units of the scale.
    """
    with needs("sklearn", "This distribution function"):
        from scipy import special

    return _by_numpy(special.stdtr, torch.as_tensor(df), value)


def _by_numpy(function: np.ufunc, *values: Tensor) -> Tensor:
    like = values[-1]
    arrays = [value.detach().cpu().double().numpy() for value in torch.broadcast_tensors(*values)]
    return torch.as_tensor(np.asarray(function(*arrays))).to(like)
