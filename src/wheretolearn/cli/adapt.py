"""``wheretolearn adapt``: a finished run on a user's own images."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from wheretolearn import cpu
from wheretolearn.cli.common import Device, Threads, chosen_device, threads_for
from wheretolearn.cli.progress import progress_bar
from wheretolearn.config import MAX_INT
from wheretolearn.data.image_set import human_bytes
from wheretolearn.errors import UserError
from wheretolearn.fewshot.own_images import FILES, Outcome, adapt_to_folder
from wheretolearn.runs.folder import RunFolder
from wheretolearn.storage import cannot_write

SHOWN = 50  # rows of the table on the terminal


def adapt(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    support: Annotated[Path, typer.Option(help="Images to learn from: one folder per class, named by the class.")],
    query: Annotated[Path, typer.Option(help="Images to judge: class folders (to measure accuracy), or just images.")],
    steps: Annotated[
        int | None, typer.Option(help="Inner steps; default: the run's test_inner_steps.", min=0, max=MAX_INT)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; default: RUN/adapted/<name of the support folder>.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace earlier results in that folder.")] = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Adapt a trained model to images of your own and let it judge others.

    Images of any format, up to 178 million pixels, are squashed to the size of those that the run learned from.

    Runs on drawings (glyphs, omniglot, mnist) take dark ink on paper and light ink on black; crop photographs to it.
    """
    device = chosen_device(device)
    folder = out if out is not None else run / "adapted" / (Path(os.path.realpath(support)).name or "support")
    for name, images in (("support", support), ("query", query)):
        _check_apart(folder, images, name)
    if (folder / "run.json").exists():
        raise UserError(f"{folder} is a run, whose model must not be replaced: choose another --out")
    found = next((name for name in FILES if (folder / name).exists()), None)
    if found is not None and not force:
        raise UserError(f"{folder} already holds {found}: --force replaces it, or choose another --out")
    if reason := cannot_write(folder):
        raise UserError(f"cannot keep results in {folder}: {reason}; choose another --out")
    with (
        RunFolder.open(run) as opened,
        cpu.threads(threads_for(opened, threads)),
        progress_bar("adapting") as tick,
    ):
        outcome = adapt_to_folder(opened, support, query, steps=steps, device=device, progress=tick)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot keep results in {folder}: {error.strerror}; choose another --out") from error
    outcome.save(folder)
    _show(outcome, folder)


def _check_apart(folder: Path, images: Path, name: str) -> None:
    """Results among the user's images would be read as images next time."""
    out, own = Path(os.path.realpath(folder)), Path(os.path.realpath(images))  # which, unlike resolve, takes any link
    if out == own:
        relation = "is"
    elif own in out.parents:
        relation = "lies in"
    elif out in own.parents:
        relation = "contains"
    else:
        return
    raise UserError(
        f"cannot keep results in {folder}: it {relation} the {name} folder {images}, "
        "and results must stay apart from images; choose another --out"
    )


def _show(outcome: Outcome, folder: Path) -> None:
    predictions = outcome.predictions
    counts = ", ".join(f"{name} {count}" for name, count in outcome.support_counts.items())
    typer.echo(f"{outcome.steps} inner steps on the images of {len(outcome.support_counts)} classes: {counts}")
    labelled = predictions.accuracy is not None
    table = Table("image", "prediction", "confidence", *(("truth", "") if labelled else ()))
    for image in predictions.images[:SHOWN]:
        truth = (image.truth or "", "" if image.label == image.truth else "wrong") if labelled else ()
        table.add_row(*map(Text, (image.file, image.label, f"{image.confidence:.1%}", *truth)))
    Console().print(table)
    if len(predictions.images) > SHOWN:
        typer.echo(f"... and {len(predictions.images) - SHOWN} more in predictions.csv")
    if predictions.accuracy is not None:
        typer.echo(f"accuracy {predictions.accuracy:.1%} ({predictions.correct} of {len(predictions.images)} images)")
    share = outcome.changed / outcome.total
    typer.echo(f"{outcome.changed:,} of {outcome.total:,} weights changed ({share:.1%})")
    whole = human_bytes((folder / "model.safetensors").stat().st_size)
    if outcome.delta is None:
        typer.echo(f"they are the head, solved on the support images; the whole model takes {whole}")
    else:
        changes = human_bytes((folder / "delta.safetensors").stat().st_size)
        typer.echo(f"the changes alone take {changes}, the whole model {whole}")
    for note in outcome.notes:
        typer.echo(f"note: {note}", err=True)
    if len(predictions.left_out) > 1:
        typer.echo(f"note: predictions.json names all {len(predictions.left_out)} images left out", err=True)
    typer.echo(f"results: {folder} ({', '.join(name for name in FILES if (folder / name).exists())})")
