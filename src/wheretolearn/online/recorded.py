"""A learner's step as one CUDA graph, for learners that decide nothing on the way; on a CPU it runs as it stands."""

import torch
from torch import Tensor

from wheretolearn.engine.graphed import Precision, matrix_precision, new_stream
from wheretolearn.online.learners.base import OnlineLearner

DIVERGED = -1  # instead of a number of images


class RecordedStep:
    """Predict and observe, for batches of one shape, on a stream of its own: steps of several learners overlap."""

    def __init__(self, learner: OnlineLearner, device: torch.device, precision: Precision = "float32"):
        self.learner, self.precision = learner, precision
        self._right = torch.zeros((), dtype=torch.int64, device=device)
        self._stream = new_stream(device) if device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Tensor | None = None
        self._labels: Tensor | None = None

    def step(self, inputs: Tensor, labels: Tensor, right: Tensor) -> None:
        """Learn from a batch; ``right`` gets how many images were predicted before that, or ``DIVERGED``.

        On a GPU this only queues the work: wait for the device before reading.
        """
        if self._stream is None:
            self._step(inputs, labels)
            right.copy_(self._right)
            return
        current = torch.cuda.current_stream(inputs.device)
        current.wait_stream(self._stream)  # for this learner's last step alone
        first = self._inputs is None or self._labels is None
        if self._inputs is None or self._labels is None:
            self._inputs, self._labels = inputs.clone(), labels.clone()
        self._inputs.copy_(inputs)
        self._labels.copy_(labels)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), matrix_precision(self.precision):
            if first:  # whatever a learner makes once, it makes at its first batch
                self._step(self._inputs, self._labels)
            else:
                if self._graph is None:
                    self._graph = self._record(self._inputs, self._labels)
                self._graph.replay()
            right.copy_(self._right)

    def _step(self, inputs: Tensor, labels: Tensor) -> None:
        logits = self.learner.predict(inputs)
        right = (logits.argmax(-1) == labels).sum()
        self._right.copy_(torch.where(logits.isfinite().all(), right, DIVERGED))
        self.learner.observe(inputs, labels)

    def _record(self, inputs: Tensor, labels: Tensor) -> torch.cuda.CUDAGraph:
        """Warm up, record, and undo what warming up learned."""
        before = self.learner.state()
        self._step(inputs, labels)
        torch.cuda.synchronize(inputs.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._step(inputs, labels)
        self.learner.restore(before)
        return graph
