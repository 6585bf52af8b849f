"""What an online learner sees: an OSAKA stream of one seed, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wheretolearn.data.image_set import ImageSet, ImageSplit
from wheretolearn.data.load import load_set
from wheretolearn.data.random_bits import permutation_keys
from wheretolearn.data.streams import osaka
from wheretolearn.data.transforms import as_input
from wheretolearn.errors import DataError
from wheretolearn.online.config import OnlineConfig, Source


@dataclass(frozen=True, eq=False)
class Batch:
    inputs: Tensor  # [ways * shots, channels, height, width], in random order
    labels: Tensor  # [ways * shots]
    source: int
    switched: bool  # a new task begins; no learner is told


class Problem:
    """The stream of one seed. All of it follows from settings and seed; nothing here changes while learning."""

    def __init__(self, config: OnlineConfig, seed: int, images: "SourceImages"):
        self.images = images
        self.names = tuple(source.label for source in config.sources)
        stream = osaka(
            [split.class_offsets for split in images.splits],
            p=config.p,
            steps=config.steps,
            weights=[source.probability for source in config.sources],
            ways=config.ways,
            shots=config.shots,
            seed=seed,
            names=self.names,
        )
        self.steps = config.steps
        self.source, self.switched = stream.source, stream.switched  # [steps], on the CPU
        # A stream groups images by label: left so, their places would tell the labels.
        order = permutation_keys(stream.images.shape, seed, "online", "places").argsort(-1)
        places = stream.images + images.first[stream.source].unsqueeze(1)
        self.places = places.gather(1, order).to(images.device)  # [steps, images]: in the pixels of all sources
        self.labels = stream.labels[order].to(images.device)

    def batch(self, step: int) -> Batch:
        inputs, labels = batches([self], [step])
        return Batch(inputs[0], labels[0], int(self.source[step]), bool(self.switched[step]))


def batches(problems: Sequence[Problem], steps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A batch of each of several problems that share their images, ``[problems, images, ...]``, and the labels."""
    places = torch.stack([problem.places[step] for problem, step in zip(problems, steps, strict=True)])
    labels = torch.stack([problem.labels[step] for problem, step in zip(problems, steps, strict=True)])
    return as_input(problems[0].images.pixels[places]), labels


class SourceImages:
    """The images of a stream's sources, as bytes on the device; streams of all seeds share them."""

    def __init__(self, sources: Sequence[Source], device: str = "cpu"):
        self.device = torch.device(device)
        self.splits = [source_split(source) for source in sources]
        shapes = {tuple(split.images.shape[1:]) for split in self.splits}
        if len(shapes) > 1:
            found = ", ".join(f"{split.name} {_size(split)}" for split in self.splits)
            raise DataError(f"the images of all sources must have one size: {found}")
        height, width, channels = shapes.pop()
        if height != width:
            raise DataError(f"online learning needs square images, not {height}x{width}")
        self.shape: tuple[int, int, int] = (height, width, channels)
        self.pixels = torch.cat([torch.from_numpy(split.images) for split in self.splits]).to(self.device)
        counts = [0, *(len(split.images) for split in self.splits[:-1])]
        self.first = torch.tensor(counts).cumsum(0)  # the place of each source's first image


def source_split(source: Source) -> ImageSplit:
    """The classes that a source offers, as one split: of all the set's splits in order, as many as wanted.

    Nothing here is kept for testing: every image is predicted before its label is known. Of sets whose splits show the
    same classes (MNIST), the one to learn from is taken.
    """
    images = load_set(source.data)
    parts = _with_new_classes(images)
    wanted = [
        (part, number)
        for part in parts
        for number, group in enumerate(part.groups)
        if not source.groups or group in source.groups
    ]
    known = {group for part in parts for group in part.groups}
    strange = next((group for group in source.groups if group not in known), None)
    if strange is not None:
        has = f"it has {', '.join(sorted(known))}" if any(known) else "its classes have no groups"
        raise DataError(f"source {source.label}: {source.data} has no group {strange!r}; {has}")
    if source.classes is not None:
        if len(wanted) < source.classes:
            raise DataError(f"source {source.label} has {len(wanted)} classes; {source.classes} are wanted")
        wanted = wanted[: source.classes]
    pieces = [part.images[part.class_offsets[n] : part.class_offsets[n + 1]] for part, n in wanted]
    return ImageSplit(
        source.label,
        np.concatenate(pieces),
        np.cumsum([0, *map(len, pieces)]),
        tuple(part.classes[n] for part, n in wanted),
        tuple(part.groups[n] for part, n in wanted),
    )


def _with_new_classes(images: ImageSet) -> list[ImageSplit]:
    """The splits of a set that do not show again the classes of one before."""
    # Of splits with the same classes, the one to learn from has more images.
    order = sorted(images.splits.values(), key=lambda split: not split.name.endswith("/train"))
    parts: list[ImageSplit] = []
    for split in order:
        if not any(set(split.classes) & set(part.classes) for part in parts):
            parts.append(split)
    return parts


def _size(split: ImageSplit) -> str:
    return "x".join(map(str, split.images.shape[1:]))
