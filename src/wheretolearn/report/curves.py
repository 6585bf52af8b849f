"""What the paper's figures show over time: kept beside the records, as tables, so that no page needs the runs.

The curves of a preset are `curves/PRESET.csv` in the folder of records: mean and standard deviation over seeds of
each tensor's (few-shot: each layer's) share of closed weights.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wheretolearn.errors import ConfigError, UserError
from wheretolearn.presets import Preset, load_preset
from wheretolearn.report import continual, fewshot, online
from wheretolearn.report.figures import INK
from wheretolearn.report.lines import Line, line_rows, tensor_lines
from wheretolearn.report.runs import changed_settings
from wheretolearn.reproduce.cells import training_of
from wheretolearn.reproduce.protocols import PROTOCOLS
from wheretolearn.runs.folder import RunFolder
from wheretolearn.storage import atomic_write

FOLDER = "curves"
MOST_POINTS = 400  # of one curve that is kept
COLUMNS = ("tensor", "sparsity_mean", "sparsity_std", "runs")


@dataclass(frozen=True, eq=False)
class Curves:
    """Sparsities of one preset's runs."""

    preset: Preset
    over: str  # what x counts, such as "tasks learned"
    lines: Sequence[Line]


def curves_of(runs: Sequence[RunFolder]) -> list[Curves]:
    """Of each preset that runs at the paper's scale have, if it closes weights.

    Runs that were made with other settings than the preset's are left out.
    """
    by_preset: dict[str, list[RunFolder]] = {}
    for run in runs:
        if run.preset is not None and (run.scale or "paper") == "paper" and _is_as_its_preset(run):
            by_preset.setdefault(run.preset, []).append(run)
    found = []
    for name, own in by_preset.items():
        preset = load_preset(name)
        over, curves = _READERS[preset.protocol](own)
        lines = tensor_lines(curves)
        if lines:
            found.append(Curves(preset, over, lines))
    return found


def save_curves(runs: Sequence[RunFolder], records: Path) -> list[Path]:
    """Keep the curves of runs in a folder of records."""
    paths = []
    for curves in curves_of(runs):
        path = records / FOLDER / f"{curves.preset.name}.csv"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot create {path.parent}: {error.strerror}") from error
        tensor, *rest = COLUMNS
        text = [",".join((tensor, curves.over.replace(" ", "_"), *rest))]
        for name, x, mean, std, count in line_rows([_thinned(line) for line in curves.lines]):
            text.append(f"{name},{x},{mean:.5f},{std if std == '' else f'{std:.5f}'},{count}")
        with atomic_write(path) as file:
            file.write(("\n".join(text) + "\n").encode())
        paths.append(path)
    return paths


def load_curves(records: Path) -> list[Curves]:
    """All that are kept in a folder of records."""
    return [_load(path) for path in sorted((records / FOLDER).glob("*.csv"))]


def matching(curves: Sequence[Curves], preset: Preset) -> Curves | None:
    """The curves of a preset's runs, under whichever preset's name they are kept."""
    own = [found for found in curves if found.preset.name == preset.name]
    alike = [found for found in curves if training_of(found.preset) == training_of(preset)]
    return next(iter([*own, *alike]), None)


def _is_as_its_preset(run: RunFolder) -> bool:
    try:
        return changed_settings(run).keys() <= PROTOCOLS[run.protocol].incidental
    except ConfigError:  # there is no such preset any more
        return False


def _load(path: Path) -> Curves:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        tensor, over, *rest = header
        if (tensor, *rest) != COLUMNS:
            raise ValueError
        points: dict[str, list[list[float]]] = {}
        for name, *values in rows:
            points.setdefault(name, []).append([float(value or "nan") for value in values])
        lines = []
        for name, own in points.items():
            x, mean, std, runs = np.array(own).T
            lines.append(Line(name, x, mean, std, runs, colour=INK))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read as curves: {error or 'it has other columns'}; make it again") from None
    try:
        preset = load_preset(path.stem)
    except ConfigError as error:
        raise UserError(f"{path} belongs to no preset any more: delete it ({error})") from None
    return Curves(preset, over.replace("_", " "), lines)


def _thinned(line: Line) -> Line:
    every = -(-len(line.x) // MOST_POINTS)
    kept = np.arange(len(line.x))[::-1] % every == 0  # the last point stays
    return Line(line.name, line.x[kept], line.mean[kept], line.std[kept], line.runs[kept], line.colour, line.dashes)


_Shares = Mapping[int, Mapping[str, float]]


def _continual(runs: Sequence[RunFolder]) -> tuple[str, list[_Shares]]:
    read = [continual.read_run(run) for run in runs]
    if read[0].config.epochs > 1:  # what happens within a task is the point
        return "batches seen", [run.sparsity for run in read]
    ends = [{step: task for task, step in enumerate(run.task_ends, start=1)} for run in read]
    return "tasks learned", [
        {own[step]: shares for step, shares in run.sparsity.items() if step in own}
        for run, own in zip(read, ends, strict=True)
    ]


def _fewshot(runs: Sequence[RunFolder]) -> tuple[str, list[_Shares]]:
    curves: list[_Shares] = []
    for run in runs:
        if run.config.get("mask") != "fixed":
            own = fewshot.read_run(run).sparsity
            by_tensor = {r["step"]: r["sparsity_by_tensor"] for r in run.metrics() if r.get("sparsity_by_tensor")}
            curves.append(
                {step: {fewshot.OVERALL: s[fewshot.OVERALL], **by_tensor.get(step, s)} for step, s in own.items()}
            )
    return "outer steps", curves


def _online(runs: Sequence[RunFolder]) -> tuple[str, list[_Shares]]:
    return "steps", [online.read_run(run).sparsity for run in runs]


_READERS: dict[str, Any] = {"fewshot": _fewshot, "continual": _continual, "online": _online}
