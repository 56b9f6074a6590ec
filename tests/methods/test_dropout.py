"""MC-dropout: rates, expectations, and what it leaves alone."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.errors import UnsupportedModelError
from credo.methods import MAP, MCDropout


class Tap(nn.Module):
    """Keeps what went through."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return x


def passes(posterior: MCDropout, x: Tensor, count: int) -> Tensor:
    with torch.no_grad():
        return torch.stack([posterior(x) for _ in range(count)])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_own_dropout_has_its_rate_and_scale_in_either_mode(training: bool, inplace: bool, rate: float) -> None:
    network = nn.Sequential(nn.Linear(1, 1), nn.Dropout(rate, inplace=inplace))
    nn.init.constant_(network[0].weight, 1.0)
    nn.init.constant_(network[0].bias, 0.0)
    out = MCDropout(network, data_size=1).train(training)(torch.ones(20_000, 1))
    # 20 000 independent masks, five standard errors: false alarms 6e-7.
    assert (out == 0).double().mean().item() == pytest.approx(rate, abs=5 * (rate * (1 - rate) / 20_000) ** 0.5)
    torch.testing.assert_close(out[out != 0].unique(), torch.tensor([1 / (1 - rate)]))


@pytest.mark.parametrize(
    ("layer", "shape", "together"),
    [
        (nn.Dropout1d, (40, 50, 4), (2,)),
        (nn.Dropout2d, (40, 50, 3, 3), (2, 3)),
        (nn.Dropout3d, (40, 50, 2, 2, 2), (2, 3, 4)),
    ],
)
def test_channel_dropout_drops_whole_channels(layer: type[nn.Module], shape: tuple[int, ...], together) -> None:
    network = nn.Sequential(Tap(), layer(0.3))
    network.scale = nn.Parameter(torch.ones(()))
    out = MCDropout(network, data_size=1)(torch.ones(shape))
    assert torch.equal(out.amin(together), out.amax(together))
    # 2 000 channels, five standard errors of 0.3: false alarms 6e-7.
    assert (out.amax(together) == 0).double().mean().item() == pytest.approx(0.3, abs=5 * (0.21 / 2000) ** 0.5)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Tap(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def test_a_given_rate_acts_before_every_layer_but_the_first() -> None:
    net, x = network(), torch.randn(5, 4, dtype=torch.float64)
    hidden = net[2](net[1](x)).detach()
    outputs = passes(MCDropout(net, data_size=1, rate=0.4), x, 3000)
    assert torch.equal(net[0].seen, x)
    # The last layer is linear in the mask, so the mean pass is the deterministic one, with variance
    # Σ (w·h)² · rate/(1−rate). 15 outputs by mean and variance at 5.5 standard errors: false alarms about 1e-6
    # (the variance's own error for a sum of six two-point variables is below that of a Gaussian).
    variance = (net[3].weight * hidden.unsqueeze(1)).square().sum(2).detach() * 0.4 / 0.6
    assert ((outputs.mean(0) - net(x)) / (variance / 3000).sqrt()).abs().max() < 5.5
    assert (outputs.var(0) / variance - 1).abs().max() < 5.5 * (2 / 3000) ** 0.5


def test_masks_differ_between_examples_and_passes() -> None:
    x = torch.ones(8, 4, dtype=torch.float64)
    out = passes(MCDropout(network(), data_size=1, rate=0.5), x, 4)
    assert len(out.reshape(-1, 3).unique(dim=0)) > 8


def test_the_network_itself_stays_deterministic_and_unchanged() -> None:
    net, x = network(), torch.randn(5, 4, dtype=torch.float64)
    posterior = MCDropout(net, data_size=1, rate=0.4)
    posterior(x)
    assert torch.equal(net(x), net(x))
    assert [type(m) for m in net] == [Tap, nn.Linear, nn.Tanh, nn.Linear]
    with posterior.sampled() as noisy:
        assert noisy is not net  # other threads may use it meanwhile
        assert not torch.equal(noisy(x), noisy(x))
    assert torch.equal(net(x), net(x))


def test_own_rates_are_back_after_a_pass_a_step_and_an_error() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.3), nn.Linear(4, 2), nn.Dropout(0.1))
    posterior = MCDropout(net, data_size=4)
    x = torch.ones(3, 2)
    posterior(x)
    posterior.step(lambda n: n(x).square().mean())
    with pytest.raises(RuntimeError, match="shapes"):
        posterior(torch.ones(3, 5))
    assert (net[1].p, net[3].p) == (0.3, 0.1)
    assert not any(m._forward_hooks for m in net)


def test_a_step_is_a_map_step_under_masks() -> None:
    x, y = torch.randn(16, 4, dtype=torch.float64), torch.randint(3, (16,))
    options = {"data_size": 50, "prior": 0.5, "optimizer": "sgd", "lr": 0.1}
    dropped, point = MCDropout(network(), rate=1e-12, **options), MAP(network(), **options)
    for _ in range(3):
        a, b = (p.step(lambda net: F.cross_entropy(net(x), y)) for p in (dropped, point))
        assert a.loss == pytest.approx(b.loss, rel=1e-9)
    seen = {
        MCDropout(network(), rate=0.5, seed=s, **options).step(lambda n: F.cross_entropy(n(x), y)).nll for s in range(3)
    }
    assert len(seen) == 3


