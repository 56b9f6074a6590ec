"""Methods that take squares or factors of single rows: masks and weights are the rows left out or repeated."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
import credo.optim
from credo.methods.kfac import sampled_fisher as kfac_labels

ROWS, KEPT = 8, torch.tensor([0, 3, 4, 6, 7])
X = torch.randn(ROWS, 2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(ROWS) % 3
WEIGHTS = torch.tensor([2, 0, 0, 1, 3, 0, 1, 4])
MASKED = Y.where(WEIGHTS > 0, -100)
Build = Callable[[], Any]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    conv = nn.Conv2d(2, 4, 2, groups=2)
    return nn.Sequential(conv, nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()


def of(method: Any, **options: Any) -> Build:
    return lambda: method(network(), data_size=50, **options)


METHODS: dict[str, Build] = {
    "vogn": of(credo.VOGN, lr=0.02, curvature={"init": 0.5}, draws=2, temperature=0.1),
    "vogn at mean": of(credo.VOGN, lr=0.02),
    "vogn adversarial": of(credo.VOGN, lr=0.02, curvature={"init": 0.5}, noise="adversarial"),
    "ogn": of(credo.OGN, lr=0.02),
    "kfac": of(credo.KFAC, lr=0.02),
    "noisy-kfac": of(credo.NoisyKFAC, lr=0.02, draws=2),
    "kfac sampled": of(credo.KFAC, lr=0.02, curvature={"fisher": "sampled"}),
    "ensemble of vogn": lambda: credo.Ensemble(
        [credo.VOGN(network(i), data_size=50, seed=i, curvature={"init": 0.5}) for i in range(2)]
    ),
}
methods = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(autouse=True)
def _same_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn labels are the likeliest ones: those of a row do not depend on how many there are."""
    monkeypatch.setattr(kfac_labels, "sampled_targets", lambda likelihood, outputs, *_: outputs.argmax(-1))


def numbers(posterior: Any) -> dict[str, Tensor]:
    return {n: v for n, v in posterior.state_dict().items() if isinstance(v, Tensor) and v.is_floating_point()}


def same(one: Any, other: Any) -> None:
    wanted = numbers(other)
    assert wanted
    for name, value in numbers(one).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-8, atol=1e-11)


def some(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X[KEPT]), Y[KEPT])


def masked(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), MASKED)


def weighted(net: nn.Module) -> Tensor:
    return (WEIGHTS * F.cross_entropy(net(X), Y, reduction="none")).sum() / 11


@methods
def test_a_mask_is_a_batch_without_these_rows(name: str) -> None:
    one, other = METHODS[name](), METHODS[name]()
    for _ in range(3):
        terms = one.step(masked, examples=len(KEPT))
        assert terms.loss == pytest.approx(other.step(some).loss, rel=1e-9)
    same(one, other)


@methods
def test_weights_are_repeated_rows(name: str) -> None:
    one, other = METHODS[name](), METHODS[name]()
    x, y = X.repeat_interleave(WEIGHTS, 0), Y.repeat_interleave(WEIGHTS, 0)
    assert len(x) == 11
    for _ in range(3):
        one.step(weighted, weights=WEIGHTS)
        other.step(lambda net: F.cross_entropy(net(x), y))
    same(one, other)


