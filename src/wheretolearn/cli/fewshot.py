"""``wheretolearn train``, ``resume`` and ``evaluate``: few-shot meta-learning."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from wheretolearn.cli.progress import TrainingBars, announce_stop, progress_bar
from wheretolearn.config import from_dict, merge, parse_overrides, to_dict
from wheretolearn.data.load import load_set
from wheretolearn.engine.choose import choose
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.fewshot import training
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.fewshot.tasks import check_images, split_of
from wheretolearn.fewshot.trained import evaluate_run, held_out_splits
from wheretolearn.presets import load_preset
from wheretolearn.runs.folder import MAX_SEED, RunFolder

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; small networks are fastest with 1.", min=1)]


def train(
    run: Annotated[Path, typer.Argument(help="Folder for the run; must be new or empty.")],
    preset: Annotated[str | None, typer.Option(help="Start from this preset; see `wheretolearn presets`.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting: KEY=VALUE, as often as needed; see `wheretolearn settings`."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.", min=0, max=MAX_SEED)] = 0,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Meta-train a model and its gradient mask. Stop it with Ctrl-C at any time; `resume` goes on exactly."""
    settings = {} if preset is None else load_preset(preset).settings
    where = "settings" if preset is None else f"preset {preset} with --set"
    config = from_dict(FewShotConfig, merge(settings, parse_overrides(overrides or [])), where=where)
    device = chosen_device(device)
    with progress_bar(f"preparing {config.data}") as tick:
        images = load_set(config.data, tick)
    check_images(config, images)
    # Whatever cannot be built must fail before the folder holds a run that can never start.
    shape = split_of(images, config.train_split).images.shape[1:]
    choose(training.new_learner(config, shape, seed, device).model, config.inner, config.engine, config.precision)
    with RunFolder.create(run, to_dict(config), seed, "fewshot") as folder:
        _continue(folder, device, threads)


def resume(
    run: Annotated[Path, typer.Argument(help="Folder of a run that was stopped or killed.")],
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Continue a run from its last checkpoint, as if it had never stopped."""
    with RunFolder.open(run) as folder:
        _continue(folder, device, threads)


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    splits: Annotated[
        list[str] | None,
        typer.Option(
            "--split",
            help="Split whose classes make the tasks, as often as needed; default: all but those of training.",
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Another image set (cross-domain); default: the run's own.")] = None,
    tasks: Annotated[int, typer.Option(help="Number of tasks.", min=2)] = 300,
    steps: Annotated[int | None, typer.Option(help="Inner steps; default: the run's test_inner_steps.", min=0)] = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Measure a trained model on new tasks: mean accuracy with its 95 % interval over tasks."""
    set_threads(threads)
    device = chosen_device(device)
    with RunFolder.open(run) as folder:
        for split in splits or held_out_splits(folder, data):
            with progress_bar(f"evaluating on {split}") as tick:
                result = evaluate_run(folder, split, data=data, tasks=tasks, steps=steps, device=device, progress=tick)
            typer.echo(result.sentence())


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


def set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


def _continue(folder: RunFolder, device: str, threads: int | None) -> None:
    set_threads(threads)
    if folder.protocol != "fewshot":
        raise UserError(f"{folder.path} is a run of the protocol {folder.protocol}, which this command cannot continue")
    total = from_dict(FewShotConfig, folder.config, where=str(folder.path)).outer_steps
    name = folder.path.name
    with TrainingBars({name: total}) as bars:
        learner = training.train(
            folder,
            lambda step, values: bars.update(name, step, values),
            device=chosen_device(device),
            on_stop=announce_stop,
        )
    for note in learner.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(
        f"{folder.path}: best validation accuracy {learner.best_accuracy:.1%} at step {learner.best_step}, "
        f"sparsity {learner.mask.sparsity().overall:.1%}"
    )
