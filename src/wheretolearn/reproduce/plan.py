"""What has to be run for cells of the paper: which trainings, with which seeds, and how far they are."""

import json
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from wheretolearn import masks
from wheretolearn.config import differences, from_dict
from wheretolearn.data import glyphs, image_set
from wheretolearn.engine.choose import CAN_RUN, runs_in
from wheretolearn.engine.graphed import Precision
from wheretolearn.errors import ConfigError, DataError, UserError
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.fewshot.training import lane_settings
from wheretolearn.online.config import OnlineConfig
from wheretolearn.online.training import inner_loop_of
from wheretolearn.presets import Preset, Scale, list_presets, load_preset
from wheretolearn.reproduce.cells import Cell, Found, all_cells, look_up, training_of
from wheretolearn.reproduce.protocols import PROTOCOLS, config_of
from wheretolearn.runs import environment
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.records import record_name
from wheretolearn.runs.results import ResultRecord, check_savable
from wheretolearn.version import __version__
from wheretolearn.wording import some

State = Literal["missing", "begun", "finished"]
FEWSHOT_LANES = 6  # runs of several trainings that share a GPU at the most: more would hardly be faster


@dataclass(eq=False)
class Training:
    """Runs of one setting, a run for each seed, and the presets that are measured on them."""

    preset: Preset  # the first with these settings, after which the runs are named
    seeds: tuple[int, ...]
    folder: Path
    start: "Training | None" = None  # the training whose finished runs these begin with
    precision: Precision | None = None  # on a GPU, where not the preset's
    to_record: list[Preset] = field(default_factory=list)

    def place(self, seed: int) -> Path:
        return self.folder / f"{self.preset.name}-seed{seed}"

    def config(self, seed: int) -> Any:
        config = in_precision(config_of(self.preset), self.precision)
        if self.start is None:
            return config
        return replace(config, start_from=str(self.start.place(seed).resolve()))

    @property
    def chooses_precision(self) -> bool:
        """Whether one was asked for, and its method has any."""
        return self.precision is not None and hasattr(config_of(self.preset), "precision")

    @property
    def image_sets(self) -> list[str]:
        return PROTOCOLS[self.preset.protocol].image_sets(config_of(self.preset))

    def states(self) -> dict[int, State]:
        return {seed: self._state(self.place(seed)) for seed in self.seeds}

    @property
    def finished(self) -> bool:
        return all(state == "finished" for state in self.states().values())

    def _state(self, place: Path) -> State:
        if not (place / "run.json").exists():  # nothing, or what a kill left of its making
            return "missing"
        return "finished" if PROTOCOLS[self.preset.protocol].finished(RunFolder(place)) else "begun"


def in_precision(config: Any, precision: Precision | None) -> Any:
    """The config with this precision, or with tf32 where its method cannot have it."""
    if precision is None or not hasattr(config, "precision"):
        return config
    return replace(config, precision=precision if _can_have(precision, config) else "tf32")


@cache
def _can_have(precision: Precision, config: FewShotConfig | OnlineConfig) -> bool:
    if "eager" in CAN_RUN[precision]:
        return True
    with suppress(ConfigError):
        config = replace(config, precision=precision)
        # Of images, engines ask only what is alike for all sets.
        if isinstance(config, FewShotConfig):
            model = config.build_model(image_size=84, channels=3, seed=0)
            return runs_in(precision, model, config.build_mask(model, seed=0), config.inner)
        model = config.build_model((28, 28, 1), seed=0)
        return runs_in(precision, model, masks.fixed(model), inner_loop_of(config))
    return False


@dataclass(eq=False)
class Plan:
    """The cells that were asked for, and the trainings that are missing for some of them."""

    scale: Scale
    found: list[Found]
    trainings: list[Training]  # those that others start from come first
    all_trainings: int  # with those whose cells are recorded

    def count(self, state: State) -> int:
        return sum(list(training.states().values()).count(state) for training in self.trainings)


