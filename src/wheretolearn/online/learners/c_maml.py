"""C-MAML with prolonged adaptation and update modulation (Caccia et al. 2020), and its sparse variants.

The weights in use, phi, go on adapting to each batch for as long as the task seems to stay the same. When adapting
lowers the loss of a batch by more than a threshold, the task must have changed: the batches kept since the last time
make one meta-update of theta and mask, and phi starts from theta again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wheretolearn.engine.graphed import Adaptation, Job, JobGradient, batched
from wheretolearn.errors import ConfigError, NonFiniteError
from wheretolearn.masks import GradientMask
from wheretolearn.online.learners.base import OnlineLearner
from wheretolearn.online.learners.batch_buffer import BatchBuffer
from wheretolearn.online.learners.c_maml_masks import TensorRates
from wheretolearn.online.learners.network import (
    Network,
    Tensors,
    adam,
    adapted,
    arithmetic_for,
    copied,
    copy_back,
    copy_into,
    loss_of,
    optimizer_tensors,
    under,
)

Restart = Literal["at once", "next batch"]


class CMAML(OnlineLearner):
    """``mask`` makes the variant, see ``c_maml_masks.py``. Weights that it does not cover are theta's at all times.

    - ``switch_margin``: by how much adapting must lower the loss of a batch to mean a new task (lambda).
    - ``update_scale``: a meta-update counts 1 - exp(-update_scale * its loss) (gamma of update modulation).
    - ``buffer``: more batches than this make a meta-update without a switch.
    - ``restart``: phi starts anew with the batch that gave the switch away, as the papers write it, or with the next
      one, as the published code does.
    - ``pairs_at_once``: of a meta-update's independent support/query pairs; changes memory, not results.
    """

    def __init__(
        self,
        model: nn.Module,
        mask: GradientMask,
        *,
        inner_steps: int,
        inner_lr: float,
        lr: float,
        mask_lr: float,
        switch_margin: float,
        update_scale: float,
        buffer: int = 100,
        restart: Restart = "at once",
        pairs_at_once: int = 10,
    ):
        if not mask.elementwise:
            raise ConfigError(f"online learners take masks with one factor per weight, not {mask.kind!r}")
        if min(inner_steps, buffer, pairs_at_once) < 1:
            raise ConfigError(
                "inner_steps, buffer and pairs_at_once must be 1 or more, not "
                f"{inner_steps}, {buffer} and {pairs_at_once}"
            )
        self.mask, self.inner_steps, self.inner_lr = mask, inner_steps, inner_lr
        self.switch_margin, self.update_scale = switch_margin, update_scale
        self.buffer_limit, self.pairs_at_once, self.restart = buffer, pairs_at_once, restart
        self.arithmetic = arithmetic_for(model)
        self.theta = Network(model).start()
        self.phi = {name: self.theta[name].clone() for name in mask.names}
        self.buffer = BatchBuffer()
        self.optimizer = adam((self.theta, lr), (mask.raw, mask_lr))
        self._detected = False

    @property
    def detected(self) -> bool:
        return self._detected

    @property
    def starts_anew(self) -> bool:
        """Whether the next adaptation starts from theta instead of the weights in use."""
        return self._detected and self.restart == "next batch"

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        return self.arithmetic.logits({**self.theta, **self.phi}, inputs)

    @torch.no_grad()
    def observe(self, inputs: Tensor, labels: Tensor) -> None:
        in_use = {**self.theta, **self.phi}
        found = self.adapt(self.theta if self.starts_anew else in_use, inputs, labels)
        predicted = F.softmax(self.arithmetic.logits(in_use, inputs), dim=1) if self.starts_anew else found.before
        losses = torch.stack([loss_of(predicted, labels), found.loss])
        before, after = losses.tolist()  # the step's one wait for the device
        self.check_finite(before, after)
        copy_into(self.phi, found.weights)
        if self.conclude(before, after, inputs, labels):
            self.meta_update()
        if self._detected and self.restart == "at once":
            copy_into(self.phi, self.adapt(self.theta, inputs, labels).weights)

    def adapt(self, weights: Tensors, inputs: Tensor, labels: Tensor) -> Adaptation:
        return adapted(self.arithmetic, weights, self.rates(), inputs, labels, self.inner_steps)

    def check_finite(self, before: float, after: float) -> None:
        if not math.isfinite(before + after):
            raise NonFiniteError(
                f"the loss of a batch is not finite: {before:g} before adapting to it, {after:g} after. "
                "Smaller learning rates may help"
            )

    def conclude(self, before: float, after: float, inputs: Tensor, labels: Tensor) -> bool:
        """Whether a meta-update is due, from a batch's losses before and after adapting; if not, keep the batch."""
        self._detected = after + self.switch_margin <= before
        if (self._detected and self.buffer.count > 0) or self.buffer.count > self.buffer_limit:
            return True
        self.buffer.add(inputs, labels)
        return False

    def rates(self) -> Tensors:
        return {name: multiplier * self.inner_lr for name, multiplier in self.mask.multipliers().items()}

    @torch.no_grad()
    def meta_update(self) -> None:
        """One step of theta and mask on the buffered pairs, which are then forgotten."""
        sums, rates = PairSums(self.theta, self.mask.names), self.rates()
        jobs = (Job(self.theta, rates, task) for task in self.buffer.tasks())
        for chunk in batched(jobs, self.pairs_at_once):
            sums.add(self.arithmetic.meta_gradients(chunk, self.inner_steps))
        self.take_step(sums)
        self.buffer.clear()

    def take_step(self, sums: "PairSums") -> None:
        """One step of theta and mask on the mean query loss of the pairs."""
        weight = -torch.expm1(-self.update_scale * sums.loss / sums.count) / sums.count
        for name, gradient in sums.outer.items():
            self.theta[name].grad = gradient * weight
        to_multipliers = {name: product * (-self.inner_lr * weight) for name, product in sums.products.items()}  # Eq. 5
        for name, gradient in self.mask.pull_back(to_multipliers).items():
            self.mask.raw[name].grad = gradient.to(self.mask.raw[name].dtype)
        self.optimizer.step()

    def closed(self) -> dict[str, float]:
        if isinstance(self.mask, TensorRates) or not self.mask.raw:
            return {}
        shares = self.mask.sparsity().by_tensor
        return {name: shares[name] for name in self.mask.names}

    def state(self) -> dict[str, Tensor]:
        return {
            **copied("theta", self.theta),
            **copied("phi", self.phi),
            **copied("mask", self.mask.tensors()),
            **copied("buffer", self.buffer.state()),
            **copied("optimizer", optimizer_tensors(self.optimizer)),
            "detected": torch.tensor(self._detected),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        copy_back("theta", self.theta, state)
        copy_back("phi", self.phi, state)
        copy_back("mask", self.mask.tensors(), state)
        self.buffer.restore(under("buffer", state, next(iter(self.theta.values())).device))
        copy_back("optimizer", optimizer_tensors(self.optimizer), state)
        self._detected = bool(state["detected"])


class PairSums:
    """What a meta-update needs of its pairs, summed over them. All tensors change in place."""

    def __init__(self, theta: Tensors, moving: Sequence[str]):
        self.outer = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
        self.products = {name: torch.zeros_like(theta[name]) for name in moving}  # of outer and summed inner gradients
        self.loss, self.count = (next(iter(theta.values())).new_zeros(()) for _ in range(2))

    def tensors(self) -> list[Tensor]:
        return [*self.outer.values(), *self.products.values(), self.loss, self.count]

    def hold(self, result: JobGradient) -> None:
        """That of one pair alone."""
        for name, gradient in result.outer.items():
            self.outer[name].copy_(gradient)
        for name, inner_sum in result.inner_sum.items():
            self.products[name].copy_(result.outer[name] * inner_sum)
        self.loss.copy_(result.loss)
        self.count.fill_(1)

    def add(self, results: Sequence[JobGradient]) -> None:
        for result in results:
            for name, gradient in result.outer.items():
                self.outer[name] += gradient
            for name, inner_sum in result.inner_sum.items():
                self.products[name] += result.outer[name] * inner_sum
            self.loss += result.loss
        self.count += len(results)
