"""Outer steps as one CUDA graph: drawing tasks, adapting to them, meta-gradients and optimizers, for all lanes.

All of it is recorded once and replayed as one launch, without Python in between. How a task is adapted to is the
business of an ``Arithmetic``: ``compiled.py`` has one for any module, ``fused.py`` one with kernels for Conv4.
Without a GPU nothing is recorded and the same arithmetic runs as it stands, as the tests do.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from wheretolearn.data.random_bits import normal
from wheretolearn.engine.task import InnerLoop, Lane, Task, accuracy
from wheretolearn.errors import NonFiniteError
from wheretolearn.masks import GradientMask

Precision = Literal["float32", "tf32", "bfloat16", "float16"]
Tensors = dict[str, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One task to adapt to, and where from. Jobs of one lane hold the very same ``theta`` and ``rates``."""

    theta: Tensors
    rates: Tensors  # inner_lr * multiplier, of the parameters that may change
    task: Task


@dataclass(frozen=True)
class JobGradient:
    outer: Tensors  # of the query loss, at the adapted weights; in second order at theta, through the inner steps
    inner_sum: Tensors  # of the support loss, summed over the inner steps; of the parameters that may change
    loss: Tensor
    through_steps: Tensors | None = None  # in second order: of the query loss, at the rates

    def to_rate(self, name: str) -> Tensor:
        """The gradient of the query loss at a parameter's rates."""
        if self.through_steps is not None:
            return self.through_steps[name]
        return -self.outer[name] * self.inner_sum[name]  # Eq. 5


@dataclass(frozen=True)
class Adaptation:
    before: Tensor  # [images, ways]: probabilities of the support images, before the first step
    weights: Tensors  # after the last step, of the parameters that may change
    loss: Tensor  # of the support images, after the last step


class Arithmetic(Protocol):
    """How tasks are adapted to. Runs while a graph is recorded, so shapes are fixed and nothing is read back."""

    def meta_gradients(self, jobs: Sequence[Job], steps: int) -> list[JobGradient]: ...

    def adaptations(self, jobs: Sequence[Job], steps: int) -> list[Adaptation]:
        """What inner steps do; query sets are not looked at."""

    def probabilities(self, jobs: Sequence[Job], steps: int) -> Tensor:
        """``[jobs, queries, ways]`` after ``steps`` inner steps."""

    def settings(self) -> AbstractContextManager[None]:
        """Entered while kernels are chosen."""


