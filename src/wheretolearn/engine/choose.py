"""Which engine runs a training: the fast one where it can, the readable one everywhere else."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal, Protocol

from torch import Tensor, nn

from wheretolearn.engine import compiled, conv4_cpu, fused
from wheretolearn.engine.compiled import CompiledArithmetic
from wheretolearn.engine.conv4_cpu import Conv4OnCPU
from wheretolearn.engine.eager import EagerEngine, EagerEvaluator
from wheretolearn.engine.fallback import FirstThatRuns, first_line
from wheretolearn.engine.fused import FusedConv4
from wheretolearn.engine.graphed import Arithmetic, GraphedEngine, GraphedEvaluator, Precision
from wheretolearn.engine.second_order import SecondOrderArithmetic
from wheretolearn.engine.task import InnerLoop, Lane, Task
from wheretolearn.errors import ConfigError
from wheretolearn.masks import GradientMask

EngineName = Literal["eager", "graphed", "fused"]
EngineKind = Literal["auto", "eager", "graphed", "fused"]
FASTEST_FIRST: tuple[EngineName, ...] = ("fused", "graphed", "eager")
CAN_RUN: dict[Precision, tuple[EngineName, ...]] = {  # tf32 is a matter of the GPU's: others take it for float32
    "float32": FASTEST_FIRST,
    "tf32": FASTEST_FIRST,
    "bfloat16": ("fused", "graphed"),
    "float16": ("fused",),
}


class Evaluator(Protocol):
    """Measures a model, with the weights it then has, on tasks."""

    def accuracies(self, tasks: Iterable[Task], steps: int) -> Tensor:
        """Query accuracy of each task after ``steps`` inner steps."""

    def probabilities(self, tasks: Iterable[Task], steps: int) -> Tensor:
        """Probability of each class, for each query image of each task: ``[tasks, queries, ways]``."""


class Engine(Protocol):
    name: str
    note: str | None  # why the fast engine was not taken, where that is not what was asked for

    def outer_step(self, steps: Sequence[int]) -> None:
        """Update theta and mask of each lane from the tasks of its step."""

    def last_losses(self) -> list[float]:
        """Mean query loss of each lane's last step; raises NonFiniteError if a loss was not finite."""

    def evaluator(self, number: int) -> Evaluator:
        """Measures the model of one lane."""


def make_engine(lanes: Sequence[Lane], *, kind: EngineKind = "auto", precision: Precision = "float32") -> Engine:
    """The engine for trainings side by side; ``auto`` takes the fastest one that can run them.

    Lanes have one architecture, one number of inner steps and tasks alike in shape; all else may differ.
    """
    first = lanes[0]
    alike = {(lane.inner.steps, lane.inner.clip_norm, lane.inner.order) for lane in lanes}
    if len(alike) > 1:
        raise ConfigError("trainings side by side must have the same inner_steps, inner_clip_norm and order")
    # The most that all lanes can do.
    possible = [choose(lane.model, lane.mask, lane.inner, kind, precision) for lane in lanes]
    note = None
    for name in FASTEST_FIRST[max(map(FASTEST_FIRST.index, possible)) :]:
        if name == "eager" or name not in CAN_RUN[precision]:
            break
        engine = GraphedEngine(lanes, make_arithmetic(name, first.model, first.inner, precision), name, note)
        try:
            engine.record()
        except Exception as error:
            problem = f"the {name} engine cannot run this: {first_line(error)}"
            if kind != "auto":
                raise ConfigError(problem) from error
            note = note or f"{problem}; a slower engine runs"
        else:
            return engine
    if "eager" not in CAN_RUN[precision]:
        raise ConfigError(f"precision={precision} needs a fast engine: {note}")
    return EagerEngine(lanes, note, [_conv4_on_cpu(lane.model, lane.mask, lane.inner, kind) for lane in lanes])


