"""One Adam step on every batch: without adaptation, from random weights or, as fine-tuning, from meta-trained ones."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from wheretolearn.online.learners.base import OnlineLearner
from wheretolearn.online.learners.network import (
    Network,
    adam,
    copied,
    copy_back,
    gradients,
    optimizer_tensors,
)


class OnlineAdam(OnlineLearner):
    def __init__(self, model: nn.Module, *, lr: float):
        self.network = Network(model)
        self.weights = self.network.start()
        self.optimizer = adam((self.weights, lr))

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        return self.network.logits(self.weights, inputs)

    def observe(self, inputs: Tensor, labels: Tensor) -> None:
        values = gradients(lambda weights: self.network.loss(weights, inputs, labels), self.weights)
        for name, gradient in values.items():
            self.weights[name].grad = gradient
        self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        return copied("weights", self.weights) | copied("optimizer", optimizer_tensors(self.optimizer))

    def restore(self, state: Mapping[str, Tensor]) -> None:
        copy_back("weights", self.weights, state)
        copy_back("optimizer", optimizer_tensors(self.optimizer), state)
