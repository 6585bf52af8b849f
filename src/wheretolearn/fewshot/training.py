"""Meta-training: outer steps, validation, checkpoints; of one run, or of several in one sitting."""

import json
import math
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from wheretolearn.config import from_dict, to_dict
from wheretolearn.data.load import load_set
from wheretolearn.engine.choose import Evaluator, choose, make_engine
from wheretolearn.engine.task import Lane
from wheretolearn.errors import ConfigError, NonFiniteError, Stopped, UserError
from wheretolearn.fewshot.config import CHANGEABLE, FewShotConfig
from wheretolearn.fewshot.learner import Learner, load_start, new_learner
from wheretolearn.fewshot.tasks import TaskSource, split_of
from wheretolearn.runs import checkpoint
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.signals import StopRequest
from wheretolearn.runs.workers import failure, failure_of
from wheretolearn.storage import read_metadata, save_weights

Report = Callable[[RunFolder, int, Mapping[str, Any]], None]  # (run, outer step, latest values)
Notify = Callable[[str], None]  # something the user should know

# Runs that differ in nothing else are lanes of one engine: same network, same number of tasks and inner steps.
_FREE_IN_A_LANE = (
    *("train_split", "validation_split", "outer_steps", "test_inner_steps", "inner_lr", "start_from", "learn_theta"),
    *("init", "mask", "adapt", "adapt_norm", "mask_init", "initial_sparsity", "straight_through_scale"),
    *("theta_lr", "mask_lr", "optimizer", "mask_optimizer", "outer_clamp", "average_decay"),
    *("validate_every", "validate_from", "validation_tasks", "validation_inner_steps", "patience"),
    *("log_every", "checkpoint_every", "keep_best"),
)


def lane_settings(config: FewShotConfig) -> dict[str, Any]:
    """What runs must have in common to be lanes of one engine."""
    return {name: value for name, value in to_dict(config).items() if name not in _FREE_IN_A_LANE}


def train(
    run: RunFolder,
    report: Callable[[int, Mapping[str, Any]], None] | None = None,
    device: str = "cpu",
    on_stop: Callable[[], None] | None = None,
    notify: Notify | None = None,
    at_once: int = 1,
) -> Learner:
    """Carry the run in this folder to its end, from its last checkpoint if it has one; see ``train_together``."""
    each = None if report is None else lambda _, step, values: report(step, values)
    return train_together([run], each, device, on_stop, notify, at_once)[0]


def train_together(
    runs: Sequence[RunFolder],
    report: Report | None = None,
    device: str = "cpu",
    on_stop: Callable[[], None] | None = None,
    notify: Notify | None = None,
    at_once: int | None = None,
) -> list[Learner]:
    """Carry the runs in these folders to their ends in one process, each from its last checkpoint if it has one.

    Runs of the same shape are lanes of one engine; each ends as it would alone, on a CPU with as many threads.
    ``on_stop`` is called when a signal asks for a stop; the runs are then saved after the current step, and this ends
    with ``Stopped``. A run that fails does not keep the others from their ends; the error comes last. ``at_once`` is
    how many runs share the machine, if not just these.

    The best model of each run by validation is left in ``model.safetensors`` and ``mask.safetensors``; files of the
    same names in ``best/2``, ``best/3`` ... hold the next best. ``model.safetensors`` is written last: where it is,
    the run is finished.
    """
    sitting = _Sitting(report, device, notify or (lambda _: None), len(runs) if at_once is None else at_once)
    with StopRequest(on_request=on_stop) as stop:
        sitting.begin(runs)
        while sitting.groups:
            for group in list(sitting.groups):
                sitting.advance(group)
                if stop.requested:
                    break
            if stop.requested and sitting.groups:
                raise Stopped(sitting.save_and_say_how_to_go_on())
    if sitting.failures:
        raise failure(sitting.failures, of=len(runs))
    return [sitting.learners[run] for run in runs]


def finished(run: RunFolder) -> bool:
    """Whether it has its model, and its run.json has not been told since to end later."""
    path = run.path / "model.safetensors"
    if not path.exists():
        return False
    try:
        ended = json.loads(read_metadata(path).get("identity", "{}")).get("settings", {})  # early versions stored none
    except (UserError, ValueError, AttributeError):  # a damaged model: what reads it says so
        return True
    now = run.config if run.info else RunFolder.open(run.path).config
    later = ((_bound(now, name), _bound(ended, name)) for name in ("outer_steps", "patience") if name in ended)
    return all(bound <= before for bound, before in later)


def _bound(settings: Mapping[str, Any], name: str) -> float:
    value = settings.get(name)
    return math.inf if value is None else value


