"""``wheretolearn reproduce``: run the paper's tables and figures, and see how the numbers compare."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from wheretolearn.cli.common import Device, TensorBoard, Workers, check_open_files, chosen_device, set_threads
from wheretolearn.cli.progress import announce_stop, latest_values, progress_bar
from wheretolearn.data import glyphs
from wheretolearn.data.load import load_set
from wheretolearn.engine.graphed import Precision
from wheretolearn.errors import ConfigError
from wheretolearn.presets import Preset, Scale, scale_named
from wheretolearn.reproduce.cells import Cell, Found, cells_named, default_seeds, load_records, look_up
from wheretolearn.reproduce.markdown import page
from wheretolearn.reproduce.plan import Plan, Training, check_data, check_records, check_runs, estimate, make_plan
from wheretolearn.reproduce.run import Watch, carry_out, runs_at_once
from wheretolearn.runs import environment
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import ResultRecord, duration
from wheretolearn.storage import atomic_write


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE-OR-FIGURE]...", help="table5, tableS7, figure3 ..., or rows such as table5.sparse-la-maml."
        ),
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", help="Only rows with this in their name, as often as needed: la-maml, rotations."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Runs of each setting, seeds from 0; default: the paper's number; quick: 2 to 5.", min=1),
    ] = None,
    scale: Annotated[str, typer.Option(help="paper, or quick: small versions for a laptop.")] = "paper",
    device: Device = "auto",
    precision: Annotated[
        str | None,
        typer.Option(
            help="On a GPU: float32, tf32, bfloat16 or float16, the fastest; methods that cannot have it take tf32. "
            "Default: the preset's; records tell any other."
        ),
    ] = None,
    workers: Workers = None,
    runs: Annotated[Path | None, typer.Option(help="Folder of the runs; default: runs/reproduce/SCALE.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="Folder of the records; default: results, for quick: results/quick.")
    ] = None,
    tensorboard: TensorBoard = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Record anew what is recorded. Runs in --runs are used: for new ones choose a new folder."
        ),
    ] = False,
    show: Annotated[
        bool, typer.Option("--list", help="Show every cell: paper, ours, seeds, verdict. Run nothing.")
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the page of all cells at paper scale to this file. Run nothing.")
    ] = None,
) -> None:
    """Run what is missing for a table or figure of the paper, record it, and compare.

    A cell is recorded when there is a record of its settings, made by the same version of wheretolearn, with the seeds
    asked for; it is not run again. Stop with Ctrl-C, or kill it: the same command goes on where it was, and ends with
    the same records. Runs of several cells are shared: Table S5 is measured on the runs of Table 5.

    A number matches the paper's within two of the paper's standard deviations; where it gives none, within two of ours
    or one point, whichever is more.
    """
    chosen_scale = scale_named(scale)
    folder = record or Path("results" if chosen_scale == "paper" else "results/quick")
    if markdown is not None:
        _write_page(markdown, folder, chosen_scale, [*(names or []), *(rows or [])])
        return
    cells = cells_named(names or [], rows or [], chosen_scale)
    if show:
        _print_cells(look_up(cells, load_records(folder), chosen_scale))
        return
    if not names:
        raise ConfigError("name a table or figure, such as table5; `wheretolearn reproduce --list` shows them all")
    device = chosen_device(device)
    set_threads(1 if device == "cpu" else None)
    chosen_precision = None if precision is None else _precision_named(precision, device)
    at_once = workers or environment.cores()
    place = runs or Path("runs/reproduce") / chosen_scale
    records = load_records(folder)
    plan = make_plan(
        cells,
        records,
        lambda table: seeds or default_seeds(table, chosen_scale),
        chosen_scale,
        place,
        again,
        chosen_precision,
    )
    _print_plan(plan, records, at_once, device, place, folder)
    if plan.trainings:
        check_data(plan)
        check_runs(plan)
        check_records(plan, records, folder)
        _check_open_files(plan, device, at_once, tensorboard)
        with progress_bar("drawing the glyphs set (once)") as tick:
            if any(glyphs.NAME in training.image_sets for training in plan.trainings):
                load_set(glyphs.NAME, tick)
        started = time.monotonic()
        try:
            with _watching(plan) as watch:
                carry_out(plan, folder, device, at_once, watch, tensorboard=tensorboard)
        finally:  # also where some failed or were stopped
            _print_cells(look_up(cells, load_records(folder), chosen_scale))
        typer.echo(f"done in {duration(time.monotonic() - started)}; records are in {folder}")
    else:
        _print_cells(plan.found)


def _precision_named(name: str, device: str) -> Precision:
    known: dict[str, Precision] = {one: one for one in get_args(Precision)}
    if name not in known:
        raise ConfigError(f"--precision must be one of {', '.join(known)}, not {name!r}")
    if device == "cpu":
        raise ConfigError(f"--precision {name} is for a GPU: leave it out on a CPU, which computes in float32")
    return known[name]


def _check_open_files(plan: Plan, device: str, workers: int, tensorboard: bool) -> None:
    begun = [own.place(seed) for own in plan.trainings for seed, state in own.states().items() if state == "begun"]
    event_files = tensorboard or any(RunFolder.open(place).tensorboard for place in begun)
    claims = len(plan.trainings)  # a lock for each
    check_open_files(runs_at_once(plan, device), device, workers, event_files, others=claims)


def _write_page(path: Path, folder: Path, scale: Scale, names: Sequence[str]) -> None:
    if scale != "paper" or names:
        raise ConfigError("--markdown writes the page of all cells at paper scale: leave out names, --rows and --scale")
    with atomic_write(path) as file:
        file.write(page(load_records(folder)).encode())
    typer.echo(f"wrote {path}")


def _print_plan(
    plan: Plan, records: Sequence[ResultRecord], workers: int, device: str, place: Path, folder: Path
) -> None:
    """What is there, what is to do, and how long that may take."""
    counts = {status: sum(own.status == status for own in plan.found) for status in ("recorded", "stale", "not run")}
    typer.echo(
        f"{len(plan.found)} cells: " + ", ".join(f"{count} {status}" for status, count in counts.items()), err=True
    )
    if not plan.trainings:
        typer.echo(f"nothing to run: all is recorded in {folder} (--again records it anew)", err=True)
        return
    typer.echo(
        f"{len(plan.trainings)} trainings: {plan.count('missing')} runs to do, {plan.count('begun')} to resume, "
        f"{plan.count('finished')} finished, in {place}",
        err=True,
    )
    if told := _precisions(plan):
        typer.echo(f"precision: {told}", err=True)
    found = estimate(plan, records, workers, device)
    where = f"{workers} processes" if device == "cpu" else device
    long = "unknown" if found.seconds is None else f"about {duration(found.seconds)} with {where}"
    typer.echo(f"time: {long} ({found.basis})", err=True)


def _precisions(plan: Plan) -> str:
    """In how many trainings another precision than the presets' was asked for, and had."""
    had = Counter(own.config(own.seeds[0]).precision for own in plan.trainings if own.chooses_precision)
    return ", ".join(f"{precision} for {count} trainings" for precision, count in had.items())


