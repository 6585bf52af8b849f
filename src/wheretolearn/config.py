"""Settings as frozen dataclasses: strict reading, overrides, and a list of what can be set.

Fields may be int, float, bool, str, Literal, tuple, dict[str, ...], X | None, or another such dataclass.
TOML has no null, so the string "none" stands for None wherever None is allowed.
"""

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, TypeVar, Union

from wheretolearn.errors import ConfigError

T = TypeVar("T")

MAX_INT = 2**31 - 1  # more than anyone counts to, and less than what overflows somewhere
MAX_FLOAT = (2 - 2**-23) * 2.0**127  # the largest number of float32, in which networks calculate
MAX_RATE = 1e30  # Adam divides rates by small numbers, which the largest of float32 do not survive


class SettingRow(NamedTuple):
    """One setting as a help page shows it; the default is spelled as in TOML."""

    key: str
    type: str
    default: str
    help: str


def setting(default: T, help: str) -> T:
    """A dataclass field with a default and one line of help."""
    return dataclasses.field(default=default, metadata={"help": help})


def from_dict(cls: type[T], values: Mapping[str, object], where: str = "") -> T:
    """Build `cls` from plain values; anything unknown or of the wrong type is a ConfigError.

    `where` says in errors where the values came from, such as a file or a preset.
    """
    return _build(cls, values, "", f"{where}: " if where else "")


def to_dict(config: object) -> dict[str, Any]:
    """The inverse of `from_dict`: nested dictionaries of plain types, tuples as lists."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"to_dict needs a dataclass instance, got {config!r}")
    return {field.name: _plain(getattr(config, field.name)) for field in _fields(config)}


def merge(base: Mapping[str, object], extra: Mapping[str, object]) -> dict[str, Any]:
    """`base` overlaid with `extra`, table by table; neither is changed."""
    merged: dict[str, Any] = {key: merge(v, {}) if isinstance(v, Mapping) else v for key, v in base.items()}
    for key, value in extra.items():
        if isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = merge(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Nested settings from `["inner_lr=0.1", "model.width=32"]`; later ones win.

    A value is read as TOML; what is not TOML is taken as a string, so plain words need no quotes.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        names = [name.strip() for name in key.split(".")]
        if not equals or not all(names):
            raise ConfigError(f"cannot read the setting {override!r}: write key=value, such as inner_lr=0.1")
        nested: Any = _toml_value(text.strip())
        for name in reversed(names):
            nested = {name: nested}
        values = merge(values, nested)
    return values


def check_rates(config: object, names: str) -> None:
    """Refuse learning rates and start values, named with spaces between them, with which no optimizer can calculate."""
    for name in names.split():
        value = getattr(config, name)
        if value is not None and abs(value) > MAX_RATE:
            raise ConfigError(f"{name} must lie between {-MAX_RATE:g} and {MAX_RATE:g}, not {value}")


def describe(cls: type) -> list[SettingRow]:
    """Every setting of a dataclass, nested ones under dotted keys."""
    rows = []
    hints = typing.get_type_hints(cls)
    for field in _fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            default = _default(field)
            nested = {} if default is MISSING else _leaves(to_dict(default))
            rows += [
                row._replace(key=f"{field.name}.{row.key}", default=nested.get(row.key, row.default))
                for row in describe(kind)
            ]
        else:
            default = _default(field)
            shown = "required" if default is MISSING else toml_text(_plain(default))
            rows.append(SettingRow(field.name, _type_name(kind), shown, field.metadata.get("help", "")))
    return rows


def _build(cls: type[T], values: Mapping[str, object], prefix: str, where: str) -> T:
    fields = {field.name: field for field in _fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in fields:
            raise ConfigError(f'{where}unknown setting "{prefix}{key}"; {_suggestion(cls, key, prefix)}')
    arguments = {}
    for name, field in fields.items():
        default = _default(field)
        if name in values:
            value = values[name]
            if isinstance(value, Mapping) and dataclasses.is_dataclass(hints[name]) and default is not MISSING:
                value = merge(to_dict(default), value)  # a table given in part keeps the rest of its default
            arguments[name] = _convert(value, hints[name], prefix + name, where)
        elif default is MISSING:
            raise ConfigError(f'{where}missing setting "{prefix}{name}" ({_type_name(hints[name])})')
    try:
        return cls(**arguments)
    except ConfigError as error:  # from the class's own range checks, which do not know where they are
        table = f"in {prefix.rstrip('.')}: " if prefix else ""
        raise ConfigError(f"{where}{table}{error}") from None


def _convert(value: object, kind: Any, key: str, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    wrong = ConfigError(f'{where}"{key}" expects {_type_name(kind)}, got {toml_text(value)}{_hint(value, kind)}')

    if origin in (Union, types.UnionType):
        choices = [choice for choice in arguments if choice is not types.NoneType]
        if len(choices) < len(arguments) and (value is None or value == "none"):
            return None
        choices.sort(key=lambda choice: choice is float)  # float last: it would widen an int
        for choice in choices:
            try:
                return _convert(value, choice, key, where)
            except ConfigError as error:
                # The error from inside a list or a table says more than "not a table".
                if len(choices) == 1 and isinstance(value, (list, tuple, Mapping)):
                    wrong = error
        raise wrong

    if origin is Literal:
        for choice in arguments:
            if type(choice) is type(value) and choice == value:
                return choice
        raise wrong
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise wrong
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = (arguments[0],) * len(value)
        if len(arguments) != len(value):
            raise wrong
        return tuple(
            _convert(item, argument, f"{key}[{index}]", where)
            for index, (item, argument) in enumerate(zip(value, arguments, strict=True))
        )
    if origin is dict:
        if not isinstance(value, Mapping):
            raise wrong
        return {str(name): _convert(item, arguments[1], f"{key}.{name}", where) for name, item in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise wrong
        return _build(kind, value, f"{key}.", where)
    if kind is float:
        # No setting means anything as NaN or infinity, and range checks would let them through.
        if type(value) not in (int, float) or not abs(typing.cast(float, value)) <= MAX_FLOAT:
            raise wrong
        return float(typing.cast(float, value))
    if kind in (int, bool, str):
        if type(value) is not kind or (kind is int and abs(typing.cast(int, value)) > MAX_INT):
            raise wrong
        return value
    if kind in (object, Any):
        return value
    raise TypeError(f"the type of setting {key} is not supported: {kind}")


def _fields(config: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(config) if field.init]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key -> value as TOML text."""
    leaves = {}
    for key, value in values.items():
        leaves[prefix + key] = toml_text(value)
        if isinstance(value, Mapping):
            leaves |= _leaves(value, f"{prefix}{key}.")
    return leaves


