from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Case = tuple[Tensor, Tensor]


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def case(dtype: torch.dtype) -> Callable[..., Case]:
    """Random probabilities and labels that agree with them more often than by chance."""

    def make(batch: int = 200, classes: int = 5, *, seed: int = 0, sharpness: float = 2.0) -> Case:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(batch, classes, generator=generator, dtype=dtype) * sharpness
        labels = torch.multinomial((logits / 2).softmax(-1), 1, generator=generator).squeeze(-1)
        return logits.softmax(-1), labels

    return make
