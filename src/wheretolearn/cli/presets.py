"""``wheretolearn presets`` and ``settings``: what can be run, and what can be set."""

from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from wheretolearn.cli.common import COMMANDS
from wheretolearn.config import describe, from_dict, to_dict, toml_text
from wheretolearn.continual.config import ContinualConfig
from wheretolearn.errors import ConfigError
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.online.config import OnlineConfig
from wheretolearn.presets import Paper, Preset, list_presets, load_preset, scale_named

SETTINGS: dict[str, type] = {"fewshot": FewShotConfig, "continual": ContinualConfig, "online": OnlineConfig}


def complete_preset(beginning: str) -> list[str]:
    """Names that a shell can complete to."""
    return [preset.name for preset in list_presets() if preset.name.startswith(beginning)]


def presets(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show every setting of this preset, or list those whose names start so, such as table1.",
            autocompletion=complete_preset,
        ),
    ] = None,
    scale: Annotated[str, typer.Option(help="paper, or quick: small versions for a laptop.")] = "paper",
) -> None:
    """List the presets by table, or show one of them in full."""
    chosen = scale_named(scale)
    named = [preset for preset in list_presets(scale=chosen) if preset.name.startswith(name or "")]
    if name is None or (named and all(preset.name != name for preset in named)):
        _list(named)
    else:
        _show(load_preset(name, scale=chosen))  # an unknown name fails here, with the nearest


def _list(chosen: list[Preset]) -> None:
    console = Console()
    commands = dict.fromkeys(COMMANDS[preset.protocol] for preset in chosen if preset.protocol in COMMANDS)
    starts = " or ".join(f"`wheretolearn {command} RUN --preset NAME`" for command in commands)
    console.print(f"Presets, for {starts}; `wheretolearn presets NAME` shows one.")
    for group, members in groupby(chosen, key=lambda preset: preset.name.partition(".")[0]):
        table = Table(title=group, title_justify="left", title_style="bold")
        for heading in ("name", "about", "paper"):
            table.add_column(heading, no_wrap=heading != "about")
        for preset in members:
            table.add_row(preset.name, preset.about, _paper(preset))
        console.print(table)


def _show(preset: Preset) -> None:
    console = Console()
    where = {key: value for key, value in to_dict(preset.evaluate).items() if value is not None}
    facts = {
        "paper": f"{_paper(preset)} in {preset.paper.table}" if preset.paper else "",
        "also in the paper": ", ".join(f"{measure} {_number(number)}" for measure, number in preset.also.items()),
        "measures": preset.measure + "".join(f", {key} {value}" for key, value in where.items()),
        "paper's number": preset.paper.note if preset.paper else "",
        "starts from": f"a finished run of {preset.after}" if preset.after else "",
    }
    table = Table(title=f"{preset.name}: {preset.about}", title_justify="left")
    for heading in ("setting", "value", "meaning"):
        table.add_column(heading, no_wrap=heading == "setting")
    kind = SETTINGS[preset.protocol]
    values = to_dict(from_dict(kind, preset.settings, where=f"preset {preset.name}"))
    for row in describe(kind):
        style = "bold" if row.key in preset.settings else None
        table.add_row(row.key, toml_text(values[row.key]), row.help, style=style)
    console.print(table)
    for fact, text in facts.items():
        if text:
            console.print(f"{fact}: {text}", highlight=False)


def _paper(preset: Preset) -> str:
    return "" if preset.paper is None else _number(preset.paper)


def _number(number: Paper) -> str:
    return f"{number.value:g}" + ("" if number.std is None else f" +- {number.std:g}")


def settings(
    protocol: Annotated[str, typer.Argument(help="fewshot, continual or online.")] = "fewshot",
) -> None:
    """List every setting that a preset or --set can change, with its default."""
    if protocol not in SETTINGS:
        raise ConfigError(f"there are no settings of {protocol!r}: choose {' or '.join(SETTINGS)}")
    title = f"Settings of `wheretolearn {COMMANDS[protocol]}` (--set NAME=VALUE)"
    table = Table(title=title, title_justify="left")
    for heading in ("setting", "type", "default", "meaning"):
        table.add_column(heading, no_wrap=heading == "setting")
    for row in describe(SETTINGS[protocol]):
        table.add_row(row.key, row.type, row.default, row.help)
    Console().print(table)
