"""Using a finished run: its model and mask, measured on new tasks."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from wheretolearn.config import from_dict
from wheretolearn.data import glyphs
from wheretolearn.data.image_set import ImageSplit
from wheretolearn.data.load import load_set
from wheretolearn.engine.choose import make_evaluator
from wheretolearn.engine.task import Task
from wheretolearn.engine.task import accuracy as accuracy_of
from wheretolearn.errors import DataError, UserError
from wheretolearn.fewshot.config import CHANGEABLE_ONCE_TRAINED, FewShotConfig
from wheretolearn.fewshot.learner import new_learner
from wheretolearn.fewshot.tasks import TaskSource, split_of
from wheretolearn.fewshot.training import finished
from wheretolearn.masks import GradientMask
from wheretolearn.masks import load as load_mask
from wheretolearn.runs import checkpoint
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import confidence_interval
from wheretolearn.storage import cannot_write, check_shapes, load_weights, write_json

KEPT = "evaluations"  # the folder in a run's that holds what was measured


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on test tasks: the mean, and half the width of its 95 % interval over tasks."""

    data: str
    split: str
    steps: int
    accuracy: float
    half_width: float
    task_accuracies: tuple[float, ...]
    models: int = 1  # of an ensemble
    precision: str = "float32"

    @property
    def what(self) -> str:
        return f"{self.data}/{self.split}" + (f", ensemble of {self.models}" if self.models > 1 else "")

    def sentence(self) -> str:
        return (
            f"{self.what}: {self.accuracy:.2%} +- {self.half_width:.2%} "
            f"({len(self.task_accuracies)} tasks, {self.steps} inner steps)"
        )


def load_trained(run: RunFolder, device: str = "cpu") -> tuple[FewShotConfig, nn.Module, GradientMask]:
    """The best model of a finished run, and its mask."""
    config = from_dict(FewShotConfig, run.config, where=str(run.path))
    learner = new_learner(config, trained_image_shape(run), run.seed, device)
    return config, learner.model, _load_into(learner.model, run.path)


def _about_model(run: RunFolder) -> Mapping[str, str]:
    """What the file of a finished run's model says of it; run.json must have the settings that it was trained with."""
    if not finished(run):
        raise UserError(f"{run.path} is not finished: go on with `wheretolearn resume {run.path}`")
    _, about = load_weights(run.path / "model.safetensors")
    identity = json.loads(about.get("identity", "{}"))  # early versions did not store it
    checkpoint.check_identity(run, identity, FewShotConfig, CHANGEABLE_ONCE_TRAINED, what="model")
    return about


def _load_into(model: nn.Module, folder: Path) -> GradientMask:
    """Give a model the weights in a folder; returns the mask there."""
    path = folder / "model.safetensors"
    tensors, _ = load_weights(path)
    own = model.state_dict()
    check_shapes({n: t.shape for n, t in tensors.items()}, {n: t.shape for n, t in own.items()}, path)
    model.load_state_dict(tensors)
    return load_mask(folder / "mask.safetensors", model)


def best_folders(run: RunFolder) -> list[Path]:
    """Where the best models of a finished run lie, by validation accuracy, the best first."""
    found = [path for path in (run.path / "best").glob("*") if path.name.isdigit()]
    return [run.path, *sorted(found, key=lambda path: int(path.name))]


def trained_image_shape(run: RunFolder) -> tuple[int, int, int]:
    """Height, width and channels of the images that a finished run learned from."""
    config = from_dict(FewShotConfig, run.config, where=str(run.path))
    return _image_shape(config, _about_model(run))


def _image_shape(config: FewShotConfig, about: Mapping[str, str]) -> tuple[int, int, int]:
    """As the model's file says; early versions did not store it, and their runs need the image set."""
    if "image_shape" in about:
        height, width, channels = json.loads(about["image_shape"])
    else:
        height, width, channels = split_of(load_set(config.data), config.train_split).images.shape[1:]
    return height, width, channels


def held_out_splits(run: RunFolder, data: str | None = None) -> list[str]:
    """The splits of a set, by default the run's own, but for those that the run trained and validated on."""
    config = from_dict(FewShotConfig, run.config, where=str(run.path))
    images = load_set(config.data if data is None else data)
    found = [name for name in images.splits if name not in (config.train_split, config.validation_split)]
    if not found:
        raise DataError(
            f"the set {images.name} has no split that the run left out; "
            f"name one of those it has: {', '.join(images.splits)}"
        )
    return found


