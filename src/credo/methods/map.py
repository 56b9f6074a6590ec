"""MAP: one best set of weights, by any torch optimiser.

loss = mean NLL − log p(w)/data_size. Without a prior it is maximum likelihood, the deterministic network that every
other method is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from credo.core.arguments import Renamed
from credo.core.description import Description
from credo.core.likelihood import Likelihood
from credo.core.network.flat_layout import Layout
from credo.core.network.selection import Random, all_names, random_names
from credo.core.optimizer_step import GradientPosterior, OptimizerStep, trainable
from credo.core.optimizers import RENAMED_OPTIMIZER, Optimizer, OptimizerFunction, Rates
from credo.core.prior import Prior, Value, make_prior, one_prior


class MAP(GradientPosterior):
    """Point estimate; its draws are all the same network.

    Args:
        model: The network.
        data_size: Number of training examples, which log p(w) is divided by.
        prior: An object, its description, or a Gaussian's standard deviation; None: maximum likelihood.
        prior_precision: Precision of a Gaussian prior about zero instead, also by parameter name globs.
        random: Which parameters the prior acts on, as in `random_names`.
        optimizer: An `Optimizer`, a mapping such as `{"name": "sgd", "momentum": 0.9, "clip_norm": 1.0}`, a name of
            `OPTIMIZERS`, or a function from parameters to an optimiser.
        lr: Learning rate of an optimiser given by name, or rates by parameter name globs.
        likelihood: What the outputs mean: an object, its description or name; None: categorical.
        seed: Start of the posterior's own random numbers.
    """

    needs_training: ClassVar[bool] = False
    can_defer_checks = True
    tunable: ClassVar[Mapping[str, tuple[float, float]]] = {"lr": (3e-4, 3e-2), "prior": (0.1, 10.0)}

    _not_in_config = ("prior_precision",)
    _renamed_arguments: ClassVar[Renamed] = RENAMED_OPTIMIZER

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        prior: Prior | Mapping[str, Any] | float | None = None,
        prior_precision: Value | None = None,
        random: Random = "all",
        optimizer: Optimizer | Mapping[str, Any] | OptimizerFunction | str = Optimizer(),
        lr: Rates = 3e-3,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        self.prior = None
        prior = one_prior(prior, prior_precision)
        if prior is not None:
            parameters = dict(model.named_parameters())
            chosen = {name: parameters[name] for name in random_names(model, random)}
            self.layout = Layout(chosen, known=all_names(model))
            self.prior = make_prior(prior).bind(self.layout, data_size=self.data_size, device=self.device)
            self.arguments["random"] = list(self.layout.names)
        self.optimizer_step = OptimizerStep(trainable(self), optimizer, lr)

    @property
    def is_random(self) -> bool:
        """False: all draws are the same network."""
        return False

    def draw(self) -> dict[str, Tensor]:
        """`{}`: the point estimate."""
        return {}

    def keep_(self, masks: Mapping[str, Tensor]) -> None:
        """Prune permanently: gradients and optimiser leave pruned weights at zero. The prior still counts them.

        Args:
            masks: For each parameter which weights stay, by name.
        """
        self.optimizer_step.keep_({f"model.{name}": mask for name, mask in self._keep(masks).items()})

    def describe(self) -> Description:
        """A prior, if there is one, and nothing else."""
        if self.prior is None:
            return Description(has_prior=False)
        return Description(prior=self.prior, layout=self.layout)
