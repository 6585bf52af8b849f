"""The page about everything on record: the paper's tables with our numbers beside, and its figures redrawn."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context

from wheretolearn.errors import UserError
from wheretolearn.report.curves import Curves, load_curves
from wheretolearn.report.figures import INK, MUTED, STYLE
from wheretolearn.report.lines import Drawing, new_figure
from wheretolearn.report.page import (
    ACCENTS,
    Html,
    Tile,
    breakable,
    details,
    duration,
    element,
    join,
    table,
    tiles,
    value,
)
from wheretolearn.report.paper_figures import FIGURES, PaperFigure, redrawn
from wheretolearn.report.sections import Section, gallery, report_page
from wheretolearn.reproduce.cells import Cell, Found, all_cells, load_records, look_up
from wheretolearn.reproduce.markdown import INCONSISTENCIES, REMARKS, TITLES, notes_on
from wheretolearn.runs.results import ResultRecord

OUTCOMES = {
    "matches": "within two standard deviations of the paper",
    "better": "above it by more",
    "misses": "farther from it",
    "stale": "recorded with other settings or code",
    "not run": "no record yet",
    "measured": "the paper prints no number",
}
MOST_ROWS = 46  # of a comparison that is still readable


def record_page(folder: Path, more: Sequence[Section] = (), curves: Sequence[Curves] = ()) -> str:
    """The page of a folder of records, as HTML text; ``curves`` of runs at hand come before those that are kept."""
    records = load_records(folder)
    if not records:
        raise UserError(
            f"{folder} holds no records: name their folder with --records, give runs, or make some with "
            "`wheretolearn reproduce`"
        )
    cells = all_cells()
    known = {cell.preset.name for cell in cells}
    if not any(record.name in known for record in records):
        raise UserError(
            f"{folder} holds no records at the paper's scale, which this page is about: "
            "give runs such as runs/reproduce/quick instead, without --records"
        )
    found = look_up(cells, records)
    curves = [*curves, *load_curves(folder)]
    sections = []
    for name in dict.fromkeys(cell.table for cell in cells if cell.table.startswith("table")):
        own = [one for one in found if one.cell.table == name]
        parts = [_table(own), _command(own), *_notes(name, own), *_comparisons(name, own)]
        for figure in FIGURES:
            if figure.table == name:
                parts.append(_figure(figure, cells, records, curves))
        short = f"Table {name.removeprefix('table')}"
        sections.append(Section(f"{short}: {TITLES[name]}", parts, short))
    about = (
        "Every number of the paper's tables beside what this code measured, and its figures redrawn from our records. "
        "Nothing is left out because it looks bad."
    )
    sections += [*more, Section("The paper's own inconsistencies", [_bullets(INCONSISTENCIES)])]
    numbers = [one for one in found if one.cell.table.startswith("table")]
    return report_page("Learning where to learn, measured again", about, sections, [_summary(numbers)])


def _summary(found: Sequence[Found]) -> Html:
    counts = Counter(one.outcome for one in found)
    colours = {"matches": ACCENTS[0], "better": ACCENTS[5], "misses": ACCENTS[1]}
    return tiles([Tile(name, str(counts[name]), about, colours.get(name, MUTED)) for name, about in OUTCOMES.items()])


def _table(found: Sequence[Found]) -> Html:
    measures = {one.cell.measure for one in found}
    several = len(measures) > 1  # a phone has no room for a column that says the same in every row
    rows = []
    for one in found:
        cell, record = one.cell, one.record
        rows.append(
            [
                breakable(cell.preset.name.partition(".")[2]),
                *([cell.measure] if several else []),
                "" if cell.paper is None else _number(cell.paper.value, cell.paper.std),
                "" if record is None or record.mean is None else _number(record.mean, record.std),
                element("span", one.outcome, class_=f"outcome {one.outcome.replace(' ', '-')}"),
                "" if record is None else value(str(len(record.seeds)), float(len(record.seeds))),
                "" if record is None else value(duration(record.wall_seconds), record.wall_seconds),
            ]
        )
    header = ["Row", *(["measure"] if several else []), "paper", "ours", "verdict", "seeds", "time of a run"]
    done = sum(one.status == "recorded" for one in found)
    what = "" if several else f"{measures.pop()}, "
    caption = f"{done} of {len(found)} numbers are on record; {what}mean ± standard deviation over seeds, in %"
    return table(header, rows, caption, sortable=True)


def _command(found: Sequence[Found]) -> Html:
    cell = found[0].cell
    all_of_it = element("code", f"wheretolearn reproduce {cell.table}")
    one_row = element("code", f"wheretolearn reproduce {cell.preset.name}")
    return element("p", join(["Made with ", all_of_it, "; one row, such as the first, with ", one_row], ""))


def _notes(name: str, found: Sequence[Found]) -> list[Html]:
    """Why numbers are stale, how runs differ from their presets, what the paper's own numbers stand for."""
    notes: list[str] = [element("li", REMARKS[name])] if name in REMARKS else []
    for text, rows in notes_on(found).items():
        notes.append(element("li", join([join((element("code", row) for row in rows), ", "), text], ": ")))
    return [details("Notes on these numbers", element("ul", join(notes)))] if notes else []