def _print_cells(found: Sequence[Found]) -> None:
    console = Console()
    # In less, columns would cut words and verdicts; a terminal wraps long lines by itself.
    console.width = max(console.width, 80)
    for name in dict.fromkeys(own.cell.table for own in found):
        # Without borders the longest rows of most tables fit 80 columns.
        table = Table(title=f"\n{name}", title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
        _add_columns(table, ("row", "measure", "paper", "ours", "seeds", "verdict"))
        for own in found:
            if own.cell.table == name:
                table.add_row(*_row(own.cell, own))
        console.print(table)


def _add_columns(table: Table, headings: Sequence[str]) -> None:
    for heading in headings:
        table.add_column(
            heading,
            no_wrap=heading in ("paper", "ours"),
            min_width=len("recorded") if heading == "verdict" else None,
            justify="right" if heading in ("paper", "ours", "seeds") else "left",
            overflow="fold",
        )


def _row(cell: Cell, own: Found) -> list[str]:
    record = own.record
    paper = "" if cell.paper is None else _number(cell.paper.value, cell.paper.std)
    ours = "" if record is None or record.mean is None else _number(record.mean, record.std)
    seeds = "" if record is None else str(len(record.seeds))
    verdict = f"stale: {own.stale}" if own.status == "stale" else own.verdict or own.status
    return [cell.preset.name.partition(".")[2], cell.measure, paper, ours, seeds, verdict]


def _number(value: float, std: float | None) -> str:
    return f"{value:.2f}" + ("" if std is None else f" ± {std:.2f}")


@contextmanager
def _watching(plan: Plan) -> Iterator[Watch]:
    """A table that changes as runs go on; plain lines where there is no terminal."""
    console = Console(stderr=True)
    board = _Board(plan, console)
    if not console.is_terminal:
        lines = _Lines(board)
        yield Watch(lines.step, lines.stage, lines.recorded, lines.note, announce_stop)
        return
    notes: set[str] = set()
    with Live(get_renderable=board.table, console=console, refresh_per_second=2) as live:

        def note(text: str) -> None:
            if text not in notes:
                notes.add(text)
                live.console.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)

        yield Watch(board.step, board.stage, board.recorded, note, announce_stop)


