"""Adaptation of any module's tasks on a GPU: the inner step compiled, each task on a stream of its own.

Compiling fuses normalisation, activation, pooling and the masked update. Weights, rates and gradient sums stay in
float32 whatever the precision of the network's passes.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from wheretolearn import batch_norm
from wheretolearn.engine.graphed import (
    Adaptation,
    Job,
    JobGradient,
    Precision,
    T,
    Tensors,
    matrix_precision,
    new_stream,
)
from wheretolearn.engine.passes import P, Passes, exact
from wheretolearn.engine.still_body import FEATURES, StillBody, body_and_head, only_head_moves
from wheretolearn.engine.task import InnerLoop
from wheretolearn.masks import GradientMask


def unsupported(model: nn.Module, mask: GradientMask, inner: InnerLoop) -> str | None:
    """Why this arithmetic cannot run such a training, or None if it can."""
    if inner.head != "linear":
        return f"the head {inner.head!r}"
    if not getattr(mask, "elementwise", True):
        return f"masks of the kind {mask.kind!r}"
    if inner.batch_norm != "batch":
        return f"the batch-norm mode {inner.batch_norm!r}"
    if any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules()):
        return "dropout"
    return None


class CompiledArithmetic:
    """``model`` gives the architecture only: jobs bring their weights."""

    def __init__(
        self, model: nn.Module, clip_norm: float | None = None, precision: Precision = "float32", compiled: bool = True
    ):
        network = copy.deepcopy(model)
        batch_norm.fix_mode(network, "batch")  # no statistics to carry along
        device = next(model.parameters()).device
        self.precision = precision
        self._clip_norm = clip_norm
        self._compiled = compiled and device.type == "cuda"
        self._streams = ParallelStreams(device)

        def call(module: nn.Module, weights: Tensors, inputs: Tensor) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                outputs: Tensor = functional_call(module, weights, (inputs,))
            return outputs

        def outputs_of(weights: Tensors, inputs: Tensor) -> Tensor:
            return call(network, weights, inputs)

        self._network, self._call, self._outputs_of = network, call, outputs_of
        self._whole = Passes(outputs_of, clip_norm, self._fast)
        self._still_body: StillBody | None = None  # made for the first job that needs it

    def _fast(self, function: Callable[P, T]) -> Callable[P, T]:
        return torch.compile(function, fullgraph=True, dynamic=False) if self._compiled else function

    def meta_gradients(self, jobs: Sequence[Job], steps: int) -> list[JobGradient]:
        return self._streams.run([partial(self._meta_gradient, job, steps) for job in jobs])

    def probabilities(self, jobs: Sequence[Job], steps: int) -> Tensor:
        return torch.stack(self._streams.run([partial(self._job_probabilities, job, steps) for job in jobs]))

    def adaptations(self, jobs: Sequence[Job], steps: int) -> list[Adaptation]:
        return self._streams.run([partial(self._adaptation, job, steps) for job in jobs])

    def logits(self, weights: Tensors, inputs: Tensor) -> Tensor:
        return exact(self._outputs_of(weights, inputs))

    @contextmanager
    def settings(self) -> Iterator[None]:
        with matrix_precision(self.precision), compiler_settings() if self._compiled else nullcontext():
            yield

    def _meta_gradient(self, job: Job, steps: int) -> JobGradient:
        parameters, sums = self._adapt(job, steps)
        outer, loss = self._whole.outer_gradient(parameters, job.task.query_inputs, job.task.query_labels)
        return JobGradient(outer, sums, loss)

    def _adaptation(self, job: Job, steps: int) -> Adaptation:
        task = job.task
        before = F.softmax(self.logits(job.theta, task.support_inputs), dim=1)
        parameters, _ = self._adapt(job, steps)
        loss = F.cross_entropy(self.logits(parameters, task.support_inputs), task.support_labels)
        return Adaptation(before, {name: parameters[name] for name in job.rates}, loss)

    def _job_probabilities(self, job: Job, steps: int) -> Tensor:
        parameters, _ = self._adapt(job, steps)
        return F.softmax(self.logits(parameters, job.task.query_inputs), dim=1)

    def _adapt(self, job: Job, steps: int) -> tuple[Tensors, Tensors]:
        rates = rates_of(job)
        moving = {name: job.theta[name] for name in rates}
        sums = {name: torch.zeros_like(value) for name, value in moving.items()}
        passes, still, _ = self._for_inner_steps(job, steps)
        for _ in range(steps):
            moving, sums = passes.inner_step(
                moving, sums, still, rates, job.task.support_inputs, job.task.support_labels
            )
        return {**job.theta, **moving}, sums

    def _for_inner_steps(self, job: Job, steps: int) -> tuple[Passes, Tensors, StillBody | None]:
        """Passes through as much of the network as needed, what does not move there, and the body if it is left out."""
        if steps == 0 or not only_head_moves(self._network, job.rates):
            return self._whole, {name: value for name, value in job.theta.items() if name not in job.rates}, None
        if self._still_body is None:
            self._still_body = StillBody(self._network, self._call, self._clip_norm, self._fast)
        body, head = body_and_head(job.theta)
        still = {name: value for name, value in head.items() if name not in job.rates}
        features = self._still_body.features(body, job.task.support_inputs)
        return self._still_body.passes_of_head, {**still, FEATURES: features}, self._still_body


def rates_of(job: Job) -> Tensors:
    """Full tensors, laid out like the weights: the compiler stumbles over expanded ones, and pays for other layouts."""
    return {name: torch.empty_like(job.theta[name], dtype=rate.dtype).copy_(rate) for name, rate in job.rates.items()}


@contextmanager
def compiler_settings() -> Iterator[None]:
    # All engines share a function's compiled versions; by default, more than 8 kinds of training are an error.
    with silent_compiler(), torch.compiler.config.patch(recompile_limit=256):  # type: ignore[attr-defined]
        yield


@contextmanager
def silent_compiler() -> Iterator[None]:
    """What the compiler tells about its own choices is nothing that a user could act on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\._inductor\.")
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning, r"torch\.jit\.")
        yield


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
