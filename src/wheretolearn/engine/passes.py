"""The gradients that inner and outer steps need, of any function of weights and inputs that gives logits."""

from collections.abc import Callable
from typing import ParamSpec, Protocol

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.nn import functional as F

from wheretolearn.engine.graphed import T, Tensors
from wheretolearn.inner_loop import clipped

P = ParamSpec("P")


class Fast(Protocol):
    """How an arithmetic makes a function fast: the same function, perhaps compiled."""

    def __call__(self, function: Callable[P, T], /) -> Callable[P, T]: ...


class Passes:
    """Gradients of a network, or of its head alone, of which ``outputs_of`` gives the outputs."""

    def __init__(self, outputs_of: Callable[[Tensors, Tensor], Tensor], clip_norm: float | None, fast: Fast):
        def loss(moving: Tensors, still: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(exact(outputs_of({**moving, **still}, inputs)), labels)

        gradient_of_moving = grad_and_value(loss)

        def inner_step(
            moving: Tensors, sums: Tensors, still: Tensors, rates: Tensors, inputs: Tensor, labels: Tensor
        ) -> tuple[Tensors, Tensors]:
            gradients = clipped(gradient_of_moving(moving, still, inputs, labels)[0], clip_norm)
            moved = {name: moving[name] - rates[name] * gradients[name] for name in moving}  # Eq. 4
            return moved, {name: sums[name] + gradients[name] for name in moving}

        def outer_gradient(parameters: Tensors, inputs: Tensor, labels: Tensor) -> tuple[Tensors, Tensor]:
            gradients, value = gradient_of_moving(parameters, {}, inputs, labels)
            return gradients, value

        self.gradient_of_moving = gradient_of_moving
        self.inner_step, self.outer_gradient = fast(inner_step), fast(outer_gradient)


def exact(outputs: Tensor) -> Tensor:
    """In float32 or better."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))