def test_transformer_layers_do_not_take_a_fast_path_past_the_masks() -> None:
    x = torch.randn(2, 3, 4)
    for own, options in ((0.5, {}), (0.0, {"rate": 0.5})):
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=own, batch_first=True)
        layer.self_attn.dropout = 0.0
        posterior = MCDropout(layer, data_size=1, **options).eval()
        with torch.no_grad():
            assert not torch.equal(posterior(x), posterior(x))


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, float("nan")])
def test_a_rate_lies_between_zero_and_one(rate: float) -> None:
    with pytest.raises(ValueError, match="rate="):
        MCDropout(network(), data_size=1, rate=rate)


def test_networks_where_dropout_has_nowhere_to_act_are_refused() -> None:
    assert MCDropout(network(), data_size=1).config()["rate"] == 0.1, "a network without dropout has a default rate"
    with pytest.raises(UnsupportedModelError, match="no dropout layer with a positive rate"):
        MCDropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), data_size=1)
    with pytest.raises(UnsupportedModelError, match="no Linear or Conv layer behind"):
        MCDropout(nn.Linear(2, 2), data_size=1, rate=0.1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_alpha_dropout_does_what_torchs_does(training: bool, rate: float) -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.AlphaDropout(rate))
    nn.init.constant_(net[0].weight, 1.0)
    nn.init.constant_(net[0].bias, 0.0)
    posterior = MCDropout(net, data_size=1).train(training)
    out = posterior(torch.full((20_000, 1), 0.7)).detach()
    torch.manual_seed(0)
    expected = F.alpha_dropout(torch.full((20_000, 1), 0.7), rate, training=True)
    torch.testing.assert_close(out.unique(), expected.unique())  # of what is dropped and of what is kept
    # 20 000 independent masks, five standard errors: false alarms 6e-7.
    share = (out == out.min()).double().mean().item()
    assert share == pytest.approx(rate, abs=5 * (rate * (1 - rate) / 20_000) ** 0.5)
    assert net[1].p == rate


def test_feature_alpha_dropout_drops_whole_channels() -> None:
    net = nn.Sequential(Tap(), nn.FeatureAlphaDropout(0.3))
    net.scale = nn.Parameter(torch.ones(()))
    out = MCDropout(net, data_size=1)(torch.ones(40, 50, 3, 3))
    assert torch.equal(out.amin((2, 3)), out.amax((2, 3)))
    # 2 000 channels, five standard errors of 0.3: false alarms 6e-7.
    assert (out[:, :, 0, 0] == out.min()).double().mean().item() == pytest.approx(0.3, abs=5 * (0.21 / 2000) ** 0.5)


class Mine(nn.Dropout):
    pass


class Wrapped(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.drop, self.out = body, nn.Dropout(0.2), nn.Linear(8, 3)


UNREACHED = {
    "attention": (nn.MultiheadAttention(8, 2, dropout=0.5), r"body \(MultiheadAttention\).*set body\.dropout = 0\.0"),
    "lstm": (nn.LSTM(8, 8, num_layers=2, dropout=0.5), r"body \(LSTM\) drops inside, dropout=0\.5: set body\.dropout"),
    "gru": (nn.GRU(8, 8, num_layers=2, dropout=0.1), r"body \(GRU\).*set body\.dropout = 0\.0"),
    "transformer": (nn.TransformerEncoderLayer(8, 2, 8), r"body\.self_attn \(MultiheadAttention\).*dropout=0\.1"),
    "subclass": (Mine(0.3), r"body \(Mine\) is not one of torch's own"),
}


@pytest.mark.parametrize("case", UNREACHED)
def test_dropout_that_would_be_off_in_prediction_is_refused_with_the_cure(case: str) -> None:
    body, words = UNREACHED[case]
    with pytest.raises(UnsupportedModelError, match=rf"on in training and off in prediction: {words}"):
        MCDropout(Wrapped(body), data_size=1)


@pytest.mark.parametrize("training", [True, False])
def test_a_given_rate_is_in_the_place_of_the_networks_own(training: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3), nn.AlphaDropout(0.5))
    x, before = torch.randn(8, 4), torch.get_rng_state()
    posterior = MCDropout(net, data_size=8, rate=1e-9).train(training)
    posterior.step(lambda n: n(x).square().mean())
    torch.testing.assert_close(posterior(x), net.eval()(x))
    assert torch.equal(torch.get_rng_state(), before)
    assert (net[1].p, net[3].p) == (0.5, 0.5)


def test_the_cure_works_and_the_global_generator_stays_where_it_is() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3, batch_first=True)
    encoder.self_attn.dropout = 0.0
    posterior = MCDropout(nn.Sequential(encoder, nn.Flatten(), nn.Linear(24, 3)), data_size=8).train()
    x, y = torch.randn(8, 3, 8), torch.randint(3, (8,))
    before = torch.get_rng_state()
    posterior.step(lambda net: F.cross_entropy(net(x), y))
    assert torch.equal(torch.get_rng_state(), before)
    assert float(credo.predict(posterior, x, draws=20).epistemic.min()) > 1e-4


def test_layers_that_do_not_drop_are_no_problem() -> None:
    MCDropout(Wrapped(nn.MultiheadAttention(8, 2)), data_size=1)
    with pytest.warns(UserWarning, match="num_layers greater than 1"):
        single = nn.LSTM(8, 8, dropout=0.5)  # without effect, as torch says
    MCDropout(Wrapped(single), data_size=1)


def test_by_default_it_acts_behind_a_recurrent_layer_too() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    posterior, x = MCDropout(Last(), data_size=5, rate=0.5), torch.randn(5, 6, 2)
    assert not torch.equal(posterior(x), posterior(x))
