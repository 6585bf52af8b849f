"""A finished run adapted to a user's own images: one folder per class to learn from, others to be judged.

outcome = adapt_to_folder(RunFolder.open("runs/first"), Path("birds/support"), Path("birds/query"))
outcome.save(Path("birds/adapted"))
network = load_adapted("birds/adapted")                # the same predictions again, as logits of an nn.Module
predict_folder(network, Path("birds/more")).images
"""

import csv
import difflib
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from wheretolearn import batch_norm
from wheretolearn.config import from_dict, to_dict
from wheretolearn.data import glyphs
from wheretolearn.data.archives import is_hidden
from wheretolearn.data.image_set import Images
from wheretolearn.data.readers import (
    class_folders,
    dead_links,
    decode,
    decode_drawing,
    file_picture,
    image_suffixes,
    large_images_allowed,
    leads_nowhere,
    link_error,
    subfolders,
)
from wheretolearn.data.sources import INK, SOURCES
from wheretolearn.data.transforms import as_input
from wheretolearn.delta import SparseDelta
from wheretolearn.errors import DataError, MismatchError, NonFiniteError, UserError
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.fewshot.learner import placed
from wheretolearn.fewshot.trained import load_trained, trained_image_shape
from wheretolearn.inner_loop import adapt
from wheretolearn.ridge_head import solved_head
from wheretolearn.runs.folder import RunFolder
from wheretolearn.storage import atomic_write, check_shapes, load_weights, save_weights, write_json
from wheretolearn.wording import as_text, some

PASS_IMAGES = 256  # query images that go through the network together
SUPPORT_LIMIT = 1000  # every inner step holds all support images in memory
SHALLOW = 1 << 14  # a 16-bit image that stays below is shown at a quarter of full brightness, or less
FILES = ("model.safetensors", "delta.safetensors", "predictions.csv", "predictions.json")

Progress = Callable[[int, int], None]


class AdaptedNetwork(nn.Module):
    """A network adapted to classes of the user's own: images as ``read_images`` gives them in, logits out."""

    def __init__(self, network: nn.Module, config: FewShotConfig, classes: Sequence[str], image_shape: Sequence[int]):
        super().__init__()
        self.network = network
        self.config = config  # of the run
        self.classes = tuple(classes)
        self.image_shape = tuple(image_shape)  # height, width, channels

    def forward(self, x: Tensor) -> Tensor:
        return _used_outputs(self.network(x), len(self.classes))

    def save(self, path: Path) -> None:
        about = {
            "kind": "adapted",
            "config": json.dumps(to_dict(self.config)),
            "classes": json.dumps(self.classes),
            "image_shape": json.dumps(self.image_shape),
        }
        save_weights(path, self.network.state_dict(), about)


@dataclass(frozen=True)
class Prediction:
    file: str  # below the query folder
    label: str
    confidence: float  # the label's probability
    probabilities: tuple[float, ...]  # in the order of the network's classes
    truth: str | None  # None: not known


@dataclass(frozen=True)
class LeftOut:
    file: str  # below the query folder
    reason: str


@dataclass(frozen=True)
class Predictions:
    images: tuple[Prediction, ...]
    left_out: tuple[LeftOut, ...]  # images that cannot be read
    notes: tuple[str, ...]  # what the user should know about them

    @property
    def correct(self) -> int:
        return sum(image.label == image.truth for image in self.images)

    @property
    def accuracy(self) -> float | None:
        """The share of correct predictions; None where the truth is not known."""
        return None if self.images[0].truth is None else self.correct / len(self.images)


