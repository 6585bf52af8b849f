"""Online runs on a CPU, each in a process of one thread: networks this small gain little from more."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from wheretolearn.errors import Stopped
from wheretolearn.fewshot.training import failure
from wheretolearn.online.training import Report, finished, train
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
    """Like ``train_together``, with ``workers`` processes; by default as many as there are cores."""
    at_once = min(len(runs), workers or environment.cores())
    by_path = {str(run.path): run for run in runs}
    for run in runs:
        run.lock()  # until its worker takes over: nobody else shall train a run that waits
    outcome = run_workers(
        {path: ["wheretolearn.online.worker", path, str(at_once)] for path in by_path},
        at_once=at_once,
        threads=threads or 1,
        update=lambda path, step, values: report(by_path[path], step, values),
        notify=notify,
        on_stop=on_stop,
        on_start=lambda path: by_path[path].close(),
    )
    for run in runs:
        run.close()
    # A worker that was about to end when it was told to stop may have finished all the same.
    left = [path for path in outcome.stopped if not finished(by_path[path])]
    if left:
        command = shlex.join(["wheretolearn", "resume", *left])
        failed = [f"{path} failed: {error}" for path, error in outcome.failed.items()]
        raise Stopped("\n".join([f"stopped {len(left)} runs and saved them; go on with `{command}`", *failed]))
    if outcome.failed:
        raise failure({by_path[path]: error for path, error in outcome.failed.items()}, of=len(runs))


def _train_one(path: Path, at_once: int, teller: Teller) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with RunFolder.open(path) as run:
        train(run, teller.tell_step, notify=teller.tell_note, at_once=at_once)


if __name__ == "__main__":
    work(lambda teller: _train_one(Path(sys.argv[1]), int(sys.argv[2]), teller))
