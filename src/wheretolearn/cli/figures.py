"""``wheretolearn figures``: draw what continual and online runs measured."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wheretolearn.cli.common import find_runs
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.runs.folder import RunFolder

if TYPE_CHECKING:
    from wheretolearn.report.continual import ContinualRun
    from wheretolearn.report.lines import Drawing

NOTHING = "nothing to draw yet: none of these runs has measured anything"


def figures(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folder of a continual or online run, or a folder of such runs."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="Folder for the figures; default: `figures` in the folder that all runs share."
        ),
    ] = None,
) -> None:
    """Draw accuracy and sparsity of continual or online runs as SVG, each with its data as CSV.

    Runs that differ in their seed only are averaged, with a band of one standard deviation. Continual runs that differ
    in one setting are drawn against it as well. A run that is not finished is drawn as far as it is.
    """
    # Here, so that other commands do not wait for matplotlib.
    from wheretolearn.report.lines import save

    folder = _common_folder(paths) / "figures" if out is None else out
    found = find_runs(paths, _drawable)
    protocols = {run.protocol for run in found}
    if protocols == {"online"}:
        drawings = _online(found)
    elif "online" in protocols:
        raise UserError("continual and online runs share no figure: draw them apart")
    else:
        drawings = _continual(found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot keep figures in {folder}: {error.strerror}; choose another folder with -o") from error
    for drawing in drawings:
        for path in save(drawing, folder):
            typer.echo(f"wrote {path}")


def _online(found: Sequence[RunFolder]) -> "list[Drawing]":
    from wheretolearn.report import online

    runs = [online.read_run(run) for run in found]
    begun = [run for run in runs if run.accuracies]
    for run in runs:
        if run not in begun:
            typer.echo(f"note: {run.folder.path} has measured nothing yet and is left out", err=True)
        elif not run.finished:
            steps = f"{len(run.accuracies)} of {run.config.steps} steps"
            typer.echo(f"note: {run.folder.path} is not finished: drawn as far as it is, {steps}", err=True)
    if not begun:
        raise UserError(NOTHING)
    groups = online.group_runs(begun)
    for group in groups:
        if not any(run.sparsity for run in group.runs):
            typer.echo(f"note: no sparsity is drawn of {group.name}, which has no mask", err=True)
    return online.draw(groups)


def _continual(found: Sequence[RunFolder]) -> "list[Drawing]":
    from wheretolearn.report import continual

    runs = [continual.read_run(run) for run in found]
    begun = [run for run in runs if run.tasks_learned or run.sparsity]
    for run in runs:
        _tell_unfinished(run, run in begun)
    if not begun:
        raise UserError(NOTHING)
    groups = continual.group_runs(begun)
    drawings = continual.draw(groups)
    if len(groups) > 1:
        try:
            drawings.append(continual.sweep(groups))
        except ConfigError as error:
            typer.echo(f"note: no sweep is drawn: {error}", err=True)
    for group in groups:
        if not any(run.sparsity for run in group.runs):
            typer.echo(f"note: no sparsity is drawn of {group.name}, whose weights can all change", err=True)
    return drawings


def _tell_unfinished(run: "ContinualRun", begun: bool) -> None:
    if not begun:
        typer.echo(f"note: {run.folder.path} has measured nothing yet and is left out", err=True)
    elif run.result is None:
        total = f" of {len(run.matrix)}" if len(run.matrix) else ""
        typer.echo(
            f"note: {run.folder.path} is not finished: drawn as far as it is, {run.tasks_learned}{total} tasks learned",
            err=True,
        )


def _drawable(path: Path, runs: list[RunFolder]) -> list[RunFolder]:
    """The continual and online runs of a folder; where it has none, all, so that reading them says what they are."""
    inside = [run for run in runs if run.protocol in ("continual", "online")] or runs
    for run in runs:
        if run not in inside:
            typer.echo(f"note: {run.path} is a run of the protocol {run.protocol}, left out", err=True)
    return inside


def _common_folder(paths: Sequence[Path]) -> Path:
    if len(paths) == 1:
        return paths[0]
    try:
        common = Path(os.path.commonpath([path.absolute() for path in paths]))
    except ValueError:  # on different drives
        common = Path("/")
    if common == common.parent:
        raise UserError("these runs have no folder in common: choose one for the figures with -o")
    here = Path.cwd()
    return common.relative_to(here) if common.is_relative_to(here) else common
