"""Meta-experience replay (Riemer et al. 2019, Algorithm 1): SGD on single examples, old and new, with Reptile steps.

For each incoming example ``steps`` times: SGD through a batch of the incoming example and then examples from memory, of
which only the share ``beta`` is kept; and of all these batches together only the share ``gamma``. Then the example is
offered to the memory. The paper leaves the order within a batch open; its authors' code begins with the incoming
example. With it at the end, more is forgotten: a BTI of -12.6 instead of -5.5 on rotations, with the same settings.
"""

import torch
from torch import Tensor

from wheretolearn.continual.lanes import LaneNetwork
from wheretolearn.continual.learners.base import Learner, by_lane
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

    def look(self, inputs: Tensor, labels: Tensor, task: int, new: bool) -> None:
        keys = random_bits_by_lane((labels.shape[1], self.steps), self.seeds, "batches of mer", self.looks)
        for number in range(labels.shape[1]):
            own_inputs, own_labels = inputs[:, number : number + 1], labels[:, number : number + 1]
            self._learn_example(own_inputs, own_labels, keys[:, number])
            # Only now, or the example could be replayed against itself.
            if new:
                self.remember(own_inputs, own_labels, task)

    def _learn_example(self, x: Tensor, y: Tensor, keys: Tensor) -> None:
        """``x[lanes, 1, ...]``, and a key ``[lanes, steps]`` for each batch from memory."""
        assert self.buffer is not None
        start = self.weights
        for key in keys.unbind(1):
            past = self.buffer.sample(self.replay_batch - 1, key)
            inputs, labels = torch.cat([x, past.inputs], 1), torch.cat([y, past.labels], 1)
            present = torch.cat([torch.ones_like(y, dtype=torch.bool), past.valid], 1)
            after = self.network.sgd_in_order(self.weights, self.lr, inputs, labels, present, self.clip_norm)
            self.weights = self.weights.lerp(after, self.beta)
        self.weights = start.lerp_(self.weights, self.gamma)
