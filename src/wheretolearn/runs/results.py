"""Result records: a measured number, all that is needed to judge and repeat it, and the paper's beside it."""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from wheretolearn.config import differences, from_dict, to_dict, toml_text
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.runs import environment
from wheretolearn.runs.folder import RunFolder
from wheretolearn.storage import cannot_write, read_json, write_json

_COMPUTED = ("mean", "std", "interval", "difference", "within_stds")


@dataclass(frozen=True)
class ResultRecord:
    """One metric of one preset over seeds. A record without values is a cell that was not run."""

    name: str
    metric: str
    unit: str = "%"
    values: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    paper_value: float | None = None
    paper_std: float | None = None
    hardware: str = ""
    wall_seconds: float = 0.0
    commit: str | None = None
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)
    notes: str = ""
    sparsity: float | None = None  # of the runs, in percent, mean over seeds; None where no mask is learned
    task_intervals: tuple[float, ...] = ()  # by seed: half the 95 % interval over the tasks that it was tested on

    def __post_init__(self) -> None:
        if len(self.values) != len(self.seeds):
            raise ConfigError(f"{self.name}: {len(self.values)} values for {len(self.seeds)} seeds")
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"{self.name}: a seed counts once, got {self.seeds}")
        if self.wall_seconds < 0 or (self.paper_std or 0) < 0:
            raise ConfigError(f"{self.name}: wall_seconds and paper_std cannot be negative")
        if not all(map(math.isfinite, self.values)):
            raise ConfigError(f"{self.name}: the values of {self.metric} must be finite, got {self.values}")
        if self.task_intervals and len(self.task_intervals) != len(self.seeds):
            raise ConfigError(f"{self.name}: {len(self.task_intervals)} intervals for {len(self.seeds)} seeds")

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds (n - 1); None below two seeds."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def interval(self) -> float | None:
        """Half the 95 % interval of the mean over seeds, by Student's t; None below two seeds."""
        if self.std is None:
            return None
        count = len(self.values)
        return float(stdtrit(count - 1, 0.975)) * self.std / math.sqrt(count)

    @property
    def difference(self) -> float | None:
        """Our mean minus the paper's."""
        if self.mean is None or self.paper_value is None:
            return None
        return self.mean - self.paper_value

    @property
    def within_stds(self) -> int | None:
        """The smallest whole number of the paper's standard deviations that covers the difference."""
        if self.difference is None or not self.paper_std:
            return None
        # Rounding first keeps an exact boundary on its own side: 67.01 - 67.00 is one std of 0.01.
        return max(1, math.ceil(round(abs(self.difference) / self.paper_std, 9)))


def measured(
    name: str,
    metric: str,
    values: Mapping[int, float],
    *,
    unit: str = "%",
    wall_seconds: float,
    config: Mapping[str, object],
    paper_value: float | None = None,
    paper_std: float | None = None,
    notes: str = "",
    sparsity: float | None = None,
    task_intervals: Sequence[float] = (),
) -> ResultRecord:
    """A record of values by seed, measured now by this code on this machine."""
    return ResultRecord(
        name=name,
        metric=metric,
        unit=unit,
        values=tuple(values.values()),
        seeds=tuple(values),
        paper_value=paper_value,
        paper_std=paper_std,
        hardware=environment.hardware(),
        wall_seconds=wall_seconds,
        commit=environment.git_commit(),
        date=datetime.now(UTC).date().isoformat(),
        versions=environment.versions(),
        config=dict(config),
        notes=notes,
        sparsity=sparsity,
        task_intervals=tuple(task_intervals),
    )


def of_runs(record: ResultRecord, runs: Sequence[RunFolder]) -> ResultRecord:
    """The record with hardware, commit and versions of its runs, instead of those of now."""
    return replace(
        record,
        hardware=" / ".join(dict.fromkeys(str(run.info.get("hardware", "unknown")) for run in runs)),
        commit=runs[0].info.get("commit"),
        versions=dict(runs[0].info.get("versions", {})),
    )


