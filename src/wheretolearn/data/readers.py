"""Publishers' layouts, read into streams of uint8 images.

Every reader takes the folder that holds a publisher's files and a ``Workspace`` and returns the splits it
found. Nothing is decoded until the streams are consumed.
"""

import csv
import gzip
import io
import math
import os
import pickle
import struct
import unicodedata
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from wheretolearn.data.archives import Workspace, damage_reported, is_hidden
from wheretolearn.data.image_set import BATCH_IMAGES, Images, SplitStream
from wheretolearn.errors import DataError
from wheretolearn.wording import as_text

Splits = dict[str, SplitStream]
Reader = Callable[[Path, Workspace], Splits]

ONLY_SPLIT = "all"  # what a set without split folders has
SPLIT_FOLDERS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
}
CIFAR10_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
DECODE_CHUNK = 64
READ_BLOCK = 1 << 20
# What makes an image of an image set. Pillow also lays claim to suffixes that lie beside images as something else:
# icons of folders, working copies, tracks of a satellite receiver (.ico, .psd, .fit).
IMAGE_FORMATS = {"AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PCX", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP"}
# What Pillow reads only with the help of other programs (weather data, HDF5, Windows' drawings, Ghostscript's pages),
# and films.
NO_IMAGES = {"BUFR", "EPS", "FLI", "GRIB", "HDF5", "MPEG", "WMF"}


class LayoutError(DataError):
    """A folder does not hold what a reader looks for."""


@dataclass(frozen=True)
class Picture:
    """An image file, wherever it lies: what an error calls it, and how to get its bytes."""

    name: str
    read: Callable[[], bytes]


def file_picture(file: Path) -> Picture:
    """A picture that is a file of its own."""
    return Picture(str(file), file.read_bytes)


def decode(picture: Picture, height: int, width: int, channels: int) -> Images:
    """One picture as uint8 [height, width, channels], squashed to size with antialiasing."""
    with _opened(picture) as image:
        # JPEG can be decoded at a fraction of its size: most of the time for photographs.
        image.draft("RGB" if channels == 3 else "L", (2 * width, 2 * height))
        ImageOps.exif_transpose(image, in_place=True)
        converted = to_mode(image, "RGB" if channels == 3 else "L")
        if converted.size != (width, height):
            converted = converted.resize((width, height), Image.Resampling.BICUBIC)
        return np.asarray(converted, dtype=np.uint8).reshape(height, width, channels)


def decode_ink(picture: Picture, size: int) -> Images:
    """A dark drawing on white paper as ink 255 on 0, [size, size, 1], by area averaging."""
    with _opened(picture) as image:
        return _area_average(255.0 - np.asarray(to_mode(image, "L"), dtype=np.float32), size)


def decode_drawing(picture: Picture, size: int) -> Images:
    """A drawing on any ground, dark on paper or light on black, as ink 255 on 0, [size, size, 1].

    The ground is what most of the border shows; it becomes 0, and grey paper does so as well as white.
    """
    with _opened(picture) as image:
        ImageOps.exif_transpose(image, in_place=True)
        grey = np.asarray(to_mode(image, "L"), dtype=np.float32)
        ground = np.median(np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]]))
        away = ground - grey if ground > 127 else grey - ground
        ink = np.clip(away * (255 / max(ground, 255 - ground)), 0, 255)
        return _area_average(ink, size)


def _area_average(ink: npt.NDArray[np.float32], size: int) -> Images:
    height, width = ink.shape
    small = area_weights(height, size) @ ink @ area_weights(width, size).T
    return np.rint(small).astype(np.uint8)[:, :, None]


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """Any Pillow image as 8-bit ``RGB`` or ``L``: 16 bits scaled, transparency laid on white."""
    if image.mode.startswith(("I", "F")):
        values = np.asarray(image, dtype=np.float64)
        if not np.isfinite(values).all():
            raise ValueError("some of its pixels are not finite numbers")
        highest = values.max(initial=0.0)
        if image.mode == "F":
            scale = 255.0 if highest <= 1 else 1.0
        else:
            scale = 255 / 65535 if image.mode != "I" or highest > 255 else 1.0
        image = Image.fromarray(np.clip(np.rint(values * scale), 0, 255).astype(np.uint8))
    if image.mode == "LAB":  # which Pillow converts to nothing but RGB
        image = image.convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image if image.mode == mode else image.convert(mode)


