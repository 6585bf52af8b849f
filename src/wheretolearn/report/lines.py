"""Lines with bands, and groups of runs: what figures of continual and of online runs share."""

import csv
import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy

from wheretolearn.masks import layer_of
from wheretolearn.report.figures import DASHES, MUTED, short, spread
from wheretolearn.report.page import ACCENTS, THEME
from wheretolearn.storage import atomic_write

MOST_POINTS = 1500  # of one drawn line; the data beside it holds all
LONGEST_LABEL = 44
MARKERS = "os^Dv"  # of lines beside each other, which so differ in more than colour
MOST_MARKERS = 9  # on one line, about
CAPTION_LINE = 0.13  # inches


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


def title_of(what: str, label: str) -> str:
    return short(f"{what}: {label}", 76) if label else what


def stem_of(what: str, slug: str) -> str:
    return f"{what}-{slug}" if slug else what


def words(setting: str) -> str:
    return setting.replace("_", " ")


def value_text(value: object) -> str:
    if isinstance(value, tuple):
        return " + ".join(str(getattr(item, "label", item)) for item in value)
    return "none" if value is None else str(value)


def data_csv(drawing: Drawing) -> str:
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([drawing.columns, *drawing.rows])
    return table.getvalue()


def without_words(drawing: Drawing) -> Figure:
    """The figure for a place that sets title and caption itself. The drawing's own figure is changed."""
    figure = drawing.figure
    if not figure.get_suptitle():
        return figure
    width, height = figure.get_size_inches()
    lines = len(figure.get_supxlabel().splitlines())
    figure.suptitle("")
    figure.supxlabel("")
    figure.set_size_inches(width, height - CAPTION_LINE * (lines + 1))
    return figure


def save(drawing: Drawing, folder: Path) -> list[Path]:
    """Write the figure as SVG and its data as CSV; the same runs give the same bytes."""
    text = io.BytesIO()
    metadata = {"Title": drawing.title, "Description": drawing.caption, "Date": None, "Creator": None}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": drawing.stem}), _any_letters():
        drawing.figure.savefig(text, format="svg", metadata=metadata, facecolor=THEME["card"][0])
    paths = [folder / f"{drawing.stem}.svg", folder / f"{drawing.stem}.csv"]
    for path, content in zip(paths, (text.getvalue(), data_csv(drawing).encode()), strict=True):
        with atomic_write(path) as file:
            file.write(content)
    return paths


