"""Using a finished run: its model and mask, measured on new tasks."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from torch import nn

from wheretolearn.config import from_dict
from wheretolearn.data.load import load_set
from wheretolearn.engine.choose import make_evaluator
from wheretolearn.engine.task import Task
from wheretolearn.errors import DataError, UserError
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.fewshot.tasks import TaskSource, split_of
from wheretolearn.fewshot.training import new_learner
from wheretolearn.masks import GradientMask
from wheretolearn.masks import load as load_mask
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import confidence_interval
from wheretolearn.storage import check_shapes, load_weights, write_json


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on test tasks: the mean, and half the width of its 95 % interval over tasks."""

    data: str
    split: str
    steps: int
    accuracy: float
    half_width: float
    task_accuracies: tuple[float, ...]

    def sentence(self) -> str:
        return (
            f"{self.data}/{self.split}: {self.accuracy:.2%} +- {self.half_width:.2%} "
            f"({len(self.task_accuracies)} tasks, {self.steps} inner steps)"
        )


def load_trained(run: RunFolder, device: str = "cpu") -> tuple[FewShotConfig, nn.Module, GradientMask]:
    """The best model of a finished run, and its mask."""
    config = from_dict(FewShotConfig, run.config, where=str(run.path))
    shape = split_of(load_set(config.data), config.train_split).images.shape[1:]
    learner = new_learner(config, shape, run.seed, device)
    path = run.path / "model.safetensors"
    if not path.exists():
        raise UserError(f"{run.path} is not finished: go on with `wheretolearn resume {run.path}`")
    tensors, _ = load_weights(path)
    own = learner.model.state_dict()
    check_shapes({n: t.shape for n, t in tensors.items()}, {n: t.shape for n, t in own.items()}, path)
    learner.model.load_state_dict(tensors)
    return config, learner.model, load_mask(run.path / "mask.safetensors", learner.model)


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


def evaluate_run(
    run: RunFolder,
    split: str,
    *,
    data: str | None = None,
    tasks: int = 300,
    steps: int | None = None,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Measure a finished run on tasks of a split, of its own set or another; the run's folder keeps the record."""
    config, model, mask = load_trained(run, device)
    data = config.data if data is None else data
    steps = config.test_inner_steps if steps is None else steps
    chosen = split_of(load_set(data), split)
    own = split_of(load_set(config.data), config.train_split)
    if chosen.images.shape[1:] != own.images.shape[1:]:
        raise DataError(
            f"{chosen.name} has images of {_size(chosen.images.shape)}, the model was trained on "
            f"{_size(own.images.shape)}: add the set again at that size"
        )
    folder = run.path / "evaluations"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot keep results in {folder}: {error.strerror}; evaluate a copy of the run") from error
    source = TaskSource(chosen, config.episode, run.seed, "test", device)
    evaluate = make_evaluator(model, mask, config.inner, kind=config.engine, precision=config.precision)
    values = evaluate(_reported(source.tasks(0, tasks), tasks, progress), steps).tolist()
    mean, half_width = confidence_interval(values)
    result = Evaluation(data, split, steps, mean, half_width, tuple(values))
    write_json(folder / f"{data}-{split}-{tasks}-tasks-{steps}-steps.json", asdict(result))
    return result


def _reported(tasks: Iterable[Task], total: int, progress: Callable[[int, int], None] | None) -> Iterator[Task]:
    for done, task in enumerate(tasks):
        if progress is not None:
            progress(done, total)
        yield task


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape[1:]))
