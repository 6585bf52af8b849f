"""What finished continual runs measured, and result records of it: one for each number of a preset, over its seeds."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wheretolearn.config import differences, from_dict, to_dict
from wheretolearn.continual.config import LOOK_AHEAD, ContinualConfig
from wheretolearn.continual.training import RESULT, result, settings_of
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.fewshot.records import check_seeds, preset_of
from wheretolearn.presets import Paper, Preset
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import ResultRecord, measured, of_runs

# How a run was watched. Whatever else differs from the preset makes another experiment than the paper's.
INCIDENTAL = {"matrix_images", "log_every", "checkpoint_every"}


@dataclass(frozen=True, eq=False)
class Measured:
    """What a finished run leaves."""

    percent: dict[str, float]  # by measure
    seconds: float
    runs_at_once: int


def measured_by(runs: Sequence[RunFolder]) -> list[Measured]:
    """What each of several finished runs left; all of them have the measures of the first."""
    found = [_read(run) for run in runs]
    for run, own in zip(runs, found, strict=True):
        if own.percent.keys() != found[0].percent.keys():
            raise UserError(
                f"{run.path / RESULT} or {runs[0].path / RESULT} is damaged: they do not hold the same measures"
            )
    return found


def measures(run: RunFolder) -> dict[str, float]:
    """Every number of a finished run, in percent."""
    return _read(run).percent


def _read(run: RunFolder) -> Measured:
    found, is_masked = result(run), settings_of(run).learner in LOOK_AHEAD
    try:
        shares = {"RA": found["ra"], "BTI": found["bti"]}
        if is_masked:
            shares["sparsity"] = found["sparsity"]
            shares |= {f"sparsity of {name}": share for name, share in found["sparsity_by_tensor"].items()}
        shares["forward transfer"] = found["forward_transfer"]
        percent = {name: 100 * float(share) for name, share in shares.items()}
        return Measured(percent, float(found["seconds"]), int(found["runs_at_once"]))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        raise UserError(f"{run.path / RESULT} is damaged: it lacks what was measured") from None


def by_settings(runs: Sequence[RunFolder]) -> Iterator[list[RunFolder]]:
    """Runs that differ in nothing but their seeds."""
    groups: dict[tuple[str | None, str | None, ContinualConfig], list[RunFolder]] = {}
    for run in runs:
        groups.setdefault((run.preset, run.scale, settings_of(run)), []).append(run)
    yield from groups.values()


def record_name(preset: str, scale: str) -> str:
    return preset if scale == "paper" else f"{preset} at {scale} scale"


def planned_record(preset: str, scale: str, seeds: Sequence[int], config: ContinualConfig) -> ResultRecord:
    """Stands for the records of runs that are still to be measured, to see whether they can be saved."""
    values = (0.0,) * len(seeds)
    name = record_name(preset, scale)
    return ResultRecord(name=name, metric="RA", values=values, seeds=tuple(seeds), config=to_dict(config))


def paper_numbers(run: RunFolder, preset_name: str | None = None) -> dict[str, Paper]:
    """By measure, what the paper reports of this very experiment."""
    preset = _continual_preset(run, preset_name)
    if preset is None or (run.scale or "paper") != "paper" or not _changed(run, preset).keys() <= INCIDENTAL:
        return {}
    return ({} if preset.paper is None else {preset.measure: preset.paper}) | preset.also


def recordable(runs: Sequence[RunFolder], preset_name: str | None = None) -> dict[tuple[str, str], list[RunFolder]]:
    """By preset and scale, the runs whose results make one record; or an error that says why they cannot."""
    groups: dict[tuple[str, str], list[RunFolder]] = {}
    for run in runs:
        preset = _continual_preset(run, preset_name)
        if preset is None:
            raise UserError(f"{run.path} does not say which preset it came from: give --preset-name")
        groups.setdefault((preset.name, run.scale or "paper"), []).append(run)
    for alike in groups.values():
        first = alike[0]
        for run in alike:
            changed = differences(settings_of(first), settings_of(run)).values()
            if changed:
                raise ConfigError(f"{first.path} and {run.path} differ in {', '.join(changed)}: record them apart")
        check_seeds(alike)
    return groups


def result_records(runs: Sequence[RunFolder], preset_name: str | None = None) -> list[ResultRecord]:
    """The records of finished runs. ``preset_name`` names the preset of runs that do not know it, or another cell."""
    records = []
    for (preset, scale), alike in recordable(runs, preset_name).items():
        results = measured_by(alike)
        for metric in results[0].percent:
            records.append(_record(record_name(preset, scale), metric, alike, results, preset_name))
    return records


def _record(
    name: str, metric: str, runs: Sequence[RunFolder], results: Sequence[Measured], preset_name: str | None
) -> ResultRecord:
    """Hardware, commit and versions are those of training, which measures as it goes."""
    first = runs[0]
    paper = paper_numbers(first, preset_name).get(metric)
    notes = [f"the paper's number: {paper.note}"] if paper is not None and paper.note else []
    if changed := _changed(first, _continual_preset(first, preset_name)):
        notes.append("differs from the preset: " + ", ".join(changed.values()))
    if metric == "forward transfer":
        notes.append(f"on the first {settings_of(first).matrix_images} test images of each task")
    at_once = sorted({found.runs_at_once for found in results})
    time = f"{' or '.join(map(str, at_once))} at once in one process" if at_once != [1] else "alone in its process"
    notes.append(f"time of one run{' (mean)' if len(runs) > 1 else ''}, {time}")
    commits = list(dict.fromkeys(run.info.get("commit") for run in runs))
    notes += [f"trained at commits {' and '.join(map(str, commits))}"] if len(commits) > 1 else []
    record = measured(
        name,
        metric,
        {run.seed: found.percent[metric] for run, found in zip(runs, results, strict=True)},
        wall_seconds=statistics.fmean(found.seconds for found in results),
        config=first.config,
        paper_value=None if paper is None else paper.value,
        paper_std=None if paper is None else paper.std,
        notes="; ".join(notes),
    )
    return of_runs(record, runs)


def _continual_preset(run: RunFolder, name: str | None) -> Preset | None:
    preset = preset_of(run, name)
    if preset is not None and preset.protocol != "continual":
        raise ConfigError(f"{preset.name} is a preset of the protocol {preset.protocol}, but {run.path} is continual")
    return preset


def _changed(run: RunFolder, preset: Preset | None) -> dict[str, str]:
    """The settings of a run that differ from its preset's."""
    if preset is None:
        return {}
    wanted = from_dict(ContinualConfig, preset.settings, where=f"preset {preset.name}")
    return differences(wanted, settings_of(run))
