"""Weights and nodes of networks: the published table, and what a summary says."""

import json
import re

import pytest
import torch
from torch import nn

import credo
from credo.models import build_model, load_named_weights, model_names, summary
from reproductions.node_bnn.rows import SIZES


def of(name: str) -> credo.models.Summary:
    with torch.device("meta"):
        return summary(build_model(name))


def shown(weights: int) -> str:
    """As the table prints it."""
    return f"{weights / 1e6:.0f}M" if weights >= 1e6 else f"{weights / 1e3:.0f}K"


@pytest.mark.parametrize("title", [title for title in SIZES if title != "LeNet"])
def test_the_published_table(title: str) -> None:
    name, layers, weights, nodes, ratio = SIZES[title]
    found = of(name)
    assert (shown(found.weights), found.nodes) == (weights, nodes)
    assert found.ratio == pytest.approx(ratio, abs=51), "printed in hundreds"
    # The table names networks by their depth: shortcuts with weights do not count there, nor WideResNet's linear layer.
    shortcuts = sum("downsample" in layer.path or "shortcut" in layer.path for layer in found.layers)
    assert len(found.layers) - (shortcuts if title == "ResNet50" else 0) == (29 if "Wide" in title else layers)


def test_lenets_row_counts_otherwise() -> None:
    """42K are its linear layers and 23 its feature maps; by the count of the other rows it has more of both."""
    plain = nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5), nn.Linear(256, 120), nn.Linear(120, 84), nn.Linear(84, 10)
    )
    found = summary(plain)
    linear = sum(layer.weights for layer in found.layers if layer.kind == "Linear")
    maps = found.layers[0].inputs + sum(layer.outputs for layer in found.layers if layer.kind == "Conv2d")
    assert (len(found.layers), shown(linear), maps, round(linear / maps, -2)) == SIZES["LeNet"][1:]
    assert (shown(found.weights), found.nodes) == ("44K", 467)
    assert of("lenet5").nodes == 1 + 6 + 400 + 120 + 84


def test_exact_numbers_of_parameters() -> None:
    """Those of torchvision's networks, and of the authors' wide ResNet with its shortcuts."""
    assert of("resnet50").weights == 25_557_032
    assert of("alexnet-imagenet").weights == 61_100_840
    assert of("vgg16-large").weights == 138_357_544
    assert of("wrn-28-10").weights == 36_479_194


def test_what_a_summary_says() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Conv1d(8, 2, 3, groups=2))
    found = summary(model)
    assert (found.name, found.weights, found.nodes) == ("Sequential", 30 + 12 + 26, 12)
    assert found.ratio == 68 / 12
    assert [(layer.path, layer.inputs, layer.outputs) for layer in found.layers] == [("0", 4, 6), ("2", 8, 2)]
    assert "2 layers, 68 weights, 12 nodes, 6 weights per node" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["layers"][1]["kind"] == "Conv1d"
    assert found.to_dict()["others"] == [{"kind": "BatchNorm1d", "count": 1, "weights": 12}]
    assert re.search(r"^others +1 BatchNorm1d +12 +–$", str(found), flags=re.MULTILINE)
    none = summary(nn.BatchNorm1d(3))
    assert (none.nodes, none.to_dict()["ratio"]) == (0, None)
    assert "weights per node" not in str(none)
    with pytest.raises(ValueError, match="needs a network"):
        summary("resnet50")  # type: ignore[arg-type]


class Tied(nn.Module):
    """An embedding with the weight of the last layer, attention, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last, self.scale = nn.Embedding(7, 4), nn.Linear(4, 7), nn.Parameter(torch.ones(3))
        self.embedding.weight = self.last.weight
        self.look = nn.MultiheadAttention(4, 2)


def test_every_weight_is_in_one_row() -> None:
    found = summary(Tied())
    # The projections of attention before the last one are no layers of their own.
    assert [(each.kind, each.weights) for each in found.others] == [("Tied", 3), ("MultiheadAttention", 48 + 12)]
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    shared[1].weight = shared[0].weight
    for each in (found, of("mlp"), of("resnet20"), of("wrn-28-10"), summary(shared)):
        assert sum(row.weights for row in (*each.layers, *each.others)) == each.weights


@pytest.mark.parametrize("name", model_names())
def test_nodes_are_those_of_a_node_based_bnn(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name)
    nodes = credo.methods.node.node.node_layers(model, credo.Nodes())
    assert max(node.span.stop for node in nodes.values()) == summary(model).nodes


def test_weights_by_name_fill_a_resnet50(tmp_path) -> None:
    options = {"inputs": (3, 32, 32), "width": 4, "classes": 3}
    source, model = build_model("resnet50", **options, seed=0), build_model("resnet50", **options, seed=1)
    state = {name: tensor for name, tensor in source.state_dict().items() if not name.startswith("normalize.")}
    assert {"layer1.0.downsample.0.weight", "layer4.2.bn3.running_var", "fc.bias"} <= set(state), "torchvision's names"
    torch.save(state, tmp_path / "resnet50.pth")
    load_named_weights(model, tmp_path / "resnet50.pth")
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(model.eval()(x), source.eval()(x))
    torch.save({**state, "fc.bias": torch.zeros(4)}, tmp_path / "other.pth")
    with pytest.raises(credo.FileFormatError, match=r"as many classes\?\n  fc.bias: \(4,\) in the file, \(3,\)"):
        load_named_weights(model, tmp_path / "other.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(credo.FileFormatError, match="no state_dict"):
        load_named_weights(model, tmp_path / "list.pth")
