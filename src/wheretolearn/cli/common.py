"""What the commands of all protocols share: options, devices, and the folders of runs."""

import os
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table

from wheretolearn.continual import training as continual_training
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.fewshot import training as fewshot_training
from wheretolearn.online import training as online_training
from wheretolearn.presets import Paper, list_presets
from wheretolearn.runs import environment
from wheretolearn.runs.folder import MAX_SEED, RunFolder, check_free
from wheretolearn.runs.tensorboard import check_installed

if sys.platform != "win32":
    import resource

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads; default: as many as the run was trained with on a CPU.", min=1)
]
Workers = Annotated[
    int | None, typer.Option(help="Processes for several runs on a CPU; default: as many as there are cores.", min=1)
]


def _check_tensorboard(wanted: bool) -> bool:
    if wanted:
        check_installed()
    return wanted


TensorBoard = Annotated[
    bool,
    typer.Option(
        "--tensorboard",
        callback=_check_tensorboard,
        help="Write event files for TensorBoard into the run's folder, also after `resume`.",
    ),
]

_FINISHED = {
    "fewshot": fewshot_training.finished,
    "continual": continual_training.finished,
    "online": online_training.finished,
}
FILES_PER_RUN = 2  # its lock and its metrics; TensorBoard's come on top
FILES_PER_WORKER = 3  # its standard input, output and error
SPARE_FILES = 32  # for all else: libraries, image sets, files that are open for a moment
# The command that starts runs of a protocol.
COMMANDS = {"fewshot": "train", "continual": "continual", "online": "online"}


def chosen_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        wanted: torch.device | None = torch.device(name)
    except RuntimeError:
        wanted = None
    if wanted is None or wanted.type not in ("cpu", "cuda"):
        raise ConfigError(f"there is no device called {name!r}: choose cpu, cuda or auto")
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("this machine has no GPU that PyTorch can use: choose --device cpu")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there is no GPU {wanted.index}: this machine has {torch.cuda.device_count()}, from cuda:0")
    return name


def threads_for(run: RunFolder, threads: int | None) -> int | None:
    """What is asked for; else as many as the run had, but no more than there are cores; None: PyTorch's own choice."""
    return threads or (run.threads and min(run.threads, environment.cores()))


def set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


def seed_range(seed: int, seeds: int) -> range:
    if seed + seeds - 1 > MAX_SEED:
        raise ConfigError(f"seeds end at {MAX_SEED}: {seeds} from {seed} are too many")
    return range(seed, seed + seeds)


def check_protocol(preset: str, protocol: str, expected: str) -> None:
    """Refuse a preset of another protocol, and say which command takes it."""
    if protocol != expected:
        known = COMMANDS.get(protocol)
        raise ConfigError(
            f"{preset} is a preset of the protocol {protocol}, which `{COMMANDS[expected]}` does not know"
            + (f": use `wheretolearn {known}`" if known else "")
        )


def all_named(presets: Sequence[str], seeds: int) -> list[str]:
    """Presets by name; the name of a group stands for all in it."""
    known = [preset.name for preset in list_presets()]
    names: dict[str, None] = {}
    for name in presets:
        group = [] if name in known else [other for other in known if other.startswith(f"{name}.")]
        if group:
            runs = f" of {seeds} seeds: {len(group) * seeds} runs" if seeds > 1 else f": {len(group)} runs"
            typer.echo(f"{name} is a group of {len(group)} presets{runs}", err=True)
        names |= dict.fromkeys(group or [name])
    return list(names)


def print_measures(rows: Iterable[tuple[str, Sequence[float], Paper | None]]) -> None:
    """A table of measures: the mean of their values, its standard deviation, and the paper's number beside it."""
    table = Table()
    for heading in ("measure", "here", "paper"):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "measure" else "right")
    for measure, values, paper in rows:
        std = statistics.stdev(values) if len(values) > 1 else None
        table.add_row(
            measure, _number(statistics.fmean(values), std), "" if paper is None else _number(paper.value, paper.std)
        )
    Console().print(table)


def _number(value: float, std: float | None) -> str:
    return f"{value:.2f}" + ("" if std is None else f" ± {std:.2f}")


