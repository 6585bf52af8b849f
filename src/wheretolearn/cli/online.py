"""``wheretolearn online``: a stream whose task changes at unknown times; batches are predicted, then learned from."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
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
from wheretolearn.continual.records import record_name
from wheretolearn.data.load import load_set
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.fewshot.records import check_savable, save_records
from wheretolearn.online.config import OnlineConfig
from wheretolearn.online.learners.make import make_learner
from wheretolearn.online.pretraining import class_splits, is_cached
from wheretolearn.online.problem import Problem, SourceImages
from wheretolearn.online.records import (
    INCIDENTAL,
    by_settings,
    measured_by,
    paper_numbers,
    planned_record,
    result_records,
    unit_of,
)
from wheretolearn.online.training import (
    finished,
    has_weights,
    prepare,
    settings_of,
    telling_how_to_go_on,
    train_together,
)
from wheretolearn.online.worker import train_in_processes
from wheretolearn.presets import Paper, Scale, load_preset, scale_named
from wheretolearn.runs.folder import MAX_SEED, RunFolder
from wheretolearn.runs.results import ResultRecord


def online(
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
            help="Start from this preset, or all of a group such as table6.c-maml, or several; "
            "see `wheretolearn presets table6`.",
        ),
    ] = None,
    scale: Annotated[str, typer.Option(help="paper, or quick: a small version of the preset for a laptop.")] = "paper",
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Change a setting: KEY=VALUE, as often as needed; see `wheretolearn settings online`."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random, or the first one.", min=0, max=MAX_SEED)] = 0,
    seeds: Annotated[int, typer.Option(help="Do this many runs of each preset, with seeds in a row.", min=1)] = 1,
    device: Device = "auto",
    workers: Workers = None,
    record: Annotated[Path | None, typer.Option(help="Write result records to this folder.")] = None,
) -> None:
    """Learn from a stream whose task changes at unknown times, and measure how well each batch was predicted before.

    Accuracy is the mean over all steps, also by image set. Images of all sets are ink 0 to 1, of one size (28x28).
    Stop with Ctrl-C at any time; `resume` goes on exactly. Several presets or seeds learn side by side, in folders
    named by preset and seed: on a GPU in one process, on a CPU in processes of one thread.
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
    for config in dict.fromkeys(configs.values()):
        _check(config, seed)
    if record is not None:
        planned = [planned_record(name, scale, numbers, config) for name, config in configs.items() if name is not None]
        check_savable(planned, record, INCIDENTAL)
    with ExitStack() as folders:
        runs = [
            folders.enter_context(
                RunFolder.create(place, to_dict(configs[name]), number, "online", name, scale if name else None)
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
        _pretrain(runs, device)
        labels = labels_of(runs)
        with TrainingBars({labels[run]: settings_of(run).steps for run in runs}) as bars:

            def report(run: RunFolder, step: int, values: Mapping[str, Any]) -> None:
                bars.update(labels[run], step, values)

            if device == "cpu" and len(runs) > 1:
                train_in_processes(
                    runs, report, workers=workers, threads=threads, on_stop=announce_stop, notify=bars.note
                )
            else:
                set_threads(threads or 1)
                train_together(runs, report, device, announce_stop, bars.note)
    finally:  # also where others failed or were stopped
        _print_results([run for run in runs if finished(run)])


def evaluate(runs: Sequence[RunFolder], refused: Sequence[str], preset_name: str | None, record: Path | None) -> None:
    """Show, and record, what runs measured while they learned; ``refused`` are options that mean nothing here."""
    if refused:
        raise ConfigError(f"{', '.join(refused)}: not for online runs, which are measured while they learn")
    for run in runs:
        if not finished(run):
            raise UserError(f"{run.path} is not finished: go on with `wheretolearn resume {run.path}`")
    records = [] if record is None else result_records(runs, preset_name)
    if record is not None:
        check_savable(records, record, INCIDENTAL)
    _print_results(runs, preset_name)
    if record is not None:
        _save(records, record)


def _config(preset: str | None, scale: Scale, overrides: Sequence[str]) -> OnlineConfig:
    own = parse_overrides(overrides)
    if preset is None:
        return from_dict(OnlineConfig, own, where="settings")
    loaded = load_preset(preset, scale=scale)
    check_protocol(preset, loaded.protocol, "online")
    return from_dict(OnlineConfig, merge(loaded.settings, own), where=f"preset {preset} with --set")


def _check(config: OnlineConfig, seed: int) -> None:
    """Whatever cannot be built must fail before a folder holds a run that can never start."""
    for data in dict.fromkeys(source.data for source in config.sources):
        with progress_bar(f"preparing {data}") as tick:
            load_set(data, tick)
    images = SourceImages(config.sources)
    Problem(config, seed, images)
    make_learner(config, config.build_model(images.shape, seed), seed)
    if config.pretrain:
        class_splits(config)


def _pretrain(runs: Sequence[RunFolder], device: str) -> None:
    """Pre-training comes once for all runs that want the same, before they share the machine."""
    for run in runs:
        config = settings_of(run)
        if config.pretrain and not has_weights(run) and not is_cached(config):
            with telling_how_to_go_on(runs), TrainingBars({"pre-training": config.pretrain_steps}) as bars:
                prepare(run, device, partial(bars.update, "pre-training"), bars.note, announce_stop)


def _print_results(runs: Sequence[RunFolder], preset_name: str | None = None) -> None:
    for alike in by_settings(runs):
        first = alike[0]
        name = preset_name or first.preset
        seeds = f"seed {first.seed}" if len(alike) == 1 else f"{len(alike)} seeds"
        what = "the same settings" if name is None else record_name(name, first.scale or "paper")
        papers: dict[str, Paper] = {}
        with suppress(ConfigError):  # a run whose preset this version does not know has results all the same
            papers = paper_numbers(first, preset_name)
        found = [own.values for own in measured_by(alike)]
        typer.echo(f"{what}, {seeds}, in %:")
        print_measures(
            (measure + ("" if unit_of(measure) == "%" else f" ({unit_of(measure)})"), values, papers.get(measure))
            for measure, values in ((measure, [own[measure] for own in found]) for measure in found[0])
        )


def _save(records: Sequence[ResultRecord], folder: Path) -> None:
    for path in save_records(records, folder, INCIDENTAL):
        typer.echo(f"recorded {path}")
