"""A module of your own, meta-trained on tasks of your own: draw a wave from ten points of it.

    python examples/own_module.py

Every task is a sine wave of another height and phase. The outer loop learns where the weights start and which of them
five inner steps may change. A few seconds on a CPU.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wheretolearn import accumulate, adapt, masks

TEST_TASKS = 200


class WaveNetwork(nn.Module):
    """Learned waves, mixed. The two bare parameters are masked like those of any layer."""

    def __init__(self, waves: int = 40) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.randn(waves))
        self.phase = nn.Parameter(torch.randn(waves))
        self.mix = nn.Linear(waves, waves)
        self.head = nn.Linear(waves, 1)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.sin(self.frequency * x + self.phase)
        y: Tensor = self.head(torch.tanh(self.mix(waves)))
        return y


@dataclass
class Wave:
    """Ten points to learn from, and ten others to be judged by."""

    x: Tensor
    y: Tensor
    x_new: Tensor
    y_new: Tensor


def waves(count: int, seed: int) -> Iterator[Wave]:
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        height, phase = torch.rand(2, generator=random) * torch.tensor([4.9, math.pi]) + torch.tensor([0.1, 0.0])
        x = torch.rand(20, 1, generator=random) * 10 - 5
        y = height * torch.sin(x - phase)
        yield Wave(x[:10], y[:10], x[10:], y[10:])


def error(model: nn.Module, mask: masks.GradientMask, steps: int = 5) -> float:
    """Mean squared error at the new points of test waves, after inner steps on the given ones."""
    total = 0.0
    for task in waves(TEST_TASKS, seed=1):
        adapted = adapt(model, mask, lambda net: F.mse_loss(net(task.x), task.y), steps=steps, inner_lr=0.05)
        network = adapted.module()  # the adapted network: an ordinary nn.Module
        with torch.no_grad():
            total += F.mse_loss(network(task.x_new), task.y_new).item()
    return total / TEST_TASKS


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads cost more than they bring to a network this small

    model = WaveNetwork()  # any nn.Module
    mask = masks.binary(model)  # one learned 0/1 per weight (sparse-MAML)
    print(f"before meta-training: error {error(model, mask):.3f} after 5 inner steps")

    optimizer = torch.optim.Adam(
        [
            {"params": model.parameters(), "lr": 3e-3},
            {"params": mask.parameters(), "lr": 1e-2},
        ]
    )
    for task in waves(400, seed=0):  # any tasks: data to adapt to, and data to be judged by
        optimizer.zero_grad()
        adapted = adapt(model, mask, lambda net: F.mse_loss(net(task.x), task.y), steps=5, inner_lr=0.05)
        accumulate(adapted, lambda net: F.mse_loss(net(task.x_new), task.y_new))  # fills .grad of model and mask
        optimizer.step()

    print(f"after meta-training: error {error(model, mask):.3f} after 5 inner steps")
    print(f"without inner steps: error {error(model, mask, steps=0):.3f}")
    print(f"weights that never change: {mask.sparsity().overall:.1%}")
    print(mask.sparsity().by_layer)  # which layers adapt, which do not


if __name__ == "__main__":
    main()