@dataclass
class _Member:
    """One run at work."""

    run: RunFolder
    config: FewShotConfig
    image_shape: tuple[int, ...]
    learner: Learner
    lane: Lane
    validation: TaskSource

    @property
    def ended(self) -> bool:
        return self.learner.step == self.config.outer_steps or self._out_of_patience

    @property
    def _out_of_patience(self) -> bool:
        config, step, every = self.config, self.learner.step, self.config.validate_every
        if config.patience is None or not self.learner.best or not self._due:
            return False
        left_out = (config.validate_from - 1) // every * every  # the last of the validations left out: no failures
        return step - max(self.learner.best[0].step, left_out) > config.patience * every

    @property
    def _due(self) -> bool:
        """Whether a validation is, but for the one at the end."""
        step, config = self.learner.step, self.config
        return step >= config.validate_from and step % config.validate_every == 0

    @property
    def validating(self) -> bool:
        return self._due or self.ended

    @property
    def logging(self) -> bool:
        return self.learner.step % self.config.log_every == 0 or self.learner.step == 1 or self.validating

    @property
    def saving(self) -> bool:
        return self.learner.step % self.config.checkpoint_every == 0 or self.ended

    @property
    def shape(self) -> str:
        """Runs of equal shape can be lanes of one engine."""
        lane, config = self.lane, self.config
        engine = choose(lane.model, lane.mask, lane.inner, config.engine, config.precision)
        return json.dumps([engine, lane_settings(config)], sort_keys=True)

    def validate(self, evaluator: Evaluator) -> float:
        config = self.config
        tasks = self.validation.tasks(0, config.validation_tasks)
        steps = config.test_inner_steps if config.validation_inner_steps is None else config.validation_inner_steps
        with self.learner.as_validated():
            accuracy = evaluator.accuracies(tasks, steps).mean().item()
            self.learner.remember(accuracy)
        return accuracy

    def save(self) -> None:
        checkpoint.save(self.run, checkpoint.identity(self.run) | self.learner.state(), self.learner.step)

    def finish(self) -> None:
        """Leave the best models as files, the very best last, and in the learner."""
        best = self.learner.best
        for folder in (self.run.path / "best").glob("*"):  # of an earlier end, when more were kept
            if folder.name.isdigit() and int(folder.name) > len(best):
                shutil.rmtree(folder)
        for place, snapshot in reversed(list(enumerate(best, start=1))):
            folder = self.run.path if place == 1 else self.run.path / "best" / str(place)
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"cannot create {folder}: {error.strerror}") from error
            self.learner.take(snapshot)
            self.learner.mask.save(folder / "mask.safetensors")
            about = {
                "step": str(snapshot.step),
                "validation_accuracy": str(snapshot.accuracy),
                "image_shape": json.dumps(self.image_shape),
                "identity": json.dumps(checkpoint.identity(self.run)),
            }
            save_weights(folder / "model.safetensors", snapshot.model, about)


class _Group:
    """Runs of one shape, stepped by one engine."""

    def __init__(self, members: Sequence[_Member], notify: Notify, counted_until: float | None = None):
        self.members = list(members)
        self.counted_until = counted_until  # the moment up to which its runs know how long they took
        config = self.members[0].config
        lanes = [member.lane for member in self.members]
        self.engine = make_engine(lanes, kind=config.engine, precision=config.precision)
        if self.engine.note is not None:
            notify(self.engine.note)
        self.evaluators = [self.engine.evaluator(number) for number in range(len(lanes))]


