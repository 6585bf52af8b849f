"""Checkpoints that survive crashes: atomic, checksummed, the last two kept.

A checkpoint is one file, `checkpoints/step-STEP.CHECKSUM.pt`. Its name carries the checksum of its content:
there is no second file that could disagree, and `torch.load(path, weights_only=True)` reads it as it stands.
"""

import hashlib
import io
import pickle
import random
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from wheretolearn.config import differences, from_dict
from wheretolearn.errors import MismatchError, UserError
from wheretolearn.runs.folder import RunFolder
from wheretolearn.storage import atomic_write, remove_leftovers

_KEPT = 2
_NAME = re.compile(r"step-(\d+)\.([0-9a-f]{16})\.pt")
_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint; `notes` names newer ones that were damaged and passed over."""

    step: int
    state: dict[str, Any]
    notes: tuple[str, ...] = ()


class _Stored(NamedTuple):
    step: int
    modified: int
    path: Path
    checksum: str


def save(run: RunFolder | str | PathLike[str], state: Mapping[str, Any], step: int) -> Path:
    """Write `state` as the checkpoint of `step`, then delete all but it and the one before.

    `state` holds tensors, plain numbers, strings and None in dicts, lists and tuples, and nothing else.
    Until the new file is complete on disk the older ones stay untouched.
    """
    if isinstance(run, RunFolder):
        run.lock()
    _check_plain(state, "state")
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    content = buffer.getbuffer()
    folder = _folder(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {folder}: {error.strerror}") from error
    remove_leftovers(folder)
    path = folder / f"step-{step:09d}.{_checksum(content)}.pt"
    with atomic_write(path) as file:
        file.write(content)
    # What is later than this step belongs to a past that was damaged and trained again.
    others = [stored for stored in _stored(folder) if stored.path != path]
    earlier = [stored for stored in others if stored.step < step]
    for stored in others:
        if stored not in earlier[: _KEPT - 1]:
            stored.path.unlink(missing_ok=True)
    return path


def load_latest(run: RunFolder | str | PathLike[str], at_most: int | None = None) -> Checkpoint | None:
    """The newest checkpoint that is whole, with its tensors on the CPU; None where none was saved.

    ``at_most`` passes over those of later steps.

    Where there are checkpoints but all are damaged, this is a UserError that names them.
    """
    notes: list[str] = []
    for stored in _stored(_folder(run)):
        if at_most is not None and stored.step > at_most:
            continue
        try:
            content = stored.path.read_bytes()
            if _checksum(content) != stored.checksum:
                raise ValueError("its content does not match its checksum")
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
            notes.append(f"the checkpoint {stored.path} is damaged ({error})")
            continue
        return Checkpoint(stored.step, state, tuple(f"{note}; using step {stored.step}" for note in notes))
    if notes:
        left = "is left: start again in a new folder" if at_most is None else f"is of step {at_most} or before"
        raise UserError("; ".join(notes) + f". No other {left}.")
    return None


def identity(run: RunFolder) -> dict[str, Any]:
    """What a checkpoint stores of the run that it is of, for ``check_identity``."""
    return {"seed": run.seed, "settings": run.config}


def check_identity(
    run: RunFolder, state: Mapping[str, Any], settings: type[Any], incidental: Set[str], what: str = "checkpoint"
) -> None:
    """Refuse a checkpoint, or whatever else, that was saved with another seed or settings than run.json has now.

    Settings that are ``incidental`` may differ, and so may those without effect. Early versions kept neither.
    """
    if "settings" not in state:
        return
    now = from_dict(settings, run.config, where=str(run.path))
    before = from_dict(settings, state["settings"], where=f"the {what} of {run.path}")
    found = [text for name, text in differences(now, before).items() if name not in incidental]
    if state["seed"] != run.seed:
        found.insert(0, f"seed={state['seed']}")
    if found:
        raise mismatch(run, found, what)


def mismatch(run: RunFolder, saved_with: Sequence[str] = (), what: str = "checkpoint") -> MismatchError:
    """For a checkpoint of another run; ``saved_with`` names what differs, as NAME=VALUE."""
    told = f" (it was saved with {', '.join(saved_with)})" if saved_with else ""
    return MismatchError(
        f"{run.path}: its {what} belongs to other settings than run.json has{told}; "
        "put run.json back as it was, or start anew in another folder"
    )


def model_signature(model: nn.Module) -> dict[str, list[int]]:
    """Names and shapes of a model's parameters, to store in a checkpoint beside its weights."""
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def random_state() -> dict[str, Any]:
    """The state of every global random generator (Python, NumPy, PyTorch), as a checkpoint can hold it."""
    # A process that has not touched CUDA has no generator state, and asking would claim the device.
    cuda_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": {
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda_used else [],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state` returned; generators of devices this machine lacks are passed over."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    stored = state["numpy"]
    keys = stored["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, stored["position"], stored["has_gauss"], stored["gauss"]))
    torch.set_rng_state(state["torch"])
    for device, generator_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator_state, device)


def _folder(run: RunFolder | str | PathLike[str]) -> Path:
    return Path(run) / "checkpoints"


def _stored(folder: Path) -> list[_Stored]:
    """The checkpoints in a folder, newest first."""
    if not folder.is_dir():
        return []
    found = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    stored = [_Stored(int(name[1]), path.stat().st_mtime_ns, path, name[2]) for name, path in found if name]
    return sorted(stored, reverse=True)


def _checksum(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _check_plain(value: Any, where: str) -> None:
    """Fail at saving, not at loading, for what `weights_only` would refuse; NumPy scalars are such a case."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _check_plain(key, f"a key of {where}")
            _check_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple, torch.Size):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif not isinstance(value, Tensor) and type(value) not in _PLAIN:
        raise TypeError(f"{where} is a {type(value).__name__}; a checkpoint holds only tensors and plain types")