def _number(mean: float, std: float | None) -> Html:
    return value(f"{mean:.2f}" + ("" if std is None else f" ± {std:.2f}"), mean)


def _comparisons(name: str, found: Sequence[Found]) -> list[Html]:
    """Ours against the paper's, one drawing for each measure."""
    by_measure: dict[str, list[Found]] = {}
    for one in found:
        if one.status == "recorded" and one.cell.paper is not None:
            kind = "sparsity" if one.cell.measure.startswith("sparsity") else one.cell.measure
            by_measure.setdefault(kind, []).append(one)
    drawings = [_comparison(name, measure, own[:MOST_ROWS]) for measure, own in by_measure.items()]
    return [gallery(drawings, name)] if drawings else []


@rc_context(STYLE)
def _comparison(name: str, measure: str, found: Sequence[Found]) -> Drawing:
    title = f"{measure[0].upper()}{measure[1:]}: ours beside the paper's"
    caption = "Round: ours. Upright ticks: the paper's. Lines: two standard deviations over seeds, of each its own."
    figure, axes = new_figure(title, caption, width=4.7, height=0.8 + 0.2 * len(found))
    rows: list[Sequence[object]] = []
    names = []
    for place, one in enumerate(found):
        paper, record = one.cell.paper, one.record
        assert paper is not None
        assert record is not None
        assert record.mean is not None
        for mean, std, sign, colour, shift in (
            (paper.value, paper.std, "|", INK, 0.16),
            (record.mean, record.std, "o", ACCENTS[0] if one.outcome != "misses" else ACCENTS[1], -0.16),
        ):
            if std is not None:
                reach = [mean - 2 * std, mean + 2 * std]
                axes.plot(reach, [place + shift] * 2, color=colour, linewidth=1.2)
            axes.plot(mean, place + shift, sign, color=colour, markersize=8 if sign == "|" else 4.5)
        row = one.cell.preset.name.partition(".")[2]
        extra = one.cell.measure.removeprefix("sparsity of ") if one.cell.measure.startswith("sparsity of") else ""
        names.append(f"{row} {extra}".strip())
        rows.append((row, one.cell.measure, paper.value, paper.std or "", record.mean, record.std or "", one.outcome))
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", labelcolor=INK, labelsize=7.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    columns = ("row", "measure", "paper", "paper_std", "ours", "ours_std", "verdict")
    return Drawing(f"{measure.replace(' ', '-')}", figure, title, caption, columns, rows)


def _figure(
    figure: PaperFigure, cells: Sequence[Cell], records: Sequence[ResultRecord], curves: Sequence[Curves]
) -> Html:
    panels = redrawn(figure, cells, records, curves)
    drawings = [panel.drawing for panel in panels if panel.drawing is not None]
    parts: list[str] = [element("h3", figure.heading, id=figure.name)]
    if drawings:
        parts.append(gallery(drawings, figure.name))
    for state, chosen in (
        ("not run", [panel for panel in panels if panel.drawing is None]),
        ("run in part", [panel for panel in panels if panel.drawing is not None and panel.missing]),
    ):
        if chosen:
            what = "; ".join(panel.panel.heading for panel in chosen)
            how = element("code", chosen[0].missing)
            parts.append(
                element("p", join([f"{state[0].upper()}{state[1:]}: {what}. Make it with ", how], ""), class_="missing")
            )
    return join(parts)


def _bullets(markdown: str) -> Html:
    """The points of a Markdown list."""
    points = [" ".join(point.split()) for point in markdown.partition("\n- ")[2].split("\n- ")]
    return element("ul", join(element("li", point) for point in points))
