"""TensorBoard event files of a run, made from its metrics alone: what is in one is in the other, step for step."""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from wheretolearn.errors import UserError

FOLDER = "tensorboard"


def check_installed(otherwise: str = "leave out --tensorboard") -> None:
    """TensorBoard is an extra: say how to get it, or what to do ``otherwise``, before anything depends on it."""
    try:
        importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise UserError(
            f"TensorBoard cannot be used ({error}): install it with `pip install 'wheretolearn[tensorboard]'`, "
            f"or {otherwise}"
        ) from error


class EventFiles:
    """The event files of one run, in RUN/tensorboard. They are begun anew from the metrics whenever a run goes on."""

    def __init__(self, run: Path, started: str, records: Iterable[Mapping[str, Any]]):
        check_installed(f'set "tensorboard" to false in {run / "run.json"} to go on without')
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._started = run / FOLDER, datetime.fromisoformat(started).timestamp()
        try:
            for old in self._folder.glob("events.out.tfevents.*"):
                old.unlink()
            # purge_step: a TensorBoard that is looking on forgets what it has read from the files just deleted.
            self._writer = SummaryWriter(self._folder, purge_step=0)
        except OSError as error:
            raise self._failure(error) from error
        self._add(records)

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one record of the metrics."""
        self._add([record])

    def close(self) -> None:
        try:
            self._writer.close()
        except OSError as error:
            raise self._failure(error) from error

    def _add(self, records: Iterable[Mapping[str, Any]]) -> None:
        try:
            for record in records:
                # Training time instead of the time of writing: the same for a run that was never interrupted.
                at = self._started + record.get("elapsed_seconds", 0.0)
                for tag, value in scalars(record):
                    self._writer.add_scalar(tag, value, record["step"], walltime=at)
            self._writer.flush()
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self._folder}: {error.strerror or error}")


def scalars(record: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record and of the tables in it, by tag (`sparsity_by_layer/head`); lists are left out."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{before}{name}/")
        elif isinstance(value, int | float) and (before or name != "step"):
            yield before + name, value
