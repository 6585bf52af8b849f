"""What all continual learners share: lanes, glances, replay, and state in and out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from wheretolearn.continual.buffer import ReplayBuffer, Replayed
from wheretolearn.continual.lanes import LaneNetwork
from wheretolearn.data.random_bits import random_bits_by_lane


@dataclass(frozen=True)
class Seen:
    """A batch, in another order at each glance, and examples from memory beside it."""

    inputs: Tensor  # [lanes, batch + replayed, ...]: the batch comes first
    labels: Tensor
    shares: Tensor  # of each example in a mean over those that are there
    batch: int

    @property
    def new_inputs(self) -> Tensor:
        return self.inputs[:, : self.batch]

    @property
    def new_labels(self) -> Tensor:
        return self.labels[:, : self.batch]


class Learner(ABC):
    """Learns from a stream, batch by batch; several lanes at once, each with its own network, seed and memory.

    ``observe`` and ``predict`` take ``[lanes, examples, ...]``. Numbers such as learning rates may differ by lane: give
    a tensor ``[lanes]``.
    """

    def __init__(
        self, network: LaneNetwork, seeds: Tensor, *, glances: int = 1, memory: int = 0, replay_batch: int = 0
    ):
        self.network, self.seeds, self.glances, self.replay_batch = network, seeds, glances, replay_batch
        self.weights = network.weights.clone()
        self.memory_size = memory
        self.buffer: ReplayBuffer | None = None  # comes to be with the first batch, which shows the inputs' shape
        self.looks = torch.zeros((), dtype=torch.int64, device=seeds.device)  # glances so far: the key of all draws

    @torch.no_grad()
    def observe(self, inputs: Tensor, labels: Tensor, *, task: int = 0, fresh: bool = True) -> None:
        """Learn from a batch. ``fresh``: its examples come for the first time, and are offered to the memory."""
        self.prepare(inputs)
        for glance in range(self.glances):
            order = random_bits_by_lane((labels.shape[1],), self.seeds, "glance", self.looks).argsort(1)
            lane = torch.arange(len(order), device=order.device).unsqueeze(1)
            self.look(inputs[lane, order], labels[lane, order], task, new=fresh and glance == 0)
            self.looks += 1

    @abstractmethod
    def look(self, inputs: Tensor, labels: Tensor, task: int, new: bool) -> None:
        """Learn from one glance at a batch; ``new``: offer its examples to the memory."""

    def prepare(self, inputs: Tensor) -> None:
        """Make the memory, once inputs show their shape."""
        if self.buffer is None:
            self.buffer = ReplayBuffer(self.seeds, max(1, self.memory_size), tuple(inputs.shape[2:]), inputs.dtype)

    def remember(self, inputs: Tensor, labels: Tensor, task: int) -> None:
        """Offer new examples to the memory."""
        if self.memory_size > 0:
            assert self.buffer is not None
            self.buffer.add(inputs, labels)

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """Logits."""
        return self.network.logits(self.weights, inputs)

    def closed(self) -> dict[str, Tensor]:
        """For each parameter the share ``[lanes]`` of its weights that cannot change; {} where all can."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """A copy of everything that learning changes, as tensors: by lane, but for ``looks``."""
        own = {"weights": self.weights.clone(), "looks": self.looks.clone()}
        return own | ({} if self.buffer is None else {f"buffer.{k}": v for k, v in self.buffer.state().items()})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.weights.copy_(state["weights"])
        self.looks.copy_(state["looks"])
        stored = {name.removeprefix("buffer."): t for name, t in state.items() if name.startswith("buffer.")}
        if stored:
            self.prepare(stored["inputs"])
            assert self.buffer is not None
            self.buffer.restore(stored)
        elif self.buffer is not None:
            self.buffer.seen.zero_()


class BatchLearner(Learner):
    """Learns from a batch as a whole, beside examples drawn from memory before the batch is offered to it."""

    def look(self, inputs: Tensor, labels: Tensor, task: int, new: bool) -> None:
        seen = self._with_replay(inputs, labels)
        if new:
            self.remember(inputs, labels, task)
        self.learn(seen, task)

    @abstractmethod
    def learn(self, seen: Seen, task: int) -> None:
        """Update the weights."""

    def _with_replay(self, x: Tensor, y: Tensor) -> Seen:
        batch = y.shape[1]
        present = torch.ones_like(y, dtype=torch.bool)
        if self.replay_batch > 0 and self.memory_size > 0:
            assert self.buffer is not None
            past: Replayed = self.buffer.sample(self.replay_batch, self.looks)
            x, y = torch.cat([x, past.inputs], 1), torch.cat([y, past.labels], 1)
            present = torch.cat([present, past.valid], 1)
        shares = present.to(self.weights.dtype)
        return Seen(x, y, shares / shares.sum(1, keepdim=True), batch)


def by_lane(value: float | Tensor, like: Tensor) -> Tensor:
    """A number, or one per lane, as a column to multiply ``[lanes, weights]`` with."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(-1, 1)
