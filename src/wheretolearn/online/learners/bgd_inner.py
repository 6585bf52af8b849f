"""The inner loops of MetaBGD and MetaCOG: what they move, and the weights that follow from it."""

from abc import ABC, abstractmethod
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from wheretolearn.masks import Select, selected_names
from wheretolearn.online.learners.network import Network, Tensors, gradients

Order = Literal["first", "second"]


class InnerLoop(ABC):
    """``steps`` of gradient descent; in ``second`` order the outer gradient goes through them."""

    steps: int
    lr: float
    order: Order

    @abstractmethod
    def start(self, weights: Tensors) -> Tensors:
        """What the steps move, before the first of them."""

    @abstractmethod
    def weights(self, weights: Tensors, moved: Tensors) -> Tensors:
        """The network's weights that follow."""

    def penalty(self, moved: Tensors) -> Tensor | float:
        """What the steps lower beside the loss."""
        return 0.0


class WeightsInner(InnerLoop):
    """MetaBGD: plain inner steps on the weights."""

    def __init__(self, model: nn.Module, *, steps: int, lr: float, order: Order = "first", select: Select = "all"):
        self.steps, self.lr, self.order = steps, lr, order
        self.names = selected_names(model, select)

    def start(self, weights: Tensors) -> Tensors:
        return {name: weights[name] for name in self.names}

    def weights(self, weights: Tensors, moved: Tensors) -> Tensors:
        return {**weights, **moved}


class GatesInner(InnerLoop):
    """MetaCOG: every weight of the body has a gate, sigmoid(logit), and the steps move the logits.

    The head has no gates; its weights are moved themselves, by the same steps. ``l1`` is the price of open gates.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        steps: int,
        lr: float,
        l1: float,
        logit_init: float = 0.5,
        order: Order = "first",
        select: Select = "body",
    ):
        self.steps, self.lr, self.order, self.l1, self.logit_init = steps, lr, order, l1, logit_init
        self.gated, self.head = selected_names(model, select), selected_names(model, "head")

    def start(self, weights: Tensors) -> Tensors:
        logits = {name: torch.full_like(weights[name], self.logit_init).requires_grad_() for name in self.gated}
        return {**{name: weights[name] for name in self.head}, **logits}

    def weights(self, weights: Tensors, moved: Tensors) -> Tensors:
        return {**weights, **moved, **{name: weights[name] * moved[name].sigmoid() for name in self.gated}}

    def penalty(self, moved: Tensors) -> Tensor | float:
        return self.l1 * torch.stack([moved[name].sigmoid().sum() for name in self.gated]).sum()


def adapted_weights(
    network: Network, inner: InnerLoop, weights: Tensors, inputs: Tensor, labels: Tensor, order: Order = "first"
) -> Tensors:
    """The network's weights after the inner steps on a batch.

    Where ``weights`` need gradients a graph leads back to them; in second order it goes through the steps.
    """

    def objective(own: Tensors, moved: Tensors) -> Tensor:
        return network.loss(inner.weights(own, moved), inputs, labels) + inner.penalty(moved)

    constant = {name: tensor.detach() for name, tensor in weights.items()}
    moved = inner.start(weights)
    for _ in range(inner.steps):
        if order == "second":
            values = torch.autograd.grad(objective(weights, moved), list(moved.values()), create_graph=True)
            step = dict(zip(moved, values, strict=True))
        else:
            step = gradients(partial(objective, constant), moved)
        moved = {name: tensor - inner.lr * step[name] for name, tensor in moved.items()}
    return inner.weights(weights, moved)
