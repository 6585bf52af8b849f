"""Networks of one architecture side by side: lane by lane other weights, one matrix ``[lanes, weights]`` for all.

``ModuleLanes`` takes any module and goes through the lanes one by one, with autograd. ``MLPLanes`` (mlp_lanes.py) and
``CifarLanes`` (cifar_lanes.py) learn in closed form, all lanes at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from wheretolearn.engine.compiled import ParallelStreams


class LaneNetwork(ABC):
    """What a continual learner needs of a network. Gradients are those of the mean cross-entropy, first order."""

    weights: Tensor  # [lanes, weights], those the networks start with

    @abstractmethod
    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """A matrix like ``weights`` as ``[lanes, *shape]`` by parameter name, sharing its memory."""

    @abstractmethod
    def logits(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """``[lanes, examples, classes]`` of inputs ``[lanes, examples, ...]``."""

    @abstractmethod
    def gradient(self, weights: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor | None = None) -> Tensor:
        """``[lanes, weights]``; ``shares[lanes, examples]`` weigh the examples, by default alike."""

    def look_ahead(
        self, weights: Tensor, rates: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor, steps: int, every: bool
    ) -> tuple[Tensor, Tensor]:
        """One iteration of La-MAML's inner loop, and the gradients of its meta-loss for weights and rates.

        An inner step on each of the first ``steps`` examples; the meta-loss, on all examples, is taken after every
        step and averaged, or after the last step only. This is the readable version.
        """
        phi, inner_sum = weights, torch.zeros_like(weights)
        outer, to_rates = torch.zeros_like(weights), torch.zeros_like(weights)
        for step in range(steps):
            inner_sum = inner_sum + self.gradient(phi, inputs[:, step : step + 1], labels[:, step : step + 1])
            phi = weights - rates * inner_sum
            if every or step == steps - 1:
                gradient = self.gradient(phi, inputs, labels, shares)
                outer = outer + gradient
                to_rates = to_rates - gradient * inner_sum
        count = steps if every else 1
        return outer / count, to_rates / count

    def sgd_in_order(
        self,
        weights: Tensor,
        lr: Tensor,
        inputs: Tensor,
        labels: Tensor,
        present: Tensor,
        clip_norm: float | None = None,
    ) -> Tensor:
        """The weights after one SGD step on each example in turn; those not ``present[lanes, examples]`` make none.

        ``lr`` is a column ``[lanes, 1]``; ``clip_norm`` bounds the gradient of each example.
        """
        for number in range(labels.shape[1]):
            own = slice(number, number + 1)
            gradient = self.gradient(weights, inputs[:, own], labels[:, own], present[:, own].to(weights.dtype))
            weights = weights - lr * clipped(gradient, clip_norm)
        return weights

    def load(self, states: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """A matrix like ``weights`` from one set of tensors per lane."""
        flat = torch.zeros_like(self.weights)
        for name, view in self.views(flat).items():
            view.copy_(torch.stack([state[name].to(flat) for state in states]))
        return flat


class ModuleLanes(LaneNetwork):
    def __init__(self, models: Sequence[nn.Module]):
        self.model = models[0]
        self._streams = ParallelStreams(next(self.model.parameters()).device)
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        self.weights = torch.stack([torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models])

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = torch.split(flat, [shape.numel() for shape in self.shapes.values()], dim=1)
        return {name: part.view(-1, *shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def logits(self, weights: Tensor, inputs: Tensor) -> Tensor:
        return torch.stack([self._logits(row, x) for row, x in zip(weights, inputs, strict=True)])

    def gradient(self, weights: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor | None = None) -> Tensor:
        rows = []
        for lane, row in enumerate(weights):
            row = row.detach().requires_grad_()
            with torch.enable_grad():
                logits = self._logits(row, inputs[lane])
                if shares is None:
                    loss = F.cross_entropy(logits, labels[lane])
                else:
                    loss = (F.cross_entropy(logits, labels[lane], reduction="none") * shares[lane]).sum()
                rows.append(torch.autograd.grad(loss, row)[0])
        return torch.stack(rows)

    def look_ahead(
        self, weights: Tensor, rates: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor, steps: int, every: bool
    ) -> tuple[Tensor, Tensor]:
        """As it stands for each lane; on a GPU the lanes share it."""

        def of_lane(lane: int) -> tuple[Tensor, Tensor]:
            own = [tensor[lane : lane + 1] for tensor in (weights, rates, inputs, labels, shares)]
            return super(ModuleLanes, self).look_ahead(own[0], own[1], own[2], own[3], own[4], steps, every)

        results = self._streams.run([partial(of_lane, lane) for lane in range(len(weights))])
        outer, to_rates = zip(*results, strict=True)
        return torch.cat(outer), torch.cat(to_rates)

    def _logits(self, row: Tensor, inputs: Tensor) -> Tensor:
        parameters = {name: view[0] for name, view in self.views(row.unsqueeze(0)).items()}
        logits: Tensor = functional_call(self.model, parameters, (inputs,))
        return logits


def clipped(gradient: Tensor, norm: float | None) -> Tensor:
    """Each lane's gradient, shortened to ``norm`` where it is longer."""
    if norm is None:
        return gradient
    length = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
    factor: Tensor = (norm / (length + 1e-6)).clamp(max=1.0)
    return gradient * factor
