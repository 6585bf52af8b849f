"""Named settings, from the TOML files in this folder: one preset for each cell and point of the paper.

A preset is a table with a dotted name:

    [table1.sparse-maml.shot1]
    extends = "table1.sparse-maml.shot5"
    about = "sparse-MAML, 5-way 1-shot miniImageNet, Conv4-64"
    settings = { shots = 1, tasks_per_step = 4, inner_lr = 0.1 }
    paper = { value = 50.35, std = 0.39 }

`settings`, `evaluate`, `after`, `protocol` and `about` come from the extended preset where they are left out;
`measure`, `paper` and `also` do not. Presets with the same settings are one training: such cells differ in `measure`
(what number of the run stands in the cell) and in `evaluate` (the images and inner steps it is measured with). `also`
holds other numbers that the paper reports of the same run: { BTI = { value = -8.16, std = 0.61 } }. `after` names the
preset whose finished run is the start of this one; its folder is the setting `start_from`.

`sweep = { inner_steps = [5, 15], test_inner_steps = [5, 15] }` makes one preset per position of the lists instead,
called NAME.5 and NAME.15.

`quick.toml` holds what the scale "quick" changes: a row [quick.PREFIX] is laid over every preset whose name starts with
PREFIX, and over all that extend it. Rows come in the order of extending, and the longer prefix after the shorter;
swept settings keep their values.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Literal, cast, get_args

from wheretolearn.config import from_dict, merge, toml_text
from wheretolearn.errors import ConfigError

__all__ = ["Evaluate", "Measure", "Paper", "Preset", "Protocol", "Scale", "list_presets", "load_preset", "scale_named"]

Protocol = Literal["fewshot", "continual", "online"]
Measure = Literal[
    "accuracy",
    "ensemble accuracy",
    "sparsity",
    "sparsity of batch-norm gains",
    "sparsity of head.bias",
    "RA",
    "BTI",
]
Scale = Literal["paper", "quick"]

QUICK = "quick"  # the group of rows that are laid over presets, not presets themselves


@dataclass(frozen=True)
class Paper:
    """The number that the paper reports for a preset; `note` says where it does not come from the paper's own runs."""

    table: str
    value: float
    std: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Evaluate:
    """What a finished run is measured on; None: the run's own set, its held-out splits, its test_inner_steps."""

    data: str | None = None
    split: str | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Preset:
    """A named starting point: a protocol, settings for it, and what of the finished run is the result."""

    name: str
    protocol: Protocol
    about: str
    paper: Paper | None
    settings: dict[str, Any]
    measure: Measure = "accuracy"
    evaluate: Evaluate = Evaluate()
    after: str | None = None  # preset whose finished run this one starts from
    also: dict[str, Paper] = field(default_factory=dict)  # by measure: other numbers that the paper reports of the run


@dataclass(frozen=True)
class _Number:
    value: float
    std: float | None = None
    note: str = ""
    table: str | None = None  # None: the first part of the preset's name


