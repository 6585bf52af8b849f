"""Online runs: predict, count, learn; checkpoints, and what is measured on the way."""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wheretolearn import masks
from wheretolearn.config import from_dict, toml_text
from wheretolearn.engine.choose import arithmetic_that_runs, choose
from wheretolearn.engine.graphed import Arithmetic
from wheretolearn.engine.task import InnerLoop
from wheretolearn.errors import NonFiniteError, Stopped, UserError
from wheretolearn.online import metrics
from wheretolearn.online.c_maml_lanes import CMAMLLanes
from wheretolearn.online.config import DETECTING, INCIDENTAL, OnlineConfig
from wheretolearn.online.learners.c_maml import CMAML
from wheretolearn.online.learners.make import make_learner
from wheretolearn.online.pretraining import cache_folder, pretrained_weights
from wheretolearn.online.problem import Problem, SourceImages, batches
from wheretolearn.online.recorded import DIVERGED, RecordedStep
from wheretolearn.runs import checkpoint
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.signals import StopRequest
from wheretolearn.runs.workers import failure, failure_of, stopped
from wheretolearn.storage import check_shapes, load_weights, read_json, save_weights, write_json

Report = Callable[[RunFolder, int, Mapping[str, Any]], None]  # (run, step, latest values)
Notify = Callable[[str], None]
RESULT, PRETRAINED = "result.json", "pretrained.safetensors"
GOOD = "Checkpoints saved before are good"
LANES_ON = ("cuda",)  # devices on which runs of the C-MAML family take steps together


def finished(run: RunFolder) -> bool:
    return (run.path / RESULT).exists()


def result(run: RunFolder) -> dict[str, Any]:
    """What a finished run measured: accuracy in all and by source, detection, recovery, sparsity."""
    measured: dict[str, Any] = read_json(run.path / RESULT)
    return measured


def settings_of(run: RunFolder) -> OnlineConfig:
    return from_dict(OnlineConfig, run.config, where=str(run.path))


def train_together(
    runs: Sequence[RunFolder],
    report: Report | None = None,
    *,
    device: str = "cpu",
    notify: Notify | None = None,
    on_stop: Callable[[], None] | None = None,
    at_once: int | None = None,
    failed: Mapping[RunFolder, UserError] | None = None,
) -> None:
    """Take runs to their ends in one process, step by step in turn, each from its last checkpoint if it has one.

    Each ends as it would alone, on a CPU with as many threads. SIGINT or SIGTERM ends this with ``Stopped``, after
    saving. A run that fails does not keep the others from their ends; the error comes last. ``at_once`` is how many
    runs share the machine, if not just these; ``failed`` are those of them that cannot start. ``result.json`` is
    written last: where it is, the run is finished.
    """
    for run in runs:
        run.lock()
    failures = dict(failed or {})
    failing = partial(keeping_errors, failures, notify if len(runs) > 1 else None)
    # Before signals are caught here: pre-training has its own way to stop.
    for alike in by_pretraining([run for run in runs if run not in failures]).values():
        with telling_how_to_go_on(runs), failing(alike):
            prepare(alike, device=device, notify=notify, on_stop=on_stop)
    with StopRequest(on_request=on_stop) as stop:
        images: dict[tuple[Any, ...], SourceImages] = {}
        members: list[_Member] = []
        for run in runs:
            if not finished(run) and run not in failures:
                with failing([run]):
                    members.append(_Member(run, images, device, report, notify, at_once or len(runs)))
        groups = side_by_side(members, device, notify)
        while members and not stop.requested:
            for group in groups:
                for member, error in group.advance():
                    with failing([member.run]):
                        if error is not None:
                            raise error
                        member.conclude()
                        if member.ended:
                            member.finish()
            left = [member for member in members if not finished(member.run) and member.run not in failures]
            if len(left) < len(members):
                # What a group has recorded stays good for as long as all of its runs are at work.
                groups = [group for group in groups if all(member in left for member in group.members)]
                kept = [member for group in groups for member in group.members]
                groups += side_by_side([member for member in left if member not in kept], device, notify)
                members = left
        if members:
            for member in members:
                with failing([member.run]):
                    member.save()
            members = [member for member in members if member.run not in failures]
        if members:
            raise stopped(_stopped(members), [member.run for member in members], failures)
    if failures:
        raise failure(failures, of=len(runs))


