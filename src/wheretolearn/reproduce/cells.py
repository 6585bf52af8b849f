"""The cells of the paper's tables and the points of its figures, each with its records and a verdict."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

from wheretolearn.config import differences, from_dict
from wheretolearn.errors import ConfigError
from wheretolearn.presets import Paper, Preset, Scale, list_presets
from wheretolearn.reproduce.protocols import PROTOCOLS, config_of
from wheretolearn.runs.records import record_name
from wheretolearn.runs.results import ResultRecord, load_all, load_among_others
from wheretolearn.version import __version__

Verdict = Literal["matches", "better", "misses"]
Status = Literal["recorded", "stale", "not run"]

POINTS = 1.0  # how far apart two numbers may at least be where the paper gives no standard deviation
_SEEDS = {"table2": 3, "tableS1": 3, "figure3": 3, "figure4": 3, "figureS3": 3, "figureS4": 3}  # as in the paper
_QUICK_SEEDS = {"table5": 5, "tableS5": 5, "table6": 2, "tableS9": 2}  # what a few minutes allow


@dataclass(frozen=True, eq=False)
class Cell:
    """One number of the paper: what a preset's runs measure, beside what the paper reports of it, if anything."""

    table: str  # table5, figureS3
    preset: Preset
    measure: str
    paper: Paper | None


@dataclass(frozen=True, eq=False)
class Found:
    """A cell, with what is recorded of it."""

    cell: Cell
    record: ResultRecord | None = None
    stale: str | None = None  # why the record no longer counts

    @property
    def status(self) -> Status:
        if self.record is None or not self.record.values:
            return "not run"
        return "recorded" if self.stale is None else "stale"

    @property
    def verdict(self) -> Verdict | None:
        """None where there is nothing to compare, or a record that no longer counts."""
        if self.record is None or self.status != "recorded" or self.cell.paper is None:
            return None
        return compare(self.record, self.cell.paper, self.cell.measure)

    @property
    def outcome(self) -> str:
        """The verdict, or why there is none."""
        return self.status if self.status != "recorded" else self.verdict or "measured"


def compare(record: ResultRecord, paper: Paper, measure: str) -> Verdict | None:
    """Level with the paper within two of its standard deviations; where it gives none, of ours, or one point."""
    if record.mean is None:
        return None
    allowed = 2 * paper.std if paper.std is not None else max(POINTS, 2 * (record.std or 0.0))
    difference = round(record.mean - paper.value, 9)  # keeps an exact boundary on its own side
    if abs(difference) <= round(allowed, 9):
        return "matches"
    return "better" if difference > 0 and not measure.startswith("sparsity") else "misses"


def default_seeds(table: str, scale: Scale) -> int:
    return _QUICK_SEEDS.get(table, 3) if scale == "quick" else _SEEDS.get(table, 5)


@cache
def all_cells(scale: Scale = "paper") -> tuple[Cell, ...]:
    """Every cell, table by table, then figure by figure."""
    small = {preset.name: preset for preset in list_presets(scale=scale)}
    cells = []
    for preset in list_presets():
        if re.match("(table|figure)", preset.name) is None:
            continue
        own = small[preset.name]
        numbers: dict[str, Paper | None] = {preset.measure: preset.paper, **preset.also}
        if preset.protocol == "continual" and preset.name.startswith("figure"):
            numbers["RA"] = None  # drawn beside sparsity
        for measure, paper in numbers.items():
            if _is_measured(own, measure):
                table = preset.name.partition(".")[0] if paper is None else paper.table
                cells.append(Cell(table, own, measure, paper if scale == "paper" else None))
    return tuple(sorted(cells, key=lambda cell: _place(cell.table)))


def cells_named(names: Sequence[str], rows: Sequence[str] = (), scale: Scale = "paper") -> list[Cell]:
    """The cells of tables, figures, groups or single presets; ``rows`` keeps those whose names hold one of them.

    Without names: of everything.
    """
    chosen: list[Cell] = [] if names else list(all_cells(scale))
    for name in names:
        found = [cell for cell in all_cells(scale) if _is_in(cell, name)]
        if not found:
            raise ConfigError(f"no table, figure or row is called {name!r}{_nearest(name)}; see `reproduce --list`")
        chosen += [cell for cell in found if cell not in chosen]
    for row in rows:
        if not any(_has_row(cell, row) for cell in chosen):
            known = dict.fromkeys(cell.preset.name.partition(".")[2] for cell in chosen)
            there = f"there are: {', '.join(known)}" if names else "see `reproduce --list`"
            raise ConfigError(f"no row of {' '.join(names) or 'any table'} is called {row!r}; {there}")
    return [cell for cell in chosen if not rows or any(_has_row(cell, row) for row in rows)]


