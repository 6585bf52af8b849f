"""N-way K-shot episodes as image indices, drawn on the device from (seed, step) alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wheretolearn.data.random_bits import permutation_keys
from wheretolearn.errors import ConfigError, DataError

Offsets = npt.NDArray[np.integer] | Tensor


@dataclass(frozen=True)
class EpisodeShape:
    """How many classes, and how many labelled (``shots``) and held-out (``queries``) images of each."""

    ways: int
    shots: int
    queries: int

    def __post_init__(self) -> None:
        if self.ways < 1 or self.shots < 1 or self.queries < 0:
            raise ConfigError(
                f"an episode needs at least 1 way, 1 shot and 0 queries, "
                f"not {self.ways} ways, {self.shots} shots, {self.queries} queries"
            )

    @property
    def images_per_class(self) -> int:
        return self.shots + self.queries


@dataclass(frozen=True, eq=False)
class EpisodeBatch:
    """A batch of tasks as image indices. Images are grouped by class, so all tasks share their labels.

    Label ``w`` of a task stands for class ``classes[task, w]``; the order of classes is random.
    """

    support: Tensor  # [tasks, ways * shots]
    query: Tensor  # [tasks, ways * queries]
    support_labels: Tensor  # [ways * shots]
    query_labels: Tensor  # [ways * queries]
    classes: Tensor  # [tasks, ways]


class EpisodeSampler:
    """Draws episodes from a set whose images are sorted by class.

    Class ``c`` is images ``class_offsets[c]`` up to ``class_offsets[c + 1]``. Classes, and images within a
    class, are drawn uniformly without replacement; no image is both support and query. ``stream`` keeps the
    random numbers of, say, "train" and "validation" apart. ``name`` and ``class_names`` serve error messages.
    """

    def __init__(
        self,
        class_offsets: Offsets,
        shape: EpisodeShape,
        seed: int,
        device: torch.device | str = "cpu",
        stream: str = "train",
        name: str = "",
        class_names: Sequence[str] | None = None,
    ) -> None:
        offsets = checked_offsets(class_offsets, shape.ways, shape.images_per_class, name, class_names)
        self.shape = shape
        self.seed = seed
        self.stream = stream
        self.device = torch.device(device)
        self.largest_class = int(offsets.diff().max())
        self.first_image = offsets[:-1].to(self.device)
        self.class_sizes = offsets.diff().to(self.device)
        labels = torch.arange(shape.ways, device=self.device)
        self.support_labels = labels.repeat_interleave(shape.shots, output_size=shape.ways * shape.shots)
        self.query_labels = labels.repeat_interleave(shape.queries, output_size=shape.ways * shape.queries)

    def sample(self, step: int | Tensor, tasks: int) -> EpisodeBatch:
        """The episodes of one step: always the same for the same seed, stream and step, on any device.

        The first tasks do not depend on how many are drawn. Shapes are static, so with ``step`` a tensor on
        the sampler's device a CUDA graph can capture the draw.
        """
        ways, shots, each = self.shape.ways, self.shape.shots, self.shape.images_per_class
        class_keys = permutation_keys(
            (tasks, len(self.class_sizes)), self.seed, self.stream, "classes", step, device=self.device
        )
        classes = class_keys.topk(ways, largest=False).indices
        # Only the chosen classes get sort keys; places past the end of a class are never among the smallest.
        places = torch.arange(self.largest_class, device=self.device)
        image_keys = permutation_keys(
            (tasks, ways, self.largest_class),
            self.seed,
            self.stream,
            "images",
            step,
            device=self.device,
            valid=places < self.class_sizes[classes].unsqueeze(-1),
        )
        images = image_keys.topk(each, largest=False).indices + self.first_image[classes].unsqueeze(-1)
        return EpisodeBatch(
            support=images[..., :shots].flatten(1),
            query=images[..., shots:].flatten(1),
            support_labels=self.support_labels,
            query_labels=self.query_labels,
            classes=classes,
        )


def checked_offsets(
    class_offsets: Offsets,
    ways: int,
    images_per_class: int,
    name: str = "",
    class_names: Sequence[str] | None = None,
) -> Tensor:
    """The offsets as an int64 tensor on the CPU, if there are enough classes with enough images each."""
    offsets = torch.as_tensor(class_offsets).to(device="cpu", dtype=torch.int64)
    name = name or "image set"
    if offsets.ndim != 1 or len(offsets) < 2 or bool((offsets.diff() < 0).any()):
        raise DataError(
            f"{name}: class offsets must be a rising list, one entry per class and the end of the last class"
        )
    sizes = offsets.diff()
    if len(sizes) < ways:
        raise DataError(
            f"{name} has {len(sizes)} classes; {ways} are needed. Use fewer ways, or a set with more classes."
        )
    if int(sizes.min()) < images_per_class:
        smallest = int(sizes.argmin())
        label = f" ({class_names[smallest]})" if class_names is not None else ""
        raise DataError(
            f"{name}: class {smallest}{label} has {int(sizes[smallest])} images; {images_per_class} per "
            "class are needed. Use fewer shots or queries, or leave the class out."
        )
    return offsets
