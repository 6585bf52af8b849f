"""Image sets: one uint8 array per split, cached on disk and memory-mapped.

A set lives in ``<root>/<name>/`` as ``meta.json`` and one ``<split>.npy`` per split. It is written to a
hidden folder beside it and renamed into place, so that a set is either there and whole, or not there.
"""

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wheretolearn.errors import DataError
from wheretolearn.storage import sync_folder
from wheretolearn.version import __version__

Images = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]

FORMAT = 1
BATCH_IMAGES = 256
HASH_BLOCK = 1 << 22
STALE_SECONDS = 24 * 3600


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """The images of one split, sorted by class."""

    name: str  # "mini-imagenet/train"
    images: Images  # [N, height, width, channels]; memory-mapped when loaded
    class_offsets: Offsets  # [classes + 1]; class c is images[class_offsets[c] : class_offsets[c + 1]]
    classes: tuple[str, ...]
    groups: tuple[str, ...]  # alphabet or script of each class, "" where there is none

    @property
    def counts(self) -> Offsets:
        """How many images each class has, [classes]."""
        return np.diff(self.class_offsets)

    @property
    def named_classes(self) -> tuple[tuple[str, str], ...]:
        """Group and name of each class: alphabets have characters of the same names."""
        return tuple(zip(self.groups, self.classes, strict=True))

    @property
    def labels(self) -> Offsets:
        """The class index of every image, [N]."""
        return np.repeat(np.arange(len(self.classes), dtype=np.int64), self.counts)


@dataclass(frozen=True, eq=False)
class SplitStream:
    """A split still to be made: its shape is known, its images come in batches, in class order."""

    image_shape: tuple[int, int, int]  # height, width, channels
    class_offsets: Offsets
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    batches: Iterable[Images]  # uint8 [n, height, width, channels] each


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Named splits of one set: by class for few-shot sets, by image for MNIST and its kind."""

    name: str
    splits: dict[str, ImageSplit]
    info: dict[str, Any]  # source, date, version of this package, colour or ink convention


def data_root() -> Path:
    """The folder that holds cached sets: ``WHERETOLEARN_DATA``, else the platform's cache folder."""
    chosen = os.environ.get("WHERETOLEARN_DATA")
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:  # ~someone, who has no home here
            raise DataError(f"WHERETOLEARN_DATA={chosen} names no folder: {error}") from error
    try:
        import platformdirs
    except ImportError:
        raise DataError(
            "no data folder: set WHERETOLEARN_DATA to a folder (or install platformdirs, which finds one)"
        ) from None
    return platformdirs.user_cache_path("wheretolearn", appauthor=False) / "data"


