"""C-MAML learners side by side on a GPU: what all of them do between two decisions is one CUDA graph.

A step of all lanes is one graph: predict, adapt, the losses before and after. These are read back once, for all lanes;
each learner decides. Meta-updates, which come at other times in each lane, and new starts from theta share graphs too,
for as many pairs or batches as happen to be due, of whatever lanes. Without a GPU, or where recording fails, the same
code runs as it stands.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor

from wheretolearn.engine.graphed import Arithmetic, Job, Tensors, new_stream
from wheretolearn.engine.task import Task
from wheretolearn.errors import NonFiniteError
from wheretolearn.online.learners.c_maml import CMAML, PairSums
from wheretolearn.online.learners.network import loss_of, optimizer_tensors
from wheretolearn.online.recorded import DIVERGED, graph_or_note, record

JOBS_AT_ONCE = (2, 8, 24)  # a graph for each; where fewer are due, some of its jobs are done in vain
Due = tuple[int, Task]  # a lane, and what it adapts to from its theta


class CMAMLLanes:
    """Learners of one architecture and one number of inner steps, whose masks cover the same parameters."""

    def __init__(self, learners: Sequence[CMAML], arithmetic: Arithmetic, notify: Callable[[str], None] | None = None):
        self.learners, self.arithmetic, self.notify = list(learners), arithmetic, notify
        first = self.learners[0]
        self.inner_steps = first.inner_steps
        self.device = next(iter(first.theta.values())).device
        self.recording = self.device.type == "cuda"
        lanes = len(self.learners)
        self.from_theta = torch.zeros(lanes, dtype=torch.bool, device=self.device)
        self.right = torch.zeros(lanes, dtype=torch.int64, device=self.device)
        self.losses = torch.zeros((lanes, 2), device=self.device)  # before and after adapting
        self.rates = [{name: rate.clone() for name, rate in learner.rates().items()} for learner in self.learners]
        self.sums = [PairSums(learner.theta, learner.mask.names) for learner in self.learners]
        self._inputs: Tensor | None = None  # [lanes, ...]: the batches, where graphs read them
        self._labels: Tensor | None = None
        self._slots: list[_Slot] = []
        self.failed: dict[int, NonFiniteError] = {}
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Predict and learn from one batch per lane; how many images each predicted rightly, before learning from them.

        ``failed`` then holds errors by lane, where losses were not finite: such a lane cannot go on.
        """
        if self._inputs is None or self._labels is None:
            self._inputs, self._labels = inputs.clone(), labels.clone()
        self._inputs.copy_(inputs)
        self._labels.copy_(labels)
        self.from_theta.copy_(torch.tensor([learner.starts_anew for learner in self.learners]))
        everything = [tensor for learner in self.learners for tensor in learner.phi.values()]
        self._run("look", self._look, everything)
        self.failed.clear()
        updating, restarting = [], []
        for lane, (learner, (before, after)) in enumerate(zip(self.learners, self.losses.tolist(), strict=True)):
            try:
                learner.check_finite(before, after)
            except NonFiniteError as error:
                self.failed[lane] = error
                continue
            if learner.conclude(before, after, inputs[lane], labels[lane]):
                updating.append(lane)
            if learner.detected and learner.restart == "at once":
                restarting.append(lane)
        self._meta_update(updating)
        self._start_anew([(lane, self._task(lane)) for lane in restarting])
        return self.right.clone()

    def _look(self) -> None:
        assert self._labels is not None
        in_use = [
            Job({**learner.theta, **learner.phi}, self.rates[lane], self._task(lane))
            for lane, learner in enumerate(self.learners)
        ]
        if all(learner.restart == "at once" for learner in self.learners):
            found = self.arithmetic.adaptations(in_use, self.inner_steps)
            probabilities = torch.stack([own.before for own in found])
        else:
            found = self.arithmetic.adaptations(self._starts(in_use), self.inner_steps)
            probabilities = self.arithmetic.probabilities(in_use, 0)
        right = (probabilities.argmax(2) == self._labels).sum(1)
        self.right.copy_(torch.where(probabilities.isfinite().all(2).all(1), right, DIVERGED))
        self.losses[:, 0].copy_(loss_of(probabilities, self._labels))
        self.losses[:, 1].copy_(torch.stack([own.loss for own in found]))
        for learner, own in zip(self.learners, found, strict=True):
            for name, phi in learner.phi.items():
                phi.copy_(own.weights[name])

    def _starts(self, in_use: Sequence[Job]) -> list[Job]:
        """Where lanes start from that wait for the next batch to start anew."""
        starts = []
        for lane, (learner, job) in enumerate(zip(self.learners, in_use, strict=True)):
            anew = self.from_theta[lane]
            chosen = {name: torch.where(anew, learner.theta[name], phi) for name, phi in learner.phi.items()}
            starts.append(Job({**learner.theta, **chosen}, job.rates, job.task))
        return starts

    def _meta_update(self, lanes: Sequence[int]) -> None:
        pairs = [(lane, task) for lane in lanes for task in self.learners[lane].buffer.tasks()]
        for lane in lanes:
            torch._foreach_zero_(self.sums[lane].tensors())
        for due, slots in self._placed(pairs):
            self._run(("pairs", len(slots)), lambda slots=slots: self._gradients(slots), [])  # type: ignore[misc]
            for (lane, _), slot in zip(due, slots, strict=False):
                torch._foreach_add_(self.sums[lane].tensors(), slot.sums.tensors())
        for lane in lanes:
            self._take_step(lane)

    def _gradients(self, slots: Sequence["_Slot"]) -> None:
        results = self.arithmetic.meta_gradients([slot.job for slot in slots], self.inner_steps)
        for slot, result in zip(slots, results, strict=True):
            slot.sums.hold(result)

    def _take_step(self, lane: int) -> None:
        learner, sums = self.learners[lane], self.sums[lane]
        moved = [*learner.theta.values(), *learner.mask.raw.values(), *optimizer_tensors(learner.optimizer).values()]

        def take() -> None:
            learner.take_step(sums)
            for name, rate in learner.rates().items():
                self.rates[lane][name].copy_(rate)

        self._run(("take step", lane), take, [*moved, *self.rates[lane].values()])
        learner.buffer.clear()

    def _start_anew(self, batches: Sequence[Due]) -> None:
        """Adapt to batches from theta, as it is now."""
        for due, slots in self._placed(batches):
            self._run(("start anew", len(slots)), lambda slots=slots: self._adapt(slots), [])  # type: ignore[misc]
            for (lane, _), slot in zip(due, slots, strict=False):
                torch._foreach_copy_(list(self.learners[lane].phi.values()), list(slot.phi.values()))

    def _adapt(self, slots: Sequence["_Slot"]) -> None:
        found = self.arithmetic.adaptations([slot.job for slot in slots], self.inner_steps)
        for slot, own in zip(slots, found, strict=True):
            for name, phi in slot.phi.items():
                phi.copy_(own.weights[name])

    def _placed(self, due: Sequence[Due]) -> Iterator[tuple[Sequence[Due], list["_Slot"]]]:
        """What is due, as much at once as there are slots, and the slots where it lies then."""
        while due:
            size = next((size for size in JOBS_AT_ONCE if size >= len(due)), max(JOBS_AT_ONCE))
            now, due = due[:size], due[size:]
            while len(self._slots) < size:
                self._slots.append(_Slot(self.learners[0], now[0][1]))
            slots = self._slots[:size]
            for (lane, task), slot in zip(now, slots, strict=False):
                slot.place(self.learners[lane].theta, self.rates[lane], task)
            yield now, slots

    def _task(self, lane: int) -> Task:
        assert self._inputs is not None
        assert self._labels is not None
        inputs, labels = self._inputs[lane], self._labels[lane]
        return Task(inputs, labels, inputs, labels)

    def _run(self, key: Hashable, work: Callable[[], None], changed: Sequence[Tensor]) -> None:
        """Do some work, on a GPU as a graph that is recorded the first time; ``changed`` is what it must do once."""
        if self.recording and key not in self._graphs:
            self._record(key, work, changed)
        if key in self._graphs:
            self._graphs[key].replay()
        else:
            with self.arithmetic.settings():
                work()

    def _record(self, key: Hashable, work: Callable[[], None], changed: Sequence[Tensor]) -> None:
        before = [tensor.clone() for tensor in changed]

        def undo() -> None:
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(old)

        graph = graph_or_note(lambda: self._recorded(work), undo, self.notify)
        self.recording = graph is not None
        if graph is not None:
            self._graphs[key] = graph

    def _recorded(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream = new_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with self.arithmetic.settings(), torch.cuda.stream(stream):
                return record(work, self.device, stream)
        finally:
            torch.cuda.synchronize(self.device)


class _Slot:
    """Where graphs read one job, and leave what it gives."""

    def __init__(self, learner: CMAML, like: Task):
        theta = {name: tensor.clone() for name, tensor in learner.theta.items()}
        rates = {name: rate.clone() for name, rate in learner.rates().items()}
        self.job = Job(theta, rates, Task(*(part.clone() for part in _parts(like))))
        self.sums = PairSums(theta, learner.mask.names)
        self.phi = {name: torch.zeros_like(rate) for name, rate in rates.items()}

    def place(self, theta: Tensors, rates: Tensors, task: Task) -> None:
        torch._foreach_copy_(list(self.job.theta.values()), list(theta.values()))
        torch._foreach_copy_(list(self.job.rates.values()), list(rates.values()))
        for own, part in zip(_parts(self.job.task), _parts(task), strict=True):
            own.copy_(part)


def _parts(task: Task) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return task.support_inputs, task.support_labels, task.query_inputs, task.query_labels
