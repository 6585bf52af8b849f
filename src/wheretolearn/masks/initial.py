"""Where masks start."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from wheretolearn.errors import ConfigError

Initialise = Callable[[torch.Size, torch.Generator | None], Tensor]


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


def raw_parameters(
    model: nn.Module,
    names: Sequence[str],
    init: Initialise,
    initial_sparsity: float | None,
    generator: torch.Generator | None,
) -> dict[str, Tensor]:
    """A start value for each entry of the named parameters."""
    parameters = dict(model.named_parameters())
    raw = {}
    for name in names:
        shape = parameters[name].shape
        m = init(shape, generator)
        if m.shape != shape:
            raise ConfigError(f"init gave a tensor of shape {tuple(m.shape)} for {name}: it must have {tuple(shape)}")
        if initial_sparsity is not None:
            m = shifted_to_sparsity(m, initial_sparsity)
        raw[name] = m.to(parameters[name].device, raw_dtype(parameters[name]))
    return raw


def raw_dtype(parameter: Tensor) -> torch.dtype:
    """Masks stay in float32 (or better) even for a half-precision model."""
    return torch.promote_types(parameter.dtype, torch.float32)
