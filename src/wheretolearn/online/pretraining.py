"""Weights to start a stream with: few-shot meta-training on the first classes of the first source, done once.

The result lies in the cache of image sets, named by all that it depends on: runs of every seed, and all presets that
ask for the same, share it. A process that finds another at work waits for it; one that was killed is taken over where
it last saved.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wheretolearn import cpu
from wheretolearn.config import to_dict
from wheretolearn.data import image_set
from wheretolearn.data.image_set import ImageSet, ImageSplit, data_root
from wheretolearn.errors import DataError, Stopped, UserError
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.fewshot.learner import new_learner
from wheretolearn.fewshot.tasks import check_images
from wheretolearn.fewshot.training import finished, train
from wheretolearn.online.config import OnlineConfig
from wheretolearn.online.problem import source_split
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.signals import StopRequest
from wheretolearn.storage import load_weights

if sys.platform != "win32":
    import fcntl

FOLDER = ".pretrained"  # no image set can have this name
SECONDS_BETWEEN_LOOKS = 0.5
Report = Callable[[int, Mapping[str, Any]], None]


def pretrained_weights(
    config: OnlineConfig,
    device: str = "cpu",
    report: Report | None = None,
    notify: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] | None = None,
) -> dict[str, Tensor]:
    """The weights, on the CPU, from the cache; meta-trained first where they are not there."""
    splits = class_splits(config)
    settings = few_shot_settings(config, splits)
    folder = _folder(settings, config.pretrain_seed)
    if not is_cached(folder):
        with _sole_worker(folder, notify):
            if not image_set.exists(settings.data):
                source = config.sources[0]
                about = f"the first classes of {source.label}, for the pre-training of online learners"
                licence = f"as {source.data}; made for pre-training"  # so that no list shows it as the user's own
                image_set.write(settings.data, splits, {"source": about, "licence": licence})
            _train(folder, settings, config.pretrain_seed, device, report, notify, on_stop)
    return load_weights(folder / "model.safetensors")[0]


def cache_folder(config: OnlineConfig) -> Path:
    """Where the weights are kept: one folder for all runs that ask for the same."""
    return _folder(few_shot_settings(config, class_splits(config)), config.pretrain_seed)


def is_cached(folder: Path) -> bool:
    return (folder / "model.safetensors").exists()


def check_pretraining(config: OnlineConfig) -> None:
    """Fail now, before anything is written, where pre-training cannot have its tasks, or what it is to adapt."""
    splits = class_splits(config)
    settings = few_shot_settings(config, splits)
    try:
        check_images(settings, ImageSet("pre-training", splits, {}))
    except DataError as error:
        raise DataError(f"pre-training with pretrain_queries={config.pretrain_queries}: {error}") from error
    try:
        new_learner(settings, splits["train"].images.shape[1:], config.pretrain_seed)
    except UserError as error:
        raise type(error)(f"pre-training: {error}") from error


def few_shot_settings(config: OnlineConfig, splits: Mapping[str, ImageSplit]) -> FewShotConfig:
    """Pre-training as a few-shot run, on an image set of these splits."""
    return FewShotConfig(
        data=f"pretraining-{_digest(splits)[:12]}",
        train_split="train",
        validation_split="validation",
        ways=config.ways,
        shots=config.shots,
        queries=config.pretrain_queries,
        width=config.width,
        mask="fixed",
        adapt="head" if config.learner == "anil" else config.adapt,
        adapt_norm=config.adapt_norm,
        order=config.order,
        inner_steps=config.inner_steps,
        test_inner_steps=config.inner_steps,
        inner_lr=config.inner_lr,
        outer_steps=config.pretrain_steps,
        tasks_per_step=config.pretrain_tasks,
        theta_lr=config.lr,
        validate_every=config.pretrain_validate_every,
        patience=config.pretrain_patience,
        precision=config.precision,
        checkpoint_every=config.pretrain_validate_every,
        validation_tasks=100,
        keep_best=1,
    )


def class_splits(config: OnlineConfig) -> dict[str, ImageSplit]:
    """The first source's first classes to train on, and the next to validate with."""
    source = config.sources[0]
    every = source_split(source)
    train, validation = config.pretrain_classes, config.pretrain_validation_classes
    if train + validation > len(every.classes):
        raise DataError(
            f"pre-training wants {train} classes to train on and {validation} to validate with, "
            f"but source {source.label} has {len(every.classes)}"
        )
    return {"train": _classes(every, 0, train), "validation": _classes(every, train, train + validation)}


def _digest(splits: Mapping[str, ImageSplit]) -> str:
    digest = hashlib.sha256()
    for split in splits.values():
        digest.update(np.ascontiguousarray(split.images).data)
        digest.update(split.class_offsets.tobytes())
    return digest.hexdigest()


def _classes(split: ImageSplit, first: int, end: int) -> ImageSplit:
    start, stop = split.class_offsets[first], split.class_offsets[end]
    return ImageSplit(
        split.name,
        split.images[start:stop],
        split.class_offsets[first : end + 1] - start,
        split.classes[first:end],
        split.groups[first:end],
    )


def _folder(settings: FewShotConfig, seed: int) -> Path:
    text = json.dumps([to_dict(settings), seed], sort_keys=True)
    return data_root() / FOLDER / hashlib.sha256(text.encode()).hexdigest()[:16]


def _train(
    folder: Path,
    settings: FewShotConfig,
    seed: int,
    device: str,
    report: Report | None,
    notify: Callable[[str], None] | None,
    on_stop: Callable[[], None] | None,
) -> None:
    begun = (folder / "run.json").exists()
    if begun:
        opened = RunFolder.open(folder)
    else:
        threads = torch.get_num_threads() if device == "cpu" else None
        opened = RunFolder.create(folder, to_dict(settings), seed, "fewshot", threads=threads)
    with opened as run, cpu.threads(run.threads):
        if finished(run):  # by the process that was waited for
            return
        try:
            train(run, report, device, on_stop, notify)
        except Stopped:
            raise Stopped("stopped in the midst of pre-training, which was saved") from None
        except UserError as error:
            raise type(error)(f"pre-training failed: {error}") from error


@contextmanager
def _sole_worker(folder: Path, notify: Callable[[str], None] | None) -> Iterator[None]:
    """Wait until no other process works on this folder. (Windows: no lock.)"""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = (folder.parent / f"{folder.name}.lock").open("a+b")
    except OSError as error:
        raise UserError(f"cannot keep pre-trained weights in {folder.parent}: {error.strerror}") from error
    with file:
        with StopRequest() as stop:
            told = False
            while sys.platform != "win32":
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if not told and notify is not None:
                        notify("another process does the same pre-training: waiting for it")
                    told = True
                    if stop.requested:
                        raise Stopped("stopped while another process did the pre-training") from None
                    time.sleep(SECONDS_BETWEEN_LOOKS)
        yield