def check_name(name: str) -> str:
    """``name`` itself, if it can name a set or a split."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise DataError(f"{name!r} cannot name an image set: use lower-case letters, digits and hyphens")
    return name


def exists(name: str, root: Path | None = None) -> bool:
    """Whether a set of this name is cached."""
    folder = _folder(name, root)
    _restore(folder)
    return (folder / "meta.json").is_file()


def stored_names(root: Path | None = None) -> list[str]:
    """The names of all cached sets, sorted."""
    folder = data_root() if root is None else root
    return sorted(meta.parent.name for meta in folder.glob("[a-z0-9]*/meta.json"))


def check_target(name: str, root: Path | None = None) -> Path:
    """The folder of a set to be written, if replacing it would delete nothing but a set."""
    folder = _folder(name, root)
    if folder.is_dir():
        names = {entry.name for entry in folder.iterdir()}
        foreign = sorted(entry for entry in names if entry != "meta.json" and not entry.endswith(".npy"))
        if not names or ("meta.json" in names and not foreign):
            return folder
        found = f"it holds {foreign[0]}" if foreign else "it has no meta.json"
    elif folder.exists():
        found = "it is a file"
    else:
        return folder
    raise DataError(
        f"{folder} is in the way of image set {name!r} and is not one itself: {found}. It was left as it is.\n"
        "Move it, or set WHERETOLEARN_DATA to a folder elsewhere."
    )


@contextmanager
def temporary_folder(root: Path, label: str) -> Iterator[Path]:
    """A new hidden folder below ``root``, gone afterwards; what killed processes left there goes too."""
    root.mkdir(parents=True, exist_ok=True)
    for entry in root.glob(".*.tmp-*"):
        if _is_leftover(entry):
            shutil.rmtree(entry, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{label}.tmp-{os.getpid()}@{platform.node()}-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write(
    name: str,
    splits: Mapping[str, ImageSplit | SplitStream],
    info: Mapping[str, Any],
    root: Path | None = None,
    progress: Progress | None = None,
) -> ImageSet:
    """Store a set, replacing one of the same name, and load it.

    Splits are arrays in memory (``ImageSplit``) or arrive in batches (``SplitStream``). Whatever goes wrong,
    nothing half-written is left behind and an earlier copy stays as it was. A folder of that name that is
    not a set is refused. ``progress`` counts images.
    """
    root = data_root() if root is None else root
    target = check_target(name, root)
    streams = {split: _as_stream(name, split, given) for split, given in splits.items()}
    if not streams:
        raise DataError(f"{name}: a set needs at least one split")
    total = sum(_image_count(stream) for stream in streams.values())
    needed = sum(_image_count(stream) * int(np.prod(stream.image_shape)) for stream in streams.values())
    try:
        with temporary_folder(root, name) as temporary:
            if shutil.disk_usage(root).free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = 0
            described = {}
            for split, stream in streams.items():

                def tick(count: int, before: int = done) -> None:
                    if progress is not None:
                        progress(before + count, total)

                described[split] = _write_split(temporary / f"{split}.npy", f"{name}/{split}", stream, tick)
                done += _image_count(stream)
            meta = {
                "format": FORMAT,
                "name": name,
                "info": {
                    "written": datetime.now(UTC).isoformat(timespec="seconds"),
                    "written_by": f"wheretolearn {__version__}",
                    **info,
                },
                "splits": described,
            }
            _write_durably(temporary / "meta.json", [json.dumps(meta, indent=1, ensure_ascii=False).encode()])
            temporary.chmod(0o755)  # mkdtemp makes it private; a cache may be shared
            sync_folder(temporary)
            _swap_in(temporary, target)
            sync_folder(root)
    except OSError as error:
        raise storage_error(f"store {name}", root, needed, error) from error
    return load(name, root)


def load(name: str, root: Path | None = None) -> ImageSet:
    """Open a cached set at once; its images are read from disk as they are used."""
    folder = _folder(name, root)
    _restore(folder)
    meta = _read_meta(folder)
    splits = {split: _load_split(folder, split, record) for split, record in meta["splits"].items()}
    return ImageSet(name, splits, meta["info"])


def check(name: str, root: Path | None = None, progress: Progress | None = None) -> ImageSet:
    """Compare every array file of a cached set with its stored SHA-256; ``progress`` counts bytes."""
    loaded = load(name, root)
    folder = _folder(name, root)
    records = _read_meta(folder)["splits"]
    files = {split: folder / f"{split}.npy" for split in records}
    total = sum(file.stat().st_size for file in files.values())
    done = 0
    for split, file in files.items():
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(HASH_BLOCK):
                digest.update(block)
                done += len(block)
                if progress is not None:
                    progress(done, total)
        if digest.hexdigest() != records[split]["sha256"]:
            raise _damaged(file, "its SHA-256 is not the one stored when it was written")
    return loaded


def stored_bytes(name: str, root: Path | None = None) -> int:
    """Size of a cached set on disk."""
    return sum(file.stat().st_size for file in _folder(name, root).iterdir())


def human_bytes(count: float) -> str:
    """``1.3 GB``: a byte count for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"


