"""Carry out a plan: train what is missing, measure it, record it. Killed at any moment, the next try goes on."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from wheretolearn.config import to_dict
from wheretolearn.continual.records import CONTINUAL
from wheretolearn.continual.training import train_together as train_continual
from wheretolearn.errors import Stopped, UserError
from wheretolearn.fewshot import records as fewshot_records
from wheretolearn.fewshot.trained import Evaluation, evaluate_run
from wheretolearn.fewshot.training import train_together as train_fewshot
from wheretolearn.online.records import ONLINE
from wheretolearn.online.training import train_together as train_online
from wheretolearn.presets import Preset
from wheretolearn.reproduce.cells import all_cells
from wheretolearn.reproduce.plan import Plan, Training, batches, parts_per_training
from wheretolearn.reproduce.protocols import PROTOCOLS
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.records import result_records
from wheretolearn.runs.results import ResultRecord, save
from wheretolearn.runs.workers import train_in_workers

SECONDS_TO_WAIT = 60  # for the workers of a killed process, which save and end by themselves
AT_WORK = ".at-work"  # in the folder of runs: what processes are working on
TASKS = 300  # that a few-shot run is measured on, as in the paper


@dataclass(frozen=True)
class Watch:
    """Who is told what happens."""

    step: Callable[[RunFolder, int, Mapping[str, Any]], None]
    stage: Callable[[Training, str], None]  # what is done for a training, beside its steps
    recorded: Callable[[Training, Preset, Sequence[ResultRecord]], None]
    note: Callable[[str], None]
    stop: Callable[[], None]  # a signal was heard


def carry_out(plan: Plan, results: Path, device: str, workers: int, watch: Watch, *, tensorboard: bool = False) -> None:
    """Take every training of a plan to its end and write the records of its presets.

    A run that fails does not keep others from their ends; the error comes last. With ``tensorboard``, new runs write
    event files too.
    """
    with ExitStack() as claims:
        for training in plan.trainings:
            claims.enter_context(_claim(training))
        _carry_out(plan, _Work(plan, results, device, workers, watch, tensorboard))


def _claim(training: Training) -> RunFolder:
    """Keeps other processes away from a training: its runs are nobody's from when one waits until its worker begins."""
    claim = RunFolder(training.folder / AT_WORK / training.preset.name)
    try:
        claim.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {claim.path}: {error.strerror}") from error
    try:
        claim.lock()
    except UserError as error:
        raise UserError(f"{training.preset.name} cannot be trained, as {error}") from None
    return claim


def runs_at_once(plan: Plan, device: str) -> int:
    """The most runs that are open at the same time while the plan is carried out."""
    return max(
        (
            sum(state != "finished" for own in batch for state in own.states().values())
            for batch in _batches(plan, device)
        ),
        default=0,
    )


def _batches(plan: Plan, device: str) -> Iterator[Sequence[Training]]:
    """Trainings that go to their ends together, in the order in which they do: first what others start from."""
    for stage in (False, True):
        for name in PROTOCOLS:
            chosen = [own for own in plan.trainings if own.preset.protocol == name and (own.start is not None) == stage]
            if chosen:
                yield from batches(name, chosen, device)


def _carry_out(plan: Plan, work: "_Work") -> None:
    work.record_finished(plan.trainings)
    for batch in _batches(plan, work.device):
        if all(own.finished for own in batch):
            continue
        try:
            work.train(batch)
        except Stopped:
            work.stopping = True
        except UserError as error:
            work.errors.append(error)
        fewshot = batch[0].preset.protocol == "fewshot"
        if work.stopping and (fewshot or not all(own.finished for own in plan.trainings)):
            raise Stopped("\n".join(["stopped and saved; the same command goes on", *map(str, work.errors)]))
        work.record_finished(batch)
    if work.errors:
        raise type(work.errors[0])("\n".join(map(str, work.errors)))