def planned(run: RunFolder, data: str, split: str, steps: int | None = None, ensemble: bool = False) -> Evaluation:
    """What `evaluate_run` would measure, with nothing measured yet; what it cannot measure fails here at once."""
    config = from_dict(FewShotConfig, run.config, where=str(run.path))
    _about_model(run)
    steps = _inner_steps(run, config, steps)
    models = len(_measured_folders(run, ensemble))
    TaskSource(_measured_split(run, data, split), config.episode, run.seed, "test")
    _check_can_keep(run)
    return Evaluation(data, split, steps, accuracy=0.0, half_width=0.0, task_accuracies=(), models=models)


def _inner_steps(run: RunFolder, config: FewShotConfig, steps: int | None) -> int:
    if config.head == "ridge" and steps:
        raise UserError(
            f"{run.path} solves its head on the support images and takes no inner steps: --steps can only be 0"
        )
    return config.test_inner_steps if steps is None else steps


def _measured_folders(run: RunFolder, ensemble: bool) -> list[Path]:
    folders = best_folders(run) if ensemble else [run.path]
    if ensemble and len(folders) == 1:
        raise UserError(
            f"{run.path} has kept one model, which makes no ensemble: train with keep_best=3 and several validations"
        )
    for folder in folders:
        for name in ("model.safetensors", "mask.safetensors"):
            if not (folder / name).is_file():
                raise UserError(f"{folder / name} is missing: bring it back, or train again")
    return folders


def _measured_split(run: RunFolder, data: str, split: str) -> ImageSplit:
    """A split whose images have the shape of those that the run learned from."""
    chosen = split_of(load_set(data), split)
    shape = trained_image_shape(run)
    if chosen.images.shape[1:] != shape:
        size, _, channels = shape
        add = f"wheretolearn data add my-{data} PATH --size {size} --channels {channels}"
        raise DataError(
            f"{chosen.name} has images of {_size(chosen.images.shape[1:])}, the model was trained on {_size(shape)}"
            + ("" if data == glyphs.NAME else f": add a copy at that size from its class folders, `{add}`")
        )
    return chosen


def _check_can_keep(run: RunFolder) -> None:
    folder = run.path / KEPT
    if reason := cannot_write(folder):
        raise UserError(f"cannot keep results in {folder}: {reason}; evaluate a copy of the run")


def evaluate_run(
    run: RunFolder,
    split: str,
    *,
    data: str | None = None,
    tasks: int = 300,
    steps: int | None = None,
    ensemble: bool = False,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    notify: Callable[[str], None] | None = None,
    keep: bool = True,
) -> Evaluation:
    """Measure a finished run on tasks of a split, of its own set or another; the run's folder keeps the record.

    With ``ensemble`` the predicted probabilities are the mean over the best models that the run has kept. Without
    ``keep`` the record is left to ``keep_evaluation``.
    """
    config, model, mask = load_trained(run, device)
    data = config.data if data is None else data
    steps = _inner_steps(run, config, steps)
    chosen = _measured_split(run, data, split)
    folders = _measured_folders(run, ensemble)
    if keep:
        _check_can_keep(run)
    source = TaskSource(chosen, config.episode, run.seed, "test", device)
    precision = config.precision if device.startswith("cuda") else "float32"  # a CPU has no other
    kind = config.engine if device.startswith("cuda") or config.engine == "eager" else "auto"  # nor a GPU's engines
    evaluator = make_evaluator(model, mask, config.inner, kind=kind, precision=precision, notify=notify)
    if not ensemble:
        accuracies = evaluator.accuracies(_reported(source.tasks(0, tasks), progress, 0, tasks), steps)
    else:
        probabilities = []
        for number, folder in enumerate(folders):
            mask.load_tensors(_load_into(model, folder).tensors())  # in place: the evaluator measures these two
            counted = _reported(source.tasks(0, tasks), progress, number * tasks, len(folders) * tasks)
            probabilities.append(evaluator.probabilities(counted, steps))
        labels = next(source.tasks(0, 1)).query_labels  # the same in every task
        accuracies = accuracy_of(torch.stack(probabilities).mean(0), labels)
    values = accuracies.tolist()
    mean, half_width = confidence_interval(values)
    result = Evaluation(data, split, steps, mean, half_width, tuple(values), len(folders), precision)
    if keep:
        keep_evaluation(run, result)
    return result


def keep_evaluation(run: RunFolder, result: Evaluation) -> None:
    """Write what was measured into the run's folder."""
    name = f"{result.data}-{result.split}-{len(result.task_accuracies)}-tasks-{result.steps}-steps"
    if result.models > 1:
        name += f"-ensemble-of-{result.models}"
    folder = run.path / KEPT
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot keep results in {folder}: {error.strerror}; evaluate a copy of the run") from error
    write_json(folder / f"{name}.json", asdict(result))


def _reported(
    tasks: Iterable[Task], progress: Callable[[int, int], None] | None, before: int, total: int
) -> Iterator[Task]:
    for done, task in enumerate(tasks, start=before):
        if progress is not None:
            progress(done, total)
        yield task


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
