"""MAML and ANIL in a stream: meta-trained weights that stay as they are, adapted to the last batch only."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from wheretolearn import masks
from wheretolearn.masks import Select
from wheretolearn.online.learners.base import OnlineLearner
from wheretolearn.online.learners.network import Network, adapted, arithmetic_for, copied, copy_back, copy_into


class MAML(OnlineLearner):
    """``select`` is what the inner loop may change: all for MAML, the head for ANIL."""

    def __init__(
        self,
        model: nn.Module,
        *,
        inner_steps: int,
        inner_lr: float,
        select: Select = "all",
    ):
        self.arithmetic, self.inner_steps = arithmetic_for(model), inner_steps
        self.rates = {name: one * inner_lr for name, one in masks.fixed(model, select).multipliers().items()}
        self.theta = Network(model).start()
        self.phi = {name: self.theta[name].clone() for name in self.rates}

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        return self.arithmetic.logits({**self.theta, **self.phi}, inputs)

    @torch.no_grad()
    def observe(self, inputs: Tensor, labels: Tensor) -> None:
        found = adapted(self.arithmetic, self.theta, self.rates, inputs, labels, self.inner_steps)
        copy_into(self.phi, found.weights)

    def state(self) -> dict[str, Tensor]:
        return copied("phi", self.phi)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        copy_back("phi", self.phi, state)
