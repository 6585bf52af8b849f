"""The convolutional network, learning in closed form with all lanes at once.

A convolution is a product of the patches of its input with each lane's filters, so that all lanes share a few large
products. Between layers images lie as ``[lanes * examples, height, width, channels]``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from wheretolearn.continual.lanes import ModuleLanes
from wheretolearn.models.cifar_net import CifarNet

SIZE, STRIDE = 3, 2  # of every convolution, with one pixel of padding


class CifarLanes(ModuleLanes):
    def __init__(self, models: Sequence[CifarNet]):
        super().__init__(models)
        layers = [name.removesuffix(".weight") for name in self.shapes if name.endswith(".weight")]
        self.layers = layers
        self.convolutions = sum(len(self.shapes[f"{name}.weight"]) == 4 for name in layers)  # they come first

    def gradient(self, weights: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor | None = None) -> Tensor:
        if shares is None:
            shares = torch.full_like(labels, 1, dtype=weights.dtype) / labels.shape[1]
        seen = _Pass(self, inputs, labels, shares)
        seen.run(weights)
        return seen.gradient(torch.empty_like(weights))

    def look_ahead(
        self, weights: Tensor, rates: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor, steps: int, every: bool
    ) -> tuple[Tensor, Tensor]:
        """As in ``LaneNetwork``; an example that makes an inner step has a share above zero in the meta-loss.

        The meta-loss after a step and the next inner step need the same weights: one pass serves both.
        """
        phi, inner_sum = weights, torch.zeros_like(weights)
        outer, to_rates = torch.zeros_like(weights), torch.zeros_like(weights)
        gradient = torch.empty_like(weights)
        everything = _Pass(self, inputs, labels, shares)
        for state in range(steps + 1):  # after so many inner steps
            meta = state > 0 and (every or state == steps)
            seen, place = everything, state
            if not meta:
                own = slice(state, state + 1)
                seen, place = _Pass(self, inputs[:, own], labels[:, own], shares[:, own]), 0
            seen.run(phi)
            if meta:
                seen.gradient(gradient)
                outer += gradient
                to_rates.addcmul_(gradient, inner_sum, value=-1)
            if state < steps:
                inner_sum += seen.gradient(gradient, place)
                phi = torch.addcmul(weights, rates, inner_sum, value=-1)
        count = steps if every else 1
        return outer.div_(count), to_rates.div_(count)


class _Pass:
    """Forward and backward through the networks of all lanes, for examples that stay the same."""

    def __init__(self, network: CifarLanes, inputs: Tensor, labels: Tensor, shares: Tensor):
        self.network, self.labels, self.shares = network, labels, shares
        self.lanes, self.examples = labels.shape
        images = F.pad(inputs.flatten(0, 1).movedim(1, -1), (0, 0, 1, 1, 1, 1))
        self.padded = [images]  # what each convolution sees
        self.rows = [self._patches(images)]  # what each layer multiplies its matrix with
        self.deltas: list[Tensor] = []  # of the weighted losses, for what each layer gives

    def run(self, weights: Tensor) -> None:
        views = self.network.views(weights)
        matrices = self._matrices(views)
        biases = [views[f"{name}.bias"].unsqueeze(1) for name in self.network.layers]
        last, first_linear = len(matrices) - 1, self.network.convolutions
        del self.rows[1:]
        for number in range(len(matrices)):
            z = torch.baddbmm(biases[number], self.rows[number], matrices[number].mT)
            if number + 1 < first_linear:
                self.rows.append(self._patches(self._next_images(number + 1, z)))
            elif number + 1 == first_linear:  # features by channel, as the module has them
                places = z.clamp_min_(0).view(self.lanes, self.examples, -1, z.shape[-1])
                self.rows.append(places.mT.flatten(2))
            elif number < last:
                self.rows.append(z.clamp_min_(0))
        delta = (z.softmax(-1) - F.one_hot(self.labels, z.shape[-1])) * self.shares.unsqueeze(-1)
        self.deltas = [delta]
        for number in range(last, 0, -1):
            delta = delta @ matrices[number]
            if number < first_linear:
                images = self.padded[number]
                delta = _sum_patches(delta, images)[:, 1:-1, 1:-1] * (images[:, 1:-1, 1:-1] > 0)
                delta = delta.reshape(self.lanes, -1, images.shape[-1])
            else:
                delta = delta * (self.rows[number] > 0)
                if number == first_linear:
                    channels = matrices[number - 1].shape[1]
                    delta = delta.view(self.lanes, self.examples, channels, -1).mT.reshape(self.lanes, -1, channels)
            self.deltas.append(delta)
        self.deltas.reverse()

    def gradient(self, result: Tensor, example: int | None = None) -> Tensor:
        """Of the weighted sum of losses, or of one example's loss; written into ``result``."""
        views = self.network.views(result)
        layers = zip(self.network.layers, self._matrices(views), self.deltas, self.rows, strict=True)
        for name, matrix, delta, rows in layers:
            if example is not None:
                each = rows.shape[1] // self.examples
                own = slice(example * each, (example + 1) * each)
                delta, rows = delta[:, own] / self.shares[:, example].view(-1, 1, 1), rows[:, own]
            torch.bmm(delta.mT, rows, out=matrix)
            torch.sum(delta, 1, out=views[f"{name}.bias"])
        return result

    def _matrices(self, views: dict[str, Tensor]) -> list[Tensor]:
        return [views[f"{name}.weight"].flatten(2) for name in self.network.layers]

    def _next_images(self, number: int, z: Tensor) -> Tensor:
        """Rectified outputs of a convolution, padded for the next one."""
        side = (self.padded[number - 1].shape[1] - SIZE) // STRIDE + 1
        if len(self.padded) == number:
            self.padded.append(z.new_zeros(self.lanes * self.examples, side + 2, side + 2, z.shape[-1]))
        images = self.padded[number]
        torch.clamp_min(z.view(-1, side, side, z.shape[-1]), 0, out=images[:, 1:-1, 1:-1])
        return images

    def _patches(self, images: Tensor) -> Tensor:
        return (
            images.unfold(1, SIZE, STRIDE).unfold(2, SIZE, STRIDE).reshape(self.lanes, -1, images.shape[-1] * SIZE**2)
        )


def _sum_patches(patches: Tensor, images: Tensor) -> Tensor:
    """The transpose of taking patches of ``images``."""
    count, height, wide, channels = images.shape
    down, right = ((side - SIZE) // STRIDE + 1 for side in (height, wide))
    backward = torch.ops.aten.unfold_backward
    each = patches.view(count, down, right, channels, SIZE, SIZE)
    columns = backward(each, (count, down, wide, channels, SIZE), 2, SIZE, STRIDE)
    images_sum: Tensor = backward(columns, (count, height, wide, channels), 1, SIZE, STRIDE)
    return images_sum
