"""Figures of training, accuracy and sparsity, each one matplotlib ``Figure`` that a page or a file can hold."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image
from torch import Tensor

from wheretolearn.errors import ConfigError
from wheretolearn.masks import layer_of
from wheretolearn.report.page import PICTURE_INK, THEME, interval, percent
from wheretolearn.storage import atomic_write

INK, MUTED, LINE = (THEME[name][0] for name in ("ink", "muted", "line"))
STYLE: dict[Any, Any] = {
    "font.size": 8.5,
    "text.color": INK,
    "text.parse_math": False,  # a $ in a name is a $
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "figure.titlesize": 9.5,
    "figure.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "xtick.major.size": 3,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "lines.solid_capstyle": "round",
}
WIDTH = 4.3  # inches of a figure that takes half a page
HEIGHT = 2.75
DASHES = (0, (4, 3))
LONGEST_NAME = 26
MOST_POINTS = 300  # of one curve


@dataclass(frozen=True)
class Curve:
    """One line over outer steps."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    colour: str
    strength: float = 1.0  # opacity


@dataclass(frozen=True)
class Bar:
    """One share, with the half width of its interval where it has one."""

    name: str
    value: float
    colour: str
    half_width: float = math.inf


@rc_context(STYLE)
def loss_curves(curves: Sequence[Curve]) -> Figure:
    """Outer loss of each method: smoothed, over the faint values as logged."""
    figure, axes = _axes("Outer loss")
    smooth = [Curve(c.name, c.steps, running_mean(c.values), c.colour) for c in curves]
    for curve in curves:
        _plot(axes, Curve("", curve.steps, curve.values, curve.colour, strength=0.25))
    _plot_labelled(axes, smooth)
    axes.set_ylim(bottom=0)
    _step_axis(axes)
    return figure


@rc_context(STYLE)
def accuracy_curves(curves: Sequence[Curve], chance: float | None = None) -> Figure:
    """Validation accuracy of each method, and what guessing would give."""
    figure, axes = _axes("Validation accuracy")
    percent_axis(axes, "y")
    if chance is not None:
        axes.axhline(chance, color=MUTED, linewidth=1, linestyle=DASHES)
        axes.annotate(
            f"chance {percent(chance)}",
            (0, chance),
            (3, -10 if chance > 0.1 else 4),  # clear of the grid
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=MUTED,
        )
    _plot_labelled(axes, curves, marker="o")
    if not any(len(curve.steps) for curve in curves):
        axes.text(0.5, 0.5, "no validation yet", transform=axes.transAxes, ha="center", color=MUTED)
        axes.set_xticks([])
    _step_axis(axes)
    return figure


@rc_context(STYLE)
def sparsity_curves(title: str, curves: Sequence[Curve]) -> Figure:
    """Share of closed weights in each layer of one learned mask over training."""
    figure, axes = _axes(title, height=max(HEIGHT, 0.9 + 0.17 * len(curves)))
    percent_axis(axes, "y")
    _plot_labelled(axes, curves)
    _step_axis(axes)
    return figure


