"""What an engine works on: tasks as tensors, the settings of their inner loop, and the learners of one sitting."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wheretolearn.batch_norm import BatchNormMode
from wheretolearn.masks import GradientMask
from wheretolearn.ridge_head import ridge_logits


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
        return F.cross_entropy(self._query_logits(network), self.query_labels)

    def query_probabilities(self, network: nn.Module) -> Tensor:
        return F.softmax(self._query_logits(network), dim=1)

    def _query_logits(self, network: nn.Module) -> Tensor:
        logits: Tensor = network(self.query_inputs)
        return logits


class RidgeTask(Task):
    """The same for a network whose head is solved on the support features instead of adapted."""

    def support_loss(self, network: nn.Module) -> Tensor:
        features: Tensor = network(self.support_inputs)
        return features.mean()  # nothing descends on it; a pass over the support set is all that is needed

    def _query_logits(self, network: nn.Module) -> Tensor:
        return ridge_logits(network, self.support_inputs, self.support_labels, self.query_inputs)


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
    head: Literal["linear", "ridge"] = "linear"

    def tasks(self, tasks: Iterable[Task]) -> list[Task]:
        """The tasks as this inner loop sees them."""
        if self.head == "linear":
            return list(tasks)
        return [RidgeTask(t.support_inputs, t.support_labels, t.query_inputs, t.query_labels) for t in tasks]


@dataclass(frozen=True)
class Lane:
    """One learner among those that an engine trains side by side: what it changes, and how."""

    model: nn.Module
    mask: GradientMask
    optimizer: torch.optim.Optimizer
    draw: Draw
    inner: InnerLoop
    seed: int = 0
    outer_clamp: float | None = None  # bound on every entry of the outer gradients

    def tasks(self, step: int | Tensor) -> Sequence[Task]:
        return self.inner.tasks(self.draw(step))

    def clamp_gradients(self) -> None:
        if self.outer_clamp is not None:
            for tensor in (*self.model.parameters(), *self.mask.parameters()):
                if tensor.grad is not None:
                    tensor.grad.clamp_(-self.outer_clamp, self.outer_clamp)


def accuracy(probabilities: Tensor, labels: Tensor) -> Tensor:
    correct: Tensor = probabilities.argmax(-1) == labels
    return correct.float().mean(-1)