def train(
    run: RunFolder,
    report: Callable[[int, Mapping[str, Any]], None] | None = None,
    *,
    notify: Notify | None = None,
    at_once: int = 1,
) -> None:
    """Take one run to its end on the CPU; see ``train_together``."""
    each = None if report is None else lambda _, step, values: report(step, values)
    train_together([run], each, notify=notify, at_once=at_once)


def by_pretraining(runs: Sequence[RunFolder]) -> dict[Path, list[RunFolder]]:
    """Runs that lack the pre-trained weights that they ask for, by the folder where these are kept."""
    groups: dict[Path, list[RunFolder]] = {}
    for run in runs:
        if finished(run) or (run.path / PRETRAINED).exists():
            continue
        try:
            config = settings_of(run)
            folder = cache_folder(config) if config.pretrain else None
        except UserError:
            folder = run.path  # what is wrong comes up again when it is prepared
        if folder is not None:
            groups.setdefault(folder, []).append(run)
    return groups


def prepare(
    runs: Sequence[RunFolder],
    report: Callable[[int, Mapping[str, Any]], None] | None = None,
    *,
    device: str = "cpu",
    notify: Notify | None = None,
    on_stop: Callable[[], None] | None = None,
) -> None:
    """Give each of these runs a copy of the weights that they all ask for; from then on they need no cache."""
    weights = pretrained_weights(settings_of(runs[0]), device, report, notify, on_stop)
    for run in runs:
        save_weights(run.path / PRETRAINED, weights)


@contextmanager
def keeping_errors(
    errors: dict[RunFolder, UserError], notify: Notify | None, runs: Sequence[RunFolder]
) -> Iterator[None]:
    """What goes wrong with some runs is told, and kept for the end, so that others can go on."""
    try:
        yield
    except Stopped:
        raise
    except UserError as error:
        errors |= dict.fromkeys(runs, error)
        if notify is not None:
            notify(failure_of(runs, error, " failed"))


@contextmanager
def telling_how_to_go_on(runs: Sequence[RunFolder]) -> Iterator[None]:
    """Whatever stops here tells the command that resumes all of these runs."""
    try:
        yield
    except Stopped as error:
        raise stopped(str(error), [run for run in runs if not finished(run)]) from None