@dataclass(frozen=True)
class Outcome:
    """An adapted network, its difference to the run's model, and its predictions."""

    run: Path
    support: Path
    query: Path
    steps: int
    support_counts: dict[str, int]  # images of each class
    network: AdaptedNetwork
    delta: SparseDelta | None  # None where the head is solved anew (head=ridge)
    changed: int  # weights that differ from the run's model
    total: int
    predictions: Predictions
    notes: tuple[str, ...]

    def save(self, folder: Path) -> None:
        """Write ``FILES`` to an existing folder; earlier ones are replaced."""
        self.network.save(folder / "model.safetensors")
        if self.delta is None:
            (folder / "delta.safetensors").unlink(missing_ok=True)
        else:
            self.delta.save(folder / "delta.safetensors")
        with atomic_write(folder / "predictions.csv") as file:
            file.write(self._table().encode())
        write_json(folder / "predictions.json", self._record())

    def _table(self) -> str:
        text = io.StringIO()
        rows = csv.writer(text)
        rows.writerow(("file", "prediction", "confidence", "truth"))
        for image in self.predictions.images:
            rows.writerow((image.file, image.label, f"{image.confidence:.4f}", image.truth or ""))
        return text.getvalue()

    def _record(self) -> dict[str, Any]:
        images = [
            {
                "file": image.file,
                "prediction": image.label,
                "confidence": image.confidence,
                "truth": image.truth,
                "probabilities": dict(zip(self.network.classes, image.probabilities, strict=True)),
            }
            for image in self.predictions.images
        ]
        return {
            "run": as_text(self.run),
            "support": as_text(self.support),
            "query": as_text(self.query),
            "support_images": self.support_counts,
            "inner_steps": self.steps,
            "batch_norm": self.network.config.batch_norm,
            "weights_changed": self.changed,
            "weights": self.total,
            "accuracy": self.predictions.accuracy,
            "images": images,
            "left_out": [{"file": image.file, "reason": image.reason} for image in self.predictions.left_out],
            "notes": self.notes,
        }