@cache
def area_weights(old: int, new: int) -> npt.NDArray[np.float32]:
    """The matrix [new, old] that averages a line of pixels over equal stretches, fractions included."""
    edges = np.arange(new + 1) * (old / new)
    pixels = np.arange(old)
    ends = np.minimum(edges[1:, None], pixels + 1)
    starts = np.maximum(edges[:-1, None], pixels)
    covered: npt.NDArray[np.float64] = np.clip(ends - starts, 0, None)
    return (covered * (new / old)).astype(np.float32)


def stream_pictures(
    classes: Mapping[str, Sequence[Picture]],
    image_shape: tuple[int, int, int],
    decode_one: Callable[[Picture], Images] | None = None,
    groups: Sequence[str] | None = None,
) -> SplitStream:
    """A split of pictures by class name; classes keep the order given."""
    height, width, channels = image_shape
    decode_one = decode_one or partial(decode, height=height, width=width, channels=channels)
    pictures = [picture for members in classes.values() for picture in members]
    return SplitStream(
        image_shape,
        _offsets([len(members) for members in classes.values()]),
        tuple(classes),
        tuple(groups) if groups is not None else ("",) * len(classes),
        _decoded(pictures, decode_one),
    )


def stream_array(images: Images, labels: npt.NDArray[np.integer[Any]], classes: Sequence[str]) -> SplitStream:
    """A split of images already in memory, in any order. Classes that have no image are left out."""
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels, minlength=len(classes))
    present = np.flatnonzero(counts)
    height, width, channels = images.shape[1:]
    return SplitStream(
        (height, width, channels),
        _offsets(counts[present]),
        tuple(classes[int(index)] for index in present),
        ("",) * len(present),
        (images[order[start : start + BATCH_IMAGES]] for start in range(0, len(order), BATCH_IMAGES)),
    )


def read_idx(folder: Path, workspace: Workspace, classes: Sequence[str]) -> Splits:
    """MNIST's four idx files, gzipped or not."""
    splits = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images_file = _idx_file(folder, f"{prefix}-images", 3)
        labels_file = _idx_file(folder, f"{prefix}-labels", 1)
        if images_file is None and labels_file is None:
            continue
        if images_file is None or labels_file is None:
            raise DataError(
                f"{folder} has {images_file or labels_file}, but not the file of "
                f"{'images' if images_file is None else 'labels'} that belongs to it"
            )
        images = parse_idx(images_file, 3)
        labels = parse_idx(labels_file, 1)
        if len(images) != len(labels):
            raise DataError(f"{images_file} holds {len(images)} images, {labels_file.name} {len(labels)} labels")
        if images.shape[1:] != (28, 28):
            raise DataError(f"{images_file} holds images of {images.shape[1:]}, expected 28 by 28")
        _check_labels(labels_file, labels, len(classes))
        splits[split] = stream_array(images[..., None], labels, classes)
    if not splits:
        raise _not_found(folder, "train-images-idx3-ubyte.gz and its three companions")
    return splits


