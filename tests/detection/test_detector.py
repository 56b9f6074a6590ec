"""`OodDetector` for every kind of posterior: the networks, the layer, threads, files, errors."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.core.held_out.calibration import Calibration
from credo.detection import DETECTOR_SCORES, Knn, Mahalanobis, OodDetector, Training, Vim, energy
from credo.detection.sample import Sample

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(150, 4, generator=GENERATOR)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
LOADER = [(X[:64], Y[:64]), (X[64:], Y[64:])]
NEW = 3 * torch.randn(20, 4, generator=GENERATOR)


def network(outputs: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


POSTERIORS: dict[str, Callable[[], credo.Posterior]] = {
    "map": lambda: credo.MAP(network(), data_size=150),
    "bbb": lambda: credo.BBB(network(), data_size=150, init={"std": 0.1}),
    "ivon": lambda: credo.IVON(network(), data_size=150),
    "laplace": lambda: credo.Laplace(network(), data_size=150, random="all").fit(LOADER, progress=False),
    "last-layer": lambda: credo.LastLayer(network(), data_size=150).fit(LOADER, progress=False),
    "node": lambda: credo.NodeBNN(network(), data_size=150),
    "dropout": lambda: credo.MCDropout(network(), data_size=150, rate=0.2),
    "ensemble": lambda: credo.Ensemble([credo.MAP(network(seed=s), data_size=150) for s in range(3)]),
    "mixture": lambda: credo.Ensemble([credo.BBB(network(seed=s), data_size=150) for s in range(2)]),
}


@pytest.mark.parametrize("name", POSTERIORS)
def test_every_posterior(name: str, tmp_path: Path) -> None:
    posterior = POSTERIORS[name]()
    before = {key: value.clone() for key, value in posterior.state_dict().items() if isinstance(value, Tensor)}
    for draws in (0, 4):
        detector = OodDetector(posterior, "all", draws=draws, k=5).fit(LOADER, progress=False)
        found = detector.scores(NEW)
        assert list(found) == list(DETECTOR_SCORES)
        assert all(scores.shape == (20,) and bool(scores.isfinite().all()) for scores in found.values())
        again = OodDetector(posterior, "all", draws=draws, k=5).fit(LOADER, progress=False).scores(NEW)
        assert all(torch.equal(found[key], again[key]) for key in found)
        loaded = OodDetector.load(detector.save(tmp_path / "detector.safetensors"), posterior)
        assert all(torch.equal(found[key], scores) for key, scores in loaded.scores(NEW).items())
    assert all(torch.equal(value, posterior.state_dict()[key]) for key, value in before.items())


def test_scores_at_the_mean_are_those_of_the_plain_network() -> None:
    model = network()
    features, logits = model[:2](X), model(X)
    training = Training(features, logits, Y, model[2].weight, model[2].bias)
    posterior = credo.BBB(model, data_size=150)
    found = OodDetector(posterior, "all", draws=0, k=5).fit(LOADER, progress=False).scores(NEW)
    given, f = model[:2](NEW), model(NEW)
    expected = {
        "energy": energy(f),
        "max-logit": -f.amax(1),
        "knn": Knn.fit(training, k=5)(given),
        "mahalanobis": Mahalanobis.fit(training)(given),
        "relative-mahalanobis": Mahalanobis.fit(training, relative=True)(given),
        "vim": Vim.fit(training)(given, f),
    }
    for name, scores in found.items():
        assert torch.allclose(scores, expected[name].detach(), rtol=1e-4, atol=1e-5), name


def test_draws_are_averaged_and_each_has_its_own_features() -> None:
    """The slow way: every drawn network by itself, as a plain network of its own."""
    posterior = credo.BBB(network(), data_size=150, init={"std": 0.2})
    detector = OodDetector(posterior, ["knn", "vim"], draws=3, k=5).fit(LOADER, progress=False)
    with posterior.seeded(0):
        draws = list(posterior.iter_draws(3))
    each: dict[str, list[Tensor]] = {"knn": [], "vim": []}
    for draw in draws:
        alone = network()
        alone.load_state_dict(draw)
        single = OodDetector(credo.MAP(alone, data_size=150), ["knn", "vim"], k=5).fit(LOADER, progress=False)
        for name, scores in single.scores(NEW).items():
            each[name].append(scores)
    for name, scores in detector.each(NEW).items():
        assert torch.allclose(scores, torch.stack(each[name]), rtol=1e-4)
        assert torch.allclose(detector.scores(NEW)[name], scores.mean(0))
    assert float(detector.each(NEW)["knn"].std(0).mean()) > 1e-3


def test_members_of_an_ensemble_are_fitted_by_themselves() -> None:
    members = [credo.MAP(network(seed=s), data_size=150) for s in range(3)]
    found = OodDetector(credo.Ensemble(members), "mahalanobis").fit(LOADER, progress=False)(NEW)
    alone = [OodDetector(member, "mahalanobis").fit(LOADER, progress=False)(NEW) for member in members]
    assert torch.allclose(found, torch.stack(alone).mean(0), rtol=1e-5)


def test_draws_of_the_last_layer_share_one_pass_and_its_features(tmp_path: Path) -> None:
    """The slow way: the posterior's draws as networks of their own."""
    posterior = POSTERIORS["last-layer"]()
    runs: list[int] = []
    posterior.model[0].register_forward_hook(lambda *_: runs.append(1))
    detector = OodDetector(posterior, "all", draws=3, k=5).fit(LOADER, progress=False)
    runs.clear()
    found = detector.each(NEW)
    assert len(runs) == 1
    with posterior.seeded(0):
        draws = list(posterior.iter_draws(3))
    for number, draw in enumerate(draws):
        alone = network()
        alone.load_state_dict({**posterior.model.state_dict(), **draw})
        single = OodDetector(credo.MAP(alone, data_size=150), "all", k=5).fit(LOADER, progress=False).scores(NEW)
        for name, scores in single.items():
            assert torch.allclose(found[name][number], scores, rtol=1e-3, atol=1e-4), name
    assert float(found["energy"].std(0).mean()) > 1e-4
    fitted: Any = OodDetector.load(detector.save(tmp_path / "d.safetensors"), posterior)._fitted
    assert fitted[1]["knn"] is fitted[0]["knn"]
    assert fitted[1]["vim"] is not fitted[0]["vim"]


