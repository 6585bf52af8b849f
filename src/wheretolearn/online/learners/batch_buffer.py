"""The batches that a learner keeps until its next meta-update."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from wheretolearn.engine.task import Task
from wheretolearn.errors import DataError


class BatchBuffer:
    """Batches of one shape, in order. Their memory is taken once, when the first of them shows its shape."""

    def __init__(self, capacity: int):
        self.capacity, self.count = capacity, 0
        self._inputs: Tensor | None = None
        self._labels: Tensor | None = None

    def add(self, inputs: Tensor, labels: Tensor) -> None:
        own_inputs, own_labels = self._memory(inputs, labels)
        own_inputs[self.count].copy_(inputs)
        own_labels[self.count].copy_(labels)
        self.count += 1

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        assert self._inputs is not None
        assert self._labels is not None
        return self._inputs[number], self._labels[number]

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
            yield Task(*self.batch(support), *self.batch(query))

    def clear(self) -> None:
        self.count = 0

    def state(self) -> dict[str, Tensor]:
        """The batches kept; {} where there are none."""
        if self._inputs is None or self._labels is None or self.count == 0:
            return {}
        return {"inputs": self._inputs[: self.count].clone(), "labels": self._labels[: self.count].clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.clear()
        if state:
            for inputs, labels in zip(state["inputs"], state["labels"], strict=True):
                self.add(inputs, labels)

    def _memory(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self._inputs is None or self._labels is None:
            self._inputs = torch.empty((self.capacity, *inputs.shape), dtype=inputs.dtype, device=inputs.device)
            self._labels = torch.empty((self.capacity, *labels.shape), dtype=labels.dtype, device=labels.device)
        if inputs.shape != self._inputs.shape[1:]:
            raise DataError(
                f"a batch of shape {tuple(inputs.shape)} in a stream that began with {tuple(self._inputs.shape[1:])}: "
                "batches to be paired must be alike"
            )
        return self._inputs, self._labels
