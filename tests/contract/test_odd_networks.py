"""Networks that break libraries which swap layers: every method trains them as they are."""

import math
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import credo
from credo.core.errors import UnsupportedModelError
from credo.core.posterior import Posterior
from credo.methods import BBB, IVON, MAP


class Sequence(nn.Module):
    """Something over [batch, time, 4] between two ordinary layers."""

    def __init__(self, body: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.into, self.body, self.head = nn.Linear(4, 4), body, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        out = self.body(x, x, x) if isinstance(self.body, nn.MultiheadAttention) else self.body(x)
        return self.head((out[0] if isinstance(out, tuple) else out).mean(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.mix, self.mix2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.out = nn.Linear(4, 9, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.mix2(self.mix(self.embed(tokens)).tanh()))[:, -1]


class TwicePlaced(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.head, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()) * self.scale)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same", padding_mode="reflect"),
        nn.InstanceNorm2d(4, track_running_stats=True),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, stride=2, groups=4, bias=False),
        nn.GroupNorm(2, 4),
        nn.ConvTranspose2d(4, 2, 2),
        nn.Flatten(),
        nn.Linear(18, 3),
    )


def parametrized(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3))


FLAT, TIME, TOKENS, IMAGE = "flat", "time", "tokens", "image"
INPUTS = {FLAT: (6, 4), TIME: (6, 5, 4), IMAGE: (6, 2, 5, 5)}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lstm": (lambda: Sequence(nn.LSTM(4, 4, num_layers=2, batch_first=True)), TIME),
    "bidirectional gru": (lambda: Sequence(nn.GRU(4, 3, bidirectional=True, batch_first=True), 6), TIME),
    "attention": (lambda: Sequence(nn.MultiheadAttention(4, 2, batch_first=True)), TIME),
    "transformer": (lambda: Sequence(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)), TIME),
    "tied embedding": (Tied, TOKENS),
    "layer placed twice": (TwicePlaced, FLAT),
    "weight norm": (lambda: parametrized(parametrizations.weight_norm), FLAT),
    "spectral norm": (lambda: parametrized(parametrizations.spectral_norm), FLAT),
    "orthogonal": (lambda: parametrized(parametrizations.orthogonal), FLAT),
    "images": (images, IMAGE),
}
if hasattr(nn.utils, "weight_norm"):  # deprecated: may be gone one day
    NETWORKS["old weight norm"] = (old_weight_norm, FLAT)


def inputs_for(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (6,), generator=generator)
    if kind == TOKENS:
        return torch.randint(9, (6, 5), generator=generator), y
    return torch.randn(INPUTS[kind], generator=generator), y


@pytest.mark.part(100)
@pytest.mark.parametrize("name", NETWORKS)
def test_two_steps_move_every_parameter_and_nothing_else_is_different(build, name: str) -> None:
    make, kind = NETWORKS[name]
    x, y = inputs_for(kind)

    def network(index: int) -> nn.Module:
        torch.manual_seed(index)
        return make()

    try:
        posterior = build(network)
    except UnsupportedModelError as error:
        if "LastLayer: the weights of 'out' in Tied are shared with another layer" not in str(error):
            raise
        return
    model = posterior.model
    names, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for _ in range(2):
        terms = posterior.step(lambda net: F.cross_entropy(net(x), y))
        assert math.isfinite(terms.loss)
    assert (list(model.state_dict()), [type(m) for m in model.modules()]) == (names, kinds)
    assert [key for key, p in model.named_parameters() if torch.equal(p, before[key])] == []

    def ordinary() -> Tensor:
        model.eval()
        return model(x)

    output = ordinary()
    for _ in range(2):
        posterior(x)
    # No draw is left behind, also in the weights a layer keeps a copy of. Convolutions of torch 2.6 round differently
    # from call to call.
    torch.testing.assert_close(ordinary(), output, rtol=0, atol=1e-6)


def test_a_recurrent_layer_reads_its_own_weights_again_after_a_pass(build_weights) -> None:
    def network(index: int) -> nn.Module:
        torch.manual_seed(index)
        return Sequence(nn.LSTM(4, 4, batch_first=True))

    posterior = build_weights(network)
    posterior(inputs_for(TIME)[0])
    lstm = posterior.model.body
    assert all(a is b for a, b in zip(lstm._flat_weights, lstm._parameters.values(), strict=True))


def test_problems_of_a_network_are_reported_together() -> None:
    network = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2, dtype=torch.complex64))
    with pytest.raises(UnsupportedModelError) as error:
        MAP(network, data_size=5)
    assert all(words in str(error.value) for words in ("0.weight is lazy", "1.weight is torch.complex64", "1.bias"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compiler
def test_a_compiled_network_is_unwrapped_and_compiled_in_steps() -> None:
    compiled = torch.compile(nn.Linear(3, 2), backend="eager")
    posterior = BBB(compiled, data_size=5)
    assert posterior.model is compiled._orig_mod
    assert [*posterior.mean()] == ["weight", "bias"]
    assert posterior.guard.compiles
    with pytest.warns(credo.CredoWarning, match="VOGN looks into single layers"):
        posterior = credo.VOGN(model=compiled, data_size=5)
    assert posterior.model is compiled._orig_mod
    assert not posterior.guard.compiles


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_layers_with_sparse_gradients_are_refused(build, layer: type[nn.Module]) -> None:
    def network(index: int) -> nn.Module:
        return nn.Sequential(layer(9, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 3))

    with pytest.raises(UnsupportedModelError, match=r"0\.weight has sparse gradients: .* sparse=False"):
        build(network)


def test_a_frozen_sparse_embedding_is_fine(build) -> None:
    def network(index: int) -> nn.Module:
        torch.manual_seed(index)
        table = nn.Embedding(9, 4, sparse=True)
        table.weight.requires_grad_(False)
        return nn.Sequential(table, nn.Flatten(), nn.Linear(20, 4), nn.Linear(4, 3))

    x, y = inputs_for(TOKENS)
    assert math.isfinite(build(network).step(lambda net: F.cross_entropy(net(x), y)).loss)


@pytest.mark.parametrize("method", [MAP, BBB, partial(BBB, noise="lrt"), IVON])
def test_sparse_gradients_that_only_a_pass_shows_change_nothing(method: Callable[..., Posterior]) -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Parameter(torch.randn(9, 4)), nn.Linear(4, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(F.embedding(tokens, self.table, sparse=True).mean(1))

    x, y = inputs_for(TOKENS)
    posterior = method(Looked(), data_size=20)
    before = {name: p.detach().clone() for name, p in posterior.named_parameters()}
    with pytest.raises(UnsupportedModelError, match=r"gradient of (model\.)?table is sparse .* sparse=False"):
        posterior.step(lambda net: F.cross_entropy(net(x), y))
    assert all(torch.equal(p, before[name]) for name, p in posterior.named_parameters())
