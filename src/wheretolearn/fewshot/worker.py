"""Several few-shot runs on a CPU, each in a process of its own: networks this small gain little from threads."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from wheretolearn.fewshot.training import Report, finished, train
from wheretolearn.runs import environment
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.workers import Teller, train_in_workers, work


def train_in_processes(
    runs: Sequence[RunFolder],
    report: Report,
    *,
    workers: int | None = None,
    on_stop: Callable[[], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> None:
    """Like ``train_together``, with ``workers`` processes; by default so many that their threads fill the cores."""
    threads = max(run.threads or 1 for run in runs)
    at_once = min(len(runs), workers or max(1, environment.cores() // threads))
    train_in_workers(
        "wheretolearn.fewshot.worker",
        [[run] for run in runs],
        report,
        finished=finished,
        options=[str(at_once)],
        at_once=at_once,
        threads=threads_each(len(runs), workers),
        notify=notify,
        on_stop=on_stop,
    )


def threads_each(runs: int, workers: int | None = None) -> int:
    """So many that processes fill the cores; a run alone has what PyTorch takes by itself."""
    if runs == 1:
        return torch.get_num_threads()
    return max(1, environment.cores() // min(runs, workers or environment.cores()))


def _train_one(path: Path, at_once: int, teller: Teller) -> None:
    with RunFolder.open(path) as run:
        train(run, teller.tell_step, notify=teller.tell_note, at_once=at_once)


if __name__ == "__main__":
    work(lambda teller: _train_one(Path(sys.argv[2]), int(sys.argv[1]), teller))
