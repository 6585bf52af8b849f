"""Figures of online learning, from run folders: runs that differ in their seed only are one line, with a band."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes

from wheretolearn.errors import UserError
from wheretolearn.online import metrics
from wheretolearn.online.config import OnlineConfig
from wheretolearn.online.records import measures
from wheretolearn.online.training import finished, settings_of
from wheretolearn.report.figures import INK, MUTED, STYLE, percent_axis
from wheretolearn.report.groups import Group, group_lines, grouped
from wheretolearn.report.lines import (
    Drawing,
    Line,
    line_axes,
    line_of,
    line_rows,
    of_runs,
    plot_labelled,
    share_axis,
    stem_of,
    tensor_lines,
    title_of,
)
from wheretolearn.report.page import ACCENTS
from wheretolearn.runs.folder import RunFolder

TOTAL = "all"
MOST_LINES = 120  # changes of the task that are drawn through the axes; more are marks at their foot
SPEAKING = ("learner",)  # settings whose values need no name beside them


@dataclass(frozen=True, eq=False)
class OnlineRun:
    """What one run has measured so far."""

    folder: RunFolder
    config: OnlineConfig
    accuracy: dict[int, dict[str, float]]  # steps seen -> "all" or a source -> mean accuracy of those steps
    accuracies: list[float]  # of every step that is on record
    switches: list[int]  # steps at which a new task began, from 1
    sparsity: dict[int, dict[str, float]]  # steps seen -> tensor -> share that cannot change

    @property
    def method(self) -> str:
        return self.config.learner

    @property
    def finished(self) -> bool:
        return finished(self.folder)


def read_run(run: RunFolder) -> OnlineRun:
    if finished(run):
        measures(run)  # a damaged result is told, not left out
    records = [record for record in run.metrics() if "accuracies" in record]
    try:
        return OnlineRun(
            run,
            settings_of(run),
            {record["step"]: {TOTAL: record["accuracy"], **record["accuracy_by_source"]} for record in records},
            [float(value) for record in records for value in record["accuracies"]],
            [int(switch["step"]) for record in records for switch in record["switches"]],
            {record["step"]: record["sparsity_by_tensor"] for record in records if record.get("sparsity_by_tensor")},
        )
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{run.path / 'metrics.jsonl'} is damaged: its accuracies cannot be read") from None


def group_runs(runs: Sequence[OnlineRun]) -> list[Group[OnlineRun]]:
    # Methods differ in many settings: those of one value per learner and p need not be told.
    return grouped(runs, SPEAKING, enough=("learner", "p", "pretrain"))


def draw(groups: Sequence[Group[OnlineRun]]) -> list[Drawing]:
    """Every figure that the runs allow: accuracies and sparsities of each group, recovery and accuracies of all."""
    drawings = [accuracy_by_source(group) for group in groups]
    if len(groups) > 1:
        drawings.append(accuracy_over_time(groups))
    if any(len(run.switches) > 1 for group in groups for run in group.runs):
        drawings.append(recovery(groups))
    return drawings + [sparsity_over_time(group) for group in groups if any(run.sparsity for run in group.runs)]


@rc_context(STYLE)
def accuracy_by_source(group: Group[OnlineRun]) -> Drawing:
    """Mean accuracy so far, of all steps and of those of each source; of a single run, with the changes of its task."""
    names = [TOTAL, *(source.label for source in group.first.config.sources)]
    lines = []
    for name, colour in zip(names, [INK, *_colours(len(names) - 1)], strict=True):
        curves = [{step: means[name] for step, means in run.accuracy.items() if name in means} for run in group.runs]
        if any(curves):
            lines.append(line_of(name, curves, colour))
    title = title_of("Accuracy over the stream, by source", group.label)
    marks = ""
    if len(group.runs) == 1 and len(group.runs[0].switches) > 1:
        places = "Upright lines" if len(group.runs[0].switches) <= MOST_LINES else "Marks at the foot"
        marks = f" {places}: the task changes."
    caption = _caption([group], "Mean accuracy of all steps so far, before they are learned from", lines) + marks
    figure, axes = line_axes(title, caption, lines)
    if marks:
        _draw_switches(axes, group.runs[0])
    _accuracy_axis(axes, lines)
    plot_labelled(axes, lines)
    _step_axis(axes, lines)
    columns = ("source", "steps", "accuracy_mean", "accuracy_std", "runs")
    return Drawing(stem_of("accuracy-by-source", group.slug), figure, title, caption, columns, line_rows(lines))


@rc_context(STYLE)
def accuracy_over_time(groups: Sequence[Group[OnlineRun]]) -> Drawing:
    """Mean accuracy so far; one line per group."""
    curves = [[{step: means[TOTAL] for step, means in run.accuracy.items()} for run in group.runs] for group in groups]
    lines = group_lines(groups, curves)
    title = "Accuracy over the stream"
    caption = _caption(groups, "Mean accuracy of all steps so far, before they are learned from", lines)
    figure, axes = line_axes(title, caption, lines)
    _accuracy_axis(axes, lines)
    plot_labelled(axes, lines)
    _step_axis(axes, lines)
    columns = ("runs_of", "steps", "accuracy_mean", "accuracy_std", "runs")
    return Drawing("accuracy-over-time", figure, title, caption, columns, line_rows(lines))


@rc_context(STYLE)
def recovery(groups: Sequence[Group[OnlineRun]]) -> Drawing:
    """Accuracy in the first steps of a new task; one line per group."""
    curves = []
    for group in groups:
        own = []
        for run in group.runs:
            switched = torch.zeros(len(run.accuracies), dtype=torch.bool)
            switched[[step - 1 for step in run.switches]] = True
            means, _ = metrics.recovery(torch.tensor(run.accuracies, dtype=torch.float64), switched)
            own.append(dict(enumerate(means, start=1)))
        curves.append(own)
    lines = group_lines(groups, curves)
    title = "Recovery after the task changes"
    caption = _caption(
        groups, "Mean accuracy in the first, second ... step of a new task, before that step is learned from", lines
    )
    figure, axes = line_axes(title, caption, lines)
    _accuracy_axis(axes, lines)
    plot_labelled(axes, lines)
    axes.set_xlabel("steps since the task changed")
    axes.set_xticks([1, *range(5, metrics.RECOVERY_STEPS + 1, 5)])
    axes.grid(visible=False, axis="x")
    columns = ("runs_of", "step_of_task", "accuracy_mean", "accuracy_std", "runs")
    return Drawing("recovery", figure, title, caption, columns, line_rows(lines))


@rc_context(STYLE)
def sparsity_over_time(group: Group[OnlineRun]) -> Drawing:
    """Figure S5: share of each layer's weights that the inner loop leaves alone; the data has biases and norm too."""
    every = tensor_lines([run.sparsity for run in group.runs])
    chosen = [line for line in every if line.name.endswith(".weight") and ".norm" not in line.name] or every
    # One colour for each layer; the head stands apart.
    lines = [
        replace(line, colour=INK if line.name.startswith("head.") else colour, dashes="-")
        for line, colour in zip(chosen, _colours(len(chosen)), strict=True)
    ]
    title = title_of("Weights that cannot change, by layer", group.label)
    caption = _caption(
        [group], "Share of each layer's weights that the inner loop leaves alone, over the stream", lines
    )
    figure, axes = line_axes(title, caption, lines)
    percent_axis(axes, "y")
    plot_labelled(axes, lines)
    _step_axis(axes, lines)
    columns = ("tensor", "steps", "sparsity_mean", "sparsity_std", "runs")
    return Drawing(stem_of("sparsity-over-time", group.slug), figure, title, caption, columns, line_rows(every))


