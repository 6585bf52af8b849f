"""A run's folder: what was run (run.json), what was measured (metrics.jsonl), and who may write to it."""

import errno
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from wheretolearn.errors import ConfigError, UserError
from wheretolearn.runs import environment
from wheretolearn.runs.tensorboard import EventFiles
from wheretolearn.storage import atomic_write, from_json, read_json, remove_leftovers, to_json, write_json

if sys.platform != "win32":
    import fcntl

MAX_SEED = 2**31 - 1

_INFO, _METRICS, _LOCK = "run.json", "metrics.jsonl", "run.lock"


class RunFolder:
    """One run on disk. Make it with `create` or `open`; as a context manager it closes itself.

    Reading needs no lock. The first write takes it and keeps it until `close` or the end of the process, so
    two processes cannot write to one run; a process that was killed blocks nobody. (Windows: no lock.)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.info: dict[str, Any] = {}
        # On a CPU a run ends the same only with as many threads; None where it does not matter, or is not known.
        self.threads: int | None = None
        self._lock_file: BinaryIO | None = None
        self._metrics_file: FileIO | None = None
        self._events: EventFiles | None = None

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        config: Mapping[str, object],
        seed: int,
        protocol: str,
        preset: str | None = None,
        scale: str | None = None,
        tensorboard: bool = False,
        threads: int | None = None,
    ) -> "RunFolder":
        """Start a run in a new or empty folder and write run.json before anything else.

        ``preset`` names the preset that the config came from, and ``scale`` the one it was taken at.
        With ``tensorboard`` the run writes event files too, now and whenever it is resumed. ``threads`` is how many
        it has on a CPU, now and when it is resumed.
        """
        if not 0 <= seed <= MAX_SEED:
            raise ConfigError(f"a seed lies between 0 and {MAX_SEED}, not {seed}")
        run = cls(path)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot create the folder {run.path}: {error.strerror}") from error
        try:
            if not (run.path / _INFO).exists():
                check_free(run.path)
            run.lock()
            check_free(run.path)
            run.info = {
                "protocol": protocol,
                "seed": seed,
                "preset": preset,
                "scale": scale,
                "config": dict(config),
                "versions": environment.versions(),
                "commit": environment.git_commit(),
                "hardware": environment.hardware(),
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "argv": list(sys.argv),
                "tensorboard": tensorboard,
                "threads": threads,
            }
            run.threads = threads
            write_json(run.path / _INFO, run.info)
        except OSError as error:
            run.close()
            raise UserError(f"cannot begin a run in {run.path}: {error.strerror or error}") from error
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "RunFolder":
        """An existing run, to read or to resume."""
        run = cls(path)
        file = run.path / _INFO
        if not file.is_file():
            raise UserError(f"{run.path} is not a run folder: it has no {_INFO}")
        run.info = read_json(file)
        if not isinstance(run.info, dict) or not {"protocol", "seed", "config"} <= run.info.keys():
            raise UserError(f"{file} is damaged: it lacks the run's protocol, seed or config")
        for name, kind in {"protocol": str, "seed": int, "config": dict}.items():
            if type(run.info[name]) is not kind:
                raise UserError(f"{file} is damaged: its {name} cannot be {run.info[name]!r}")
        if not 0 <= run.seed <= MAX_SEED:
            raise UserError(f"{file} is damaged: its seed {run.seed} is not between 0 and {MAX_SEED}")
        for name in ("preset", "scale"):
            if not isinstance(run.info.get(name), str | None):
                raise UserError(f"{file} is damaged: its {name} cannot be {run.info[name]!r}")
        if type(run.info.get("tensorboard", False)) is not bool:
            raise UserError(f"{file} is damaged: its tensorboard cannot be {run.info['tensorboard']!r}")
        run.threads = run.info.get("threads")
        if run.threads is not None and (type(run.threads) is not int or run.threads < 1):
            raise UserError(f"{file} is damaged: its threads cannot be {run.threads!r}")
        return run

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.info["config"])

    @property
    def seed(self) -> int:
        return int(self.info["seed"])

    @property
    def protocol(self) -> str:
        return str(self.info["protocol"])

    @property
    def preset(self) -> str | None:
        """The preset that the config came from; None for other runs and those of early versions."""
        return self.info.get("preset")

    @property
    def scale(self) -> str | None:
        return self.info.get("scale")

    @property
    def tensorboard(self) -> bool:
        """Whether the run writes event files for TensorBoard."""
        return bool(self.info.get("tensorboard"))

    def lock(self) -> None:
        """Become the run's only writer, or fail at once; does nothing when this object already is."""
        if self._lock_file is not None:
            return
        path = self.path / _LOCK
        try:
            file = path.open("a+b")
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from error
        if sys.platform != "win32":
            # The kernel drops this lock with its process, so a killed run leaves nothing to clean up.
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                owner = file.read().decode(errors="replace").strip() or "unknown"
                file.close()
                raise UserError(
                    f"{self.path} is in use: process {owner} is writing to it; wait for it, or stop it first"
                ) from None
        try:
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
            file.flush()
            remove_leftovers(self.path)
        except OSError as error:
            with suppress(OSError):  # closing would try again to write
                file.close()
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from error
        self._lock_file = file

    def log(self, step: int, **values: object) -> None:
        """Append one record to the metrics; numbers, strings, and lists or dicts of them."""
        line = to_json({"step": step, **values}).encode() + b"\n"
        if self.tensorboard and self._events is None:
            self._begin_events()
        try:
            if self._metrics().write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._close_metrics()  # opening it again cuts off what was half written
            raise UserError(f"cannot write {self.path / _METRICS}: {error.strerror}") from error
        if self._events is not None:
            self._events.add(from_json(line))

    def metrics(self) -> list[dict[str, Any]]:
        """All records so far, oldest first; a last line that a crash cut short is left out."""
        return [self._parse(number, line) for number, line in enumerate(self._lines(), start=1)]

    def rewind(self, step: int) -> None:
        """Drop the records after `step`, so that a run resumed there logs each step once."""
        self.lock()
        self._close_metrics()
        kept = [line for n, line in enumerate(self._lines(), start=1) if self._parse(n, line)["step"] <= step]
        with atomic_write(self.path / _METRICS) as file:
            file.writelines(kept)
        if self.tensorboard:
            self._begin_events()

    def close(self) -> None:
        """Let go of the files and the lock."""
        self._close_metrics()
        try:
            self._close_events()
        finally:
            if self._lock_file is not None:
                self._lock_file.close()
                self._lock_file = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def _metrics(self) -> FileIO:
        if self._metrics_file is None:
            self.lock()
            path = self.path / _METRICS
            whole = sum(map(len, self._lines()))
            self._metrics_file = path.open("ab", buffering=0)  # every record reaches the file at once
            self._metrics_file.truncate(whole)  # a torn last line would swallow the next record
        return self._metrics_file

    def _close_metrics(self) -> None:
        if self._metrics_file is not None:
            self._metrics_file.close()
            self._metrics_file = None

    def _begin_events(self) -> None:
        """Event files anew, with all records so far: whatever a kill left in them is gone."""
        self.lock()
        self._close_events()
        self._events = EventFiles(self.path, self.info["started"], self.metrics())

    def _close_events(self) -> None:
        if self._events is not None:
            closing, self._events = self._events, None
            closing.close()

    def _lines(self) -> list[bytes]:
        """The complete lines: one without its newline was torn by a crash."""
        path = self.path / _METRICS
        if not path.exists():
            return []
        return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = from_json(line)
            if isinstance(record["step"], int):
                return dict(record)
        except (ValueError, TypeError, KeyError):
            pass
        raise UserError(f"{self.path / _METRICS}, line {number}: damaged; delete that line to go on")


def check_free(path: Path) -> None:
    """Refuse a folder that a new run would have to share."""
    if (path / _INFO).exists():
        raise UserError(f"{path} already holds a run: resume it, or choose another folder")
    if path.is_dir() and any(not _is_remnant(item) for item in path.iterdir()):
        raise UserError(f"{path} is not empty and not a run: choose another folder")


def _is_remnant(item: Path) -> bool:
    """What a run that died before writing run.json leaves behind."""
    return item.name == _LOCK or (item.name.startswith(".") and item.name.endswith(".tmp"))
