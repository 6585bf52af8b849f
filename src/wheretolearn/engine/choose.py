"""Which engine runs a training: the fast one where it can, the readable one everywhere else."""

from collections.abc import Callable, Iterable
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from wheretolearn.engine.eager import EagerEngine, eager_accuracies
from wheretolearn.engine.graphed import GraphedEngine, GraphedEvaluator, Passes, Precision, unsupported
from wheretolearn.engine.task import Draw, InnerLoop, Task
from wheretolearn.errors import ConfigError
from wheretolearn.masks import GradientMask

EngineKind = Literal["auto", "eager", "graphed"]
Evaluate = Callable[[Iterable[Task], int], Tensor]  # (tasks, inner steps) -> accuracy of each


class Engine(Protocol):
    name: str

    def outer_step(self, step: int) -> None:
        """Update theta and mask from the tasks of one step."""

    def last_loss(self) -> float:
        """Mean query loss of the last step; raises NonFiniteError if a loss was not finite."""


def make_engine(
    model: nn.Module,
    mask: GradientMask,
    optimizer: torch.optim.Optimizer,
    draw: Draw,
    inner: InnerLoop,
    seed: int = 0,
    *,
    kind: EngineKind = "auto",
    precision: Precision = "float32",
) -> Engine:
    """The engine for a training; ``auto`` takes the graphed one on a GPU wherever it supports the training."""
    if choose(model, inner, kind, precision) == "graphed":
        return GraphedEngine(model, mask, optimizer, draw, inner, seed, precision=precision)
    return EagerEngine(model, mask, optimizer, draw, inner, seed)


def make_evaluator(
    model: nn.Module,
    mask: GradientMask,
    inner: InnerLoop,
    *,
    kind: EngineKind = "auto",
    precision: Precision = "float32",
    lanes: int = 8,
) -> Evaluate:
    """A function that measures the model, with the weights it then has, on tasks."""
    if choose(model, inner, kind, precision) == "graphed":
        compiled = next(model.parameters()).device.type == "cuda"
        passes = Passes(model, mask, inner, precision, compiled)
        return GraphedEvaluator(model, mask, passes, lanes).accuracies
    return lambda tasks, steps: eager_accuracies(model, mask, inner, tasks, steps)


def choose(model: nn.Module, inner: InnerLoop, kind: EngineKind, precision: Precision) -> Literal["eager", "graphed"]:
    reason = unsupported(inner, model)
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
