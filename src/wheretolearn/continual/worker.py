"""Continual runs on a CPU: lanes of equal settings, shared out over processes of one thread each."""

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from wheretolearn.continual.training import Report, finished, lane_groups, saved_together, train_together, unusable
from wheretolearn.runs import environment
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.workers import Teller, failure_of, train_in_workers, work


def train_in_processes(
    runs: Sequence[RunFolder],
    report: Report,
    *,
    workers: int | None = None,
    on_stop: Callable[[], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> None:
    """Like ``train_together``, with ``workers`` processes; by default as many as there are cores."""
    at_once = workers or environment.cores()
    for run in runs:
        run.lock()  # before their checkpoints tell who was together
    left = [run for run in runs if not finished(run)]
    failed = unusable(left)
    for run, error in failed.items():
        if notify is not None:
            notify(failure_of([run], error, " failed"))
    train_in_workers(
        "wheretolearn.continual.worker",
        share_out([run for run in left if run not in failed], at_once),
        report,
        finished=finished,
        at_once=at_once,
        threads=1,
        notify=notify,
        on_stop=on_stop,
        failed=failed,
    )


def share_out(runs: Sequence[RunFolder], processes: int) -> list[list[RunFolder]]:
    """The runs of each process: lanes of equal settings in as many even parts as there are processes.

    Runs that have a checkpoint stay with those they were with.
    """
    shares = []
    for group in lane_groups(runs):
        parts = 1 if saved_together(group) else min(processes, len(group))
        borders = [round(part * len(group) / parts) for part in range(parts + 1)]
        shares += [group[start:end] for start, end in pairwise(borders)]
    return sorted(shares, key=len, reverse=True)  # the longest first, so that no process is left alone with one


def _train(paths: Sequence[Path], teller: Teller) -> None:
    def report(run: RunFolder, step: int, values: Mapping[str, Any]) -> None:
        teller.tell_step(step, {**values, "run": str(run.path)} if values else {})

    runs = [RunFolder.open(path) for path in paths]
    train_together(runs, report, notify=teller.tell_note, on_failure=teller.tell_failure)


if __name__ == "__main__":
    work(lambda teller: _train([Path(path) for path in sys.argv[1:]], teller))
