"""Shrinkage: weights are pulled back to where they started, each with a learned strength (Chen et al., 2019)."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from wheretolearn.masks.base import GradientMask
from wheretolearn.masks.initial import Initialise, constant, raw_parameters
from wheretolearn.masks.selection import Select, selected_names, trainable_shapes

LARGEST = 30.0  # of |log lambda|: beyond it nothing changes in single precision, and exp could overflow


class ShrinkageMask(GradientMask):
    """The inner loss gains sum_i lambda_i / 2 (phi_i - theta_i)^2, with lambda = exp(raw).

    A plain gradient step of rate alpha on that term diverges where alpha * lambda > 2, so the step is proximal
    (implicit in the new term), which is stable for every lambda and nearly the plain one where alpha * lambda is
    small: phi' - theta = (phi - theta - alpha g) / (1 + alpha lambda). Hence, in first order,
    d L / d lambda = -alpha g_out sum_k (phi_k - theta) / (1 + alpha lambda)^(K - k + 1), k = 1 .. K.

    Multipliers are variances 1 / lambda: no weight moves further than this times its largest gradient.
    """

    kind = "shrinkage"
    elementwise = False
    uses_moved = True

    def __init__(self, shapes: Mapping[str, torch.Size], raw: dict[str, Tensor]):
        super().__init__(shapes, tuple(raw), raw)
        self.closed_below = 1e-3

    def multipliers(self) -> dict[str, Tensor]:
        return {name: torch.exp(-m.clamp(-LARGEST, LARGEST)) for name, m in self.raw.items()}

    def pull_back(self, multiplier_gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: -multiplier_gradients[name] * variance for name, variance in self.multipliers().items()}

    def updates(
        self, multipliers: Mapping[str, Tensor], gradients: Mapping[str, Tensor], moved: Mapping[str, Tensor], lr: float
    ) -> dict[str, Tensor]:
        # (g + lambda d) / (1 + lr lambda), written so that no lambda is too large
        return {
            name: (multipliers[name] * gradient + moved[name]) / (multipliers[name] + lr)
            for name, gradient in gradients.items()
        }

    def settings(self) -> dict[str, float]:
        return {}


def shrinkage(
    model: nn.Module,
    select: Select = "all",
    *,
    init: Initialise | None = None,
    generator: torch.Generator | None = None,
) -> ShrinkageMask:
    """A learned L2 pull on each weight towards its start; ``init`` gives log lambda, by default that of 0.1."""
    raw = raw_parameters(model, selected_names(model, select), init or constant(math.log(0.1)), None, generator)
    return ShrinkageMask(trainable_shapes(model), raw)
