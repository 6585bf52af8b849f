"""Progress bars on a terminal; plain lines, or nothing, elsewhere."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

Tick = Callable[[int, int], None]

SILENCE = 60  # seconds after which a run that is not validated has a line all the same


@contextmanager
def progress_bar(label: str) -> Iterator[Tick]:
    """A bar on standard error that appears with the first report; none where that is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(label, total=None)

    def report(done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        bar.stop()


def announce_stop() -> None:
    """Tell the user that a signal was heard, though the step at hand may take long to end."""
    # Straight to the file: this runs in a signal handler, maybe in the middle of other printing.
    with suppress(OSError):
        os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")


def latest_values(values: Mapping[str, Any]) -> str:
    """Accuracy and sparsity as a bar or a line shows them."""
    parts = []
    if "stage" in values:
        parts.append(f"{values['stage']} ...")
    if "task" in values:
        parts.append(f"task {values['task'] + 1}")
    if "accuracy" in values:
        parts.append(f"accuracy {values['accuracy']:.1%}")
    if "validation_accuracy" in values:
        parts.append(f"validation {values['validation_accuracy']:.1%}")
    if "sparsity" in values:
        parts.append(f"sparsity {values['sparsity']:.1%}")
    if "loss" in values:
        parts.append(f"loss {values['loss']:.3f}")
    return "  ".join(parts)


class TrainingBars:
    """One bar per run with rate, time left, accuracy and sparsity.

    Off a terminal: a line per validation or task, and of others now and then.
    """

    def __init__(self, totals: Mapping[str, int]):
        console = Console(stderr=True)
        self._lines = not console.is_terminal
        self._totals = dict(totals)
        self._latest: dict[str, dict[str, Any]] = {name: {} for name in totals}
        self._started = time.monotonic()
        self._told = dict.fromkeys(totals, 0.0)  # when each had its last line
        # What does not fit is cut from the values, whose last is the least important, and never from count or time.
        bar_width = 24 if console.width >= 110 else 6
        name_width = min(20 if console.width < 110 else 36, max(map(len, totals)))
        count_width = max(2 * len(str(total)) + 1 for total in totals.values())
        left = console.width - name_width - bar_width - count_width - 8 - 7 - 5  # rate, time, gaps
        self._bar = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=name_width)),
            BarColumn(bar_width, table_column=Column(min_width=bar_width)),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=count_width)),
            TextColumn("{task.fields[rate]}", table_column=Column(no_wrap=True, min_width=8)),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("{task.fields[values]}", table_column=Column(no_wrap=True, max_width=max(1, left))),
            console=console,
            disable=self._lines,
        )
        # The end of a long name says which run it is: the seed stands there.
        self._tasks = {
            name: self._bar.add_task(
                name if len(name) <= name_width else f"…{name[1 - name_width :]}", total=total, rate="", values=""
            )
            for name, total in totals.items()
        }
        self._notes: set[str] = set()

    def __enter__(self) -> "TrainingBars":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """Tell the user something, once, above the bars."""
        if text not in self._notes:
            self._notes.add(text)
            self._bar.console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)

    def update(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        if not self._latest[name]:  # a resumed run did not make its first steps just now
            self._bar.reset(self._tasks[name], completed=step)
        self._latest[name] |= {"step": step, **values}
        shown = latest_values(self._latest[name])
        if self._lines:
            seconds = time.monotonic() - self._started
            silent = seconds - self._told[name] > SILENCE and "loss" in values
            if silent or not values.keys().isdisjoint(("validation_accuracy", "accuracy")):
                self._told[name] = seconds
                typer.echo(f"{name}: step {step} of {self._totals[name]}  {shown}  ({seconds:.0f} s)", err=True)
            return
        speed = next(task.speed for task in self._bar.tasks if task.id == self._tasks[name])
        self._bar.update(
            self._tasks[name], completed=step, rate="" if speed is None else f"{speed:.1f}/s", values=shown
        )
