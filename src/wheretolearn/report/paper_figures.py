"""The paper's figures, redrawn from records: sweeps from result records, sparsity over time from kept curves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes

from wheretolearn.masks import layer_of
from wheretolearn.presets import load_preset
from wheretolearn.report.curves import Curves, matching
from wheretolearn.report.fewshot import OVERALL, is_norm
from wheretolearn.report.figures import DASHES, INK, STYLE, percent_axis, spread
from wheretolearn.report.lines import (
    MARKERS,
    Drawing,
    Line,
    is_bias,
    line_axes,
    line_rows,
    new_figure,
    of_runs,
    plot_labelled,
    share_axis,
)
from wheretolearn.report.page import ACCENTS
from wheretolearn.reproduce.cells import Cell, look_up
from wheretolearn.runs.results import ResultRecord


@dataclass(frozen=True)
class OverTime:
    """Sparsity while a mask learns; the name of each part of a preset, or of each preset, is a line."""

    where: str  # left, right ...
    title: str
    presets: dict[str, str]  # by the name of its line; "": the parts have their own
    keep: Callable[[str], bool] = lambda name: True  # tensors or layers to show

    @property
    def heading(self) -> str:
        return f"{self.where}: {self.title}" if self.where else self.title


@dataclass(frozen=True)
class Sweep:
    """A measure at the end of runs, against the setting in which they differ; presets are called PREFIX.VALUE."""

    where: str
    title: str
    setting: str
    lines: dict[str, tuple[str, str]]  # name of a line -> prefix of its presets, and measure
    logarithmic: bool = False

    @property
    def heading(self) -> str:
        return f"{self.where}: {self.title}" if self.where else self.title


@dataclass(frozen=True)
class PaperFigure:
    name: str  # as presets and `reproduce` spell it
    table: str  # beside which it stands
    panels: Sequence[OverTime | Sweep]

    @property
    def heading(self) -> str:
        return f"Figure {self.name.removeprefix('figure')}"


@dataclass(frozen=True, eq=False)
class Redrawn:
    """A panel from records, or None and what to do about it."""

    panel: OverTime | Sweep
    drawing: Drawing | None
    missing: str


_INITIAL = (0, 0.25, 0.5, 0.75, 0.9)


# Runs tell sparsities by layer, or by tensor.
def _is_weight(name: str) -> bool:
    return name != OVERALL and "norm" not in name and not is_bias(name)


def _is_gain(name: str) -> bool:
    return is_norm(name) or name.endswith("norm.weight")


def _continual(where: str, prefix: str, width: str) -> list[OverTime | Sweep]:
    return [
        OverTime(f"{where}left", "sparsity of La-MAML, task after task", {"": f"{prefix}.la-maml"}),
        OverTime(f"{where}center", "sparsity of sparse-La-MAML, task after task", {"": f"{prefix}.sparse-la-maml"}),
        Sweep(
            f"{where}right",
            "sparse-La-MAML by the width of its network",
            "neurons in each hidden layer",
            {"retained accuracy": (width, "RA"), "closed weights": (width, "sparsity")},
            logarithmic=True,
        ),
    ]


def _inner_steps(where: str, prefix: str, title: str) -> Sweep:
    lines = {
        "sparse-MAML": (f"{prefix}.sparse-maml", "accuracy"),
        "MAML": (f"{prefix}.maml", "accuracy"),
        "closed weights": (f"{prefix}.sparsity", "sparsity"),
    }
    return Sweep(where, title, "inner steps", lines)


FIGURES = (
    PaperFigure(
        "figure1",
        "table1",
        [
            OverTime(
                "left",
                "sparsity in training, by where it starts",
                {f"from {value:.0%}": f"figure1.left.{value:g}" for value in _INITIAL},
                lambda name: name == OVERALL,
            ),
            OverTime("center", "sparsity of each layer in training", {"": "figure1.center"}, _is_weight),
            Sweep(
                "right",
                "accuracy by the sparsity a mask starts with",
                "share of weights closed at first",
                {"sparse-MAML": ("figure1.right", "accuracy")},
            ),
        ],
    ),
    PaperFigure(
        "figure2",
        "table1",
        [
            _inner_steps("left", "figure2.left", "accuracy and sparsity by inner steps, 5-shot"),
            Sweep(
                "right",
                "accuracy and sparsity by the inner learning rate",
                "inner learning rate",
                {
                    "sparse-MAML": ("figure2.right.sparse-maml", "accuracy"),
                    "MAML": ("figure2.right.maml", "accuracy"),
                    "closed weights": ("figure2.right.sparsity", "sparsity"),
                },
                logarithmic=True,
            ),
        ],
    ),
    PaperFigure(
        "figureS1",
        "table3",
        [
            OverTime("left", "sparsity of batch norm in training", {"": "figureS1.left"}, _is_gain),
            OverTime(
                "right",
                "sparsity of the head's bias in training",
                {f"from {value:.0%}": f"figureS1.right.{value:g}" for value in _INITIAL},
                lambda name: name == "head.bias",
            ),
        ],
    ),
    PaperFigure(
        "figureS2",
        "table3",
        [
            _inner_steps("left", "figureS2.left", "accuracy and sparsity by inner steps, 1-shot"),
            Sweep(
                "right",
                "sparsity by the width of the network",
                "channels of each layer",
                {"closed weights": ("figureS2.right", "sparsity")},
                logarithmic=True,
            ),
        ],
    ),
    PaperFigure("figure3", "table5", _continual("", "figure3", "figure3.width")),
    PaperFigure(
        "figure4", "table5", [OverTime("", "sparsity of La-MAML, 10 passes through each task", {"": "figure4.la-maml"})]
    ),
    PaperFigure(
        "figureS3",
        "tableS5",
        [
            *_continual("permutations, ", "figureS3.permutations", "figureS3.permutations.width"),
            *_continual("many permutations, ", "figureS3.many", "figureS3.many.width"),
        ],
    ),
    PaperFigure(
        "figureS4",
        "tableS5",
        [
            Sweep(
                "",
                "retained accuracy and sparsity by the inner learning rate",
                "inner learning rate",
                {"retained accuracy": ("figureS4.alpha", "RA"), "closed weights": ("figureS4.alpha", "sparsity")},
                logarithmic=True,
            )
        ],
    ),
    PaperFigure(
        "figureS5",
        "table6",
        [
            OverTime(
                f"for p = 0.{p}",
                "sparsity of sparse-C-MAML over the stream",
                {"": f"table6.sparse-c-maml.p{p}"},
                _is_weight,
            )
            for p in (98, 90)
        ],
    ),
)


def redrawn(
    figure: PaperFigure, cells: Sequence[Cell], records: Sequence[ResultRecord], curves: Sequence[Curves]
) -> list[Redrawn]:
    """Every panel of a figure, as far as it is on record."""
    return [
        _over_time(figure, panel, curves) if isinstance(panel, OverTime) else _sweep(figure, panel, cells, records)
        for panel in figure.panels
    ]


@rc_context(STYLE)
def _over_time(figure: PaperFigure, panel: OverTime, curves: Sequence[Curves]) -> Redrawn:
    lines: list[Line] = []
    over, missing = "", []
    for name, preset in panel.presets.items():
        found = matching(curves, load_preset(preset))
        parts = [line for line in found.lines if panel.keep(line.name)] if found is not None else []
        if found is None or not parts:
            missing.append(preset)
            continue
        over = found.over
        lines += [replace(line, name=name or line.name) for line in parts]
    if not lines:
        return Redrawn(panel, None, _command(figure, missing))
    layers = list(dict.fromkeys(layer_of(line.name) for line in lines))
    by_line = "" not in panel.presets
    lines = [
        replace(
            line,
            colour=ACCENTS[(number if by_line else layers.index(layer_of(line.name))) % len(ACCENTS)],
            dashes=DASHES if is_bias(line.name) else "-",
        )
        for number, line in enumerate(lines)
    ]
    biases = "; biases dashed" if any(is_bias(line.name) for line in lines) else ""
    caption = f"Share of weights that cannot change{of_runs(*(line.runs for line in lines), band=True)}{biases}."
    title = panel.heading[0].upper() + panel.heading[1:]
    drawn, axes = line_axes(title, caption, lines)
    percent_axis(axes, "y")
    plot_labelled(axes, lines)
    last = max(float(line.x[-1]) for line in lines)
    axes.set_xlim(0, 1.01 * last)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel(over)
    axes.grid(visible=False, axis="x")
    columns = ("line", over.replace(" ", "_"), "sparsity_mean", "sparsity_std", "runs")
    drawing = Drawing(_stem(panel), drawn, title, caption, columns, line_rows(lines))
    return Redrawn(panel, drawing, _command(figure, missing) if missing else "")


@rc_context(STYLE)
def _sweep(figure: PaperFigure, panel: Sweep, cells: Sequence[Cell], records: Sequence[ResultRecord]) -> Redrawn:
    lines: dict[str, list[Line]] = {}  # by measure, which has axes of its own
    missing = []
    for number, (name, (prefix, measure)) in enumerate(panel.lines.items()):
        wanted = [c for c in cells if c.preset.name.startswith(f"{prefix}.") and c.measure == measure]
        points = []
        for found in look_up(wanted, records):
            if found.status == "recorded" and found.record is not None:
                at = float(found.cell.preset.name.removeprefix(f"{prefix}."))
                record = found.record
                std = np.nan if record.std is None else record.std / 100
                points.append((at, float(record.mean or 0.0) / 100, std, float(len(record.seeds))))
            else:
                missing.append(found.cell.preset.name)
        if points:
            x, mean, std, runs = np.array(sorted(points)).T
            line = Line(name, x, mean, std, runs, INK if measure == "sparsity" else ACCENTS[number % len(ACCENTS)])
            lines.setdefault(measure, []).append(line)
    if not lines:
        return Redrawn(panel, None, _command(figure, missing))
    every = [line for own in lines.values() for line in own]
    whiskers = "; whiskers: one standard deviation" if any(np.isfinite(line.std).any() for line in every) else ""
    caption = f"At the end of the runs, in percent{of_runs(*(line.runs for line in every))}{whiskers}."
    title = panel.heading[0].upper() + panel.heading[1:]
    drawn, _ = new_figure(title, caption, width=4.6, height=0.9 + 1.5 * len(lines), panels=len(lines))
    for axes, own in zip(drawn.axes, lines.values(), strict=True):
        _draw_sweep(axes, own)
    foot = drawn.axes[-1]
    if panel.logarithmic:
        foot.set_xscale("log")
    ticks = sorted({float(at) for line in every for at in line.x})
    foot.set_xticks(ticks, [f"{at:g}" for at in ticks])
    foot.set_xticks([], minor=True)
    foot.set_xlabel(panel.setting)
    columns = ("line", panel.setting.replace(" ", "_"), "mean", "std", "runs")
    drawing = Drawing(_stem(panel), drawn, title, caption, columns, line_rows(every))
    return Redrawn(panel, drawing, _command(figure, missing) if missing else "")


def _draw_sweep(axes: Axes, lines: Sequence[Line]) -> None:
    for number, line in enumerate(lines):
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(line.x, line.mean, f"{marker}-", color=line.colour, linewidth=1.6, markersize=4.5)
        axes.errorbar(line.x, line.mean, np.nan_to_num(line.std), fmt="none", color=line.colour, linewidth=1.2)
    axes.margins(x=0.06, y=0.15)
    share_axis(axes, 0.04)
    axes.grid(visible=False, axis="x")
    low, high = axes.get_ylim()
    places = spread([float(line.mean[-1]) for line in lines], 0.16 * (high - low), low, high)
    for line, place in zip(lines, places, strict=True):
        axes.annotate(
            line.name,
            (1, place),
            (6, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            color=line.colour,
            annotation_clip=False,
        )


def _stem(panel: OverTime | Sweep) -> str:
    return "".join(sign if sign.isalnum() else "-" for sign in panel.where) or "figure"


def _command(figure: PaperFigure, missing: Sequence[str]) -> str:
    name = figure.name if all(preset.startswith(figure.name) for preset in missing) else missing[0]
    return f"wheretolearn reproduce {name}"
