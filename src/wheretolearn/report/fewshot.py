"""Figures of few-shot training, from run folders: runs that differ in their seed only are one line, with a band."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes

from wheretolearn.errors import UserError
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.fewshot.records import settings_of
from wheretolearn.report.figures import DASHES, INK, MUTED, STYLE, percent_axis, running_mean
from wheretolearn.report.groups import Group, group_lines, grouped
from wheretolearn.report.lines import (
    Drawing,
    Line,
    line_axes,
    line_rows,
    of_runs,
    plot_labelled,
    stem_of,
    tensor_lines,
    title_of,
)
from wheretolearn.report.page import ACCENTS, percent
from wheretolearn.runs.folder import RunFolder

SPEAKING = ("data", "model", "mask", "adapt")  # settings whose values need no name beside them
OVERALL = "all weights"


@dataclass(frozen=True, eq=False)
class FewShotRun:
    """What one run has measured so far, by outer step."""

    folder: RunFolder
    config: FewShotConfig
    loss: dict[int, float]
    accuracy: dict[int, float]  # validation
    sparsity: dict[int, dict[str, float]]  # of all weights, and of each layer

    @property
    def method(self) -> str:
        return self.config.mask

    @property
    def learns_mask(self) -> bool:
        return self.config.mask != "fixed" and bool(self.sparsity)

    @property
    def begun(self) -> bool:
        return bool(self.loss or self.accuracy)


def read_run(run: RunFolder) -> FewShotRun:
    records = run.metrics()
    try:
        return FewShotRun(
            run,
            settings_of(run),
            _finite(records, "loss"),
            _finite(records, "validation_accuracy"),
            {
                record["step"]: {OVERALL: float(record["sparsity"]), **record["sparsity_by_layer"]}
                for record in records
                if record.get("sparsity_by_layer")
            },
        )
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{run.path / 'metrics.jsonl'} is damaged: its losses or sparsities cannot be read") from None


def _finite(records: Sequence[Mapping[str, Any]], key: str) -> dict[int, float]:
    return {r["step"]: float(r[key]) for r in records if key in r and math.isfinite(r[key])}


def group_runs(runs: Sequence[FewShotRun]) -> list[Group[FewShotRun]]:
    return grouped(runs, SPEAKING)


def draw(groups: Sequence[Group[FewShotRun]]) -> list[Drawing]:
    """Every figure that the runs allow: loss, validation and sparsity of all groups, and layers of each."""
    drawings = []
    if any(run.loss for group in groups for run in group.runs):
        drawings.append(loss_over_training(groups))
    if any(run.accuracy for group in groups for run in group.runs):
        drawings.append(validation_over_training(groups))
    masked = [group for group in groups if any(run.learns_mask for run in group.runs)]
    if len(masked) > 1:
        drawings.append(sparsity_over_training(masked))
    return drawings + [layers_over_training(group) for group in masked]


@rc_context(STYLE)
def loss_over_training(groups: Sequence[Group[FewShotRun]]) -> Drawing:
    curves = [
        [dict(zip(run.loss, running_mean(list(run.loss.values())), strict=True)) for run in group.runs]
        for group in groups
    ]
    lines = group_lines(groups, curves)
    title = "Outer loss in training"
    caption = _caption(groups, "Cross-entropy on the queries of training tasks, smoothed", lines)
    figure, axes = line_axes(title, caption, lines)
    axes.set_ylim(0, 1.05 * max(float(line.mean.max()) for line in lines))
    plot_labelled(axes, lines)
    axes.set_ylabel("loss (nats)")
    _step_axis(axes, lines)
    columns = ("runs_of", "outer_step", "loss_mean", "loss_std", "runs")
    return Drawing("training-loss", figure, title, caption, columns, line_rows(lines))


@rc_context(STYLE)
def validation_over_training(groups: Sequence[Group[FewShotRun]]) -> Drawing:
    lines = group_lines(groups, [[run.accuracy for run in group.runs] for group in groups])
    title = "Validation accuracy in training"
    ways = {group.first.config.ways for group in groups}
    chance = 1 / ways.pop() if len(ways) == 1 else None
    guessing = f"; guessing gives {percent(chance)}" if chance is not None else ""
    caption = _caption(groups, "Accuracy on tasks of the validation classes, after the inner loop", lines, guessing)
    figure, axes = line_axes(title, caption, lines)
    percent_axis(axes, "y")
    if chance is not None:
        axes.axhline(chance, color=MUTED, linewidth=1, linestyle=DASHES)
    plot_labelled(axes, lines)
    _step_axis(axes, lines)
    columns = ("runs_of", "outer_step", "accuracy_mean", "accuracy_std", "runs")
    return Drawing("validation-accuracy", figure, title, caption, columns, line_rows(lines))


@rc_context(STYLE)
def sparsity_over_training(groups: Sequence[Group[FewShotRun]]) -> Drawing:
    curves = [[{step: s[OVERALL] for step, s in run.sparsity.items()} for run in group.runs] for group in groups]
    lines = group_lines(groups, curves)
    title = "Weights that cannot change, in training"
    caption = _caption(groups, "Share of all weights that the inner loop leaves alone", lines)
    figure, axes = line_axes(title, caption, lines)
    percent_axis(axes, "y")
    plot_labelled(axes, lines)
    _step_axis(axes, lines)
    columns = ("runs_of", "outer_step", "sparsity_mean", "sparsity_std", "runs")
    return Drawing("sparsity-in-training", figure, title, caption, columns, line_rows(lines))


@rc_context(STYLE)
def layers_over_training(group: Group[FewShotRun]) -> Drawing:
    """Layers solid, batch norm dashed, all weights together in ink."""
    every = tensor_lines([run.sparsity for run in group.runs])
    weights = [line.name for line in every if line.name != OVERALL and not is_norm(line.name)]
    norms = [line.name for line in every if is_norm(line.name)]
    lines = [_layer_line(line, weights, norms) for line in every]
    title = title_of("Weights that cannot change, by layer", group.label)
    norm = ", batch norm dashed" if norms else ""
    what = f"Share of each layer's weights that the inner loop leaves alone, biases included{norm}"
    caption = _caption([group], what, lines)
    figure, axes = line_axes(title, caption, lines)
    percent_axis(axes, "y")
    plot_labelled(axes, lines)
    _step_axis(axes, lines)
    columns = ("layer", "outer_step", "sparsity_mean", "sparsity_std", "runs")
    return Drawing(stem_of("sparsity-by-layer", group.slug), figure, title, caption, columns, line_rows(lines))


def is_norm(layer: str) -> bool:
    return "norm" in layer.rpartition(".")[2]


def _layer_line(line: Line, weights: Sequence[str], norms: Sequence[str]) -> Line:
    if line.name == OVERALL:
        return _styled(line, INK, "-")
    place = (norms if line.name in norms else weights).index(line.name)
    return _styled(line, ACCENTS[place % len(ACCENTS)], DASHES if line.name in norms else "-")


def _styled(line: Line, colour: str, dashes: Any) -> Line:
    return Line(line.name, line.x, line.mean, line.std, line.runs, colour, dashes)


def _step_axis(axes: Axes, lines: Sequence[Line]) -> None:
    axes.set_xlim(0, max(float(line.x[-1]) for line in lines))
    axes.set_xlabel("outer steps")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(visible=False, axis="x")


def _caption(groups: Sequence[Group[FewShotRun]], what: str, lines: Sequence[Line], more: str = "") -> str:
    problems = {(g.first.config.ways, g.first.config.shots, g.first.config.data) for g in groups}
    start = ""
    if len(problems) == 1:
        ways, shots, data = problems.pop()
        start = f"{ways}-way {shots}-shot {data}. "
    return f"{start}{what}{more}{of_runs(*(line.runs for line in lines), band=True)}."
