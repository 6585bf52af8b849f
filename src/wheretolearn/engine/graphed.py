"""The fast engine: a whole outer step as one CUDA graph, its tasks on parallel streams.

Drawing the tasks, K inner steps of each, the meta-gradient and the optimizer are recorded once and replayed as
one launch. The inner step is compiled, so that normalisation, activation, pooling and the masked update fuse.
Weights, mask, gradient sums and optimizer state stay in float32 whatever the precision of the network's passes.

Without a GPU nothing is recorded or compiled and the same arithmetic runs as it stands, as the tests do.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn import functional as F

from wheretolearn import batch_norm
from wheretolearn.data.random_bits import normal
from wheretolearn.engine.task import Draw, InnerLoop, Task
from wheretolearn.errors import NonFiniteError
from wheretolearn.masks import GradientMask

Precision = Literal["float32", "tf32", "bfloat16"]
Tensors = dict[str, Tensor]
T = TypeVar("T")


def unsupported(inner: InnerLoop, model: nn.Module) -> str | None:
    """Why this engine cannot run such a training, or None if it can."""
    if inner.order != "first":
        return "second-order gradients"
    if inner.batch_norm != "batch":
        return f"the batch-norm mode {inner.batch_norm!r}"
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return "dropout"
    return None


class Passes:
    """The arithmetic of one task: an inner step, and the gradient at the end; compiled where wanted."""

    def __init__(self, model: nn.Module, mask: GradientMask, inner: InnerLoop, precision: Precision, compiled: bool):
        network = copy.deepcopy(model)
        batch_norm.fix_mode(network, "batch")  # no statistics to carry along
        device = next(model.parameters()).device.type
        names, learned, lr, clip = mask.names, bool(mask.raw), inner.inner_lr, inner.clip_norm
        self.precision = precision

        def loss(moving: Tensors, still: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
                outputs = functional_call(network, {**moving, **still}, (inputs,))
            dtype = torch.promote_types(outputs.dtype, torch.float32)
            return F.cross_entropy(outputs.to(dtype), labels)

        gradient_of_moving = grad_and_value(loss)

        def inner_step(
            moving: Tensors, sums: Tensors, still: Tensors, multipliers: Tensors, inputs: Tensor, labels: Tensor
        ) -> tuple[Tensors, Tensors]:
            gradients, _ = gradient_of_moving(moving, still, inputs, labels)
            if clip is not None:
                norm = torch.stack([(g * g).sum() for g in gradients.values()]).sum().sqrt()
                scale = (clip / (norm + 1e-6)).clamp(max=1.0)
                gradients = {name: g * scale for name, g in gradients.items()}
            moved = {name: moving[name] - lr * multipliers[name] * gradients[name] for name in names}  # Eq. 4
            return moved, {name: sums[name] + gradients[name] for name in names} if learned else {}

        def outer_gradient(parameters: Tensors, inputs: Tensor, labels: Tensor) -> tuple[Tensors, Tensor]:
            gradients, value = gradient_of_moving(parameters, {}, inputs, labels)
            return gradients, value

        def accuracy(parameters: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
                outputs = functional_call(network, parameters, (inputs,))
            correct: Tensor = outputs.argmax(1) == labels
            return correct.float().mean()

        self.inner_step, self.outer_gradient, self.accuracy = inner_step, outer_gradient, accuracy
        if compiled:
            self.inner_step = torch.compile(inner_step, fullgraph=True, dynamic=False)
            self.outer_gradient = torch.compile(outer_gradient, fullgraph=True, dynamic=False)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Matrix precision and convolution search, for as long as kernels are being chosen."""
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        try:
            with torch.backends.cudnn.flags(
                enabled=True, benchmark=True, deterministic=False, allow_tf32=self.precision != "float32"
            ):
                yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


