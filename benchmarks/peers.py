"""Copies of our networks in the layers of other libraries, trained and used as their READMEs say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.methods import Step, descent_step
from benchmarks.networks import DATA_SIZE

Replace = Callable[[nn.Module], nn.Module | None]


@dataclass(frozen=True)
class Peer:
    """A library: its name for pip, how it makes a network Bayesian, and its loss with one draw of the weights.

    Losses are scaled as the library's own examples scale them, right or wrong: this is about their cost.
    """

    distribution: str
    converted: Callable[[nn.Module], nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    own_step: Callable[[nn.Module], Step] | None = None
    own_predictor: Callable[[nn.Module, int], Callable[[Tensor], Tensor]] | None = None

    def version(self) -> str | None:
        """The installed version; None if there is none."""
        return installed(self.distribution)

    def step(self, net: nn.Module) -> Step:
        """One draw, cross-entropy and KL, backward, Adam; an optimiser's own step where the library is one."""
        if self.own_step is not None:
            return self.own_step(net)
        return descent_step(self.converted(net), self.loss)

    def predictor(self, net: nn.Module, draws: int) -> Callable[[Tensor], Tensor]:
        """Class probabilities averaged over a plain loop of `draws` passes."""
        if self.own_predictor is not None:
            return self.own_predictor(net, draws)
        converted = self.converted(net).eval()

        @torch.no_grad()
        def predict(x: Tensor) -> Tensor:
            return torch.stack([F.softmax(converted(x), dim=-1) for _ in range(draws)]).mean(0)

        return predict


def installed(distribution: str) -> str | None:
    """The version of a library by its name for pip; None if it is not there."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def replace_layers(module: nn.Module, replace: Replace) -> nn.Module:
    """The network with every submodule for which `replace` gives another one replaced by it, in place."""
    for name, child in module.named_children():
        other = replace(child)
        if other is None:
            replace_layers(child, replace)
        else:
            setattr(module, name, other)
    return module


# -- bayesian-torch: converts networks itself ----------------------------------------------------------------


def _bayesian_torch_twin(net: nn.Module, kind: str) -> nn.Module:
    options = {
        "prior_mu": 0.0,
        "prior_sigma": 1.0,
        "posterior_mu_init": 0.0,
        "posterior_rho_init": -3.0,
        "type": kind,
        "moped_enable": False,
        "moped_delta": 0.5,
    }
    import_module("bayesian_torch.models.dnn_to_bnn").dnn_to_bnn(net, options)
    return net


def _bayesian_torch_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output = net(x)
    kl: Tensor = import_module("bayesian_torch.models.dnn_to_bnn").get_kl_loss(net)
    return F.cross_entropy(output, y) + kl / len(x)


# -- BLiTZ ---------------------------------------------------------------------------------------------------


class _Wrapped(nn.Module):
    """BLiTZ adds methods to the class of a network; it must not be torch's own `nn.Sequential`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output


def _blitz_layer(layer: nn.Module) -> nn.Module | None:
    layers = import_module("blitz.modules")
    new: nn.Module | None = None
    if type(layer) is nn.Linear:
        new = layers.BayesianLinear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    if type(layer) is nn.Conv2d:
        new = layers.BayesianConv2d(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            groups=layer.groups,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            bias=layer.bias is not None,
        )
    return new


def _blitz_twin(net: nn.Module) -> nn.Module:
    estimator = import_module("blitz.utils").variational_estimator
    converted: nn.Module = estimator(type("BlitzNet", (_Wrapped,), {}))(replace_layers(net, _blitz_layer))
    return converted


def _blitz_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    elbo: Callable[..., Tensor] = net.sample_elbo  # type: ignore[assignment]
    return elbo(inputs=x, labels=y, criterion=F.cross_entropy, sample_nbr=1, complexity_cost_weight=1 / DATA_SIZE)


# -- torchbnn ------------------------------------------------------------------------------------------------


def _torchbnn_layer(layer: nn.Module) -> nn.Module | None:
    layers = import_module("torchbnn")
    new: nn.Module | None = None
    prior = {"prior_mu": 0.0, "prior_sigma": 0.1}
    if type(layer) is nn.Linear:
        size = {"in_features": layer.in_features, "out_features": layer.out_features}
        new = layers.BayesLinear(**prior, **size, bias=layer.bias is not None)
    if type(layer) is nn.Conv2d:
        new = layers.BayesConv2d(
            **prior,
            in_channels=layer.in_channels,
            out_channels=layer.out_channels,
            kernel_size=layer.kernel_size,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            groups=layer.groups,
            bias=layer.bias is not None,
        )
    return new


def _torchbnn_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    kl: Tensor = import_module("torchbnn").BKLLoss(reduction="mean", last_layer_only=False)(net)
    return F.cross_entropy(net(x), y) + 0.01 * kl


# -- ivon-opt: an optimiser ----------------------------------------------------------------------------------


def _ivon(net: nn.Module) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = import_module("ivon").IVON(net.parameters(), lr=0.1, ess=DATA_SIZE)
    return made


def _ivon_step(net: nn.Module) -> Step:
    optimizer = _ivon(net)

    def step(x: Tensor, y: Tensor) -> None:
        with optimizer.sampled_params(train=True):  # type: ignore[attr-defined]
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def _ivon_predictor(net: nn.Module, draws: int) -> Callable[[Tensor], Tensor]:
    optimizer = _ivon(net.eval())

    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        total = torch.zeros(())
        for _ in range(draws):
            with optimizer.sampled_params():  # type: ignore[attr-defined]
                total = total + F.softmax(net(x), dim=-1)
        return total / draws

    return predict


def _unchanged(net: nn.Module) -> nn.Module:
    return net


def _no_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    raise NotImplementedError("ivon-opt has no loss of its own")


PEERS = {
    "ivon-opt": Peer("ivon-opt", _unchanged, _no_loss, _ivon_step, _ivon_predictor),
    "bayesian-torch": Peer(
        "bayesian-torch", partial(_bayesian_torch_twin, kind="Reparameterization"), _bayesian_torch_loss
    ),
    "bayesian-torch-flipout": Peer(
        "bayesian-torch", partial(_bayesian_torch_twin, kind="Flipout"), _bayesian_torch_loss
    ),
    "blitz": Peer("blitz-bayesian-pytorch", _blitz_twin, _blitz_loss),
    "torchbnn": Peer("torchbnn", lambda net: replace_layers(net, _torchbnn_layer), _torchbnn_loss),
}