@rc_context(STYLE)
def accuracy_bars(title: str, bars: Sequence[Bar], chance: float | None = None) -> Figure:
    """Accuracy of each method on one evaluation set, with its interval, and what guessing would give."""
    figure, axes = _axes(title, height=1.0 + 0.36 * len(bars))
    for place, bar in enumerate(bars):
        _bar(axes, place, 0.62, bar, interval(bar.value, bar.half_width))
    axes.set_ylim(-0.5, len(bars) - 0.5)
    _rows_axis(axes, range(len(bars)), [bar.name for bar in bars])
    if chance is not None:
        axes.axvline(chance, color=MUTED, linewidth=1, linestyle=DASHES)
        axes.annotate(
            f"chance {percent(chance)}",
            (chance, 1),
            (0, 3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            color=MUTED,
            fontsize=7.5,
        )
    return figure


@rc_context(STYLE)
def sparsity_bars(title: str, layers: Mapping[str, Sequence[Bar]], strength: float = 1.0) -> Figure:
    """Share of closed weights of each layer, methods side by side; an open layer shows as a bar of no length."""
    thickness, space = 0.17, 0.14  # inches
    sizes = [len(bars) * thickness + space for bars in layers.values()]
    figure, axes = _axes(title, height=0.7 + sum(sizes))
    middles = []
    for start, (bars, size) in zip(np.cumsum([0.0, *sizes]), zip(layers.values(), sizes, strict=True), strict=False):
        for number, bar in enumerate(bars):
            _bar(axes, start + (number + 0.5) * thickness, 0.76 * thickness, bar, percent(bar.value), strength)
        middles.append(start + (size - space) / 2)
    axes.set_ylim(-space / 2, sum(sizes) - space / 2)
    _rows_axis(axes, middles, list(layers))
    return figure


def _bar(axes: Axes, place: float, thickness: float, bar: Bar, text: str, strength: float = 1.0) -> None:
    # The edge keeps a share of zero visible.
    axes.barh(place, bar.value, thickness, color=bar.colour, edgecolor=bar.colour, linewidth=1.2, alpha=strength)
    end = bar.value
    if math.isfinite(bar.half_width):
        end += bar.half_width
        axes.plot([bar.value - bar.half_width, end], [place, place], color=INK, linewidth=1.2)
    axes.annotate(text, (end, place), (5, 0), textcoords="offset points", va="center", fontsize=7.5)


def _rows_axis(axes: Axes, places: Sequence[float], names: Sequence[str]) -> None:
    axes.set_yticks(places, [short(name) for name in names])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    percent_axis(axes, "x")


def running_mean(values: Sequence[float]) -> list[float]:
    """Centred mean over about a tenth of the curve (three values at least), over fewer at its ends."""
    reach = max(1, len(values) // 20)
    sums = np.cumsum([0.0, *values])
    ends = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [float(sums[end] - sums[start]) / (end - start) for start, end in ends]


def _axes(title: str, height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(short(title, 2 * LONGEST_NAME), x=0, ha="left")
    return figure, figure.subplots()


def _plot(axes: Axes, curve: Curve, marker: str | None = None) -> None:
    every = math.ceil(len(curve.steps) / MOST_POINTS) or 1
    # Counted from the end, so that thinning keeps the last point, where the label sits.
    steps, values = curve.steps[::-1][::every], curve.values[::-1][::every]
    axes.plot(
        steps,
        values,
        color=curve.colour,
        alpha=curve.strength,
        marker=marker if len(steps) <= 40 else None,
        markersize=3.5,
        linewidth=1.9 if curve.name else 1.0,
    )


def _plot_labelled(axes: Axes, curves: Sequence[Curve], marker: str | None = None) -> None:
    """Curves with their names at their right ends, moved apart where they would overlap."""
    shown = [curve for curve in curves if len(curve.steps)]
    for curve in shown:
        _plot(axes, curve, marker)
    axes.relim()
    axes.autoscale_view()
    if not shown:
        return
    low, high = axes.get_ylim()
    _, height = axes.figure.figure.get_size_inches()
    line = 11.5 / (72 * height - 62) * (high - low)  # height of a line of text
    places = spread([curve.values[-1] for curve in shown], line, low, high)
    right = max(curve.steps[-1] for curve in shown)
    for curve, place in zip(shown, places, strict=True):
        axes.plot([curve.steps[-1]], [curve.values[-1]], "o", color=curve.colour, alpha=curve.strength, markersize=4)
        axes.annotate(
            short(curve.name), (right, place), (9, 0), textcoords="offset points", va="center", annotation_clip=False
        )


def spread(wanted: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Positions as near to the wanted ones as a distance between them allows, within low and high where they fit."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed: list[float] = []
    for i in order:
        placed.append(max(wanted[i], placed[-1] + distance) if placed else max(wanted[i], low))
    ceiling = high
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - distance
    result = [0.0] * len(wanted)
    for position, i in zip(placed, order, strict=True):
        result[i] = position
    return result


def percent_axis(axes: Axes, which: str) -> None:
    ticks = [0, 0.25, 0.5, 0.75, 1]
    labels = [f"{100 * tick:.0f} %" for tick in ticks]
    if which == "y":
        axes.set_ylim(0, 1)
        axes.set_yticks(ticks, labels)
        axes.set_autoscaley_on(False)
    else:
        axes.set_xlim(0, 1)
        axes.set_xticks(ticks, labels)


def _step_axis(axes: Axes) -> None:
    axes.set_xlabel("outer step")
    axes.grid(visible=False, axis="x")
    axes.set_xlim(left=0)


def short(name: str, longest: int = LONGEST_NAME) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


MOST_TAPS = 288  # along a side of a drawn layer; larger layers show their first channels only
MOST_WEIGHTS = 500_000  # in one picture
BITMAP_SIDE = 640  # pixels, about: more than is ever shown, so that drawings are only ever scaled down
CLOSED = (128, 128, 128, 42)  # a grey veil, which makes a paper colour of a light and of a dark ground
CARD = "#fbfaf6"
PATTERN_WIDTH = 8.8


@dataclass(frozen=True)
class Panel:
    """One layer of a mask, ready to draw: a bitmap of open and closed weights, and what to write under it."""

    layer: str
    bitmap: np.ndarray  # RGBA, `tap` x `tap` pixels for each weight
    tap: int
    closed: float
    note: str

    @property
    def aspect(self) -> float:
        return float(self.bitmap.shape[1] / self.bitmap.shape[0])


@rc_context(STYLE)
def sparsity_pattern(
    multipliers: Mapping[str, Tensor],
    layers: Iterable[str] | None = None,
    *,
    ink: str = PICTURE_INK,
    closed_below: float = 0.0,
) -> Figure:
    """A mask as a picture: each layer's weights, input to output, in ink where the inner loop may change them.

    A convolution is a grid of filters, output channels down and input channels across. The rows of a linear layer
    are its inputs, so that a head lines up with the channels it reads. ``layers`` chooses layers by name.
    """
    panels = pattern_panels(multipliers, layers, ink=ink, closed_below=closed_below)
    return _draw_pattern(panels, ink, interpolation="none")


@rc_context(STYLE)
def save_pattern(
    path: str | PathLike[str],
    multipliers: Mapping[str, Tensor],
    layers: Iterable[str] | None = None,
    *,
    ink: str = PICTURE_INK,
    closed_below: float = 0.0,
) -> None:
    """Write ``sparsity_pattern`` as a PNG on a card of its own, for light and dark backgrounds alike."""
    figure = _draw_pattern(pattern_panels(multipliers, layers, ink=ink, closed_below=closed_below), ink, "hanning", 0.3)
    width, height = figure.get_size_inches()
    figure.add_artist(
        FancyBboxPatch(
            (0.02, 0.02),
            width - 0.04,
            height - 0.04,
            boxstyle="round,pad=0,rounding_size=0.16",
            transform=figure.dpi_scale_trans,
            facecolor=CARD,
            edgecolor=LINE,
            linewidth=1,
            zorder=-1,
        )
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=200)
    with atomic_write(path) as file:  # with a palette, a third of the size
        Image.open(drawn).quantize(128, Image.Quantize.FASTOCTREE).save(file, format="png", optimize=True)


def pattern_panels(
    multipliers: Mapping[str, Tensor], layers: Iterable[str] | None, *, ink: str, closed_below: float
) -> list[Panel]:
    """Every matrix and filter tensor of the chosen layers, drawn, in the order of the network."""
    tensors = {name: t for name, t in multipliers.items() if t.dim() >= 2}
    chosen = set(map(layer_of, tensors)) if layers is None else set(layers)
    for layer in chosen - set(map(layer_of, tensors)):
        near = get_close_matches(layer, map(layer_of, tensors), n=1, cutoff=0.0)
        raise ConfigError(f"the mask has no layer {layer!r} to draw" + (f"; did you mean {near[0]!r}?" if near else ""))
    if not chosen:
        raise ConfigError("the mask covers no matrix or filter, so there is no pattern to draw")
    count = sum(layer_of(name) in chosen for name in tensors)
    most_taps = min(MOST_TAPS, math.isqrt(MOST_WEIGHTS // count))
    panels, channels = [], 1
    for name, tensor in tensors.items():
        if layer_of(name) in chosen:
            is_open = (tensor.detach().abs() > closed_below).cpu().numpy()
            panels.append(_panel(name, is_open, channels, ink, most_taps))
        channels = tensor.shape[0]
    return panels


def _panel(name: str, is_open: np.ndarray, channels: int, ink: str, most_taps: int) -> Panel:
    cells = _cells(is_open, channels)
    height, width = cells.shape[2:]
    shown = cells[:, : max(1, most_taps // width)]
    shown = shown[: max(1, most_taps**2 // (shown.shape[1] * height * width))]
    note = "" if shown.size == cells.size else "first {} x {} of {} x {}".format(*shown.shape[:2], *cells.shape[:2])
    blocks = _fold(shown)
    tap = max(2, round(BITMAP_SIDE / (blocks[0].shape[0] * height)))
    closed = float(1 - is_open.mean())
    return Panel(name.removesuffix(".weight"), _bitmap(blocks, tap, ink), tap, closed, note)


def _cells(is_open: np.ndarray, channels: int) -> np.ndarray:
    """A weight tensor as [rows, columns, height, width]: a grid of filters, or of maps over positions."""
    if is_open.ndim > 2:
        cells = is_open.reshape(*is_open.shape[:2], -1, is_open.shape[-1])
    else:
        outputs, inputs = is_open.shape
        # A linear layer that reads c channels of s x s positions is drawn as c maps for each output.
        positions, rest = divmod(inputs, channels)
        side = math.isqrt(positions)
        if rest or side * side != positions:
            channels, side = inputs, 1
        cells = is_open.reshape(outputs, channels, side, side).swapaxes(0, 1)
    rows, columns, height, width = cells.shape
    return cells.swapaxes(0, 1) if columns * width > 3 * rows * height else cells


def _fold(cells: np.ndarray) -> list[np.ndarray]:
    """A grid that would be a thin strip, as shorter pieces to set side by side; -1 fills up the last one."""
    rows, columns, height, width = cells.shape
    cells = cells.astype(np.int8)
    if columns * width >= 0.1 * rows * height:
        return [cells]
    fewest = math.ceil(math.sqrt(0.3 * rows * height / (columns * width)))
    pieces = next((k for k in range(fewest, 2 * fewest) if rows % k == 0), fewest)
    padded = np.pad(cells, ((0, -rows % pieces), (0, 0), (0, 0), (0, 0)), constant_values=-1)
    return list(np.split(padded, pieces))


def _bitmap(blocks: Sequence[np.ndarray], tap: int, ink: str) -> np.ndarray:
    """Pixels of one panel: ink for open weights, veil for closed ones, nothing between the cells."""
    height, width = blocks[0].shape[2:]
    gap = max(1, round(tap * (0.6 if height * width > 1 else 0.15)))
    seam = 2 * gap if blocks[0].shape[1] > 1 else 0  # between folded pieces
    red, green, blue = (round(255 * part) for part in to_rgb(ink))
    colours = np.array([CLOSED, (red, green, blue, 255), (0, 0, 0, 0)], dtype=np.uint8)
    drawn = []
    for block in blocks:
        rows, columns = block.shape[:2]
        taps = block.repeat(tap, axis=2).repeat(tap, axis=3)
        pixels = np.zeros((rows, columns, height * tap + gap, width * tap + gap, 4), dtype=np.uint8)
        pixels[:, :, : height * tap, : width * tap] = colours[taps]
        flat = pixels.swapaxes(1, 2).reshape(rows * pixels.shape[2], columns * pixels.shape[3], 4)
        drawn.append(np.pad(flat, ((0, 0), (0, seam), (0, 0))))
    return np.concatenate(drawn, axis=1)[:-gap, : -gap - seam]


def _draw_pattern(panels: Sequence[Panel], ink: str, interpolation: str, margin: float = 0.0) -> Figure:
    gap, header, narrowest = 0.28, 0.36, 0.92  # inches, as everything here
    label = 0.6 if any(panel.note for panel in panels) else 0.42
    inner = PATTERN_WIDTH - 2 * margin
    rows, side = _rows(panels, inner, gap, narrowest)
    height = header + len(rows) * (side + label) + (len(rows) - 1) * gap + 2 * margin
    figure = Figure(figsize=(PATTERN_WIDTH, height))

    def write(x: float, y: float, text: str, **settings: Any) -> None:
        figure.text(x / PATTERN_WIDTH, y / height, text, **settings)

    def swatch(x: float, y: float, colour: Any) -> None:
        box = Rectangle((x, y), 0.11, 0.11, transform=figure.dpi_scale_trans, facecolor=colour, linewidth=0)
        figure.add_artist(box)

    top = height - margin - 0.13
    swatch(margin, top, ink)
    write(margin + 0.18, top, "open: the inner loop may change this weight", va="bottom")
    swatch(margin + 3.05, top, [part / 255 for part in CLOSED])
    write(margin + 3.23, top, "closed: it leaves this one alone", va="bottom")
    write(PATTERN_WIDTH - margin, top, "input → output", va="bottom", ha="right", color=MUTED)
    for number, row in enumerate(rows):
        slots = [max(side * panel.aspect, narrowest) for panel in row]
        x = margin + (inner - sum(slots) - gap * (len(row) - 1)) / 2
        y = height - margin - header - side - number * (side + label + gap)
        for panel, slot in zip(row, slots, strict=True):
            width = side * panel.aspect
            box = ((x + (slot - width) / 2) / PATTERN_WIDTH, y / height, width / PATTERN_WIDTH, side / height)
            axes = figure.add_axes(box, label=panel.layer)
            axes.set_axis_off()
            axes.imshow(panel.bitmap, aspect="auto", interpolation=interpolation)
            write(x + slot / 2, y - 0.2, short(panel.layer), ha="center", weight="bold")
            write(x + slot / 2, y - 0.36, f"{percent(panel.closed)} closed", ha="center", color=MUTED)
            write(x + slot / 2, y - 0.51, panel.note, ha="center", color=MUTED, fontsize=7)
            x += slot + gap
    return figure


def _rows(panels: Sequence[Panel], width: float, gap: float, narrowest: float) -> tuple[list[Sequence[Panel]], float]:
    """The fewest rows that leave the panels at least 1.4 inches high, and that height (2.6 inches at most)."""
    for count in range(1, len(panels) + 1):
        size = math.ceil(len(panels) / count)
        rows = [panels[i : i + size] for i in range(0, len(panels), size)]
        side = min(_side(row, width, gap, narrowest) for row in rows)
        if side >= 1.4:
            break
    return rows, side


def _side(row: Sequence[Panel], width: float, gap: float, narrowest: float) -> float:
    """The height at which a row of panels fills the width."""
    sides = np.linspace(2.6, 0.3, 231)
    room = width - gap * (len(row) - 1)
    fits = (side for side in sides if sum(max(side * panel.aspect, narrowest) for panel in row) <= room)
    return float(next(fits, sides[-1]))
