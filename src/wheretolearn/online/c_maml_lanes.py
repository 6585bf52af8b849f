"""C-MAML learners side by side on a GPU: what all of them do between two decisions is one CUDA graph.

A step of all lanes is one graph: predict, adapt, the losses before and after. These are read back once, for all lanes;
each learner decides. Meta-updates, which come at other times in each lane, share graphs for a few pairs at once.
Without a GPU nothing is recorded, and the same code runs as it stands.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from wheretolearn.engine.graphed import Arithmetic, Job, new_stream
from wheretolearn.engine.task import Task
from wheretolearn.errors import NonFiniteError
from wheretolearn.online.learners.c_maml import CMAML, PairSums
from wheretolearn.online.learners.network import optimizer_tensors
from wheretolearn.online.recorded import DIVERGED

PAIRS_AT_ONCE = (10, 3, 1)


class CMAMLLanes:
    """Learners of one architecture and one number of inner steps, whose masks cover the same parameters."""

    def __init__(self, learners: Sequence[CMAML], arithmetic: Arithmetic):
        self.learners, self.arithmetic = list(learners), arithmetic
        first = self.learners[0]
        self.inner_steps = first.inner_steps
        self.device = next(iter(first.theta.values())).device
        lanes = len(self.learners)
        self.from_theta = torch.zeros(lanes, dtype=torch.bool, device=self.device)
        self.right = torch.zeros(lanes, dtype=torch.int64, device=self.device)
        self.losses = torch.zeros((lanes, 2), device=self.device)  # before and after adapting
        self.theta = {name: tensor.clone() for name, tensor in first.theta.items()}  # of the lane that meta-updates
        self.rates = {name: torch.zeros_like(self.theta[name]) for name in first.mask.names}
        self.restarted = {name: torch.zeros_like(rate) for name, rate in self.rates.items()}
        self.sums = PairSums(self.theta, first.mask.names)
        self._inputs: Tensor | None = None  # [lanes, ...]: the batches, where graphs read them
        self._labels: Tensor | None = None
        self._pairs: list[Task] = []
        self.failed: dict[int, NonFiniteError] = {}
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def step(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Predict and learn from one batch per lane; how many images each predicted rightly, before learning from them.

        ``failed`` then holds errors by lane, where losses were not finite: such a lane cannot go on.
        """
        inputs, labels = self._slots(batches)
        self.from_theta.copy_(torch.tensor([learner.starts_anew for learner in self.learners]))
        everything = [tensor for learner in self.learners for tensor in learner.phi.values()]
        self._run("look", lambda: self._look(inputs, labels), everything)
        self.failed.clear()
        for lane, (learner, (before, after)) in enumerate(zip(self.learners, self.losses.tolist(), strict=True)):
            try:
                learner.check_finite(before, after)
            except NonFiniteError as error:
                self.failed[lane] = error
            else:
                if learner.conclude(before, after, *batches[lane]):
                    self._meta_update(learner)
                if learner.detected and learner.restart == "at once":
                    self._restart(learner, inputs[lane], labels[lane])
        return self.right.clone()

    def _look(self, inputs: Tensor, labels: Tensor) -> None:
        in_use, starts = [], []
        for lane, learner in enumerate(self.learners):
            task, rates = Task(inputs[lane], labels[lane], inputs[lane], labels[lane]), learner.rates()
            chosen = {
                name: torch.where(self.from_theta[lane], learner.theta[name], phi) for name, phi in learner.phi.items()
            }
            in_use.append(Job({**learner.theta, **learner.phi}, rates, task))
            starts.append(Job({**learner.theta, **chosen}, rates, task))
        probabilities = self.arithmetic.probabilities(in_use, 0)
        results = self.arithmetic.meta_gradients(starts, self.inner_steps)
        own = probabilities.gather(2, labels.unsqueeze(2)).squeeze(2)
        right = (probabilities.argmax(2) == labels).sum(1)
        self.right.copy_(torch.where(probabilities.isfinite().all(2).all(1), right, DIVERGED))
        self.losses[:, 0].copy_(-own.clamp_min(torch.finfo(own.dtype).tiny).log().mean(1))
        for lane, (learner, job, result) in enumerate(zip(self.learners, starts, results, strict=True)):
            self.losses[lane, 1].copy_(result.loss)
            for name, phi in learner.phi.items():
                phi.copy_(job.theta[name] - job.rates[name] * result.inner_sum[name])

    def _meta_update(self, learner: CMAML) -> None:
        tasks = list(learner.buffer.tasks())
        for tensor in self.sums.tensors():
            tensor.zero_()
        self._take_over(learner)
        while tasks:
            size = next(size for size in PAIRS_AT_ONCE if size <= len(tasks))
            for slot, task in zip(self._pair_slots(tasks[0]), tasks[:size], strict=False):
                for part in ("support_inputs", "support_labels", "query_inputs", "query_labels"):
                    getattr(slot, part).copy_(getattr(task, part))
            self._run(size, lambda size=size: self._add_pairs(size), self.sums.tensors())  # type: ignore[misc]
            del tasks[:size]
        moved = [*learner.theta.values(), *learner.mask.raw.values(), *optimizer_tensors(learner.optimizer).values()]
        self._run(("take step", id(learner)), lambda: learner.take_step(self.sums), moved)
        learner.buffer.clear()

    def _restart(self, learner: CMAML, inputs: Tensor, labels: Tensor) -> None:
        """Adapt to the batch from theta, as it is now."""
        self._take_over(learner)
        (slot, *_) = self._pair_slots(Task(inputs, labels, inputs, labels))
        for part, value in (("support_inputs", inputs), ("support_labels", labels)):
            getattr(slot, part).copy_(value)
            getattr(slot, part.replace("support", "query")).copy_(value)
        self._run("restart", self._adapt_from_theta, list(self.restarted.values()))
        for name, phi in learner.phi.items():
            phi.copy_(self.restarted[name])

    def _adapt_from_theta(self) -> None:
        (result,) = self.arithmetic.meta_gradients([Job(self.theta, self.rates, self._pairs[0])], self.inner_steps)
        for name, restarted in self.restarted.items():
            restarted.copy_(self.theta[name] - self.rates[name] * result.inner_sum[name])

    def _take_over(self, learner: CMAML) -> None:
        for name, tensor in learner.theta.items():
            self.theta[name].copy_(tensor)
        for name, rate in learner.rates().items():
            self.rates[name].copy_(rate)

    def _add_pairs(self, size: int) -> None:
        jobs = [Job(self.theta, self.rates, task) for task in self._pairs[:size]]
        self.sums.add(self.arithmetic.meta_gradients(jobs, self.inner_steps))

    def _slots(self, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        if self._inputs is None or self._labels is None:
            self._inputs = torch.stack([inputs for inputs, _ in batches])
            self._labels = torch.stack([labels for _, labels in batches])
        for lane, (inputs, labels) in enumerate(batches):
            self._inputs[lane].copy_(inputs)
            self._labels[lane].copy_(labels)
        return self._inputs, self._labels

    def _pair_slots(self, like: Task) -> list[Task]:
        if not self._pairs:
            parts = (like.support_inputs, like.support_labels, like.query_inputs, like.query_labels)
            self._pairs = [Task(*(torch.clone(part) for part in parts)) for _ in range(max(PAIRS_AT_ONCE))]
        return self._pairs

    def _run(self, key: Hashable, work: Callable[[], None], changed: Sequence[Tensor]) -> None:
        """Do some work, on a GPU as a graph that is recorded the first time; ``changed`` are tensors it adds to."""
        if self.device.type != "cuda":
            work()
            return
        if key not in self._graphs:
            before = [tensor.clone() for tensor in changed]
            stream = new_stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with self.arithmetic.settings(), torch.cuda.stream(stream):
                work()  # kernels are compiled and chosen
                torch.cuda.synchronize(self.device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    work()
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(old)
            torch.cuda.synchronize(self.device)
            self._graphs[key] = graph
        self._graphs[key].replay()