def adapt_to_folder(
    run: RunFolder,
    support: Path,
    query: Path,
    *,
    steps: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Outcome:
    """Adapt a finished run to the class folders in ``support`` and judge the images in ``query``.

    The query folder holds class folders too (then accuracy is known) or images. Fewer classes than the run's ways
    are fine: the outputs left over are ignored. ``steps`` defaults to the run's ``test_inner_steps``.
    """
    if run.protocol != "fewshot":
        raise UserError(f"{run.path} is a run of the protocol {run.protocol}; only few-shot runs can be adapted")
    config = from_dict(FewShotConfig, run.config, where=str(run.path))
    if config.head == "ridge" and steps:
        raise UserError(f"{run.path} solves its head on the support images and takes no inner steps: leave out --steps")
    steps = config.test_inner_steps if steps is None else steps
    classes, notes = _support_classes(support, config.ways)
    to_judge, query_notes = _query_images(query, tuple(classes))  # a slip there should not cost an adaptation
    if support.resolve() == query.resolve():
        notes.append("the query folder is the support folder: these are the very images that the network learned from")
    if _learned_from_ink(config):
        notes.append(
            f"the run learned from drawings ({config.data}: bright ink on black); "
            "an image with a light border is taken for dark ink on paper and turned round"
        )
    config, model, mask = load_trained(run, device)
    shape = trained_image_shape(run)
    images = _read_support(classes, config, shape, notes).to(device)
    labels = torch.tensor([label for label, files in enumerate(classes.values()) for _ in files], device=device)
    total_ticks = steps + math.ceil(len(to_judge) / PASS_IMAGES)
    done = 0

    def tick(count: int) -> None:
        if progress is not None:
            progress(count, total_ticks)

    def support_loss(network: nn.Module) -> Tensor:
        nonlocal done
        tick(min(done, steps))
        done += 1
        return F.cross_entropy(_used_outputs(network(images), len(classes)), labels)

    adapted = adapt(
        model,
        mask,
        support_loss,
        steps=steps,
        inner_lr=config.inner_lr,
        batch_norm_mode=config.batch_norm,
        clip_norm=config.inner_clip_norm,
    )
    if not adapted.losses.isfinite().all():
        step = adapted.losses.isfinite().tolist().index(False) + 1
        raise NonFiniteError(f"the support loss is not finite at inner step {step} of {steps}: take fewer --steps")
    network = AdaptedNetwork(adapted.module(), config, tuple(classes), shape)
    if config.head == "ridge":
        network.network.head = head = solved_head(network.network, images, labels, len(classes))
        delta, changed, total = None, head.weight.numel(), sum(p.numel() for p in network.parameters())
    else:
        delta = SparseDelta.of(adapted)
        changed, total = delta.changed, delta.total
    predictions = _predict(network, to_judge, query_notes, lambda passes, _: tick(steps + passes))
    return Outcome(
        run=run.path,
        support=support,
        query=query,
        steps=steps,
        support_counts={name: len(files) for name, files in classes.items()},
        network=network,
        delta=delta,
        changed=changed,
        total=total,
        predictions=predictions,
        notes=(*notes, *predictions.notes),
    )


def predict_folder(network: AdaptedNetwork, folder: Path, progress: Progress | None = None) -> Predictions:
    """What an adapted network says about the images in a folder, or in its class folders."""
    images, notes = _query_images(folder, network.classes)
    return _predict(network, images, notes, progress)


def load_adapted(path: Path | str, device: str = "cpu") -> AdaptedNetwork:
    """The network that ``Outcome.save`` left in a folder; needs neither the run nor any images."""
    path = Path(path)
    file = path / "model.safetensors" if path.is_dir() else path
    tensors, about = load_weights(file)
    if about.get("kind") != "adapted":
        raise MismatchError(f"{file} holds no adapted network: give a folder written by `wheretolearn adapt`")
    config = from_dict(FewShotConfig, json.loads(about["config"]), where=str(file))
    shape = json.loads(about["image_shape"])
    model = config.build_model(shape[0], shape[2], seed=0)
    if config.head == "ridge":  # what was saved is the head that was solved
        outputs, features = tensors["head.weight"].shape
        model.head = nn.Linear(features, outputs, bias=False)
    batch_norm.fix_mode(model, config.batch_norm)
    check_shapes(_shapes(tensors), _shapes(model.state_dict()), file)
    model.load_state_dict(tensors)
    return AdaptedNetwork(placed(model, device), config, json.loads(about["classes"]), shape)


def read_images(files: Iterable[Path], config: FewShotConfig, image_shape: Sequence[int]) -> list[Images | DataError]:
    """Each file as uint8 [height, width, channels], in the form of the run's image set; or why it cannot be read.

    Any format and mode of Pillow, as large as it takes for safe: turned upright by EXIF, transparency laid on white,
    squashed to size.
    """
    height, width, channels = image_shape

    def read(file: Path) -> Images | DataError:
        if leads_nowhere(file):
            return link_error(file)
        try:
            if _learned_from_ink(config):
                return decode_drawing(file_picture(file), height)
            return decode(file_picture(file), height, width, channels)
        except DataError as error:
            return error

    with large_images_allowed(), ThreadPoolExecutor() as pool:
        return list(pool.map(read, files))


def _predict(
    network: AdaptedNetwork, images: Sequence[tuple[Path, str, str | None]], notes: list[str], progress: Progress | None
) -> Predictions:
    """Predictions of (file, name to show, truth). Each pass takes every n-th image, so that no pass sees one class."""
    passes = math.ceil(len(images) / PASS_IMAGES)
    device = next(network.parameters()).device
    probabilities: dict[int, tuple[float, ...]] = {}
    unreadable: dict[int, DataError] = {}
    blank, shallow = [], []
    for number in range(passes):
        if progress is not None:
            progress(number, passes)
        chosen = range(number, len(images), passes)
        found = read_images((images[index][0] for index in chosen), network.config, network.image_shape)
        whole = {index: pixels for index, pixels in zip(chosen, found, strict=True) if isinstance(pixels, np.ndarray)}
        unreadable |= {index: image for index, image in zip(chosen, found, strict=True) if isinstance(image, DataError)}
        blank += [images[index][0] for index, pixels in whole.items() if _is_blank(pixels)]
        shallow += [images[index][0] for index, pixels in whole.items() if _is_shallow(images[index][0], pixels)]
        if whole:
            inputs = as_input(torch.from_numpy(np.stack(list(whole.values())))).to(device)
            with torch.no_grad():
                shares = network(inputs).double().softmax(1)
            if not shares.isfinite().all():
                raise NonFiniteError("the adapted network's outputs are not finite: take fewer --steps")
            probabilities |= dict(zip(whole, map(tuple, shares.tolist()), strict=True))
    left_out = tuple(LeftOut(images[index][1], as_text(str(unreadable[index]))) for index in sorted(unreadable))
    if not probabilities:
        raise unreadable[min(unreadable)]
    notes = notes + _reading_notes(left_out, blank, shallow)
    if network.config.batch_norm == "batch":
        notes.append(_transduction(len(probabilities), passes))
    results = []
    for index in sorted(probabilities):
        _, name, truth = images[index]
        confidence = max(probabilities[index])
        label = network.classes[probabilities[index].index(confidence)]
        results.append(Prediction(name, label, confidence, probabilities[index], truth))
    return Predictions(tuple(results), left_out, tuple(notes))


def _used_outputs(logits: Tensor, classes: int) -> Tensor:
    """One output per class; a run with more ways than there are classes has others, which are ignored."""
    return logits[:, :classes]


def _transduction(images: int, passes: int) -> str:
    note = (
        "batch norm in mode 'batch' is transductive: a prediction depends on the other query images too, "
        "so that an image alone or in other company may be judged differently"
    )
    if passes > 1:
        note += f"; these {images} went through in {passes} passes of at most {PASS_IMAGES}"
    return note


def _learned_from_ink(config: FewShotConfig) -> bool:
    source = SOURCES.get(config.data)
    return config.data == glyphs.NAME or (source is not None and source.convention.startswith(INK))


def _read_support(
    classes: dict[str, list[Path]], config: FewShotConfig, shape: Sequence[int], notes: list[str]
) -> Tensor:
    files = [file for members in classes.values() for file in members]
    images = []
    for image in read_images(files, config, shape):
        if isinstance(image, DataError):
            raise image
        images.append(image)
    blank = [file for file, image in zip(files, images, strict=True) if _is_blank(image)]
    shallow = [file for file, image in zip(files, images, strict=True) if _is_shallow(file, image)]
    notes += _reading_notes([], blank, shallow)
    return as_input(torch.from_numpy(np.stack(images)))


def _is_blank(image: Images) -> bool:
    return bool(image.min() == image.max())


def _is_shallow(file: Path, pixels: Images) -> bool:
    """Whether a file of 16 bits holds values of 14 or fewer, which read as 16 are almost black."""
    if pixels.max() > 127:  # spares most files a second look
        return False
    with large_images_allowed(), Image.open(file) as image:
        if not image.mode.startswith("I"):
            return False
        highest = int(np.asarray(image).max())
        return highest < SHALLOW and (image.mode != "I" or highest > 255)  # such 32-bit files are taken for 8-bit ones


def _reading_notes(left_out: Sequence[LeftOut], blank: Sequence[Path], shallow: Sequence[Path]) -> list[str]:
    notes = []
    if left_out:
        others = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        notes.append(f"left out: {left_out[0].reason}{others}")
    if blank:
        others = f" and {len(blank) - 1} more are" if len(blank) > 1 else " is"
        notes.append(f"{as_text(blank[0])}{others} blank: every pixel is the same")
    if shallow:
        others = f" and {len(shallow) - 1} more are" if len(shallow) > 1 else " is"
        notes.append(
            f"{as_text(shallow[0])}{others} almost black: 16-bit with values below {SHALLOW} of 65535; "
            "if they hold 10, 12 or 14 bits, scale them to the whole range first"
        )
    return notes


@dataclass(frozen=True)
class _Listing:
    classes: dict[str, list[Path]]  # images by class folder, links that lead nowhere among them
    loose: list[Path]  # images beside no class folder
    links: list[Path]  # that lead nowhere, beside the class folders or images


def _listing(folder: Path, notes: list[str]) -> _Listing:
    """A folder of class folders, or of images: one or the other."""
    if not folder.exists():
        raise DataError(f"{folder} does not exist")
    if not folder.is_dir():
        raise DataError(f"{folder} is a file: give the folder that holds the images")
    try:
        folders, loose, links = class_folders(folder), _image_files(folder), dead_links(folder)
        children = list(folders.values())
        classes = {name: sorted(_image_files(child) + dead_links(child)) for name, child in folders.items()}
        nested = [inner for child in children for inner in subfolders(child)]
        every = [entry for place in (folder, *children) for entry in place.iterdir()]
    except OSError as error:
        raise DataError(f"cannot read {error.filename or folder}: {error.strerror}") from error
    if nested:
        raise DataError(
            f"{nested[0]} is a folder in a class folder: put the images straight into {nested[0].parent}, "
            "or name the folder whose sub-folders are the classes"
        )
    if children and loose:
        raise DataError(
            f"{folder} mixes images ({loose[0].name}) with class folders ({children[0].name}): "
            "move the images into class folders, or elsewhere"
        )
    if not loose and not links and not any(classes.values()):
        raise DataError(f"{folder} holds no image of a kind that can be read (JPEG, PNG, TIFF, WebP, ...)")
    taken = {*children, *loose, *links, *(file for files in classes.values() for file in files)}
    others = sorted(entry.name for entry in every if entry not in taken and not is_hidden(entry.name))
    if others:
        notes.append(f"{folder}: files that are no images by their suffix were left out ({some(others)})")
    return _Listing(classes, loose, links)


def _image_files(folder: Path) -> list[Path]:
    """As ``readers.image_files``, but of any format, and a link that leads to itself does not end it."""
    suffixes = image_suffixes(all_that_open=True)
    return [
        file
        for file in sorted(folder.iterdir())
        if not is_hidden(file.name) and file.suffix.lower() in suffixes and file.is_file()
    ]


def _support_classes(folder: Path, ways: int) -> tuple[dict[str, list[Path]], list[str]]:
    notes: list[str] = []
    listing = _listing(folder, notes)
    classes = listing.classes
    if listing.links:  # it may have been a class
        raise link_error(listing.links[0])
    if not classes:
        raise DataError(
            f"{folder} holds images, but no class folders: put the images of each class in a folder of its own"
        )
    for name, files in classes.items():
        if not files:
            raise DataError(f"class folder {folder / name} holds no image that can be read: fill it, or remove it")
    if len(classes) < 2:
        raise DataError(
            f"{folder} holds one class, {next(iter(classes))}: there is nothing to tell it from; add another"
        )
    if len(classes) > ways:
        raise DataError(
            f"{folder} holds {len(classes)} classes, but the run tells only {ways} apart (its setting ways): "
            f"keep at most {ways} class folders, or train with --set ways={len(classes)}"
        )
    total = sum(map(len, classes.values()))
    if total > SUPPORT_LIMIT:
        raise DataError(
            f"{folder} holds {total} images, and every inner step takes them all: keep at most {SUPPORT_LIMIT}"
        )
    if len(classes) < ways:
        notes.append(
            f"{len(classes)} classes, of {ways} that the run can tell apart: the outputs left over are ignored"
        )
    return classes, notes


def _query_images(folder: Path, classes: Sequence[str]) -> tuple[list[tuple[Path, str, str | None]], list[str]]:
    """Of each image: its file, its name below the folder, and its class where there are class folders."""
    notes: list[str] = []
    listing = _listing(folder, notes)
    for name in listing.classes:
        if name not in classes:
            folded = {known.casefold(): known for known in classes}
            close = difflib.get_close_matches(name.casefold(), folded, n=1)
            hint = f"; did you mean {folded[close[0]]!r}?" if close else "."
            raise DataError(
                f"{folder / name} is no class of the support folder{hint} Its classes are {', '.join(classes)}.\n"
                "Images of unknown class go straight into the query folder, without class folders."
            )
    empty = [name for name, files in listing.classes.items() if not files]
    if empty:
        notes.append(f"{folder}: no images in {some(empty)}")
    images: list[tuple[Path, str, str | None]] = [
        (file, as_text(file.name), None) for file in sorted(listing.loose + listing.links)
    ]
    for name, files in listing.classes.items():
        images += [(file, as_text(file.relative_to(folder).as_posix()), name) for file in files]
    return images, notes


def _shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
