"""What every online learner offers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor


class OnlineLearner(ABC):
    """One stream: each batch is predicted first, and learned from once its labels are known."""

    @abstractmethod
    def predict(self, inputs: Tensor) -> Tensor:
        """Logits ``[N, ways]``; changes nothing."""

    @abstractmethod
    def observe(self, inputs: Tensor, labels: Tensor) -> None:
        """Learn from the batch whose labels are now known."""

    @property
    def detected(self) -> bool:
        """Whether the last ``observe`` noticed that the task had changed; False for learners that do not look."""
        return False

    def closed(self) -> dict[str, float]:
        """Share of weights that a learned mask closes to the inner loop, of each parameter that it covers; or {}."""
        return {}

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """A copy of everything that learning changes."""

    @abstractmethod
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over a ``state()``; what follows is the same, bit for bit."""
