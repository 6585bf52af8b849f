"""Figures of continual learning, from run folders: runs that differ in their seed only are one line, with a band."""

import csv
import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter
from matplotlib.transforms import offset_copy

from wheretolearn.config import to_dict
from wheretolearn.continual.config import ContinualConfig
from wheretolearn.continual.training import RESULT, finished, result, settings_of
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.fewshot.records import check_seeds
from wheretolearn.masks import layer_of
from wheretolearn.report.figures import DASHES, INK, MUTED, STYLE, percent_axis, short, spread
from wheretolearn.report.page import ACCENTS, THEME
from wheretolearn.runs.folder import RunFolder
from wheretolearn.storage import atomic_write

COLOURS = "cividis"  # reads the same with every kind of colour vision, and in grey
MOST_NUMBERED = 20  # tasks of a matrix that has room for numbers
MOST_SHAPES = 50  # tasks of a matrix whose cells are shapes; as such, more would take megabytes
MOST_POINTS = 1500  # of one drawn line; the data beside it holds all
LONGEST_LABEL = 44
LONGEST_SLUG = 80  # file names end at 255 bytes
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
    def tasks_learned(self) -> int:
        return int(np.isfinite(self.matrix).any(axis=1).sum())


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of the same settings; the label says in what they differ from the other groups, "" where there is one."""

    runs: list[ContinualRun]
    label: str
    slug: str

    @property
    def config(self) -> ContinualConfig:
        return self.runs[0].config


@dataclass(frozen=True, eq=False)
class Line:
    """Mean and standard deviation over runs at each point, and how many runs have come that far."""

    name: str
    x: np.ndarray
    mean: np.ndarray
    std: np.ndarray  # NaN where there is one run
    runs: np.ndarray
    colour: str
    dashes: Any = "-"


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure and the data behind it; both files are called by its stem."""

    stem: str
    figure: Figure
    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


def read_run(run: RunFolder) -> ContinualRun:
    if run.protocol != "continual":
        raise UserError(
            f"{run.path} is a run of the protocol {run.protocol}: for now, figures are drawn of continual runs only"
        )
    records = run.metrics()
    measured = result(run) if finished(run) else None
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


def group_runs(runs: Sequence[ContinualRun]) -> list[Group]:
    """Runs of the same settings together; groups that differ in one number come in its order."""
    alike: dict[ContinualConfig, list[ContinualRun]] = {}
    for run in runs:
        alike.setdefault(run.config, []).append(run)
    names = differing_settings(list(alike))
    if len(names) == 1 and all(_is_number(getattr(config, names[0])) for config in alike):
        alike = dict(sorted(alike.items(), key=lambda item: float(getattr(item[0], names[0]))))
    groups: list[Group] = []
    for config, own in alike.items():
        check_seeds([run.folder for run in own])
        values = [(name, _value(getattr(config, name))) for name in names]
        label = ", ".join(value if name in SPEAKING else f"{_words(name)} {value}" for name, value in values)
        slug = re.sub(r"[^a-z0-9.]+", "-", label.lower())[:LONGEST_SLUG].strip("-.")
        if any(group.slug == slug for group in groups):
            slug = f"{slug}-{len(groups) + 1}".lstrip("-")
        groups.append(Group(sorted(own, key=lambda run: run.folder.seed), label, slug))
    return groups


def differing_settings(configs: Sequence[ContinualConfig]) -> list[str]:
    tables = [to_dict(config) for config in configs]
    return [name for name in tables[0] if any(table[name] != tables[0][name] for table in tables)]


def swept_setting(groups: Sequence[Group]) -> str:
    """The one setting in which groups differ; an error where none or several do."""
    names = differing_settings([group.config for group in groups])
    if not names:
        raise ConfigError(
            "these runs have the same settings but for seeds: a sweep needs runs that differ in one setting"
        )
    if len(names) > 1:
        raise ConfigError(f"these runs differ in {_listed(names)}: a sweep needs runs that differ in one setting")
    return names[0]