def make_evaluator(
    model: nn.Module,
    mask: GradientMask,
    inner: InnerLoop,
    *,
    kind: EngineKind = "auto",
    precision: Precision = "float32",
    lanes: int = 10,
    notify: Callable[[str], None] | None = None,
) -> Evaluator:
    """Measures a model outside training; ``lanes`` tasks at a time where the engine records graphs.

    ``notify`` is told where ``auto`` has to take a slower way than it meant to.
    """
    name = choose(model, mask, inner, kind, precision)
    if name == "eager":
        return EagerEvaluator(model, mask, inner, _conv4_on_cpu(model, mask, inner, kind))
    make = make_arithmetic if kind != "auto" else partial(arithmetic_that_runs, notify=notify)
    return GraphedEvaluator(model, mask, inner, make(name, model, inner, precision), lanes)


def choose(
    model: nn.Module, mask: GradientMask, inner: InnerLoop, kind: EngineKind, precision: Precision
) -> EngineName:
    """The fastest engine for a training, or the one asked for if it can run it."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    reasons = _reasons_against(model, mask, inner)
    if "graphed" not in CAN_RUN[precision]:
        reasons["graphed"] = f"precision={precision}"
    if kind == "graphed" or kind == "fused":
        reason = reasons[kind]
        if kind == "fused" and not on_gpu:
            reason = reason or "a training without a GPU"
        if reason is not None:
            raise ConfigError(f"the {kind} engine does not support {reason}: use engine=eager or engine=auto")
        return kind
    if kind == "auto" and on_gpu:
        for name in ("fused", "graphed"):
            if reasons[name] is None:
                return name
    if "eager" not in CAN_RUN[precision]:
        slowest = CAN_RUN[precision][-1]
        reason = "" if reasons[slowest] is None else f", which does not support {reasons[slowest]}"
        raise ConfigError(f"precision={precision} needs the {slowest} engine on a GPU{reason}: use precision=float32")
    return "eager"


def runs_in(precision: Precision, model: nn.Module, mask: GradientMask, inner: InnerLoop) -> bool:
    """Whether a GPU has an engine for such a training in this precision."""
    reasons = _reasons_against(model, mask, inner)
    return any(reasons[name] is None for name in CAN_RUN[precision])


def _reasons_against(model: nn.Module, mask: GradientMask, inner: InnerLoop) -> dict[EngineName, str | None]:
    """What of a training each engine does not support."""
    graphed = compiled.unsupported(model, mask, inner)
    return {"eager": None, "graphed": graphed, "fused": graphed or fused.unsupported(model, inner)}


def make_arithmetic(
    name: EngineName, model: nn.Module, inner: InnerLoop, precision: Precision = "float32", compiled: bool = True
) -> Arithmetic:
    """How a fast engine adapts to tasks."""
    if name == "fused":
        return FusedConv4(model, precision)
    arithmetic = CompiledArithmetic if inner.order == "first" else SecondOrderArithmetic
    return arithmetic(model, inner.clip_norm, precision, compiled)


def _conv4_on_cpu(model: nn.Module, mask: GradientMask, inner: InnerLoop, kind: EngineKind) -> Arithmetic | None:
    """What takes the place of ``inner_loop`` in the eager engine, unless that was asked for by name."""
    if kind == "eager" or inner.order != "first" or inner.clip_norm is not None or not conv4_cpu.supports(model):
        return None
    return Conv4OnCPU(model) if compiled.unsupported(model, mask, inner) is None else None


def arithmetic_that_runs(
    name: EngineName,
    model: nn.Module,
    inner: InnerLoop,
    precision: Precision = "float32",
    notify: Callable[[str], None] | None = None,
) -> Arithmetic:
    """The arithmetic of an engine, or of a slower one where that cannot run."""
    make = partial(make_arithmetic, model=model, inner=inner, precision=precision)
    names = [slower for slower in FASTEST_FIRST[FASTEST_FIRST.index(name) : -1] if slower in CAN_RUN[precision]]
    makers: dict[str, Callable[[], Arithmetic]] = {f"the {slower} engine": partial(make, slower) for slower in names}
    if "graphed" in CAN_RUN[precision]:
        makers["the graphed engine without compiling"] = partial(make, "graphed", compiled=False)
    else:
        makers["any other"] = partial(_refuse, precision)
    return FirstThatRuns(makers, notify)


def _refuse(precision: Precision) -> Arithmetic:
    others = ", ".join(other for other in CAN_RUN if other != precision)
    raise ConfigError(f"precision={precision} needs the {CAN_RUN[precision][0]} engine: use one of {others}")