def over_runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, standard deviation (of a sample) and number over the first axis, leaving out NaN."""
    there = np.isfinite(values)
    runs = there.sum(axis=0)
    nothing = np.full(runs.shape, np.nan)
    mean = np.divide(np.where(there, values, 0).sum(axis=0), runs, out=nothing.copy(), where=runs > 0)
    squares = (np.where(there, values - mean, 0) ** 2).sum(axis=0)
    return mean, np.sqrt(np.divide(squares, runs - 1, out=nothing.copy(), where=runs > 1)), runs


def line_of(name: str, curves: Sequence[Mapping[int, float]], colour: str, dashes: Any = "-") -> Line:
    """One value per run and point; runs that have not come that far have none."""
    x = sorted({place for curve in curves for place in curve})
    return Line(
        name, np.array(x), *over_runs(np.array([[c.get(p, math.nan) for p in x] for c in curves])), colour, dashes
    )


def tensor_lines(curves: Sequence[Mapping[int, Mapping[str, float]]]) -> list[Line]:
    tensors = list(dict.fromkeys(name for curve in curves for shares in curve.values() for name in shares))
    layers = list(dict.fromkeys(map(layer_of, tensors)))
    lines = []
    for name in tensors:
        own = [{place: shares[name] for place, shares in curve.items() if name in shares} for curve in curves]
        colour = ACCENTS[layers.index(layer_of(name)) % len(ACCENTS)]
        lines.append(line_of(name, own, colour, DASHES if is_bias(name) else "-"))
    return lines


def line_rows(lines: Sequence[Line]) -> list[tuple[object, ...]]:
    return [
        (line.name, _whole(place), *cells(mean, std, runs))
        for line in lines
        for place, mean, std, runs in zip(line.x, line.mean, line.std, line.runs, strict=True)
    ]


def _whole(place: float) -> object:
    return int(place) if float(place).is_integer() else float(place)


def cells(mean: float, std: float, runs: int) -> tuple[object, ...]:
    return *(float(value) if math.isfinite(value) else "" for value in (mean, std)), int(runs)


def new_figure(title: str, caption: str, width: float, height: float, panels: int = 1) -> tuple[Figure, Axes]:
    """Axes one above the other between a title and a caption, which adds its own height."""
    wrapped = textwrap.wrap(caption, int(width * 72 / 3.75))
    figure = Figure(figsize=(width, height + CAPTION_LINE * len(wrapped)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=7, color=MUTED, linespacing=1.25)
    return figure, np.ravel(figure.subplots(panels, 1, sharex=True))[0]


def line_axes(title: str, caption: str, lines: Sequence[Line], width: float = 3.3) -> tuple[Figure, Axes]:
    longest = max(len(_label(line)) for line in lines)
    return new_figure(title, caption, width + 0.25 + 0.068 * longest, max(2.75, 0.9 + 0.17 * len(lines)))


def plot_labelled(axes: Axes, lines: Sequence[Line], keep: Sequence[int] = ()) -> None:
    """Lines and their bands, with names at the right that are moved apart where they would overlap."""
    for number, line in enumerate(lines):
        every = math.ceil(len(line.x) / MOST_POINTS)
        drawn = (np.arange(len(line.x))[::-1] % every == 0) | np.isin(line.x, keep)
        x, mean, std = line.x[drawn], line.mean[drawn], line.std[drawn]
        apart = math.ceil(len(x) / MOST_MARKERS)
        axes.plot(
            x,
            mean,
            marker=MARKERS[number % len(MARKERS)],
            markersize=3.4,
            # Markers of neighbouring lines stand at different places, and none is left out where points are few.
            markevery=(number * apart // 3 % apart, apart),
            color=line.colour,
            linestyle=line.dashes,
            linewidth=1.6,
        )
        banded = np.isfinite(std)
        if banded.any():
            x, mean, std = x[banded], mean[banded], std[banded]
            axes.fill_between(x, mean - std, mean + std, color=line.colour, alpha=0.18, linewidth=0)
    if axes.get_autoscaley_on():
        share_axis(axes, 0.2)
    with _any_letters():
        axes.figure.figure.draw_without_rendering()  # lays out the axes, whose height the labels need
    low, high = axes.get_ylim()
    height = axes.get_window_extent().height / axes.figure.figure.dpi * 72
    places = spread([line.mean[-1] for line in lines], 11.5 / height * (high - low), low, high)
    right = max(line.x[-1] for line in lines)
    beside = offset_copy(axes.transData, axes.figure.figure, x=22, units="points")
    for line, place in zip(lines, places, strict=True):
        # What ends early has a long way to its name, which must not look like data.
        early = line.x[-1] < right
        lead = {"arrowstyle": "-", "color": line.colour, "linewidth": 0.6 if early else 1.1}
        lead |= {"linestyle": ":" if early else line.dashes}
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


def share_axis(axes: Axes, least: float) -> None:
    """Percent around the data, but never so near that noise fills the axis."""
    low, high = axes.get_ylim()
    if high - low < least:
        low = min(max(0.0, (low + high - least) / 2), 1 - least)
        high = low + least
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")


def of_runs(*counts: np.ndarray, band: bool = False) -> str:
    """`; mean of 3 seeds`, and what the band is; nothing for a single run."""
    found = np.concatenate([np.ravel(part) for part in counts])
    found = found[found > 0]
    fewest, most = int(found.min()), int(found.max())
    if most == 1:
        return ""
    seeds = f"{most} seeds" if fewest == most else f"{fewest} to {most} seeds"
    return f"; mean of {seeds}" + (", band: one standard deviation" if band else "")


def is_bias(tensor: str) -> bool:
    return tensor.rpartition(".")[2].startswith("bias")


@contextmanager
def _any_letters() -> Iterator[None]:
    """The viewer sets the text, so it matters little if matplotlib's font lacks a letter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield
