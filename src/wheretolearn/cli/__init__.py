"""The command line: parse, call, print."""

import io
import sys
from typing import Annotated

import typer
from rich.console import Console

from wheretolearn.cli import adapt, continual, data, demo, fewshot, figures, online, presets, report, reproduce
from wheretolearn.cpu import keep_freed_memory
from wheretolearn.errors import UserError
from wheretolearn.runs.shortages import shortages_told
from wheretolearn.version import __version__

app = typer.Typer(
    help="Learned gradient masks: let the outer loop of meta-learning decide which weights the inner loop may change.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.add_typer(data.app, name="data")
app.command("demo")(demo.demo)
app.command("train")(fewshot.train)
app.command("continual")(continual.continual)
app.command("online")(online.online)
app.command("resume")(fewshot.resume)
app.command("evaluate")(fewshot.evaluate)
app.command("reproduce")(reproduce.reproduce)
app.command("adapt")(adapt.adapt)
app.command("figures")(figures.figures)
app.command("report")(report.report)
app.command("presets")(presets.presets)
app.command("settings")(presets.settings)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"wheretolearn {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a user's mistake ends in one message and an exit code, not a traceback."""
    keep_freed_memory()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal cannot show is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        with shortages_told():
            app()
    except UserError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {error}", style="red", markup=False)
        sys.exit(error.exit_code)
