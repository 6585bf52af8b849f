"""What an online learner is judged by: accuracy before learning, detected changes of the task, recovery from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RECOVERY_STEPS = 20


@dataclass(frozen=True)
class Detection:
    """How well changes of the task were noticed; None where there is nothing to take a mean of."""

    precision: float | None  # share of alarms that noticed a change
    recall: float | None  # share of changes that were noticed before the next one
    delay: float | None  # mean steps from a change to its alarm: 0 at the first batch of the new task


def accuracy_by_source(accuracies: Tensor, source: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Mean accuracy over the steps so far of each source that has occurred."""
    shown = source[: len(accuracies)]
    return {
        name: accuracies[shown == number].mean().item() for number, name in enumerate(names) if (shown == number).any()
    }


def detection(switched: Tensor, detected: Tensor) -> Detection:
    """Judge alarms, ``[steps]``, against true changes.

    An alarm notices the last change before it, if no other has; otherwise it is false. Before the first step there is
    no other task, so that step is neither a change nor an alarm.
    """
    changes = [step for step in switched.nonzero().flatten().tolist() if step > 0]
    alarms = [step for step in detected.nonzero().flatten().tolist() if step > 0]
    noticed: dict[int, int] = {}  # change -> its alarm
    for alarm in alarms:
        change = max((step for step in changes if step <= alarm), default=None)
        if change is not None and change not in noticed:
            noticed[change] = alarm
    delays = [alarm - change for change, alarm in noticed.items()]
    return Detection(
        len(noticed) / len(alarms) if alarms else None,
        len(noticed) / len(changes) if changes else None,
        sum(delays) / len(delays) if delays else None,
    )


def recovery(accuracies: Tensor, switched: Tensor, steps: int = RECOVERY_STEPS) -> tuple[list[float], list[int]]:
    """Mean accuracy in the 1st, 2nd ... step after a change of the task, and over how many changes.

    The 1st is the first batch of the new task. Tasks that end before are left out, and so is the stream's first task.
    It stops where no task lasts that long.
    """
    switched = switched[: len(accuracies)]
    began = torch.where(switched, torch.arange(len(switched)), 0).cummax(0).values
    age = torch.arange(len(switched)) - began
    means, counts = [], []
    for number in range(steps):
        chosen = accuracies[(age == number) & (began > 0)]
        if len(chosen) == 0:
            break
        means.append(chosen.mean().item())
        counts.append(len(chosen))
    return means, counts
