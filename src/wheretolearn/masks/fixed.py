"""Masks that are given, not learned."""

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from wheretolearn.masks.base import GradientMask
from wheretolearn.masks.selection import Select, selected_names, trainable_shapes


class FixedMask(GradientMask):
    """Ones on the chosen parameters, nothing to learn: MAML (all), ANIL (head), BOIL (body), any subset."""

    kind = "fixed"

    def __init__(self, shapes: Mapping[str, torch.Size], names: Sequence[str], like: Tensor):
        super().__init__(shapes, names, {})
        self._one = torch.ones((), dtype=like.dtype, device=like.device)

    def multipliers(self) -> dict[str, Tensor]:
        return {name: self._one.expand(self.shapes[name]) for name in self.names}

    def pull_back(self, multiplier_gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def settings(self) -> dict[str, float]:
        return {}

    def to(self, target: torch.device | torch.dtype | str) -> Self:
        self._one = self._one.to(target)
        return self


def fixed(model: nn.Module, select: Select = "all") -> FixedMask:
    """Ones on ``select``, nothing learned: "all" is MAML, "head" ANIL, "body" BOIL, "none" for no inner steps."""
    shapes = trainable_shapes(model)
    names = () if select == "none" else selected_names(model, select)
    return FixedMask(shapes, names, like=model.get_parameter(next(iter(names or shapes))))
