"""Figures of continual learning, from run folders: runs that differ in their seed only are one line, with a band."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, PercentFormatter

from wheretolearn.continual.config import ContinualConfig
from wheretolearn.continual.records import measures
from wheretolearn.continual.training import RESULT, finished, result, settings_of
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.report.figures import INK, MUTED, STYLE, percent_axis
from wheretolearn.report.groups import Group, differing_settings, group_lines, grouped, is_number
from wheretolearn.report.lines import (
    Drawing,
    Line,
    cells,
    is_bias,
    line_axes,
    line_rows,
    new_figure,
    of_runs,
    over_runs,
    plot_labelled,
    share_axis,
    stem_of,
    tensor_lines,
    title_of,
    value_text,
    words,
)
from wheretolearn.report.page import ACCENTS
from wheretolearn.runs.folder import RunFolder

WHITE = "#fdfdfd"  # on coloured cells; pure white is the ground of light pages, and follows the theme
COLOURS = "cividis"  # reads the same with every kind of colour vision, and in grey
MOST_NUMBERED = 20  # tasks of a matrix that has room for numbers
MOST_SHAPES = 50  # tasks of a matrix whose cells are shapes; as such, more would take megabytes
SPEAKING = ("learner", "problem", "data", "model")  # settings whose values need no name beside them


@dataclass(frozen=True, eq=False)
class ContinualRun:
    """What one run has measured so far."""

    folder: RunFolder
    config: ContinualConfig
    matrix: np.ndarray  # [task learned, task tested]; NaN where the run is not yet
    sparsity: dict[int, dict[str, float]]  # batches seen -> tensor -> share that cannot change
    task_ends: list[int]  # batches seen at the end of each task
    result: dict[str, Any] | None  # None: not finished

    @property
    def method(self) -> str:
        return self.config.learner

    @property
    def tasks_learned(self) -> int:
        return int(np.isfinite(self.matrix).any(axis=1).sum())


def read_run(run: RunFolder) -> ContinualRun:
    if run.protocol != "continual":
        raise UserError(
            f"{run.path} is a run of the protocol {run.protocol}: figures are drawn of continual and online runs; "
            f"`wheretolearn report {run.path}` shows any run's curves"
        )
    records = run.metrics()
    measured = result(run) if finished(run) else None
    if measured is not None:
        measures(run)  # a damaged result is told, not left out
    try:
        if measured is not None:
            matrix = np.array(measured["accuracy_matrix"], dtype=float)
            float(measured["ra"])
        else:
            rows = {int(record["task"]): record["accuracies"] for record in records if "accuracies" in record}
            tasks = max((len(row) for row in rows.values()), default=0)
            matrix = np.full((tasks, tasks), np.nan)
            for task, row in rows.items():
                matrix[task] = row
        if matrix.shape != (len(matrix), len(matrix)):
            raise ValueError
        sparsity = {
            record["step"]: {str(name): float(share) for name, share in record["sparsity_by_tensor"].items()}
            for record in records
            if record.get("sparsity_by_tensor")
        }
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        what = RESULT if measured is not None else "metrics.jsonl"
        raise UserError(f"{run.path / what} is damaged: its accuracies or sparsities cannot be read") from None
    ends = [record["step"] for record in records if "task" in record]
    return ContinualRun(run, settings_of(run), matrix, sparsity, ends, measured)


def group_runs(runs: Sequence[ContinualRun]) -> list[Group[ContinualRun]]:
    return grouped(runs, SPEAKING)


def swept_setting(groups: Sequence[Group[ContinualRun]]) -> str:
    """The one setting in which groups differ; an error where none or several do."""
    names = differing_settings([group.first.config for group in groups])
    if not names:
        raise ConfigError(
            "these runs have the same settings but for seeds: a sweep needs runs that differ in one setting"
        )
    if len(names) > 1:
        raise ConfigError(f"these runs differ in {_listed(names)}: a sweep needs runs that differ in one setting")
    return names[0]


def draw(groups: Sequence[Group[ContinualRun]]) -> list[Drawing]:
    """Every figure that the runs allow but the sweep: a matrix and sparsities of each group, accuracies of all."""
    drawings = []
    lowest, highest = _range(groups)
    for group in groups:
        if any(run.tasks_learned for run in group.runs):
            drawings.append(accuracy_matrix(group, lowest, highest))
    if any(run.tasks_learned for group in groups for run in group.runs):
        drawings.append(accuracy_over_tasks(groups))
    for group in groups:
        if any(end in run.sparsity for run in group.runs for end in run.task_ends):
            drawings.append(sparsity_over_tasks(group))
        if group.first.config.epochs > 1 and any(run.sparsity for run in group.runs):
            drawings.append(sparsity_within_tasks(group))
    return drawings


@rc_context(STYLE)
def accuracy_matrix(group: Group[ContinualRun], lowest: float = 0.0, highest: float = 1.0) -> Drawing:
    """A map of accuracies: a row for each task learned, a column for each task tested; mean over runs."""
    learned = [run for run in group.runs if run.tasks_learned]
    mean, std, runs = over_runs(np.stack([run.matrix for run in learned]))
    tasks = len(mean)
    numbered = tasks <= MOST_NUMBERED
    cell = min(0.5, max(0.28, 3.6 / tasks)) if numbered else 5.6 / tasks
    title = title_of("Accuracy on every task after every task", group.label)
    caption = (
        f"{_about([group])}. Each row is the accuracy{' (%)' if numbered else ''} on the tests of every task "
        f"after one more task was learned{of_runs(runs)}. "
        "Left of the white steps: tasks learned by then; right of them: tasks still to come."
    )
    side = cell * tasks
    figure, axes = new_figure(title, caption, width=max(4.3, side + 1.5), height=side + 1.25)
    scale: dict[str, Any] = {"cmap": COLOURS, "vmin": lowest, "vmax": highest}
    if tasks > MOST_SHAPES:
        image: Any = axes.imshow(mean, extent=(0, tasks, tasks, 0), interpolation="none", **scale)
    else:
        image = axes.pcolormesh(mean, linewidth=0.2, edgecolor="face", **scale)
        axes.set_aspect("equal")
        axes.invert_yaxis()
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if numbered:
        for (row, column), value in np.ndenumerate(mean):
            if math.isfinite(value):
                ink = WHITE if _is_dark((value - lowest) / (highest - lowest)) else "black"
                axes.text(
                    column + 0.5,
                    row + 0.5,
                    f"{100 * value:.0f}",
                    ha="center",
                    va="center_baseline",
                    color=ink,
                    fontsize=min(8.5, 26 * cell),
                )
    corners = np.arange(tasks + 1).repeat(2)
    axes.plot(corners[2:], corners[1:-1], color=WHITE, linewidth=1.6, solid_capstyle="butt")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([task - 0.5 for task in _ticks(tasks)], [str(task) for task in _ticks(tasks)])
    axes.tick_params(length=0)
    axes.set_xlabel("task tested")
    axes.set_ylabel("last task learned")
    bar = figure.colorbar(image, cax=axes.inset_axes((1.02, 0, 0.14 / side, 1)), format=PercentFormatter(1, 0, " %"))
    bar.outline.set_visible(False)
    assert bar.solids is not None
    bar.solids.set_edgecolor("face")  # no hairlines between its steps
    rows = [
        (i + 1, j + 1, *cells(mean[i, j], std[i, j], runs[i, j]))
        for i in range(tasks)
        for j in range(tasks)
        if runs[i, j]
    ]
    return Drawing(
        stem_of("accuracy-matrix", group.slug),
        figure,
        title,
        caption,
        ("task_learned", "task_tested", "accuracy_mean", "accuracy_std", "runs"),
        rows,
    )


@rc_context(STYLE)
def accuracy_over_tasks(groups: Sequence[Group[ContinualRun]]) -> Drawing:
    """Mean accuracy on the tasks seen so far, as tasks come; one line per group."""
    curves = [
        [
            {task + 1: float(run.matrix[task, : task + 1].mean()) for task in range(run.tasks_learned)}
            for run in group.runs
        ]
        for group in groups
    ]
    lines = group_lines(groups, curves)
    title = "Accuracy on the tasks seen so far"
    caption = (
        f"{_about(groups)}. Mean accuracy on the tests of all tasks learned by then"
        f"{of_runs(*(line.runs for line in lines), band=True)}."
    )
    figure, axes = line_axes(title, caption, lines)
    plot_labelled(axes, lines)
    _task_axis(axes, lines)
    return Drawing(
        "accuracy-over-tasks",
        figure,
        title,
        caption,
        ("runs_of", "tasks_learned", "accuracy_mean", "accuracy_std", "runs"),
        line_rows(lines),
    )


@rc_context(STYLE)
def sparsity_over_tasks(group: Group[ContinualRun]) -> Drawing:
    """Share of each tensor that cannot change, after each task: weights solid, biases dashed."""
    curves = [
        {task: run.sparsity[step] for task, step in enumerate(run.task_ends, start=1) if step in run.sparsity}
        for run in group.runs
    ]
    lines = tensor_lines(curves)
    title = title_of("Weights that cannot change, by layer", group.label)
    caption = _sparsity_caption(group, lines, "after each task")
    figure, axes = line_axes(title, caption, lines)
    percent_axis(axes, "y")
    plot_labelled(axes, lines)
    _task_axis(axes, lines)
    return Drawing(
        stem_of("sparsity-over-tasks", group.slug),
        figure,
        title,
        caption,
        ("tensor", "tasks_learned", "sparsity_mean", "sparsity_std", "runs"),
        line_rows(lines),
    )


@rc_context(STYLE)
def sparsity_within_tasks(group: Group[ContinualRun]) -> Drawing:
    """The same while the batches of a task come again and again; upright lines are where a new task begins."""
    lines = tensor_lines([run.sparsity for run in group.runs])
    title = title_of("Weights that cannot change, within tasks", group.label)
    passes = f"as its batches come, {group.first.config.epochs} passes through each task"
    caption = _sparsity_caption(group, lines, passes, "Upright lines: a new task begins.")
    figure, axes = line_axes(title, caption, lines, width=6.4)
    percent_axis(axes, "y")
    ends = max((run.task_ends for run in group.runs), key=len)
    for end in ends:
        axes.axvline(end, color=MUTED, linewidth=0.6, alpha=0.5)
    plot_labelled(axes, lines, keep=ends)
    last = max(line.x[-1] for line in lines)
    if len(ends) <= MOST_NUMBERED:
        starts = [0, *ends]
        for number, (start, end) in enumerate(zip(starts, [*ends, last], strict=True), start=1):
            if end > start:
                name = f"task {number}" if len(ends) <= 8 or number == 1 else str(number)
                middle = (start + end) / 2
                above = axes.get_xaxis_transform()
                axes.text(middle, 1.015, name, fontsize=7, color=MUTED, transform=above, ha="center", va="bottom")
    axes.grid(visible=False, axis="x")
    axes.set_xlim(0, last)
    axes.set_xlabel("batches seen")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    return Drawing(
        stem_of("sparsity-within-tasks", group.slug),
        figure,
        title,
        caption,
        ("tensor", "batches_seen", "sparsity_mean", "sparsity_std", "runs"),
        line_rows(lines),
    )


@rc_context(STYLE)
def sweep(groups: Sequence[Group[ContinualRun]]) -> Drawing:
    """Retained accuracy and sparsity of finished runs against the one setting in which they differ."""
    setting = swept_setting(groups)
    done = [
        (getattr(group.first.config, setting), [run.result for run in group.runs if run.result is not None])
        for group in groups
    ]
    done = [(value, results) for value, results in done if results]
    if len(done) < 2:
        raise ConfigError(f"a sweep over {setting} needs finished runs with at least two values of it")
    values = [value for value, _ in done]
    numeric = all(is_number(value) for value in values)
    x = np.array([float(value) for value in values] if numeric else range(len(values)), dtype=float)
    panels: dict[str, Line] = {}
    for key, name in (("ra", "retained accuracy (RA)"), ("sparsity", "weights that cannot change")):
        summaries = [over_runs(np.array([own.get(key, math.nan) for own in results], float)) for _, results in done]
        mean, std, runs = (np.array(part) for part in zip(*summaries, strict=True))
        if runs.any():
            panels[key] = Line(name, x, mean, std, runs, ACCENTS[len(panels)])
    both = "Retained accuracy and sparsity" if len(panels) == 2 else "Retained accuracy"
    title = f"{both} by {words(setting)}"
    counts = [line.runs for line in panels.values()]
    whiskers = "; whiskers: one standard deviation" if max(int(runs.max()) for runs in counts) > 1 else ""
    caption = f"{_about(groups)}. Retained accuracy: on the tests of all tasks at the end{of_runs(*counts)}{whiskers}."
    figure, _ = new_figure(title, caption, width=4.3, height=1.1 + 1.45 * len(panels), panels=len(panels))
    for axes, line in zip(figure.axes, panels.values(), strict=True):
        axes.plot(x, line.mean, "o-" if numeric else "o", color=line.colour, linewidth=1.6, markersize=4.5)
        whisker = np.isfinite(line.std)
        axes.errorbar(x[whisker], line.mean[whisker], line.std[whisker], fmt="none", color=line.colour, linewidth=1.2)
        axes.set_title(line.name, loc="left", fontsize=8.5, color=INK)
        axes.margins(x=0.06, y=0.12)
        share_axis(axes, 0.04)
        axes.grid(visible=False, axis="x")
    _swept_axis(figure.axes[-1], setting, values, x, numeric)
    rows = [
        (value, *(cell for line in panels.values() for cell in cells(line.mean[i], line.std[i], line.runs[i])))
        for i, value in enumerate(values)
    ]
    columns = [f"{key}{part}" for key in panels for part in ("_mean", "_std", "_runs")]
    return Drawing(f"sweep-{setting.replace('_', '-')}", figure, title, caption, (setting, *columns), rows)


def _task_axis(axes: Axes, lines: Sequence[Line]) -> None:
    last = max(line.x[-1] for line in lines)
    axes.set_xlim(1 - 0.02 * last, 1.02 * last)
    axes.set_xticks(_ticks(int(last)))
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("tasks learned")


def _ticks(tasks: int) -> list[int]:
    """Numbers of tasks to write on an axis."""
    every = 1 if tasks <= 12 else 5 if tasks <= 40 else 10
    return [1, *range(max(2, every), tasks + 1, every)]


def _swept_axis(axes: Axes, setting: str, values: Sequence[object], x: np.ndarray, numeric: bool) -> None:
    """Ticks at the values themselves, but for labels that would touch; far ranges in logarithms."""
    axes.set_xlabel(words(setting))
    texts = [value_text(value) for value in values]
    logarithmic = numeric and x.min() > 0 and x.max() / x.min() >= 8
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    at = np.log(x) if logarithmic else x
    room = 0.018 * max(map(len, texts)) + 0.02 if numeric else 0.0  # share of the axis that a label takes
    shown = [0]
    for i in range(1, len(at)):
        if at[i] - at[shown[-1]] >= room * (at[-1] - at[0]):
            shown.append(i)
    axes.set_xticks(x, [text if i in shown else "" for i, text in enumerate(texts)])
    if not numeric and sum(map(len, texts)) > 50:
        axes.tick_params(axis="x", labelrotation=25)


def _sparsity_caption(group: Group[ContinualRun], lines: Sequence[Line], when: str, more: str = "") -> str:
    biases = ", biases dashed" if any(is_bias(line.name) for line in lines) else ""
    return (
        f"{_about([group])}. Share of each layer's weights that learning leaves alone, {when}"
        f"{of_runs(*(line.runs for line in lines), band=True)}. Weights solid{biases}. {more}"
    ).strip()


def _range(groups: Sequence[Group[ContinualRun]]) -> tuple[float, float]:
    """Tens of percent around all accuracies, so that the matrices of all groups share their colours."""
    values = np.concatenate([np.ravel(run.matrix) for group in groups for run in group.runs])
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 1.0
    lowest, highest = math.floor(10 * values.min()) / 10, math.ceil(10 * values.max()) / 10
    return (lowest, highest) if highest > lowest else (0.0, 1.0)


def _is_dark(place: float) -> bool:
    red, green, blue, _ = colormaps[COLOURS](place)
    return bool(0.299 * red + 0.587 * green + 0.114 * blue < 0.5)


def _about(groups: Sequence[Group[ContinualRun]]) -> str:
    """`sparse-la-maml on rotations of mnist`: what the groups have in common, and what one of them has for itself."""
    streams, learners = set(), {group.first.config.learner for group in groups}
    for config in (group.first.config for group in groups):
        streams.add(f"split {config.data}" if config.problem == "split" else f"{config.problem} of {config.data}")
    common = " on ".join(found.pop() for found in (learners, streams) if len(found) == 1)
    if len(groups) > 1:
        names = differing_settings([group.first.config for group in groups])
        return ", ".join(filter(None, [common, f"runs by {_listed([words(name) for name in names])}"]))
    rest = [part for part in groups[0].label.split(", ") if part and part not in common]
    return ", ".join([common, *rest])


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
