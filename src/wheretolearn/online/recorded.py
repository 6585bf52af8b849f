"""A learner's step as one CUDA graph, for learners that decide nothing on the way; on a CPU it runs as it stands."""

import torch
from torch import Tensor

from wheretolearn.engine.graphed import new_stream
from wheretolearn.online.learners.base import OnlineLearner

DIVERGED = -1  # instead of a number of images


class RecordedStep:
    """Predict and observe, for batches of one shape, on a stream of its own: steps of several learners overlap."""

    def __init__(self, learner: OnlineLearner, device: torch.device):
        self.learner = learner
        self.right = torch.zeros((), dtype=torch.int64, device=device)
        self._stream = new_stream(device) if device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Tensor | None = None
        self._labels: Tensor | None = None

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """How many images were predicted rightly, before learning from them; ``DIVERGED`` where not finite.

        The result is overwritten by the next step.
        """
        if self._stream is None:
            return self._step(inputs, labels)
        self._stream.wait_stream(torch.cuda.current_stream(inputs.device))
        with torch.cuda.stream(self._stream):
            if self._inputs is None or self._labels is None:
                self._inputs, self._labels = inputs.clone(), labels.clone()
                self._step(inputs, labels)  # whatever a learner makes once, it makes at its first batch
            else:
                self._inputs.copy_(inputs)
                self._labels.copy_(labels)
                if self._graph is None:
                    self._graph = self._record(self._inputs, self._labels)
                self._graph.replay()
        torch.cuda.current_stream(inputs.device).wait_stream(self._stream)
        return self.right

    def _step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = self.learner.predict(inputs)
        right = (logits.argmax(-1) == labels).sum()
        self.right.copy_(torch.where(logits.isfinite().all(), right, DIVERGED))
        self.learner.observe(inputs, labels)
        return self.right

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
