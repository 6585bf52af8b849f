"""``wheretolearn presets`` and ``settings``: what can be run, and what can be set."""

from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from wheretolearn.config import describe, from_dict, to_dict, toml_text
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.presets import Preset, list_presets, load_preset, scale_named


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
    console.print("Presets, for `wheretolearn train RUN --preset NAME`; `wheretolearn presets NAME` shows one.")
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
        "measures": preset.measure + "".join(f", {key} {value}" for key, value in where.items()),
        "paper's number": preset.paper.note if preset.paper else "",
        "starts from": f"a finished run of {preset.after}" if preset.after else "",
    }
    table = Table(title=f"{preset.name}: {preset.about}", title_justify="left")
    for heading in ("setting", "value", "meaning"):
        table.add_column(heading, no_wrap=heading == "setting")
    values = to_dict(from_dict(FewShotConfig, preset.settings, where=f"preset {preset.name}"))
    for row in describe(FewShotConfig):
        style = "bold" if row.key in preset.settings else None
        table.add_row(row.key, toml_text(values[row.key]), row.help, style=style)
    console.print(table)
    for fact, text in facts.items():
        if text:
            console.print(f"{fact}: {text}", highlight=False)


def _paper(preset: Preset) -> str:
    if preset.paper is None:
        return ""
    return f"{preset.paper.value:g}" + ("" if preset.paper.std is None else f" +- {preset.paper.std:g}")


def settings() -> None:
    """List every setting that a preset or --set can change, with its default."""
    table = Table(title="Settings of `wheretolearn train` (--set NAME=VALUE)", title_justify="left")
    for heading in ("setting", "type", "default", "meaning"):
        table.add_column(heading, no_wrap=heading == "setting")
    for row in describe(FewShotConfig):
        table.add_row(row.key, row.type, row.default, row.help)
    Console().print(table)