class GraphedEngine:
    """Outer steps without Python in between. ``last_loss`` waits for the GPU; ``outer_step`` does not."""

    name = "graphed"

    def __init__(
        self,
        model: nn.Module,
        mask: GradientMask,
        optimizer: torch.optim.Optimizer,
        draw: Draw,
        inner: InnerLoop,
        seed: int = 0,
        *,
        precision: Precision = "float32",
        compiled: bool = True,
    ):
        self.model, self.mask, self.optimizer = model, mask, optimizer
        self.draw, self.inner, self.seed = draw, inner, seed
        self.device = next(model.parameters()).device
        self.on_gpu = self.device.type == "cuda"
        self.passes = Passes(model, mask, inner, precision, compiled=compiled and self.on_gpu)
        self._step = torch.zeros((), dtype=torch.int64, device=self.device)
        self._loss = torch.full((), float("nan"), device=self.device)
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=self.device)  # outer step of the first bad loss
        self._streams = ParallelStreams(self.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = new_stream(self.device) if self.on_gpu else None

    def outer_step(self, step: int) -> None:
        """Queue one update of theta and mask."""
        if not self.on_gpu:
            self._step.fill_(step)
            self._outer_step()
            return
        if self._graph is None:
            self._record(step)
        assert self._graph is not None
        assert self._stream is not None
        # Whoever reads the weights on the current stream (evaluation, copies of the best) finishes first.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._step.fill_(step)
            self._graph.replay()

    def last_loss(self) -> float:
        """Mean query loss of the last step; raises if any loss since the start was not finite."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        bad = int(self._first_bad)
        if bad >= 0:
            raise NonFiniteError(
                f"a loss or gradient is not finite: outer step {bad + 1}. Checkpoints saved before it are good; train "
                "with engine=eager to see the task, inner step and layer, or use a smaller inner_lr or theta_lr"
            )
        return self._loss.item()

    def _record(self, step: int) -> None:
        """Warm up (kernels are compiled and chosen, optimizer state comes to be), undo that, and record."""
        assert self._stream is not None
        theta = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        raw = {name: t.clone() for name, t in self.mask.tensors().items()}
        state = copy.deepcopy(self.optimizer.state_dict())
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.passes.settings(), torch.cuda.stream(self._stream):
            self._step.fill_(step)
            for _ in range(2):
                self._outer_step()
            torch.cuda.synchronize(self.device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._outer_step()
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(theta[name])
                for name, tensor in self.mask.tensors().items():
                    tensor.copy_(raw[name])
                _restore_in_place(self.optimizer, state)
            self._first_bad.fill_(-1)
        torch.cuda.synchronize(self.device)

    def _outer_step(self) -> None:
        step = self._step
        self.mask.resample(lambda like: normal(like.shape, self.seed, "mask noise", step, device=self.device))
        tasks = self.draw(step if self.on_gpu else int(step))
        theta = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        multipliers = self.mask.multipliers()
        if not self.mask.raw:  # expanded constants upset the compiler's strides
            multipliers = {name: m.contiguous() for name, m in multipliers.items()}
        results = self._streams.run([partial(self._task_gradient, task, theta, multipliers) for task in tasks])
        weight = 1.0 / len(tasks)
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name in theta:
                parameters[name].grad = sum_of([outer[name] for outer, _, _ in results]) * weight
            if self.mask.raw:
                total = {name: sum_of([m[name] for _, m, _ in results]) * weight for name in self.mask.names}
                for name, gradient in self.mask.pull_back(total).items():
                    self.mask.raw[name].grad = gradient
            losses = torch.stack([loss for _, _, loss in results])
            self._loss.copy_(losses.mean())
            gradients = [*self.model.parameters(), *self.mask.parameters()]
            sums = torch.stack([tensor.grad.sum().float() for tensor in gradients if tensor.grad is not None])
            newly_bad = (self._first_bad < 0) & ~(losses.isfinite().all() & sums.isfinite().all())
            self._first_bad.copy_(torch.where(newly_bad, step, self._first_bad))
        self.optimizer.step()

    def _task_gradient(self, task: Task, theta: Tensors, multipliers: Tensors) -> tuple[Tensors, Tensors, Tensor]:
        names = self.mask.names
        moving = {name: theta[name] for name in names}
        still = {name: value for name, value in theta.items() if name not in moving}
        sums = {name: torch.zeros_like(theta[name]) for name in names} if self.mask.raw else {}
        for _ in range(self.inner.steps):
            moving, sums = self.passes.inner_step(
                moving, sums, still, multipliers, task.support_inputs, task.support_labels
            )
        outer, loss = self.passes.outer_gradient({**moving, **still}, task.query_inputs, task.query_labels)
        to_multipliers = {name: outer[name] * sums[name] * -self.inner.inner_lr for name in sums}  # Eq. 5
        return outer, to_multipliers, loss


class ParallelStreams:
    """Runs each job on a stream of its own, so that small kernels of different tasks share the GPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self._streams: list[torch.cuda.Stream] = []

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        if self.device.type != "cuda":
            return [job() for job in jobs]
        while len(self._streams) < len(jobs):
            self._streams.append(new_stream(self.device))
        current = torch.cuda.current_stream(self.device)
        results = []
        for job, stream in zip(jobs, self._streams, strict=False):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                results.append(job())
        for stream in self._streams[: len(jobs)]:
            current.wait_stream(stream)
        return results


class GraphedEvaluator:
    """Accuracy of many tasks, ``lanes`` at a time: one recorded inner step of all lanes, replayed K times."""

    def __init__(self, model: nn.Module, mask: GradientMask, passes: Passes, lanes: int = 8):
        self.model, self.mask, self.passes, self.lanes = model, mask, passes, lanes
        self.device = next(model.parameters()).device
        self._streams = ParallelStreams(self.device)
        self._recorded: dict[str, torch.cuda.CUDAGraph] = {}
        self._slots: list[Task] = []  # the tensors that the graphs read their tasks from
        self._parameters: list[Tensors] = []
        self._multipliers: Tensors = {}
        self._accuracies = torch.zeros(lanes, device=self.device)

    def accuracies(self, tasks: Iterable[Task], steps: int) -> Tensor:
        """Query accuracy of each task after ``steps`` inner steps from the model's present weights."""
        results = []
        for chunk in batched(tasks, self.lanes):
            if not self._slots:
                self._allocate(chunk[0])
            for slot, task in zip(self._slots, chunk, strict=False):
                slot.support_inputs.copy_(task.support_inputs)
                slot.query_inputs.copy_(task.query_inputs)
                slot.support_labels.copy_(task.support_labels)
                slot.query_labels.copy_(task.query_labels)
            self._run("start", self._start)
            for _ in range(steps):
                self._run("inner step", self._inner_step)
            self._run("measure", self._measure)
            results.append(self._accuracies[: len(chunk)].clone())
        return torch.cat(results)

    def _allocate(self, like: Task) -> None:
        self._slots = [
            Task(
                torch.clone(like.support_inputs),
                torch.clone(like.support_labels),
                torch.clone(like.query_inputs),
                torch.clone(like.query_labels),
            )
            for _ in range(self.lanes)
        ]
        theta = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        self._parameters = [{name: torch.clone(p) for name, p in theta.items()} for _ in range(self.lanes)]
        self._multipliers = {name: m.contiguous().clone() for name, m in self.mask.multipliers().items()}

    def _run(self, name: str, work: Callable[[], None]) -> None:
        if self.device.type != "cuda":
            work()
            return
        if name not in self._recorded:
            stream = new_stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            before = [{n: torch.clone(p) for n, p in lane.items()} for lane in self._parameters]
            with self.passes.settings(), torch.cuda.stream(stream):
                for _ in range(2):
                    work()
                torch.cuda.synchronize(self.device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    work()
                for lane, saved in zip(self._parameters, before, strict=True):
                    for n, p in lane.items():
                        p.copy_(saved[n])
            torch.cuda.synchronize(self.device)
            self._recorded[name] = graph
        self._recorded[name].replay()

    def _start(self) -> None:
        for name, multiplier in self.mask.multipliers().items():
            self._multipliers[name].copy_(multiplier)
        for name, parameter in self.model.named_parameters():
            for lane in self._parameters:
                if name in lane:
                    lane[name].copy_(parameter.detach())

    def _inner_step(self) -> None:
        self._streams.run([partial(self._adapt_lane, slot, lane) for slot, lane in self._lanes()])

    def _adapt_lane(self, slot: Task, lane: Tensors) -> None:
        names = self.mask.names
        moving = {name: lane[name] for name in names}
        still = {name: value for name, value in lane.items() if name not in moving}
        sums = {name: torch.zeros_like(lane[name]) for name in names} if self.mask.raw else {}
        moved, _ = self.passes.inner_step(
            moving, sums, still, self._multipliers, slot.support_inputs, slot.support_labels
        )
        for name, value in moved.items():
            lane[name].copy_(value)

    def _measure(self) -> None:
        accuracies = self._streams.run(
            [partial(self.passes.accuracy, lane, slot.query_inputs, slot.query_labels) for slot, lane in self._lanes()]
        )
        self._accuracies.copy_(torch.stack(accuracies))

    def _lanes(self) -> Iterator[tuple[Task, Tensors]]:
        return zip(self._slots, self._parameters, strict=True)


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def sum_of(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _restore_in_place(optimizer: torch.optim.Optimizer, saved: dict[str, object]) -> None:
    """Bring an optimizer's tensors back to a saved state without replacing them: a graph has recorded their places."""
    before = saved["state"]
    assert isinstance(before, dict)
    number = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    old = before.get(number, {}).get(key)
                    value.zero_() if old is None else value.copy_(old)
            number += 1
