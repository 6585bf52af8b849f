"""Gradient episodic memory (Lopez-Paz & Ranzato 2017): steps that do not work against any past task.

Each task has a memory of its own, a ring of its latest examples. Where the gradient on the batch points against the
gradient on a past task's memory, it is replaced by the nearest one that does not: a small quadratic programme.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wheretolearn.continual.lanes import LaneNetwork, clipped
from wheretolearn.continual.learners.base import BatchLearner, Seen, by_lane
from wheretolearn.errors import ConfigError, NonFiniteError, UserError

RIDGE = 1e-10  # relative to each diagonal entry; keeps the programme solvable where past gradients are parallel


class GEM(BatchLearner):
    """``memory_strength`` is the margin: the least weight of every past gradient in a corrected step.

    ``tasks``: how many there will be. ``clip_norm`` shortens every gradient, of batch and memories, before comparing.
    """

    def __init__(
        self,
        network: LaneNetwork,
        seeds: Tensor,
        *,
        lr: float | Tensor,
        tasks: int,
        memory_per_task: int,
        memory_strength: float | Tensor = 0.5,
        glances: int = 1,
        clip_norm: float | None = None,
    ):
        if tasks < 1 or memory_per_task < 1:
            raise ConfigError(
                f"gem needs at least one task and one example per task, not tasks = {tasks} and "
                f"memory_per_task = {memory_per_task}"
            )
        super().__init__(network, seeds, glances=glances)
        self.lr, self.clip_norm = by_lane(lr, self.weights), clip_norm
        self.margin = by_lane(memory_strength, self.weights.double()).expand(len(seeds), 1)
        self.tasks, self.memory_per_task = tasks, memory_per_task
        self.stored = torch.zeros((len(seeds), tasks), dtype=torch.int64, device=seeds.device)  # examples so far
        self.inputs: Tensor | None = None  # [lanes, tasks, memory_per_task, ...], from the first batch on
        self.labels = torch.zeros((len(seeds), tasks, memory_per_task), dtype=torch.int64, device=seeds.device)

    def remember(self, inputs: Tensor, labels: Tensor, task: int) -> None:
        if not 0 <= task < self.tasks:
            raise ConfigError(f"gem has memory for {self.tasks} tasks and was shown task number {task} (from 0)")
        if self.inputs is None:
            self.inputs = inputs.new_zeros((*self.labels.shape, *inputs.shape[2:]))
        number = self.stored[:, task : task + 1] + torch.arange(labels.shape[1], device=labels.device)
        kept = slice(-self.memory_per_task, None)  # of a batch larger than the memory the end
        lane, place = torch.arange(len(labels), device=labels.device).unsqueeze(1), number % self.memory_per_task
        self.inputs[lane, task, place[:, kept]] = inputs[:, kept]
        self.labels[lane, task, place[:, kept]] = labels[:, kept]
        self.stored[:, task] += labels.shape[1]

    def learn(self, seen: Seen, task: int) -> None:
        gradient = clipped(self.network.gradient(self.weights, seen.inputs, seen.labels), self.clip_norm)
        stored = self.stored[0].tolist()  # lanes are shown equally many examples
        past = {other: count for other, count in enumerate(stored) if count > 0 and other != task}
        if past:
            memories = torch.stack([self._memory_gradient(other, count) for other, count in past.items()], 1)
            gradient = project(gradient, memories, self.margin)
        self.weights -= self.lr * gradient

    def state(self) -> dict[str, Tensor]:
        own = {} if self.inputs is None else {"inputs": self.inputs, "labels": self.labels, "stored": self.stored}
        return super().state() | {f"tasks.{name}": tensor.clone() for name, tensor in own.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        if "tasks.inputs" in state:
            self.inputs = state["tasks.inputs"].to(self.seeds.device, copy=True)
            self.labels.copy_(state["tasks.labels"])
            self.stored.copy_(state["tasks.stored"])
        else:
            self.inputs = None
            self.stored.zero_()

    def _memory_gradient(self, task: int, stored: int) -> Tensor:
        assert self.inputs is not None
        filled = slice(min(stored, self.memory_per_task))
        inputs, labels = self.inputs[:, task, filled], self.labels[:, task, filled]
        return clipped(self.network.gradient(self.weights, inputs, labels), self.clip_norm)


def project(gradient: Tensor, memories: Tensor, margin: Tensor) -> Tensor:
    """Lane by lane the nearest gradient ``[lanes, weights]`` with no negative product with ``[lanes, past, weights]``.

    Lanes without a negative product are left alone. ``margin[lanes, 1]`` above zero asks for more than that.
    """
    violated = ((memories @ gradient.unsqueeze(-1)) < 0).any(1).flatten().tolist()
    projected = gradient.clone()
    for lane, is_violated in enumerate(violated):
        if is_violated:
            past = memories[lane].double()
            gram, products = past @ past.mT, past @ gradient[lane].double()
            weights = dual_weights(gram.cpu().numpy(), products.cpu().numpy(), float(margin[lane]))
            projected[lane] += (torch.from_numpy(weights).to(past) @ past).to(gradient.dtype)
    return projected


def dual_weights(
    gram: NDArray[np.float64], products: NDArray[np.float64], margin: float
) -> NDArray[np.float64]:  # v, Eq. 11 of the GEM paper
    """The v >= margin that make |G'v + g| least, from the products G G' and G g.

    With v = margin + u and a Cholesky factor of G G' this is least squares in u >= 0.
    """
    from scipy.linalg import solve_triangular  # a machine that runs other learners need not have it
    from scipy.optimize import nnls

    if not np.isfinite(gram).all():
        raise NonFiniteError("gem: a gradient is not finite: lower lr, or set clip_norm")
    weights = np.full(len(products), margin)
    present = gram.diagonal() > 0  # a gradient that is zero constrains nothing
    gram, products = gram[np.ix_(present, present)], products[present]
    factor = np.linalg.cholesky(gram + np.diag(RIDGE * gram.diagonal()))
    target = -solve_triangular(factor, products + gram.sum(1) * margin, lower=True)
    try:
        weights[present] += nnls(factor.T, target, maxiter=100 * len(products))[0]
    except RuntimeError as error:
        raise UserError(f"gem: no solution for the constraints of {len(products)} past tasks: {error}") from None
    return weights