def test_batches_do_not_matter_and_training_goes_on() -> None:
    posterior = credo.BBB(network(), data_size=150, lr=0.1)
    detector = OodDetector(posterior, "knn", draws=3, k=5).fit(LOADER, progress=False)
    found = detector(NEW)
    assert torch.allclose(detector(NEW, batch_size=7), found, atol=1e-6)
    assert torch.allclose(detector([(NEW[:3], Y[:3]), NEW[3:]]), found, atol=1e-6)
    posterior.step(lambda net: nn.functional.cross_entropy(net(X), Y))
    assert torch.equal(detector(NEW), found)  # of the weights that it was fitted to


def test_several_threads() -> None:
    posterior = credo.MCDropout(network(), data_size=150, rate=0.3)
    detector = OodDetector(posterior, "knn", draws=3, k=5).fit(LOADER, progress=False)
    expected, found = detector(NEW), {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: detector(NEW)})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], expected) for i in range(4))


class Named(nn.Module):
    """An image network whose last linear layer is neither the last of its modules nor the output."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.unused = nn.Linear(6, 3)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.body = nn.Conv2d(1, 6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.body(x)).flatten(1)).log_softmax(-1)


def test_the_layer_is_the_last_linear_one_that_runs_or_the_one_named() -> None:
    torch.manual_seed(0)
    posterior = credo.MAP(Named(), data_size=150)
    images = [(X.view(-1, 1, 2, 2), Y)]
    found = OodDetector(posterior, "knn", k=5).fit(images, progress=False)
    assert found.layer == "head"
    pooled = OodDetector(posterior, "knn", k=5, layer="pool").fit(images, progress=False)
    new = NEW.view(-1, 1, 2, 2)
    assert torch.allclose(found(new), pooled(new))  # its inputs are averaged over positions
    with pytest.raises(ValueError, match=r"Unknown layer 'haed'.*Did you mean 'head'"):
        OodDetector(posterior, "knn", layer="haed").fit(images)
    with pytest.raises(ValueError, match=r"outputs of the network's last nn\.Linear"):
        OodDetector(posterior, "vim").fit(images, progress=False)  # log-probabilities are not
    convolutions = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten())
    with pytest.raises(credo.UnsupportedModelError, match="layer="):
        OodDetector(credo.MAP(convolutions, data_size=150), "knn").fit(images, progress=False)
    by_name = OodDetector(credo.MAP(convolutions, data_size=150), "knn", layer="1", k=5).fit(images, progress=False)
    assert by_name(new).shape == (20,)


class Tagger(nn.Module):
    """A network of two inputs that returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(torch.cat([a, b], 1))}