@dataclass(frozen=True)
class _Row:
    """A preset as its file spells it."""

    about: str | None = None
    protocol: Protocol | None = None
    extends: str | None = None
    paper: _Number | None = None
    also: dict[str, _Number] = field(default_factory=dict)
    measure: Measure = "accuracy"
    settings: dict[str, object] = field(default_factory=dict)
    evaluate: dict[str, object] = field(default_factory=dict)
    after: str | None = None
    sweep: dict[str, tuple[object, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Overlay:
    """What a scale changes in presets."""

    about: str = ""
    settings: dict[str, object] = field(default_factory=dict)
    evaluate: dict[str, object] = field(default_factory=dict)


@dataclass
class _Book:
    """Everything the files say."""

    rows: dict[str, _Row] = field(default_factory=dict)
    points: dict[str, dict[str, object]] = field(default_factory=dict)  # the swept settings of presets from sweeps
    overlays: dict[str, _Overlay] = field(default_factory=dict)


def list_presets(folder: Traversable | None = None, *, scale: Scale = "paper") -> list[Preset]:
    """All presets, table by table; `folder` replaces the one that comes with the package."""
    book = _read(folder)
    return [_resolve(name, book, scale) for name in sorted(book.rows, key=_group)]


def load_preset(name: str, folder: Traversable | None = None, *, scale: Scale = "paper") -> Preset:
    """One preset, with everything it extends filled in.

    The scale "quick" gives a version for a laptop: small images, a small network and a short run. Its numbers are not
    to be held against the paper's, so it has none.
    """
    book = _read(folder)
    if name not in book.rows:
        below = [other for other in book.rows if other.startswith(f"{name}.")]
        if below:
            raise ConfigError(f'"{name}" is a group of {len(below)} presets; see `wheretolearn presets {name}`')
        raise ConfigError(f'no preset is called "{name}"{_nearest(name, book)}; see `wheretolearn presets`')
    return _resolve(name, book, scale)


def scale_named(name: str) -> Scale:
    """A scale from the command line."""
    for scale in get_args(Scale):
        if name == scale:
            return cast(Scale, scale)
    raise ConfigError(f"there is no scale {name!r}: choose {' or '.join(get_args(Scale))}")


def _group(name: str) -> str:
    return name.partition(".")[0]  # sorting is stable: within a table the order of its file


def _read(folder: Traversable | None) -> _Book:
    return _read_package() if folder is None else _read_folder(folder)


@cache
def _read_package() -> _Book:
    return _read_folder(files(__name__))


def _read_folder(folder: Traversable) -> _Book:
    book = _Book()
    sources: dict[str, str] = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".toml"):
            continue
        try:
            document = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file.name} is not valid TOML: {error}") from error
        quick = document.pop(QUICK, {})
        for prefix, overlay in _walk_overlays(quick, "", file.name):
            if prefix in book.overlays:
                raise ConfigError(f'"{QUICK}.{prefix}" is defined twice, the second time in {file.name}')
            book.overlays[prefix] = overlay
        for swept_name, swept in _walk(document, "", file.name):
            for name, point in _expand(swept_name, swept, file.name):
                if name in book.rows:
                    raise ConfigError(f'preset "{name}" is defined twice: in {sources[name]} and in {file.name}')
                book.rows[name], sources[name] = swept, file.name
                if point:
                    book.points[name] = point
    for prefix in book.overlays:
        if not any(prefix in _prefixes(name) for name in book.rows):
            raise ConfigError(f'"{QUICK}.{prefix}" is laid over no preset{_nearest(prefix, book)}')
    return book


def _walk(table: Mapping[str, Any], name: str, file: str) -> Iterator[tuple[str, _Row]]:
    """Groups hold only tables; a table with any of a preset's own keys is a preset."""
    if name and not table.keys().isdisjoint(row_field.name for row_field in fields(_Row)):
        yield name, from_dict(_Row, table, where=f"{file}, preset {name}")
        return
    for key, value in table.items():
        if not isinstance(value, Mapping):
            raise ConfigError(f'{file}: "{key}" stands outside a preset{f", in {name}" if name else ""}')
        yield from _walk(value, f"{name}.{key}" if name else key, file)


def _walk_overlays(table: Mapping[str, Any], prefix: str, file: str) -> Iterator[tuple[str, _Overlay]]:
    """Unlike a preset, an overlay can have others below it."""
    names = {overlay_field.name for overlay_field in fields(_Overlay)}
    own = {key: value for key, value in table.items() if prefix and key in names}
    if own:
        yield prefix, from_dict(_Overlay, own, where=f"{file}, {QUICK}.{prefix}")
    for key, value in table.items():
        if key in own:
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f'{file}: unknown "{key}" in {QUICK}{f".{prefix}" if prefix else ""}')
        yield from _walk_overlays(value, f"{prefix}.{key}" if prefix else key, file)


