"""What continual learners see, lane by lane: batches of a stream of tasks, and the test images of each task."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wheretolearn.continual.config import ContinualConfig
from wheretolearn.data.image_set import Images, ImageSet
from wheretolearn.data.load import load_set
from wheretolearn.data.random_bits import permutation
from wheretolearn.data.streams import Rotation, Task, batches, permutations, rotations, split_classes
from wheretolearn.data.transforms import as_input
from wheretolearn.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class Labelled:
    """Images ``[N, height, width, channels]``, uint8, and their classes."""

    images: Images
    labels: Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    inputs: Tensor  # [lanes, batch, ...]
    labels: Tensor  # [lanes, batch]
    task: int
    fresh: bool  # comes for the first time
    ends_task: bool


class Problem:
    """One stream per seed. All of it follows from settings and seeds; nothing here changes while learning."""

    def __init__(self, config: ContinualConfig, seeds: Sequence[int], device: str = "cpu"):
        self.config, self.seeds, self.device = config, list(seeds), torch.device(device)
        images = load_set(config.data)
        self.train, self.test, self.classes = train_and_test(images, config)
        # Test images lie sorted by class: any first few of them shall be a fair sample.
        order = permutation(len(self.test.labels), 0, "test images").numpy()
        self.test = Labelled(np.asarray(self.test.images)[order], self.test.labels[order])
        self.image_shape: tuple[int, int, int] = tuple(self.train.images.shape[1:])
        self._tasks = [self._tasks_of(seed) for seed in self.seeds]
        lengths = [[len(task.train_indices) for task in tasks] for tasks in self._tasks]
        if any(other != lengths[0] for other in lengths):
            raise ConfigError("these seeds have tasks of different lengths: run them one by one (class_order=shuffled)")
        # Positions within a task instead of images: what each lane's task shows is prepared when it begins.
        stand_ins = [Task(torch.arange(length)) for length in lengths[0]]
        shown = [batches(stand_ins, batch=config.batch, epochs=config.epochs, seed=seed) for seed in self.seeds]
        self._positions = torch.stack([one.indices[:, 0] for one in shown])  # [lanes, batches, batch]
        self._task_of, self._epoch_of = shown[0].task.tolist(), shown[0].epoch.tolist()
        self._prepared: tuple[int, Tensor, Tensor] | None = None
        self._turned: dict[tuple[int, int], Tensor] = {}

    @property
    def tasks(self) -> int:
        return len(self._tasks[0])

    @property
    def batches(self) -> int:
        return len(self._task_of)

    def batch(self, number: int) -> Batch:
        task = self._task_of[number]
        if self._prepared is None or self._prepared[0] != task:
            self._prepared = (task, *self._training_images(task))
        _, inputs, labels = self._prepared
        at = self._positions[:, number].to(self.device)
        lane = torch.arange(len(self.seeds), device=self.device).unsqueeze(1)
        last = number + 1 == self.batches or self._task_of[number + 1] != task
        return Batch(self._as_input(inputs[lane, at]), labels[lane, at], task, self._epoch_of[number] == 0, last)

    def test_set(self, lane: int, task: int, limit: int | None = None) -> tuple[Tensor, Tensor]:
        """Inputs ``[N, ...]`` and labels, all or the first few."""
        own = self._tasks[lane][task]
        images, labels = self.test.images, self.test.labels
        if own.classes:
            chosen = torch.isin(labels, torch.tensor(own.classes))
            images, labels = images[chosen.numpy()], labels[chosen]
        if isinstance(own.transform, Rotation):  # turning is slow, and each task is tested at least twice
            if (lane, task) not in self._turned:
                self._turned[lane, task] = self._shown(own, images)
            pixels = self._turned[lane, task][:limit]
        else:
            pixels = self._shown(own, images[:limit])
        return self._as_input(pixels.unsqueeze(0))[0], labels[:limit].to(self.device)

    def _tasks_of(self, seed: int) -> list[Task]:
        config, count = self.config, len(self.train.labels)
        pixels = int(np.prod(self.train.images.shape[1:]))
        if config.problem == "rotations":
            height, wide, channels = self.train.images.shape[1:]
            if height != wide or channels != 1:
                raise DataError(f"rotations need square images of one channel, not {height}x{wide}x{channels}")
            return rotations(count, tasks=config.tasks, examples=config.examples, seed=seed)
        if config.problem == "permutations":
            return permutations(count, tasks=config.tasks, examples=config.examples, pixels=pixels, seed=seed)
        return split_classes(
            self.train.labels, classes_per_task=config.classes_per_task, seed=seed, order=config.class_order
        )

    def _training_images(self, task: int) -> tuple[Tensor, Tensor]:
        inputs, labels = [], []
        for tasks in self._tasks:
            chosen = tasks[task].train_indices
            inputs.append(self._shown(tasks[task], self.train.images[chosen.numpy()]))
            labels.append(self.train.labels[chosen])
        return torch.stack(inputs), torch.stack(labels).to(self.device)

    def _shown(self, task: Task, images: Images) -> Tensor:
        """Images as a task shows them, as bytes ``[N, height, width, channels]`` still."""
        pixels = torch.tensor(np.asarray(images), device=self.device)
        flat = pixels.flatten(1)
        if isinstance(task.transform, Rotation):
            flat = task.transform(flat.float() / 255).mul(255).round().clamp(0, 255).to(torch.uint8)
        else:
            flat = task.transform(flat)
        return flat.view(pixels.shape)

    def _as_input(self, pixels: Tensor) -> Tensor:
        """``[lanes, N, ...]``: flat for a perceptron."""
        inputs = as_input(pixels)
        return inputs.flatten(2) if self.config.model == "mlp" else inputs


def train_and_test(images: ImageSet, config: ContinualConfig) -> tuple[Labelled, Labelled, int]:
    """Training and test images of the same classes.

    Sets for few-shot learning have other classes for testing than for training: of those, the first ``classes``
    training classes are taken, and a quarter of each one's images is kept for testing.
    """
    if "train" not in images.splits:
        raise DataError(f"the set {images.name} has no split 'train'; it has {', '.join(images.splits)}")
    train = images.splits["train"]
    test = images.splits.get("test")
    if test is not None and test.classes == train.classes:
        parts = [Labelled(part.images, torch.from_numpy(part.labels)) for part in (train, test)]
        return parts[0], parts[1], len(train.classes)
    if config.classes > len(train.classes):
        raise ConfigError(f"classes={config.classes}, but {images.name} has {len(train.classes)} training classes")
    kept: list[list[int]] = [[], []]
    for start, end in zip(train.class_offsets[: config.classes], train.class_offsets[1:], strict=False):
        border = int(end) - max(1, int(end - start) // 4)
        kept[0] += range(int(start), border)
        kept[1] += range(border, int(end))
    labels = torch.from_numpy(train.labels)
    parts = [Labelled(np.asarray(train.images[places]), labels[places]) for places in kept]
    return parts[0], parts[1], config.classes
