"""Adapters: the same outputs at first, every method over them, one draw for a sequence, merging, small files."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.models import LoRALayer

WORDS, LENGTH, WIDTH, ROWS = 30, 6, 16, 48


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


class Encoder(nn.Module):
    """A small text classifier: two blocks of attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.norm, self.classifier = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.classifier(self.norm(x).mean(1))
        return logits


def base() -> nn.Module:
    torch.manual_seed(0)
    return Encoder()


def adapted(**options: Any) -> nn.Module:
    return credo.lora(base(), **{"rank": 2, "alpha": 4.0, **options})


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(WORDS, (ROWS, LENGTH), generator=generator), torch.randint(3, (ROWS,), generator=generator)


X, Y = data()


def laplace(structure: str) -> Callable[[nn.Module], credo.Posterior]:
    def made(net: nn.Module) -> credo.Posterior:
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 1e-2)
        for _ in range(4):  # so that B is not zero, where A has no curvature
            optimizer.zero_grad()
            F.cross_entropy(net(X), Y).backward()
            optimizer.step()
        posterior = credo.Laplace(net, data_size=ROWS, structure=structure, random="all")
        return posterior.fit([(X[:24], Y[:24]), (X[24:], Y[24:])])

    return made


def stepped(posterior: credo.Posterior, steps: int = 4) -> credo.Posterior:
    posterior.train()
    for index in range(steps):
        rows = slice(12 * index, 12 * index + 12)
        posterior.step(lambda net, rows=rows: F.cross_entropy(net(X[rows]), Y[rows]))
    return posterior


def swag(net: nn.Module) -> credo.Posterior:
    posterior = credo.SWAG(net, data_size=ROWS, lr=0.05, rank=3)
    return credo.fit(posterior, [(X[:24], Y[:24]), (X[24:], Y[24:])], epochs=6)


METHODS: dict[str, Callable[[Callable[[], nn.Module]], credo.Posterior]] = {
    "map": lambda net: stepped(credo.MAP(net(), data_size=ROWS, lr=0.05)),
    "bbb": lambda net: stepped(credo.BBB(net(), data_size=ROWS, lr=0.05)),
    "ivon": lambda net: stepped(credo.IVON(net(), data_size=ROWS, lr=0.1)),
    "vogn": lambda net: stepped(credo.VOGN(net(), data_size=ROWS, lr=0.05)),
    "noisy-kfac": lambda net: stepped(credo.NoisyKFAC(net(), data_size=ROWS, lr=0.05)),
    "laplace diag": lambda net: laplace("diag")(net()),
    "laplace kron": lambda net: laplace("kron")(net()),
    "swag": lambda net: swag(net()),
    "low-rank-noise": lambda net: stepped(credo.LowRankNoise(net(), data_size=ROWS, lr=0.05)).fit([(X, Y)]),
    "ensemble": lambda net: stepped(
        credo.Ensemble([credo.MAP(net(), data_size=ROWS, lr=0.05, seed=s) for s in range(2)])
    ),
}


def predicted(posterior: credo.Posterior) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", credo.PredictiveWarning)  # the ensemble's members begin alike
        result = credo.predict(posterior, X, draws=4, seed=3)
    assert isinstance(result, credo.ClassPrediction)
    return result.probs


def test_the_outputs_are_those_of_the_base_at_first() -> None:
    net = adapted(target=["*query", "*value", "classifier"])
    assert torch.equal(net(X), base()(X))
    assert sum(isinstance(module, LoRALayer) for module in net.modules()) == 5


def test_only_adapters_are_trained_and_random() -> None:
    net = adapted(train="classifier.*")
    trained = [name for name, p in net.named_parameters() if p.requires_grad]
    assert [name for name in trained if "lora" not in name] == ["classifier.weight", "classifier.bias"]
    posterior = credo.BBB(net, data_size=ROWS, random=["*lora_a.weight"])
    assert list(posterior.draw()) == [
        f"blocks.{i}.{name}.lora_a.weight" for i in range(2) for name in ("query", "value")
    ]


def test_an_adapter_adds_the_product_of_its_factors() -> None:
    torch.manual_seed(2)
    net, plain = adapted(rank=3, alpha=6.0, target="blocks.0.key"), base()
    layer, x = net.get_submodule("blocks.0.key"), torch.randn(5, WIDTH)
    assert isinstance(layer, LoRALayer)
    nn.init.normal_(layer.lora_b.weight)
    old = plain.get_submodule("blocks.0.key")
    weight = old.weight + 2.0 * layer.lora_b.weight @ layer.lora_a.weight
    torch.testing.assert_close(layer(x), F.linear(x, weight, old.bias))
    torch.testing.assert_close(layer.weight, weight)


