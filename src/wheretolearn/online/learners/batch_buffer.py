"""The batches that a learner keeps until its next meta-update."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from wheretolearn.engine.task import Task
from wheretolearn.errors import DataError


class BatchBuffer:
    """Copies of batches of one shape, in order."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, Tensor]] = []

    @property
    def count(self) -> int:
        return len(self._batches)

    def add(self, inputs: Tensor, labels: Tensor) -> None:
        if self._batches and inputs.shape != self._batches[0][0].shape:
            raise DataError(
                f"a batch of shape {tuple(inputs.shape)} after one of {tuple(self._batches[0][0].shape)}: "
                "batches to be paired must be alike"
            )
        self._batches.append((inputs.clone(), labels.clone()))

    def pairs(self) -> list[tuple[int, int]]:
        """Supports from the first half, queries from the second, in order; a lone batch is both.

        Of an odd number the middle batch has no partner and is left out.
        """
        if self.count == 1:
            return [(0, 0)]
        second_half = (self.count + 1) // 2
        return [(number, second_half + number) for number in range(self.count // 2)]

    def tasks(self) -> Iterator[Task]:
        for support, query in self.pairs():
            yield Task(*self._batches[support], *self._batches[query])

    def clear(self) -> None:
        self._batches.clear()

    def state(self) -> dict[str, Tensor]:
        """The batches kept; {} where there are none."""
        if not self._batches:
            return {}
        inputs, labels = zip(*self._batches, strict=True)
        return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.clear()
        if state:
            for inputs, labels in zip(state["inputs"], state["labels"], strict=True):
                self.add(inputs, labels)
