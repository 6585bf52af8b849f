"""``wheretolearn presets`` and ``settings``: what can be run, and what can be set."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from wheretolearn.config import describe, from_dict, to_dict, toml_text
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.presets import list_presets, load_preset


def presets(
    name: Annotated[str | None, typer.Argument(help="Show every setting of this preset.")] = None,
) -> None:
    """List the presets, or show one of them in full."""
    if name is None:
        table = Table(title="Presets (`wheretolearn train --preset NAME`)", title_justify="left")
        for heading in ("name", "protocol", "about", "paper"):
            table.add_column(heading, no_wrap=heading == "name")
        for preset in list_presets():
            paper = "" if preset.paper is None else f"{preset.paper.table}: {preset.paper.value}"
            table.add_row(preset.name, preset.protocol, preset.about, paper)
        Console().print(table)
        return
    preset = load_preset(name)
    table = Table(title=f"{preset.name}: {preset.about}", title_justify="left")
    for heading in ("setting", "value", "meaning"):
        table.add_column(heading, no_wrap=heading == "setting")
    values = to_dict(from_dict(FewShotConfig, preset.settings, where=f"preset {name}"))
    for row in describe(FewShotConfig):
        style = "bold" if row.key in preset.settings else None
        table.add_row(row.key, toml_text(values[row.key]), row.help, style=style)
    Console().print(table)


def settings() -> None:
    """List every setting that a preset or --set can change, with its default."""
    table = Table(title="Settings of `wheretolearn train` (--set NAME=VALUE)", title_justify="left")
    for heading in ("setting", "type", "default", "meaning"):
        table.add_column(heading, no_wrap=heading == "setting")
    for row in describe(FewShotConfig):
        table.add_row(row.key, row.type, row.default, row.help)
    Console().print(table)
