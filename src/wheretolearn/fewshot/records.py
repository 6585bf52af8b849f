"""Result records of finished few-shot runs: one for each number of a preset, over its seeds."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from wheretolearn.config import from_dict, to_dict, toml_text
from wheretolearn.data.load import load_set
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.fewshot.trained import Evaluation, held_out_splits, load_trained
from wheretolearn.presets import Preset, load_preset
from wheretolearn.runs import environment
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import ResultRecord, measured

Evaluations = Mapping[RunFolder, Sequence[Evaluation]]


def settings_of(run: RunFolder) -> FewShotConfig:
    """The settings that runs of one preset share: all but the run that each may have started from."""
    return replace(from_dict(FewShotConfig, run.config, where=str(run.path)), start_from=None)


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
        preset = load_preset(name, scale="quick" if scale == "quick" else "paper")
        _check_alike(runs)
        maker = _Maker(preset, scale, runs)
        for evaluation in zip(*(evaluations[run] for run in runs), strict=True):
            records.append(maker.accuracy(evaluation))
        if load_trained(runs[0])[2].raw:
            records.append(maker.sparsity())
    return records


def _check_alike(runs: Sequence[RunFolder]) -> None:
    first = runs[0]
    seeds: dict[int, Path] = {}
    for run in runs:
        if settings_of(run) != settings_of(first):
            names = _differences(settings_of(first), settings_of(run))
            raise ConfigError(f"{first.path} and {run.path} differ in {', '.join(names)}: record them apart")
        if run.seed in seeds:
            raise ConfigError(f"{seeds[run.seed]} and {run.path} have the same seed {run.seed}: one is enough")
        seeds[run.seed] = run.path


class _Maker:
    """Makes the records of one preset."""

    def __init__(self, preset: Preset, scale: str, runs: Sequence[RunFolder]):
        self.preset, self.scale, self.runs = preset, scale, runs
        config = from_dict(FewShotConfig, runs[0].config, where=str(runs[0].path))
        # A record tells others how to repeat it: the name of a folder helps them, its place here does not.
        start = None if config.start_from is None else Path(config.start_from).name
        self.config = replace(config, start_from=start)

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
        if first.models > 1:
            notes.insert(0, f"mean prediction of the {first.models} best models by validation")
        values = {run.seed: 100 * e.accuracy for run, e in zip(self.runs, evaluations, strict=True)}
        return self._record(self._metric(first), values, notes, (self.config.data, first.data), self._is_cell(first))

    def sparsity(self) -> ResultRecord:
        found = {run.seed: load_trained(run)[2].sparsity() for run in self.runs}
        layers = next(iter(found.values())).by_layer
        means = {layer: statistics.fmean(s.by_layer[layer] for s in found.values()) for layer in layers}
        notes = ["by layer: " + ", ".join(f"{layer} {100 * mean:.1f}" for layer, mean in means.items())]
        values = {seed: 100 * sparsity.overall for seed, sparsity in found.items()}
        return self._record("sparsity", values, notes, (self.config.data,), self.preset.measure == "sparsity")

    def _metric(self, evaluation: Evaluation) -> str:
        """The plain name stands for the one split that training left out."""
        own = evaluation.data == self.config.data
        only = held_out_splits(self.runs[0], evaluation.data) == [evaluation.split]
        place = "" if own else evaluation.data
        if not only:
            place = evaluation.split if own else f"{evaluation.data}/{evaluation.split}"
        metric = "accuracy" if evaluation.models == 1 else "ensemble accuracy"
        return f"{metric} on {place}" if place else metric

    def _is_cell(self, evaluation: Evaluation) -> bool:
        """Whether this is the number that the preset stands for."""
        wanted = self.preset.evaluate
        data = wanted.data or self.config.data
        splits = [wanted.split] if wanted.split is not None else held_out_splits(self.runs[0], data)
        return (
            self.preset.measure == ("accuracy" if evaluation.models == 1 else "ensemble accuracy")
            and evaluation.data == data
            and splits == [evaluation.split]
            and evaluation.steps == (self.config.test_inner_steps if wanted.steps is None else wanted.steps)
        )

    def _record(
        self, metric: str, values: dict[int, float], notes: list[str], data: Sequence[str], is_cell: bool
    ) -> ResultRecord:
        """Time, hardware, commit and versions are those of training; the notes say where it was measured."""
        paper = self.preset.paper if is_cell and self.scale == "paper" else None
        if paper is not None and paper.note:
            notes.append(f"the paper's number: {paper.note}")
        notes += [note for name in dict.fromkeys(data) if (note := _subset(name))]
        expected = from_dict(FewShotConfig, self.preset.settings, where=f"preset {self.preset.name}")
        changed = _differences(replace(expected, start_from=None), settings_of(self.runs[0]))
        if changed:
            notes.append("differs from the preset: " + ", ".join(changed))
        metrics = [run.metrics() for run in self.runs]
        if len(self.runs) > 1:
            notes.append("time of one run (mean)")
        at_once = sorted({int(record.get("runs_at_once", 1)) for records in metrics for record in records})
        if at_once != [1]:
            notes.append(f"trained {' or '.join(map(str, at_once))} at once")
        commits = self._trained(lambda run: run.info.get("commit"))
        notes += [f"trained at commits {' and '.join(map(str, commits))}"] if len(commits) > 1 else []
        record = measured(
            self.preset.name if self.scale == "paper" else f"{self.preset.name} at {self.scale} scale",
            metric,
            values,
            wall_seconds=statistics.fmean(records[-1]["elapsed_seconds"] for records in metrics),
            config=to_dict(self.config),
            paper_value=None if paper is None else paper.value,
            paper_std=None if paper is None else paper.std,
        )
        notes.append(f"measured on {environment.hardware()} at commit {record.commit}")
        return replace(
            record,
            hardware=" / ".join(map(str, self._trained(lambda run: run.info.get("hardware", "unknown")))),
            commit=commits[0],
            versions=dict(self.runs[0].info.get("versions", {})),
            notes="; ".join(notes),
        )

    def _trained(self, fact: Callable[[RunFolder], str | None]) -> list[str | None]:
        return list(dict.fromkeys(fact(run) for run in self.runs))


def _subset(data: str) -> str | None:
    info = load_set(data).info
    return f"{data} is a subset: {info.get('classes')} classes" if info.get("complete") is False else None


def _differences(expected: FewShotConfig, found: FewShotConfig) -> list[str]:
    wanted = to_dict(expected)
    return [f"{name}={toml_text(value)}" for name, value in to_dict(found).items() if value != wanted[name]]