def save(record: ResultRecord, folder: str | PathLike[str]) -> Path:
    """Write a record as JSON named after its preset and metric; an older one of that name is replaced."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {folder}: {error.strerror}") from error
    path = folder / f"{_slug(record.name)}.{_slug(record.metric)}.json"
    write_json(path, to_dict(record) | _computed(record))
    return path


def check_savable(
    records: Sequence[ResultRecord], folder: Path, incidental: Set[str], settings: type[Any] | None = None
) -> None:
    """Refuse a folder that cannot be written to, or whose records hold seeds or other settings that would be lost.

    Settings that are ``incidental`` may differ, and so may those that the config, of the type ``settings``, calls
    unused. One that a record lacks, as it came with a later version, counts as its default.
    """
    if reason := cannot_write(folder):
        raise UserError(f"cannot write records to {folder}: {reason}; choose another folder")
    present = {(record.name, record.metric): record for record in load_all(folder)}
    for record in records:
        older = present.get((record.name, record.metric))
        if older is None:
            continue
        (there, unused_there), (here, unused_here) = (_complete(own.config, settings) for own in (older, record))
        unused = unused_there & unused_here
        changed = [
            f"{name}={toml_text(there[name])} there, {toml_text(here[name])} here"
            for name in here
            if name in there and name not in incidental | unused and there[name] != here[name]
        ]
        if changed:
            raise UserError(
                f"{folder} holds a record of {record.name}, {record.metric}, with other settings: "
                f"{'; '.join(changed)}. Choose another folder, or delete that record"
            )
        lost = [str(seed) for seed in older.seeds if seed not in record.seeds]
        if lost:
            raise UserError(
                f"{folder} holds a record of {record.name}, {record.metric}, with seeds that these runs lack: "
                f"{', '.join(lost)}; evaluate all seeds together, delete that record, or choose another folder"
            )


def save_records(
    records: Sequence[ResultRecord], folder: Path, incidental: Set[str], settings: type[Any] | None = None
) -> list[Path]:
    """Write records, all of them or none where one must not be written."""
    check_savable(records, folder, incidental, settings)
    return [save(record, folder) for record in records]


def _complete(config: Mapping[str, Any], settings: type[Any] | None) -> tuple[Mapping[str, Any], frozenset[str]]:
    """All settings, and which have no effect; where a config is of another version, and so cannot tell, what it has."""
    if settings is None:
        return config, frozenset()
    try:
        own = from_dict(settings, config, where="a record")
    except ConfigError:
        return config, frozenset()
    return to_dict(own), getattr(own, "unused", frozenset())


def check_seeds(runs: Sequence[RunFolder]) -> None:
    """Runs of the same settings are a sample only if their seeds differ."""
    seeds: dict[int, Path] = {}
    for run in runs:
        if run.seed in seeds:
            raise ConfigError(f"{seeds[run.seed]} and {run.path} have the same seed {run.seed}: one is enough")
        seeds[run.seed] = run.path


def check_alike(runs: Sequence[RunFolder], settings_of: Callable[[RunFolder], object]) -> None:
    """Runs make one record only if they differ in nothing but their seeds."""
    first = runs[0]
    for run in runs:
        if changed := differences(settings_of(first), settings_of(run)).values():
            raise ConfigError(f"{first.path} and {run.path} differ in {', '.join(changed)}: record them apart")
    check_seeds(runs)


def load_all(folder: str | PathLike[str]) -> list[ResultRecord]:
    """Every record in a folder, by file name; none where the folder does not exist yet."""
    return [_load(path) for path in sorted(Path(folder).glob("*.json"))]


def load_among_others(folder: str | PathLike[str]) -> list[ResultRecord]:
    """The same of a folder that may hold other files of JSON."""
    found = [(path, read_json(path)) for path in sorted(Path(folder).glob("*.json"))]
    parts = {"name", "metric", "config"}
    return [_load(path) for path, values in found if isinstance(values, dict) and parts <= values.keys()]


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % interval, normal approximation; infinite for a single value."""
    if len(values) == 0:
        raise ConfigError("a confidence interval needs at least one value")
    if len(values) == 1:
        return float(values[0]), math.inf
    z = statistics.NormalDist().inv_cdf(0.975)
    return statistics.fmean(values), z * statistics.stdev(values) / math.sqrt(len(values))


def _same(computed: float | None, stored: Any) -> bool:
    """Another machine may round the last digit otherwise."""
    if computed is None or not isinstance(stored, (int, float)):
        return computed is stored
    return math.isclose(computed, stored, rel_tol=1e-9, abs_tol=1e-9)


def _computed(record: ResultRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _COMPUTED}


def _load(path: Path) -> ResultRecord:
    values = read_json(path)
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a result record")
    stored = {name: values.pop(name) for name in _COMPUTED if name in values}  # early versions had no interval
    record = from_dict(ResultRecord, values, where=str(path))
    for name, value in _computed(record).items():
        if name in stored and not _same(value, stored[name]):
            raise UserError(f"{path}: {name} is {stored[name]}, but its values give {value}; do not edit records")
    return record


def duration(seconds: float) -> str:
    """`3 min`, for people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def short_commit(commit: str | None) -> str:
    if commit is None:
        return ""
    name, plus, changes = commit.partition("+")
    return name[:10] + plus + changes


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", text).strip("-.")