def _draw_switches(axes: Axes, run: OnlineRun) -> None:
    places = [step for step in run.switches if step > 1]
    foot = 1.0 if len(places) <= MOST_LINES else 0.04
    axes.vlines(places, 0, foot, transform=axes.get_xaxis_transform(), color=MUTED, linewidth=0.5, alpha=0.45)


def _accuracy_axis(axes: Axes, lines: Sequence[Line]) -> None:
    """Percent around the lines and their bands, of which no part lies below 0 or above 100."""
    spread = [np.nan_to_num(line.std) for line in lines]
    low = min(float((line.mean - std).min()) for line, std in zip(lines, spread, strict=True))
    high = max(float((line.mean + std).max()) for line, std in zip(lines, spread, strict=True))
    margin = 0.03 * (high - low) or 0.01  # a flat line needs room too
    axes.set_ylim(max(0.0, low - margin), min(1.0, high + margin))
    share_axis(axes, 0.2)


def _step_axis(axes: Axes, lines: Sequence[Line]) -> None:
    axes.set_xlim(0, max(float(line.x[-1]) for line in lines))
    axes.set_xlabel("steps")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(visible=False, axis="x")


def _colours(count: int) -> list[str]:
    return [ACCENTS[number % len(ACCENTS)] for number in range(count)]


def _caption(groups: Sequence[Group[OnlineRun]], what: str, lines: Sequence[Line]) -> str:
    counts: Any = np.concatenate([line.runs for line in lines])
    learners = {group.first.config.learner for group in groups}
    streams = {(" + ".join(source.label for source in g.first.config.sources), g.first.config.p) for g in groups}
    about: list[str] = [learners.pop()] if len(learners) == 1 else []
    if len(streams) == 1:
        sources, p = streams.pop()
        about.append(f"{sources}, p = {p:g}")
    start = f"{' on '.join(about)}. " if about else ""
    return f"{start}{what}{of_runs(counts, band=True)}."
