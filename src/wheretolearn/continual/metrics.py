"""What a continual learner is judged by, from its accuracy on every task after every task."""

from collections.abc import Iterable

import torch
from torch import Tensor

from wheretolearn.continual.learners.base import Learner


def accuracies(learner: Learner, test_sets: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Of each lane, on inputs ``[lanes, N, ...]`` and labels that come in chunks."""
    right, count = torch.zeros((), dtype=torch.int64), 0
    for inputs, labels in test_sets:
        right = (learner.predict(inputs).argmax(-1) == labels).sum(1) + right.to(labels.device)
        count += labels.shape[1]
    shares: list[float] = (right.double() / count).tolist()
    return shares


def retained_accuracy(matrix: Tensor) -> float:
    """RA: mean accuracy on all tasks at the end. ``matrix[i, j]``: on task j after task i."""
    return matrix[-1].mean().item()


def backward_transfer(matrix: Tensor) -> float:
    """BTI: how much the accuracy on a task changed from right after it to the end, mean over tasks."""
    return (matrix[-1] - matrix.diagonal()).mean().item()


def forward_transfer(matrix: Tensor, untrained: Tensor) -> float:
    """How much better a task is known just before it comes than by the untrained network, mean over later tasks."""
    if len(matrix) < 2:
        return 0.0
    before = torch.diagonal(matrix, offset=1)
    return (before - untrained[1:]).mean().item()