def check_open_files(runs: int, device: str, workers: int | None, tensorboard: bool, others: int = 0) -> None:
    """Allow this process the files of so many runs, and others, or refuse them: some would be begun, and none trained.

    Workers inherit the limit, and one of them may have all the runs.
    """
    if sys.platform == "win32":  # which has no such limit
        return
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = min(runs, workers or environment.cores()) if device == "cpu" and runs > 1 else 0
    needed = runs * (FILES_PER_RUN + tensorboard) + processes * FILES_PER_WORKER + others + SPARE_FILES
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
    except (ValueError, OSError):
        raise UserError(
            f"{runs} runs keep up to {needed} files open at once, and this machine allows {most}: "
            "start fewer runs or workers at a time, or have the limit raised (`ulimit -Hn`)"
        ) from None


def free_places(
    run: Path | None, presets: Sequence[str | None], seeds: Sequence[int]
) -> dict[tuple[str | None, int], Path]:
    """Where new runs go: one into RUN itself, several into folders in it, named by preset and seed.

    Where no RUN was given, each preset has runs/PRESET.
    """
    several = len(presets) * len(seeds) > 1
    places = {}
    for name in presets:
        if run is None and name is None:
            raise ConfigError("give a folder for the run, or a --preset, after which it is named")
        place = run or Path("runs") / str(name)
        if several and (place / "run.json").exists():
            raise UserError(f"{place} is itself a run and cannot hold others: choose another folder")
        for seed in seeds:
            places[name, seed] = place / "-".join(filter(None, [name, f"seed{seed}"])) if several else place
    for place in places.values():
        if (place / "run.json").exists():
            command = shlex.join(["wheretolearn", "resume", str(place)])
            raise UserError(f"{place} already holds a run: go on with `{command}`, or choose another folder")
        check_free(place)
    return places


def finished(run: RunFolder) -> bool:
    return run.protocol in _FINISHED and _FINISHED[run.protocol](run)


def find_runs(paths: Sequence[Path], keep: Callable[[Path, list[RunFolder]], list[RunFolder]]) -> list[RunFolder]:
    """The runs that paths name, each once: a run itself, or of those within a folder the ones that ``keep`` returns."""
    found: dict[Path, RunFolder] = {}
    for path in paths:
        if (path / "run.json").exists() or not path.is_dir():
            inside = [RunFolder.open(path)]
        else:
            everything = [RunFolder.open(folder) for folder in _run_folders(path)]
            if not everything:
                raise UserError(f"{path} is not a run folder, and holds none")
            inside = keep(path, everything)
        for run in inside:
            found.setdefault(run.path.resolve(), run)
    return list(found.values())


def _run_folders(path: Path) -> list[Path]:
    """The run folders in a folder; where it has none, those of the least depth at which there are any."""
    level = [path]
    while level:
        inside = [entry for folder in level for entry in _folders(folder)]
        if found := [folder for folder in inside if os.access(folder / "run.json", os.F_OK)]:
            return sorted(found)
        level = [folder for folder in inside if not folder.is_symlink() and not folder.name.startswith(".")]
    return []


def _folders(path: Path) -> list[Path]:
    """Those in a folder; of one that must not be read, none."""
    try:
        return [entry for entry in path.iterdir() if entry.is_dir()]
    except PermissionError:
        return []


def runs_in(paths: Sequence[Path], wanted: Literal["finished", "unfinished"]) -> list[RunFolder]:
    """The runs that paths name: a run itself, or all those in a folder that are as wanted."""

    def as_wanted(path: Path, runs: list[RunFolder]) -> list[RunFolder]:
        inside = [run for run in runs if finished(run) == (wanted == "finished")]
        for run in runs:
            if run not in inside:
                typer.echo(f"{run.path}: {'finished' if finished(run) else 'not finished'}, left out", err=True)
        if not inside:
            raise UserError(f"{path} holds no run that is {wanted}")
        return inside

    found = find_runs(paths, as_wanted)
    for run in found:
        if run.protocol not in _FINISHED:
            raise UserError(f"{run.path} is a run of the protocol {run.protocol}, which this command does not know")
    return found


def labels_of(runs: Sequence[RunFolder]) -> dict[RunFolder, str]:
    """The names of runs, or their paths where names are not enough to tell them apart."""
    names = {run.path.name for run in runs}
    return {run: run.path.name if len(names) == len(runs) else str(run.path) for run in runs}