def draw(groups: Sequence[Group]) -> list[Drawing]:
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
        if group.config.epochs > 1 and any(run.sparsity for run in group.runs):
            drawings.append(sparsity_within_tasks(group))
    return drawings


@rc_context(STYLE)
def accuracy_matrix(group: Group, lowest: float = 0.0, highest: float = 1.0) -> Drawing:
    """A map of accuracies: a row for each task learned, a column for each task tested; mean over runs."""
    learned = [run for run in group.runs if run.tasks_learned]
    mean, std, runs = _over_runs(np.stack([run.matrix for run in learned]))
    tasks = len(mean)
    numbered = tasks <= MOST_NUMBERED
    cell = min(0.5, max(0.28, 3.6 / tasks)) if numbered else 5.6 / tasks
    title = _title("Accuracy on every task after every task", group)
    caption = (
        f"{_about([group])}. Each row is the accuracy{' (%)' if numbered else ''} on the tests of every task "
        f"after one more task was learned{_of_runs(runs)}. "
        "Left of the white steps: tasks learned by then; right of them: tasks still to come."
    )
    side = cell * tasks
    figure, axes = _figure(title, caption, width=max(4.3, side + 1.5), height=side + 1.25)
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
                ink = "white" if _is_dark((value - lowest) / (highest - lowest)) else "black"
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
    axes.plot(corners[2:], corners[1:-1], color="white", linewidth=1.6, solid_capstyle="butt")
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
        (i + 1, j + 1, *_cells(mean[i, j], std[i, j], runs[i, j]))
        for i in range(tasks)
        for j in range(tasks)
        if runs[i, j]
    ]
    return Drawing(
        _stem("accuracy-matrix", group),
        figure,
        title,
        caption,
        ("task_learned", "task_tested", "accuracy_mean", "accuracy_std", "runs"),
        rows,
    )


@rc_context(STYLE)
def accuracy_over_tasks(groups: Sequence[Group]) -> Drawing:
    """Mean accuracy on the tasks seen so far, as tasks come; one line per group."""
    lines = []
    for number, group in enumerate(groups):
        curves = [
            {task + 1: float(run.matrix[task, : task + 1].mean()) for task in range(run.tasks_learned)}
            for run in group.runs
        ]
        if any(curves):
            dashes = "-" if number < len(ACCENTS) else DASHES
            name = group.label or group.config.learner
            lines.append(_line(name, curves, ACCENTS[number % len(ACCENTS)], dashes))
    title = "Accuracy on the tasks seen so far"
    caption = (
        f"{_about(groups)}. Mean accuracy on the tests of all tasks learned by then"
        f"{_of_runs(*(line.runs for line in lines), band=True)}."
    )
    figure, axes = _line_axes(title, caption, lines)
    _plot_labelled(axes, lines, marker="o")
    _task_axis(axes, lines)
    return Drawing(
        "accuracy-over-tasks",
        figure,
        title,
        caption,
        ("runs_of", "tasks_learned", "accuracy_mean", "accuracy_std", "runs"),
        _line_rows(lines),
    )


@rc_context(STYLE)
def sparsity_over_tasks(group: Group) -> Drawing:
    """Share of each tensor that cannot change, after each task: weights solid, biases dashed."""
    curves = [
        {task: run.sparsity[step] for task, step in enumerate(run.task_ends, start=1) if step in run.sparsity}
        for run in group.runs
    ]
    lines = _tensor_lines(curves)
    title = _title("Weights that cannot change, by layer", group)
    caption = _sparsity_caption(group, lines, "after each task")
    figure, axes = _line_axes(title, caption, lines)
    percent_axis(axes, "y")
    _plot_labelled(axes, lines, marker="o")
    _task_axis(axes, lines)
    return Drawing(
        _stem("sparsity-over-tasks", group),
        figure,
        title,
        caption,
        ("tensor", "tasks_learned", "sparsity_mean", "sparsity_std", "runs"),
        _line_rows(lines),
    )


