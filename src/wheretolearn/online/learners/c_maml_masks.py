"""The masks of C-MAML and its variants."""

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from wheretolearn import masks
from wheretolearn.errors import ConfigError
from wheretolearn.masks import GradientMask, Initialise, Select, selected_names, trainable_shapes
from wheretolearn.masks.initial import raw_dtype

Variant = Literal["c-maml", "c-maml-fixed", "sparse-c-maml", "sparse-relu-c-maml"]


class TensorRates(GradientMask):
    """One learned rate per parameter tensor, of either sign; use it with ``inner_lr=1``."""

    kind = "tensor-rates"

    def __init__(self, model: nn.Module, select: Select = "all", *, rate: float):
        raw = {}
        for name in selected_names(model, select):
            parameter = model.get_parameter(name)
            raw[name] = parameter.new_full((), rate, dtype=raw_dtype(parameter)).detach()
        super().__init__(trainable_shapes(model), tuple(raw), raw)

    def multipliers(self) -> dict[str, Tensor]:
        return {name: m.expand(self.shapes[name]) for name, m in self.raw.items()}

    def pull_back(self, multiplier_gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: multiplier_gradients[name].sum() for name in self.raw}

    def settings(self) -> dict[str, float]:
        return {}


def c_maml_mask(
    variant: Variant,
    model: nn.Module,
    *,
    inner_lr: float,
    select: Select = "all",
    init: Initialise | None = None,
    generator: torch.Generator | None = None,
) -> tuple[GradientMask, float]:
    """The mask of a variant, and the factor that its inner steps then take beside it.

    - ``c-maml``: a learned rate per parameter tensor, ``inner_lr`` at first.
    - ``c-maml-fixed``: the rate ``inner_lr`` for all.
    - ``sparse-c-maml``: the rate ``inner_lr`` for weights that a learned binary mask opens.
    - ``sparse-relu-c-maml``: a learned rate per weight, rectified.
    """
    if variant == "c-maml":
        return TensorRates(model, select, rate=inner_lr), 1.0
    if variant == "c-maml-fixed":
        return masks.fixed(model, select), inner_lr
    if variant == "sparse-c-maml":
        return masks.binary(model, select, init=init, generator=generator), inner_lr
    if variant == "sparse-relu-c-maml":
        return masks.relu(model, select, init=init or masks.uniform(0.005, 0.1), generator=generator), 1.0
    raise ConfigError(f"unknown variant of C-MAML {variant!r}; choose one of {', '.join(get_args(Variant))}")
