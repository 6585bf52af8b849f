"""``wheretolearn report``: one page about runs, or about everything on record."""

from pathlib import Path
from typing import Annotated

import typer

from wheretolearn.cli.common import find_runs
from wheretolearn.errors import UserError
from wheretolearn.reproduce.protocols import PROTOCOLS
from wheretolearn.storage import atomic_write

PAGE = Path("report.html")
RECORDS = Path("results")


def report(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Folder of a run, or a folder of runs, of any protocol."),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(help="Folder of records; default: results. With RUNs, this puts both on one page."),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write.")] = PAGE,
    keep_curves: Annotated[
        bool,
        typer.Option(help="Keep the RUNs' sparsities over time with the records, for figures of later pages."),
    ] = False,
) -> None:
    """Write one self-contained page: the paper's tables and figures from records, or all about given runs.

    Without a RUN, the page has every table of the paper with our numbers beside it, and its figures as far as they are
    on record. With RUNs, it has their training curves, sparsities, accuracies, masks and settings. A run that is not
    finished is drawn as far as it is.
    """
    # Here, so that other commands do not wait for matplotlib.
    from wheretolearn.report.curves import curves_of, save_curves
    from wheretolearn.report.records import record_page
    from wheretolearn.report.runs import run_sections
    from wheretolearn.report.sections import report_page

    if out.is_dir():
        raise UserError(f"{out} is a folder: give -o a file, such as {out / PAGE}")
    if not out.absolute().parent.is_dir():
        raise UserError(f"cannot write {out}: there is no folder {out.parent}")
    found = find_runs(paths or [], lambda path, runs: runs)
    for run in found:
        if run.protocol not in PROTOCOLS:
            raise UserError(f"{run.path} is a run of the protocol {run.protocol}, which `report` does not know")
    if keep_curves and not found:
        raise UserError("--keep-curves needs the runs whose curves to keep")
    sections = run_sections(found, _note) if found else []
    if found and records is None:
        title = f"Report on {found[0].path.name}" if len(found) == 1 else f"Report on {len(found)} runs"
        text = report_page(title, "What these runs measured, how they learned, and how they were made.", sections)
    else:
        text = record_page(records or RECORDS, sections, curves_of(found))
    with atomic_write(out) as file:
        file.write(text.encode())
    typer.echo(f"wrote {out} ({len(text.encode()) / 1e6:.1f} MB)")
    if keep_curves:
        for path in save_curves(found, records or RECORDS):
            typer.echo(f"wrote {path}")


def _note(text: str) -> None:
    typer.echo(f"note: {text}", err=True)
