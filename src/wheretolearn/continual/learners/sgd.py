"""Plain SGD on the incoming batches: the baseline that forgets."""

from torch import Tensor

from wheretolearn.continual.lanes import LaneNetwork
from wheretolearn.continual.learners.base import BatchLearner, Seen, by_lane


class SGD(BatchLearner):
    def __init__(self, network: LaneNetwork, seeds: Tensor, *, lr: float | Tensor, glances: int = 1):
        super().__init__(network, seeds, glances=glances)
        self.lr = by_lane(lr, self.weights)

    def learn(self, seen: Seen, task: int) -> None:
        self.weights -= self.lr * self.network.gradient(self.weights, seen.inputs, seen.labels)