def test_batches_of_any_form() -> None:
    torch.manual_seed(0)
    model = Tagger()
    loader = [{"a": X[:, :2], "b": X[:, 2:], "labels": Y}]
    found = OodDetector(credo.MAP(model, data_size=150), "all", k=5).fit(loader, progress=False)
    plain = OodDetector(credo.MAP(model.head, data_size=150), "all", k=5, layer="").fit([(X, Y)], progress=False)
    expected = plain.scores(NEW)
    for name, scores in found.scores({"a": NEW[:, :2], "b": NEW[:, 2:]}).items():
        assert torch.allclose(scores, expected[name], rtol=1e-4, atol=1e-5), name


def test_one_tensor_of_training_inputs_and_one_pair_are_read() -> None:
    """A tensor was read row by row, and a pair as two batches."""
    posterior = POSTERIORS["bbb"]()
    for name, given in (("knn", X), ("mahalanobis", (X, Y))):
        wanted = OodDetector(posterior, name, draws=2).fit([(X, Y)], progress=False)(NEW)
        assert torch.equal(OodDetector(posterior, name, draws=2).fit(given, progress=False)(NEW), wanted)


def test_a_layer_that_runs_twice_is_an_error() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(credo.CredoError, match="runs once"):
        OodDetector(credo.MAP(nn.Sequential(layer, nn.Tanh(), layer), data_size=150), "knn").fit(LOADER, progress=False)


def test_one_logit_is_two_classes() -> None:
    posterior = credo.MAP(network(1), data_size=150, likelihood="bernoulli")
    labels = (Y > 0).float()
    detector = OodDetector(posterior, "all", k=5).fit([(X, labels.unsqueeze(-1))], progress=False)
    f = posterior.model(NEW).detach()
    expected = -torch.cat([-f / 2, f / 2], 1).logsumexp(1)
    assert torch.allclose(detector.scores(NEW)["energy"], expected, atol=1e-6)
    assert bool(detector.scores(NEW)["vim"].isfinite().all())


def test_a_regression_has_neighbours_only() -> None:
    posterior = credo.MAP(network(1), data_size=150, likelihood="gaussian")
    assert OodDetector(posterior, "knn", k=5).fit([(X, X[:, :1])], progress=False)(NEW).shape == (20,)
    with pytest.raises(ValueError, match="only 'knn'"):
        OodDetector(posterior, "energy")


def test_logit_scores_need_no_fit() -> None:
    detector = OodDetector(POSTERIORS["map"](), "energy")
    assert not detector.needs_fit
    assert torch.allclose(detector(NEW), energy(network()(NEW)).detach())


def test_rows_that_are_not_finite_are_the_most_unusual() -> None:
    detector = OodDetector(POSTERIORS["map"](), "all", k=5).fit(LOADER, progress=False)
    given = NEW.clone()
    given[3, 0] = torch.nan
    for scores in detector.scores(given).values():
        assert scores.isinf().nonzero().tolist() == [[3]]


def test_errors(tmp_path: Path) -> None:
    posterior = POSTERIORS["map"]()
    with pytest.raises(ValueError, match=r"Unknown score 'nkn'.*'knn'"):
        OodDetector(posterior, "nkn")
    with pytest.raises(ValueError, match="No score"):
        OodDetector(posterior, [])
    with pytest.raises(credo.CredoError, match="fit"):
        OodDetector(posterior, "knn")(NEW)
    with pytest.raises(ValueError, match="need labels"):
        OodDetector(posterior, "mahalanobis").fit([X], progress=False)
    with pytest.raises(ValueError, match="empty"):
        OodDetector(posterior, "knn").fit([], progress=False)
    several = OodDetector(posterior, ["energy", "max-logit"])
    with pytest.raises(ValueError, match="scores"):
        several(NEW)
    path = OodDetector(posterior, "knn", k=5).fit(LOADER, progress=False).save(tmp_path / "d.safetensors")
    with pytest.raises(ValueError, match="other weights"):
        OodDetector.load(path, credo.MAP(network(seed=1), data_size=150))
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(credo.FileFormatError, match="digest"):
        OodDetector.load(path, posterior)
    with pytest.raises(credo.FileFormatError, match="OodDetector"):
        OodDetector.load(credo.save(posterior, tmp_path / "p.safetensors"), posterior)


