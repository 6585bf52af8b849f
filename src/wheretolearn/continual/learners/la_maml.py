"""La-MAML and its sparse variants: look ahead on the new batch, judge the result on new and old examples together.

Each iteration (Algorithm 1 of the paper): one inner step on each new example; the gradient of the meta-loss, on batch
and replay, for weights and mask; a step of the mask; then a step of the weights with the rates of the new mask.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from wheretolearn.continual.lanes import LaneNetwork, clipped
from wheretolearn.continual.learners.base import BatchLearner, Seen, by_lane
from wheretolearn.masks.elementwise import RULES

MetaLoss = Literal["every-step", "final"]
LookAheadRule = Literal["binary", "relu", "dying-relu"]


class LaMAML(BatchLearner):
    """``rule`` says what the raw numbers mean, all of them ``alpha`` at first:

    - ``dying-relu``, La-MAML: they are rectified learning rates, and a rate that falls below zero stays closed.
    - ``binary``, sparse-La-MAML: weights whose number is negative are closed, the others have the rate ``alpha``.
    - ``relu``, sparse-ReLU-La-MAML: rectified rates, with a straight-through gradient that can open them again.
    """

    def __init__(
        self,
        network: LaneNetwork,
        seeds: Tensor,
        *,
        rule: LookAheadRule,
        alpha: float | Tensor,
        mask_lr: float | Tensor,
        memory: int,
        replay_batch: int = 10,
        glances: int = 1,
        meta_loss: MetaLoss = "every-step",
        clip_norm: float | None = 2.0,
        straight_through_scale: float = 1.0,
    ):
        super().__init__(network, seeds, glances=glances, memory=memory, replay_batch=replay_batch)
        self.rule, self.every_step, self.clip_norm = RULES[rule], meta_loss == "every-step", clip_norm
        self.alpha, self.mask_lr = by_lane(alpha, self.weights), by_lane(mask_lr, self.weights)
        self.unit = self.alpha if rule == "binary" else torch.ones_like(self.alpha)  # the rate of a multiplier of one
        self.scale = straight_through_scale
        self.raw = self.alpha.expand_as(self.weights).clone()

    def rates(self) -> Tensor:
        return self.unit * self.rule.multiplier(self.raw)

    def learn(self, seen: Seen, task: int) -> None:
        outer, to_rates = self.network.look_ahead(
            self.weights, self.rates(), seen.inputs, seen.labels, seen.shares, seen.batch, self.every_step
        )
        to_raw = to_rates * self.unit * self.rule.slope(self.raw) * self.scale
        self.raw -= self.mask_lr * clipped(to_raw, self.clip_norm)
        self.weights -= self.rates() * clipped(outer, self.clip_norm)

    def closed(self) -> dict[str, Tensor]:
        is_closed = (self.rates() <= 0).to(self.weights.dtype)
        return {name: share.flatten(1).mean(1) for name, share in self.network.views(is_closed).items()}

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"raw": self.raw.clone()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.raw.copy_(state["raw"])
