"""Which engine runs a training: the fast one where it can, the readable one everywhere else."""

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from torch import Tensor, nn

from wheretolearn.engine.compiled import CompiledArithmetic, unsupported
from wheretolearn.engine.eager import EagerEngine, EagerEvaluator
from wheretolearn.engine.graphed import GraphedEngine, GraphedEvaluator, Precision
from wheretolearn.engine.task import InnerLoop, Lane, Task
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.masks import GradientMask

EngineKind = Literal["auto", "eager", "graphed"]


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
    """The engine for trainings side by side; ``auto`` takes the fast one on a GPU wherever it can.

    Lanes have one architecture, one number of inner steps and tasks alike in shape; all else may differ.
    """
    first = lanes[0].inner
    if any((lane.inner.steps, lane.inner.clip_norm) != (first.steps, first.clip_norm) for lane in lanes):
        raise ConfigError("trainings side by side must have the same inner_steps and inner_clip_norm")
    if {choose(lane.model, lane.mask, lane.inner, kind, precision) for lane in lanes} == {"graphed"}:
        engine = GraphedEngine(lanes, CompiledArithmetic(lanes[0].model, first.clip_norm, precision))
        try:
            engine.record()
        except UserError:
            raise
        except Exception as error:
            if kind == "graphed" or precision == "bfloat16":
                raise ConfigError(f"the module cannot be recorded as a CUDA graph: {_first_line(error)}") from error
            note = (
                f"the module cannot be recorded as a CUDA graph, so the slower eager engine runs: {_first_line(error)}"
            )
            return EagerEngine(lanes, note)
        return engine
    return EagerEngine(lanes)


def make_evaluator(
    model: nn.Module,
    mask: GradientMask,
    inner: InnerLoop,
    *,
    kind: EngineKind = "auto",
    precision: Precision = "float32",
    lanes: int = 10,
) -> Evaluator:
    """Measures a model outside training; ``lanes`` tasks at a time where the engine is graphed."""
    if choose(model, mask, inner, kind, precision) == "graphed":
        return GraphedEvaluator(model, mask, inner, CompiledArithmetic(model, inner.clip_norm, precision), lanes)
    return EagerEvaluator(model, mask, inner)


def choose(
    model: nn.Module, mask: GradientMask, inner: InnerLoop, kind: EngineKind, precision: Precision
) -> Literal["eager", "graphed"]:
    reason = unsupported(model, mask, inner)
    if kind == "graphed":
        if reason is not None:
            raise ConfigError(f"the graphed engine does not support {reason}: use engine=eager or engine=auto")
        return "graphed"
    on_gpu = next(model.parameters()).device.type == "cuda"
    if kind == "auto" and on_gpu and reason is None:
        return "graphed"
    if precision == "bfloat16":
        raise ConfigError(
            "precision=bfloat16 needs the graphed engine on a GPU"
            + ("" if reason is None else f", which does not support {reason}")
            + ": use precision=float32"
        )
    return "eager"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
