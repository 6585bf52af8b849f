"""Continual runs side by side: stream, learner, tests after each task, checkpoints."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wheretolearn.config import from_dict, to_dict
from wheretolearn.continual import metrics
from wheretolearn.continual.config import INCIDENTAL, ContinualConfig
from wheretolearn.continual.learners.base import Learner
from wheretolearn.continual.learners.make import make_learner
from wheretolearn.continual.problem import Problem
from wheretolearn.continual.recorded import Recorded
from wheretolearn.errors import NonFiniteError, Stopped, UserError
from wheretolearn.runs import checkpoint
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.signals import StopRequest
from wheretolearn.runs.workers import failure, stopped
from wheretolearn.storage import read_json, save_weights, write_json

Report = Callable[[RunFolder, int, Mapping[str, Any]], None]
BY_LANE = ("lr", "mask_lr")  # settings that may differ between runs that learn as lanes of one program
RESULT = "result.json"


@dataclass
class Progress:
    """How far one run is, beside what its learner knows."""

    batches: int = 0
    matrix: Tensor = field(default_factory=lambda: torch.empty(0))  # [tasks + 1, tasks]; row 0: the untrained network
    seconds: float = 0.0


def finished(run: RunFolder) -> bool:
    return (run.path / RESULT).exists()


def result(run: RunFolder) -> dict[str, Any]:
    """What a finished run measured: RA, BTI, forward transfer, the accuracy matrix, sparsity."""
    measured: dict[str, Any] = read_json(run.path / RESULT)
    return measured


def settings_of(run: RunFolder) -> ContinualConfig:
    return from_dict(ContinualConfig, run.config, where=str(run.path))


def lane_groups(runs: Sequence[RunFolder]) -> list[list[RunFolder]]:
    """Runs that learn as lanes of one program: the same settings but for learning rates, and equally far.

    Runs that were lanes of one program go on so, in the same order, and thus to the last bit as if they had never
    stopped; those without a checkpoint join whom they like.
    """
    names = {run: run.path.name for run in runs}
    kinds = {
        run: json.dumps({n: v for n, v in to_dict(settings_of(run)).items() if n not in BY_LANE}, sort_keys=True)
        for run in runs
    }
    before: dict[tuple[str, str], tuple[str, ...]] = {}  # by kind and name, who was together
    for run in runs:
        saved = checkpoint.load_latest(run)
        if saved is not None:
            lanes = tuple(saved.state.get("lanes", ()))
            if names[run] not in lanes:
                lanes = (names[run],)  # of an early version, or its folder has another name now
            before |= {(kinds[run], name): lanes for name in lanes if (kinds[run], name) not in before}
            before[kinds[run], names[run]] = lanes
    groups: dict[tuple[str, tuple[str, ...]], list[RunFolder]] = {}
    for run in runs:
        groups.setdefault((kinds[run], before.get((kinds[run], names[run]), ())), []).append(run)
    result = []
    for (_, order), members in groups.items():
        ordered = sorted(members, key=lambda run: order.index(names[run])) if order else members
        if saved_together(ordered) is not None:
            result.append(ordered)
        else:
            by_step: dict[int, list[RunFolder]] = {}
            for run in ordered:
                saved = checkpoint.load_latest(run)
                by_step.setdefault(saved.step if saved else 0, []).append(run)
            result += by_step.values()
    return result


def saved_together(runs: Sequence[RunFolder]) -> list[checkpoint.Checkpoint] | None:
    """The checkpoints of the last step that all runs have one of; [] where they start anew; None where there is none.

    A kill between two saves leaves some lanes a checkpoint ahead of the others.
    """
    saved = [checkpoint.load_latest(run) for run in runs]
    steps = [own.step if own is not None else 0 for own in saved]
    if not any(steps):
        return []
    try:
        found = [checkpoint.load_latest(run, at_most=min(steps)) for run in runs]
    except UserError:  # of that step one is damaged; the latest are whole
        return None
    same = [own for own in found if own is not None and own.step == min(steps)]
    return same if len(same) == len(runs) else None


def train_together(
    runs: Sequence[RunFolder],
    report: Report | None = None,
    *,
    device: str = "cpu",
    notify: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] | None = None,
    on_failure: Callable[[Sequence[RunFolder], UserError], None] | None = None,
) -> None:
    """Take runs to their ends, from their last checkpoints if they have any; equal settings go side by side.

    Each ends as it would alone, up to rounding. A run that fails does not keep others from their ends; the error comes
    last, and at once to ``on_failure``. Where one of several lanes diverges, each goes on alone from its last
    checkpoint. SIGINT or SIGTERM ends this with ``Stopped``, after saving.
    """
    for run in runs:
        run.lock()
    errors: dict[RunFolder, UserError] = {}

    def fail(group: Sequence[RunFolder], error: UserError) -> None:
        errors.update(dict.fromkeys(group, error))
        if on_failure is not None:
            on_failure(group, error)

    for run, error in unusable([run for run in runs if not finished(run)]).items():
        fail([run], error)
    with StopRequest(on_request=on_stop) as stop:
        groups = list(lane_groups([run for run in runs if not finished(run) and run not in errors]))
        while groups:
            group = groups.pop(0)
            try:
                lanes = _Lanes(group, device, report, notify)
                while not lanes.ended and not stop.requested:
                    lanes.advance()
                if stop.requested:
                    lanes.save()
                    what = f"stopped after batch {lanes.done} of {lanes.problem.batches} and saved"
                    raise stopped(what, [run for run in runs if not finished(run) and run not in errors], errors)
                lanes.finish()
            except Stopped:
                raise
            except UserError as error:
                if isinstance(error, NonFiniteError) and len(group) > 1:
                    if notify is not None:
                        notify(f"{error}. Each of these runs goes on alone from its last checkpoint")
                    groups = [[run] for run in group] + groups
                else:
                    fail(group, error)
    if errors:
        raise failure(errors, of=len(runs))


def unusable(runs: Sequence[RunFolder]) -> dict[RunFolder, UserError]:
    """Runs whose checkpoints are damaged or not theirs, each with its error: no reason for the others not to learn."""
    errors: dict[RunFolder, UserError] = {}
    for run in runs:
        try:
            saved = checkpoint.load_latest(run)
            if saved is not None:
                checkpoint.check_identity(run, saved.state, ContinualConfig, INCIDENTAL)
        except UserError as error:
            errors[run] = error
    return errors


class _Lanes:
    """Runs of one shape at work."""

    def __init__(
        self, runs: Sequence[RunFolder], device: str, report: Report | None, notify: Callable[[str], None] | None
    ):
        self.runs, self.device, self.report = list(runs), device, report
        self.configs = [settings_of(run) for run in runs]
        self.config = self.configs[0]
        self.problem = Problem(self.config, [run.seed for run in runs], device)
        self.learner: Learner = make_learner(
            self.configs,
            [run.seed for run in runs],
            self.problem.image_shape,
            self.problem.classes,
            self.problem.tasks,
            device,
        )
        self.recorded = Recorded(self.learner)
        tasks = self.problem.tasks
        empty = torch.full((tasks + 1, tasks), float("nan"), dtype=torch.float64)
        self.progress = [Progress(matrix=empty.clone()) for _ in runs]
        self._restore(notify)
        if self.done == 0:
            self._test(0, range(tasks), limit=self.config.matrix_images)

    @property
    def done(self) -> int:
        return self.progress[0].batches

    @property
    def ended(self) -> bool:
        return self.done == self.problem.batches

    def advance(self) -> None:
        """One batch, and whatever is due after it."""
        started = time.perf_counter()
        batch = self.problem.batch(self.done)
        self.recorded.observe(batch.inputs, batch.labels, task=batch.task, fresh=batch.fresh)
        number = self.done + 1
        values: list[dict[str, Any]] = [{} for _ in self.runs]
        if batch.ends_task:
            self._check_finite()
            self._test_after(batch.task)
            for own, progress in zip(values, self.progress, strict=True):
                row = progress.matrix[batch.task + 1]
                own |= {"task": batch.task, "accuracies": row.tolist()}
                own["accuracy"] = row[: batch.task + 1].mean().item()
        if batch.ends_task or number % self.config.log_every == 0:
            for lane, own in enumerate(values):
                own |= self._sparsity(lane)
        elapsed = time.perf_counter() - started
        for lane, (run, progress) in enumerate(zip(self.runs, self.progress, strict=True)):
            progress.batches, progress.seconds = number, progress.seconds + elapsed
            if values[lane]:
                values[lane]["elapsed_seconds"] = progress.seconds
                run.log(number, **values[lane])
            if self.report is not None:
                self.report(run, number, values[lane])
        if number % self.config.checkpoint_every == 0 or self.ended:
            self.save()

    def save(self) -> None:
        self._check_finite()
        state = self.learner.state()
        for lane, (run, progress) in enumerate(zip(self.runs, self.progress, strict=True)):
            own = {name: (t if t.ndim == 0 else t[lane]).clone() for name, t in state.items()}
            others = [other.path.name for other in self.runs]
            values = {"learner": own, "matrix": progress.matrix, "seconds": progress.seconds, "lanes": others}
            checkpoint.save(run, checkpoint.identity(run) | values, progress.batches)

    def finish(self) -> None:
        """Leave the network and what was measured; the result comes last: where it is, the run is finished."""
        weights = self.learner.network.views(self.learner.weights)
        for lane, (run, progress) in enumerate(zip(self.runs, self.progress, strict=True)):
            save_weights(run.path / "model.safetensors", {name: t[lane].clone() for name, t in weights.items()}, {})
            matrix = progress.matrix[1:]
            measured = {
                "ra": metrics.retained_accuracy(matrix),
                "bti": metrics.backward_transfer(matrix),
                "forward_transfer": metrics.forward_transfer(matrix, progress.matrix[0]),
                "accuracy_matrix": progress.matrix[1:].tolist(),
                "untrained": progress.matrix[0].tolist(),
                "seconds": progress.seconds,
                "runs_at_once": len(self.runs),
                **self._sparsity(lane),
            }
            write_json(run.path / RESULT, measured)

    def _restore(self, notify: Callable[[str], None] | None) -> None:
        saved = saved_together(self.runs)
        assert saved is not None  # lane_groups put only such runs together
        for number, (run, progress) in enumerate(zip(self.runs, self.progress, strict=True)):
            run.rewind(saved[number].step if saved else 0)
            if saved:
                own = saved[number]
                progress.batches, progress.seconds, progress.matrix = (
                    own.step,
                    own.state["seconds"],
                    own.state["matrix"],
                )
                for note in own.notes:
                    if notify is not None:
                        notify(note)
                if self.report is not None:
                    self.report(run, own.step, {})
        if not saved:
            return
        states = [own.state["learner"] for own in saved]
        try:
            self.learner.restore(
                {n: t if t.ndim == 0 else torch.stack([own[n] for own in states]) for n, t in states[0].items()}
            )
        except (KeyError, RuntimeError) as error:
            raise checkpoint.mismatch(self.runs[0]) from error

    def _test_after(self, task: int) -> None:
        """All test images where the result depends on it: of the task just learned, and of all at the end."""
        last = task == self.problem.tasks - 1
        for other in range(self.problem.tasks):
            limit = None if last or other == task else self.config.matrix_images
            self._test(task + 1, [other], limit)

    def _test(self, row: int, tasks: Sequence[int] | range, limit: int | None) -> None:
        for task in tasks:
            found = metrics.accuracies(self.learner, self.problem.test_sets(task, limit))
            for progress, accuracy in zip(self.progress, found, strict=True):
                progress.matrix[row, task] = accuracy

    def _sparsity(self, lane: int) -> dict[str, Any]:
        shares = {name: float(share[lane]) for name, share in self.learner.closed().items()}
        if not shares:
            return {}
        sizes = {name: t[0].numel() for name, t in self.learner.network.views(self.learner.weights).items()}
        overall = sum(shares[name] * sizes[name] for name in shares) / sum(sizes.values())
        return {"sparsity": overall, "sparsity_by_tensor": shares}

    def _check_finite(self) -> None:
        finite = self.learner.weights.isfinite().all(1).tolist()
        for run, good in zip(self.runs, finite, strict=True):
            if not good:
                raise NonFiniteError(
                    f"{run.path}: weights are not finite before batch {self.done + 1}; use a smaller lr or mask_lr. "
                    "Checkpoints saved before are good"
                )