def _suggestion(cls: type, key: str, prefix: str) -> str:
    # Nested settings are offered under their last name too: `width` finds `model.width`.
    names = {row.key.rpartition(".")[2]: row.key for row in describe(cls)}
    names |= {row.key: row.key for row in describe(cls)} | {field.name: field.name for field in _fields(cls)}
    nearest = get_close_matches(key, names, n=1)
    if nearest:
        return f'did you mean "{prefix}{names[nearest[0]]}"?'
    return "known settings: " + ", ".join(prefix + field.name for field in _fields(cls))


def _type_name(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(choice) for choice in arguments)
    if origin is Literal:
        return "one of " + ", ".join(toml_text(choice) for choice in arguments)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return f"list of {_type_name(arguments[0])}"
        return "list of (" + ", ".join(_type_name(item) for item in arguments) + ")"
    if origin is dict or dataclasses.is_dataclass(kind):
        return "table"
    if kind is types.NoneType:
        return "none"
    return {bool: "true or false", str: "string"}.get(kind, getattr(kind, "__name__", str(kind)))


def _hint(value: object, kind: Any) -> str:
    """Extra help for the slips people make on a command line."""
    kinds = {kind, *typing.get_args(kind)}
    if isinstance(value, float) and float in kinds and not math.isfinite(value):
        return ", which is not finite"
    if isinstance(value, (int, float)) and float in kinds and abs(value) > MAX_FLOAT:
        return f", which is beyond {MAX_FLOAT:.4g}, the largest number of float32"
    if type(value) is int and int in kinds and abs(value) > MAX_INT:
        return f", which is beyond {MAX_INT}"
    if isinstance(value, str) and kinds & {int, float}:
        try:
            number = float(value)
        except ValueError:
            return ""
        return f"; write the number without quotes, as {number:g}"
    if isinstance(value, str) and bool in kinds and value.lower() in ("true", "false"):
        return f"; write {value.lower()}"
    return ""


def _toml_value(text: str) -> object:
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = document["value"]
    # A second line, or a date: not something a setting can be, so the text was meant as it stands.
    if len(document) > 1 or not isinstance(value, (bool, int, float, str, list, dict)):
        return text
    return value


def differences(expected: Any, found: Any) -> dict[str, str]:
    """The settings in which two configs of one kind differ, each as NAME=VALUE of the second.

    Those that have no effect on either do not count: a config may name them, as ``unused``.
    """
    wanted = to_dict(expected)
    unused: frozenset[str] = getattr(expected, "unused", frozenset()) & getattr(found, "unused", frozenset())
    return {
        name: f"{name}={toml_text(value)}"
        for name, value in to_dict(found).items()
        if value != wanted[name] and name not in unused
    }


def toml_text(value: object) -> str:
    """A plain value as `parse_overrides` reads it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_text(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml_text(item)}" for key, item in value.items()) + "}"
    return str(value)