def parse_idx(file: Path, dimensions: int) -> Images:
    """A uint8 idx file, its magic number, dimensions and length checked."""
    opener = gzip.open if file.suffix == ".gz" else open
    with damage_reported(file), opener(file, "rb") as stream:
        size = 4 + 4 * dimensions
        header: bytes = stream.read(size)
        if len(header) < size:
            raise DataError(f"{file} is cut short: {len(header)} bytes, less than an idx header")
        if header[:4] != bytes((0, 0, 8, dimensions)):
            raise DataError(f"{file} is not an idx file of {dimensions} dimensions: it starts with {header[:4].hex()}")
        shape = struct.unpack(f">{dimensions}I", header[4:])
        expected = math.prod(shape)
        # A small gz can hold gigabytes: in blocks, and no further than the byte that is too much.
        content = bytearray()
        while block := stream.read(min(READ_BLOCK, expected + 1 - len(content))):
            content += block
    if len(content) != expected:
        held = "more" if len(content) > expected else f"{len(content)}"
        raise DataError(f"{file} is damaged: its header {shape} asks for {expected} bytes, it holds {held}")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def read_omniglot(folder: Path, workspace: Workspace, size: int) -> Splits:
    """``images_background.zip`` and ``images_evaluation.zip``, or the folders in them."""
    splits = {}
    for split in ("background", "evaluation"):
        name = f"images_{split}"
        if (folder / f"{name}.zip").is_file():
            members = _zip_pictures(folder / f"{name}.zip", workspace)
        elif (folder / name).is_dir():
            files = [file for file in (folder / name).rglob("*.png") if not is_hidden(file.name)]
            members = [(file.relative_to(folder).as_posix(), file_picture(file)) for file in files]
        else:
            continue
        classes = defaultdict(list)
        for path, picture in sorted(members):
            parts = PurePosixPath(path).parts
            if len(parts) != 4:
                raise DataError(f"{picture.name}: expected {name}/alphabet/character/drawing.png")
            classes[f"{parts[1]}/{parts[2]}"].append(picture)
        if not classes:
            raise DataError(f"{folder / name} holds no drawing (alphabet/character/drawing.png)")
        alphabets = [character.split("/")[0] for character in classes]
        splits[split] = stream_pictures(classes, (size, size, 1), partial(decode_ink, size=size), alphabets)
    if not splits:
        raise _not_found(folder, "images_background.zip or images_evaluation.zip")
    return splits


def read_cifar10(folder: Path, workspace: Workspace) -> Splits:
    """The binary or the Python version of CIFAR-10, as a folder or still in its tar.gz."""
    for archive in ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"):
        if (folder / archive).is_file():
            folder = workspace.unpack(folder / archive)
            break
    for layout, suffix, parse in (
        ("cifar-10-batches-bin", ".bin", parse_cifar_binary),
        ("cifar-10-batches-py", "", parse_cifar_pickle),
    ):
        inner = folder / layout if (folder / layout).is_dir() else folder
        files = {
            "train": [inner / f"data_batch_{number}{suffix}" for number in range(1, 6)],
            "test": [inner / f"test_batch{suffix}"],
        }
        present = {split: [file for file in group if file.is_file()] for split, group in files.items()}
        if any(present.values()):
            return {split: _cifar_split(group, parse) for split, group in present.items() if group}
    raise _not_found(folder, "cifar-10-batches-bin/ or cifar-10-binary.tar.gz")


def parse_cifar_binary(file: Path) -> tuple[Images, Images]:
    """Images [N, 32, 32, 3] and labels of one binary batch: rows of a label and 3 x 32 x 32 pixels."""
    row = 1 + 3 * 32 * 32
    content = file.read_bytes()
    if not content or len(content) % row:
        raise DataError(f"{file} is damaged: {len(content)} bytes are not a whole number of {row}-byte rows")
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, row)
    return _channels_last(rows[:, 1:]), rows[:, 0]


def parse_cifar_pickle(file: Path) -> tuple[Images, Images]:
    """The same of one Python batch, unpickled by a reader that can build arrays and nothing else."""
    try:
        batch = _ArraysOnly(io.BytesIO(file.read_bytes()), encoding="bytes").load()
        pixels = np.asarray(batch[b"data"])
        labels = np.asarray(batch[b"labels"])
    except DataError as error:
        raise DataError(f"{file}: {error}") from error
    except Exception as error:  # a damaged pickle raises almost anything
        raise DataError(f"{file} is not a batch of CIFAR-10: {error!r}") from error
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3072) or labels.dtype.kind != "i":
        raise DataError(f"{file} is not a batch of CIFAR-10: data {pixels.dtype} {pixels.shape}")
    _check_labels(file, labels, len(CIFAR10_CLASSES))
    return _channels_last(pixels), labels.astype(np.uint8)


