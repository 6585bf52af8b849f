"""Named settings, from the TOML files in this folder.

A preset is a table with a dotted name:

    [table1.sparse-maml.shot5]
    protocol = "fewshot"
    about = "sparse-MAML, 5-way 5-shot miniImageNet"
    extends = "table1.sparse-maml.shot1"
    paper = { table = "table1", value = 67.03, std = 0.74 }
    settings = { shots = 5 }

Settings, and the protocol where it is left out, come from the extended preset; `about` and `paper` do not.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Literal

from wheretolearn.config import from_dict, merge
from wheretolearn.errors import ConfigError

__all__ = ["Paper", "Preset", "Protocol", "list_presets", "load_preset"]

Protocol = Literal["fewshot", "continual", "online"]


@dataclass(frozen=True)
class Paper:
    """The number that the paper reports for a preset."""

    table: str
    value: float
    std: float | None = None


@dataclass(frozen=True)
class Preset:
    """A named starting point: a protocol and settings for it."""

    name: str
    protocol: Protocol
    about: str
    paper: Paper | None
    settings: dict[str, Any]


@dataclass(frozen=True)
class _Row:
    """A preset as its file spells it."""

    about: str
    protocol: Protocol | None = None
    extends: str | None = None
    paper: Paper | None = None
    settings: dict[str, object] = field(default_factory=dict)


def list_presets(folder: Traversable | None = None) -> list[Preset]:
    """All presets, by name; `folder` replaces the one that comes with the package."""
    rows = _read_rows(folder)
    return [_resolve(name, rows) for name in sorted(rows)]


def load_preset(name: str, folder: Traversable | None = None) -> Preset:
    """One preset, with everything it extends filled in."""
    rows = _read_rows(folder)
    if name not in rows:
        raise ConfigError(f'no preset is called "{name}"{_nearest(name, rows)}; see `wheretolearn presets`')
    return _resolve(name, rows)


def _read_rows(folder: Traversable | None) -> dict[str, _Row]:
    folder = folder or files(__name__)
    rows: dict[str, _Row] = {}
    sources: dict[str, str] = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".toml"):
            continue
        try:
            document = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file.name} is not valid TOML: {error}") from error
        for name, row in _walk(document, "", file.name):
            if name in rows:
                raise ConfigError(f'preset "{name}" is defined twice: in {sources[name]} and in {file.name}')
            rows[name], sources[name] = row, file.name
    return rows


def _walk(table: Mapping[str, Any], name: str, file: str) -> Iterator[tuple[str, _Row]]:
    """Groups hold only tables; a table with any of a preset's own keys is a preset."""
    if name and not table.keys().isdisjoint(row_field.name for row_field in fields(_Row)):
        yield name, from_dict(_Row, table, where=f"{file}, preset {name}")
        return
    for key, value in table.items():
        if not isinstance(value, Mapping):
            raise ConfigError(f'{file}: "{key}" stands outside a preset{f", in {name}" if name else ""}')
        yield from _walk(value, f"{name}.{key}" if name else key, file)


def _resolve(name: str, rows: Mapping[str, _Row]) -> Preset:
    chain = [name]
    while (base := rows[chain[-1]].extends) is not None:
        if base in chain:
            raise ConfigError(f"presets extend each other in a circle: {' -> '.join([*chain, base])}")
        if base not in rows:
            raise ConfigError(f'preset "{chain[-1]}" extends "{base}", which does not exist{_nearest(base, rows)}')
        chain.append(base)
    protocols = {row.protocol for row in map(rows.__getitem__, chain) if row.protocol is not None}
    if len(protocols) != 1:
        found = ", ".join(sorted(protocols)) or "none"
        raise ConfigError(f'preset "{name}" and what it extends must name one protocol; found {found}')
    settings: dict[str, Any] = {}
    for ancestor in reversed(chain):
        settings = merge(settings, rows[ancestor].settings)
    return Preset(name, protocols.pop(), rows[name].about, rows[name].paper, settings)


def _nearest(name: str, rows: Mapping[str, _Row]) -> str:
    nearest = get_close_matches(name, rows, n=3, cutoff=0.4)
    return f"; the nearest: {', '.join(nearest)}" if nearest else ""
