"""From stored bytes to network input, and rotation; both on whatever device the images are on."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from wheretolearn.errors import ConfigError, DataError

Scaling = Literal["auto", "imagenet", "unit"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def as_input(
    images: Tensor,
    scaling: Scaling = "auto",
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> Tensor:
    """uint8 images ``[..., height, width, channels]`` as network input ``[..., channels, height, width]``.

    ``imagenet`` subtracts ImageNet's channel means and divides by its deviations; ``unit`` maps 0..255 to
    0..1; ``auto`` takes the first for three channels and the second otherwise. ``channels_last`` keeps the
    channels innermost in memory, which convolutions on a GPU prefer.
    """
    if scaling not in get_args(Scaling):
        raise ConfigError(f"unknown scaling {scaling!r}; choose one of {', '.join(get_args(Scaling))}")
    if images.dtype != torch.uint8 or images.ndim < 3:
        raise DataError(f"images must be uint8 [..., height, width, channels], not {images.dtype} {list(images.shape)}")
    channels = images.shape[-1]
    if scaling == "auto":
        scaling = "imagenet" if channels == 3 else "unit"
    if scaling == "imagenet" and channels != 3:
        raise DataError(f"ImageNet scaling needs 3 channels, not {channels}; use the scaling 'unit'")
    # Half precision would round 0..255 before scaling.
    pixels = images.contiguous().to(torch.float64 if dtype == torch.float64 else torch.float32)
    if scaling == "imagenet":
        pixels = (pixels / 255 - _constants(IMAGENET_MEAN, pixels)) / _constants(IMAGENET_STD, pixels)
    else:
        pixels = pixels / 255
    scaled = pixels.to(dtype).movedim(-1, -3)
    if channels_last:
        return scaled
    # One channel lies alike in both orders; its strides say which one convolutions take, and PyTorch's batch norm on a
    # CPU is a thousand times less exact with channels innermost.
    return scaled.clone(memory_format=torch.contiguous_format)


def rotate(images: Tensor, degrees: float | Tensor) -> Tensor:
    """Float images ``[N, height, width]`` turned counter-clockwise about their centre, by one angle or by N.

    Bilinear; what comes from outside the image is zero. Zero degrees returns exactly the input's values.
    """
    if images.ndim != 3 or not images.is_floating_point():  # weights between 0 and 1 would round to 0 in bytes
        raise DataError(f"images to turn must be float [N, height, width], not {images.dtype} {list(images.shape)}")
    count, height, width = images.shape
    if isinstance(degrees, Tensor):
        angle = torch.deg2rad(degrees.to(device=images.device, dtype=torch.float64)).reshape(-1, 1, 1)
        cosine, sine = torch.cos(angle), torch.sin(angle)
    else:
        shape, device = (1, 1, 1), images.device
        cosine = torch.full(shape, math.cos(math.radians(degrees)), dtype=torch.float64, device=device)
        sine = torch.full(shape, math.sin(math.radians(degrees)), dtype=torch.float64, device=device)
    # Offsets from the centre are multiples of one half, so without a turn the coordinates come out exact.
    down = torch.arange(height, dtype=torch.float64, device=images.device).unsqueeze(1) - (height - 1) / 2
    right = torch.arange(width, dtype=torch.float64, device=images.device) - (width - 1) / 2
    rows = sine * right + cosine * down + (height - 1) / 2
    columns = cosine * right - sine * down + (width - 1) / 2
    top, left = rows.floor(), columns.floor()
    pixels = images.reshape(count, height * width)
    turned = torch.zeros_like(pixels)
    for row, row_weight in ((top, 1 - (rows - top)), (top + 1, rows - top)):
        for column, column_weight in ((left, 1 - (columns - left)), (left + 1, columns - left)):
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            weight = torch.where(inside, row_weight * column_weight, 0.0).flatten(1).to(images.dtype)
            place = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
            turned = turned + weight * pixels.gather(1, place.long().flatten(1).expand(count, -1))
    return turned.reshape(images.shape)


def _constants(values: Sequence[float], like: Tensor) -> Tensor:
    """A small vector made by kernels alone: copying it from the host would break CUDA graph capture."""
    return torch.stack([torch.full((), value, dtype=like.dtype, device=like.device) for value in values])
