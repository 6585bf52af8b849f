"""Streams of tasks for continual and online learning: what is shown and when, as index tensors.

Every function here depends on its arguments alone, the seed among them, and copies no image. Nothing depends
on the learner, so a whole run is known before it starts. Tensors are on the CPU.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wheretolearn.data.episodes import Offsets, checked_offsets
from wheretolearn.data.random_bits import distinct, permutation, permutation_keys, uniform
from wheretolearn.data.transforms import rotate
from wheretolearn.errors import ConfigError, DataError

Transform = Callable[[Tensor], Tensor]
ClassOrder = Literal["fixed", "shuffled"]


@dataclass(frozen=True, eq=False)
class Rotation:
    """Turns flattened square images ``[N, pixels]`` counter-clockwise."""

    degrees: float

    def __call__(self, images: Tensor) -> Tensor:
        side = math.isqrt(images.shape[-1])
        if images.ndim != 2 or side * side != images.shape[1]:
            raise DataError(f"only flattened square images [N, pixels] can be turned, not {list(images.shape)}")
        return rotate(images.reshape(-1, side, side), self.degrees).reshape(images.shape)


@dataclass(frozen=True, eq=False)
class Permutation:
    """Reorders flattened images ``[N, pixels]``: pixel i of the result is pixel ``order[i]`` of the image."""

    order: Tensor  # [pixels]

    def __call__(self, images: Tensor) -> Tensor:
        return images[:, self.order.to(images.device)]


def unchanged(images: Tensor) -> Tensor:
    """The transform of a task that shows images as they are."""
    return images


@dataclass(frozen=True, eq=False)
class Task:
    """Which training images one task shows, in order, and what it does to them and to every test image."""

    train_indices: Tensor  # [examples]
    transform: Transform = unchanged
    classes: tuple[int, ...] = ()  # the classes that occur in it; () for all


def rotations(images: int, *, tasks: int = 20, examples: int = 1000, seed: int) -> list[Task]:
    """MNIST rotations: task t turns every image by one angle, uniform in [t, t + 1) * 180 / tasks degrees.

    Each task shows ``examples`` of the ``images`` training images, drawn without replacement, each task
    anew, and is tested on all test images, turned by the same angle.
    """
    indices = _examples(images, tasks, examples, seed, "rotations")
    # A single-precision draw plus a small integer is exact in double: no angle rounds up to the next task's.
    draws = uniform((tasks,), seed, "rotations", "angles").to(torch.float64)
    degrees = ((torch.arange(tasks) + draws) * (180 / tasks)).tolist()
    return [Task(chosen, Rotation(angle)) for chosen, angle in zip(indices, degrees, strict=True)]


def permutations(images: int, *, tasks: int = 20, examples: int = 1000, pixels: int = 784, seed: int) -> list[Task]:
    """MNIST permutations: each task, the first too, shuffles the pixels of all images in its own way.

    Training and test images as in ``rotations``. "Many permutations" is 100 tasks of 200 examples.
    """
    indices = _examples(images, tasks, examples, seed, "permutations")
    orders = permutation_keys((tasks, pixels), seed, "permutations", "orders").argsort(dim=1)
    return [Task(chosen, Permutation(order)) for chosen, order in zip(indices, orders, strict=True)]


def split_classes(
    labels: npt.NDArray[np.integer] | Tensor,
    *,
    classes_per_task: int = 2,
    seed: int,
    order: ClassOrder = "fixed",
) -> list[Task]:
    """Class-incremental split: tasks of disjoint classes, each image exactly once, shuffled within its task.

    ``fixed`` takes the classes in the order of their labels (0 and 1, then 2 and 3, ...), ``shuffled`` in an
    order drawn from the seed.
    """
    if order not in get_args(ClassOrder):
        raise ConfigError(f"unknown class order {order!r}; choose one of {', '.join(get_args(ClassOrder))}")
    label_of = torch.as_tensor(labels).to(device="cpu", dtype=torch.int64)
    classes = torch.from_numpy(np.unique(label_of))
    if classes_per_task < 1 or len(classes) % classes_per_task:
        raise ConfigError(f"{len(classes)} classes cannot be split into tasks of {classes_per_task}; choose a divisor")
    if order == "shuffled":
        classes = classes[permutation(len(classes), seed, "split", "classes")]
    tasks = []
    for number, group in enumerate(classes.reshape(-1, classes_per_task)):
        members = torch.isin(label_of, group).nonzero().flatten()
        shuffled = members[permutation(len(members), seed, "split", "images", number)]
        tasks.append(Task(shuffled, classes=tuple(group.tolist())))
    return tasks


@dataclass(frozen=True, eq=False)
class Batches:
    """What a continual learner sees, batch by batch.

    Tasks come one after another. Each task's images are shuffled and cut into batches, anew in each epoch;
    those that do not fill a last batch are left out of that epoch. A learner looks at each batch ``glances``
    times before the next arrives, each time in another order.
    """

    indices: Tensor  # [batches, glances, batch]: positions in the training images
    task: Tensor  # [batches]
    epoch: Tensor  # [batches]; only batches of epoch 0 are new to the learner


def batches(tasks: Sequence[Task], *, batch: int = 10, glances: int = 1, epochs: int = 1, seed: int) -> Batches:
    """The batches of a stream of tasks, in order."""
    if batch < 1 or glances < 1 or epochs < 1:
        raise ConfigError(f"batch, glances and epochs must be at least 1, not {batch}, {glances} and {epochs}")
    if not tasks:
        raise ConfigError("batches need at least 1 task")
    rows, task_of, epoch_of = [], [], []
    for number, task in enumerate(tasks):
        whole = len(task.train_indices) // batch
        if whole == 0:
            raise DataError(f"task {number} has {len(task.train_indices)} images, fewer than one batch of {batch}")
        for epoch in range(epochs):
            order = permutation(len(task.train_indices), seed, "batches", number, epoch)[: whole * batch]
            rows.append(task.train_indices[order].reshape(whole, 1, batch))
            task_of.append(torch.full((whole,), number))
            epoch_of.append(torch.full((whole,), epoch))
    shown = torch.cat(rows)
    turns = permutation_keys((len(shown), glances, batch), seed, "glances").argsort(dim=-1)
    return Batches(
        indices=shown.expand(-1, glances, -1).gather(-1, turns),
        task=torch.cat(task_of),
        epoch=torch.cat(epoch_of),
    )


@dataclass(frozen=True, eq=False)
class OnlineStream:
    """An OSAKA stream: one batch per step, from a task that changes at unknown times.

    Before each step after the first, the task changes with probability 1 - p. A new task draws its source (it
    may be the same one again), then ``ways`` of that source's classes in random order, which gives them their
    labels; where the source has no more classes than that, only the order is new. Every step shows ``shots``
    images of each class, drawn afresh without replacement. Images are grouped by label, alike in all steps.
    """

    source: Tensor  # [steps]: which source the images are from
    switched: Tensor  # [steps], bool: a new task begins here; true for the first step
    images: Tensor  # [steps, ways * shots]: positions in that source's images
    labels: Tensor  # [ways * shots]
    classes: Tensor  # [steps, ways]: the source's class behind each label


def osaka(
    sources: Sequence[Offsets],
    *,
    p: float,
    steps: int = 10_000,
    weights: Sequence[float] = (0.5, 0.25, 0.25),
    ways: int = 10,
    shots: int = 5,
    seed: int,
    names: Sequence[str] | None = None,
) -> OnlineStream:
    """Draw an OSAKA stream from several sources, each given by its class offsets.

    ``p`` is the probability to stay with a task from one step to the next; ``weights`` are the probabilities
    of the sources (Omniglot, MNIST and FashionMNIST in the paper). A shorter stream is the beginning of a
    longer one.
    """
    if not 0 <= p <= 1 or steps < 1:
        raise ConfigError(f"a stream needs p between 0 and 1 and at least 1 step, not {p} and {steps}")
    if not sources:
        raise ConfigError("a stream needs at least 1 source")
    if names is not None and len(names) != len(sources):
        raise ConfigError(f"names must be {len(sources)}, one per source, not {len(names)}")
    if len(weights) != len(sources) or min(weights) < 0 or not math.isclose(sum(weights), 1, abs_tol=1e-6):
        raise ConfigError(f"weights must be {len(sources)} probabilities, one per source, that sum to 1, not {weights}")
    offsets = [
        checked_offsets(given, ways, shots, names[number] if names else f"source {number}")
        for number, given in enumerate(sources)
    ]
    switched = uniform((steps,), seed, "osaka", "switch") >= p
    switched[:1] = True
    task = switched.cumsum(0) - 1
    changes = int(switched.sum())

    bounds = torch.tensor(weights, dtype=torch.float32).cumsum(0)[:-1]
    source_of_task = torch.bucketize(uniform((changes,), seed, "osaka", "source"), bounds, right=True)
    class_counts = torch.tensor([len(given) - 1 for given in offsets])
    classes_of_task = distinct(class_counts[source_of_task], ways, seed, "osaka", "classes")

    # All sources' classes in one list, so that steps of different sources are drawn together.
    first_class = class_counts.cumsum(0) - class_counts
    first_image = torch.cat([given[:-1] for given in offsets])
    class_sizes = torch.cat([given.diff() for given in offsets])
    source, classes = source_of_task[task], classes_of_task[task]
    entries = first_class[source].unsqueeze(1) + classes
    places = distinct(class_sizes[entries], shots, seed, "osaka", "images")
    return OnlineStream(
        source=source,
        switched=switched,
        images=(first_image[entries].unsqueeze(-1) + places).flatten(1),
        labels=torch.arange(ways).repeat_interleave(shots),
        classes=classes,
    )


def _examples(images: int, tasks: int, examples: int, seed: int, stream: str) -> list[Tensor]:
    """For each task, ``examples`` different indices below ``images``, in random order."""
    if tasks < 1 or examples < 1:
        raise ConfigError(f"a stream needs at least 1 task and 1 example, not {tasks} and {examples}")
    if examples > images:
        raise DataError(f"examples={examples} cannot be drawn from {images} training images: ask for fewer")
    return [
        permutation_keys((images,), seed, stream, "images", task).topk(examples, largest=False).indices
        for task in range(tasks)
    ]
