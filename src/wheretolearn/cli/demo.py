"""``wheretolearn demo``: see a learned gradient mask in a few minutes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from wheretolearn.cli.progress import TrainingBars, announce_stop, progress_bar
from wheretolearn.data.load import load_set
from wheretolearn.runs.folder import MAX_SEED
from wheretolearn.storage import atomic_write

if TYPE_CHECKING:
    from wheretolearn.report.comparison import MethodResult


def demo(
    folder: Annotated[Path, typer.Option(help="Where the runs and the page go.")] = Path("demo"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget an earlier demo in that folder.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of both methods.", min=0, max=MAX_SEED)] = 0,
) -> None:
    """Meta-train sparse-MAML and MAML on drawn characters, compare them, and write a page to look at.

    Takes a few minutes on two cores and needs no download. Stop it with Ctrl-C; the same command goes on, but for
    --fresh, which starts anew.
    """
    # Here, so that other commands do not wait for matplotlib.
    from wheretolearn import demo as side_by_side
    from wheretolearn.report.comparison import comparison_page

    if fresh:
        side_by_side.forget(folder)
    with progress_bar("drawing the glyphs set (once)") as tick:
        load_set("glyphs", tick)
    runs = side_by_side.open_runs(folder, seed)
    if all(side_by_side.is_finished(run) for run in runs.values()):
        typer.echo(f"already trained in {folder} (--fresh trains again)", err=True)
    else:
        totals = {method: int(run.config["outer_steps"]) for method, run in runs.items()}
        with TrainingBars(totals) as bars:
            side_by_side.train_side_by_side(runs, bars.update, on_stop=announce_stop)
    results = side_by_side.results(runs)
    page = folder / "index.html"
    html = comparison_page(
        "Learning where to learn",
        "Two methods meta-learn the same network on the same tasks: five unknown characters, one example of each.",
        results,
        side_by_side.facts(runs),
    )
    with atomic_write(page) as file:
        file.write(html.encode())
    Console().print(_accuracy_table(results))
    Console().print(_sparsity_table(results))
    typer.echo(f"page: {page.resolve()}")


def _accuracy_table(results: list["MethodResult"]) -> Table:
    table = Table(title="5-way 1-shot accuracy (95 % interval over tasks)", title_justify="left")
    table.add_column("method")
    for what in results[0].accuracy:
        table.add_column(what, justify="right")
    table.add_column("sparsity", justify="right")
    table.add_column("training", justify="right")
    for result in results:
        accuracies = [f"{mean:.1%} +- {half_width:.1%}" for mean, half_width in result.accuracy.values()]
        table.add_row(result.name, *accuracies, f"{result.sparsity.overall:.1%}", f"{result.seconds:.0f} s")
    return table


def _sparsity_table(results: list["MethodResult"]) -> Table:
    table = Table(title="Share of weights that the inner loop never changes, by layer", title_justify="left")
    table.add_column("layer")
    for result in results:
        table.add_column(result.name, justify="right")
    for layer in results[0].sparsity.by_layer:
        table.add_row(layer, *(f"{result.sparsity.by_layer[layer]:.1%}" for result in results))
    return table
