"""What continual learners see, lane by lane: batches of a stream of tasks, and the test images of each task."""

from collections.abc import Iterator, Sequence
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
        self._test_images = torch.from_numpy(self.test.images).to(self.device)
        self.image_shape: tuple[int, int, int] = tuple(self.train.images.shape[1:])
        self._tasks = [self._tasks_of(seed) for seed in self.seeds]
        lengths = [[len(task.train_indices) for task in tasks] for tasks in self._tasks]
        tested = [[len(self._tested(task)) for task in tasks] for tasks in self._tasks]
        if min(map(min, tested)) == 0:
            raise DataError(f"{config.data} has tasks without test images: it needs some of every class")
        if any(other != lengths[0] for other in lengths) or any(other != tested[0] for other in tested):
            raise ConfigError("these seeds have tasks of different lengths: run them one by one (class_order=shuffled)")
        # Positions within a task instead of images: what each lane's task shows is prepared when it begins.
        stand_ins = [Task(torch.arange(length)) for length in lengths[0]]
        shown = [batches(stand_ins, batch=config.batch, epochs=config.epochs, seed=seed) for seed in self.seeds]
        self._positions = torch.stack([one.indices[:, 0] for one in shown]).to(self.device)  # [lanes, batches, batch]
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
        at = self._positions[:, number]
        lane = torch.arange(len(self.seeds), device=self.device).unsqueeze(1)
        last = number + 1 == self.batches or self._task_of[number + 1] != task
        return Batch(self._as_input(inputs[lane, at]), labels[lane, at], task, self._epoch_of[number] == 0, last)

    def test_sets(self, task: int, limit: int | None = None, chunk: int = 2500) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs ``[lanes, N, ...]`` and labels ``[lanes, N]``, all or the first few, in chunks."""
        parts = [self._test_pixels(lane, task, limit) for lane in range(len(self.seeds))]
        labels = torch.stack([self.test.labels[self._tested(tasks[task])[:limit]] for tasks in self._tasks])
        for start in range(0, labels.shape[1], chunk):
            own = slice(start, start + chunk)
            yield self._as_input(torch.stack([pixels[own] for pixels in parts])), labels[:, own].to(self.device)

    def _test_pixels(self, lane: int, task: int, limit: int | None) -> Tensor:
        own = self._tasks[lane][task]
        if not isinstance(own.transform, Rotation):
            return _shown(own, self._test_images[self._tested(own)[:limit].to(self.device)])
        if (lane, task) not in self._turned:  # turning is slow, and each task is tested at least twice
            self._turned[lane, task] = _shown(own, self._test_images)
        return self._turned[lane, task][:limit]

    def _tested(self, task: Task) -> Tensor:
        """Which test images belong to a task."""
        if not task.classes:
            return torch.arange(len(self.test.labels))
        return torch.isin(self.test.labels, torch.tensor(task.classes)).nonzero().flatten()

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
            images = torch.tensor(np.asarray(self.train.images[chosen.numpy()]), device=self.device)
            inputs.append(_shown(tasks[task], images))
            labels.append(self.train.labels[chosen])
        return torch.stack(inputs), torch.stack(labels).to(self.device)

    def _as_input(self, pixels: Tensor) -> Tensor:
        """``[lanes, N, ...]``: flat for a perceptron."""
        inputs = as_input(pixels)
        return inputs.flatten(2) if self.config.model == "mlp" else inputs


def _shown(task: Task, images: Tensor) -> Tensor:
    """Images as a task shows them, as bytes ``[N, height, width, channels]`` still."""
    flat = images.flatten(1)
    if isinstance(task.transform, Rotation):
        flat = task.transform(flat.float() / 255).mul(255).round().clamp(0, 255).to(torch.uint8)
    else:
        flat = task.transform(flat)
    return flat.view(images.shape)


def train_and_test(images: ImageSet, config: ContinualConfig) -> tuple[Labelled, Labelled, int]:
    """Training and test images of the same classes.

    Sets for few-shot learning have other classes for testing than for training: of those, the first ``classes``
    training classes are taken, and a quarter of each one's images is kept for testing.
    """
    if "train" not in images.splits:
        raise DataError(f"the set {images.name} has no split 'train'; it has {', '.join(images.splits)}")
    train = images.splits["train"]
    test = images.splits.get("test")
    if test is not None and test.named_classes == train.named_classes:
        parts = [Labelled(part.images, torch.from_numpy(part.labels)) for part in (train, test)]
        return parts[0], parts[1], len(train.classes)
    if test is not None and set(test.named_classes) & set(train.named_classes):
        own = {name: {" ".join(filter(None, pair)) for pair in s.named_classes} for name, s in images.splits.items()}
        only = {"train": own["train"] - own["test"], "test": own["test"] - own["train"]}
        told = " and ".join(
            f"{', '.join(sorted(names)[:5])} is only in {where}" for where, names in only.items() if names
        )
        raise DataError(
            f"the splits train and test of {images.name} share some classes and not others: {told}. Give both the same "
            "classes, or none in common, and add the set again"
        )
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
