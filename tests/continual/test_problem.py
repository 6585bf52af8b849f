import numpy as np
import pytest
import torch

from wheretolearn.continual.config import ContinualConfig
from wheretolearn.continual.problem import Labelled, Problem, train_and_test
from wheretolearn.data.image_set import ImageSet, ImageSplit
from wheretolearn.data.load import load_set
from wheretolearn.errors import ConfigError, DataError


def config(**settings):
    defaults = {"problem": "rotations", "tasks": 3, "examples": 40, "classes": 5, "batch": 8, "epochs": 2}
    return ContinualConfig(**{**defaults, **settings})


def test_glyphs_are_split_within_their_classes():
    images = load_set("glyphs")
    train, test, classes = train_and_test(images, config())
    assert classes == 5
    counts = images.splits["train"].counts[:5]
    assert torch.bincount(test.labels).tolist() == (counts // 4).tolist()
    assert torch.bincount(train.labels).tolist() == (counts - counts // 4).tolist()
    both = np.concatenate([train.images, test.images]).reshape(int(counts.sum()), -1)
    assert len(np.unique(both, axis=0)) == len(both)  # no image is in both


@pytest.mark.parametrize(("left_out", "told"), [("test", "c1 is only in train"), ("train", "c1 is only in test")])
def test_splits_that_share_some_classes_and_not_others_are_refused(left_out, told):
    """Otherwise images of the test split would never be looked at."""

    def split(name, classes):
        images = np.zeros((8 * len(classes), 16, 16, 1), np.uint8)
        offsets = np.arange(0, len(images) + 1, 8)
        return ImageSplit(f"mine/{name}", images, offsets, tuple(classes), ("",) * len(classes))

    classes = {"train": ["c0", "c1", "c2"], "test": ["c0", "c1", "c2"]}
    classes[left_out].remove("c1")
    images = ImageSet("mine", {name: split(name, own) for name, own in classes.items()}, {})
    with pytest.raises(DataError, match=told):
        train_and_test(images, config(classes=2))


@pytest.mark.parametrize("kind", ["rotations", "permutations", "split"])
def test_lanes_show_what_their_seeds_would_show_alone(kind):
    settings = config(problem=kind, classes=6)
    both = Problem(settings, [3, 8])
    assert both.batches == both.tasks * len(range(0, 2)) * (both.batches // both.tasks // 2)
    for lane, seed in enumerate((3, 8)):
        alone = Problem(settings, [seed])
        for number in (0, 1, both.batches - 1):
            one, two = both.batch(number), alone.batch(number)
            assert torch.equal(one.inputs[lane], two.inputs[0])
            assert torch.equal(one.labels[lane], two.labels[0])
            assert (one.task, one.fresh, one.ends_task) == (two.task, two.fresh, two.ends_task)
        for one, two in zip(next(both.test_sets(1)), next(alone.test_sets(1)), strict=True):
            assert torch.equal(one[lane], two[0])
    assert not torch.equal(both.batch(0).inputs[0], both.batch(0).inputs[1])


def test_epochs_come_one_after_another_within_a_task_and_only_the_first_is_fresh():
    problem = Problem(config(), [0])
    shown = [problem.batch(number) for number in range(problem.batches)]
    assert [b.task for b in shown] == [0] * 10 + [1] * 10 + [2] * 10
    assert [b.fresh for b in shown[:10]] == [True] * 5 + [False] * 5
    assert [n for n, b in enumerate(shown) if b.ends_task] == [9, 19, 29]
    first, second = (torch.cat([b.inputs[0] for b in shown[at : at + 5]]) for at in (0, 5))
    assert not torch.equal(first, second)
    assert torch.equal(first.sum(1).sort().values, second.sum(1).sort().values)


def test_test_images_are_shown_as_the_task_shows_them():
    problem = Problem(config(problem="permutations"), [0])
    plain, labels = problem.test.images, problem.test.labels
    inputs, found = (one[0] for one in next(problem.test_sets(2)))
    assert torch.equal(found, labels)
    order = problem._tasks[0][2].transform.order
    expected = torch.tensor(plain).flatten(1)[:, order].float() / 255
    torch.testing.assert_close(inputs, expected)
    few = [x[0] for x, _ in problem.test_sets(2, limit=7, chunk=3)]
    assert [len(x) for x in few] == [3, 3, 1]
    assert torch.equal(torch.cat(few), inputs[:7])
    assert len(set(found[:20].tolist())) > 2  # not sorted by class


def test_split_tests_only_the_classes_of_the_task():
    problem = Problem(config(problem="split", classes=6), [0])
    assert problem.tasks == 3
    for task in range(3):
        assert set(next(problem.test_sets(task))[1][0].tolist()) == {2 * task, 2 * task + 1}
    assert set(problem.batch(0).labels.flatten().tolist()) <= {0, 1}


def test_rotated_pixels_stay_bytes():
    problem = Problem(config(), [0])
    inputs = next(problem.test_sets(1))[0][0]
    assert torch.equal((inputs * 255).round() / 255, inputs)
    assert inputs.max() <= 1
    assert inputs.min() >= 0


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="glances must be at least 1"):
        config(glances=0)
    with pytest.raises(ConfigError, match="is for flat images"):
        config(model="cifar_net")
    with pytest.raises(DataError, match="cannot be drawn from"):
        Problem(config(examples=100_000), [0])
    with pytest.raises(ConfigError, match="training classes"):
        Problem(config(classes=100_000), [0])


@pytest.mark.parametrize(
    ("tested", "error", "message"),
    [
        ([0, 0, 1, 2, 3], ConfigError, "tasks of different lengths"),  # class 0 has more test images than others
        ([0, 1, 2], DataError, "tasks without test images"),
    ],
)
def test_tasks_that_cannot_be_tested_alike_are_refused(tested, error, message, monkeypatch):
    part = lambda labels: Labelled(np.zeros((len(labels), 4, 4, 1), np.uint8), torch.tensor(labels))  # noqa: E731
    both = part([0, 1, 2, 3] * 8), part(tested), 4
    monkeypatch.setattr("wheretolearn.continual.problem.train_and_test", lambda images, config: both)
    own = config(problem="split", class_order="shuffled", classes_per_task=1)
    with pytest.raises(error, match=message):
        Problem(own, list(range(6)))
