"""Meta-experience replay (Riemer et al. 2019, Algorithm 1): SGD on single examples, old and new, with Reptile steps.

For each incoming example ``steps`` times: SGD through a batch from memory that ends with the incoming example, of which
only the share ``beta`` is kept; and of all these batches together only the share ``gamma``. Then the example is offered
to the memory.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from wheretolearn.continual.buffer import ReplayBuffer
from wheretolearn.continual.lanes import LaneNetwork
from wheretolearn.continual.learners.base import Learner, by_lane, clipped
from wheretolearn.continual.mlp_lanes import MLPLanes
from wheretolearn.data.random_bits import random_bits_by_lane
from wheretolearn.errors import ConfigError


class MER(Learner):
    """``replay_batch`` counts the incoming example too; while the memory holds fewer, batches are shorter.

    ``clip_norm`` shortens the gradient of each single example.
    """

    def __init__(
        self,
        network: LaneNetwork,
        seeds: Tensor,
        *,
        lr: float | Tensor,
        memory: int,
        beta: float | Tensor = 0.1,
        gamma: float | Tensor = 1.0,
        steps: int = 1,
        replay_batch: int = 10,
        glances: int = 1,
        clip_norm: float | None = None,
    ):
        if steps < 1 or replay_batch < 1:
            raise ConfigError(
                "mer needs at least one batch per example and one example per batch, not "
                f"steps = {steps} and replay_batch = {replay_batch}"
            )
        super().__init__(network, seeds, glances=glances, memory=memory, replay_batch=replay_batch)
        self.lr, self.steps, self.clip_norm = by_lane(lr, self.weights), steps, clip_norm
        self.beta, self.gamma = by_lane(beta, self.weights), by_lane(gamma, self.weights)

    @torch.no_grad()
    def observe(self, inputs: Tensor, labels: Tensor, *, task: int = 0, fresh: bool = True) -> None:
        if self.buffer is None:
            self.buffer = ReplayBuffer(self.seeds, max(1, self.memory_size), tuple(inputs.shape[2:]), inputs.dtype)
        batch = labels.shape[1]
        lane = torch.arange(len(labels), device=labels.device).unsqueeze(1)
        for glance in range(self.glances):
            order = random_bits_by_lane((batch,), self.seeds, "glance", self.looks).argsort(1)
            keys = random_bits_by_lane((batch, self.steps), self.seeds, "batches of mer", self.looks)
            x, y = inputs[lane, order], labels[lane, order]
            for number in range(batch):
                own_x, own_y = x[:, number : number + 1], y[:, number : number + 1]
                self._learn_example(own_x, own_y, keys[:, number])
                # Only now, or the example could be replayed against itself.
                if glance == 0 and fresh:
                    self.remember(own_x, own_y, task)
            self.looks += 1

    def _learn_example(self, x: Tensor, y: Tensor, keys: Tensor) -> None:
        """``x[lanes, 1, ...]``, and a key ``[lanes, steps]`` for each batch from memory."""
        assert self.buffer is not None
        start = self.weights
        for key in keys.unbind(1):
            past = self.buffer.sample(self.replay_batch - 1, key)
            inputs, labels = torch.cat([past.inputs, x], 1), torch.cat([past.labels, y], 1)
            present = torch.cat([past.valid, torch.ones_like(y, dtype=torch.bool)], 1)
            after = sgd_in_order(self.network, self.weights, self.lr, inputs, labels, present, self.clip_norm)
            self.weights = self.weights.lerp(after, self.beta)
        self.weights = start.lerp_(self.weights, self.gamma)


def sgd_in_order(
    network: LaneNetwork,
    weights: Tensor,
    lr: Tensor,
    inputs: Tensor,
    labels: Tensor,
    present: Tensor,
    clip_norm: float | None = None,
) -> Tensor:
    """The weights after one SGD step on each example in turn; those not ``present[lanes, examples]`` make no step."""
    if isinstance(network, MLPLanes):
        return _mlp_sgd_in_order(network, weights, lr, inputs, labels, present, clip_norm)
    for number in range(labels.shape[1]):
        own = slice(number, number + 1)
        gradient = network.gradient(weights, inputs[:, own], labels[:, own], present[:, own].to(weights.dtype))
        weights = weights - lr * clipped(gradient, clip_norm)
    return weights


def _mlp_sgd_in_order(
    network: MLPLanes,
    weights: Tensor,
    lr: Tensor,
    inputs: Tensor,
    labels: Tensor,
    present: Tensor,
    clip_norm: float | None,
) -> Tensor:
    """The same for perceptrons, touching the first layer, most of the network, only at the end.

    A step on example j changes the first layer by -lr * delta_j (x) x_j, and so its output for an example b by
    -lr * delta_j * <x_j, x_b>: products that are known before the first step.
    """
    weights = weights.clone()
    layers = _layers(network, weights)
    (first, first_bias), *stored = layers
    upper = [(matrix.contiguous(), bias.contiguous()) for matrix, bias in stored]  # products in place are faster there
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


def _layers(network: MLPLanes, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Weight ``[lanes, out, in]`` and bias ``[lanes, 1, out]`` of each layer, sharing memory with ``weights``."""
    views = list(network.views(weights).values())
    return [(matrix, bias.unsqueeze(1)) for matrix, bias in zip(views[::2], views[1::2], strict=True)]