def storage_error(action: str, folder: Path, needed: int | None, error: OSError) -> DataError:
    """The user's message for an ``OSError`` met while writing under ``folder``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        space = "more space" if needed is None else f"about {human_bytes(needed)} free"
        return DataError(
            f"cannot {action}: the disk that holds {folder} is full; it needs {space}.\n"
            "Free some space, or set WHERETOLEARN_DATA to a folder elsewhere."
        )
    reason = error.strerror or str(error)
    where = f" ({error.filename})" if error.filename else ""
    return DataError(
        f"cannot {action} in {folder}: {reason}{where}.\n"
        "Make that folder writable, or set WHERETOLEARN_DATA to another one."
    )


def _folder(name: str, root: Path | None) -> Path:
    return (data_root() if root is None else root) / check_name(name)


def _image_count(split: SplitStream) -> int:
    return int(split.class_offsets[-1])


def _as_stream(name: str, split: str, given: ImageSplit | SplitStream) -> SplitStream:
    check_name(split)
    if isinstance(given, SplitStream):
        stream = given
    else:
        images = given.images
        if images.dtype != np.uint8 or images.ndim != 4:
            raise DataError(
                f"{name}/{split}: images must be uint8 [N, height, width, channels], "
                f"not {images.dtype} {list(images.shape)}"
            )
        height, width, channels = images.shape[1:]
        batches = (images[start : start + BATCH_IMAGES] for start in range(0, len(images), BATCH_IMAGES))
        stream = SplitStream((height, width, channels), given.class_offsets, given.classes, given.groups, batches)
        if given.class_offsets[-1] != len(images):
            raise DataError(f"{name}/{split}: {len(images)} images, but offsets end at {given.class_offsets[-1]}")
    problem = _offsets_problem(stream.class_offsets, stream.classes, stream.groups)
    if problem:
        raise DataError(f"{name}/{split}: {problem}")
    return stream


def _offsets_problem(offsets: Offsets, classes: Sequence[str], groups: Sequence[str]) -> str | None:
    if len(offsets) != len(classes) + 1 or len(groups) != len(classes):
        return f"{len(classes)} classes, {len(groups)} groups and {len(offsets)} offsets do not fit together"
    if not classes:
        return "it has no class"
    if offsets[0] != 0:
        return "class offsets must start at 0"
    empty = np.flatnonzero(np.diff(offsets) <= 0)
    if len(empty):
        return f"class {classes[empty[0]]!r} has no image"
    if len(set(classes)) != len(classes):
        return "two classes have the same name"
    for name in (*classes, *groups):
        try:
            name.encode()
        except UnicodeEncodeError:
            return f"the name {name!r} is not UTF-8"
    return None


def _write_split(file: Path, name: str, stream: SplitStream, progress: Callable[[int], None]) -> dict[str, Any]:
    """Write one ``.npy`` front to back and return its record for ``meta.json``.

    Plain writes, not a memory map: on a full disk a map dies of SIGBUS where a write raises an error.
    """
    count = _image_count(stream)
    shape = (count, *stream.image_shape)
    digest = hashlib.sha256()
    done = 0

    def blocks() -> Iterable[bytes | memoryview]:
        nonlocal done
        yield _npy_header(shape)
        for batch in stream.batches:
            if batch.dtype != np.uint8 or batch.shape[1:] != stream.image_shape:
                raise DataError(f"{name}: a batch is {batch.dtype} {list(batch.shape)}, expected {stream.image_shape}")
            yield np.ascontiguousarray(batch).data.cast("B")
            done += len(batch)
            progress(done)

    _write_durably(file, blocks(), digest)
    if done != count:
        raise DataError(f"{name}: {done} images arrived, {count} were announced")
    return {
        "sha256": digest.hexdigest(),
        "shape": list(shape),
        "class_offsets": [int(offset) for offset in stream.class_offsets],
        "classes": list(stream.classes),
        "groups": list(stream.groups),
    }


def _npy_header(shape: tuple[int, ...]) -> bytes:
    fields = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}"
    prefix = 10  # magic, version, header length
    padding = -(prefix + len(fields) + 1) % 64
    text = fields + " " * padding + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin1")


def _write_durably(file: Path, blocks: Iterable[bytes | memoryview], digest: "hashlib._Hash | None" = None) -> None:
    with file.open("wb") as stream:
        for block in blocks:
            stream.write(block)
            if digest is not None:
                digest.update(block)
        stream.flush()
        os.fsync(stream.fileno())


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _swap_in(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target``; an old folder steps aside, as it cannot be renamed over."""
    aside = _aside(target)
    for tries_left in reversed(range(10)):
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        try:
            temporary.rename(target)
        except OSError:
            # A reader may have taken this for a writer that died, and brought the old one back.
            if tries_left and target.exists():
                continue
            _restore(target)
            raise
        break
    shutil.rmtree(aside, ignore_errors=True)