class _Member:
    """One run at work."""

    def __init__(
        self,
        run: RunFolder,
        images: dict[tuple[Any, ...], SourceImages],
        device: str,
        report: Report | None,
        notify: Notify | None,
        at_once: int,
    ):
        self.run, self.report, self.at_once = run, report, at_once
        self.config = settings_of(run)
        if self.config.sources not in images:
            images[self.config.sources] = SourceImages(self.config.sources, device)
        shared = images[self.config.sources]
        self.problem = Problem(self.config, run.seed, shared)
        model = self.config.build_model(shared.shape, run.seed)
        if self.config.pretrain:
            _load(model, run)
        self.model = model.to(device)
        # Lanes of the C-MAML family share one of their own.
        arithmetic = arithmetic_of(self.config, self.model, notify) if self.config.learner == "metabgd" else None
        self.learner = make_learner(self.config, self.model, run.seed, arithmetic)
        self.sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self.done, self.concluded = 0, 0
        self._earlier, self._begun = 0.0, time.perf_counter()
        # Images predicted rightly, by step. On the device, so that counting does not wait for it.
        self.right = torch.zeros(self.config.steps, dtype=torch.int32, device=device)
        self.detected = torch.zeros(self.config.steps, dtype=torch.bool)
        self._restore(notify)

    @property
    def ended(self) -> bool:
        return self.done == self.config.steps

    @property
    def seconds(self) -> float:
        """Wall time so far, in which other runs may have had their turns too."""
        return self._earlier + time.perf_counter() - self._begun

    def counted(self) -> None:
        """A batch was predicted, ``right`` tells how well, and learned from."""
        self.detected[self.done] = self.learner.detected
        self.done += 1

    def conclude(self) -> None:
        """Whatever is due after a step, once."""
        if self.concluded == self.done:  # a kill between the last step and the result leaves only that to do
            return
        self.concluded = self.done
        values: dict[str, Any] = {}
        if self.done % self.config.log_every == 0 or self.ended:
            values = self._measure()  # on a GPU it waits here for steps that were only queued
            values["elapsed_seconds"] = self.seconds
            self.run.log(self.done, **values)
        if self.done % self.config.checkpoint_every == 0 or self.ended:
            self.save()
        if self.report is not None:
            self.report(self.run, self.done, values)

    def save(self) -> None:
        state = {
            **checkpoint.identity(self.run),
            "right": self._right(),  # first, as it waits for the device
            "learner": {name: tensor.cpu() for name, tensor in self.learner.state().items()},
            "detected": self.detected[: self.done].clone(),
            "seconds": self.seconds,
        }
        checkpoint.save(self.run, state, self.done)

    def _restore(self, notify: Notify | None) -> None:
        saved = checkpoint.load_latest(self.run)
        if saved is None:
            self.run.rewind(0)
            return
        state = saved.state
        checkpoint.check_identity(self.run, state, OnlineConfig, INCIDENTAL)
        if differing := self._early_differences(state):
            raise checkpoint.mismatch(self.run, differing)
        self.run.rewind(saved.step)
        try:
            self.learner.restore(state["learner"])
            self.right[: saved.step] = state["right"].to(self.right.device)
            self.detected[: saved.step] = state["detected"]
        except (KeyError, RuntimeError) as error:
            raise checkpoint.mismatch(self.run) from error
        self.done, self._earlier = saved.step, state["seconds"]
        self.concluded = self.done
        for note in saved.notes:
            if notify is not None:
                notify(note)
        if self.report is not None:
            self.report(self.run, self.done, {})

    def _early_differences(self, state: Mapping[str, Any]) -> list[str]:
        """Where run.json differs from the little that checkpoints of early versions tell of their settings."""
        if "kind" not in state:
            return []
        sizes = zip(("ways", "shots", "buffer"), state.get("stored", ()), strict=False)
        kept = {"learner": state["kind"], **dict(sizes)}
        return [f"{name}={toml_text(value)}" for name, value in kept.items() if value != getattr(self.config, name)]

    def _right(self) -> Tensor:
        """How many images of every step so far were predicted rightly, on the CPU; an error where one diverged."""
        if self.right.is_cuda:  # steps may be queued on any stream
            torch.cuda.synchronize(self.right.device)
        right = self.right[: self.done].cpu()
        bad = (right == DIVERGED).nonzero()
        if len(bad):
            rates = [name for name in ("lr", "inner_lr", "mask_lr", "mean_eta") if name not in self.config.unused]
            or_clip = "" if "clip_norm" in self.config.unused else ", or set clip_norm"
            raise NonFiniteError(
                f"{self.run.path}: predictions are not finite at step {int(bad[0]) + 1}; in a new run, use a smaller "
                f"{' or '.join(rates)}{or_clip}. {GOOD}"
            )
        return right

    def _accuracies(self) -> Tensor:
        return self._right().double() / (self.config.ways * self.config.shots)

    def _measure(self) -> dict[str, Any]:
        """Means over the stream so far, and each step since the last record."""
        accuracies = self._accuracies()
        last = (self.done - 1) // self.config.log_every * self.config.log_every
        new = slice(last, self.done)
        source, switched = self.problem.source[new], self.problem.switched[new]
        values = {
            "accuracy": accuracies.mean().item(),
            "accuracy_by_source": metrics.accuracy_by_source(accuracies, self.problem.source, self.problem.names),
            "accuracies": accuracies[new].tolist(),
            "switches": [
                {"step": last + place + 1, "source": self.problem.names[int(source[place])]}
                for place in switched.nonzero().flatten().tolist()
            ],
        }
        if self.config.learner in DETECTING:
            values["detected"] = [last + place + 1 for place in self.detected[new].nonzero().flatten().tolist()]
        return values | self._sparsity()

    def finish(self) -> None:
        """Leave what was measured."""
        accuracies = self._accuracies()
        switched = self.problem.switched
        means, counts = metrics.recovery(accuracies, switched)
        measured = {
            "accuracy": accuracies.mean().item(),
            "accuracy_by_source": metrics.accuracy_by_source(accuracies, self.problem.source, self.problem.names),
            "switches": int(switched[1:].sum()),
            "recovery": means,
            "recovery_counts": counts,
            "seconds": self.seconds,
            "runs_at_once": self.at_once,
            **self._sparsity(),
        }
        if self.config.learner in DETECTING:
            measured["detection"] = asdict(metrics.detection(switched, self.detected))
        write_json(self.run.path / RESULT, measured)

    def _sparsity(self) -> dict[str, Any]:
        shares = self.learner.closed()
        if not shares:
            return {}
        covered = sum(self.sizes[name] for name in shares)
        overall = sum(share * self.sizes[name] for name, share in shares.items()) / covered
        return {"sparsity": overall, "sparsity_by_tensor": shares}


