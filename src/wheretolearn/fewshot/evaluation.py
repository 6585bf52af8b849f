"""Accuracy on few-shot tasks."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.fewshot.tasks import TaskSource
from wheretolearn.inner_loop import adapt
from wheretolearn.masks import GradientMask


def accuracies(
    model: nn.Module,
    mask: GradientMask,
    source: TaskSource,
    config: FewShotConfig,
    tasks: int,
    steps: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Query accuracy of each of the first ``tasks`` tasks of a source, after ``steps`` (or K_test) inner steps."""
    results = []
    for done, task in enumerate(source.tasks(0, tasks), start=1):
        adapted = adapt(
            model,
            mask,
            task.support_loss,
            steps=config.test_inner_steps if steps is None else steps,
            inner_lr=config.inner_lr,
            batch_norm_mode=config.batch_norm,
            clip_norm=config.inner_clip_norm,
        )
        results.append(adapted.evaluate(task.query_accuracy))
        if progress is not None:
            progress(done, tasks)
    return torch.stack(results).cpu()
