"""Writing files so that a crash or a full disk never leaves half a file, and reading them with checks."""

import errno
import hashlib
import json
import math
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from os import PathLike
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize_tensors
from torch import Tensor

from wheretolearn.errors import MismatchError, UserError

if sys.platform != "win32":
    import fcntl

_DIGEST_KEY = "sha256"
_FLOAT_KEY = "$float"  # marks a number that JSON cannot write


@contextmanager
def atomic_write(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under `path` complete, or not at all.

    The bytes go to a hidden neighbour, are forced to disk, and are renamed into place when the block ends. Neighbours
    that killed writers of this file left are removed, not those that others on this machine are writing.
    """
    path = Path(path)
    try:
        _remove_abandoned(path)
        file = _open_neighbour(path)
        temporary = Path(file.name)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if sys.platform != "win32":  # before the lock goes: then others might remove it
                    temporary.replace(path)
            if sys.platform == "win32":  # where nothing is locked or removed, and only closed files can be renamed
                temporary.replace(path)
            sync_folder(path.parent)
        finally:
            with suppress(OSError):  # usually gone by now
                temporary.unlink()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def cannot_write(folder: Path) -> str | None:
    """Why no file can be written to a folder, which may be still to be made; None where one can."""
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        TemporaryFile(dir=place).close()  # its mode alone does not tell: nobody can write to /proc
    except OSError:
        return f"{place} cannot be written to"
    return None


def _open_neighbour(path: Path) -> BinaryIO:
    """A new hidden file beside a path, under a lock that ends with this process: so others can tell if it is left."""
    while True:
        neighbour = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        file = neighbour.open("xb")
        if sys.platform == "win32":
            return file
        with suppress(OSError):  # a file system without locks, where nothing is removed either
            fcntl.flock(file, fcntl.LOCK_EX)
        if neighbour.exists():
            return file
        file.close()  # taken for one that was left, and removed, before it was locked


def _remove_abandoned(path: Path) -> None:
    """Delete what writers of a file left behind when they were killed."""
    if sys.platform == "win32":
        return
    for other in path.parent.glob(f".{escape(path.name)}.*.tmp"):
        if re.fullmatch(r"[0-9a-f]{16}", other.name.removeprefix(f".{path.name}.").removesuffix(".tmp")):
            with suppress(OSError), other.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                other.unlink()


def remove_leftovers(folder: Path) -> None:
    """Delete what `atomic_write` left behind when its process was killed; only a sole writer may do so."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every parser accepts: NaN and infinities become objects such as {"$float": "nan"}.

    NumPy scalars and one-element tensors are written as the number they hold.
    """
    return json.dumps(_encode(value), indent=indent, ensure_ascii=False, allow_nan=False)


def from_json(text: str | bytes) -> Any:
    """The inverse of `to_json`; raises ValueError for what is not JSON."""
    return json.loads(text, object_hook=_decode)


def write_json(path: str | PathLike[str], value: Any) -> None:
    """Write indented JSON atomically."""
    text = to_json(value, indent=2)
    with atomic_write(path) as file:
        file.write(text.encode() + b"\n")


def read_json(path: str | PathLike[str]) -> Any:
    """Read what `write_json` wrote; a file that is missing or not JSON is a UserError that names it."""
    try:
        return from_json(Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged or not JSON: {error}") from error


def save_weights(
    path: str | PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors and string metadata as safetensors, atomically and with a checksum."""
    metadata = dict(metadata or {})
    if _DIGEST_KEY in metadata:
        raise ValueError(f'the metadata key "{_DIGEST_KEY}" is taken by the checksum')
    # Copies, because safetensors refuses views and tensors that share memory.
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    content = serialize_tensors(copies, {**metadata, _DIGEST_KEY: _digest(copies, metadata)})
    with atomic_write(path) as file:
        file.write(content)


def load_weights(path: str | PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors (on the CPU) and metadata of a safetensors file; damage is a UserError that names the file.

    The checksum is checked where there is one; files from other programs have none.
    """
    with _opened(path) as file:
        metadata = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    digest = metadata.pop(_DIGEST_KEY, None)
    if digest is not None and digest != _digest(tensors, metadata):
        raise UserError(f"{path} is damaged: its content does not match its checksum")
    return tensors, metadata


def read_metadata(path: str | PathLike[str]) -> dict[str, str]:
    """Metadata of a safetensors file without its tensors, and so without the check of what they hold."""
    with _opened(path) as file:
        metadata = dict(file.metadata() or {})
    metadata.pop(_DIGEST_KEY, None)
    return metadata


@contextmanager
def _opened(path: str | PathLike[str]) -> Iterator[Any]:
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or not a safetensors file: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def check_shapes(
    stored: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]], what: str | PathLike[str]
) -> None:
    """Raise a MismatchError that names the first tensor in which `what` (a file) and the model differ."""
    for name, shape in expected.items():
        if name not in stored:
            problem = f"{name} {list(shape)} of the model is missing in it"
        elif list(stored[name]) != list(shape):
            problem = f"{name} is {list(stored[name])} in it but {list(shape)} in the model"
        else:
            continue
        break
    else:
        unexpected = next((name for name in stored if name not in expected), None)
        if unexpected is None:
            return
        problem = f"its {unexpected} {list(stored[unexpected])} is not in the model"
    raise MismatchError(f"{what} belongs to another model: {problem}. Use the model it was saved with.")


def sync_folder(folder: Path) -> None:
    """Make a rename durable; some systems cannot sync a folder, and then there is nothing to do."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _encode(value: Any) -> Any:
    if isinstance(value, (np.generic, Tensor)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT_KEY: str(value)}
    if isinstance(value, Mapping):
        if _FLOAT_KEY in value:
            raise ValueError(f'the key "{_FLOAT_KEY}" is taken by numbers that are not finite')
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return os.fspath(value) if isinstance(value, PathLike) else value


def _decode(table: dict[str, Any]) -> Any:
    return float(str(table[_FLOAT_KEY])) if _FLOAT_KEY in table else table


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
