"""Experience replay: SGD on the incoming batch together with examples from memory."""

from torch import Tensor

from wheretolearn.continual.lanes import LaneNetwork
from wheretolearn.continual.learners.base import BatchLearner, Seen, by_lane


class ExperienceReplay(BatchLearner):
    def __init__(
        self,
        network: LaneNetwork,
        seeds: Tensor,
        *,
        lr: float | Tensor,
        memory: int,
        replay_batch: int = 10,
        glances: int = 1,
    ):
        super().__init__(network, seeds, glances=glances, memory=memory, replay_batch=replay_batch)
        self.lr = by_lane(lr, self.weights)

    def learn(self, seen: Seen, task: int) -> None:
        self.weights -= self.lr * self.network.gradient(self.weights, seen.inputs, seen.labels, seen.shares)