def read_mini_imagenet(folder: Path, workspace: Workspace, size: int) -> Splits:
    """``images/`` with ``train.csv``, ``val.csv``, ``test.csv``; or a folder of class folders per split."""
    lists = {"train": "train.csv", "validation": "val.csv", "test": "test.csv"}
    if not any((folder / name).is_file() for name in lists.values()):
        return read_class_folders(folder, workspace, (size, size, 3), split_names=tuple(lists))
    images = folder / "images"
    if not images.is_dir():
        raise _not_found(folder, "the folder images/ that its csv files speak of")
    present = {entry.name for entry in os.scandir(images)}
    splits: Splits = {}
    split_of: dict[str, str] = {}
    class_of: dict[str, str] = {}
    for split, name in lists.items():
        if (folder / name).is_file():
            classes = _read_class_list(folder / name, images, present, class_of)
            for label in classes:
                if split_of.setdefault(label, split) != split:
                    raise DataError(f"{folder / name}: class {label} is also in split {split_of[label]}")
            splits[split] = stream_pictures(classes, (size, size, 3))
    return splits


def read_sorted_classes(
    folder: Path,
    workspace: Workspace,
    size: int,
    inner: Sequence[str],
    split_of: Callable[[str], str],
) -> Splits:
    """Class folders that a rule sorts into splits by their name (CUB, Cars).

    ``inner`` names the places below ``folder``, or archives in it, where the class folders may be. Folders
    named ``train`` and ``test`` divide the images of one class; they are joined again.
    """
    top = folder
    for name in inner:
        if (folder / name).is_file():
            folder = workspace.unpack(folder / name)
        elif (folder / name).is_dir():
            folder = folder / name
    _refuse_dead_links(folder)
    parts = [child for child in subfolders(folder) if child.name.lower() in SPLIT_FOLDERS] or [folder]
    by_split: dict[str, dict[str, list[Picture]]] = defaultdict(lambda: defaultdict(list))
    for part in parts:
        for name, pictures in _pictures_by_class(part).items():
            if pictures:
                by_split[split_of(name)][name].extend(pictures)
    if not by_split:
        raise _not_found(top, "a folder of images per class")
    order = ("train", "validation", "test")
    return {
        split: stream_pictures(dict(sorted(by_split[split].items())), (size, size, 3))
        for split in order
        if split in by_split
    }


def read_class_folders(
    folder: Path,
    workspace: Workspace,
    image_shape: tuple[int, int, int],
    split_names: Sequence[str] | None = None,
) -> Splits:
    """A folder of class folders; or folders named train, validation and test that each hold class folders.

    Without those the one split is ``ONLY_SPLIT``. ``split_names`` makes such folders obligatory.
    """
    folder = _descend(folder)
    _refuse_dead_links(folder)
    children = subfolders(folder)
    named = [child for child in children if child.name.lower() in SPLIT_FOLDERS]
    if split_names is not None and not named:
        raise _not_found(folder, f"folders named {', '.join(split_names)} with a folder of images per class")
    if not children:
        raise _not_found(folder, "a folder of images per class")
    if not named:
        return {ONLY_SPLIT: _class_split(folder, image_shape)}
    if len(named) != len(children):
        other = next(child for child in children if child not in named)
        raise DataError(
            f"{folder} mixes split folders ({named[0].name}) with others ({other.name}).\n"
            "Put every class folder inside train, validation or test, or use no split folders."
        )
    splits = {}
    for child in named:
        split = SPLIT_FOLDERS[child.name.lower()]
        if split in splits:
            raise DataError(f"{folder}: more than one folder for split {split}")
        if not subfolders(child):
            raise _not_found(child, "a folder of images per class")
        splits[split] = _class_split(child, image_shape)
    order = ("train", "validation", "test")
    return {split: splits[split] for split in order if split in splits}


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder by name, hidden ones left out."""
    return sorted(child for child in folder.iterdir() if child.is_dir() and not is_hidden(child.name))


def class_folders(folder: Path) -> dict[str, Path]:
    """The folders in a folder by the names of their classes: as text, and one text however a system spells it."""
    found: dict[str, Path] = {}
    for child in subfolders(folder):
        name = unicodedata.normalize("NFC", as_text(child.name))
        if name in found:
            raise DataError(f"two class folders in {folder} are both shown as {name!r}: rename one")
        found[name] = child
    return dict(sorted(found.items()))  # in one order, however each is spelled


def dead_links(folder: Path) -> list[Path]:
    """The links in a folder that lead nowhere, by name, hidden ones left out."""
    links = [Path(entry.path) for entry in os.scandir(folder) if entry.is_symlink() and not is_hidden(entry.name)]
    return sorted(filter(leads_nowhere, links))


def leads_nowhere(file: Path) -> bool:
    """Whether a file is a link to what is not there."""
    try:
        return file.is_symlink() and not file.exists()
    except OSError:  # a folder on the way is locked: reading the file says so
        return False


def link_error(link: Path) -> DataError:
    """What to tell the user of a link that leads nowhere."""
    return DataError(f"cannot read {link}: it is a link that leads nowhere; mend or remove it")


def image_files(folder: Path) -> list[Path]:
    """The images in a folder, judged by their suffix, by name."""
    suffixes = image_suffixes()
    return sorted(
        Path(entry.path)
        for entry in os.scandir(folder)
        if not is_hidden(entry.name) and Path(entry.name).suffix.lower() in suffixes and entry.is_file()
    )


@contextmanager
def large_images_allowed() -> Iterator[None]:
    """Images that Pillow warns of are read without the warning, in threads that are started within as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


