"""The readable engine: one task after the other through ``inner_loop``, for any module on any device."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from wheretolearn.data.random_bits import normal
from wheretolearn.diagnosis import locate_non_finite
from wheretolearn.engine.task import Draw, InnerLoop, Task
from wheretolearn.errors import NonFiniteError
from wheretolearn.inner_loop import accumulate, adapt, add_gradient, second_order_meta_gradient, update_statistics
from wheretolearn.masks import GradientMask

ADVICE = "Checkpoints saved before it are good; a smaller inner_lr or theta_lr, or inner_clip_norm, may help"


class EagerEngine:
    """Runs outer steps at once, and checks each for losses that are not finite."""

    name = "eager"

    def __init__(
        self,
        model: nn.Module,
        mask: GradientMask,
        optimizer: torch.optim.Optimizer,
        draw: Draw,
        inner: InnerLoop,
        seed: int = 0,
    ):
        self.model, self.mask, self.optimizer = model, mask, optimizer
        self.draw, self.inner, self.seed = draw, inner, seed
        self._loss = float("nan")

    def outer_step(self, step: int) -> None:
        """Update theta and mask from the tasks of one step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.mask.resample(lambda like: normal(like.shape, self.seed, "mask noise", step, device=like.device))
        tasks = self.draw(step)
        losses = [self._add_gradient(task, 1.0 / len(tasks)) for task in tasks]
        for number, loss in enumerate(losses):
            if not loss.isfinite():
                raise NonFiniteError(self._explain(step, tasks[number], number))
        self._check_gradients(step)
        self.optimizer.step()
        self._loss = torch.stack(losses).mean().item()

    def _check_gradients(self, step: int) -> None:
        """A loss can be finite and its gradient not; one step with it would spoil every weight."""
        named = {**dict(self.model.named_parameters()), **{f"mask {n}": m for n, m in self.mask.raw.items()}}
        sums = {name: tensor.grad.sum() for name, tensor in named.items() if tensor.grad is not None}
        if not torch.stack(list(sums.values())).isfinite().all():
            bad = next(name for name, total in sums.items() if not total.isfinite())
            raise NonFiniteError(f"the gradient is not finite: outer step {step + 1}, {bad}. {ADVICE}")

    def last_loss(self) -> float:
        """Mean query loss of the last step."""
        return self._loss

    def _add_gradient(self, task: Task, weight: float) -> Tensor:
        if self.inner.batch_norm == "running":
            update_statistics(self.model, task.support_loss)
        if self.inner.order == "first":
            adapted = adapt(self.model, self.mask, task.support_loss, **_settings(self.inner))
            return accumulate(adapted, task.query_loss, weight)
        gradient = second_order_meta_gradient(
            self.model, self.mask, task.support_loss, task.query_loss, **_settings(self.inner)
        )
        add_gradient(self.model, self.mask, gradient, weight)
        return gradient.loss

    def _explain(self, step: int, task: Task, number: int) -> str:
        place = locate_non_finite(self.model, self.mask, task.support_loss, task.query_loss, **_settings(self.inner))
        return f"the loss is not finite: outer step {step + 1}, task {number}, {place or 'place unknown'}. {ADVICE}"


def eager_accuracies(
    model: nn.Module, mask: GradientMask, inner: InnerLoop, tasks: Iterable[Task], steps: int
) -> Tensor:
    """Query accuracy of each task after ``steps`` inner steps."""
    settings = {**_settings(inner), "steps": steps}
    return torch.stack(
        [adapt(model, mask, task.support_loss, **settings).evaluate(task.query_accuracy) for task in tasks]
    )


def _settings(inner: InnerLoop) -> dict[str, Any]:
    return {
        "steps": inner.steps,
        "inner_lr": inner.inner_lr,
        "batch_norm_mode": inner.batch_norm,
        "clip_norm": inner.clip_norm,
    }
