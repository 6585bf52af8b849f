"""What ``continual`` and ``online`` share: commands whose runs are measured while they learn."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from wheretolearn.cli.common import (
    all_named,
    check_open_files,
    check_protocol,
    finished,
    free_places,
    print_measures,
    seed_range,
)
from wheretolearn.config import from_dict, merge, parse_overrides, to_dict
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.presets import Paper, Scale, load_preset, scale_named
from wheretolearn.runs.folder import MAX_SEED, RunFolder
from wheretolearn.runs.records import (
    Protocol,
    by_settings,
    paper_numbers,
    planned_record,
    record_name,
    result_records,
)
from wheretolearn.runs.results import ResultRecord, check_savable, save_records

Run = Annotated[
    Path | None,
    typer.Argument(
        help="Folder for the run, new or empty; for several runs: the folder that holds theirs. Default: runs/PRESET.",
    ),
]
ScaleName = Annotated[str, typer.Option(help="paper, or quick: a small version of the preset for a laptop.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random, or the first one.", min=0, max=MAX_SEED)]
Seeds = Annotated[int, typer.Option(help="Do this many runs of each preset, with seeds in a row.", min=1)]
Record = Annotated[Path | None, typer.Option(help="Write result records to this folder.")]


def start(
    protocol: Protocol,
    run: Path | None,
    presets: Sequence[str],
    scale: str,
    overrides: Sequence[str],
    seed: int,
    seeds: int,
    record: Path | None,
    tensorboard: bool,
    *,
    device: str,
    workers: int | None,
    check: Callable[[Any, Sequence[int]], None],
    take_to_the_end: Callable[[Sequence[RunFolder]], None],
) -> None:
    """Make new runs, take them to their ends and record what they measured.

    ``check`` gets settings and seeds: whatever cannot be built must fail there, before a folder holds a run that can
    never start.
    """
    chosen_scale = scale_named(scale)
    numbers = seed_range(seed, seeds)
    names: list[str | None] = [*all_named(presets, seeds)] or [None]
    if record is not None and not presets:
        raise ConfigError("--record names results after their presets: give a --preset")
    configs = {name: _config(protocol, name, chosen_scale, overrides) for name in names}
    if run is None and len(presets) == 1:
        run = Path("runs") / presets[0]  # also of a group
    check_open_files(len(names) * len(numbers), device, workers, tensorboard)
    places = free_places(run, names, numbers)
    for config in dict.fromkeys(configs.values()):
        check(config, numbers)
    if record is not None:
        planned = [
            planned_record(protocol, name, scale, numbers, config)
            for name, config in configs.items()
            if name is not None
        ]
        check_savable(planned, record, protocol.incidental, protocol.settings)
    with ExitStack() as folders:
        runs = [
            folders.enter_context(
                RunFolder.create(
                    place,
                    to_dict(configs[name]),
                    number,
                    protocol.name,
                    name,
                    scale if name else None,
                    tensorboard,
                    threads=1,
                )
            )
            for (name, number), place in places.items()
        ]
        take_to_the_end(runs)
        if record is not None:
            _save(protocol, result_records(protocol, runs), record)


def evaluate(
    protocol: Protocol,
    runs: Sequence[RunFolder],
    refused: Sequence[str],
    preset_name: str | None,
    record: Path | None,
) -> None:
    """Show, and record, what finished runs measured; ``refused`` are options that mean nothing here."""
    if refused:
        raise ConfigError(f"{', '.join(refused)}: not for {protocol.name} runs, which are measured while they learn")
    for run in runs:
        if not finished(run):
            raise UserError(f"{run.path} is not finished: go on with `wheretolearn resume {run.path}`")
    records = [] if record is None else result_records(protocol, runs, preset_name)
    if record is not None:
        check_savable(records, record, protocol.incidental, protocol.settings)
    print_results(protocol, runs, preset_name)
    if record is not None:
        _save(protocol, records, record)


def print_results(protocol: Protocol, runs: Sequence[RunFolder], preset_name: str | None = None) -> None:
    for alike in by_settings(protocol, runs):
        first = alike[0]
        name = preset_name or first.preset
        seeds = f"seed {first.seed}" if len(alike) == 1 else f"{len(alike)} seeds"
        what = "the same settings" if name is None else record_name(name, first.scale or "paper")
        papers: dict[str, Paper] = {}
        with suppress(ConfigError):  # a run whose preset this version does not know has results all the same
            papers = paper_numbers(protocol, first, preset_name)
        found = [own.values for own in protocol.measured_by(alike)]
        units = {measure: protocol.unit_of(measure) for measure in found[0]}
        typer.echo(f"{what}, {seeds}, in %:")
        print_measures(
            (measure + ("" if unit == "%" else f" ({unit})"), [own[measure] for own in found], papers.get(measure))
            for measure, unit in units.items()
        )


def _config(protocol: Protocol, preset: str | None, scale: Scale, overrides: Sequence[str]) -> Any:
    own = parse_overrides(overrides)
    if preset is None:
        return from_dict(protocol.settings, own, where="settings")
    loaded = load_preset(preset, scale=scale)
    check_protocol(preset, loaded.protocol, protocol.name)
    return from_dict(protocol.settings, merge(loaded.settings, own), where=f"preset {preset} with --set")


def _save(protocol: Protocol, records: Sequence[ResultRecord], folder: Path) -> None:
    for path in save_records(records, folder, protocol.incidental, protocol.settings):
        typer.echo(f"recorded {path}")
