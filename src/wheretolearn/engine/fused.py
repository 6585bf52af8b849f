"""Adaptation of Conv4's tasks on a GPU by kernels of its own, all tasks of all lanes in each launch.

What makes it fast, beside one launch for all tasks:

- The images of a task stay the same over its inner steps, so the first convolution works on their 3x3 patches,
  cut out once. Batch norm's statistics of a linear map of patches follow from the patches' second moments
  (mean = w.s, variance = w'Cov w), so convolution, batch norm, ReLU and pooling become one pass, and the gradient
  of the first layer one matrix product: the two largest activations of the network are never written.
- Later convolutions add up the statistics of batch norm while they write their outputs.
- A bias before batch norm has no effect: it is left out, and its gradient is exactly zero.

Weights, rates, gradients and their sums are float32; activations and the operands of convolutions have the
precision asked for. In float16, which is eight times as exact as bfloat16 and as fast, gradients on their way through
the network are GRADIENT_SCALE times too large, out of reach of its smallest numbers. Gradients are added up
atomically, so two runs agree to rounding, not bit for bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wheretolearn.engine.graphed import Adaptation, Job, JobGradient, Precision, Tensors
from wheretolearn.engine.task import InnerLoop
from wheretolearn.errors import ConfigError
from wheretolearn.models import conv4
from wheretolearn.models.conv4 import Conv4


@dataclass(frozen=True)
class Tile:
    """How a kernel's work is cut: pixels per step, steps per block (at most), threads and loads in flight."""

    rows: int
    steps: int = 1
    warps: int = 4
    stages: int = 3

    def blocks(self, pixels: int) -> int:
        return -(-pixels // (self.rows * self.steps))

    def spread(self, pixels: int, jobs: int) -> "Tile":
        """Fewer steps per block where there would be too few blocks to fill a GPU."""
        tile = self
        while tile.steps > 1 and tile.blocks(pixels) * jobs < ENOUGH_BLOCKS:
            tile = replace(tile, steps=tile.steps // 2)
        return tile

    def halved(self) -> "Tile":
        """For numbers twice as wide."""
        return replace(self, rows=self.rows // 2, stages=2)

    @property
    def launch(self) -> dict[str, int]:
        return {"ROWS": self.rows, "num_warps": self.warps, "num_stages": self.stages}


GRADIENT_SCALE = 8192.0
ENOUGH_BLOCKS = 256
TILES = {
    "gram": Tile(128, 8),
    "first block": Tile(128),
    "first weights": Tile(64, 16),
    "convolution": Tile(128),
    "weights": Tile(64, 16),
    "pool": Tile(32),
    "norm gradient": Tile(32, 2),
    "norm backward": Tile(64),
}


def unsupported(model: nn.Module, inner: InnerLoop) -> str | None:
    """Why these kernels cannot run such a training, or None if they can (where ``compiled`` can)."""
    if inner.order != "first":
        return "second-order gradients"
    if type(model) is not Conv4:
        return f"the network {type(model).__name__}"
    if find_spec("triton") is None:
        return "a machine without Triton"
    if inner.clip_norm is not None:
        return "inner_clip_norm"
    if model.transform_names():
        return "t_net"
    if not conv4.unchanged(model):
        return "a Conv4 with other layers, hooks or shared weights"
    if model.image_size % 2:
        return f"images of odd size ({model.image_size}x{model.image_size})"
    width, channels = _first_filters(model).shape[:2]
    if width not in (16, 32, 64, 128):
        return f"a width of {width}: it takes 16, 32, 64 or 128"
    if channels not in (1, 3):
        return f"images of {channels} channels"
    return None


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in a job's row of numbers, and in which order of dimensions."""

    width: int
    channels: int
    ways: int
    positions: int

    @property
    def patch(self) -> int:
        """Numbers per 3x3 patch, with one that is always 1, filled up to a power of two."""
        return 32 if self.channels == 3 else 16

    @property
    def segments(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        c, start = self.width, 0
        sizes: dict[str, tuple[int, ...]] = {}
        for block in range(1, 5):
            sizes[f"block{block}.conv.weight"] = (self.patch, c) if block == 1 else (9, c, c)
            sizes[f"block{block}.norm.weight"] = (c,)
            sizes[f"block{block}.norm.bias"] = (c,)
        sizes["head.weight"] = (self.ways, self.positions * c)
        sizes["head.bias"] = (self.ways,)
        places = {}
        for name, shape in sizes.items():
            places[name] = (start, shape)
            start += -(-torch.Size(shape).numel() // 16) * 16  # aligned for wide loads
        return places

    @property
    def size(self) -> int:
        start, shape = list(self.segments.values())[-1]
        return start + -(-torch.Size(shape).numel() // 16) * 16

    def pack(self, tensors: Tensors) -> Tensor:
        """A row from tensors by parameter name; zero where there is none."""
        reference = next(iter(tensors.values()))
        row = torch.zeros(self.size, device=reference.device)
        for name, (start, _) in self.segments.items():
            if name not in tensors:
                continue
            value = tensors[name]
            if name == "head.weight":
                value = value.view(self.ways, self.width, self.positions).transpose(1, 2)
            elif value.dim() == 4:
                value = value.permute(2, 3, 1, 0)  # tap, in, out
            row[start : start + value.numel()].view(value.shape).copy_(value)
        return row

    def unpack(self, row: Tensor, like: Tensors) -> Tensors:
        """Tensors by name from a row; zeros for what has no place in it, such as biases before batch norm."""
        result = {}
        for name, shape in ((name, tensor.shape) for name, tensor in like.items()):
            if name not in self.segments:
                result[name] = torch.zeros_like(like[name])
                continue
            flat = row[self.segments[name][0] :][: shape.numel()]
            if name == "head.weight":
                result[name] = flat.view(self.ways, self.positions, self.width).transpose(1, 2).reshape(shape)
            elif len(shape) == 4:
                out, into, height, wide = shape
                result[name] = flat.view(height, wide, into, out).permute(3, 2, 0, 1)
            else:
                result[name] = flat.view(shape)
        return result


class FusedConv4:
    """``Arithmetic`` for Conv4."""

    def __init__(self, model: nn.Module, precision: Precision = "float32"):
        assert isinstance(model, Conv4)
        # Only now: a machine without a GPU need not have Triton.
        self.kernels: Any = import_module("wheretolearn.engine.fused_kernels")
        width, channels = _first_filters(model).shape[:2]
        ways, features = model.head.weight.shape
        self.layout = Layout(width, channels, ways, features // width)
        self.dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision, torch.float32)
        self.gradient_scale = GRADIENT_SCALE if precision == "float16" else 1.0
        self.matrix_precision = "ieee" if precision == "float32" else "tf32"

    def meta_gradients(self, jobs: Sequence[Job], steps: int) -> list[JobGradient]:
        weights = self._adapt(jobs, steps)
        query = _Pass(self, len(jobs), [job.task.query_inputs for job in jobs])
        losses = query.gradients(weights, _labels(jobs, "query"))
        results = []
        for number, job in enumerate(jobs):
            outer = self.layout.unpack(query.parameter_gradients[number] / self.gradient_scale, job.theta)
            covered = {name: job.theta[name] for name in job.rates}
            sums = self.layout.unpack(weights.sums[number], covered)
            results.append(JobGradient(outer, sums, losses[number]))
        return results

    def adaptations(self, jobs: Sequence[Job], steps: int) -> list[Adaptation]:
        weights, labels = _Weights(self, jobs), _labels(jobs, "support")
        support = _Pass(self, len(jobs), [job.task.support_inputs for job in jobs])
        before = None
        for _ in range(steps):
            support.gradients(weights, labels)
            before = support.shares.clone() if before is None else before
            weights.step(support)
        support.accumulators.zero_()
        support.forward(weights, labels)
        before = support.shares if before is None else before
        results = []
        for number, job in enumerate(jobs):
            moved = self.layout.unpack(weights.parameters[number], {name: job.theta[name] for name in job.rates})
            # A bias before batch norm has no place there: it stays.
            moved |= {name: job.theta[name] for name in moved if name not in self.layout.segments}
            results.append(Adaptation(before[number], moved, support.losses[number]))
        return results

    def probabilities(self, jobs: Sequence[Job], steps: int) -> Tensor:
        weights = self._adapt(jobs, steps)
        query = _Pass(self, len(jobs), [job.task.query_inputs for job in jobs])
        query.forward(weights, _labels(jobs, "query"))
        return query.shares

    @contextmanager
    def settings(self) -> Iterator[None]:
        yield

    def _adapt(self, jobs: Sequence[Job], steps: int) -> "_Weights":
        weights = _Weights(self, jobs)
        if steps > 0:
            support = _Pass(self, len(jobs), [job.task.support_inputs for job in jobs])
            labels = _labels(jobs, "support")
            for _ in range(steps):
                support.gradients(weights, labels)
                weights.step(support)
        return weights


class _Weights:
    """phi of every job, in float32 and rounded for the convolutions; rates; sums of gradients."""

    def __init__(self, arithmetic: FusedConv4, jobs: Sequence[Job]):
        layout, self._kernels, self._gradient_scale = arithmetic.layout, arithmetic.kernels, arithmetic.gradient_scale
        self.size = layout.size
        # Jobs of one lane share theta and rates: each is packed once.
        packed: dict[int, Tensor] = {}

        def rows(which: str) -> Tensor:
            for job in jobs:
                tensors = getattr(job, which)
                if id(tensors) not in packed:
                    packed[id(tensors)] = layout.pack(tensors)
            return torch.stack([packed[id(getattr(job, which))] for job in jobs])

        self.parameters, self.rates = rows("theta"), rows("rates")
        self.sums = torch.zeros_like(self.parameters)
        self.rounded = self.parameters.to(arithmetic.dtype, copy=True)
        self._places = {name: start for name, (start, _) in layout.segments.items()}

    def at(self, name: str, rounded: bool = False) -> Tensor:
        """From where a parameter of the first job lies; those of others follow at distances of ``size``."""
        return (self.rounded if rounded else self.parameters).view(-1)[self._places[name] :]

    def step(self, support: "_Pass") -> None:
        self._kernels.masked_update[-(-self.size // 1024), len(self.parameters)](
            self.parameters, self.rates, support.accumulators, support.per_job, self._gradient_scale,
            self.sums, self.rounded, self.size, SIZE=1024,
        )  # fmt: skip


class _Pass:
    """Buffers and launches for the images of one set, support or query, of all jobs."""

    def __init__(self, arithmetic: FusedConv4, jobs: int, inputs: Sequence[Tensor]):
        layout, dtype = arithmetic.layout, arithmetic.dtype
        self.kernels, self.gradient_scale = arithmetic.kernels, arithmetic.gradient_scale
        self.layout, self.jobs, self.precision = layout, jobs, arithmetic.matrix_precision
        self.tiles = TILES if dtype.itemsize == 2 else {name: tile.halved() for name, tile in TILES.items()}
        self.images = inputs[0].shape[0]
        height, size = inputs[0].shape[2:]
        if height != size or size % 2:
            raise ConfigError(
                f"the fused engine needs square images of even size, not {height}x{size}: use engine=graphed"
            )
        c, device = layout.width, inputs[0].device
        self.sides = [size, size // 2, size // 4, size // 8]  # of the four convolutions' outputs
        self.pooled_sides = [side // 2 for side in self.sides]
        self.pixels = [self.images * side * side for side in self.sides]
        self.pooled = [self.images * side * side for side in self.pooled_sides]

        def buffer(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.empty((jobs, *shape), device=device, dtype=of)

        def bordered(side: int) -> Tensor:
            return torch.zeros((jobs, self.images, side + 2, side + 2, c), device=device, dtype=dtype)

        self.convolved = {layer: buffer(self.pixels[layer], c) for layer in (1, 2, 3)}
        self.convolved_gradients = {layer: bordered(self.sides[layer]) for layer in (1, 2, 3)}
        self.activations = {layer: bordered(self.pooled_sides[layer]) for layer in (0, 1, 2)}
        self.activations[3] = buffer(self.pooled[3], c)  # the features
        self.activation_gradients = {layer: buffer(self.pooled[layer], c) for layer in range(4)}
        self.winners = {layer: buffer(self.pooled[layer], c, of=torch.int8) for layer in range(4)}
        self.padded_images = max(16, _power_of_two(self.images))
        self.padded_ways = max(16, _power_of_two(layout.ways))
        self.probabilities = buffer(self.padded_images, self.padded_ways, of=torch.float32)
        self.logit_gradients = torch.empty_like(self.probabilities)
        # Per job: gradients laid out as the weights are, then sums that lead to them.
        places = {"first weight sums": layout.patch * c}
        places |= {f"{what} {layer}": c for layer in (1, 2, 3) for what in ("total", "squares")}
        self._sums, start = {}, layout.size
        for name, length in places.items():
            self._sums[name], start = start, start + length
        self.per_job = start
        self.accumulators = torch.zeros((jobs, start), device=device)
        self.losses = torch.empty(jobs, device=device)
        self.scale_and_shift = torch.empty((jobs, 2, c), device=device)
        self.patches = torch.stack([_patches(x.to(dtype), layout.patch) for x in inputs])
        self.moments = torch.zeros((jobs, layout.patch, layout.patch), device=device)
        rows = 4 * self.pooled[0]
        tile = self.tiles["gram"].spread(rows, jobs)
        self.kernels.gram[tile.blocks(rows), jobs](
            self.patches, self.moments, rows,
            K=layout.patch, STEPS=tile.steps, PRECISION=self.precision, **tile.launch,
        )  # fmt: skip

    @property
    def shares(self) -> Tensor:
        """``[jobs, images, ways]``: probabilities, of the last forward pass."""
        return self.probabilities[:, : self.images, : self.layout.ways]

    @property
    def parameter_gradients(self) -> Tensor:
        return self.accumulators[:, : self.layout.size]

    def gradients(self, weights: _Weights, labels: Tensor) -> Tensor:
        """Fill ``parameter_gradients``; the loss of each job."""
        self.accumulators.zero_()
        self.forward(weights, labels)
        self._backward(weights)
        return self.losses

    def forward(self, weights: _Weights, labels: Tensor) -> None:
        kernels, layout, c, jobs = self.kernels, self.layout, self.layout.width, self.jobs
        first_weights = weights.at("block1.conv.weight", rounded=True)
        kernels.first_block_statistics[(jobs,)](
            self.moments, first_weights, weights.at("block1.norm.weight"), weights.at("block1.norm.bias"),
            weights.size, self.scale_and_shift, self.pixels[0], K=layout.patch, C=c, ONES=9 * layout.channels,
        )  # fmt: skip
        tile = self.tiles["first block"]
        kernels.first_block[tile.blocks(self.pooled[0]), jobs](
            self.patches, self.scale_and_shift, first_weights, weights.size,
            self.activations[0], self.winners[0], self.pooled[0], self.pooled_sides[0],
            K=layout.patch, C=c, PRECISION=self.precision, **tile.launch,
        )  # fmt: skip
        for layer in (1, 2, 3):
            block = f"block{layer + 1}"
            tile = self.tiles["convolution"]
            kernels.convolution[tile.blocks(self.pixels[layer]), jobs](
                self.activations[layer - 1], weights.at(f"{block}.conv.weight", rounded=True), weights.size,
                self.convolved[layer], self._sum("total", layer), self._sum("squares", layer), self.per_job,
                self.pixels[layer], self.sides[layer],
                C=c, BACKWARD=False, PRECISION=self.precision, **tile.launch,
            )  # fmt: skip
            tile = self.tiles["pool"]
            kernels.normalise_and_pool[tile.blocks(self.pooled[layer]), jobs](
                self.convolved[layer], self._sum("total", layer), self._sum("squares", layer), self.per_job,
                weights.at(f"{block}.norm.weight"), weights.at(f"{block}.norm.bias"), weights.size,
                self.activations[layer], self.winners[layer],
                self.pixels[layer], self.sides[layer], self.pooled[layer], self.pooled_sides[layer],
                0 if layer == 3 else 1, C=c, **tile.launch,
            )  # fmt: skip
        kernels.head_loss[(jobs,)](
            self.activations[3], weights.at("head.weight"), weights.at("head.bias"), weights.size, labels,
            self.probabilities, self.logit_gradients, self._gradient("head.bias"), self.per_job, self.losses,
            self.images, layout.ways, self.gradient_scale, width=layout.positions * c,
            IMAGES=self.padded_images, WAYS=self.padded_ways, CHUNK=64, PRECISION=self.precision,
        )  # fmt: skip

    def _backward(self, weights: _Weights) -> None:
        kernels, layout, c, jobs = self.kernels, self.layout, self.layout.width, self.jobs
        width = layout.positions * c
        kernels.head_backward[-(-width // 64), jobs](
            self.activations[3], weights.at("head.weight"), weights.size, self.logit_gradients,
            self._gradient("head.weight"), self.per_job, self.activation_gradients[3],
            self.images, width, layout.ways,
            IMAGES=self.padded_images, WAYS=self.padded_ways, CHUNK=64, PRECISION=self.precision,
        )  # fmt: skip
        for layer in (3, 2, 1):
            block = f"block{layer + 1}"
            norm = (
                self.convolved[layer], self._sum("total", layer), self._sum("squares", layer),
                self.activation_gradients[layer], self.winners[layer],
            )  # fmt: skip
            sides = (self.pixels[layer], self.sides[layer], self.pooled[layer], self.pooled_sides[layer])
            to_norm = (self._gradient(f"{block}.norm.weight"), self._gradient(f"{block}.norm.bias"))
            tile = self.tiles["norm gradient"].spread(self.pooled[layer], jobs)
            kernels.norm_gradient[tile.blocks(self.pooled[layer]), jobs](
                *norm, *to_norm, self.per_job, *sides, C=c, STEPS=tile.steps, **tile.launch
            )
            tile = self.tiles["norm backward"]
            kernels.norm_backward[tile.blocks(self.pixels[layer]), jobs](
                *norm, weights.at(f"{block}.norm.weight"), weights.size, *to_norm, self.per_job,
                self.convolved_gradients[layer], *sides, C=c, **tile.launch,
            )  # fmt: skip
            tile = self.tiles["convolution"]
            kernels.convolution[tile.blocks(self.pixels[layer]), jobs](
                self.convolved_gradients[layer], weights.at(f"{block}.conv.weight", rounded=True), weights.size,
                self.activation_gradients[layer - 1], self.losses, self.losses, 0,
                self.pixels[layer], self.sides[layer], C=c, BACKWARD=True, PRECISION=self.precision, **tile.launch,
            )  # fmt: skip
            tile = self.tiles["weights"].spread(self.pixels[layer], 3 * jobs)
            kernels.convolution_weight_gradient[tile.blocks(self.pixels[layer]), 3, jobs](
                self.activations[layer - 1], self.convolved_gradients[layer],
                self._gradient(f"{block}.conv.weight"), self.per_job, self.pixels[layer], self.sides[layer],
                C=c, STEPS=tile.steps, PRECISION=self.precision, **tile.launch,
            )  # fmt: skip
        sums = self.accumulators.view(-1)[self._sums["first weight sums"] :]
        tile = self.tiles["first weights"].spread(self.pooled[0], jobs)
        kernels.first_block_weight_sums[tile.blocks(self.pooled[0]), jobs](
            self.patches, self.activation_gradients[0], self.winners[0], sums, self.per_job, self.pooled[0],
            K=layout.patch, C=c, STEPS=tile.steps, PRECISION=self.precision, **tile.launch,
        )  # fmt: skip
        kernels.first_block_gradient[(jobs,)](
            self.moments, sums, weights.at("block1.conv.weight", rounded=True), weights.at("block1.norm.weight"),
            weights.size, self._gradient("block1.conv.weight"), self._gradient("block1.norm.weight"),
            self._gradient("block1.norm.bias"), self.per_job, self.pixels[0],
            K=layout.patch, C=c, ONES=9 * layout.channels,
        )  # fmt: skip

    def _gradient(self, name: str) -> Tensor:
        return self.accumulators.view(-1)[self.layout.segments[name][0] :]

    def _sum(self, what: str, layer: int) -> Tensor:
        return self.accumulators.view(-1)[self._sums[f"{what} {layer}"] :]


def _patches(x: Tensor, size: int) -> Tensor:
    """3x3 neighbourhoods of ``[images, channels, side, side]``: ``[corner of the pooling window, pooled pixel, size]``.

    Within a patch: tap by tap, channel by channel, then a one, then zeros.
    """
    images, channels, side, _ = x.shape
    padded = F.pad(x, (1, 1, 1, 1)).permute(0, 2, 3, 1)  # images, rows, columns, channels
    taps = [padded[:, dy : dy + side, dx : dx + side] for dy in range(3) for dx in range(3)]
    ones = torch.ones_like(taps[0][..., :1])
    rest = torch.zeros_like(ones).expand(-1, -1, -1, size - 9 * channels - 1)
    patches = torch.cat([*taps, ones, rest], dim=-1)
    windows = patches.view(images, side // 2, 2, side // 2, 2, size).permute(2, 4, 0, 1, 3, 5)
    return windows.reshape(4, images * (side // 2) ** 2, size)


def _first_filters(model: Conv4) -> Tensor:
    return model.get_parameter("block1.conv.weight")


def _labels(jobs: Sequence[Job], which: str) -> Tensor:
    return torch.stack([getattr(job.task, f"{which}_labels") for job in jobs])


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
