"""Several few-shot runs on a CPU, each in a process of its own: networks this small gain little from threads."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from wheretolearn.errors import Stopped
from wheretolearn.fewshot.training import Report, failure, train
from wheretolearn.runs import environment
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.workers import Teller, run_workers, work


def train_in_processes(
    runs: Sequence[RunFolder],
    report: Report,
    *,
    workers: int | None = None,
    threads: int | None = None,
    on_stop: Callable[[], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> None:
    """Like ``train_together``, with ``workers`` processes of ``threads`` threads; by default they fill the cores."""
    at_once = min(len(runs), workers or environment.cores())
    by_path = {str(run.path): run for run in runs}
    for run in runs:
        run.lock()  # until its worker takes over: nobody else shall train a run that waits
    outcome = run_workers(
        {path: ["wheretolearn.fewshot.worker", path, str(at_once)] for path in by_path},
        at_once=at_once,
        threads=threads or max(1, environment.cores() // at_once),
        update=lambda path, step, values: report(by_path[path], step, values),
        notify=notify,
        on_stop=on_stop,
        on_start=lambda path: by_path[path].close(),
    )
    for run in runs:
        run.close()
    if outcome.stopped:
        command = shlex.join(["wheretolearn", "resume", *outcome.stopped])
        failed = [f"\n{path} failed: {error}" for path, error in outcome.failed.items()]
        message = f"stopped {len(outcome.stopped)} runs and saved them; go on with `{command}`"
        raise Stopped(message + "".join(failed))
    if outcome.failed:
        raise failure({by_path[path]: error for path, error in outcome.failed.items()}, of=len(runs))


def _train_one(path: Path, at_once: int, teller: Teller) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with RunFolder.open(path) as run:
        train(run, teller.tell_step, notify=teller.tell_note, at_once=at_once)


if __name__ == "__main__":
    work(lambda teller: _train_one(Path(sys.argv[1]), int(sys.argv[2]), teller))