class GraphedEngine:
    """Outer steps without Python in between. ``last_losses`` waits for the GPU; ``outer_step`` does not."""

    def __init__(self, lanes: Sequence[Lane], arithmetic: Arithmetic, name: str = "graphed", note: str | None = None):
        self.lanes, self.arithmetic, self.name, self.note = list(lanes), arithmetic, name, note
        self.device = next(self.lanes[0].model.parameters()).device
        self.on_gpu = self.device.type == "cuda"
        count = len(self.lanes)
        self._steps = torch.zeros(count, dtype=torch.int64, device=self.device)
        self._losses = torch.full((count,), float("nan"), device=self.device)
        self._first_bad = torch.full((count,), -1, dtype=torch.int64, device=self.device)  # step of the first bad loss
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = new_stream(self.device) if self.on_gpu else None

    def outer_step(self, steps: Sequence[int]) -> None:
        """Queue one update of theta and mask of every lane."""
        if not self.on_gpu:
            self._steps.copy_(torch.tensor(steps))
            self._outer_step()
            return
        self.record()
        assert self._graph is not None
        assert self._stream is not None
        # Whoever reads the weights on the current stream (evaluation, copies of the best) finishes first.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for number, step in enumerate(steps):
                self._steps[number].fill_(step)
            self._graph.replay()

    def last_losses(self) -> list[float]:
        """Mean query loss of each lane's last step; raises if any loss since the start was not finite."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        for lane, bad in zip(self.lanes, self._first_bad.tolist(), strict=True):
            if bad >= 0:
                which = f" of seed {lane.seed}" if len(self.lanes) > 1 else ""
                raise NonFiniteError(
                    f"a loss or gradient is not finite: outer step {bad + 1}{which}. Checkpoints saved before it are "
                    "good; train with engine=eager to see the task, inner step and layer, or use a smaller inner_lr "
                    "or theta_lr"
                )
        return list(self._losses.tolist())

    def evaluator(self, number: int) -> "GraphedEvaluator":
        """Measures a lane's model by the same arithmetic."""
        lane = self.lanes[number]
        return GraphedEvaluator(lane.model, lane.mask, lane.inner, self.arithmetic)

    def record(self) -> None:
        """Warm up (kernels are compiled and chosen, optimizer state comes to be), record, and undo what that did."""
        if self._graph is not None or self._stream is None:
            return
        restore = [_memory_of(lane) for lane in self.lanes]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.arithmetic.settings(), torch.cuda.stream(self._stream):
            try:
                for _ in range(2):
                    self._outer_step()
                torch.cuda.synchronize(self.device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self._stream):
                    self._outer_step()
                self._graph = graph
            finally:
                for put_back in restore:
                    put_back()
                self._first_bad.fill_(-1)
                torch.cuda.synchronize(self.device)

    def _outer_step(self) -> None:
        jobs, first = [], [0]
        for number, lane in enumerate(self.lanes):
            step = self._steps[number]
            lane.mask.resample(self._noise(lane, step))
            jobs += jobs_of(lane.model, lane.mask, lane.inner, lane.draw(step if self.on_gpu else int(step)))
            first.append(len(jobs))
        results = self.arithmetic.meta_gradients(jobs, self.lanes[0].inner.steps)
        for number, lane in enumerate(self.lanes):
            self._use(number, results[first[number] : first[number + 1]])
            lane.optimizer.step()

    def _noise(self, lane: Lane, step: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda like: normal(like.shape, lane.seed, "mask noise", step, device=self.device)

    def _use(self, number: int, results: Sequence[JobGradient]) -> None:
        """Give a lane the mean gradient over its tasks."""
        lane = self.lanes[number]
        with torch.no_grad():
            for name, parameter in lane.model.named_parameters():
                if parameter.requires_grad:
                    parameter.grad = _mean([result.outer[name] for result in results])
            if lane.mask.raw:
                to_multipliers = {
                    name: _mean([result.to_rate(name) for result in results]) * lane.inner.inner_lr
                    for name in lane.mask.names
                }
                for name, gradient in lane.mask.pull_back(to_multipliers).items():
                    lane.mask.raw[name].grad = gradient
            losses = torch.stack([result.loss for result in results])
            self._losses[number].copy_(losses.mean())
            tensors = [*lane.model.parameters(), *lane.mask.parameters()]
            sums = torch.stack([tensor.grad.sum().float() for tensor in tensors if tensor.grad is not None])
            newly_bad = (self._first_bad[number] < 0) & ~(losses.isfinite().all() & sums.isfinite().all())
            self._first_bad[number].copy_(torch.where(newly_bad, self._steps[number], self._first_bad[number]))
            lane.clamp_gradients()


class GraphedEvaluator:
    """Measures a model, with the weights it then has, on many tasks, ``lanes`` of them in one recorded graph."""

    def __init__(self, model: nn.Module, mask: GradientMask, inner: InnerLoop, arithmetic: Arithmetic, lanes: int = 10):
        self.model, self.mask, self.inner, self.arithmetic, self.lanes = model, mask, inner, arithmetic, lanes
        self.device = next(model.parameters()).device
        self._slots: list[Task] = []  # the tensors that the graphs read their tasks from
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by number of inner steps

    def accuracies(self, tasks: Iterable[Task], steps: int) -> Tensor:
        """Query accuracy of each task after ``steps`` inner steps from the model's present weights."""
        return torch.cat([accuracy(probabilities, labels) for probabilities, labels in self._chunks(tasks, steps)])

    def probabilities(self, tasks: Iterable[Task], steps: int) -> Tensor:
        """Probability of each class, for each query image of each task: ``[tasks, queries, ways]``."""
        return torch.cat([probabilities for probabilities, _ in self._chunks(tasks, steps)])

    def _chunks(self, tasks: Iterable[Task], steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in batched(tasks, self.lanes):
            if not self._slots:
                self._slots = [_copy(chunk[0]) for _ in range(self.lanes)]
            for slot, task in zip(self._slots, chunk, strict=False):
                for part in ("support_inputs", "support_labels", "query_inputs", "query_labels"):
                    getattr(slot, part).copy_(getattr(task, part))
            probabilities = self._run(steps)[: len(chunk)].clone()
            yield probabilities, torch.stack([task.query_labels for task in chunk])

    def _run(self, steps: int) -> Tensor:
        if self.device.type != "cuda":
            return self._probabilities(steps)
        if steps not in self._recorded:
            stream = new_stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with self.arithmetic.settings(), torch.cuda.stream(stream):
                self._probabilities(min(steps, 2))  # kernels are compiled and chosen
                torch.cuda.synchronize(self.device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    result = self._probabilities(steps)
            torch.cuda.synchronize(self.device)
            self._recorded[steps] = graph, result
        graph, result = self._recorded[steps]
        graph.replay()
        return result

    def _probabilities(self, steps: int) -> Tensor:
        with torch.no_grad():
            return self.arithmetic.probabilities(jobs_of(self.model, self.mask, self.inner, self._slots), steps)


def jobs_of(model: nn.Module, mask: GradientMask, inner: InnerLoop, tasks: Sequence[Task]) -> list[Job]:
    theta = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    rates = {name: multiplier * inner.inner_lr for name, multiplier in mask.multipliers().items()}
    return [Job(theta, rates, task) for task in tasks]


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


@contextmanager
def matrix_precision(precision: Precision) -> Iterator[None]:
    """Of products and convolutions (by default cuDNN rounds to TF32), and a search for the fastest convolutions."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=True, deterministic=False, allow_tf32=precision != "float32"
        ):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).mean(0)


def _copy(task: Task) -> Task:
    parts = (task.support_inputs, task.support_labels, task.query_inputs, task.query_labels)
    return Task(*(torch.clone(part) for part in parts))


def _memory_of(lane: Lane) -> Callable[[], None]:
    """Remembers a lane's state; what it returns puts that back in place: a graph has recorded where tensors lie."""
    theta = {name: p.detach().clone() for name, p in lane.model.named_parameters()}
    raw = {name: t.clone() for name, t in lane.mask.tensors().items()}
    state = copy.deepcopy(lane.optimizer.state_dict()["state"])

    @torch.no_grad()
    def restore() -> None:
        for name, parameter in lane.model.named_parameters():
            parameter.copy_(theta[name])
        for name, tensor in lane.mask.tensors().items():
            tensor.copy_(raw[name])
        number = 0
        for group in lane.optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in lane.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        old = state.get(number, {}).get(key)
                        value.zero_() if old is None else value.copy_(old)
                number += 1

    return restore
