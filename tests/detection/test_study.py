"""`ood_study`: the scores of predictions and detectors together."""

import pytest
import torch
from torch import nn

import credo
from credo.detection import DETECTOR_SCORES, OWN_SCORES
from credo.evaluate import auroc, roc_curve

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(120, 4, generator=GENERATOR)
LOADER = [(X, (X[:, 0] > 0).long())]
NEW, FAR = torch.randn(40, 4, generator=GENERATOR), 5 * torch.randn(30, 4, generator=GENERATOR)


def posterior() -> credo.Posterior:
    torch.manual_seed(0)
    return credo.BBB(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), data_size=120)


def test_all_scores_are_compared_with_the_best_of_the_predictions_own() -> None:
    made = posterior()
    study = credo.ood_study(made, LOADER, NEW, {"far": FAR, "near": X[:9]}, draws=3, resamples=20, progress=False)
    assert list(study.inside) == [*OWN_SCORES, *DETECTOR_SCORES]
    assert {name: len(scores["knn"]) for name, scores in study.outside.items()} == {"far": 30, "near": 9}
    detector = credo.OodDetector(made, "knn", draws=3).fit(LOADER, progress=False)
    assert torch.equal(study.outside["far"]["knn"], detector(FAR))
    assert torch.equal(study.inside["entropy"], credo.predict(made, NEW, draws=3).total)
    found = study.comparisons["far"]
    own = {name: auroc(study.outside["far"][name], study.inside[name]) for name in OWN_SCORES}
    assert found.reference == max(own, key=lambda name: own[name])
    assert found.auroc["knn"].value == auroc(detector(FAR), detector(NEW))
    assert set(study.to_dict()) == {"far", "near"}


def test_predictions_that_exist_are_used() -> None:
    made = posterior()
    inside, outside = credo.predict(made, NEW, draws=2, seed=7), credo.predict(made, FAR, draws=2, seed=7)
    given = (inside, {"far": outside})
    study = credo.ood_study(made, (), NEW, {"far": FAR}, scores=(), predictions=given, resamples=5)
    assert list(study.inside) == list(OWN_SCORES)
    assert torch.equal(study.outside["far"]["mutual-information"], outside.epistemic)


def test_roc_curve() -> None:
    alarms, hits = roc_curve(torch.tensor([3.0, 2.0, 2.0]), torch.tensor([2.0, 1.0]))
    assert alarms.tolist() == [0.0, 0.0, 0.5, 1.0]
    assert hits.tolist() == pytest.approx([0.0, 1 / 3, 1.0, 1.0])
    a, b = torch.randn(50), torch.randn(60).round()
    alarms, hits = roc_curve(a, b)
    assert float(torch.trapezoid(hits, alarms)) == pytest.approx(auroc(a, b))


def test_a_study_of_batches_that_forward_and_target_read() -> None:
    torch.manual_seed(0)
    x, far = torch.randn(80, 4), 5 * torch.randn(60, 4)
    y = (x[:, 0] > 0).long()
    point = credo.MAP(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), data_size=80)
    plain = credo.ood_study(point, [(x, y)], x, {"far": far}, resamples=20, progress=False)
    batches = [{"pixels": x, "kind": y}]
    read = credo.ood_study(
        point,
        batches,
        batches,
        {"far": [{"pixels": far}]},
        resamples=20,
        progress=False,
        forward=lambda net, batch: net(batch["pixels"]),
        target=lambda batch: batch["kind"],
    )
    assert list(read.inside) == list(plain.inside)
    for name, scores in plain.inside.items():
        assert torch.allclose(read.inside[name], scores, atol=1e-5)
        assert torch.allclose(read.outside["far"][name], plain.outside["far"][name], atol=1e-5)


def test_conformal_sets_do_not_matter() -> None:
    """They were chosen for 32 draws, and a study makes fewer: no reason for a warning, which would be an error."""
    own = posterior()
    credo.conformal(own, [(NEW, (NEW[:, 0] > 0).long())], alpha=0.2)
    credo.ood_study(own, LOADER, NEW, {"far": FAR}, scores="energy", draws=2, resamples=20, progress=False)
    assert own.conformal is not None