@pytest.mark.parametrize("name", ["vogn", "ogn", "kfac"])
def test_rows_that_do_not_count_are_named_in_the_first_steps(name: str) -> None:
    posterior = METHODS[name]()
    with pytest.warns(credo.ExampleCountWarning, match=r"3 of 8 rows have no gradient .* examples=5"):
        posterior.step(masked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            posterior.step(masked)


@pytest.mark.parametrize("name", ["vogn", "kfac", "kfac sampled"])
def test_rows_that_act_on_each_other_are_named_in_the_first_step(name: str) -> None:
    options = {"curvature": {"fisher": "sampled"}} if "sampled" in name else {}
    posterior = type(METHODS[name]())(Coupled(), data_size=50, **options)
    with pytest.warns(credo.ExampleCountWarning, match="interact"):
        posterior.step(lambda net: F.cross_entropy(net(X.flatten(1)), Y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior.step(lambda net: F.cross_entropy(net(X.flatten(1)), Y))


class Coupled(nn.Module):
    """Messages from all rows to all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(18, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return self.b((hidden + hidden.mean(0)).tanh())


# -- K-FAC's factors -------------------------------------------------------------------------------------------------


def test_factors_are_the_fisher_matrix_where_all_inputs_are_alike() -> None:
    """Then A ⊗ G is exact: Σ w·(a aᵀ)⊗(g gᵀ)/n, also for a mean over another number than Σ w."""
    torch.manual_seed(0)
    x = torch.randn(1, 4, dtype=torch.float64).expand(ROWS, 4)
    model = nn.Linear(4, 3).double()
    weights = torch.tensor([0.5, 0.0, 2.0, 1.0, 0.25, 3.0, 0.0, 1.0], dtype=torch.float64)
    with torch.no_grad():
        slopes = model(x).softmax(1) - F.one_hot(Y, 3)
        inputs = torch.cat([x, torch.ones(ROWS, 1)], 1)
    rows = zip(weights, slopes, inputs, strict=True)
    exact = sum(w * torch.kron(torch.outer(g, g), torch.outer(a, a)) for w, g, a in rows)
    posterior = credo.KFAC(model, data_size=50, lr=0.0)
    each = weights / 5
    posterior.step(lambda net: (each * F.cross_entropy(net(x), Y, reduction="none")).sum(), weights=weights, examples=5)
    block = posterior.blocks[0]
    torch.testing.assert_close(torch.kron(block.outputs[0], block.inputs[0]), exact / 5)


def test_sampled_labels_count_tokens_as_the_loss_does() -> None:
    """A mean over tokens of which some are ignored, in units of sequences and of tokens: G differs by the ratio."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)).double()
    x = torch.randint(9, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    counts = torch.rand(ROWS, 6, generator=torch.Generator().manual_seed(1)) < 0.5
    counts[2] = False
    rows, total = int(counts.any(1).sum()), int(counts.sum())
    assert rows == ROWS - 1
    with torch.no_grad():
        labels = model(x).argmax(-1)
        slopes = (model(x).softmax(-1) - F.one_hot(labels, 3))[counts] / total
    y = labels.where(counts, -100)
    for examples in (rows, total):
        posterior = credo.KFAC(model, data_size=50, lr=0.0, curvature={"fisher": "sampled", "diagonal": "0.*"})
        posterior.step(lambda net: F.cross_entropy(net(x).flatten(0, 1), y.flatten()), examples=examples)
        block = next(block for block in posterior.blocks if "1.weight" in block.names)
        torch.testing.assert_close(block.outputs[0], slopes.T @ slopes * examples / 6)


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_rows_that_outputs_do_not_show_are_asked_for(fisher: str) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)[:4]

    posterior = credo.KFAC(Pair(), data_size=50, curvature={"fisher": fisher})
    x = torch.randn(ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="Give weights="):
        posterior.step(lambda net: F.cross_entropy(net(x), Y[:4]), examples=4)


class Flat(nn.Module):
    """All tokens of all rows behind one another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(2, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def test_a_layer_that_does_not_see_rows_is_named_where_some_do_not_count() -> None:
    x = X[:, :, :, 0].mT
    y = MASKED.unsqueeze(1).expand(-1, x.shape[1])

    def loss(net: nn.Module) -> Tensor:
        return F.cross_entropy(net(x).flatten(0, 1), y.flatten())

    with pytest.raises(ValueError, match=r"a gets an input that begins with 24 .*'diagonal': \['a.weight', 'a.bias'\]"):
        credo.KFAC(Flat(), data_size=50).step(loss, examples=5)
    one, other = (credo.KFAC(Flat(), data_size=50, curvature={"diagonal": ["a.*"]}) for _ in range(2))
    one.step(loss, examples=5)
    other.step(lambda net: F.cross_entropy(net(x[KEPT]).flatten(0, 1), y[KEPT].flatten()))
    same(one, other)


# -- several passes of one update ------------------------------------------------------------------------------------

PARTS = (KEPT[:1], KEPT[1:3], KEPT[3:])


@pytest.mark.parametrize("name", ["ogn", "vogn at mean", "kfac"])
def test_parts_of_different_size_make_the_update_of_all(name: str) -> None:
    one, other = METHODS[name](), METHODS[name]()
    for part in PARTS:
        one.gather(lambda net, part=part: F.cross_entropy(net(X[part]), Y[part]), examples=len(part))
    terms = one.update()
    assert terms.nll == pytest.approx(other.step(some).nll)
    same(one, other)


@pytest.mark.parametrize("method", [credo.OGN, credo.KFAC])
def test_a_learned_noise_counts_parts_by_their_examples_too(method: Any) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        noise = credo.GaussianNoise(0.5, learn=True)
        return method(nn.Linear(3, 1).double(), data_size=50, lr=0.02, likelihood=noise.double())

    x, y = X.flatten(1)[:, :3], X.flatten(1)[:, 3:4]
    one, other = build(), build()
    for _ in range(2):
        for part in PARTS:
            one.gather(lambda net, part=part: one.likelihood.nll(net(x[part]), y[part]), examples=len(part))
        one.update()
        other.step(lambda net: other.likelihood.nll(net(x[KEPT]), y[KEPT]))
    same(one, other)


@pytest.mark.parametrize("estimator", ["price", "squares"])
def test_ivon_weighs_passes_by_their_examples(estimator: str) -> None:
    """A pass twice is a pass with twice the examples."""

    def build() -> credo.IVON:
        return credo.IVON(network(), data_size=50, curvature={"decay": 0.9, "estimator": estimator})

    one, other = build(), build()
    fixed = one._sample()
    one._sample = other._sample = lambda: fixed  # type: ignore[method-assign]
    first, second = (lambda net: F.cross_entropy(net(X[:3]), Y[:3])), (lambda net: F.cross_entropy(net(X[3:]), Y[3:]))
    for loss, examples in ((first, 2), (second, 4)):
        one.gather(loss, examples=examples)
    for loss in (first, second, second):
        other.gather(loss)
    assert one.update().nll == pytest.approx(other.update().nll)
    same(one, other)


def test_passes_of_one_update_say_it_all_or_none() -> None:
    posterior = METHODS["ogn"]()
    posterior.gather(some, examples=5)
    with pytest.raises(ValueError, match="all of them or to none"):
        posterior.gather(some)
    assert posterior.steps == 0
    posterior.update()


# -- optimisers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vogn", "ogn", "kfac"])
@pytest.mark.parametrize("way", ["closure", "gather", "block"])
def test_optimisers_hand_it_on(name: str, way: str) -> None:
    one, other = METHODS[name](), METHODS[name]()
    optimizer = credo.optim.PosteriorOptimizer(one)
    for _ in range(2):
        if way == "closure":
            optimizer.step(lambda: weighted(one.model), weights=WEIGHTS)
        elif way == "gather":
            optimizer.gather(lambda: weighted(one.model), weights=WEIGHTS)
            optimizer.step()
        else:
            for _ in range(credo.optim._wanted(one)):
                with optimizer.sampled_params(train=True, weights=WEIGHTS) as net:
                    weighted(net).backward()
            optimizer.step()
        other.step(weighted, weights=WEIGHTS)
    same(one, other)


def test_an_optimiser_without_a_pass_has_nothing_to_count() -> None:
    optimizer = credo.optim.OGN(network(), data_size=50)
    optimizer.gather(lambda: some(optimizer.posterior.model))
    with pytest.raises(ValueError, match="give them with a closure"):
        optimizer.step(examples=3)
    optimizer.step()
