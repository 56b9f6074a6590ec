"""Scores against those of pytorch-ood on the same features, where it is installed."""

import torch
from peer_parts import peer_part

from credo.detection.scores import Knn, Mahalanobis, Training, Vim, energy, max_logit


def test_the_scores_are_those_of_pytorch_ood() -> None:
    peers = peer_part("pytorch_ood.detector")
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 3
    features = torch.randn(300, 8, generator=generator) + labels.unsqueeze(-1)
    weight, bias = torch.randn(3, 8, generator=generator), torch.randn(3, generator=generator)
    training = Training(features, features @ weight.T + bias, labels, weight, bias)
    given = 2 * torch.randn(40, 8, generator=generator)
    logits = given @ weight.T + bias
    vim = peers.ViM(None, d=4, w=weight, b=bias).fit_features(features, labels)
    rows = len(features)
    pairs = {
        "energy": (energy(logits), peers.EnergyBased.score(logits)),
        "max-logit": (max_logit(logits), peers.MaxLogit.score(logits)),
        "knn": (
            Knn.fit(training, k=50)(given),
            peers.KNN(None, k=50).fit_features(features, labels).predict_features(given),
        ),
        # Its covariance is a sum and not a mean, and its Mahalanobis distance is halved.
        "mahalanobis": (
            Mahalanobis.fit(training)(given),
            2 * rows * peers.Mahalanobis(None).fit_features(features, labels).predict_features(given),
        ),
        "relative": (
            Mahalanobis.fit(training, relative=True)(given),
            rows * peers.RMD(None).fit_features(features, labels).predict_features(given),
        ),
        "vim": (Vim.fit(training, directions=4)(given, logits), vim.predict_features(given)),
    }
    for name, (ours, theirs) in pairs.items():
        assert torch.allclose(ours, theirs.to(ours), rtol=2e-3, atol=1e-4), name
