"""Sparse-MAML+: masks generated from a random vector."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from wheretolearn.errors import ConfigError
from wheretolearn.masks.base import RandomMask
from wheretolearn.masks.elementwise import binary_step, checked_scale
from wheretolearn.masks.initial import kaiming, raw_parameters, shifted_to_sparsity
from wheretolearn.masks.selection import Select, selected_names, trainable_shapes


class GeneratedMask(RandomMask):
    """Sparse-MAML+: filters' masks are generated, m = A (z * sigma + mu) + b with z ~ N(0, I); the rest are plain.

    Raw names: ``NAME.projection`` (A), ``NAME.offset`` (b) for each filter tensor, ``latent.mean`` (mu) and
    ``latent.scale`` (sigma) shared by all, and ``NAME`` itself for every plain binary mask.
    """

    kind = "generated"

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        names: Sequence[str],
        raw: dict[str, Tensor],
        noise: Tensor,
        straight_through_scale: float = 1.0,
    ):
        super().__init__(shapes, names, raw, noise)  # z
        self.straight_through_scale = checked_scale(straight_through_scale)
        self.generated = tuple(name for name in names if f"{name}.projection" in raw)

    def _latent(self) -> Tensor:
        return self.noise * self.raw["latent.scale"] + self.raw["latent.mean"]

    def generated_values(self) -> dict[str, Tensor]:
        """m of each filter tensor, for the present noise."""
        latent, values = self._latent(), {}
        for name in self.generated:
            projection, offset = self.raw[f"{name}.projection"], self.raw[f"{name}.offset"]
            values[name] = (projection @ latent.to(projection.dtype)).view(self.shapes[name]) + offset
        return values

    def multipliers(self) -> dict[str, Tensor]:
        values = self.raw | self.generated_values()
        return {name: binary_step(values[name]) for name in self.names}

    def pull_back(self, multiplier_gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        latent = self._latent()
        latent_gradient = torch.zeros_like(latent)
        result = {}
        for name in self.names:
            gradient = multiplier_gradients[name] * self.straight_through_scale
            if name in self.generated:
                flat = gradient.reshape(-1)
                result[f"{name}.projection"] = torch.outer(flat, latent)
                result[f"{name}.offset"] = gradient
                latent_gradient += flat @ self.raw[f"{name}.projection"].to(flat.dtype)
            else:
                result[name] = gradient
        result["latent.mean"] = latent_gradient
        result["latent.scale"] = latent_gradient * self.noise
        return result

    def settings(self) -> dict[str, float]:
        return {"straight_through_scale": self.straight_through_scale}


def generated(
    model: nn.Module,
    select: Select = "all",
    *,
    latent_size: int = 1600,
    initial_noise: float = 1.0,
    initial_sparsity: float | None = None,
    straight_through_scale: float = 1.0,
    generator: torch.Generator | None = None,
) -> GeneratedMask:
    """Sparse-MAML+: binary masks of all filters generated from one Gaussian vector; plain masks elsewhere."""
    if latent_size < 1:
        raise ConfigError(f"latent_size must be 1 or more, not {latent_size}")
    names = selected_names(model, select)
    plain = raw_parameters(model, names, kaiming, initial_sparsity, generator)
    like = next(iter(plain.values()))
    bound = 1.0 / math.sqrt(latent_size)
    raw: dict[str, Tensor] = {}
    for name, m in plain.items():
        if m.dim() < 3:
            raw[name] = m
            continue
        projection = torch.empty(m.numel(), latent_size).uniform_(-bound, bound, generator=generator)
        raw[f"{name}.projection"] = projection.to(m)
        raw[f"{name}.offset"] = m
    if len(raw) == len(plain):
        raise ConfigError(
            "a generated mask needs at least one filter tensor (three or more dimensions) among the selected "
            "parameters, and this model has none: use masks.binary instead"
        )
    raw["latent.mean"] = torch.zeros(latent_size).to(like)
    raw["latent.scale"] = torch.full((latent_size,), initial_noise).to(like)
    noise = torch.empty(latent_size).normal_(generator=generator).to(like)
    mask = GeneratedMask(trainable_shapes(model), names, raw, noise, straight_through_scale)
    if initial_sparsity is not None:
        for name, m in mask.generated_values().items():
            raw[f"{name}.offset"] += shifted_to_sparsity(m, initial_sparsity) - m
    return mask
