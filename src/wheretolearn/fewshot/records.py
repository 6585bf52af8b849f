"""Result records of finished few-shot runs: one for each number of a preset, over its seeds."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wheretolearn.config import differences, from_dict, to_dict
from wheretolearn.data.load import load_set
from wheretolearn.errors import UserError
from wheretolearn.fewshot.config import INCIDENTAL, FewShotConfig
from wheretolearn.fewshot.tasks import known_classes
from wheretolearn.fewshot.trained import Evaluation, held_out_splits, load_trained
from wheretolearn.masks import Sparsity
from wheretolearn.presets import Preset, load_preset, scale_named
from wheretolearn.runs import environment
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import ResultRecord, check_alike, measured, of_runs

Evaluations = Mapping[RunFolder, Sequence[Evaluation]]


def settings_of(run: RunFolder) -> FewShotConfig:
    """The settings that runs of one preset share: all but the run that each may have started from."""
    return replace(from_dict(FewShotConfig, run.config, where=str(run.path)), start_from=None)


def default_splits(run: RunFolder, data: str, preset: Preset | None) -> list[str]:
    """The split of a set that the preset measures; otherwise those that training left out."""
    if preset is None or preset.evaluate.split is None:
        return held_out_splits(run, data)
    own = data == (preset.evaluate.data or _settings(preset).data)
    return [preset.evaluate.split] if own else held_out_splits(run, data)


def result_records(evaluations: Evaluations, preset_name: str | None = None) -> list[ResultRecord]:
    """The records of evaluated runs. ``preset_name`` names the preset of runs that do not know it, or another cell."""
    by_preset: dict[tuple[str, str], list[RunFolder]] = {}
    for run in evaluations:
        name = preset_name or run.preset
        if name is None:
            raise UserError(f"{run.path} does not say which preset it came from: give --preset-name")
        by_preset.setdefault((name, run.scale or "paper"), []).append(run)
    records = []
    for (name, scale), runs in by_preset.items():
        preset = load_preset(name, scale=scale_named(scale))
        check_alike(runs, settings_of)
        maker = _Maker(preset, scale, runs)
        for evaluation in zip(*(evaluations[run] for run in runs), strict=True):
            records.append(maker.accuracy(evaluation))
        if maker.sparsities:
            records.append(maker.sparsity())
    return records


class _Maker:
    """Makes the records of one preset."""

    def __init__(self, preset: Preset, scale: str, runs: Sequence[RunFolder]):
        self.preset, self.scale, self.runs = preset, scale, runs
        self.expected = _settings(preset)
        config = from_dict(FewShotConfig, runs[0].config, where=str(runs[0].path))
        # A record tells others how to repeat it: the name of a folder helps them, its place here does not.
        start = None if config.start_from is None else Path(config.start_from).name
        self.config = replace(config, start_from=start)
        masks = {run.seed: load_trained(run)[2] for run in runs}
        self.sparsities = {seed: mask.sparsity() for seed, mask in masks.items() if mask.raw}

    def accuracy(self, evaluations: Sequence[Evaluation]) -> ResultRecord:
        """Of one measurement, by seed."""
        first = evaluations[0]
        widths = [100 * evaluation.half_width for evaluation in evaluations]
        notes = [
            f"{len(first.task_accuracies)} tasks of {first.data}/{first.split} for each seed",
            "95 % interval over tasks " + " ".join(f"+-{width:.2f}" for width in widths),
            f"K_test {first.steps}",
            first.precision,
        ]
        if known := known_classes(self.config, load_set(first.data), first.split):
            notes.append(known)
        if first.models > 1:
            notes.insert(0, f"mean prediction of the {first.models} best models by validation")
        values = {run.seed: 100 * e.accuracy for run, e in zip(self.runs, evaluations, strict=True)}
        return self._record(self._metric(first), values, notes, (self.config.data, first.data), widths)

    def sparsity(self) -> ResultRecord:
        found = self.sparsities
        layers = next(iter(found.values())).by_layer
        means = {layer: statistics.fmean(s.by_layer[layer] for s in found.values()) for layer in layers}
        notes = ["by layer: " + ", ".join(f"{layer} {100 * mean:.1f}" for layer, mean in means.items())]
        metric = self.preset.measure if self.preset.measure.startswith("sparsity of ") else "sparsity"
        values = {seed: 100 * _share(sparsity, metric.partition(" of ")[2]) for seed, sparsity in found.items()}
        return self._record(metric, values, notes, (self.config.data,))

    def _metric(self, evaluation: Evaluation) -> str:
        """The plain name stands for the measurement of the preset's cell; others say in what they differ from it."""
        wanted = self.preset.evaluate
        place = [] if evaluation.data == (wanted.data or self.config.data) else [evaluation.data]
        if default_splits(self.runs[0], evaluation.data, self.preset) != [evaluation.split]:
            place.append(evaluation.split)
        metric = "accuracy" if evaluation.models == 1 else "ensemble accuracy"
        if place:
            metric += f" on {'/'.join(place)}"
        if evaluation.steps != (self.expected.test_inner_steps if wanted.steps is None else wanted.steps):
            metric += f" after {evaluation.steps} step{'' if evaluation.steps == 1 else 's'}"
        return metric

    def _record(
        self,
        metric: str,
        values: dict[int, float],
        notes: list[str],
        data: Sequence[str],
        task_intervals: Sequence[float] = (),
    ) -> ResultRecord:
        """Time, hardware, commit and versions are those of training; the notes say where it was measured."""
        changed = differences(replace(self.expected, start_from=None), settings_of(self.runs[0]))
        comparable = self.scale == "paper" and metric == self.preset.measure and changed.keys() <= INCIDENTAL
        paper = self.preset.paper if comparable else None
        if paper is not None and paper.note:
            notes.append(f"the paper's number: {paper.note}")
        notes += [note for name in dict.fromkeys(data) if (note := _subset(name))]
        if changed:
            notes.append("differs from the preset: " + ", ".join(changed.values()))
        metrics = [_metrics(run) for run in self.runs]
        if len(self.runs) > 1:
            notes.append("time of one run (mean)")
        at_once = sorted({int(record.get("runs_at_once", 1)) for records in metrics for record in records})
        if at_once != [1]:
            notes.append(f"trained {' or '.join(map(str, at_once))} at once")
        commits = list(dict.fromkeys(run.info.get("commit") for run in self.runs))
        notes += [f"trained at commits {' and '.join(map(str, commits))}"] if len(commits) > 1 else []
        record = measured(
            self.preset.name if self.scale == "paper" else f"{self.preset.name} at {self.scale} scale",
            metric,
            values,
            wall_seconds=statistics.fmean(records[-1]["elapsed_seconds"] for records in metrics),
            config=to_dict(self.config),
            paper_value=None if paper is None else paper.value,
            paper_std=None if paper is None else paper.std,
            sparsity=100 * statistics.fmean(s.overall for s in self.sparsities.values()) if self.sparsities else None,
            task_intervals=task_intervals,
        )
        notes.append(f"measured on {environment.hardware()} at commit {record.commit}")
        return of_runs(replace(record, notes="; ".join(notes)), self.runs)


def _share(sparsity: Sparsity, part: str) -> float:
    """Closed weights: in all, of one tensor, or the mean over batch norm's gains, which are as many in each layer."""
    if not part:
        return sparsity.overall
    if part == "batch-norm gains":
        return statistics.fmean(share for name, share in sparsity.by_tensor.items() if name.endswith("norm.weight"))
    return sparsity.by_tensor[part]


def _settings(preset: Preset) -> FewShotConfig:
    return from_dict(FewShotConfig, preset.settings, where=f"preset {preset.name}")


def _metrics(run: RunFolder) -> list[dict[str, Any]]:
    found = run.metrics()
    if not found or "elapsed_seconds" not in found[-1]:
        raise UserError(
            f"{run.path / 'metrics.jsonl'} does not say how long the run took, which a record tells: "
            "restore that file, or evaluate without --record"
        )
    return found


def _subset(data: str) -> str | None:
    info = load_set(data).info
    return f"{data} is a subset: {info.get('classes')} classes" if info.get("complete") is False else None