def make_plan(
    cells: Sequence[Cell],
    records: Sequence[ResultRecord],
    seeds: Callable[[str], int],
    scale: Scale,
    folder: Path,
    again: bool = False,
    precision: Precision | None = None,
) -> Plan:
    """Everything that the cells need and that is not recorded; with ``again``, that too.

    ``seeds`` tells how many a table has; a training that two tables share gets the larger number.
    """
    found = look_up(cells, records, scale)
    named = _training_names(scale)
    numbers: dict[str, int] = {}
    for cell in cells:
        first = named[cell.preset.name]
        numbers[first] = max(numbers.get(first, 0), seeds(cell.table))
    missing: dict[str, Preset] = {}
    for one in found:
        wanted = set(range(numbers[named[one.cell.preset.name]]))
        if again or one.record is None or one.status != "recorded" or not wanted <= set(one.record.seeds):
            missing[one.cell.preset.name] = one.cell.preset
    trainings: dict[str, Training] = {}

    def training(name: str, least: int = 0) -> Training:
        first = named[name]
        number = max(least, numbers.get(first, 0))
        if first not in trainings:
            preset = load_preset(first, scale=scale)
            start = None if preset.after is None else training(preset.after, number)
            trainings[first] = Training(preset, tuple(range(number)), folder, start, precision)
        return trainings[first]

    for preset in missing.values():
        training(preset.name).to_record.append(preset)
    needed = {own.start for own in trainings.values() if own.start is not None and not own.finished}
    trainings = {name: own for name, own in trainings.items() if own.to_record or own in needed}
    everything = {named[cell.preset.name] for cell in cells}
    return Plan(scale, found, list(trainings.values()), len(everything | trainings.keys()))


def check_runs(plan: Plan) -> None:
    """Refuse a folder that holds other runs under the names of those that are wanted."""
    for training in plan.trainings:
        protocol = PROTOCOLS[training.preset.protocol]
        for seed, state in training.states().items():
            if state == "missing":
                continue
            run = RunFolder.open(training.place(seed))
            found = from_dict(protocol.settings, run.config, where=str(run.path))
            changed = differences(training.config(seed), found)
            other = [text for name, text in changed.items() if name not in protocol.incidental]
            version = run.info.get("versions", {}).get("wheretolearn")
            if "precision" in changed and not other and version == __version__:
                if training.finished:  # measuring asks for none; that seeds have the same is seen to there
                    continue
                raise UserError(
                    f"{run.path} holds a run in {found.precision}: go on with it on a GPU, with "
                    f"`--precision {found.precision}`, or choose another folder with --runs"
                )
            if other or version != __version__:
                why = f"with other settings: {', '.join(other)}" if other else f"of version {version}"
                raise UserError(f"{run.path} holds a run {why}. Move it away, or choose another folder with --runs")


def check_data(plan: Plan) -> None:
    """Refuse to start where image sets are missing; says which, and which rows need them."""
    needed: dict[str, list[str]] = {}
    for training in plan.trainings:
        for name in dict.fromkeys(training.image_sets):
            needed.setdefault(name, []).extend([preset.name for preset in training.to_record] or [training.preset.name])
        for preset in training.to_record:
            if preset.evaluate.data is not None:
                needed.setdefault(preset.evaluate.data, []).append(preset.name)
    absent = {name: rows for name, rows in needed.items() if name != glyphs.NAME and not image_set.exists(name)}
    if not absent:
        return
    everything = {preset.name for training in plan.trainings for preset in training.to_record}
    lines = []
    for name, rows in absent.items():
        unique = sorted(set(rows))
        which = "every row" if set(unique) >= everything else some(unique, most=6)
        lines.append(f"{name} is needed for {which}: `wheretolearn data get {name}`")
    if left := sorted(everything - {row for rows in absent.values() for row in rows}):
        lines.append(f"what can be run now, with --rows: {some(left, most=6)}")
    raise DataError("image sets are missing.\n" + "\n".join(lines))


def check_records(plan: Plan, records: Sequence[ResultRecord], folder: Path) -> None:
    """Refuse a folder that cannot be written to, and to replace records that count by some with fewer seeds."""
    for protocol in dict.fromkeys(training.preset.protocol for training in plan.trainings):
        check_savable((), folder / protocol, frozenset())
    seeds = {preset.name: training.seeds for training in plan.trainings for preset in training.to_record}
    for one in look_up([own.cell for own in plan.found if own.cell.preset.name in seeds], records, plan.scale):
        name = one.cell.preset.name
        if one.record is None or one.status != "recorded" or one.record.name != record_name(name, plan.scale):
            continue
        if lost := [str(seed) for seed in one.record.seeds if seed not in seeds[name]]:
            raise UserError(
                f"{folder} holds a record of {name}, {one.cell.measure}, with seeds that would be lost: "
                f"{', '.join(lost)}. Ask for more --seeds, or choose another folder with --record"
            )