def inner_loop_of(config: OnlineConfig) -> InnerLoop:
    return InnerLoop(config.inner_steps, config.inner_lr, order=config.inner_order)


def arithmetic_of(config: OnlineConfig, model: nn.Module, notify: Notify | None = None) -> Arithmetic | None:
    """How a learner's inner loop runs on a GPU, if an engine of few-shot learning can run it."""
    inner = inner_loop_of(config)
    name = choose(model, masks.fixed(model), inner, "auto", config.precision)
    on_gpu = next(model.parameters()).device.type in LANES_ON
    if not on_gpu or not config.plain_inner_loop:
        return None
    return arithmetic_that_runs(name, model, inner, config.precision, notify)


class _Alone:
    """One run; on a GPU its step is a graph on a stream of its own."""

    def __init__(self, member: _Member, device: str, notify: Notify | None):
        self.members = [member]
        self.recorded = RecordedStep(member.learner, torch.device(device), member.config.precision, notify)

    def advance(self) -> list[tuple[_Member, UserError | None]]:
        (member,) = self.members
        if member.ended:
            return [(member, None)]
        batch = member.problem.batch(member.done)
        try:
            self.recorded.step(batch.inputs, batch.labels, member.right[member.done])
        except NonFiniteError as error:
            return [(member, _at(member, error))]
        member.counted()
        return [(member, None)]


class _Lanes:
    """Runs of C-MAML or its variants that share CUDA graphs."""

    def __init__(self, members: Sequence[_Member], notify: Notify | None):
        self.members = list(members)
        learners = [member.learner for member in members if isinstance(member.learner, CMAML)]
        arithmetic = arithmetic_of(members[0].config, members[0].model, notify)
        assert arithmetic is not None
        self.lanes = CMAMLLanes(learners, arithmetic, notify)

    def advance(self) -> list[tuple[_Member, UserError | None]]:
        problems, steps = [member.problem for member in self.members], [member.done for member in self.members]
        right = self.lanes.step(*batches(problems, steps))
        news: list[tuple[_Member, UserError | None]] = []
        for lane, member in enumerate(self.members):
            if lane in self.lanes.failed:
                news.append((member, _at(member, self.lanes.failed[lane])))
            else:
                member.right[member.done] = right[lane]
                member.counted()
                news.append((member, None))
        return news


def side_by_side(members: Sequence[_Member], device: str, notify: Notify | None) -> list[_Alone | _Lanes]:
    """Who takes steps together: on a GPU, learners of the C-MAML family whose inner loops are alike."""
    groups: list[_Alone | _Lanes] = []
    alike: dict[Hashable, list[_Member]] = {}
    for member in members:
        learner = member.learner
        if torch.device(device).type in LANES_ON and isinstance(learner, CMAML) and not member.ended:
            shapes = tuple((name, tensor.shape) for name, tensor in learner.theta.items())
            config = member.config
            like = (learner.inner_steps, learner.mask.names, shapes, config.precision, config.sources, config.shots)
            alike.setdefault(like, []).append(member)
        else:
            groups.append(_Alone(member, device, notify))
    return groups + [_Lanes(own, notify) for own in alike.values()]


def _at(member: _Member, error: NonFiniteError) -> NonFiniteError:
    return NonFiniteError(f"{member.run.path}, step {member.done + 1}: {error}. {GOOD}")


def _load(model: nn.Module, run: RunFolder) -> None:
    weights, _ = load_weights(run.path / PRETRAINED)
    own = model.state_dict()
    check_shapes({n: t.shape for n, t in weights.items()}, {n: t.shape for n, t in own.items()}, run.path / PRETRAINED)
    model.load_state_dict(weights)


def _stopped(members: Sequence[_Member]) -> str:
    if len(members) == 1:
        return f"stopped after step {members[0].done} of {members[0].config.steps} and saved"
    return f"stopped {len(members)} runs and saved them"
