"""Result records of runs that are measured while they learn: one for each measure of a preset, over its seeds."""

import statistics
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from wheretolearn.config import differences, from_dict, to_dict
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.presets import Paper, Preset, load_preset, scale_named
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import ResultRecord, check_alike, measured, of_runs


@dataclass(frozen=True, eq=False)
class Measured:
    """What a finished run leaves."""

    values: dict[str, float]  # by measure, in the unit that the protocol tells
    seconds: float
    runs_at_once: int


@dataclass(frozen=True, eq=False)
class Protocol:
    """What records need to know of a protocol."""

    name: str
    settings: type[Any]
    measure: str  # one that every run has
    incidental: Set[str]  # how a run was watched; whatever else differs from a preset makes another experiment
    measured_by: Callable[[Sequence[RunFolder]], list[Measured]]  # of finished runs; all have the same measures
    notes: Callable[[Any, str], list[str]]  # what a record of these settings and this measure also says
    together: str  # where several runs were at work, behind their number
    alone: str
    unit_of: Callable[[str], str] = lambda _: "%"

    def settings_of(self, run: RunFolder) -> Any:
        return from_dict(self.settings, run.config, where=str(run.path))


def preset_of(run: RunFolder, name: str | None = None) -> Preset | None:
    """The preset that a run is measured for: the named one, else the one it was trained with, at the run's scale."""
    name = name or run.preset
    return None if name is None else load_preset(name, scale=scale_named(run.scale or "paper"))


def record_name(preset: str, scale: str) -> str:
    return preset if scale == "paper" else f"{preset} at {scale} scale"


def by_settings(protocol: Protocol, runs: Sequence[RunFolder]) -> Iterator[list[RunFolder]]:
    """Runs that differ in nothing but their seeds."""
    groups: dict[tuple[str | None, str | None, Any], list[RunFolder]] = {}
    for run in runs:
        groups.setdefault((run.preset, run.scale, protocol.settings_of(run)), []).append(run)
    yield from groups.values()


def planned_record(protocol: Protocol, preset: str, scale: str, seeds: Sequence[int], config: object) -> ResultRecord:
    """Stands for the records of runs that are still to be measured, to see whether they can be saved."""
    return ResultRecord(
        name=record_name(preset, scale),
        metric=protocol.measure,
        values=(0.0,) * len(seeds),
        seeds=tuple(seeds),
        config=to_dict(config),
    )


def paper_numbers(protocol: Protocol, run: RunFolder, preset_name: str | None = None) -> dict[str, Paper]:
    """By measure, what the paper reports of this very experiment."""
    preset = _preset(protocol, run, preset_name)
    if preset is None or (run.scale or "paper") != "paper":
        return {}
    if not _changed(protocol, run, preset).keys() <= protocol.incidental:
        return {}
    return ({} if preset.paper is None else {preset.measure: preset.paper}) | preset.also


def result_records(protocol: Protocol, runs: Sequence[RunFolder], preset_name: str | None = None) -> list[ResultRecord]:
    """The records of finished runs. ``preset_name`` names the preset of runs that do not know it, or another cell."""
    groups: dict[tuple[str, str], list[RunFolder]] = {}
    for run in runs:
        preset = _preset(protocol, run, preset_name)
        if preset is None:
            raise UserError(f"{run.path} does not say which preset it came from: give --preset-name")
        groups.setdefault((preset.name, run.scale or "paper"), []).append(run)
    records = []
    for (preset_found, scale), alike in groups.items():
        check_alike(alike, protocol.settings_of)
        results = protocol.measured_by(alike)
        name = record_name(preset_found, scale)
        records += [_record(protocol, name, measure, alike, results, preset_name) for measure in results[0].values]
    return records


def _record(
    protocol: Protocol,
    name: str,
    measure: str,
    runs: Sequence[RunFolder],
    results: Sequence[Measured],
    preset_name: str | None,
) -> ResultRecord:
    """Hardware, commit and versions are those of learning, which is measured as it goes."""
    first = runs[0]
    paper = paper_numbers(protocol, first, preset_name).get(measure)
    notes = [f"the paper's number: {paper.note}"] if paper is not None and paper.note else []
    if changed := _changed(protocol, first, _preset(protocol, first, preset_name)):
        notes.append("differs from the preset: " + ", ".join(changed.values()))
    notes += protocol.notes(protocol.settings_of(first), measure)
    counts = sorted({found.runs_at_once for found in results})
    at_once = protocol.alone if counts == [1] else f"{' or '.join(map(str, counts))} {protocol.together}"
    notes.append(f"time of one run{' (mean)' if len(runs) > 1 else ''}, {at_once}")
    commits = list(dict.fromkeys(run.info.get("commit") for run in runs))
    notes += [f"trained at commits {' and '.join(map(str, commits))}"] if len(commits) > 1 else []
    shares = [found.values["sparsity"] for found in results if "sparsity" in found.values]
    record = measured(
        name,
        measure,
        {run.seed: found.values[measure] for run, found in zip(runs, results, strict=True)},
        unit=protocol.unit_of(measure),
        wall_seconds=statistics.fmean(found.seconds for found in results),
        config=first.config,
        paper_value=None if paper is None else paper.value,
        paper_std=None if paper is None else paper.std,
        notes="; ".join(notes),
        sparsity=statistics.fmean(shares) if shares else None,
    )
    return of_runs(record, runs)


def _preset(protocol: Protocol, run: RunFolder, name: str | None) -> Preset | None:
    preset = preset_of(run, name)
    if preset is not None and preset.protocol != protocol.name:
        raise ConfigError(
            f"{preset.name} is a preset of the protocol {preset.protocol}, but {run.path} is {protocol.name}"
        )
    return preset


def _changed(protocol: Protocol, run: RunFolder, preset: Preset | None) -> dict[str, str]:
    """The settings of a run that differ from its preset's, and make a difference."""
    if preset is None:
        return {}
    wanted = from_dict(protocol.settings, preset.settings, where=f"preset {preset.name}")
    return differences(wanted, protocol.settings_of(run))
