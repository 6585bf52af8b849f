"""What an engine works on: tasks as tensors, and the settings of their inner loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from wheretolearn.batch_norm import BatchNormMode


@dataclass(frozen=True)
class Task:
    """A classification task: labelled support data to adapt to, query data to be judged by."""

    support_inputs: Tensor
    support_labels: Tensor
    query_inputs: Tensor
    query_labels: Tensor

    def support_loss(self, network: nn.Module) -> Tensor:
        return F.cross_entropy(network(self.support_inputs), self.support_labels)

    def query_loss(self, network: nn.Module) -> Tensor:
        return F.cross_entropy(network(self.query_inputs), self.query_labels)

    def query_accuracy(self, network: nn.Module) -> Tensor:
        correct: Tensor = network(self.query_inputs).argmax(1) == self.query_labels
        return correct.float().mean()


# The tasks of an outer step; on a GPU the step is a tensor there, so that a captured graph can draw them.
Draw = Callable[[int | Tensor], Sequence[Task]]


@dataclass(frozen=True)
class InnerLoop:
    """How each task is adapted to."""

    steps: int
    inner_lr: float
    batch_norm: BatchNormMode = "batch"
    clip_norm: float | None = None
    order: Literal["first", "second"] = "first"
