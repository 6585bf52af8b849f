"""``wheretolearn online``: a stream whose task changes at unknown times; batches are predicted, then learned from."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from wheretolearn import cpu
from wheretolearn.cli import streams
from wheretolearn.cli.common import Device, TensorBoard, Workers, chosen_device, labels_of
from wheretolearn.cli.progress import TrainingBars, announce_stop, progress_bar
from wheretolearn.cli.streams import Record, Run, ScaleName, Seed, Seeds
from wheretolearn.data.load import load_set
from wheretolearn.errors import UserError
from wheretolearn.online.config import OnlineConfig
from wheretolearn.online.learners.make import make_learner
from wheretolearn.online.pretraining import check_pretraining, is_cached
from wheretolearn.online.problem import Problem, SourceImages
from wheretolearn.online.records import ONLINE
from wheretolearn.online.training import (
    arithmetic_of,
    by_pretraining,
    finished,
    keeping_errors,
    prepare,
    settings_of,
    telling_how_to_go_on,
    train_together,
)
from wheretolearn.online.worker import train_in_processes
from wheretolearn.runs.folder import RunFolder


def online(
    run: Run = None,
    presets: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            help="Start from this preset, or all of a group such as table6.c-maml, or several; "
            "see `wheretolearn presets table6`.",
        ),
    ] = None,
    scale: ScaleName = "paper",
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Change a setting: KEY=VALUE, as often as needed; see `wheretolearn settings online`."
        ),
    ] = None,
    seed: Seed = 0,
    seeds: Seeds = 1,
    device: Device = "auto",
    workers: Workers = None,
    record: Record = None,
    tensorboard: TensorBoard = False,
) -> None:
    """Learn from a stream whose task changes at unknown times, and measure how well each batch was predicted before.

    Accuracy is the mean over all steps, also by image set. Images of all sets are ink 0 to 1, of one size (28x28).
    Stop with Ctrl-C at any time; `resume` goes on, bit for bit on a CPU, on a GPU up to rounding. Several presets or
    seeds learn side by side, in folders named by preset and seed: on a GPU in one process, on a CPU in processes of one
    thread.
    """
    device = chosen_device(device)
    streams.start(
        ONLINE,
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
        check=partial(_check, device),
        take_to_the_end=lambda runs: take_to_the_end(runs, device, workers),
    )


def take_to_the_end(runs: Sequence[RunFolder], device: str, workers: int | None = None) -> None:
    """Take runs to their ends, from their last checkpoints where they have any, and print what they measured."""
    try:
        failed = _pretrain(runs, device)
        labels = labels_of(runs)
        with TrainingBars({labels[run]: settings_of(run).steps for run in runs}) as bars:

            def report(run: RunFolder, step: int, values: Mapping[str, Any]) -> None:
                bars.update(labels[run], step, values)

            if device == "cpu" and len(runs) > 1:
                train_in_processes(
                    runs,
                    report,
                    workers=workers,
                    notify=bars.note,
                    on_stop=announce_stop,
                    failed=failed,
                )
            else:
                with cpu.threads(runs[0].threads or 1):
                    train_together(runs, report, device=device, notify=bars.note, on_stop=announce_stop, failed=failed)
    finally:  # also where others failed or were stopped
        streams.print_results(ONLINE, [run for run in runs if finished(run)])


def _check(device: str, config: OnlineConfig, seeds: Sequence[int]) -> None:
    for data in dict.fromkeys(source.data for source in config.sources):
        with progress_bar(f"preparing {data}") as tick:
            load_set(data, tick)
    images = SourceImages(config.sources)
    Problem(config, seeds[0], images)
    model = config.build_model(images.shape, seeds[0])
    make_learner(config, model, seeds[0], arithmetic_of(config, model.to(device)))
    if config.pretrain:
        check_pretraining(config)


def _pretrain(runs: Sequence[RunFolder], device: str) -> dict[RunFolder, UserError]:
    """Pre-training comes once for all runs that want the same, before they share the machine. Errors of failed runs."""
    failed: dict[RunFolder, UserError] = {}
    for folder, alike in by_pretraining(runs).items():
        if is_cached(folder):
            continue
        with TrainingBars({"pre-training": settings_of(alike[0]).pretrain_steps}) as bars:
            tell = bars.note if len(runs) > 1 else None
            with telling_how_to_go_on(runs), keeping_errors(failed, tell, alike):
                report = partial(bars.update, "pre-training")
                prepare(alike, report, device=device, notify=bars.note, on_stop=announce_stop)
    return failed