def test_the_first_values_come_from_the_seed_alone() -> None:
    nets = [base() for _ in range(3)]
    before = torch.get_rng_state()
    for net, seed in zip(nets, (0, 0, 1), strict=True):
        credo.lora(net, seed=seed)
    assert torch.equal(torch.get_rng_state(), before)
    first = [net.get_parameter("blocks.0.query.lora_a.weight") for net in nets]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_adapters_alone(method: str) -> None:
    posterior = METHODS[method](adapted)
    before = dict(base().named_parameters())
    for part in posterior.parts if isinstance(posterior, credo.Ensemble) else [posterior]:
        now = dict(part.model.named_parameters())
        assert all(p.any() for name, p in now.items() if name.endswith("lora_b.weight"))
        for name, parameter in now.items():
            assert "lora_" in name or torch.equal(parameter, before[name.replace(".base.", ".")]), name
    probs = predicted(posterior)
    assert torch.isfinite(probs).all()
    if posterior.is_random:
        assert {name for name in now if "lora_" in name} >= set(posterior.draw()) > set()


@pytest.mark.parametrize("method", METHODS)
def test_files_hold_adapters_alone_and_load_on_the_same_base(method: str, tmp_path: Path) -> None:
    posterior = METHODS[method](adapted)
    path = credo.save(posterior, tmp_path / "adapters.safetensors")
    names = load_file(path)
    assert not any(part in name for name in names for part in ("words", ".base.", "classifier", "norm"))
    loaded = credo.load(path, model=adapted(seed=9))
    assert torch.equal(predicted(loaded), predicted(posterior))


def test_a_mean_field_file_is_about_twice_the_adapters(tmp_path: Path) -> None:
    """Four bytes for each mean and each standard deviation, and the header."""
    net = credo.lora(Big(), rank=8)
    adapters = sum(p.numel() for p in net.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in net.parameters())
    assert whole > 20 * adapters
    path = credo.save(credo.BBB(net, data_size=ROWS), tmp_path / "p.safetensors")
    assert 8 * adapters <= path.stat().st_size <= 8 * adapters + 10_000


@pytest.mark.parametrize(("method", "megabytes"), [(credo.MAP, 0.33), (credo.BBB, 0.63), (credo.IVON, 0.93)])
def test_files_of_adapters_in_all_blocks_of_a_sentence_encoder(method: Any, megabytes: float, tmp_path: Path) -> None:
    """Rank 8 at queries and values of six blocks of width 384, as all-MiniLM-L6-v2 has them, and the classifier."""
    blocks = nn.ModuleList(nn.ModuleDict({name: nn.Linear(384, 384) for name in ("query", "value")}) for _ in range(6))
    net = nn.ModuleDict({"blocks": blocks, "classifier": nn.Linear(384, 4)})
    posterior = method(credo.lora(net, rank=8, target=["*query", "*value"], train="classifier.*"), data_size=ROWS)
    size = credo.save(posterior, tmp_path / "p.safetensors").stat().st_size
    assert size / 1e6 == pytest.approx(megabytes, abs=0.03)  # names are longer there


