"""The replay memory: a uniform sample of everything seen so far, of fixed size."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from wheretolearn.data.random_bits import random_bits_by_lane


class Replayed(NamedTuple):
    """Examples from memory; while it holds too few, the rest of them are not ``valid``."""

    inputs: Tensor  # [lanes, count, ...]
    labels: Tensor  # [lanes, count]
    valid: Tensor  # [lanes, count], bool


class ReplayBuffer:
    """Reservoir sampling for several lanes, each with a seed of its own.

    After n examples every one of them is in memory with probability min(1, size / n). All tensors are there from the
    start and change in place. Draws are functions of the seed and of how many examples were seen, so a buffer put back
    from ``state`` goes on as it would have.
    """

    def __init__(self, seeds: Tensor, size: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32):
        lanes, device = len(seeds), seeds.device
        self.seeds, self.size = seeds, size
        # One row more than asked for: examples that are not kept are written there.
        self.inputs = torch.zeros((lanes, size + 1, *shape), dtype=dtype, device=device)
        self.labels = torch.zeros((lanes, size + 1), dtype=torch.int64, device=device)
        self.seen = torch.zeros(lanes, dtype=torch.int64, device=device)

    def add(self, inputs: Tensor, labels: Tensor) -> None:
        """Offer a batch of examples to each lane: ``[lanes, batch, ...]``."""
        batch = labels.shape[1]
        number = self.seen.unsqueeze(1) + torch.arange(batch, device=self.seeds.device)  # of each example, from 0
        bits = random_bits_by_lane((batch,), self.seeds, "reservoir", self.seen)
        drawn = bits % (number + 1)
        place = torch.where(number < self.size, number, drawn.clamp(max=self.size))
        # Of several examples for one place the last one stays there, as if they had come one by one.
        later = torch.ones(batch, batch, dtype=torch.bool, device=place.device).triu(1)
        replaced = ((place.unsqueeze(2) == place.unsqueeze(1)) & later).any(2)
        place = torch.where(replaced, self.size, place)
        lane = torch.arange(len(self.seeds), device=place.device).unsqueeze(1)
        self.inputs[lane, place] = inputs
        self.labels[lane, place] = labels
        self.seen += batch

    def sample(self, count: int, key: Tensor | int) -> Replayed:
        """``count`` different examples for each lane, drawn anew for each key."""
        filled = self.seen.clamp(max=self.size).unsqueeze(1)
        bits = random_bits_by_lane((self.size,), self.seeds, "replay", key)
        position = torch.arange(self.size, device=bits.device)
        order = torch.where(position < filled, bits, torch.iinfo(torch.int64).max)
        chosen = order.topk(min(count, self.size), largest=False).indices
        lane = torch.arange(len(self.seeds), device=bits.device).unsqueeze(1)
        valid = torch.arange(chosen.shape[1], device=bits.device) < filled
        return Replayed(self.inputs[lane, chosen], self.labels[lane, chosen], valid)

    def state(self) -> dict[str, Tensor]:
        tensors = {"inputs": self.inputs[:, :-1], "labels": self.labels[:, :-1], "seen": self.seen}
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.inputs[:, :-1] = state["inputs"]
        self.labels[:, :-1] = state["labels"]
        self.seen.copy_(state["seen"])
