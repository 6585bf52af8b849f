"""What every kind of mask offers."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from wheretolearn.errors import ConfigError
from wheretolearn.masks.selection import layer_of
from wheretolearn.storage import check_shapes, save_weights


@dataclass(frozen=True)
class Sparsity:
    """Share of weights that the inner loop leaves alone, by parameter tensor, by layer, and in all."""

    by_tensor: dict[str, float]
    by_layer: dict[str, float]
    overall: float


class GradientMask(ABC):
    """What every kind of mask offers. ``raw`` is for the outer optimizer; the rest follows from it."""

    kind: str
    # Whether a step is multiplier * gradient, entry by entry: what the closed form (Eq. 5) and fast engines rely on.
    elementwise: ClassVar[bool] = True
    uses_moved: ClassVar[bool] = False  # whether ``updates`` looks at how far the weights have moved

    def __init__(self, shapes: Mapping[str, torch.Size], names: Sequence[str], raw: dict[str, Tensor]):
        self.shapes = dict(shapes)  # every trainable parameter of the model
        self.names = tuple(names)  # those of them that the mask covers; all others stay as they are
        self.raw = raw
        self.closed_below = 0.0  # a weight that is open by no more than this counts as closed

    @abstractmethod
    def multipliers(self) -> dict[str, Tensor]:
        """What an inner step multiplies with: where ``elementwise``, a factor for each entry of each covered parameter.

        Other masks have tensors of their own kind here, which ``updates`` knows how to use.
        """

    @abstractmethod
    def pull_back(self, multiplier_gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Chain rule (or straight-through estimate) from the multipliers to the raw parameters."""

    def updates(
        self, multipliers: Mapping[str, Tensor], gradients: Mapping[str, Tensor], moved: Mapping[str, Tensor], lr: float
    ) -> dict[str, Tensor]:
        """What an inner step takes off each covered parameter, before its factor ``lr`` (the inner learning rate).

        Must be linear in ``gradients`` and ``moved`` (phi - theta, empty unless ``uses_moved``): the first-order
        meta-gradient is taken at their sums over all steps. With ``uses_moved`` it must also go entry by entry.
        """
        return {name: multipliers[name] * gradient for name, gradient in gradients.items()}  # Eq. 4

    def openness(self) -> dict[str, Tensor]:
        """How far each weight can follow its gradient; at most ``closed_below`` counts as closed."""
        return {name: multiplier.abs() for name, multiplier in self.multipliers().items()}

    @abstractmethod
    def settings(self) -> dict[str, float]:
        """What, besides tensors, is needed to build the same mask again."""

    def resample(self, draw: Callable[[Tensor], Tensor] = torch.randn_like) -> None:  # noqa: B027
        """Draw new noise, standard normal and shaped like the tensor given; only random masks have any."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything to store: the raw parameters and, for random masks, the current noise."""
        return dict(self.raw)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy stored ``tensors()`` into this mask, in place, so that optimizers keep their hold on them."""
        own = self.tensors()
        check_shapes({n: t.shape for n, t in tensors.items()}, {n: t.shape for n, t in own.items()}, "mask")
        with torch.no_grad():  # raw parameters may require gradients
            for name, tensor in own.items():
                tensor.copy_(tensors[name])

    def parameters(self) -> Iterator[Tensor]:
        """The raw parameters, for an outer optimizer."""
        yield from self.raw.values()

    def to(self, target: torch.device | torch.dtype | str) -> Self:
        """Move to a device or dtype, as a module does: call it before the optimizer is made."""
        for name, tensor in self.raw.items():
            self.raw[name] = tensor.to(target)
        return self

    def sparsity(self) -> Sparsity:
        """Share of closed entries. Parameters that the mask does not cover are closed."""
        openness = self.openness()
        closed = {name: math.prod(shape) for name, shape in self.shapes.items()}
        sizes = dict(closed)
        for name in self.names:
            closed[name] = int((openness[name] <= self.closed_below).sum())
        layers: dict[str, list[str]] = {}
        for name in self.shapes:
            layers.setdefault(layer_of(name), []).append(name)
        return Sparsity(
            by_tensor={name: closed[name] / max(sizes[name], 1) for name in self.shapes},
            by_layer={
                layer: sum(closed[n] for n in names) / max(sum(sizes[n] for n in names), 1)
                for layer, names in layers.items()
            },
            overall=sum(closed.values()) / max(sum(sizes.values()), 1),
        )

    def save(self, path: Path | str) -> None:
        """Write the mask to one safetensors file."""
        metadata = {
            "kind": self.kind,
            "settings": json.dumps(self.settings()),
            "shapes": json.dumps({name: list(shape) for name, shape in self.shapes.items()}),
            "names": json.dumps(self.names),
            "order": json.dumps(list(self.tensors())),
        }
        save_weights(Path(path), self.tensors(), metadata)


class RandomMask(GradientMask):
    """A mask whose pattern also depends on ``noise``, standard normal; it stays as it is until ``resample``."""

    def __init__(self, shapes: Mapping[str, torch.Size], names: Sequence[str], raw: dict[str, Tensor], noise: Tensor):
        if "noise" in raw:
            raise ConfigError(f"a {self.kind} mask keeps its own noise: give the parameter 'noise' another name")
        super().__init__(shapes, names, raw)
        self.noise = noise

    def resample(self, draw: Callable[[Tensor], Tensor] = torch.randn_like) -> None:
        self.noise.copy_(draw(self.noise))

    def tensors(self) -> dict[str, Tensor]:
        return {**self.raw, "noise": self.noise}

    def to(self, target: torch.device | torch.dtype | str) -> Self:
        self.noise = self.noise.to(target)
        return super().to(target)
