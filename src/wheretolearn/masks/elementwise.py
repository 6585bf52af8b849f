"""Masks with one raw number per weight: binary, relu, exp, linear."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wheretolearn.errors import ConfigError
from wheretolearn.masks.base import GradientMask
from wheretolearn.masks.initial import Initialise, kaiming, log_uniform, raw_parameters, uniform
from wheretolearn.masks.selection import Select, selected_names, trainable_shapes


@dataclass(frozen=True)
class Rule:
    """How one raw number becomes one multiplier, and the slope used on the way back."""

    multiplier: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor | float]
    initialise: Initialise
    closed_below: float = 0.0


def binary_step(m: Tensor) -> Tensor:
    return (m >= 0).to(m.dtype)


def checked_scale(scale: float) -> float:
    """A factor of the straight-through gradient with which a mask can learn."""
    if not 0 < scale < math.inf:
        raise ConfigError(f"straight_through_scale must be a finite number greater than 0, not {scale}")
    return scale


def _straight_through(m: Tensor) -> float:
    return 1.0


RULES: dict[str, Rule] = {
    "binary": Rule(binary_step, _straight_through, kaiming),
    "relu": Rule(torch.relu, _straight_through, uniform(0.05, 0.1)),
    # Without straight-through a rate that falls below zero stays there (La-MAML).
    "dying-relu": Rule(torch.relu, lambda m: (m > 0).to(m.dtype), uniform(0.05, 0.1)),
    "exp": Rule(torch.exp, torch.exp, log_uniform(0.05, 0.1), closed_below=1e-3),
    "linear": Rule(torch.clone, _straight_through, uniform(0.05, 0.1), closed_below=1e-3),
}


class ElementwiseMask(GradientMask):
    """One raw number per weight, turned into a multiplier by a ``Rule``."""

    def __init__(
        self,
        rule: str,
        shapes: Mapping[str, torch.Size],
        raw: dict[str, Tensor],
        straight_through_scale: float = 1.0,
    ):
        super().__init__(shapes, tuple(raw), raw)
        self.kind = rule
        self.straight_through_scale = checked_scale(straight_through_scale)
        self.closed_below = self.rule.closed_below

    @property
    def rule(self) -> Rule:
        return RULES[self.kind]  # not kept, as functions defined in functions cannot be pickled

    def multipliers(self) -> dict[str, Tensor]:
        return {name: self.rule.multiplier(m) for name, m in self.raw.items()}

    def pull_back(self, multiplier_gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scale = self.straight_through_scale
        return {name: multiplier_gradients[name] * self.rule.slope(m) * scale for name, m in self.raw.items()}

    def settings(self) -> dict[str, float]:
        return {"straight_through_scale": self.straight_through_scale}


def _elementwise(
    rule: str,
    model: nn.Module,
    select: Select,
    init: Initialise | None,
    initial_sparsity: float | None,
    generator: torch.Generator | None,
    straight_through_scale: float = 1.0,
) -> ElementwiseMask:
    shapes = trainable_shapes(model)
    raw = raw_parameters(
        model, selected_names(model, select), init or RULES[rule].initialise, initial_sparsity, generator
    )
    return ElementwiseMask(rule, shapes, raw, straight_through_scale)


def binary(
    model: nn.Module,
    select: Select = "all",
    *,
    init: Initialise | None = None,
    initial_sparsity: float | None = None,
    straight_through_scale: float = 1.0,
    generator: torch.Generator | None = None,
) -> ElementwiseMask:
    """1[m >= 0]: each weight may change or not (sparse-MAML). ``initial_sparsity`` is the share closed at first."""
    return _elementwise("binary", model, select, init, initial_sparsity, generator, straight_through_scale)


def relu(
    model: nn.Module,
    select: Select = "all",
    *,
    init: Initialise | None = None,
    initial_sparsity: float | None = None,
    straight_through: bool = True,
    generator: torch.Generator | None = None,
) -> ElementwiseMask:
    """max(m, 0): a learned rate per weight that can close (sparse-ReLU-MAML); use it with ``inner_lr=1``.

    ``straight_through=False`` is La-MAML's rule: a rate that falls below zero stays closed.
    """
    rule = "relu" if straight_through else "dying-relu"
    return _elementwise(rule, model, select, init, initial_sparsity, generator)


def exp(
    model: nn.Module,
    select: Select = "all",
    *,
    init: Initialise | None = None,
    generator: torch.Generator | None = None,
) -> ElementwiseMask:
    """exp(m): a learned positive rate per weight (exp-MAML); use it with ``inner_lr=1``."""
    return _elementwise("exp", model, select, init, None, generator)


def linear(
    model: nn.Module,
    select: Select = "all",
    *,
    init: Initialise | None = None,
    generator: torch.Generator | None = None,
) -> ElementwiseMask:
    """m itself: a learned rate of either sign per weight (Meta-SGD); use it with ``inner_lr=1``."""
    return _elementwise("linear", model, select, init, None, generator)