@rc_context(STYLE)
def sparsity_within_tasks(group: Group) -> Drawing:
    """The same while the batches of a task come again and again; upright lines are where a new task begins."""
    lines = _tensor_lines([run.sparsity for run in group.runs])
    title = _title("Weights that cannot change, within tasks", group)
    passes = f"as its batches come, {group.config.epochs} passes through each task"
    caption = _sparsity_caption(group, lines, passes, "Upright lines: a new task begins.")
    figure, axes = _line_axes(title, caption, lines, width=6.4)
    percent_axis(axes, "y")
    ends = max((run.task_ends for run in group.runs), key=len)
    for end in ends:
        axes.axvline(end, color=MUTED, linewidth=0.6, alpha=0.5)
    _plot_labelled(axes, lines, keep=ends)
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
        _stem("sparsity-within-tasks", group),
        figure,
        title,
        caption,
        ("tensor", "batches_seen", "sparsity_mean", "sparsity_std", "runs"),
        _line_rows(lines),
    )


@rc_context(STYLE)
def sweep(groups: Sequence[Group]) -> Drawing:
    """Retained accuracy and sparsity of finished runs against the one setting in which they differ."""
    setting = swept_setting(groups)
    done = [
        (getattr(group.config, setting), [run.result for run in group.runs if run.result is not None])
        for group in groups
    ]
    done = [(value, results) for value, results in done if results]
    if len(done) < 2:
        raise ConfigError(f"a sweep over {setting} needs finished runs with at least two values of it")
    values = [value for value, _ in done]
    numeric = all(_is_number(value) for value in values)
    x = np.array([float(value) for value in values] if numeric else range(len(values)), dtype=float)
    panels: dict[str, Line] = {}
    for key, name in (("ra", "retained accuracy (RA)"), ("sparsity", "weights that cannot change")):
        summaries = [_over_runs(np.array([own.get(key, math.nan) for own in results], float)) for _, results in done]
        mean, std, runs = (np.array(part) for part in zip(*summaries, strict=True))
        if runs.any():
            panels[key] = Line(name, x, mean, std, runs, ACCENTS[len(panels)])
    both = "Retained accuracy and sparsity" if len(panels) == 2 else "Retained accuracy"
    title = f"{both} by {_words(setting)}"
    counts = [line.runs for line in panels.values()]
    whiskers = "; whiskers: one standard deviation" if max(int(runs.max()) for runs in counts) > 1 else ""
    caption = f"{_about(groups)}. Retained accuracy: on the tests of all tasks at the end{_of_runs(*counts)}{whiskers}."
    figure, _ = _figure(title, caption, width=4.3, height=1.1 + 1.45 * len(panels), panels=len(panels))
    for axes, line in zip(figure.axes, panels.values(), strict=True):
        axes.plot(x, line.mean, "o-" if numeric else "o", color=line.colour, linewidth=1.6, markersize=4.5)
        whisker = np.isfinite(line.std)
        axes.errorbar(x[whisker], line.mean[whisker], line.std[whisker], fmt="none", color=line.colour, linewidth=1.2)
        axes.set_title(line.name, loc="left", fontsize=8.5, color=INK)
        axes.margins(x=0.06, y=0.12)
        _share_axis(axes, 0.04)
        axes.grid(visible=False, axis="x")
    _swept_axis(figure.axes[-1], setting, values, x, numeric)
    rows = [
        (value, *(cell for line in panels.values() for cell in _cells(line.mean[i], line.std[i], line.runs[i])))
        for i, value in enumerate(values)
    ]
    columns = [f"{key}{part}" for key in panels for part in ("_mean", "_std", "_runs")]
    return Drawing(f"sweep-{setting.replace('_', '-')}", figure, title, caption, (setting, *columns), rows)


def save(drawing: Drawing, folder: Path) -> list[Path]:
    """Write the figure as SVG and its data as CSV; the same runs give the same bytes."""
    text = io.BytesIO()
    metadata = {"Title": drawing.title, "Description": drawing.caption, "Date": None, "Creator": None}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": drawing.stem}), _any_letters():
        drawing.figure.savefig(text, format="svg", metadata=metadata, facecolor=THEME["card"][0])
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([drawing.columns, *drawing.rows])
    paths = [folder / f"{drawing.stem}.svg", folder / f"{drawing.stem}.csv"]
    for path, content in zip(paths, (text.getvalue(), table.getvalue().encode()), strict=True):
        with atomic_write(path) as file:
            file.write(content)
    return paths