def load_records(folder: Path) -> list[ResultRecord]:
    """The records in a folder of results: in its folders of protocols, and, as ``--record`` writes them, its own."""
    own = load_among_others(folder)
    return own + [record for protocol in PROTOCOLS for record in load_all(folder / protocol)]


def look_up(cells: Iterable[Cell], records: Sequence[ResultRecord], scale: Scale = "paper") -> list[Found]:
    """What is recorded of each cell: under its own name, or of another cell with the same runs and measurement.

    What counts comes before what is stale, then the cell's own record, then more seeds.
    """
    by_kind: dict[tuple[Any, ...], list[ResultRecord]] = {}
    presets = {record_name(cell.preset.name, scale): cell.preset for cell in all_cells(scale)}
    for record in records:
        if record.name in presets:
            by_kind.setdefault(_kind(presets[record.name], record.metric), []).append(record)
    found = []
    for cell in cells:
        name = record_name(cell.preset.name, scale)
        candidates = by_kind.get(_kind(cell.preset, cell.measure), [])
        judged = [
            ((stale is not None, record.name != name, -len(record.seeds)), Found(cell, record, stale))
            for record in candidates
            for stale in [staleness(record, cell.preset)]
        ]
        found.append(min(judged, key=lambda pair: pair[0], default=(None, Found(cell)))[1])
    return found


def staleness(record: ResultRecord, preset: Preset) -> str | None:
    """Why a record no longer counts for a preset: another version of the code, or other settings. None: it counts."""
    version = record.versions.get("wheretolearn")
    if version != __version__:
        return f"made by version {version}"
    protocol = PROTOCOLS[preset.protocol]
    try:
        found = from_dict(protocol.settings, record.config, where="its settings")
    except ConfigError as error:
        return str(error).partition("; known settings")[0]
    changed = differences(config_of(preset), found)
    other = [text for name, text in changed.items() if name not in protocol.incidental]
    return f"made with other settings than the preset's: {', '.join(other)}" if other else None


def training_of(preset: Preset) -> tuple[Any, ...]:
    """Presets for which this is equal are measured on the same runs."""
    return preset.protocol, config_of(preset), preset.after


def _kind(preset: Preset, measure: str) -> tuple[Any, ...]:
    """Equal for cells that the same number answers."""
    return *training_of(preset), measure, preset.evaluate if "accuracy" in measure else None


def _is_measured(preset: Preset, measure: str) -> bool:
    """A small stream has other image sets than the paper's."""
    _, found, source = measure.partition("accuracy on ")
    if not found or preset.protocol != "online":
        return True
    return source in [own.label for own in config_of(preset).sources]


def _is_in(cell: Cell, name: str) -> bool:
    wanted, own = _parts(name), _parts(cell.preset.name)
    return bool(wanted) and wanted in ([cell.table.lower()], own[: len(wanted)])


def _has_row(cell: Cell, row: str) -> bool:
    wanted, own = _parts(row), _parts(cell.preset.name)[1:]
    return bool(wanted) and any(own[start : start + len(wanted)] == wanted for start in range(len(own)))


def _parts(name: str) -> list[str]:
    """Of a name: what is between dots, except those of numbers such as 0.25."""
    return re.findall(r"\d+\.\d+|[^.]+", name.lower())


def _place(table: str) -> tuple[bool, bool, int]:
    found = re.fullmatch(r"(table|figure)(S?)(\d+)", table)
    return (True, True, 0) if found is None else (found[1] == "figure", found[2] == "S", int(found[3]))


def _nearest(name: str) -> str:
    known: Mapping[str, None] = dict.fromkeys(
        text
        for cell in all_cells()
        for text in (cell.table, cell.preset.name, cell.preset.name.removesuffix(f".{_parts(cell.preset.name)[-1]}"))
    )
    nearest = get_close_matches(name, known, n=3, cutoff=0.4)
    return f"; the nearest: {', '.join(nearest)}" if nearest else ""