class _ArraysOnly(pickle.Unpickler):
    """Unpickles dictionaries, lists, strings, numbers and NumPy arrays; any other name is an error."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy._core", "numpy.core")
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _encode_latin1,
        }
        if (module, name) not in allowed:
            raise DataError(f"refused: the pickle asks for {module}.{name}, which no CIFAR-10 batch needs")
        return allowed[module, name]


def _encode_latin1(text: str, _: str) -> bytes:
    return text.encode("latin1")


@contextmanager
def _opened(picture: Picture) -> Iterator[Image.Image]:
    """A picture open in Pillow; whatever goes wrong inside becomes an error that names it."""
    try:
        with Image.open(io.BytesIO(picture.read())) as image:
            yield image
    except DataError:
        raise
    except UnidentifiedImageError as error:  # whose text names a buffer
        raise DataError(f"cannot read the image {picture.name}: its content is of no known kind") from error
    except Image.DecompressionBombError as error:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0) // 1_000_000  # Pillow warns at one, refuses at two
        raise DataError(f"{picture.name} is too large, at more than {most} million pixels: shrink it") from error
    except Exception as error:  # Pillow's decoders raise many kinds for a damaged file
        raise DataError(f"cannot read the image {picture.name}: {error}") from error


def _decoded(pictures: Sequence[Picture], decode_one: Callable[[Picture], Images]) -> Iterator[Images]:
    """Decode on all cores, in order, with only a few chunks in memory. Pillow releases the GIL."""

    def decode_chunk(start: int) -> Images:
        return np.stack([decode_one(picture) for picture in pictures[start : start + DECODE_CHUNK]])

    workers = os.cpu_count() or 1
    waiting: deque[Future[Images]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for start in range(0, len(pictures), DECODE_CHUNK):
                waiting.append(pool.submit(decode_chunk, start))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _offsets(counts: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(list(counts))]).astype(np.int64)


def _channels_last(rows: Images) -> Images:
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _check_labels(file: Path, labels: npt.NDArray[np.integer[Any]], classes: int) -> None:
    if len(labels) and (labels.min() < 0 or labels.max() >= classes):
        raise DataError(f"{file} is damaged: labels from {labels.min()} to {labels.max()}, expected 0 to {classes - 1}")


def _idx_file(folder: Path, stem: str, dimensions: int) -> Path | None:
    for name in (f"{stem}-idx{dimensions}-ubyte", f"{stem}.idx{dimensions}-ubyte"):
        for file in (folder / f"{name}.gz", folder / name):
            if file.is_file():
                return file
    return None


def _cifar_split(files: Sequence[Path], parse: Callable[[Path], tuple[Images, Images]]) -> SplitStream:
    batches = []
    for file in files:
        images, labels = parse(file)
        _check_labels(file, labels, len(CIFAR10_CLASSES))
        batches.append((images, labels))
    return stream_array(
        np.concatenate([images for images, _ in batches]),
        np.concatenate([labels for _, labels in batches]),
        CIFAR10_CLASSES,
    )


def _zip_pictures(file: Path, workspace: Workspace) -> list[tuple[str, Picture]]:
    archive = workspace.open_zip(file)

    def read(name: str) -> bytes:
        with damage_reported(file):
            return archive.read(name)

    # A name may occur twice: the last one counts, as in unpacking.
    names = {name: None for name in archive.namelist() if name.endswith(".png") and not is_hidden(name)}
    return [(name, Picture(f"{file}:{name}", partial(read, name))) for name in names]


def _read_class_list(file: Path, images: Path, present: set[str], class_of: dict[str, str]) -> dict[str, list[Picture]]:
    """Pictures by class, from a csv file with columns ``filename`` and ``label``.

    ``class_of`` collects the class of every image over all lists: each may be listed once.
    """
    classes = defaultdict(list)
    missing = []
    for line, name, label in _csv_rows(file):
        if name not in present:
            missing.append((line, name))
            continue
        if name in class_of:
            raise DataError(f"{file}, line {line} lists {name}, which was listed before in class {class_of[name]}")
        class_of[name] = label
        classes[label].append(file_picture(images / name))
    if missing:
        line, name = missing[0]
        others = f" (and {len(missing) - 1} more are missing)" if len(missing) > 1 else ""
        raise DataError(f"{file}, line {line} names {name}, which is not in {images}{others}")
    if not classes:
        raise DataError(f"{file} lists no image")
    return dict(sorted(classes.items()))


def _csv_rows(file: Path) -> Iterator[tuple[int, str, str]]:
    """Line number, ``filename`` and ``label`` of every row."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            rows = csv.DictReader(stream)
            rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
            if not {"filename", "label"} <= set(rows.fieldnames):
                raise DataError(f"{file}: the first line must name the columns filename,label")
            for row in rows:
                name, label = (row["filename"] or "").strip(), (row["label"] or "").strip()
                if not name or not label:
                    raise DataError(f"{file}, line {rows.line_num}: expected filename,label")
                yield rows.line_num, name, label
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} is not a csv file in UTF-8: {error}") from error


