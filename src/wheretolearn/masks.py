"""Gradient masks: which weights an inner loop may change, and by how much.

Every inner step is ``phi <- phi - inner_lr * multiplier * gradient`` (Eq. 4). A mask owns the raw parameters ``m``
that the outer loop learns, and knows three things: its ``multipliers()``, how a gradient with respect to the
multipliers becomes one for the raw parameters (``pull_back``), and its ``sparsity()``.

    model = Conv4(ways=5)
    mask = masks.binary(model)                        # sparse-MAML: a learned 0/1 per weight
    mask = masks.binary(model, select="block4.*")     # only the last block may change
    mask = masks.fixed(model, select="head")          # ANIL
"""

import fnmatch
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from wheretolearn.errors import ConfigError, MismatchError
from wheretolearn.storage import check_shapes, load_weights, save_weights

Select = str | Sequence[str]  # "all", "head", "body", or glob patterns over parameter names
Initialise = Callable[[torch.Size, torch.Generator | None], Tensor]


@dataclass(frozen=True)
class Sparsity:
    """Share of weights that the inner loop leaves alone, by parameter tensor, by layer, and in all."""

    by_tensor: dict[str, float]
    by_layer: dict[str, float]
    overall: float


class GradientMask(ABC):
    """What every kind of mask offers. ``raw`` is for the outer optimizer; the rest follows from it."""

    kind: str

    def __init__(self, shapes: Mapping[str, torch.Size], names: Sequence[str], raw: dict[str, Tensor]):
        self.shapes = dict(shapes)  # every trainable parameter of the model
        self.names = tuple(names)  # those of them that the mask covers; all others stay as they are
        self.raw = raw
        self.closed_below = 0.0  # a multiplier of at most this size counts as closed

    @abstractmethod
    def multipliers(self) -> dict[str, Tensor]:
        """What each gradient entry is multiplied by, for each covered parameter."""

    @abstractmethod
    def pull_back(self, multiplier_gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Chain rule (or straight-through estimate) from the multipliers to the raw parameters."""

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
        multipliers = self.multipliers()
        closed = {name: math.prod(shape) for name, shape in self.shapes.items()}
        sizes = dict(closed)
        for name in self.names:
            closed[name] = int((multipliers[name].abs() <= self.closed_below).sum())
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
        }
        save_weights(Path(path), self.tensors(), metadata)


@dataclass(frozen=True)
class Rule:
    """How one raw number becomes one multiplier, and the slope used on the way back."""

    multiplier: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor | float]
    initialise: Initialise
    closed_below: float = 0.0


def kaiming(shape: torch.Size, generator: torch.Generator | None = None) -> Tensor:
    """Kaiming-uniform for matrices and filters, U(-0.5, 0.5) for vectors; then shifted to mean zero."""
    bound = 0.5 if len(shape) < 2 else math.sqrt(6.0 / max(math.prod(shape[1:]), 1))
    m = torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return m - m.mean() if m.numel() > 1 else m


def uniform(low: float, high: float) -> Initialise:
    def draw(shape: torch.Size, generator: torch.Generator | None = None) -> Tensor:
        return torch.empty(shape).uniform_(low, high, generator=generator)

    return draw


def log_uniform(low: float, high: float) -> Initialise:
    """Logarithms of U(low, high), so that an exp mask starts with multipliers in that range."""
    draw = uniform(low, high)
    return lambda shape, generator: draw(shape, generator).log()


def constant(value: float) -> Initialise:
    return lambda shape, generator: torch.full(shape, value)


def _step(m: Tensor) -> Tensor:
    return (m >= 0).to(m.dtype)


def _straight_through(m: Tensor) -> float:
    return 1.0


RULES: dict[str, Rule] = {
    "binary": Rule(_step, _straight_through, kaiming),
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
        self.rule = RULES[rule]
        self.straight_through_scale = straight_through_scale
        self.closed_below = self.rule.closed_below

    def multipliers(self) -> dict[str, Tensor]:
        return {name: self.rule.multiplier(m) for name, m in self.raw.items()}

    def pull_back(self, multiplier_gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scale = self.straight_through_scale
        return {name: multiplier_gradients[name] * self.rule.slope(m) * scale for name, m in self.raw.items()}

    def settings(self) -> dict[str, float]:
        return {"straight_through_scale": self.straight_through_scale}


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


class GeneratedMask(GradientMask):
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
        super().__init__(shapes, names, raw)
        self.noise = noise  # z
        self.straight_through_scale = straight_through_scale
        self.generated = tuple(name for name in names if f"{name}.projection" in raw)

    def _latent(self) -> Tensor:
        return self.noise * self.raw["latent.scale"] + self.raw["latent.mean"]

    def generated_values(self) -> dict[str, Tensor]:
        """m of each filter tensor, for the present noise."""
        latent = self._latent()
        return {
            name: (self.raw[f"{name}.projection"] @ latent).view(self.shapes[name]) + self.raw[f"{name}.offset"]
            for name in self.generated
        }

    def multipliers(self) -> dict[str, Tensor]:
        values = self.raw | self.generated_values()
        return {name: _step(values[name]) for name in self.names}

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
                latent_gradient += flat @ self.raw[f"{name}.projection"]
            else:
                result[name] = gradient
        result["latent.mean"] = latent_gradient
        result["latent.scale"] = latent_gradient * self.noise
        return result

    def settings(self) -> dict[str, float]:
        return {"straight_through_scale": self.straight_through_scale}

    def resample(self, draw: Callable[[Tensor], Tensor] = torch.randn_like) -> None:
        self.noise.copy_(draw(self.noise))

    def tensors(self) -> dict[str, Tensor]:
        return {**self.raw, "noise": self.noise}

    def to(self, target: torch.device | torch.dtype | str) -> Self:
        self.noise = self.noise.to(target)
        return super().to(target)


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
    raw = _raw_parameters(
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


def fixed(model: nn.Module, select: Select = "all") -> FixedMask:
    """Ones on ``select``, nothing learned: "all" is MAML, "head" ANIL, "body" BOIL."""
    names = selected_names(model, select)
    parameters = dict(model.named_parameters())
    return FixedMask(trainable_shapes(model), names, like=parameters[names[0]])


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
    names = selected_names(model, select)
    plain = _raw_parameters(model, names, kaiming, initial_sparsity, generator)
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


MAKERS: dict[str, Callable[..., GradientMask]] = {
    "binary": binary,
    "relu": relu,
    "exp": exp,
    "linear": linear,
    "fixed": fixed,
    "generated": generated,
}


def load(path: Path | str, model: nn.Module) -> GradientMask:
    """Read a mask that ``save`` wrote, after checking that it was made for a model of the same names and shapes."""
    path = Path(path)
    tensors, metadata = load_weights(path)
    shapes = trainable_shapes(model)
    like = next(p for p in model.parameters() if p.requires_grad)
    raw = {name: tensor.to(like.device) for name, tensor in tensors.items()}
    try:
        kind = metadata["kind"]
        scale = float(json.loads(metadata["settings"]).get("straight_through_scale", 1.0))
        names = [str(name) for name in json.loads(metadata["names"])]
        stored = {str(name): torch.Size(shape) for name, shape in json.loads(metadata["shapes"]).items()}
        check_shapes(stored, shapes, path)
        if kind == "fixed":
            mask: GradientMask = FixedMask(shapes, names, like=like)
        elif kind == "generated":
            noise = raw.pop("noise")
            mask = GeneratedMask(shapes, names, raw, noise, scale)
        else:
            mask = ElementwiseMask(kind, shapes, {name: raw[name] for name in names}, scale)
        mask.pull_back(mask.multipliers())  # shapes that do not go together fail here
        if any(m.shape != shapes[name] for name, m in mask.multipliers().items()):
            raise ValueError("a tensor has the wrong shape")
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise MismatchError(
            f"{path} holds no gradient mask that this version can read ({type(error).__name__}: {error}): "
            "give a file written by mask.save"
        ) from None
    return mask


def layer_of(parameter_name: str) -> str:
    """The module that owns a parameter: ``block1.conv.weight`` belongs to ``block1.conv``."""
    # A parametrised layer keeps its tensors under LAYER.parametrizations.NAME.
    name = parameter_name.partition(".parametrizations.")
    return (name[0] if name[1] else parameter_name.rpartition(".")[0]) or "(top level)"


def trainable_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Shape of every parameter that requires a gradient; a tied parameter counts once, under its first name."""
    shapes = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ConfigError(f"parameter {name} has no shape yet: run the model once on an example first")
        if parameter.requires_grad:
            if parameter.is_complex():
                raise ConfigError(f"parameter {name} is complex; masks are made for real parameters only")
            shapes[name] = parameter.shape
    if not shapes:
        raise ConfigError("the model has no parameter that requires a gradient, so there is nothing to adapt")
    return shapes


def selected_names(model: nn.Module, select: Select) -> tuple[str, ...]:
    """The trainable parameters that ``select`` chooses, in the model's order."""
    names = tuple(trainable_shapes(model))
    if select == "all":
        return names
    if select in ("head", "body"):
        head = layer_of(names[-1])
        chosen = tuple(name for name in names if (layer_of(name) == head) == (select == "head"))
        if not chosen:
            raise ConfigError(f"the model has a single layer, {head}, so it has no body to adapt")
        return chosen
    patterns = [select] if isinstance(select, str) else list(select)
    if not patterns:
        raise ConfigError("the list of parameter patterns is empty: name at least one, or select 'all'")
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            near = get_close_matches(pattern, names, n=1, cutoff=0.0)
            raise ConfigError(
                f"no trainable parameter matches {pattern!r}; there are {len(names)}, such as {near[0]}"
                f" (patterns use *, e.g. '{layer_of(near[0])}.*')"
            )
    return tuple(name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))