class _Board:
    """How far every training is."""

    def __init__(self, plan: Plan, console: Console):
        self.trainings, self._console, self._started = plan.trainings, console, time.monotonic()
        self._of = {training.place(seed): training for training in plan.trainings for seed in training.seeds}
        self._steps: dict[Training, dict[Path, int]] = {training: {} for training in plan.trainings}
        self._shown: dict[Training, str] = dict.fromkeys(plan.trainings, "")
        self._results: dict[Training, list[str]] = {training: [] for training in plan.trainings}

    def step(self, run: RunFolder, step: int, values: Mapping[str, Any]) -> None:
        training = self.training(run)
        self._steps[training][run.path] = step
        if text := latest_values(values):
            self._shown[training] = text

    def stage(self, training: Training, text: str) -> None:
        self._shown[training] = text

    def recorded(self, training: Training, preset: Preset, records: Sequence[ResultRecord]) -> None:
        self._results[training] += [result_line(preset, own) for own in records[:1]]

    def training(self, run: RunFolder) -> Training:
        return self._of[run.path]

    def table(self) -> Table:
        """Trainings at work come first, then those that wait: a terminal may be too low for all."""
        order = sorted(self.trainings, key=lambda training: (training.finished, not self._steps[training]))
        shown = order[: max(3, self._console.height - 8)]
        table = Table(title=f"{duration(time.monotonic() - self._started)} so far", title_justify="left")
        _add_columns(table, ("row", "steps", "seeds", "latest"))
        for training in shown:
            states = list(training.states().values())
            steps = self._steps[training]
            table.add_row(
                training.preset.name,
                str(max(steps.values())) if steps else "",
                f"{states.count('finished')} of {len(states)}",
                "; ".join(self._results[training]) or self._shown[training] or ("begun" if steps else "waiting"),
            )
        done = sum(training.finished for training in self.trainings)
        table.caption = f"{done} of {len(self.trainings)} trainings finished"
        return table


class _Lines:
    """A line for each thing that is worth one."""

    def __init__(self, board: _Board):
        self._board, self._started = board, time.monotonic()
        self._begun: set[Training] = set()
        self._notes: set[str] = set()

    def step(self, run: RunFolder, step: int, values: Mapping[str, Any]) -> None:
        training = self._board.training(run)
        if training not in self._begun:
            self._begun.add(training)
            self._say(f"{training.preset.name}: begun" + (f", from step {step}" if step > 1 else ""))

    def stage(self, training: Training, text: str) -> None:
        self._say(f"{training.preset.name}: {text}")

    def recorded(self, training: Training, preset: Preset, records: Sequence[ResultRecord]) -> None:
        self._say("; ".join([f"{preset.name}: recorded", *(result_line(preset, own) for own in records)]))

    def note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            self._say(f"note: {text}")

    def _say(self, text: str) -> None:
        typer.echo(f"{time.monotonic() - self._started:5.0f} s  {text}", err=True)


def result_line(preset: Preset, record: ResultRecord) -> str:
    paper = "" if record.paper_value is None else f" (paper {record.paper_value:.2f})"
    return f"{record.metric} {_number(record.mean or 0.0, record.std)}{paper}"
