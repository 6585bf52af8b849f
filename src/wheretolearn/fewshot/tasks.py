"""Few-shot tasks: images of an episode, ready for the network."""

import copy
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from wheretolearn.data.episodes import EpisodeSampler, EpisodeShape
from wheretolearn.data.image_set import ImageSet, ImageSplit
from wheretolearn.data.readers import ONLY_SPLIT
from wheretolearn.data.transforms import as_input
from wheretolearn.engine.task import Task
from wheretolearn.errors import DataError
from wheretolearn.fewshot.config import FewShotConfig


class TaskSource:
    """Draws tasks from one split. On a GPU the whole split lies in its memory as one uint8 tensor."""

    def __init__(self, split: ImageSplit, shape: EpisodeShape, seed: int, stream: str, device: str = "cpu"):
        self.device = torch.device(device)
        self._split, self._shape = split, shape
        self._draw_with(seed, stream)
        self._on_device = None if self.device.type == "cpu" else torch.tensor(np.asarray(split.images), device=device)

    def with_seed(self, seed: int, stream: str) -> "TaskSource":
        """Other tasks of the same images, which are not stored a second time."""
        other = copy.copy(self)
        other._draw_with(seed, stream)
        return other

    def tasks(self, step: int | Tensor, count: int) -> Iterator[Task]:
        """The ``count`` tasks of an outer step: always the same for the same seed, stream and step."""
        episodes = self.sampler.sample(step, count)
        for support, query in zip(episodes.support, episodes.query, strict=True):
            yield Task(self._images(support), episodes.support_labels, self._images(query), episodes.query_labels)

    def _draw_with(self, seed: int, stream: str) -> None:
        split = self._split
        self.sampler = EpisodeSampler(
            split.class_offsets,
            self._shape,
            seed,
            str(self.device),
            stream,
            name=split.name,
            class_names=split.classes,
        )

    def _images(self, indices: Tensor) -> Tensor:
        if self._on_device is not None:
            return as_input(self._on_device[indices], channels_last=True)
        # Indexing the memory map reads only these images from disk.
        return as_input(torch.from_numpy(self._split.images[indices.numpy()]))


def split_of(images: ImageSet, name: str) -> ImageSplit:
    if name not in images.splits:
        how = ". Put its class folders into train, validation and test, and add it again"
        raise DataError(
            f"the set {images.name} has no split {name!r}; it has {', '.join(images.splits)}"
            f"{how if list(images.splits) == [ONLY_SPLIT] else ''}"
        )
    return images.splits[name]


def known_classes(config: FewShotConfig, images: ImageSet, split: str) -> str | None:
    """A note where classes of a split are among those that a run learns from: accuracy there says little."""
    if images.name != config.data or config.train_split not in images.splits:
        return None
    own, learned = (split_of(images, name).named_classes for name in (split, config.train_split))
    shared = len(set(own) & set(learned))
    if not shared:
        return None
    return (
        f"{shared} of {len(own)} classes in {images.name}/{split} are classes of {images.name}/{config.train_split}, "
        "which the run learned from: accuracy there is not that on new classes"
    )


def check_images(config: FewShotConfig, images: ImageSet) -> None:
    """Fail now, before anything is written, where a set cannot give the tasks that a config asks for."""
    for name in (config.train_split, config.validation_split):
        TaskSource(split_of(images, name), config.episode, seed=0, stream="check")