def _class_split(folder: Path, image_shape: tuple[int, int, int]) -> SplitStream:
    classes = _pictures_by_class(folder)
    for name, pictures in classes.items():
        if not pictures:
            raise DataError(f"class folder {folder / name} holds no image that can be read; remove it or fill it")
    return stream_pictures(classes, image_shape)


def _pictures_by_class(folder: Path) -> dict[str, list[Picture]]:
    folders = class_folders(folder)
    for place in (folder, *folders.values()):
        _refuse_dead_links(place)
    return {name: [file_picture(file) for file in image_files(child)] for name, child in folders.items()}


def _refuse_dead_links(folder: Path) -> None:
    """An image or a whole class would be missing, and nobody would know."""
    if links := dead_links(folder):
        raise link_error(links[0])


def _descend(folder: Path) -> Path:
    """Step over folders that hold nothing but one other folder, as archives often have on top."""
    while True:
        children = subfolders(folder)
        if len(children) != 1 or children[0].name.lower() in SPLIT_FOLDERS or not subfolders(children[0]):
            return folder
        folder = children[0]


@cache
def image_suffixes(all_that_open: bool = False) -> frozenset[str]:
    """Suffixes of images of a set, or of every still image that Pillow reads by itself."""
    extensions = Image.registered_extensions()
    can_open = {*Image.OPEN, "MPO"}  # MPO, a JPEG with others behind it, opens as a JPEG
    kinds = can_open - NO_IMAGES if all_that_open else can_open & IMAGE_FORMATS
    return frozenset(suffix for suffix, kind in extensions.items() if kind in kinds)


def _not_found(folder: Path, what: str) -> LayoutError:
    return LayoutError(f"{folder} does not hold {what}")
