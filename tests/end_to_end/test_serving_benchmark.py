"""Both services of the benchmark, in this process: right answers for every client."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")
pytest.importorskip("onnxruntime")

from benchmarks import serving


def test_both_services_give_the_same_answers(tmp_path: Path) -> None:
    model = serving.posterior()
    answers = [serving.by_predictor(model), serving.by_file(model, tmp_path)]
    x = torch.rand(3, serving.FEATURES)
    (probs, epistemic), (other_probs, other_epistemic) = (answer(x) for answer in answers)
    torch.testing.assert_close(torch.tensor(probs), torch.tensor(other_probs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(epistemic), torch.tensor(other_epistemic), rtol=1e-3, atol=1e-5)
    for answer in answers:
        found = serving.load(serving.service(answer), requests=24, clients=8)
        assert (found["errors"], found["requests"]) == (0, 24)
