"""Bayesian gradient descent (Zeno et al. 2018): a normal distribution per weight, with a closed-form update.

With an inner loop from ``bgd_inner.py`` it is MetaBGD or MetaCOG (He et al. 2019): the loss whose gradient counts
is then that of a batch after adapting to the batch before.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from wheretolearn.data.random_bits import normal
from wheretolearn.engine.compiled import ParallelStreams
from wheretolearn.engine.graphed import Arithmetic, Job
from wheretolearn.engine.task import Task
from wheretolearn.errors import ConfigError
from wheretolearn.online.learners.base import OnlineLearner
from wheretolearn.online.learners.bgd_inner import InnerLoop, WeightsInner, adapted_weights
from wheretolearn.online.learners.network import Network, Tensors, copied, copy_back, copy_into, gradients, under


def updated(mean: Tensor, std: Tensor, gradients: Tensor, noise: Tensor, mean_eta: float) -> tuple[Tensor, Tensor]:
    """New means and standard deviations from gradients ``[samples, weights]`` at ``mean + std * noise``."""
    expected = gradients.mean(0)
    slope = (gradients * noise).mean(0) * std / 2
    root = torch.hypot(slope, torch.ones_like(slope))
    # Either form of sqrt(1 + slope^2) - slope, whichever does not lose its digits.
    factor = torch.where(slope > 0, 1 / (root + slope), root - slope)
    return mean - mean_eta * std**2 * expected, std * factor


def shortened(gradients: Tensor, clip_norm: float) -> Tensor:
    """Rows at most so long; one that is not finite counts for nothing."""
    norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True, dtype=torch.float64)  # where squares have room
    scale = (clip_norm / norms).clamp(max=1.0).to(gradients.dtype)
    return torch.where(norms.isfinite(), gradients * scale, 0.0)


class BGD(OnlineLearner):
    """Predicts with the mean weights, adapted to the last batch where there is an inner loop."""

    def __init__(
        self,
        model: nn.Module,
        *,
        mean_eta: float,
        initial_std: float,
        samples: int,
        seed: int,
        clip_norm: float | None = None,
        inner: InnerLoop | None = None,
        arithmetic: Arithmetic | None = None,
    ):
        if samples < 1 or not initial_std > 0:
            raise ConfigError(
                "bgd needs at least one sample and an initial standard deviation above 0, not "
                f"samples = {samples} and initial_std = {initial_std}"
            )
        self.network, self.inner, self.seed = Network(model), inner, seed
        # An engine, of the inner loop's order, can take over plain inner steps; everything else is autograd's.
        self.arithmetic = arithmetic if isinstance(inner, WeightsInner) else None
        self.mean_eta, self.samples, self.clip_norm = mean_eta, samples, clip_norm
        start = self.network.start()
        self.shapes = {name: tensor.shape for name, tensor in start.items()}
        self.mean = _flat(start)
        self.std = torch.full_like(self.mean, initial_std)
        self.in_use = self.mean.clone()
        self.updates = torch.zeros((), dtype=torch.int64, device=self.mean.device)  # so far: the key of all noise
        self._streams = ParallelStreams(self.mean.device)
        self.last: Tensors = {}  # the last batch, which an inner loop adapts to

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        return self.network.logits(self._named(self.in_use), inputs)

    @torch.no_grad()
    def observe(self, inputs: Tensor, labels: Tensor) -> None:
        batch = {"inputs": inputs, "labels": labels}
        noise = self.noise()
        sampled = self.mean + self.std * noise
        # The first batch comes after none, and serves as both.
        support = self.last or batch
        if self.arithmetic is not None:
            values = self._gradients(self.arithmetic, sampled, support, batch)
        else:
            values = torch.stack(self._streams.run([partial(self.gradient, row, support, batch) for row in sampled]))
        if self.clip_norm is not None:
            values = shortened(values, self.clip_norm)
        mean, std = updated(self.mean, self.std, values, noise, self.mean_eta)
        self.mean.copy_(mean)
        self.std.copy_(std)
        self.updates += 1
        if self.inner is None:
            self.in_use.copy_(self.mean)
            return
        self.in_use.copy_(self._adapted(batch))
        if self.last:
            copy_into(self.last, batch)  # in place: a CUDA graph reads it there
        else:
            self.last = {name: tensor.clone() for name, tensor in batch.items()}

    def noise(self) -> Tensor:
        """``[samples, weights]``, other numbers for each update."""
        shape = (self.samples, len(self.mean))
        return normal(shape, self.seed, "noise of bgd", self.updates, device=self.mean.device, dtype=self.mean.dtype)

    def gradient(self, weights: Tensor, support: Tensors, query: Tensors) -> Tensor:
        """Of the query batch's summed loss, after adapting to the support batch where there is an inner loop."""

        def loss(own: Tensors) -> Tensor:
            if self.inner is not None:
                order = self.inner.order
                own = adapted_weights(self.network, self.inner, own, support["inputs"], support["labels"], order)
            # The update is that of a posterior, which counts examples: their losses add up.
            return self.network.loss(own, query["inputs"], query["labels"]) * len(query["labels"])

        return _flat(gradients(loss, self._named(weights)))

    def _gradients(self, arithmetic: Arithmetic, sampled: Tensor, support: Tensors, query: Tensors) -> Tensor:
        """What ``gradient`` gives for each row of weights, for all rows at once."""
        assert self.inner is not None
        jobs = [self._job(row, support, query) for row in sampled]
        results = arithmetic.meta_gradients(jobs, self.inner.steps)
        outer = [_flat({name: result.outer[name] for name in self.shapes}) for result in results]
        return torch.stack(outer) * len(query["labels"])

    def _adapted(self, batch: Tensors) -> Tensor:
        """The mean weights after the inner loop on a batch."""
        assert self.inner is not None
        if self.arithmetic is None:
            named = self._named(self.mean)
            return _flat(adapted_weights(self.network, self.inner, named, batch["inputs"], batch["labels"]))
        (found,) = self.arithmetic.adaptations([self._job(self.mean, batch, batch)], self.inner.steps)
        return _flat({**self._named(self.mean), **found.weights})

    def _job(self, weights: Tensor, support: Tensors, query: Tensors) -> Job:
        assert isinstance(self.inner, WeightsInner)
        task = Task(support["inputs"], support["labels"], query["inputs"], query["labels"])
        rates = {name: self.mean.new_full(self.shapes[name], self.inner.lr) for name in self.inner.names}
        return Job({name: _channels_last(tensor) for name, tensor in self._named(weights).items()}, rates, task)

    def _named(self, flat: Tensor) -> Tensors:
        parts = torch.split(flat, [shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def _learned(self) -> Tensors:
        return {"mean": self.mean, "std": self.std, "in_use": self.in_use, "updates": self.updates}

    def state(self) -> dict[str, Tensor]:
        return copied("bgd", self._learned()) | copied("last", self.last)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        copy_back("bgd", self._learned(), state)
        last = under("last", state, self.mean.device)
        if self.last and last:
            copy_into(self.last, last)
        else:
            self.last = last


def _channels_last(weights: Tensor) -> Tensor:
    """Filters as a GPU's convolutions want them, which else lay them out anew for every pass."""
    return weights.contiguous(memory_format=torch.channels_last) if weights.dim() == 4 else weights


def _flat(tensors: Tensors) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])