@pytest.mark.parametrize("draws", [0, 4])
def test_a_file_is_of_one_scale_of_the_noise(draws: int, tmp_path: Path) -> None:
    posterior = credo.BBB(network(), data_size=150, init={"std": 0.2})
    detector = OodDetector(posterior, "knn", draws=draws, k=5).fit(LOADER, progress=False)
    path = detector.save(tmp_path / "d.safetensors")
    posterior.calibration = Calibration(temperature=2.0)
    assert torch.equal(OodDetector.load(path, posterior)(NEW), detector(NEW))  # of logits, which it does not divide
    posterior.calibration = Calibration(noise_scale=0.1)
    if draws:
        with pytest.raises(ValueError, match="another scale of their noise"):
            OodDetector.load(path, posterior)
    else:  # the mean has none
        assert torch.equal(OodDetector.load(path, posterior)(NEW), detector(NEW))


def test_a_file_is_of_one_rate_of_dropout(tmp_path: Path) -> None:
    one, other = (credo.MCDropout(network(), data_size=150, rate=rate) for rate in (0.2, 0.4))
    path = OodDetector(one, "knn", k=5).fit(LOADER, progress=False).save(tmp_path / "d.safetensors")
    with pytest.raises(ValueError, match="other weights"):
        OodDetector.load(path, other)


def test_memory_is_bounded_by_a_uniform_sample() -> None:
    detector = OodDetector(POSTERIORS["map"](), "knn", k=5, examples=40).fit(LOADER, progress=False)
    fitted: Any = detector._fitted
    assert fitted[0]["knn"].bank.shape == (40, 8)
    counts = torch.zeros(30)
    for seed in range(600):
        sample = Sample(6, seed)
        for start in range(0, 30, 3):
            rows = sample.wanted(3) + start
            if len(rows):
                sample.add([rows])
        counts[sample.columns()[0]] += 1
    # Each row is kept with probability 1/5; six standard deviations: a false alarm in about 1e7 runs.
    assert float((counts / 600 - 0.2).abs().max()) < 6 * (0.2 * 0.8 / 600) ** 0.5


class Pairs(nn.Module):
    """A network of two named inputs that returns more than its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        scores = self.body(torch.cat([left, right], 1))
        return {"scores": scores, "left": left}


def in_parts(x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
    return {"first": x[:, :2], "second": x[:, 2:]} | ({} if y is None else {"kind": y})


def run(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores: Tensor = net(left=batch["first"], right=batch["second"])["scores"]
    return scores


def test_batches_of_any_form_by_forward_and_target(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reading: dict[str, Any] = {"forward": run, "target": lambda batch: batch["kind"]}
    posterior = credo.BBB(Pairs(), data_size=150, init={"std": 0.1})
    plain = credo.BBB(posterior.model.body, data_size=150, init={"std": 0.1})
    loader = [in_parts(x, y) for x, y in LOADER]
    detector = OodDetector(posterior, "all", draws=3, k=5, **reading).fit(loader, progress=False)
    wanted = OodDetector(plain, "all", draws=3, k=5).fit(LOADER, progress=False).scores(NEW)
    new = in_parts(NEW, torch.zeros(20, dtype=torch.long))
    for given in ([new], new, [in_parts(NEW[:7], Y[:7]), in_parts(NEW[7:], Y[7:20])]):
        for name, scores in detector.scores(given).items():
            assert torch.allclose(scores, wanted[name], rtol=1e-4, atol=1e-4), name
    loaded = OodDetector.load(detector.save(tmp_path / "d.safetensors"), posterior, **reading)
    assert all(torch.equal(scores, detector.scores(new)[name]) for name, scores in loaded.scores(new).items())
    with pytest.raises(TypeError, match="give an iterable of batches"):
        detector.scores(NEW)
    without = OodDetector(posterior, "mahalanobis", forward=run)
    with pytest.raises(ValueError, match="or target="):
        without.fit([in_parts(X)], progress=False)
