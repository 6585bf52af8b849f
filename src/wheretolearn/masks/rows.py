"""MT-net's mask: each output unit of a layer is open or not, at random with a learned chance (Lee and Choi, 2018)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from wheretolearn.errors import ConfigError
from wheretolearn.masks.base import RandomMask
from wheretolearn.masks.initial import raw_dtype
from wheretolearn.masks.selection import Select, layer_of, selected_names, trainable_shapes
from wheretolearn.storage import check_shapes


class RowsMask(RandomMask):
    """One logit per output unit (entry of the first dimension) of a layer, for its weights and bias alike.

    A unit is open where logit + logistic noise >= 0, thus with chance sigmoid(logit); gradients go straight through
    to sigmoid((logit + noise) / temperature), the binary Gumbel-softmax. ``resample`` draws a new pattern; measuring
    uses the present one. Raw names: the first parameter of each layer.
    """

    kind = "rows"

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        names: Sequence[str],
        raw: dict[str, Tensor],
        noise: Tensor,
        temperature: float = 1.0,
    ):
        if not temperature > 0:
            raise ConfigError(f"the temperature of a rows mask must be greater than 0, not {temperature}")
        super().__init__(shapes, names, raw, noise)  # one number per unit of all layers in turn
        self.temperature = temperature
        self.layers = units_of_layers(shapes, names)
        expected = {owner: (units,) for owner, (units, _) in self.layers.items()}
        check_shapes({name: logits.shape for name, logits in raw.items()}, expected, "the rows mask")

    def _noisy_logits(self) -> dict[str, Tensor]:
        # The logistic quantile of the normal's distribution function, exact in both tails.
        logistic = torch.special.log_ndtr(self.noise) - torch.special.log_ndtr(-self.noise)
        pieces = logistic.split([units for units, _ in self.layers.values()])
        return {owner: self.raw[owner] + piece for owner, piece in zip(self.layers, pieces, strict=True)}

    def multipliers(self) -> dict[str, Tensor]:
        result = {}
        for owner, logits in self._noisy_logits().items():
            rows = (logits >= 0).to(logits.dtype)
            for name in self.layers[owner][1]:
                shape = self.shapes[name]
                result[name] = rows.view(shape[:1] + (1,) * (len(shape) - 1)).expand(shape).contiguous()
        return {name: result[name] for name in self.names}

    def pull_back(self, multiplier_gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        result = {}
        for owner, logits in self._noisy_logits().items():
            units, names = self.layers[owner]
            soft = torch.sigmoid(logits / self.temperature)
            by_unit = [multiplier_gradients[name].reshape(units, -1 if units else 0).sum(1) for name in names]
            upstream = torch.stack(by_unit).sum(0)
            result[owner] = upstream * soft * (1 - soft) / self.temperature
        return result

    def settings(self) -> dict[str, float]:
        return {"temperature": self.temperature}


def units_of_layers(shapes: Mapping[str, torch.Size], names: Sequence[str]) -> dict[str, tuple[int, list[str]]]:
    """Output units and covered parameters of each layer, by the layer's first parameter."""
    owners: dict[tuple[str, int], str] = {}
    layers: dict[str, tuple[int, list[str]]] = {}
    for name in names:
        units = shapes[name][0] if shapes[name] else 1
        owner = owners.setdefault((layer_of(name), units), name)
        layers.setdefault(owner, (units, []))[1].append(name)
    return layers


def rows(
    model: nn.Module,
    select: Select = "all",
    *,
    initial_logit: float = 0.0,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> RowsMask:
    """MT-net's mask, with one learned logit per output unit; a unit starts open with chance sigmoid(initial_logit)."""
    names = selected_names(model, select)
    shapes = trainable_shapes(model)
    layers = units_of_layers(shapes, names)
    raw = {}
    for owner, (units, _) in layers.items():
        like = model.get_parameter(owner)
        raw[owner] = torch.full((units,), initial_logit, dtype=raw_dtype(like), device=like.device)
    noise = torch.empty(sum(units for units, _ in layers.values())).normal_(generator=generator)
    noise = noise.to(next(iter(raw.values())))
    return RowsMask(shapes, names, raw, noise, temperature)
