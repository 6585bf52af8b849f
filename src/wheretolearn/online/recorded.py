"""A learner's step as one CUDA graph, for learners that decide nothing on the way; on a CPU it runs as it stands.

What cannot be recorded runs without a graph, and a note says so.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from wheretolearn.engine.fallback import first_line
from wheretolearn.engine.graphed import Precision, matrix_precision, new_stream
from wheretolearn.errors import UserError
from wheretolearn.online.learners.base import OnlineLearner

DIVERGED = -1  # instead of a number of images


class RecordedStep:
    """Predict and observe, for batches of one shape, on a stream of its own: steps of several learners overlap."""

    def __init__(
        self,
        learner: OnlineLearner,
        device: torch.device,
        precision: Precision = "float32",
        notify: Callable[[str], None] | None = None,
    ):
        self.learner, self.precision, self.notify = learner, precision, notify
        self.recording = device.type == "cuda"
        self._right = torch.zeros((), dtype=torch.int64, device=device)
        self._stream = new_stream(device) if device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Tensor | None = None
        self._labels: Tensor | None = None
        self._begun = False

    def step(self, inputs: Tensor, labels: Tensor, right: Tensor) -> None:
        """Learn from a batch; ``right`` gets how many images were predicted before that, or ``DIVERGED``.

        On a GPU this only queues the work: wait for the device before reading.
        """
        begun = self._begun
        self._begun = True
        if self._stream is not None:
            inputs, labels = self._placed(inputs, labels, self._stream)
        with self._own_stream():
            if begun and self.recording:  # whatever a learner makes once, it makes at its first batch
                self._replay(inputs, labels)
            else:
                self._step(inputs, labels)
            right.copy_(self._right)

    def _placed(self, inputs: Tensor, labels: Tensor, stream: torch.cuda.Stream) -> tuple[Tensor, Tensor]:
        """A copy of the batch, where a graph reads it."""
        torch.cuda.current_stream(inputs.device).wait_stream(stream)  # for this learner's last step alone
        if self._inputs is None or self._labels is None:
            self._inputs, self._labels = inputs.clone(), labels.clone()
        self._inputs.copy_(inputs)
        self._labels.copy_(labels)
        return self._inputs, self._labels

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream), matrix_precision(self.precision):
            yield

    def _replay(self, inputs: Tensor, labels: Tensor) -> None:
        if self._graph is None:
            before = self.learner.state()
            self._graph = graph_or_note(
                lambda: record(lambda: self._step(inputs, labels), inputs.device, self._stream),
                lambda: self.learner.restore(before),
                self.notify,
            )
            self.recording = self._graph is not None
        if self._graph is None:
            self._step(inputs, labels)
        else:
            self._graph.replay()

    def _step(self, inputs: Tensor, labels: Tensor) -> None:
        logits = self.learner.predict(inputs)
        right = (logits.argmax(-1) == labels).sum()
        self._right.copy_(torch.where(logits.isfinite().all(), right, DIVERGED))
        self.learner.observe(inputs, labels)


def record(work: Callable[[], None], device: torch.device, stream: torch.cuda.Stream | None) -> torch.cuda.CUDAGraph:
    """Warm up, then record. Who calls this undoes what the work has changed."""
    work()  # kernels are compiled and chosen
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def graph_or_note(
    make: Callable[[], torch.cuda.CUDAGraph], undo: Callable[[], None], notify: Callable[[str], None] | None
) -> torch.cuda.CUDAGraph | None:
    """A new graph; None, and a note, where none can be made. Either way what making it has changed is undone."""
    try:
        return make()
    except UserError:
        raise
    except Exception as error:
        if notify is not None:
            reason = first_line(error)
            notify(f"a step cannot be recorded as a CUDA graph and runs without one, which is slower: {reason}")
        return None
    finally:
        undo()