def _expand(name: str, row: _Row, file: str) -> Iterator[tuple[str, dict[str, object]]]:
    """The names a row stands for, each with its swept settings: one, or as many as its sweep has points."""
    if not row.sweep:
        yield name, {}
        return
    lengths = {key: len(values) for key, values in row.sweep.items()}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        found = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise ConfigError(f"{file}, preset {name}: the lists of a sweep go together and need one length; found {found}")
    first = next(iter(row.sweep.values()))
    for index, value in enumerate(first):
        spelled = f"{value:g}" if isinstance(value, float) else toml_text(value).strip('"')
        yield f"{name}.{spelled}", {key: values[index] for key, values in row.sweep.items()}


def _resolve(name: str, book: _Book, scale: Scale) -> Preset:
    rows = book.rows
    chain = [name]
    while (base := rows[chain[-1]].extends) is not None:
        if base in chain:
            raise ConfigError(f"presets extend each other in a circle: {' -> '.join([*chain, base])}")
        if base not in rows:
            raise ConfigError(f'preset "{chain[-1]}" extends "{base}", which does not exist{_nearest(base, book)}')
        chain.append(base)
    own = rows[name]
    protocols = {row.protocol for row in map(rows.__getitem__, chain) if row.protocol is not None}
    if len(protocols) != 1:
        found = ", ".join(sorted(protocols)) or "none"
        raise ConfigError(f'preset "{name}" and what it extends must name one protocol; found {found}')
    after = next((rows[link].after for link in chain if rows[link].after is not None), None)
    if after is not None and after not in rows:
        raise ConfigError(f'preset "{name}" comes after "{after}", which does not exist{_nearest(after, book)}')

    settings: dict[str, Any] = {} if after is None else {"start_from": f"runs/{after}"}
    evaluate: dict[str, Any] = {}
    about = next((text for link in chain if (text := rows[link].about) is not None), None)
    if about is None:
        raise ConfigError(f'preset "{name}" needs an "about": one line that says what it is')
    for link in reversed(chain):
        settings = merge(merge(settings, rows[link].settings), book.points.get(link, {}))
        evaluate = merge(evaluate, rows[link].evaluate)
    about += _details(own, book.points.get(name, {}))
    if scale == "quick":
        overlays = [book.overlays[p] for link in reversed(chain) for p in _prefixes(link) if p in book.overlays]
        for overlay in overlays:
            settings, evaluate = merge(settings, overlay.settings), merge(evaluate, overlay.evaluate)
        for link in reversed(chain):
            settings = merge(settings, book.points.get(link, {}))
        about += "".join(f"; quick: {text}" for text in [o.about for o in overlays if o.about][-1:])
    return Preset(
        name,
        protocols.pop(),
        about,
        _paper(own.paper, name) if own.paper is not None and scale == "paper" else None,
        settings,
        own.measure,
        from_dict(Evaluate, evaluate, where=f"preset {name}, evaluate"),
        after,
        {measure: _paper(number, name) for measure, number in own.also.items()} if scale == "paper" else {},
    )


def _prefixes(name: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c"""
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _details(row: _Row, point: Mapping[str, object]) -> str:
    """What sets a preset apart from the one whose `about` it shares."""
    details = [f"{key} {toml_text(value)}" for key, value in list(point.items())[:1]]
    if row.about is None:
        details += [row.measure] if row.measure != "accuracy" else []
        details += [f"tested on {row.evaluate['data']}"] if "data" in row.evaluate else []
    return "".join(f", {detail}" for detail in details)


def _paper(number: _Number, name: str) -> Paper:
    return Paper(number.table or _group(name), number.value, number.std, number.note)


def _nearest(name: str, book: _Book) -> str:
    nearest = get_close_matches(name, book.rows, n=3, cutoff=0.4)
    return f"; the nearest: {', '.join(nearest)}" if nearest else ""
