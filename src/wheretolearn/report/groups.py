"""Runs that differ in their seed only are one group: one line of a figure, one row of a table."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from wheretolearn.config import to_dict
from wheretolearn.report.figures import DASHES
from wheretolearn.report.lines import Line, line_of, value_text, words
from wheretolearn.report.page import ACCENTS
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import check_seeds

LONGEST_SLUG = 80  # file names end at 255 bytes


class MeasuredRun(Protocol):
    """What one run has measured, with its settings."""

    @property
    def folder(self) -> RunFolder: ...
    @property
    def config(self) -> Any: ...
    @property
    def method(self) -> str: ...


Run = TypeVar("Run", bound=MeasuredRun)


@dataclass(frozen=True, eq=False)
class Group(Generic[Run]):
    """Runs of the same settings; the label says in what they differ from the other groups, "" where there is one."""

    runs: list[Run]
    label: str
    slug: str

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def name(self) -> str:
        return self.label or self.first.method


def grouped(runs: Sequence[Run], speaking: Sequence[str], enough: Sequence[str] = ()) -> list[Group[Run]]:
    """Runs of the same settings together; groups that differ in one number come in its order.

    Values of ``speaking`` settings need no name beside them. Where the settings ``enough`` tell all groups apart,
    labels leave out the others.
    """
    alike: dict[Any, list[Run]] = {}
    for run in runs:
        alike.setdefault(run.config, []).append(run)
    names = differing_settings(list(alike))
    if len(names) == 1 and all(is_number(getattr(config, names[0])) for config in alike):
        alike = dict(sorted(alike.items(), key=lambda item: float(getattr(item[0], names[0]))))
    if enough and len({tuple(getattr(config, name) for name in enough) for config in alike}) == len(alike):
        names = [name for name in enough if name in names]
    groups = []
    for (label, slug), own in zip(_labels_and_slugs(list(alike), names, speaking), alike.values(), strict=True):
        check_seeds([run.folder for run in own])
        groups.append(Group(sorted(own, key=lambda run: run.folder.seed), label, slug))
    return groups


def group_lines(groups: Sequence[Group[Any]], curves: Sequence[Sequence[Mapping[int, float]]]) -> list[Line]:
    """A line for each group that has anything to draw, of its runs' curves; its colour is that of its place."""
    return [
        line_of(group.name, own, ACCENTS[number % len(ACCENTS)], "-" if number < len(ACCENTS) else DASHES)
        for number, (group, own) in enumerate(zip(groups, curves, strict=True))
        if any(own)
    ]


def differing_settings(configs: Sequence[object]) -> list[str]:
    tables = [to_dict(config) for config in configs]
    return [name for name in tables[0] if any(table[name] != tables[0][name] for table in tables)]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _labels_and_slugs(
    configs: Sequence[object], names: Sequence[str], speaking: Sequence[str]
) -> list[tuple[str, str]]:
    """What tells configs apart, by the settings of these names: for people, and for the names of files."""
    found: list[tuple[str, str]] = []
    for config in configs:
        values = [(name, value_text(getattr(config, name))) for name in names]
        label = ", ".join(value if name in speaking else f"{words(name)} {value}" for name, value in values)
        slug = re.sub(r"[^a-z0-9.]+", "-", label.lower())[:LONGEST_SLUG].strip("-.")
        if any(slug == other for _, other in found):
            slug = f"{slug}-{len(found) + 1}".lstrip("-")
        found.append((label, slug))
    return found