class Big(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.value(self.query(x))
        return out


def test_other_bases_and_other_frozen_parameters_are_errors(tmp_path: Path) -> None:
    path = credo.save(METHODS["bbb"](adapted), tmp_path / "p.safetensors")
    other = adapted()
    with torch.no_grad():
        other.get_parameter("words.weight")[0, 0] += 1.0
    with pytest.raises(credo.FileFormatError, match="adapters of another base network"):
        credo.load(path, model=other)
    with pytest.raises(credo.FileFormatError, match="other frozen parameters: classifier"):
        credo.load(path, model=adapted(train="classifier.*"))
    with pytest.raises(credo.FileFormatError, match="another architecture"):
        credo.load(path, model=base())
    with pytest.raises(credo.FileFormatError, match="network with adapters: pass model="):
        credo.load(path)


def test_what_is_trained_beside_adapters_is_in_the_file(tmp_path: Path) -> None:
    posterior = stepped(credo.IVON(adapted(train="classifier.*"), data_size=ROWS, lr=0.1, random=["*lora_*"]))
    assert not torch.equal(posterior.model.get_parameter("classifier.bias"), base().get_parameter("classifier.bias"))
    path = credo.save(posterior, tmp_path / "p.safetensors")
    loaded = credo.load(path, model=adapted(train="classifier.*"))
    assert torch.equal(predicted(loaded), predicted(posterior))


def test_members_with_bases_of_their_own_are_saved_whole(tmp_path: Path) -> None:
    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return credo.lora(Encoder(), rank=2)

    posterior = stepped(credo.Ensemble([credo.MAP(net(s), data_size=ROWS, seed=s) for s in range(2)]))
    path = credo.save(posterior, tmp_path / "p.safetensors")
    assert any("words" in name for name in load_file(path))
    assert torch.equal(predicted(credo.load(path, model=net(5))), predicted(posterior))


@pytest.mark.parametrize("method", ["bbb", "ivon", "vogn", "laplace kron", "swag", "low-rank-noise"])
def test_merging_gives_the_same_outputs(method: str) -> None:
    posterior = METHODS[method](adapted).eval()
    merged = credo.merge_lora(posterior.model)
    assert merged.state_dict().keys() == base().state_dict().keys()
    torch.testing.assert_close(merged(X), posterior.model(X))
    assert not torch.equal(merged(X), base()(X))
    with torch.no_grad(), posterior.sampled() as net:
        drawn, expected = credo.merge_lora(net), net(X)
    torch.testing.assert_close(drawn(X), expected)
    assert not torch.allclose(drawn(X), merged(X), atol=1e-6)
    assert any(isinstance(module, LoRALayer) for module in posterior.model.modules())


def test_one_draw_is_used_for_a_whole_sequence() -> None:
    """Equal tokens stay equal at all positions and rows: noise of each token would make them differ."""
    posterior = METHODS["bbb"](adapted).eval()
    with torch.no_grad(), posterior.sampled() as net:
        hidden = net.get_submodule("blocks.0")(net.get_submodule("words")(torch.full((3, LENGTH), 7)))
        again = net.get_submodule("blocks.0")(net.get_submodule("words")(torch.full((3, LENGTH), 7)))
    torch.testing.assert_close(hidden, hidden[:1, :1].expand_as(hidden))
    assert torch.equal(hidden, again)


def test_a_layer_that_is_used_twice_gets_one_adapter() -> None:
    layer = nn.Linear(4, 4)
    net = credo.lora(nn.Sequential(layer, nn.ReLU(), layer), rank=1, target="*")
    assert net[0] is net[2]
    assert len([p for p in net.parameters() if p.requires_grad]) == 2


def test_modules_that_read_weights_themselves_see_the_adapter() -> None:
    """In eval mode `nn.TransformerEncoderLayer` reads `linear1.weight` instead of calling the layer."""
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    credo.lora(net, rank=2, target=["linear*", "self_attn.out_proj"])
    for name, p in net.named_parameters():
        if "lora_b" in name:
            nn.init.normal_(p)
    x = torch.randn(3, 5, 8)
    expected = net(x)  # in train mode layers are called
    net.eval()
    with torch.no_grad():
        torch.testing.assert_close(net(x), expected)
        torch.testing.assert_close(credo.merge_lora(net)(x), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "*querry"}, "querry"),
        ({"target": "words"}, "words"),
        ({"rank": 0}, "rank"),
        ({"alpha": -1.0}, "alpha=-1.0 must be a positive number"),
        ({"train": "nothing"}, "nothing"),
        ({"train": "blocks.0.query.bias"}, "whose layer gets an adapter"),
    ],
)
def test_wrong_arguments_change_nothing(options: dict[str, Any], message: str) -> None:
    net = base()
    with pytest.raises(ValueError, match=message):
        credo.lora(net, **options)
    assert all(p.requires_grad for p in net.parameters())
    assert net.state_dict().keys() == base().state_dict().keys()


def test_adapters_are_not_put_on_adapters() -> None:
    with pytest.raises(ValueError, match="has adapters already"):
        credo.lora(adapted())
    with pytest.raises(ValueError, match="has no adapters"):
        credo.merge_lora(base())


# -- Hugging Face ------------------------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24, "vocab_size": WORDS}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    net: nn.Module = transformers.GPT2LMHeadModel(config)
    return net.eval()


def test_transposed_layers_of_hugging_face() -> None:
    plain, net = gpt2(), credo.lora(gpt2(), rank=2, target="*c_attn")
    assert torch.equal(net(X).logits, plain(X).logits)
    for name, p in net.named_parameters():
        if "lora_b" in name:
            nn.init.normal_(p)
    assert not torch.allclose(net(X).logits, plain(X).logits, atol=1e-3)
    torch.testing.assert_close(credo.merge_lora(net)(X).logits, net(X).logits, rtol=1e-4, atol=1e-5)


def test_generation_with_a_cache_uses_one_draw() -> None:
    posterior = credo.BBB(credo.lora(gpt2(), rank=2, target="*c_attn"), data_size=10, init=0.5).eval()
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    texts = []
    for _ in range(4):
        with torch.no_grad(), posterior.sampled() as net:
            cached, whole = (net.generate(X[:2], use_cache=use, **options) for use in (True, False))
        assert torch.equal(cached, whole)
        texts.append(cached)
    assert any(not torch.equal(texts[0], text) for text in texts[1:])


def test_adapters_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def net() -> nn.Module:
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"], lora_dropout=0.0)
        made: nn.Module = peft.get_peft_model(base(), config)
        return made

    posterior = stepped(credo.IVON(net(), data_size=ROWS, lr=0.1))
    path = credo.save(posterior, tmp_path / "p.safetensors")
    assert all("lora_" in name for name in load_file(path) if name.startswith("model."))
    assert torch.equal(predicted(credo.load(path, model=net())), predicted(posterior))
