"""What the tests of few-shot learning share: a set that is quick to draw and easy to learn, and runs on it."""

from contextlib import ExitStack

import numpy as np
import pytest

from wheretolearn.config import from_dict, to_dict
from wheretolearn.data import image_set
from wheretolearn.data.image_set import ImageSplit
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.runs.folder import RunFolder

SMALL = {
    "data": "stripes",
    "train_split": "train",
    "validation_split": "train",
    "queries": 3,
    "width": 4,
    "inner_steps": 2,
    "test_inner_steps": 2,
    "outer_steps": 6,
    "tasks_per_step": 2,
    "validate_every": 3,
    "validation_tasks": 4,
    "log_every": 2,
    "checkpoint_every": 2,
}


def draw_stripes(classes=8, drawings=6, name="stripes"):
    """Classes that differ in the place of a bright stripe: easy to learn, quick to draw."""
    random = np.random.default_rng(0)
    images = random.integers(0, 60, (classes * drawings, 16, 16, 1), dtype=np.uint8)
    for label in range(classes):
        images[label * drawings : (label + 1) * drawings, 2 * label : 2 * label + 2] += 150
    return ImageSplit(
        f"{name}/train",
        images,
        np.arange(0, classes * drawings + 1, drawings),
        tuple(f"stripe {label}" for label in range(classes)),
        ("",) * classes,
    )


@pytest.fixture
def small():
    """Settings of a run that takes a moment."""
    return SMALL


@pytest.fixture
def stripes(tmp_path, monkeypatch):
    """A set of stripes in a data folder of its own; call it to draw another split."""
    monkeypatch.setenv("WHERETOLEARN_DATA", str(tmp_path / "data"))
    image_set.write("stripes", {"train": draw_stripes()}, {})
    return draw_stripes


@pytest.fixture
def new_run(tmp_path, stripes):
    with ExitStack() as runs:

        def make(name="run", seed=0, preset=None, scale=None, **settings):
            config = to_dict(from_dict(FewShotConfig, {**SMALL, **settings}))
            return runs.enter_context(RunFolder.create(tmp_path / name, config, seed, "fewshot", preset, scale))

        yield make
