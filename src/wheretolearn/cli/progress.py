"""Progress bars on a terminal; plain lines, or nothing, elsewhere."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Tick = Callable[[int, int], None]


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


def latest_values(values: Mapping[str, Any]) -> str:
    """Accuracy and sparsity as a bar or a line shows them."""
    parts = []
    if "loss" in values:
        parts.append(f"loss {values['loss']:.3f}")
    if "validation_accuracy" in values:
        parts.append(f"validation {values['validation_accuracy']:.1%}")
    if "sparsity" in values:
        parts.append(f"sparsity {values['sparsity']:.1%}")
    if "stage" in values:
        parts.append(f"{values['stage']} ...")
    return "  ".join(parts)


class TrainingBars:
    """One bar per run with rate, time left, accuracy and sparsity. Off a terminal: a line per validation."""

    def __init__(self, totals: Mapping[str, int]):
        console = Console(stderr=True)
        self._lines = not console.is_terminal
        self._totals = dict(totals)
        self._latest: dict[str, dict[str, Any]] = {name: {} for name in totals}
        self._started = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
            console=console,
            disable=self._lines,
        )
        self._tasks = {
            name: self._bar.add_task(name, total=total, rate="", values="") for name, total in totals.items()
        }

    def __enter__(self) -> "TrainingBars":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        self._latest[name] |= values
        shown = latest_values(self._latest[name])
        if self._lines:
            if "validation_accuracy" in values:
                seconds = time.monotonic() - self._started
                typer.echo(f"{name}: step {step} of {self._totals[name]}  {shown}  ({seconds:.0f} s)", err=True)
            return
        speed = next(task.speed for task in self._bar.tasks if task.id == self._tasks[name])
        self._bar.update(
            self._tasks[name], completed=step, rate="" if speed is None else f"{speed:.1f}/s", values=shown
        )
