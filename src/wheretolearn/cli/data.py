"""``wheretolearn data``: list, get, add, check and look at image sets."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from wheretolearn.cli.progress import progress_bar
from wheretolearn.data import glyphs, image_set, install
from wheretolearn.data.contact_sheet import draw_contact_sheet
from wheretolearn.data.image_set import ImageSet, human_bytes
from wheretolearn.data.load import check_known, load_set
from wheretolearn.data.sources import SOURCES
from wheretolearn.errors import DataError

app = typer.Typer(
    help="Image sets: download or add them once, check them, look at them.\n\n"
    "Sets are kept in the folder named by WHERETOLEARN_DATA, else in the user's cache folder.",
    no_args_is_help=True,
)

SetName = Annotated[str, typer.Argument(help="A known set (see `data list`) or a name of your own.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the set if it is already there.")]


@app.command("list")
def list_sets() -> None:
    """List the known image sets and your own, and which of them are here."""
    table = Table(title=f"Image sets in {image_set.data_root()}", title_justify="left")
    for heading in ("name", "classes", "images", "image", "here", "licence"):
        right = heading in ("images", "here")
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading != "licence")
    stored = image_set.stored_names()
    known = [install.EMBEDDED, *SOURCES]
    for name in [*known, *(name for name in stored if name not in known)]:
        table.add_row(name, *(_stored_row(name) if name in stored else _absent_row(name)))
    Console().print(table)


@app.command("get")
def get_set(name: SetName, force: Force = False) -> None:
    """Download a known set from its publisher, check it and store it. A broken download is resumed.

    The embedded set, glyphs, is drawn instead.
    """
    if image_set.exists(name) and not force:
        again = "--force gets it again" if install.can_get(name) else f"`data add {name} PATH --force` replaces it"
        typer.echo(f"{name} is already here ({again})")
        return
    with ExitStack() as first_bar, progress_bar(f"converting {name}") as converting:
        downloading = first_bar.enter_context(progress_bar(f"downloading {name}"))

        def convert(done: int, total: int) -> None:
            first_bar.close()  # one bar at a time
            converting(done, total)

        stored = install.get(name, downloading=downloading, converting=convert)
    typer.echo(_summary(stored))


@app.command("add")
def add_set(
    name: SetName,
    path: Annotated[Path, typer.Argument(help="The folder (or archive) that holds the files.")],
    size: Annotated[int | None, typer.Option(help="Side in pixels of a set of your own (84).", min=1)] = None,
    channels: Annotated[int | None, typer.Option(help="3 for colour or 1 for grey, in a set of your own (3).")] = None,
    force: Force = False,
) -> None:
    """Store a set from files you have.

    A known name expects its publisher's layout. Any other name makes a set of your own from a folder with one
    sub-folder of images per class, or from such folders inside train, validation and test.
    """
    if image_set.exists(name) and not force:
        raise DataError(f"image set {name!r} is already here; --force replaces it")
    with progress_bar(f"converting {name}") as converting:
        stored = install.add(name, path, size=size, channels=channels, progress=converting)
    typer.echo(_summary(stored))


@app.command("check")
def check_sets(
    name: Annotated[str | None, typer.Argument(help="The set to check; all of them if left out.")] = None,
) -> None:
    """Compare stored sets with the checksums taken when they were written."""
    names = image_set.stored_names() if name is None else [name]
    if not names:
        typer.echo(f"no image set in {image_set.data_root()}")
    damaged = []
    for each in names:
        try:
            check_known(each)
            with progress_bar(f"checking {each}") as checking:
                checked = image_set.check(each, progress=checking)
        except DataError as error:
            if name is not None:
                raise
            damaged.append(str(error))
        else:
            typer.echo(f"{_summary(checked)}: good")
    if damaged:
        raise DataError("\n".join(damaged))


@app.command("sheet")
def draw_sheet(
    name: SetName,
    out: Annotated[Path, typer.Argument(help="The image file to write, for example sheet.png.")],
    classes: Annotated[int, typer.Option(help="Classes shown of each split.", min=1)] = 8,
    images: Annotated[int, typer.Option(help="Images shown of each class.", min=1)] = 12,
) -> None:
    """Draw a contact sheet of a stored set."""
    with progress_bar(f"preparing {name}") as preparing:
        sheet = draw_contact_sheet(load_set(name, preparing), classes, images)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(out)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot write {out}: {error}") from error
    typer.echo(f"{out}: {sheet.width} x {sheet.height}")


def _summary(stored: ImageSet) -> str:
    splits = ", ".join(
        f"{name} {len(split.classes)} classes {len(split.images)} images" for name, split in stored.splits.items()
    )
    partial = f" (a subset: {stored.info.get('classes')})" if stored.info.get("complete") is False else ""
    ignored = stored.info.get("ignored_files")
    return f"{stored.name}: {splits}{partial}" + (f" (other files ignored: {ignored})" if ignored else "")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _stored_row(name: str) -> tuple[str, str, str, str, str]:
    try:
        stored = image_set.load(name)
    except DataError:
        return "", "", "", "damaged", ""
    distinct = len({label for split in stored.splits.values() for label in split.classes})
    images = sum(len(split.images) for split in stored.splits.values())
    source = SOURCES.get(name)
    classes = f"{distinct}" if source is None or distinct == source.classes else f"{distinct} of {source.classes}"
    count = f"{images:,}" if source is None or images == source.images else f"{images:,} of {source.images:,}"
    shape = _shape(next(iter(stored.splits.values())).images.shape[1:])
    licence = source.licence if source is not None else str(stored.info.get("licence", "your own"))
    if name == install.EMBEDDED:
        licence = "embedded"
    return classes, count, shape, human_bytes(image_set.stored_bytes(name)), licence


def _absent_row(name: str) -> tuple[str, str, str, str, str]:
    if name == install.EMBEDDED:
        classes = sum(map(len, glyphs.split_members().values()))
        shape = _shape((glyphs.SIDE, glyphs.SIDE, 1))
        return f"{classes}", f"{classes * glyphs.DRAWINGS:,}", shape, "drawn at first use", "embedded"
    source = SOURCES[name]
    here = "no" if source.files else "no (add it)"
    return f"{source.classes}", f"{source.images:,}", _shape(source.image_shape), here, source.licence
