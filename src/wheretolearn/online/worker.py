"""Online runs on a CPU, each in a process of one thread: networks this small gain little from more."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from wheretolearn.errors import UserError
from wheretolearn.online.training import Report, finished, train
from wheretolearn.runs import environment
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.workers import Teller, train_in_workers, work


def train_in_processes(
    runs: Sequence[RunFolder],
    report: Report,
    *,
    workers: int | None = None,
    notify: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] | None = None,
    failed: Mapping[RunFolder, UserError] | None = None,
) -> None:
    """Like ``train_together``, with ``workers`` processes; by default as many as there are cores."""
    shares = [[run] for run in runs if run not in (failed or {})]
    at_once = max(1, min(len(shares), workers or environment.cores()))
    train_in_workers(
        "wheretolearn.online.worker",
        shares,
        report,
        finished=finished,
        options=[str(at_once)],
        at_once=at_once,
        threads=1,
        notify=notify,
        on_stop=on_stop,
        failed=failed,
    )


def _train_one(path: Path, at_once: int, teller: Teller) -> None:
    with RunFolder.open(path) as run:
        train(run, teller.tell_step, notify=teller.tell_note, at_once=at_once)


if __name__ == "__main__":
    work(lambda teller: _train_one(Path(sys.argv[2]), int(sys.argv[1]), teller))