class _Work:
    def __init__(self, plan: Plan, results: Path, device: str, workers: int, watch: Watch, tensorboard: bool):
        self.plan, self.results, self.device, self.watch = plan, results, device, watch
        self.workers, self.tensorboard = workers, tensorboard
        self.errors: list[UserError] = []
        self.stopping = False
        self._recorded: set[Training] = set()
        self._looked = 0.0

    def stop(self) -> None:
        self.stopping = True
        self.watch.stop()

    def train(self, trainings: Sequence[Training]) -> None:
        """Take runs of one protocol to their ends."""
        wanted = [(own, seed) for own in trainings for seed, state in own.states().items() if state != "finished"]
        wanted = [(own, seed) for own, seed in wanted if own.start is None or own.start.finished]
        if not wanted:
            return
        with ExitStack() as folders:
            runs: dict[tuple[Training, int], RunFolder] = {}
            for own, seed in wanted:
                runs[own, seed] = folders.enter_context(self._open(own, seed))
            name = trainings[0].preset.protocol

            def step(run: RunFolder, number: int, values: Mapping[str, Any]) -> None:
                self.watch.step(run, number, values)
                self._record_streams(trainings)

            if self.device == "cpu":
                self._train_in_workers(name, trainings, runs, step)
            elif name == "continual":
                train_continual(
                    list(runs.values()), step, device=self.device, notify=self.watch.note, on_stop=self.stop
                )
            elif name == "online":
                train_online(
                    list(runs.values()),
                    step,
                    device=self.device,
                    notify=self.watch.note,
                    on_stop=self.stop,
                )
            else:
                train_fewshot(list(runs.values()), step, self.device, self.stop, self.watch.note)

    def _train_in_workers(
        self,
        name: str,
        trainings: Sequence[Training],
        runs: Mapping[tuple[Training, int], RunFolder],
        step: Callable[[RunFolder, int, Mapping[str, Any]], None],
    ) -> None:
        protocol = PROTOCOLS[name]
        most = max(len(own.seeds) for own in trainings)
        parts = min(most, parts_per_training(self.plan, self.workers, self.device)) if protocol.lanes else most
        # First one part of every training: its other runs then find what they share, such as pre-trained weights.
        shares = [
            [runs[own, seed] for seed in split(own.seeds, parts)[part] if (own, seed) in runs]
            for part in range(parts)
            for own in trainings
            if part < min(parts, len(own.seeds))
        ]
        at_once = min(self.workers, self.plan.all_trainings * parts)
        train_in_workers(
            protocol.worker,
            [share for share in shares if share],
            step,
            finished=protocol.finished,
            options=[] if protocol.lanes else [str(at_once)],
            at_once=at_once,
            threads=1,
            notify=self.watch.note,
            on_stop=self.stop,
        )

    def _open(self, training: Training, seed: int) -> RunFolder:
        """The run of a seed, made where it is missing, and locked."""
        place = training.place(seed)
        deadline = time.monotonic() + SECONDS_TO_WAIT
        while True:
            try:
                if (place / "run.json").exists():
                    run = RunFolder.open(place)
                    run.lock()
                    return run
                return RunFolder.create(
                    place,
                    to_dict(training.config(seed)),
                    seed,
                    training.preset.protocol,
                    training.preset.name,
                    self.plan.scale,
                    self.tensorboard,
                    threads=1 if self.device == "cpu" else None,
                )
            except UserError as error:
                if "in use" not in str(error) or time.monotonic() > deadline:
                    raise
                self.watch.note(f"waiting, as {error}")
                time.sleep(0.2)

    def _record_streams(self, trainings: Sequence[Training]) -> None:
        """Of runs that are measured while they learn, records come as soon as the last seed ends."""
        if time.monotonic() - self._looked < 1:
            return
        self._looked = time.monotonic()
        self.record_finished([own for own in trainings if own.preset.protocol != "fewshot"])

    def record_finished(self, trainings: Sequence[Training]) -> None:
        """What cannot be recorded keeps nothing else from its end: its error is kept for last."""
        for training in trainings:
            try:
                self._record(training)
            except UserError as error:
                self.errors.append(error)

    def _record(self, training: Training) -> None:
        """Measure and record the presets of a training whose runs are all finished; nothing where some are not."""
        if training in self._recorded or not training.finished:
            return
        self._recorded.add(training)
        with ExitStack() as folders:
            runs = [folders.enter_context(RunFolder.open(training.place(seed))) for seed in training.seeds]
            if self.plan.scale == "paper":  # before the records, which tell that all is done
                self._keep_curves(runs)
            for preset in training.to_record:
                measures = [cell.measure for cell in all_cells(self.plan.scale) if cell.preset.name == preset.name]
                records = self._measure(training, preset, runs, measures)
                in_cells = [own for own in records if own.metric in measures]
                if preset.protocol == "fewshot":
                    records = in_cells
                # Streams measure more than the paper has cells for; cells go last, as they tell that all is done.
                for own in sorted(records, key=lambda own: own.metric in measures):
                    save(own, self.results / preset.protocol)
                self.watch.recorded(training, preset, in_cells)

    def _keep_curves(self, runs: Sequence[RunFolder]) -> None:
        if find_spec("matplotlib") is None:  # a machine that only trains can do without
            self.watch.note("no curves are kept, as matplotlib is missing: `report --keep-curves` does it elsewhere")
            return
        from wheretolearn.report.curves import save_curves  # here, as it loads matplotlib

        save_curves(runs, self.results)

    def _measure(
        self, training: Training, preset: Preset, runs: Sequence[RunFolder], measures: Sequence[str]
    ) -> list[ResultRecord]:
        if preset.protocol != "fewshot":
            return result_records(CONTINUAL if preset.protocol == "continual" else ONLINE, runs, preset.name)
        evaluations: dict[RunFolder, list[Evaluation]] = {}
        for run in runs:
            data = preset.evaluate.data or run.config["data"]
            evaluations[run] = []
            if all(measure.startswith("sparsity") for measure in measures):
                continue
            for split_name in fewshot_records.default_splits(run, data, preset):
                self.watch.stage(training, f"testing on {data}/{split_name}, seed {run.seed}")
                evaluations[run].append(
                    evaluate_run(
                        run,
                        split_name,
                        data=data,
                        tasks=TASKS,
                        steps=preset.evaluate.steps,
                        ensemble="ensemble accuracy" in measures,
                        device=self.device,
                        notify=self.watch.note,
                    )
                )
        return fewshot_records.result_records(evaluations, preset.name)


def split(seeds: Sequence[int], parts: int) -> list[list[int]]:
    """Seeds in as many even parts, less those that would be empty."""
    parts = min(parts, len(seeds))
    borders = [round(part * len(seeds) / parts) for part in range(parts + 1)]
    return [list(seeds[start:end]) for start, end in pairwise(borders)]
