"""Bring an image set into the cache: from its publisher (``get``) or from files at hand (``add``)."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from wheretolearn.data import glyphs, image_set
from wheretolearn.data.archives import Workspace, is_archive, is_hidden
from wheretolearn.data.download import download
from wheretolearn.data.image_set import ImageSet, Progress
from wheretolearn.data.readers import LayoutError, Reader, Splits, large_images_allowed, read_class_folders
from wheretolearn.data.sources import SOURCES, Source, find
from wheretolearn.errors import DataError
from wheretolearn.wording import as_text

EMBEDDED = glyphs.NAME  # drawn on this machine at first use
DOWNLOADS = "_downloads"  # below the cache; no set can have this name
DEFAULT_SIZE = 84


def can_get(name: str) -> bool:
    """Whether ``get`` brings a set of this name; others can only be added."""
    return name == EMBEDDED or (name in SOURCES and bool(SOURCES[name].files))


def get(
    name: str,
    *,
    root: Path | None = None,
    downloading: Progress | None = None,
    converting: Progress | None = None,
) -> ImageSet:
    """Download a known set, convert and store it; the downloaded files are removed afterwards.

    The embedded set is drawn instead. ``downloading`` counts bytes over all files, ``converting`` counts images.
    """
    root = image_set.data_root() if root is None else root
    image_set.check_target(name, root)
    if name == EMBEDDED:
        return glyphs.make(root, converting)
    source = find(name)
    if not source.files:
        raise DataError(
            f"{name} cannot be downloaded freely: {source.obtain} ({source.home}).\n"
            f"Then `wheretolearn data add {name} FOLDER`, where FOLDER holds {source.layout}."
        )
    folder = root / DOWNLOADS / name
    total = sum(file.size or 0 for file in source.files)
    done = 0
    for file in source.files:

        def tick(count: int, _: int, before: int = done) -> None:
            if downloading is not None:
                downloading(before + count, total)

        done += download(file, folder, progress=tick).stat().st_size
    stored = _convert(name, source.read, folder, _published_info(source), root, converting, source)
    shutil.rmtree(folder, ignore_errors=True)
    return stored


def add(
    name: str,
    path: Path,
    *,
    root: Path | None = None,
    size: int | None = None,
    channels: int | None = None,
    progress: Progress | None = None,
) -> ImageSet:
    """Convert and store the files in ``path``, a folder or an archive; ``progress`` counts images.

    A known name expects its publisher's layout. Any other name makes a set of the user's own from class
    folders, at ``size`` pixels square (84) with 3 ``channels`` or 1.
    """
    image_set.check_name(name)
    if name == EMBEDDED:
        raise DataError(f"{name} is the name of the embedded set; choose another")
    root = image_set.data_root() if root is None else root
    target = image_set.check_target(name, root).resolve()
    place = path.resolve()
    if place.is_relative_to(target) or target.is_relative_to(place):
        raise DataError(f"{path} cannot become image set {name!r}, which will be stored in {target}: keep them apart")
    if name not in SOURCES:
        size = DEFAULT_SIZE if size is None else size
        channels = 3 if channels is None else channels
        if size < 1 or channels not in (1, 3):
            raise DataError(f"size {size} and channels {channels}: size must be positive, channels 1 or 3")
        reader = partial(read_class_folders, image_shape=(size, size, channels))
        return _convert(name, reader, path, {"source": "folder of class folders"}, root, progress, None)
    source = SOURCES[name]
    if size is not None or channels is not None:
        raise DataError(
            f"{name} is always {' x '.join(map(str, source.image_shape))}; "
            "to choose --size and --channels, add it under a name of your own"
        )
    try:
        return _convert(name, source.read, path, _published_info(source), root, progress, source)
    except LayoutError as error:
        raise DataError(f"{error}.\n{name} expects a folder with {source.layout}.") from error


def _convert(
    name: str,
    reader: Reader,
    path: Path,
    info: Mapping[str, Any],
    root: Path,
    progress: Progress | None,
    source: Source | None,
) -> ImageSet:
    with Workspace(root) as workspace, _explained(workspace, path), large_images_allowed():
        if path.is_dir():
            folder = path
        elif not path.exists():
            raise DataError(f"{path} does not exist")
        elif is_archive(path):
            folder = workspace.unpack(path)
        else:
            raise DataError(f"{path} is neither a folder nor an archive (.zip, .tar, .tar.gz, .tgz)")
        splits = reader(folder, workspace)
        share = _ignored(folder, splits) if source is None else _coverage(source, splits)
        return image_set.write(name, splits, {**info, **share, "made_from": as_text(path.resolve())}, root, progress)


@contextmanager
def _explained(workspace: Workspace, path: Path) -> Iterator[None]:
    """Errors of a conversion as messages that name the user's files."""
    try:
        yield
    except DataError as error:
        raise type(error)(workspace.name_members(str(error))) from error
    except OSError as error:
        where = workspace.name_members(str(error.filename or path))
        raise DataError(f"cannot read {where}: {error.strerror or error}") from error


def _published_info(source: Source) -> dict[str, Any]:
    info = {
        "source": source.title,
        "home": source.home,
        "licence": source.licence,
        "convention": source.convention,
    }
    return {**info, "note": source.note} if source.note else info


def _ignored(folder: Path, splits: Splits) -> dict[str, Any]:
    """How many files of class folders are not in the set: loose or nested images, and other kinds of files."""
    names = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    files = sum(not is_hidden(name) for name in names)
    ignored = files - sum(int(stream.class_offsets[-1]) for stream in splits.values())
    return {"ignored_files": ignored} if ignored > 0 else {}


def _coverage(source: Source, splits: Splits) -> dict[str, Any]:
    """How much of the published set is here: subsets are welcome, but say so."""
    classes = {split: len(stream.classes) for split, stream in splits.items()}
    images = sum(int(stream.class_offsets[-1]) for stream in splits.values())
    shares = [f"{split} {classes.get(split, 0)} of {of}" for split, of in source.split_classes.items()]
    complete = classes == dict(source.split_classes) and images == source.images
    return {
        "complete": complete,
        "classes": "; ".join(shares),
        "images": f"{images} of {source.images}",
    }
