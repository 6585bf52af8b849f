"""What an online learner sees: the sources' classes, and a stream that follows from settings and seed."""

import numpy as np
import pytest
import torch

from wheretolearn.data import image_set
from wheretolearn.data.image_set import ImageSplit
from wheretolearn.data.load import load_set
from wheretolearn.errors import ConfigError, DataError
from wheretolearn.online.config import GLYPHS, OnlineConfig, Source
from wheretolearn.online.problem import Problem, SourceImages, source_split

pytestmark = pytest.mark.usefixtures("glyphs")


@pytest.fixture(scope="module")
def images(glyphs):
    return SourceImages(GLYPHS)


def written(name, *, size=28, classes=("a", "b"), each=4, splits=("train",), shape=None):
    """A set whose images hold their own number."""
    count = each * len(classes)
    parts = {}
    for number, split in enumerate(splits):
        pixels = np.full((count, *(shape or (size, size, 1))), 1, np.uint8)
        pixels *= (np.arange(count) + 100 * number).astype(np.uint8).reshape(-1, 1, 1, 1)
        offsets = np.arange(len(classes) + 1) * each
        parts[split] = ImageSplit(f"{name}/{split}", pixels, offsets, tuple(classes), ("",) * len(classes))
    return image_set.write(name, parts, {"source": "a test"}).name


def test_tasks_change_and_sources_occur_as_often_as_they_should(images):
    config = OnlineConfig(p=0.9, steps=6000)
    problem = Problem(config, 3, images)
    switches = problem.switched[1:].double()
    assert abs(switches.mean().item() - 0.1) < 4 * (0.1 * 0.9 / len(switches)) ** 0.5
    drawn = problem.source[problem.switched]
    for number, share in enumerate((0.5, 0.25, 0.25)):
        frequency = (drawn == number).double().mean().item()
        assert abs(frequency - share) < 4 * (share * (1 - share) / len(drawn)) ** 0.5


def test_a_batch_shows_its_classes_equally_often_and_a_task_keeps_them(images):
    problem = Problem(OnlineConfig(p=0.8, steps=60), 0, images)
    letters = {image.tobytes(): i for i, image in enumerate(images.splits[0].images)}
    class_of = np.repeat(np.arange(len(images.splits[0].classes)), images.splits[0].counts)
    meaning = {}
    for step in range(60):
        batch = problem.batch(step)
        assert batch.inputs.shape == (50, 1, 28, 28)
        assert batch.inputs.dtype == torch.float32
        assert batch.inputs.min() == 0
        assert 0.5 < batch.inputs.max() <= 1
        assert torch.bincount(batch.labels).tolist() == [5] * 10
        if batch.switched:
            meaning = {}
        if batch.source != 0:
            continue
        pixels = (batch.inputs * 255).round().to(torch.uint8).movedim(1, -1).numpy()
        for image, label in zip(pixels, batch.labels.tolist(), strict=True):
            found = class_of[letters[image.tobytes()]]
            assert meaning.setdefault(label, found) == found
    assert problem.switched.sum() > 3


def test_places_in_a_batch_tell_nothing_about_labels(images):
    problem = Problem(OnlineConfig(steps=400), 1, images)
    by_place = torch.stack([problem.batch(step).labels for step in range(400)])
    counts = torch.stack([(by_place == label).sum(0) for label in range(10)])  # [labels, places], 40 each if random
    assert counts.min() > 40 - 6 * 6
    assert counts.max() < 40 + 6 * 6


def test_a_stream_is_the_same_every_time_and_other_seeds_have_other_ones(images):
    config = OnlineConfig(p=0.9, steps=30)
    one, two, other = Problem(config, 5, images), Problem(config, 5, images), Problem(config, 6, images)
    for step in (0, 7, 29):
        assert torch.equal(one.batch(step).inputs, two.batch(step).inputs)
        assert torch.equal(one.batch(step).labels, two.batch(step).labels)
    assert any(not torch.equal(one.batch(step).inputs, other.batch(step).inputs) for step in range(30))


def test_a_source_takes_the_first_classes_of_all_splits_that_are_of_its_groups():
    every = load_set("glyphs").splits
    greek = source_split(Source("glyphs", groups=("greek",)))
    expected = [
        (split, number) for split in every.values() for number, group in enumerate(split.groups) if group == "greek"
    ]
    assert greek.classes == tuple(split.classes[number] for split, number in expected)
    split, number = expected[-1]
    own = split.images[split.class_offsets[number] : split.class_offsets[number + 1]]
    assert np.array_equal(greek.images[greek.class_offsets[-2] :], own)
    assert source_split(Source("glyphs", groups=("greek",), classes=12)).classes == greek.classes[:12]


def test_a_split_with_the_same_classes_again_is_left_out():
    name = written("twice-the-same", splits=("test", "train"))
    found = source_split(Source(name))
    assert found.classes == ("a", "b")
    assert found.images[:, 0, 0, 0].tolist() == [100, 101, 102, 103, 104, 105, 106, 107]  # those to learn from


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ((Source("glyphs", groups=("greek", "klingon")),), "source glyphs: glyphs has no group 'klingon'; it has"),
        ((Source("glyphs", groups=("greek",), classes=99),), "source glyphs has 45 classes; 99 are wanted"),
        ((Source("omniglt"),), "no known image set is called 'omniglt'; did you mean omniglot"),
    ],
)
def test_a_source_that_is_not_there_is_named(sources, message):
    with pytest.raises(DataError, match=message):
        SourceImages(sources)


def test_images_of_all_sources_have_one_size():
    small = written("small-squares", size=16)
    with pytest.raises(DataError, match="must have one size: glyphs 28x28x1, small-squares 16x16x1"):
        SourceImages((Source("glyphs", 0.5), Source(small, 0.5)))
    wide = written("wide", shape=(16, 20, 1))
    with pytest.raises(DataError, match="needs square images, not 16x20"):
        SourceImages((Source(wide),))


def test_a_source_with_too_few_classes_or_images_is_named():
    few = written("two-classes")
    with pytest.raises(DataError, match="two-classes has 2 classes; 10 are needed"):
        Problem(OnlineConfig(sources=(Source(few),), steps=5), 0, SourceImages((Source(few),)))
    with pytest.raises(DataError, match=r"class 0.* has 4 images; 5 per class are needed"):
        Problem(OnlineConfig(sources=(Source(few),), steps=5, ways=2), 0, SourceImages((Source(few),)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p": 1.5}, "p must lie between 0 and 1, not 1.5"),
        ({"steps": 0}, "steps must be greater than 0"),
        ({"clip_norm": 0.0}, "clip_norm must be greater than 0"),
        ({"ways": 1}, "ways must be at least 2"),
        ({"mask_lr": -1.0}, "mask_lr must not be negative"),
        ({"sources": ()}, "at least one source"),
        ({"sources": (Source("glyphs", 0.5),)}, "must sum to 1, not 0.5"),
        ({"sources": (Source("glyphs", 0.5), Source("glyphs", 0.5))}, "two sources are called glyphs"),
        ({"sources": (Source("mnist", classes=5),)}, "mnist is cut to 5 classes, but tasks have ways=10"),
        ({"learner": "maml"}, "learner=maml never changes the weights .* set pretrain=true"),
        ({"learner": "bgd", "pretrain": True}, "learner=bgd starts from random weights"),
        ({"pretrain": True, "pretrain_classes": 5}, "pre-training needs at least 10 classes"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        OnlineConfig(**settings)