def _over_runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, standard deviation (of a sample) and number over the first axis, leaving out NaN."""
    there = np.isfinite(values)
    runs = there.sum(axis=0)
    nothing = np.full(runs.shape, np.nan)
    mean = np.divide(np.where(there, values, 0).sum(axis=0), runs, out=nothing.copy(), where=runs > 0)
    squares = (np.where(there, values - mean, 0) ** 2).sum(axis=0)
    return mean, np.sqrt(np.divide(squares, runs - 1, out=nothing.copy(), where=runs > 1)), runs


def _line(name: str, curves: Sequence[Mapping[int, float]], colour: str, dashes: Any = "-") -> Line:
    """One value per run and point; runs that have not come that far have none."""
    x = sorted({place for curve in curves for place in curve})
    return Line(
        name, np.array(x), *_over_runs(np.array([[c.get(p, math.nan) for p in x] for c in curves])), colour, dashes
    )


def _tensor_lines(curves: Sequence[Mapping[int, Mapping[str, float]]]) -> list[Line]:
    tensors = list(dict.fromkeys(name for curve in curves for shares in curve.values() for name in shares))
    layers = list(dict.fromkeys(map(layer_of, tensors)))
    lines = []
    for name in tensors:
        own = [{place: shares[name] for place, shares in curve.items() if name in shares} for curve in curves]
        colour = ACCENTS[layers.index(layer_of(name)) % len(ACCENTS)]
        lines.append(_line(name, own, colour, DASHES if _is_bias(name) else "-"))
    return lines


def _line_rows(lines: Sequence[Line]) -> list[tuple[object, ...]]:
    return [
        (line.name, int(place), *_cells(mean, std, runs))
        for line in lines
        for place, mean, std, runs in zip(line.x, line.mean, line.std, line.runs, strict=True)
    ]


def _cells(mean: float, std: float, runs: int) -> tuple[object, ...]:
    return *(float(value) if math.isfinite(value) else "" for value in (mean, std)), int(runs)


def _figure(title: str, caption: str, width: float, height: float, panels: int = 1) -> tuple[Figure, Axes]:
    """Axes one above the other between a title and a caption, which adds its own height."""
    wrapped = textwrap.wrap(caption, int(width * 72 / 3.75))
    figure = Figure(figsize=(width, height + 0.13 * len(wrapped)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=7, color=MUTED, linespacing=1.25)
    return figure, np.ravel(figure.subplots(panels, 1, sharex=True))[0]


def _line_axes(title: str, caption: str, lines: Sequence[Line], width: float = 3.7) -> tuple[Figure, Axes]:
    longest = max(len(_label(line)) for line in lines)
    return _figure(title, caption, width + 0.25 + 0.068 * longest, max(2.75, 0.9 + 0.17 * len(lines)))


def _plot_labelled(axes: Axes, lines: Sequence[Line], marker: str = "", keep: Sequence[int] = ()) -> None:
    """Lines and their bands, with names at the right that are moved apart where they would overlap."""
    for line in lines:
        every = math.ceil(len(line.x) / MOST_POINTS)
        drawn = (np.arange(len(line.x))[::-1] % every == 0) | np.isin(line.x, keep)
        x, mean, std = line.x[drawn], line.mean[drawn], line.std[drawn]
        few = marker if len(x) <= 30 else ""
        axes.plot(x, mean, marker=few, markersize=3, color=line.colour, linestyle=line.dashes, linewidth=1.7)
        banded = np.isfinite(std)
        if banded.any():
            x, mean, std = x[banded], mean[banded], std[banded]
            axes.fill_between(x, mean - std, mean + std, color=line.colour, alpha=0.18, linewidth=0)
    if axes.get_autoscaley_on():
        _share_axis(axes, 0.2)
    with _any_letters():
        axes.figure.figure.draw_without_rendering()  # lays out the axes, whose height the labels need
    low, high = axes.get_ylim()
    height = axes.get_window_extent().height / axes.figure.figure.dpi * 72
    places = spread([line.mean[-1] for line in lines], 11.5 / height * (high - low), low, high)
    right = max(line.x[-1] for line in lines)
    beside = offset_copy(axes.transData, axes.figure.figure, x=22, units="points")
    for line, place in zip(lines, places, strict=True):
        lead = {"arrowstyle": "-", "color": line.colour, "linewidth": 1.1, "linestyle": line.dashes}
        lead |= {"shrinkA": 1, "shrinkB": 1, "relpos": (0, 0.5)}
        axes.annotate(
            short(_label(line), LONGEST_LABEL),
            (line.x[-1], line.mean[-1]),
            (right, place),
            textcoords=beside,
            va="center",
            annotation_clip=False,
            arrowprops=lead,
        )


def _label(line: Line) -> str:
    """`layer1.weight` as `layer1 weights`; other names as they are."""
    for ending, words in ((".weight", " weights"), (".bias", " biases")):
        if line.name.endswith(ending):
            return line.name.removesuffix(ending) + words
    return line.name


def _share_axis(axes: Axes, least: float) -> None:
    """Percent around the data, but never so near that noise fills the axis."""
    low, high = axes.get_ylim()
    if high - low < least:
        low = min(max(0.0, (low + high - least) / 2), 1 - least)
        high = low + least
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")


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
    axes.set_xlabel(_words(setting))
    texts = [_value(value) for value in values]
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


def _sparsity_caption(group: Group, lines: Sequence[Line], when: str, more: str = "") -> str:
    biases = ", biases dashed" if any(_is_bias(line.name) for line in lines) else ""
    return (
        f"{_about([group])}. Share of each layer's weights that learning leaves alone, {when}"
        f"{_of_runs(*(line.runs for line in lines), band=True)}. Weights solid{biases}. {more}"
    ).strip()


def _of_runs(*counts: np.ndarray, band: bool = False) -> str:
    """`; mean of 3 seeds`, and what the band is; nothing for a single run."""
    found = np.concatenate([np.ravel(part) for part in counts])
    found = found[found > 0]
    fewest, most = int(found.min()), int(found.max())
    if most == 1:
        return ""
    seeds = f"{most} seeds" if fewest == most else f"{fewest} to {most} seeds"
    return f"; mean of {seeds}" + (", band: one standard deviation" if band else "")


def _range(groups: Sequence[Group]) -> tuple[float, float]:
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


@contextmanager
def _any_letters() -> Iterator[None]:
    """The viewer sets the text, so it matters little if matplotlib's font lacks a letter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield


def _stem(what: str, group: Group) -> str:
    return f"{what}-{group.slug}" if group.slug else what


def _title(what: str, group: Group) -> str:
    return short(f"{what}: {group.label}", 76) if group.label else what


def _about(groups: Sequence[Group]) -> str:
    """`sparse-la-maml on rotations of mnist`: what the groups have in common, and what one of them has for itself."""
    streams, learners = set(), {group.config.learner for group in groups}
    for config in (group.config for group in groups):
        streams.add(f"split {config.data}" if config.problem == "split" else f"{config.problem} of {config.data}")
    common = " on ".join(found.pop() for found in (learners, streams) if len(found) == 1)
    if len(groups) > 1:
        names = differing_settings([group.config for group in groups])
        return ", ".join(filter(None, [common, f"runs by {_listed([_words(name) for name in names])}"]))
    rest = [part for part in groups[0].label.split(", ") if part and part not in common]
    return ", ".join([common, *rest])


def _is_bias(tensor: str) -> bool:
    return tensor.rpartition(".")[2].startswith("bias")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value(value: object) -> str:
    return "none" if value is None else str(value)


def _words(setting: str) -> str:
    return setting.replace("_", " ")


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
