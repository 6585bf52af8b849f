import numpy as np
import pytest
import torch

from wheretolearn.data import streams
from wheretolearn.data.streams import OnlineStream, Permutation, Rotation, Task
from wheretolearn.errors import ConfigError, DataError

LABELS = np.repeat(np.arange(10), 30)
SOURCES = (np.arange(0, 40 * 20 + 1, 20), np.arange(0, 7001, 700), np.arange(0, 6001, 600))


def is_even(counts: torch.Tensor, shares: list[float] | None = None) -> bool:
    """Chi-square: whether the counts fit their expected shares to within five deviations."""
    weights = torch.ones(len(counts)) if shares is None else torch.tensor(shares)
    expected = counts.sum() * weights / weights.sum()
    freedom = len(counts) - 1
    return bool(((counts - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5)


def is_uniform(numbers: torch.Tensor) -> bool:
    """Kolmogorov-Smirnov: whether the empirical distribution keeps close to that of [0, 1)."""
    ranks = torch.arange(1, len(numbers) + 1) / len(numbers)
    return bool((numbers.double().sort().values - ranks).abs().max() < 2 / len(numbers) ** 0.5)


def same_indices(one: list[Task], other: list[Task]) -> bool:
    return all(torch.equal(a.train_indices, b.train_indices) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("make", [streams.rotations, streams.permutations])
def test_each_task_shows_different_images_of_its_own(make) -> None:
    tasks = make(5_000, tasks=4, examples=1000, seed=0)
    assert len(tasks) == 4
    for task in tasks:
        assert len(task.train_indices.unique()) == len(task.train_indices) == 1000
        assert task.train_indices.min() >= 0
        assert task.train_indices.max() < 5_000
    assert not torch.equal(tasks[0].train_indices, tasks[1].train_indices)
    assert same_indices(tasks, make(5_000, tasks=4, examples=1000, seed=0))
    assert not same_indices(tasks, make(5_000, tasks=4, examples=1000, seed=1))


def test_examples_are_drawn_uniformly_from_all_images() -> None:
    tasks = streams.rotations(50, tasks=400, examples=10, seed=0)
    counts = torch.cat([task.train_indices for task in tasks]).bincount(minlength=50)
    assert is_even(counts)
    first = torch.stack([task.train_indices[0] for task in tasks])
    assert first.double().mean().item() == pytest.approx(24.5, abs=4)


def test_a_task_cannot_show_more_images_than_there_are() -> None:
    with pytest.raises(DataError, match="examples=1000 cannot be drawn from 999"):
        streams.rotations(999, seed=0)


@pytest.mark.parametrize("images", [torch.rand(2, 30), torch.rand(2, 4, 4), torch.ones(2, 16, dtype=torch.uint8)])
def test_rotation_refuses_what_is_not_flat_square_and_float(images: torch.Tensor) -> None:
    with pytest.raises(DataError, match="turn"):
        Rotation(30.0)(images)


def test_rotation_angles_lie_in_the_slice_of_their_task() -> None:
    for seed in range(20):
        angles = [task.transform.degrees for task in streams.rotations(10, examples=10, seed=seed)]
        assert len(angles) == 20
        assert all(9 * number <= angle < 9 * (number + 1) for number, angle in enumerate(angles))
    others = [task.transform.degrees for task in streams.rotations(10, examples=10, seed=0)]
    assert others != angles


def test_rotation_angles_are_uniform_in_their_slice() -> None:
    angles = [task.transform.degrees for task in streams.rotations(1, tasks=1000, examples=1, seed=0)]
    parts = torch.tensor(angles, dtype=torch.float64) / 0.18 - torch.arange(1000)
    assert is_uniform(parts)


def test_rotation_turns_flattened_images() -> None:
    image = torch.zeros(1, 5, 5)
    image[0, 0, 2] = 1  # top
    turned = Rotation(90)(image.reshape(1, 25)).reshape(5, 5)
    assert turned[2, 0].item() == pytest.approx(1)  # left


def test_permutations_reorder_pixels_each_in_its_own_way() -> None:
    tasks = streams.permutations(100, tasks=5, examples=100, seed=0)
    orders = [task.transform.order for task in tasks]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(784))
        assert (order == torch.arange(784)).float().mean() < 0.05
    assert len({tuple(order.tolist()) for order in orders}) == 5
    images = torch.rand(3, 784)
    assert torch.equal(tasks[0].transform(images), torch.stack([row[orders[0]] for row in images]))
    other = streams.permutations(100, tasks=5, examples=100, seed=1)
    assert not torch.equal(other[0].transform.order, orders[0])


def test_permutation_of_known_order() -> None:
    assert Permutation(torch.tensor([2, 0, 1]))(torch.tensor([[5.0, 6.0, 7.0]])).tolist() == [[7.0, 5.0, 6.0]]


def test_split_shows_every_image_once_in_tasks_of_two_classes() -> None:
    tasks = streams.split_classes(LABELS, seed=0)
    assert [task.classes for task in tasks] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    for task in tasks:
        assert set(LABELS[task.train_indices.numpy()].tolist()) == set(task.classes)
    shown = torch.cat([task.train_indices for task in tasks])
    assert torch.equal(shown.sort().values, torch.arange(len(LABELS)))


def test_split_shuffles_images_within_a_task_by_seed() -> None:
    tasks = streams.split_classes(LABELS, seed=0)
    first_half = LABELS[tasks[0].train_indices[:30].numpy()]
    assert 5 < first_half.sum() < 25
    assert same_indices(tasks, streams.split_classes(torch.from_numpy(LABELS), seed=0))
    assert not same_indices(tasks, streams.split_classes(LABELS, seed=1))


def test_split_may_draw_the_order_of_classes() -> None:
    tasks = streams.split_classes(LABELS, classes_per_task=5, seed=0, order="shuffled")
    assert sorted(tasks[0].classes + tasks[1].classes) == list(range(10))
    assert tasks[0].classes != tuple(range(5))
    assert set(LABELS[tasks[1].train_indices.numpy()].tolist()) == set(tasks[1].classes)
    other = streams.split_classes(LABELS, classes_per_task=5, seed=1, order="shuffled")
    assert tasks[0].classes != other[0].classes


def test_split_refuses_uneven_tasks_and_unknown_orders() -> None:
    with pytest.raises(ConfigError, match="10 classes cannot be split into tasks of 3"):
        streams.split_classes(LABELS, classes_per_task=3, seed=0)
    with pytest.raises(ConfigError, match="'random'; choose one of fixed, shuffled"):
        streams.split_classes(LABELS, seed=0, order="random")


def test_batches_of_no_task_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 task"):
        streams.batches([], seed=0)


def test_batches_cover_each_task_once_per_epoch() -> None:
    tasks = streams.split_classes(LABELS, seed=0)
    drawn = streams.batches(tasks, batch=10, epochs=3, seed=0)
    assert drawn.indices.shape == (5 * 3 * 6, 1, 10)
    assert drawn.task.tolist() == sorted(drawn.task.tolist())
    passes = []
    for number, task in enumerate(tasks):
        for epoch in range(3):
            shown = drawn.indices[(drawn.task == number) & (drawn.epoch == epoch)]
            assert torch.equal(shown.flatten().sort().values, task.train_indices.sort().values)
            passes.append(tuple(shown.sort().values.flatten().tolist()))
    assert len(set(passes)) == len(passes)  # each epoch cuts other batches


def test_glances_show_the_same_batch_in_other_orders() -> None:
    tasks = streams.split_classes(LABELS, seed=0)
    drawn = streams.batches(tasks, batch=10, glances=5, seed=0)
    assert drawn.indices.shape == (30, 5, 10)
    ordered = drawn.indices.sort().values
    assert torch.equal(ordered, ordered[:, :1].expand(-1, 5, -1))
    assert len({tuple(row) for row in drawn.indices.flatten(0, 1).tolist()}) == 150
    # More glances leave the schedule of batches alone.
    single = streams.batches(tasks, batch=10, glances=1, seed=0)
    assert torch.equal(single.indices.sort().values, ordered[:, :1])


def test_batches_depend_on_the_seed_alone() -> None:
    tasks = streams.split_classes(LABELS, seed=0)
    drawn = streams.batches(tasks, seed=0)
    assert torch.equal(drawn.indices, streams.batches(tasks, seed=0).indices)
    assert not torch.equal(drawn.indices, streams.batches(tasks, seed=1).indices)


def test_a_remainder_is_left_out_and_a_task_below_one_batch_refused() -> None:
    drawn = streams.batches([Task(torch.arange(25))], batch=10, seed=0)
    assert len(drawn.indices.flatten().unique()) == 20
    with pytest.raises(DataError, match="task 1 has 9 images"):
        streams.batches([Task(torch.arange(25)), Task(torch.arange(9))], batch=10, seed=0)
    with pytest.raises(ConfigError, match="glances"):
        streams.batches([Task(torch.arange(25))], glances=0, seed=0)


@pytest.fixture(scope="module")
def online() -> OnlineStream:
    return streams.osaka(SOURCES, p=0.9, seed=0)


def test_osaka_shapes(online: OnlineStream) -> None:
    assert online.source.shape == online.switched.shape == (10_000,)
    assert online.images.shape == (10_000, 50)
    assert online.classes.shape == (10_000, 10)
    assert online.labels.tolist() == [label for label in range(10) for _ in range(5)]


def test_osaka_changes_task_with_probability_one_minus_p(online: OnlineStream) -> None:
    assert online.switched[0]
    # 10,000 draws at 0.1: a deviation of 0.003.
    assert online.switched.float().mean().item() == pytest.approx(0.1, abs=0.012)
    # Runs between changes are geometric: their lengths deviate from their mean of 10 by sqrt(90).
    lengths = online.switched.nonzero().flatten().diff().double()
    assert lengths.std().item() == pytest.approx(90**0.5, rel=0.15)


def test_osaka_keeps_a_task_until_it_changes(online: OnlineStream) -> None:
    stay = ~online.switched[1:]
    assert torch.equal(online.source[1:][stay], online.source[:-1][stay])
    assert torch.equal(online.classes[1:][stay], online.classes[:-1][stay])
    change = online.switched[1:]
    assert (online.classes[1:][change] != online.classes[:-1][change]).any(1).all()


def test_osaka_draws_sources_by_their_weights(online: OnlineStream) -> None:
    tasks = online.source[online.switched].bincount(minlength=3)
    assert is_even(tasks, [0.5, 0.25, 0.25])


def test_osaka_images_are_of_the_labelled_class_and_differ(online: OnlineStream) -> None:
    per_class = torch.tensor([20, 700, 600])[online.source].unsqueeze(1)
    assert torch.equal(online.images // per_class, online.classes[:, online.labels])
    assert (online.images.sort().values.diff() > 0).all()
    assert (online.classes.sort().values.diff() > 0).all()


def test_osaka_draws_classes_labels_and_images_uniformly(online: OnlineStream) -> None:
    omniglot = online.source == 0
    first_class = online.classes[online.switched & omniglot][:, 0].bincount(minlength=40)
    assert is_even(first_class)
    mnist = online.classes[online.switched & (online.source == 1)]
    assert is_even(mnist[:, 3].bincount(minlength=10))
    drawing = (online.images[omniglot][:, ::5] % 20).flatten().bincount(minlength=20)
    assert is_even(drawing)


def test_osaka_shows_new_images_at_every_step(online: OnlineStream) -> None:
    assert (online.images[1:] != online.images[:-1]).any(1).all()


def test_osaka_is_a_function_of_the_seed(online: OnlineStream) -> None:
    again = streams.osaka(SOURCES, p=0.9, seed=0, steps=600)
    assert torch.equal(again.images, online.images[:600])
    assert torch.equal(again.switched, online.switched[:600])
    other = streams.osaka(SOURCES, p=0.9, seed=1, steps=600)
    assert not torch.equal(other.switched, again.switched)
    assert not torch.equal(other.images, again.images)


def test_osaka_stays_for_ever_or_never() -> None:
    assert streams.osaka(SOURCES, p=1.0, steps=500, seed=0).switched.sum() == 1
    assert streams.osaka(SOURCES, p=0.0, steps=500, seed=0).switched.all()


def test_osaka_names_a_source_that_does_not_fit() -> None:
    with pytest.raises(DataError, match="fashion-mnist has 9 classes; 10 are needed"):
        streams.osaka([SOURCES[0], SOURCES[1][:10]], weights=(0.5, 0.5), p=0.9, seed=0, names=["o", "fashion-mnist"])
    with pytest.raises(DataError, match="source 0: class 0 has 4 images; 5 per class"):
        streams.osaka([np.arange(0, 81, 4)], weights=(1.0,), p=0.9, seed=0)


def test_osaka_needs_sources_and_a_name_for_each() -> None:
    with pytest.raises(ConfigError, match="at least 1 source"):
        streams.osaka([], weights=(), p=0.9, seed=0)
    with pytest.raises(ConfigError, match="names must be 3, one per source, not 2"):
        streams.osaka(SOURCES, p=0.9, seed=0, names=["omniglot", "mnist"])


def test_osaka_draws_images_independently_of_classes() -> None:
    # One source whose classes hold as many images as there are classes: a shared key would tie the two draws.
    stream = streams.osaka([np.arange(0, 401, 20)], weights=(1.0,), p=0.0, ways=1, shots=1, steps=10_000, seed=0)
    pairs = stream.classes[:, 0] * 20 + stream.images[:, 0] % 20
    assert is_even(pairs.bincount(minlength=400))


def test_osaka_checks_its_probabilities() -> None:
    with pytest.raises(ConfigError, match="3 probabilities"):
        streams.osaka(SOURCES, weights=(0.5, 0.5), p=0.9, seed=0)
    with pytest.raises(ConfigError, match="p between 0 and 1"):
        streams.osaka(SOURCES, p=98, seed=0)
