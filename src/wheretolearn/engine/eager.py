"""The eager engine: one task after the other, for any module on any device.

By default through ``inner_loop``, the readable way. An ``Arithmetic`` can take its place, for tasks whose labels are
numbers of classes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wheretolearn.data.random_bits import normal
from wheretolearn.diagnosis import locate_non_finite
from wheretolearn.engine.graphed import Arithmetic, Job, jobs_of
from wheretolearn.engine.task import InnerLoop, Lane, Task, accuracy
from wheretolearn.errors import NonFiniteError
from wheretolearn.inner_loop import (
    MetaGradient,
    accumulate,
    adapt,
    add_gradient,
    check_adaptation,
    second_order_meta_gradient,
    update_statistics,
)
from wheretolearn.masks import GradientMask

ADVICE = "Checkpoints saved before it are good; a smaller inner_lr or theta_lr, or inner_clip_norm, may help"


class EagerEngine:
    """Runs outer steps at once, and checks each for losses that are not finite."""

    name = "eager"

    def __init__(
        self, lanes: Sequence[Lane], note: str | None = None, arithmetics: Sequence[Arithmetic | None] | None = None
    ):
        self.lanes, self.note = list(lanes), note
        self._arithmetics = list(arithmetics or [None] * len(self.lanes))
        self._losses = [float("nan")] * len(self.lanes)

    def outer_step(self, steps: Sequence[int]) -> None:
        """Update theta and mask of every lane from the tasks of its step."""
        for number, (lane, step) in enumerate(zip(self.lanes, steps, strict=True)):
            self._losses[number] = _outer_step(lane, step, self._arithmetics[number])

    def last_losses(self) -> list[float]:
        """Mean query loss of each lane's last step."""
        return list(self._losses)

    def evaluator(self, number: int) -> "EagerEvaluator":
        """Measures the model of one lane."""
        lane = self.lanes[number]
        return EagerEvaluator(lane.model, lane.mask, lane.inner, self._arithmetics[number])


class EagerEvaluator:
    """Measures a model, with the weights it then has, on one task after the other."""

    def __init__(self, model: nn.Module, mask: GradientMask, inner: InnerLoop, arithmetic: Arithmetic | None = None):
        self.model, self.mask, self.inner, self._arithmetic = model, mask, inner, arithmetic

    def accuracies(self, tasks: Iterable[Task], steps: int) -> Tensor:
        """Query accuracy of each task after ``steps`` inner steps."""
        return torch.stack([accuracy(self._probabilities(task, steps), task.query_labels) for task in tasks])

    def probabilities(self, tasks: Iterable[Task], steps: int) -> Tensor:
        """Probability of each class, for each query image of each task: ``[tasks, queries, ways]``."""
        return torch.stack([self._probabilities(task, steps) for task in tasks])

    def _probabilities(self, task: Task, steps: int) -> Tensor:
        if self._arithmetic is not None and _labels_are_classes(task):
            return self._arithmetic.probabilities([_job(self.model, self.mask, self.inner, task, steps)], steps)[0]
        (task,) = self.inner.tasks([task])
        settings = {**_settings(self.inner), "steps": steps}
        return adapt(self.model, self.mask, task.support_loss, **settings).evaluate(task.query_probabilities)


def _outer_step(lane: Lane, step: int, arithmetic: Arithmetic | None) -> float:
    lane.optimizer.zero_grad(set_to_none=True)
    lane.model.zero_grad(set_to_none=True)  # it may be in no optimizer
    lane.mask.resample(lambda like: normal(like.shape, lane.seed, "mask noise", step, device=like.device))
    tasks = lane.tasks(step)
    losses = [_add_task_gradient(lane, task, 1.0 / len(tasks), arithmetic) for task in tasks]
    for number, loss in enumerate(losses):
        if not loss.isfinite():
            raise NonFiniteError(_explain(lane, step, tasks[number], number, arithmetic))
    _check_gradients(lane, step)
    lane.clamp_gradients()
    lane.optimizer.step()
    return torch.stack(losses).mean().item()


def _add_task_gradient(lane: Lane, task: Task, weight: float, arithmetic: Arithmetic | None) -> Tensor:
    if arithmetic is not None and _labels_are_classes(task):
        job = _job(lane.model, lane.mask, lane.inner, task, lane.inner.steps)
        (found,) = arithmetic.meta_gradients([job], lane.inner.steps)
        learned = lane.mask.names if lane.mask.raw else ()
        to_multipliers = {name: found.to_rate(name) * lane.inner.inner_lr for name in learned}
        add_gradient(lane.model, lane.mask, MetaGradient(found.loss, found.outer, to_multipliers), weight)
        return found.loss
    if lane.inner.batch_norm == "running":
        update_statistics(lane.model, task.support_loss)
    if lane.inner.order == "first":
        adapted = adapt(lane.model, lane.mask, task.support_loss, **_settings(lane.inner))
        return accumulate(adapted, task.query_loss, weight)
    gradient = second_order_meta_gradient(
        lane.model, lane.mask, task.support_loss, task.query_loss, **_settings(lane.inner)
    )
    add_gradient(lane.model, lane.mask, gradient, weight)
    return gradient.loss


def _check_gradients(lane: Lane, step: int) -> None:
    """A loss can be finite and its gradient not; one step with it would spoil every weight."""
    named = {**dict(lane.model.named_parameters()), **{f"mask {n}": m for n, m in lane.mask.raw.items()}}
    sums = {name: tensor.grad.sum() for name, tensor in named.items() if tensor.grad is not None}
    if not torch.stack(list(sums.values())).isfinite().all():
        bad = next(name for name, total in sums.items() if not total.isfinite())
        raise NonFiniteError(f"the gradient is not finite: outer step {step + 1}, {bad}. {ADVICE}")


def _job(model: nn.Module, mask: GradientMask, inner: InnerLoop, task: Task, steps: int) -> Job:
    check_adaptation(model, mask, steps, inner.inner_lr)
    (job,) = jobs_of(model, mask, inner, [task])
    return job


def _labels_are_classes(task: Task) -> bool:
    """Not shares of classes, nor negative numbers that say what to leave out."""
    labels = torch.cat([task.support_labels, task.query_labels])
    return labels.dim() == 1 and not labels.is_floating_point() and bool((labels >= 0).all())


def _explain(lane: Lane, step: int, task: Task, number: int, arithmetic: Arithmetic | None) -> str:
    place = locate_non_finite(lane.model, lane.mask, task.support_loss, task.query_loss, **_settings(lane.inner))
    if place is None and arithmetic is not None:  # squares of its own can be too large
        job, steps = _job(lane.model, lane.mask, lane.inner, task, lane.inner.steps), range(lane.inner.steps)
        bad = (k for k in steps if not arithmetic.adaptations([job], k)[0].loss.isfinite())
        place = next((f"inner step {k}" for k in bad), "query pass")
    return f"the loss is not finite: outer step {step + 1}, task {number}, {place or 'place unknown'}. {ADVICE}"


def _settings(inner: InnerLoop) -> dict[str, Any]:
    return {
        "steps": inner.steps,
        "inner_lr": inner.inner_lr,
        "batch_norm_mode": inner.batch_norm,
        "clip_norm": inner.clip_norm,
    }
