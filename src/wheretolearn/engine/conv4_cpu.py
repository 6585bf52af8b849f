"""Adaptation of Conv4's tasks on a CPU: its passes forward and backward written out, without autograd.

What makes it fast:

- The images of a task stay the same over its inner steps, so the first convolution works on their 3x3 patches, cut out
  once, less their mean. Batch norm's variance follows from the patches' covariance (w'Cov w), its gradient from that
  of the filters: the largest activation of the network is written once, normalised, and read once, by pooling.
- Batch norm's scale and shift come after pooling, where there is a quarter of the work. Where a scale is negative the
  largest of the scaled is the smallest of the others: such filters change their sign first. Where a scale is exactly
  zero all scaled tie: autograd gives the gradient to the first, this to the largest unscaled; both are subgradients.
- Channels lie innermost, which convolutions and pooling prefer. PyTorch's batch norm is a thousand times less exact in
  this order; here means and variances come from its sums, which are added up pairwise.
- A bias before batch norm has no effect: it is left out, and its gradient is exactly zero.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wheretolearn import batch_norm
from wheretolearn.engine.graphed import Adaptation, Job, JobGradient, Tensors
from wheretolearn.models import conv4

BLOCKS = (1, 2, 3, 4)
POSITIONS = (0, 2, 3)  # all dimensions but the channels


def supports(model: nn.Module) -> bool:
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return on_cpu and conv4.unchanged(model)


class Conv4OnCPU:
    """``Arithmetic`` for Conv4 with batch statistics; ``model`` gives the architecture, jobs bring their weights."""

    def __init__(self, model: nn.Module):
        self._parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self._eps = batch_norm.layers(model)[0].eps

    @torch.no_grad()
    def meta_gradients(self, jobs: Sequence[Job], steps: int) -> list[JobGradient]:
        return [self._meta_gradient(job, steps) for job in jobs]

    @torch.no_grad()
    def probabilities(self, jobs: Sequence[Job], steps: int) -> Tensor:
        logits = [self.logits(self._adapt(job, steps)[0], job.task.query_inputs) for job in jobs]
        return F.softmax(torch.stack(logits), dim=2)

    @torch.no_grad()
    def adaptations(self, jobs: Sequence[Job], steps: int) -> list[Adaptation]:
        return [self._adaptation(job, steps) for job in jobs]

    @torch.no_grad()
    def logits(self, weights: Tensors, inputs: Tensor) -> Tensor:
        return self._forward(weights, Patches(inputs)).logits

    @contextmanager
    def settings(self) -> Iterator[None]:
        yield

    def _meta_gradient(self, job: Job, steps: int) -> JobGradient:
        weights, sums, _ = self._adapt(job, steps)
        query = self._forward(weights, Patches(job.task.query_inputs))
        outer = query.gradients(job.task.query_labels, job.theta)
        return JobGradient(outer, sums, F.cross_entropy(query.logits, job.task.query_labels))

    def _adaptation(self, job: Job, steps: int) -> Adaptation:
        support = Patches(job.task.support_inputs)
        logits: list[Tensor] = []
        weights, _, still = self._adapt(job, steps, support, logits)
        logits.append(self._forward(weights, support, still).logits)
        loss = F.cross_entropy(logits[-1], job.task.support_labels)
        return Adaptation(F.softmax(logits[0], dim=1), {name: weights[name] for name in job.rates}, loss)

    def _adapt(
        self, job: Job, steps: int, support: "Patches | None" = None, logits: list[Tensor] | None = None
    ) -> tuple[Tensors, Tensors, "list[Block]"]:
        """Weights after the inner steps, sums of gradients, and the lowest blocks, which stayed as they were.

        ``logits`` gets those before each step.
        """
        weights = dict(job.theta)
        sums = {name: torch.zeros_like(weights[name]) for name in job.rates}
        support = support or Patches(job.task.support_inputs)
        below = _lowest_block(job.rates) - 1
        still: list[Block] = []
        for _ in range(steps):
            forward = self._forward(weights, support, still)
            still = forward.blocks[:below]
            if logits is not None:
                logits.append(forward.logits)
            gradients = forward.gradients(job.task.support_labels, job.rates)
            for name, gradient in gradients.items():
                weights[name] = torch.addcmul(weights[name], job.rates[name], gradient, value=-1)  # Eq. 4
                sums[name] += gradient
        return weights, sums, still

    def _forward(self, weights: Tensors, patches: "Patches", still: "Sequence[Block]" = ()) -> "Pass":
        return Pass({**self._parameters, **weights}, patches, self._eps, still)


class Patches:
    """The 3x3 patches of a batch of images, one in each row, less their mean."""

    def __init__(self, inputs: Tensor):
        self.images, _, self.height, self.width = inputs.shape
        patches = F.unfold(inputs, 3, padding=1).transpose(1, 2)  # of each image
        # Few numbers are added up before float64 does, by products, which are faster than sums over so short rows.
        sums = torch.bmm(patches.new_ones(self.images, 1, patches.shape[1]), patches)
        mean = sums.double().sum(0) / (self.images * patches.shape[1])
        self.rows = (patches - mean.to(patches.dtype)).flatten(0, 1)
        by_line = self.rows.view(-1, self.width, self.rows.shape[1])
        self.covariance = torch.bmm(by_line.transpose(1, 2), by_line).double().sum(0) / len(self.rows)


@dataclass(frozen=True)
class Block:
    """What the backward pass needs of a block. Filters, and all that they give, have the sign of batch norm's scale."""

    inputs: Tensor | None  # of the first block: None, its patches are at hand
    filters: Tensor
    sign: Tensor
    centred: Tensor  # output of the convolution, less its mean; of the first block: normalised
    inverse_std: Tensor
    places: Tensor  # of the largest
    largest: Tensor  # of 2x2, normalised
    outputs: Tensor


