"""``wheretolearn continual``: learn a stream of tasks, one after another, and see what is kept."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from wheretolearn import cpu
from wheretolearn.cli import streams
from wheretolearn.cli.common import Device, TensorBoard, Workers, chosen_device, labels_of
from wheretolearn.cli.progress import TrainingBars, announce_stop, progress_bar
from wheretolearn.cli.streams import Record, Run, ScaleName, Seed, Seeds
from wheretolearn.continual.config import ContinualConfig
from wheretolearn.continual.learners.make import make_learner
from wheretolearn.continual.problem import Problem
from wheretolearn.continual.records import CONTINUAL
from wheretolearn.continual.training import finished, settings_of, train_together
from wheretolearn.continual.worker import train_in_processes
from wheretolearn.data.load import load_set
from wheretolearn.runs.folder import RunFolder

MOST_BARS = 12  # with more runs there is one bar per preset


def continual(
    run: Run = None,
    presets: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            help="Start from this preset, or all of a group such as figure3.width, or several; "
            "see `wheretolearn presets table5`.",
        ),
    ] = None,
    scale: ScaleName = "paper",
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Change a setting: KEY=VALUE, as often as needed; see `wheretolearn settings continual`."
        ),
    ] = None,
    seed: Seed = 0,
    seeds: Seeds = 1,
    device: Device = "auto",
    workers: Workers = None,
    record: Record = None,
    tensorboard: TensorBoard = False,
) -> None:
    """Learn tasks one after another, each example seen once, and measure what is retained of all of them.

    RA is the mean accuracy on all tasks at the end; BTI how much the accuracy on a task changed since it was learned.
    Stop with Ctrl-C at any time; `resume` goes on exactly. Several presets or seeds learn side by side, in folders
    named by preset and seed: on a GPU in one program, on a CPU in processes of one thread.
    """
    device = chosen_device(device)
    streams.start(
        CONTINUAL,
        run,
        presets or [],
        scale,
        overrides or [],
        seed,
        seeds,
        record,
        tensorboard,
        device=device,
        workers=workers,
        check=_check,
        take_to_the_end=lambda runs: take_to_the_end(runs, device, workers),
    )


def take_to_the_end(runs: Sequence[RunFolder], device: str, workers: int | None = None) -> None:
    """Take runs to their ends, from their last checkpoints where they have any, and print what they measured."""
    try:
        progress = _Progress(runs)
        with progress.bars as bars:
            if device == "cpu" and len(runs) > 1:
                train_in_processes(runs, progress.report, workers=workers, on_stop=announce_stop, notify=bars.note)
            else:
                with cpu.threads(runs[0].threads or 1):
                    train_together(runs, progress.report, device=device, notify=bars.note, on_stop=announce_stop)
    finally:  # also where others failed or were stopped
        streams.print_results(CONTINUAL, [run for run in runs if finished(run)])


def _check(config: ContinualConfig, seeds: Sequence[int]) -> None:
    with progress_bar(f"preparing {config.data}") as tick:
        load_set(config.data, tick)
    problem = Problem(config, seeds)
    make_learner([config], seeds[:1], problem.image_shape, problem.classes, problem.tasks)


class _Progress:
    """One bar per run, or per preset where there are many runs; it then shows means over runs."""

    def __init__(self, runs: Sequence[RunFolder]):
        self._latest: dict[RunFolder, dict[str, Any]] = {run: {} for run in runs}
        self._label = labels_of(runs)
        if len(runs) > MOST_BARS:
            self._label = {run: run.preset or "runs" for run in runs}
        batches: dict[ContinualConfig, int] = {}
        totals: dict[str, int] = {}
        for run, label in self._label.items():
            config = settings_of(run)
            if config not in batches:
                batches[config] = Problem(config, [run.seed]).batches
            totals[label] = totals.get(label, 0) + batches[config]
        self.bars = TrainingBars(totals)

    def report(self, run: RunFolder, batch: int, values: Mapping[str, Any]) -> None:
        self._latest[run] |= {"batch": batch, **values}
        label = self._label[run]
        members = [own for other, own in self._latest.items() if self._label[other] == label]
        shown: dict[str, Any] = {}
        if "sparsity" in values:
            shown["sparsity"] = statistics.fmean(own["sparsity"] for own in members if "sparsity" in own)
        if "task" in values:
            key = f"accuracy after task {values['task']}"
            self._latest[run][key] = values["accuracy"]
            ended = [own[key] for own in members if key in own]
            if len(ended) == len(members):  # the last one to end a task tells for all of them
                shown |= {"task": values["task"], "accuracy": statistics.fmean(ended)}
        self.bars.update(label, sum(own.get("batch", 0) for own in members), shown)
