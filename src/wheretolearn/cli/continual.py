"""``wheretolearn continual``: learn a stream of tasks, one after another, and see what is kept."""

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from wheretolearn.cli.common import (
    Device,
    Workers,
    all_named,
    check_protocol,
    chosen_device,
    free_places,
    labels_of,
    print_measures,
    seed_range,
    set_threads,
)
from wheretolearn.cli.progress import TrainingBars, announce_stop, progress_bar
from wheretolearn.config import from_dict, merge, parse_overrides, to_dict
from wheretolearn.continual.config import ContinualConfig
from wheretolearn.continual.learners.make import make_learner
from wheretolearn.continual.problem import Problem
from wheretolearn.continual.records import (
    INCIDENTAL,
    by_settings,
    measured_by,
    paper_numbers,
    planned_record,
    record_name,
    result_records,
)
from wheretolearn.continual.training import finished, settings_of
from wheretolearn.continual.worker import train_in_processes, train_with_care
from wheretolearn.data.load import load_set
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.fewshot.records import check_savable, save_records
from wheretolearn.presets import Paper, Scale, load_preset, scale_named
from wheretolearn.runs.folder import MAX_SEED, RunFolder
from wheretolearn.runs.results import ResultRecord

MOST_BARS = 12  # with more runs there is one bar per preset


def continual(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="Folder for the run, new or empty; for several runs: the folder that holds theirs. "
            "Default: runs/PRESET.",
        ),
    ] = None,
    presets: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            help="Start from this preset, or all of a group such as figure3.width, or several; "
            "see `wheretolearn presets table5`.",
        ),
    ] = None,
    scale: Annotated[str, typer.Option(help="paper, or quick: a small version of the preset for a laptop.")] = "paper",
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Change a setting: KEY=VALUE, as often as needed; see `wheretolearn settings continual`."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random, or the first one.", min=0, max=MAX_SEED)] = 0,
    seeds: Annotated[int, typer.Option(help="Do this many runs of each preset, with seeds in a row.", min=1)] = 1,
    device: Device = "auto",
    workers: Workers = None,
    record: Annotated[Path | None, typer.Option(help="Write result records to this folder.")] = None,
) -> None:
    """Learn tasks one after another, each example seen once, and measure what is retained of all of them.

    RA is the mean accuracy on all tasks at the end; BTI how much the accuracy on a task changed since it was learned.
    Stop with Ctrl-C at any time; `resume` goes on exactly. Several presets or seeds learn side by side, in folders
    named by preset and seed: on a GPU in one program, on a CPU in processes of one thread.
    """
    chosen_scale = scale_named(scale)
    numbers = seed_range(seed, seeds)
    device = chosen_device(device)
    names: list[str | None] = [*all_named(presets or [], seeds)] or [None]
    if record is not None and not presets:
        raise ConfigError("--record names results after their presets: give a --preset")
    configs = {name: _config(name, chosen_scale, overrides or []) for name in names}
    if run is None and presets and len(presets) == 1:
        run = Path("runs") / presets[0]  # also of a group
    places = free_places(run, names, numbers)
    for config in configs.values():
        _check(config, numbers)
    if record is not None:
        planned = [planned_record(name, scale, numbers, config) for name, config in configs.items() if name is not None]
        check_savable(planned, record, INCIDENTAL)
    with ExitStack() as folders:
        runs = [
            folders.enter_context(
                RunFolder.create(place, to_dict(configs[name]), number, "continual", name, scale if name else None)
            )
            for (name, number), place in places.items()
        ]
        take_to_the_end(runs, device, workers)
        if record is not None:
            _save(result_records(runs), record)


def take_to_the_end(
    runs: Sequence[RunFolder], device: str, workers: int | None = None, threads: int | None = None
) -> None:
    """Take runs to their ends, from their last checkpoints where they have any, and print what they measured."""
    try:
        progress = _Progress(runs)
        with progress.bars as bars:
            if device == "cpu" and len(runs) > 1:
                train_in_processes(
                    runs, progress.report, workers=workers, threads=threads, on_stop=announce_stop, notify=bars.note
                )
            else:
                set_threads(threads or 1)
                train_with_care(runs, progress.report, device=device, notify=bars.note, on_stop=announce_stop)
    finally:  # also where others failed or were stopped
        _print_results([run for run in runs if finished(run)])


def evaluate(runs: Sequence[RunFolder], refused: Sequence[str], preset_name: str | None, record: Path | None) -> None:
    """Show, and record, what runs measured while they learned; ``refused`` are options that mean nothing here."""
    if refused:
        raise ConfigError(f"{', '.join(refused)}: not for continual runs, which are measured while they learn")
    for run in runs:
        if not finished(run):
            raise UserError(f"{run.path} is not finished: go on with `wheretolearn resume {run.path}`")
    records = [] if record is None else result_records(runs, preset_name)
    if record is not None:
        check_savable(records, record, INCIDENTAL)
    _print_results(runs, preset_name)
    if record is not None:
        _save(records, record)


def _config(preset: str | None, scale: Scale, overrides: Sequence[str]) -> ContinualConfig:
    own = parse_overrides(overrides)
    if preset is None:
        return from_dict(ContinualConfig, own, where="settings")
    loaded = load_preset(preset, scale=scale)
    check_protocol(preset, loaded.protocol, "continual")
    return from_dict(ContinualConfig, merge(loaded.settings, own), where=f"preset {preset} with --set")


def _check(config: ContinualConfig, seeds: Sequence[int]) -> None:
    """Whatever cannot be built must fail before a folder holds a run that can never start."""
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


def _print_results(runs: Sequence[RunFolder], preset_name: str | None = None) -> None:
    for alike in by_settings(runs):
        first = alike[0]
        name = preset_name or first.preset
        seeds = f"seed {first.seed}" if len(alike) == 1 else f"{len(alike)} seeds"
        what = "the same settings" if name is None else record_name(name, first.scale or "paper")
        papers: dict[str, Paper] = {}
        with suppress(ConfigError):  # a run whose preset this version does not know has results all the same
            papers = paper_numbers(first, preset_name)
        found = [own.percent for own in measured_by(alike)]
        typer.echo(f"{what}, {seeds}, in %:")
        print_measures((metric, [own[metric] for own in found], papers.get(metric)) for metric in found[0])


def _save(records: Sequence[ResultRecord], folder: Path) -> None:
    for path in save_records(records, folder, INCIDENTAL):
        typer.echo(f"recorded {path}")