class Pass:
    """A pass of a batch through the network, and its way back.

    ``still`` are its lowest blocks, from an earlier one with the same weights there; they need not be passed again.
    """

    def __init__(self, weights: Tensors, patches: Patches, eps: float, still: Sequence[Block] = ()):
        self.weights, self.patches = weights, patches
        self.blocks = list(still)
        for number in BLOCKS[len(self.blocks) :]:
            self.blocks.append(self._first(eps) if number == 1 else self._later(number, eps))
        self.features = self.blocks[-1].outputs.flatten(1)
        self.logits = F.linear(self.features, weights["head.weight"], weights.get("head.bias"))

    def gradients(self, labels: Tensor, names: Collection[str]) -> Tensors:
        """Of the cross-entropy, by these weights."""
        to_logits = F.softmax(self.logits, dim=1)
        to_logits[torch.arange(len(labels)), labels.long()] -= 1
        to_logits /= len(labels)
        found = {"head.weight": to_logits.t() @ self.features, "head.bias": to_logits.sum(0)}
        to_outputs = (to_logits @ self.weights["head.weight"]).view(self.blocks[-1].outputs.shape)
        lowest = _lowest_block(names)
        for number in reversed(BLOCKS[lowest - 1 :]):
            to_outputs = self._backward(number, to_outputs, found, to_inputs=number > lowest)
        return {name: found[name] for name in names}

    def _first(self, eps: float) -> Block:
        filters, sign = self._signed_filters(1)
        matrix = filters.flatten(1).t()
        exact = matrix.double()
        # Of filters that cancel what varies, rounding may leave less than nothing.
        variance = ((self.patches.covariance @ exact) * exact).sum(0).clamp(min=0)
        inverse_std = _inverse_std(variance, eps).to(matrix.dtype)
        rows = self.patches.rows @ (matrix * inverse_std)
        shape = (self.patches.images, self.patches.height, self.patches.width, len(filters))
        normalised = rows.view(shape).permute(0, 3, 1, 2)
        largest, places = F.max_pool2d(normalised, 2, return_indices=True)
        return Block(None, filters, sign, normalised, inverse_std, places, largest, self._activated(1, largest))

    def _later(self, number: int, eps: float) -> Block:
        inputs = self.blocks[-1].outputs
        filters, sign = self._signed_filters(number)
        centred = F.conv2d(inputs, filters, padding=1)
        centred -= centred.mean(POSITIONS, keepdim=True)
        inverse_std = _inverse_std(centred.square().mean(POSITIONS), eps)
        largest, places = F.max_pool2d(centred, 2, return_indices=True)
        largest *= _by_channel(inverse_std)
        return Block(inputs, filters, sign, centred, inverse_std, places, largest, self._activated(number, largest))

    def _signed_filters(self, number: int) -> tuple[Tensor, Tensor]:
        scale = self.weights[f"block{number}.norm.weight"]
        sign = torch.where(scale < 0, -1.0, 1.0).to(scale.dtype)
        return self.weights[f"block{number}.conv.weight"] * sign.view(-1, 1, 1, 1), sign

    def _activated(self, number: int, largest: Tensor) -> Tensor:
        scaled = largest * _by_channel(self.weights[f"block{number}.norm.weight"].abs())
        shift = self.weights.get(f"block{number}.norm.bias")
        return (scaled if shift is None else scaled.add_(_by_channel(shift))).relu_()

    def _backward(self, number: int, gradient: Tensor, found: Tensors, to_inputs: bool) -> Tensor:
        """Adds the gradients of a block's weights to those found; returns that of its inputs."""
        block, name = self.blocks[number - 1], f"block{number}"
        gradient = torch.ops.aten.threshold_backward(gradient, block.outputs, 0)  # ReLU
        to_shift, to_scale = gradient.sum(POSITIONS), (gradient * block.largest).sum(POSITIONS)
        found[f"{name}.norm.bias"], found[f"{name}.norm.weight"] = to_shift, to_scale * block.sign
        found[f"{name}.conv.bias"] = torch.zeros_like(to_shift)
        factor = self.weights[f"{name}.norm.weight"].abs() * block.inverse_std
        if number == 1:
            rows = _to_largest(gradient, block).permute(0, 2, 3, 1).flatten(0, 2)
            # Of what batch norm's gradient subtracts, the mean meets patches whose mean is zero, and outputs of the
            # convolution meet patches as the covariance says.
            shares = self.patches.covariance @ (block.filters.flatten(1).t() * block.inverse_std).double()
            to_filters = (self.patches.rows.t() @ rows - shares.to(rows.dtype) * to_scale) * factor
            to_filters = to_filters.t().reshape(block.filters.shape)
        else:
            to_convolved = _to_largest(gradient * _by_channel(factor), block)
            count = block.centred.numel() // len(factor)
            to_convolved -= _by_channel(factor * to_shift / count)
            to_convolved.addcmul_(block.centred, _by_channel(factor * block.inverse_std * to_scale / count), value=-1)
            gradient, to_filters, _ = torch.ops.aten.convolution_backward(
                to_convolved, block.inputs, block.filters, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
                [to_inputs, True, False],
            )  # fmt: skip
        found[f"{name}.conv.weight"] = to_filters * block.sign.view(-1, 1, 1, 1)
        return gradient


def _lowest_block(names: Collection[str]) -> int:
    """The first block that has one of these weights; one more than there are, where only the head has."""
    return min((int(name[len("block")]) for name in names if name.startswith("block")), default=len(BLOCKS) + 1)


def _to_largest(gradient: Tensor, block: Block) -> Tensor:
    """The gradient of pooling's inputs."""
    result: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
        gradient, block.centred, [2, 2], [2, 2], [0, 0], [1, 1], False, block.places
    )
    return result


def _inverse_std(variance: Tensor, eps: float) -> Tensor:
    return (variance + eps).rsqrt() + 0 * variance  # squares that overflow make NaN, not a silent zero


def _by_channel(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1)