class _Sitting:
    """The state of ``train_together``."""

    def __init__(self, report: Report | None, device: str, notify: Notify, at_once: int):
        self.report, self.device, self.notify, self.at_once = report, device, notify, at_once
        self.learners: dict[RunFolder, Learner] = {}
        self.groups: list[_Group] = []
        self.failures: dict[RunFolder, UserError] = {}
        self._alone = False
        self._sources: dict[object, TaskSource] = {}

    def begin(self, runs: Sequence[RunFolder]) -> None:
        self._alone = len(runs) == 1
        by_shape: dict[str, list[_Member]] = {}
        for run in runs:
            with self._failing(run):
                member = self._open(run)
                if member.ended:
                    member.finish()
                else:
                    by_shape.setdefault(member.shape, []).append(member)
        for members in by_shape.values():
            try:
                self.groups.append(_Group(members, self.notify))
            except UserError as error:
                for member in members:
                    with self._failing(member.run):
                        raise error

    def advance(self, group: _Group) -> None:
        """One outer step of every run of a group, and whatever is then due."""
        members = group.members
        if group.counted_until is None:
            group.counted_until = time.perf_counter()
        try:
            group.engine.outer_step([member.learner.step for member in members])
            for member in members:
                member.learner.step += 1
            # Asking waits for a GPU, and raises rather than let a bad state be validated or saved.
            asked = any(member.logging or member.saving for member in members)
            losses = group.engine.last_losses() if asked else []
        except NonFiniteError as error:
            self._separate(group, error)
            return
        values: list[dict[str, Any]] = [{} for _ in members]
        for number, member in enumerate(members):
            if member.logging:
                values[number]["loss"] = losses[number]
            if member.validating:
                values[number]["validation_accuracy"] = member.validate(group.evaluators[number])
        # The time each of them waited: for its lanes, and for other groups, whose steps a GPU does meanwhile.
        elapsed = time.perf_counter() - group.counted_until
        group.counted_until += elapsed
        for member, measured in zip(members, values, strict=True):
            member.learner.seconds += elapsed
            with self._failing(member.run):
                self._record(member, measured)
                if member.saving:
                    member.save()
                if member.ended:
                    member.finish()
        left = [member for member in members if not member.ended and member.run not in self.failures]
        if len(left) < len(members):
            place = self.groups.index(group)
            self.groups[place : place + 1] = [_Group(left, self.notify, group.counted_until)] if left else []

    def save_and_say_how_to_go_on(self) -> str:
        """Save every run that is under way, and tell the user about it."""
        members = [member for group in self.groups for member in group.members]
        for group in self.groups:
            try:
                group.engine.last_losses()
            except NonFiniteError as error:
                if self._alone:
                    raise
                self.notify(f"{_names(group.members)}: not saved, the last checkpoint holds ({error})")
            else:
                for member in group.members:
                    with self._failing(member.run):
                        member.save()
        command = shlex.join(["wheretolearn", "resume", *(str(member.run.path) for member in members)])
        if self._alone:
            learner, config = members[0].learner, members[0].config
            return f"stopped after step {learner.step} of {config.outer_steps} and saved; go on with `{command}`"
        failed = ["\n" + failure_of([run], error, " failed") for run, error in self.failures.items()]
        return f"stopped {len(members)} runs and saved them; go on with `{command}`" + "".join(failed)

    def _open(self, run: RunFolder) -> _Member:
        config = from_dict(FewShotConfig, run.config, where=str(run.path))
        run.lock()
        images = load_set(config.data)
        training = self._source(config, config.train_split, run.seed, "train")
        image_shape = split_of(images, config.train_split).images.shape[1:]
        learner = new_learner(config, image_shape, run.seed, self.device)
        saved = checkpoint.load_latest(run)
        if saved is None and (run.path / "model.safetensors").exists():
            evaluate = "evaluate it" if finished(run) else "put run.json back as it was and evaluate it"
            raise UserError(f"{run.path} has its model but no checkpoint: {evaluate}, or train anew in another folder")
        if saved is not None:
            checkpoint.check_identity(run, saved.state, FewShotConfig, CHANGEABLE)
            if saved.step > config.outer_steps:
                raise ConfigError(
                    f"{run.path}: it has taken {saved.step} outer steps already, and outer_steps={config.outer_steps} "
                    "in its run.json is too few"
                )
            learner.restore(saved.step, saved.state, str(run.path))
            learner.notes = saved.notes
            for note in saved.notes:
                self.notify(note)
        elif config.start_from is not None:
            load_start(config, learner.model)
            checkpoint.save(run, checkpoint.identity(run) | learner.state(), 0)  # the other run is not needed again
        run.rewind(learner.step)
        self.learners[run] = learner
        if learner.step > 0 and self.report is not None:
            self.report(run, learner.step, {})
        return _Member(
            run,
            config,
            image_shape,
            learner,
            Lane(
                learner.model,
                learner.mask,
                learner.optimizer,
                lambda step: list(training.tasks(step, config.tasks_per_step)),
                config.inner,
                run.seed,
                config.outer_clamp,
            ),
            self._source(config, config.validation_split, run.seed, "validation"),
        )

    def _source(self, config: FewShotConfig, split: str, seed: int, stream: str) -> TaskSource:
        """Tasks of one run; on a GPU the images lie in its memory once for all runs."""
        key = (config.data, split, config.episode)
        if key not in self._sources:
            chosen = split_of(load_set(config.data), split)
            self._sources[key] = TaskSource(chosen, config.episode, seed, stream, self.device)
        return self._sources[key].with_seed(seed, stream)

    def _record(self, member: _Member, values: dict[str, Any]) -> None:
        values["elapsed_seconds"] = member.learner.seconds
        if member.logging:
            with member.learner.as_validated():
                sparsity = member.learner.mask.sparsity()
            values |= {"sparsity": sparsity.overall, "sparsity_by_layer": sparsity.by_layer}
            values["sparsity_by_tensor"] = sparsity.by_tensor
            if self.at_once > 1:
                values["runs_at_once"] = self.at_once
            member.run.log(member.learner.step, **values)
            if member.config.head == "ridge":  # nothing adapts by gradient, and so nothing is closed
                del values["sparsity"]
        if self.report is not None:
            self.report(member.run, member.learner.step, values)

    def _separate(self, group: _Group, error: NonFiniteError) -> None:
        """An engine does not say whose loss it was: let every run go on alone from its last checkpoint."""
        place = self.groups.index(group)
        alone: list[_Group] = []
        if len(group.members) > 1:
            self.notify(f"{_names(group.members)}: one has a loss that is not finite; each goes on from its checkpoint")
        for member in group.members:
            with self._failing(member.run):
                if len(group.members) == 1:
                    raise error
                alone.append(_Group([self._open(member.run)], self.notify))
        self.groups[place : place + 1] = alone

    @contextmanager
    def _failing(self, run: RunFolder) -> Iterator[None]:
        """What goes wrong with one run does not end the others."""
        try:
            yield
        except UserError as error:
            self.failures[run] = error
            if not self._alone:
                self.notify(failure_of([run], error, " failed"))


def _names(members: Sequence[_Member]) -> str:
    return ", ".join(str(member.run.path) for member in members)
