"""What finished online runs measured, and result records of it: one for each number of a preset, over its seeds."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from wheretolearn.config import differences, from_dict, to_dict
from wheretolearn.continual.records import record_name
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.fewshot.records import check_seeds, preset_of
from wheretolearn.online.config import OnlineConfig
from wheretolearn.online.training import RESULT, result, settings_of
from wheretolearn.presets import Paper, Preset
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import ResultRecord, measured, of_runs

# How a run was watched. Whatever else differs from the preset makes another experiment than the paper's.
INCIDENTAL = {"log_every", "checkpoint_every"}
DELAY = "switch delay"


@dataclass(frozen=True, eq=False)
class Measured:
    """What a finished run leaves."""

    values: dict[str, float]  # by measure, in the unit that ``unit_of`` tells
    seconds: float
    runs_at_once: int


def unit_of(measure: str) -> str:
    return "steps" if measure == DELAY else "%"


def measured_by(runs: Sequence[RunFolder]) -> list[Measured]:
    """What each of several finished runs left, less what not all of them have: sources may not occur in all streams."""
    found = [_read(run) for run in runs]
    common = [measure for measure in found[0].values if all(measure in own.values for own in found)]
    return [replace(own, values={measure: own.values[measure] for measure in common}) for own in found]


def _read(run: RunFolder) -> Measured:
    found = result(run)
    try:
        shares = {"accuracy": found["accuracy"]}
        shares |= {f"accuracy on {name}": share for name, share in found["accuracy_by_source"].items()}
        if "sparsity" in found:
            shares["sparsity"] = found["sparsity"]
            shares |= {f"sparsity of {name}": share for name, share in found["sparsity_by_tensor"].items()}
        seen = found.get("detection", {})
        shares |= {f"switch {name}": seen.get(name) for name in ("precision", "recall")}
        values = {name: 100 * float(share) for name, share in shares.items() if share is not None}
        if seen.get("delay") is not None:
            values[DELAY] = float(seen["delay"])
        return Measured(values, float(found["seconds"]), int(found["runs_at_once"]))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        raise UserError(f"{run.path / RESULT} is damaged: it lacks what was measured") from None


def by_settings(runs: Sequence[RunFolder]) -> Iterator[list[RunFolder]]:
    """Runs that differ in nothing but their seeds."""
    groups: dict[tuple[str | None, str | None, OnlineConfig], list[RunFolder]] = {}
    for run in runs:
        groups.setdefault((run.preset, run.scale, settings_of(run)), []).append(run)
    yield from groups.values()


def planned_record(preset: str, scale: str, seeds: Sequence[int], config: OnlineConfig) -> ResultRecord:
    """Stands for the records of runs that are still to be measured, to see whether they can be saved."""
    values = (0.0,) * len(seeds)
    name = record_name(preset, scale)
    return ResultRecord(name=name, metric="accuracy", values=values, seeds=tuple(seeds), config=to_dict(config))


def paper_numbers(run: RunFolder, preset_name: str | None = None) -> dict[str, Paper]:
    """By measure, what the paper reports of this very experiment."""
    preset = _online_preset(run, preset_name)
    if preset is None or (run.scale or "paper") != "paper" or not _changed(run, preset).keys() <= INCIDENTAL:
        return {}
    return ({} if preset.paper is None else {preset.measure: preset.paper}) | preset.also


def result_records(runs: Sequence[RunFolder], preset_name: str | None = None) -> list[ResultRecord]:
    """The records of finished runs. ``preset_name`` names the preset of runs that do not know it, or another cell."""
    groups: dict[tuple[str, str], list[RunFolder]] = {}
    for run in runs:
        preset = _online_preset(run, preset_name)
        if preset is None:
            raise UserError(f"{run.path} does not say which preset it came from: give --preset-name")
        groups.setdefault((preset.name, run.scale or "paper"), []).append(run)
    records = []
    for (name, scale), alike in groups.items():
        for run in alike:
            if changed := differences(settings_of(alike[0]), settings_of(run)).values():
                raise ConfigError(f"{alike[0].path} and {run.path} differ in {', '.join(changed)}: record them apart")
        check_seeds(alike)
        results = measured_by(alike)
        records += [
            _record(record_name(name, scale), measure, alike, results, preset_name) for measure in results[0].values
        ]
    return records


def _record(
    name: str, measure: str, runs: Sequence[RunFolder], results: Sequence[Measured], preset_name: str | None
) -> ResultRecord:
    """Hardware, commit and versions are those of learning, which is measured as it goes."""
    first = runs[0]
    paper = paper_numbers(first, preset_name).get(measure)
    notes = [f"the paper's number: {paper.note}"] if paper is not None and paper.note else []
    if changed := _changed(first, _online_preset(first, preset_name)):
        notes.append("differs from the preset: " + ", ".join(changed.values()))
    if settings_of(first).pretrain:
        notes.append("one pre-training, whose time is not counted, for all seeds")
    at_once = sorted({found.runs_at_once for found in results})
    together = f"{' or '.join(map(str, at_once))} runs at once" if at_once != [1] else "alone on the machine"
    notes.append(f"time of one run{' (mean)' if len(runs) > 1 else ''}, {together}")
    commits = list(dict.fromkeys(run.info.get("commit") for run in runs))
    notes += [f"run at commits {' and '.join(map(str, commits))}"] if len(commits) > 1 else []
    record = measured(
        name,
        measure,
        {run.seed: found.values[measure] for run, found in zip(runs, results, strict=True)},
        unit=unit_of(measure),
        wall_seconds=statistics.fmean(found.seconds for found in results),
        config=first.config,
        paper_value=None if paper is None else paper.value,
        paper_std=None if paper is None else paper.std,
        notes="; ".join(notes),
    )
    return of_runs(record, runs)


def _online_preset(run: RunFolder, name: str | None) -> Preset | None:
    preset = preset_of(run, name)
    if preset is not None and preset.protocol != "online":
        raise ConfigError(f"{preset.name} is a preset of the protocol {preset.protocol}, but {run.path} is online")
    return preset


def _changed(run: RunFolder, preset: Preset | None) -> dict[str, str]:
    """The settings of a run that differ from its preset's."""
    if preset is None:
        return {}
    return differences(from_dict(OnlineConfig, preset.settings, where=f"preset {preset.name}"), settings_of(run))
