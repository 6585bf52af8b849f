"""Running means of weights and mask over outer steps, which scatter less than the last ones do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class RunningMean:
    """Follows all that an optimizer changes, after each of its steps.

    Means are kept in the optimizer's state: they are recorded, stored and restored with it. They are of the last
    1 / (1 - decay) steps or so, but of no more than the last tenth of the steps taken.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float):
        self.optimizer, self.decay = optimizer, decay
        optimizer.register_step_post_hook(self._add)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Meanwhile weights and mask are the means; for after the first step."""
        with torch.no_grad():
            last = [(parameter, parameter.clone()) for parameter in self._parameters()]
            for parameter, _ in last:
                parameter.copy_(self.optimizer.state[parameter]["mean"])
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in last:
                    parameter.copy_(value)

    @torch.no_grad()
    def _add(self, *_: Any) -> None:
        for parameter in self._parameters():
            state = self.optimizer.state[parameter]
            if "mean" not in state:
                state["mean"], state["steps in mean"] = torch.zeros_like(parameter), parameter.new_zeros(())
            # Counted in a tensor, as a recorded graph advances it.
            weight = (10 / (state["steps in mean"].add_(1) + 9)).clamp(min=1 - self.decay)
            state["mean"].lerp_(parameter, weight)

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]