@dataclass(frozen=True)
class Estimate:
    """How long a plan may take, and what that rests on."""

    seconds: float | None  # of what is known; None: nothing is
    basis: str


def estimate(plan: Plan, records: Sequence[ResultRecord], workers: int, device: str) -> Estimate:
    """From records of the same trainings, on hardware like this where there are any, else from reference times."""
    parts = parts_per_training(plan, workers, device)
    times: list[float] = []
    bases: dict[str, None] = {}
    unknown = 0
    for name, protocol in PROTOCOLS.items():
        at_once = device != "cpu" and name != "continual"  # a batch shares the GPU from beginning to end
        for batch in batches(name, [own for own in plan.trainings if own.preset.protocol == name], device):
            own_times: list[float] = []
            for training in batch:
                left = [seed for seed, state in training.states().items() if state != "finished"]
                known = _seconds_of_a_run(training, plan.scale, records, device) if left else None
                if known is None:
                    unknown += len(left)
                    continue
                seconds, basis = known
                bases[basis] = None
                own_times += [seconds] * (min(parts, len(left)) if protocol.lanes else len(left))
            times += [max(own_times)] if own_times and at_once else own_times
    if not times:
        return Estimate(None, "nothing like it is recorded") if unknown else Estimate(0.0, "all runs are finished")
    total = max(max(times), sum(times) / (workers if device == "cpu" else 1))
    return Estimate(total, "; ".join(bases) + (f"; not counting {unknown} runs of unknown length" if unknown else ""))


def batches(protocol: str, trainings: Sequence[Training], device: str) -> list[Sequence[Training]]:
    """Trainings that go to their ends together: on a GPU, few-shot ones that can be lanes of one engine."""
    if protocol != "fewshot" or device == "cpu":
        return [trainings]
    alike: dict[str, list[list[Training]]] = {}
    for training in trainings:
        shape = json.dumps(lane_settings(training.config(training.seeds[0])), sort_keys=True)
        own = alike.setdefault(shape, [[]])
        if own[-1] and sum(len(other.seeds) for other in (*own[-1], training)) > FEWSHOT_LANES:
            own.append([])
        own[-1].append(training)
    return [batch for own in alike.values() for batch in own]


def parts_per_training(plan: Plan, workers: int, device: str) -> int:
    """Into how many programs the seeds of a training are split, where several seeds can be one program.

    It depends on all that was asked for, not on what is left of it: an interrupted run goes on to the same bits.
    """
    return 1 if device != "cpu" else -(-workers // max(1, plan.all_trainings))


def _seconds_of_a_run(
    training: Training, scale: Scale, records: Sequence[ResultRecord], device: str
) -> tuple[float, str] | None:
    names = {
        record_name(name, scale) for name, first in _training_names(scale).items() if first == training.preset.name
    }
    alike = [record for record in records if record.name in names and record.wall_seconds > 0]
    here = [record for record in alike if record.hardware == environment.hardware()]
    # What a GPU took says nothing about a CPU, where the same may take a hundred times as long.
    chosen = here or [record for record in alike if device != "cpu" or "; " not in record.hardware]
    if chosen:
        basis = "runs recorded on this hardware" if here else f"runs recorded on {chosen[0].hardware}"
        wanted = getattr(training.config(training.seeds[0]), "precision", None)
        if device != "cpu" and wanted is not None:
            same = [record for record in chosen if record.config.get("precision") == wanted]
            chosen = same or chosen
            basis += "" if same else f" in {chosen[0].config.get('precision')}"
        return statistics.median(record.wall_seconds for record in chosen), basis
    return _reference(training.preset.name) if scale == "quick" else None


def _reference(preset: str) -> tuple[float, str] | None:
    """From times.toml, which has small runs only: the longest prefix of a preset's name counts."""
    document = tomllib.loads(files(__package__).joinpath("times.toml").read_text(encoding="utf-8"))
    times: dict[str, float] = document["seconds"]
    parts = preset.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in times:
            return times[name], f"times measured on {document['hardware']}"
    return None


@cache
def _training_names(scale: Scale) -> Mapping[str, str]:
    """By preset, the first preset with the same training; tables come before figures."""
    order = list(dict.fromkeys(cell.preset.name for cell in all_cells(scale)))
    presets = {preset.name: preset for preset in list_presets(scale=scale)}
    first: dict[tuple[Any, ...], str] = {}
    return {name: first.setdefault(training_of(presets[name]), name) for name in order}
