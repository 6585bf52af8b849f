"""The fully connected network of the MNIST continual-learning experiments."""

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from wheretolearn.errors import ConfigError


class MLP(nn.Module):
    """Linear layers with ReLU between them, on flattened input; ``sizes`` runs from the input to the classes.

    Layers are called ``layer1``, ``layer2``, ..., ``head``. Kaiming-normal weights, zero biases.
    """

    def __init__(self, sizes: Sequence[int] = (784, 100, 100, 10)) -> None:
        if len(sizes) < 2:
            raise ConfigError(f"mlp needs an input and an output size, not sizes = {tuple(sizes)}")
        super().__init__()
        for number, (inputs, outputs) in enumerate(pairwise(sizes[:-1]), start=1):
            self.add_module(f"layer{number}", nn.Linear(inputs, outputs))
        self.head = nn.Linear(sizes[-2], sizes[-1])
        kaiming_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        *hidden_layers, head = self.children()
        for layer in hidden_layers:
            x = F.relu(layer(x))
        logits: Tensor = head(x)
        return logits


def kaiming_normal(model: nn.Module) -> None:
    """Kaiming-normal weights and zero biases for every linear and convolutional layer."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