def shifted_to_sparsity(m: Tensor, sparsity: float) -> Tensor:
    """Shift a tensor so that this share of its entries (rounded to whole entries) is negative."""
    if not 0.0 <= sparsity <= 1.0:
        raise ConfigError(f"the initial sparsity must lie between 0 and 1, not {sparsity}")
    if m.numel() == 0:
        return m
    closed = round(sparsity * m.numel())
    values = m.flatten().sort().values
    if 0 < closed < m.numel() and values[closed - 1] == values[closed]:
        raise ConfigError(
            f"an initial sparsity of {sparsity} cannot be reached by shifting equal values: use an initialisation "
            "that differs from weight to weight"
        )
    margin = (values[-1] - values[0]) / (2 * m.numel()) + 1e-3
    if closed == 0:
        return m - values[0] + margin
    if closed == m.numel():
        return m - values[-1] - margin
    return m - (values[closed - 1] + values[closed]) / 2


def _raw_parameters(
    model: nn.Module,
    names: Sequence[str],
    init: Initialise,
    initial_sparsity: float | None,
    generator: torch.Generator | None,
) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    raw = {}
    for name in names:
        m = init(parameters[name].shape, generator)
        if initial_sparsity is not None:
            m = shifted_to_sparsity(m, initial_sparsity)
        # Masks stay in float32 (or better) even for a half-precision model.
        dtype = torch.promote_types(parameters[name].dtype, torch.float32)
        raw[name] = m.to(parameters[name].device, dtype)
    return raw
