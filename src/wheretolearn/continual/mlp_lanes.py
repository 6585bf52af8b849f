"""Multi-layer perceptrons of all lanes at once, in closed form.

Each layer is one matrix ``[out, in + 1]`` whose last column is the bias, and inputs have a one in the last place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from wheretolearn.continual.lanes import LaneNetwork
from wheretolearn.models.mlp import MLP


class MLPLanes(LaneNetwork):
    def __init__(self, models: Sequence[MLP]):
        self.names = [name for name, _ in models[0].named_children()]
        shapes = [models[0].get_parameter(f"{name}.weight").shape for name in self.names]
        self.sizes = [(out, into) for out, into in shapes]
        count = sum(out * (into + 1) for out, into in self.sizes)
        parameter = next(models[0].parameters())
        self.weights = torch.zeros((len(models), count), dtype=parameter.dtype, device=parameter.device)
        self.weights = self.load([{name: p.detach() for name, p in model.named_parameters()} for model in models])

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        named = {}
        for name, matrix in zip(self.names, self._matrices(flat), strict=True):
            named[f"{name}.weight"], named[f"{name}.bias"] = matrix[..., :-1], matrix[..., -1]
        return named

    def logits(self, weights: Tensor, inputs: Tensor) -> Tensor:
        *hidden, last = self._matrices(weights)
        x = inputs.flatten(2)
        for matrix in hidden:
            x = _apply(matrix, x).relu_()
        return _apply(last, x)

    def gradient(self, weights: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor | None = None) -> Tensor:
        matrices = self._matrices(weights)
        activations, x = [], with_one(inputs.flatten(2))
        for number, matrix in enumerate(matrices):
            activations.append(x)
            x = x @ matrix.mT
            if number < len(matrices) - 1:
                x = with_one(x.relu_())
        delta = x.softmax(-1) - F.one_hot(labels, x.shape[-1])
        delta = delta / labels.shape[1] if shares is None else delta * shares.unsqueeze(-1)
        result = torch.empty_like(weights)
        places = self._matrices(result)
        for number in range(len(matrices) - 1, -1, -1):
            torch.bmm(delta.mT, activations[number], out=places[number])
            if number > 0:
                delta = (delta @ matrices[number][..., :-1]) * (activations[number][..., :-1] > 0)
        return result

    def look_ahead(
        self, weights: Tensor, rates: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor, steps: int, every: bool
    ) -> tuple[Tensor, Tensor]:
        """As in ``LaneNetwork``, without ever forming the first layer's adapted weights, most of the network.

        An inner step on example j changes the first layer's matrix by -rates * (delta_j (x) x_j), and so its output
        for an example b, at unit o, by -delta_j[o] * sum_i x_b[i] x_j[i] rates[o, i]. The sums do not depend on the
        steps taken: they are one product of the matrix ``pairs`` (all x_b * x_j) with the rates. In the same way the
        meta-gradients are products of sums of deltas with ``pairs``. What is left to do step by step is small.
        """
        lanes, examples = labels.shape
        first, *upper = self._matrices(weights)
        first_rates, *upper_rates = self._matrices(rates)
        outer, to_rates = torch.zeros_like(weights), torch.zeros_like(weights)
        first_outer, *upper_outer = self._matrices(outer)
        first_to_rates, *upper_to_rates = self._matrices(to_rates)
        inner_sums = [torch.zeros_like(matrix) for matrix in upper]
        phi = list(upper)

        x = with_one(inputs.flatten(2))
        pairs = (x[:, :steps].unsqueeze(2) * x.unsqueeze(1)).view(lanes, steps * examples, -1)
        effects = (pairs @ first_rates.mT).view(lanes, steps, examples, -1)
        output = x @ first.mT
        target = F.one_hot(labels, upper[-1].shape[1] if upper else first.shape[1]).to(x.dtype)
        share = shares.unsqueeze(-1)
        hidden = [torch.ones((lanes, examples, matrix.shape[-1]), dtype=x.dtype, device=x.device) for matrix in upper]
        first_deltas, weighted = [], []  # of the inner steps, and of the meta-losses
        for state in range(steps + 1):  # after so many inner steps
            meta = state > 0 and (every or state == steps)
            z = output
            for number, matrix in enumerate(phi):
                torch.clamp_min(z, 0, out=hidden[number][..., :-1])
                z = hidden[number] @ matrix.mT
            deltas = [z.softmax(-1) - target]
            for matrix, activation in zip(reversed(phi), reversed(hidden), strict=True):
                deltas.append((deltas[-1] @ matrix[..., :-1]) * (activation[..., :-1] > 0))
            deltas.reverse()
            if meta:
                weighted.append(deltas[0] * share)
                for number, activation in enumerate(hidden):
                    gradient = (deltas[number + 1] * share).mT @ activation
                    upper_outer[number] += gradient
                    upper_to_rates[number].addcmul_(gradient, inner_sums[number], value=-1)
            if state < steps:
                first_deltas.append(deltas[0][:, state : state + 1])
                output = torch.addcmul(output, first_deltas[-1], effects[:, state], value=-1)
                for number, activation in enumerate(hidden):
                    own = slice(state, state + 1)
                    inner_sums[number].baddbmm_(deltas[number + 1][:, own].mT, activation[:, own])
                    phi[number] = torch.addcmul(upper[number], upper_rates[number], inner_sums[number], value=-1)
        count = len(weighted)
        first_outer += sum(weighted[1:], weighted[0]).mT @ x
        # An inner step counts in all meta-losses after it.
        after = torch.stack(weighted, 1) if every else weighted[0].unsqueeze(1).expand(-1, steps, -1, -1)
        after = after.flip(1).cumsum(1).flip(1) if every else after
        changed = (after * torch.stack(first_deltas, 1)).view(lanes, steps * examples, -1)
        first_to_rates -= changed.mT @ pairs
        return outer.div_(count), to_rates.div_(count)

    def sgd_in_order(
        self,
        weights: Tensor,
        lr: Tensor,
        inputs: Tensor,
        labels: Tensor,
        present: Tensor,
        clip_norm: float | None = None,
    ) -> Tensor:
        """As in ``LaneNetwork``, touching the first layer, most of the network, only at the end.

        A step on example j changes the first layer by -lr * delta_j (x) x_j, and so its output for an example b by
        -lr * delta_j * <x_j, x_b>: products that are known before the first step.
        """
        weights = weights.clone()
        layers = self._layers(weights)
        (first, first_bias), *stored = layers
        upper = [
            (matrix.contiguous(), bias.contiguous()) for matrix, bias in stored
        ]  # products in place are faster there
        x = inputs.flatten(2)
        products = torch.baddbmm(torch.ones_like(x[:, :1, :1]), x, x.mT)  # plus one for the bias
        outputs = torch.baddbmm(first_bias, x, first.mT)
        first_changes = torch.empty_like(outputs)
        target = F.one_hot(labels, layers[-1][0].shape[1]).to(x.dtype)
        rates = -lr.unsqueeze(-1) * present.unsqueeze(-1)
        by_example = zip(
            *(torch.split(tensor, 1, dim=1) for tensor in (outputs, target, rates, first_changes)), strict=True
        )
        for number, (z, wanted, rate, first_change) in enumerate(by_example):
            hidden = []
            for matrix, bias in upper:
                hidden.append(z.relu())
                z = torch.baddbmm(bias, hidden[-1], matrix.mT)
            deltas = [z.softmax(-1) - wanted]
            for (matrix, _), activation in zip(reversed(upper), reversed(hidden), strict=True):
                deltas.append(torch.bmm(deltas[-1], matrix) * (activation > 0))
            first_delta, *upper_deltas = reversed(deltas)
            if clip_norm is not None:
                squares = first_delta.square().sum(-1, keepdim=True) * products[:, number, number].view(-1, 1, 1)
                for delta, activation in zip(upper_deltas, hidden, strict=True):
                    squares += delta.square().sum(-1, keepdim=True) * (activation.square().sum(-1, keepdim=True) + 1)
                rate = rate * (clip_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
            for (matrix, bias), delta, activation in zip(upper, upper_deltas, hidden, strict=True):
                change = delta * rate
                matrix.baddbmm_(change.mT, activation)
                bias += change
            torch.mul(first_delta, rate, out=first_change)
            outputs.baddbmm_(products[:, :, number : number + 1], first_change)
        first.baddbmm_(first_changes.mT, x)
        first_bias += first_changes.sum(1, keepdim=True)
        for (matrix, bias), (new_matrix, new_bias) in zip(stored, upper, strict=True):
            matrix.copy_(new_matrix)
            bias.copy_(new_bias)
        return weights

    def _layers(self, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Weight ``[lanes, out, in]`` and bias ``[lanes, 1, out]`` of each layer, sharing memory with ``weights``."""
        views = list(self.views(weights).values())
        return [(matrix, bias.unsqueeze(1)) for matrix, bias in zip(views[::2], views[1::2], strict=True)]

    def _matrices(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [out * (into + 1) for out, into in self.sizes], dim=1)
        return [part.view(-1, out, into + 1) for part, (out, into) in zip(parts, self.sizes, strict=True)]


def with_one(x: Tensor) -> Tensor:
    return F.pad(x, (0, 1), value=1.0)


def _apply(matrix: Tensor, x: Tensor) -> Tensor:
    return torch.baddbmm(matrix[..., -1].unsqueeze(1), x, matrix[..., :-1].mT)
