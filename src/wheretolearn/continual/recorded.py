"""A learner's step as one CUDA graph: recorded once, replayed for every batch. Without a GPU it runs as it stands."""

import torch
from torch import Tensor

from wheretolearn.continual.learners.base import Learner
from wheretolearn.continual.learners.gem import GEM
from wheretolearn.engine.graphed import new_stream


class Recorded:
    """``observe`` of a learner, for batches of one shape.

    GEM's projection is solved on the CPU, so it is never recorded.
    """

    def __init__(self, learner: Learner):
        self.learner = learner
        self._can_record = learner.weights.is_cuda and not isinstance(learner, GEM)
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}  # by whether the batch is fresh
        self._inputs: Tensor | None = None
        self._labels: Tensor | None = None

    def observe(self, inputs: Tensor, labels: Tensor, *, task: int, fresh: bool) -> None:
        if not self._can_record:
            self.learner.observe(inputs, labels, task=task, fresh=fresh)
            return
        if self._inputs is None or self._labels is None:
            self._inputs, self._labels = inputs.clone(), labels.clone()
        self._inputs.copy_(inputs)
        self._labels.copy_(labels)
        if fresh not in self._graphs:
            self._graphs[fresh] = self._record(self._inputs, self._labels, fresh)
        self._graphs[fresh].replay()

    def _record(self, inputs: Tensor, labels: Tensor, fresh: bool) -> torch.cuda.CUDAGraph:
        """Warm up, record, and undo what warming up learned."""
        learner = self.learner
        learner.prepare(inputs)
        before = learner.state()
        stream = new_stream(inputs.device)
        stream.wait_stream(torch.cuda.current_stream(inputs.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                learner.observe(inputs, labels, fresh=fresh)
        torch.cuda.current_stream(inputs.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            learner.observe(inputs, labels, fresh=fresh)
        learner.restore(before)
        return graph