def _restore(target: Path) -> None:
    """Bring back a set that stepped aside for a writer that then died."""
    aside = _aside(target)
    if not target.exists() and aside.exists():
        with suppress(OSError):  # a cache that may only be read
            aside.rename(target)


def _is_leftover(folder: Path) -> bool:
    """Whether a temporary folder's process is dead; of another machine's, only its age can tell."""
    named = re.fullmatch(r"\..+\.tmp-(\d+)@(.*)-[a-z0-9_]+", folder.name)
    if named is None:
        return False
    if named[2] == platform.node() and not _is_running(int(named[1])):
        return True
    try:
        return time.time() - folder.stat().st_mtime > STALE_SECONDS
    except OSError:  # its process has just removed it
        return False


def _is_running(process: int) -> bool:
    if os.name == "nt":  # signal 0 is not a question there
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _damaged(file: Path, reason: str) -> DataError:
    name = file.parent.name
    return DataError(
        f"{file} is damaged: {reason}.\n"
        f"Make it again with `wheretolearn data get {name} --force`, or from files of your own with "
        f"`wheretolearn data add {name} PATH --force`."
    )


def _read_meta(folder: Path) -> dict[str, Any]:
    file = folder / "meta.json"
    name = folder.name
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"image set {name!r} is not in {folder.parent}.\n"
            f"Get it with `wheretolearn data get {name}`, or your own copy with `data add {name} PATH`."
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise _damaged(file, f"it is not valid JSON ({error})") from error
    if not isinstance(meta, dict) or not all(isinstance(meta.get(key), dict) for key in ("splits", "info")):
        raise _damaged(file, "it does not describe an image set")
    if meta.get("format") != FORMAT:
        raise _damaged(file, f"it has format {meta.get('format')!r}, not {FORMAT}")
    if not meta["splits"]:
        raise _damaged(file, "it lists no split")
    return meta


def _load_split(folder: Path, split: str, record: dict[str, Any]) -> ImageSplit:
    meta = folder / "meta.json"
    try:
        offsets = np.asarray(record["class_offsets"], dtype=np.int64)
        classes, groups = tuple(record["classes"]), tuple(record["groups"])
        shape = tuple(record["shape"])
        texts = (record["sha256"], *classes, *groups)
        if offsets.ndim != 1 or len(shape) != 4 or not all(isinstance(text, str) for text in texts):
            raise ValueError("a value has the wrong type")
        problem = _offsets_problem(offsets, classes, groups)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(meta, f"the record of split {split!r} is incomplete ({error})") from error
    if problem:
        raise _damaged(meta, f"split {split!r}: {problem}")
    file = folder / f"{split}.npy"
    try:
        images = np.load(file, mmap_mode="r")
    except PermissionError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(file, str(error).splitlines()[0]) from error
    if images.dtype != np.uint8 or images.shape != shape or offsets[-1] != len(images):
        raise _damaged(file, f"it holds {images.dtype} {list(images.shape)}, expected uint8 {list(shape)}")
    return ImageSplit(f"{folder.name}/{split}", images, offsets, classes, groups)
