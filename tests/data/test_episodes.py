import numpy as np
import pytest
import torch

from wheretolearn.data.episodes import EpisodeBatch, EpisodeSampler, EpisodeShape
from wheretolearn.errors import ConfigError, DataError

UNEQUAL = np.array([20, 31, 32, 20, 57, 20, 24, 40])
SHAPE = EpisodeShape(ways=5, shots=3, queries=15)


def is_even(counts: torch.Tensor, shares: list[float] | None = None) -> bool:
    """Chi-square: whether the counts fit their expected shares to within five deviations."""
    weights = torch.ones(len(counts)) if shares is None else torch.tensor(shares)
    expected = counts.sum() * weights / weights.sum()
    freedom = len(counts) - 1
    return bool(((counts - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5)


def offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)])


def sampler(sizes: np.ndarray = UNEQUAL, shape: EpisodeShape = SHAPE, **settings: object) -> EpisodeSampler:
    return EpisodeSampler(offsets(sizes), shape, **({"seed": 0} | settings))


def same(one: EpisodeBatch, other: EpisodeBatch) -> bool:
    return torch.equal(one.support, other.support) and torch.equal(one.query, other.query)


def test_shapes_and_labels() -> None:
    batch = sampler().sample(0, tasks=4)
    assert batch.support.shape == (4, 15)
    assert batch.query.shape == (4, 75)
    assert batch.classes.shape == (4, 5)
    assert batch.support_labels.tolist() == [label for label in range(5) for _ in range(3)]
    assert batch.query_labels.tolist() == [label for label in range(5) for _ in range(15)]


def test_images_belong_to_the_class_behind_their_label() -> None:
    class_of = torch.from_numpy(np.repeat(np.arange(len(UNEQUAL)), UNEQUAL))
    batch = sampler().sample(3, tasks=50)
    assert torch.equal(class_of[batch.support], batch.classes[:, batch.support_labels])
    assert torch.equal(class_of[batch.query], batch.classes[:, batch.query_labels])


def test_nothing_occurs_twice_in_a_task() -> None:
    batch = sampler().sample(1, tasks=50)
    assert (batch.classes.sort().values.diff() > 0).all()
    images = torch.cat([batch.support, batch.query], dim=1)
    assert (images.sort().values.diff() > 0).all()


def test_seed_stream_and_step_decide_alone() -> None:
    first = sampler().sample(7, tasks=4)
    assert same(first, sampler().sample(7, tasks=4))
    assert not same(first, sampler().sample(8, tasks=4))
    assert not same(first, sampler(seed=1).sample(7, tasks=4))
    assert not same(first, sampler(stream="validation").sample(7, tasks=4))
    assert not torch.equal(first.classes, sampler(stream="validation").sample(7, tasks=4).classes)


def test_tasks_of_a_step_differ() -> None:
    support = sampler(np.full(64, 600)).sample(0, tasks=100).support
    assert len({tuple(row) for row in support.tolist()}) == 100


def test_a_tensor_step_draws_the_same() -> None:
    assert same(sampler().sample(12, tasks=3), sampler().sample(torch.tensor(12), tasks=3))


def test_the_first_tasks_do_not_depend_on_how_many_are_drawn() -> None:
    few, many = sampler().sample(2, tasks=3), sampler().sample(2, tasks=30)
    assert torch.equal(few.support, many.support[:3])
    assert torch.equal(few.query, many.query[:3])


def test_classes_and_images_are_drawn_uniformly() -> None:
    drawn = sampler(shape=EpisodeShape(ways=1, shots=1, queries=0)).sample(0, tasks=20_000)
    counts = drawn.classes.flatten().bincount(minlength=len(UNEQUAL))
    assert is_even(counts)
    # Within the largest and the smallest class alike, each image is as likely as the next.
    for label in (4, 0):
        images = drawn.support[drawn.classes == label] - int(offsets(UNEQUAL)[label])
        assert is_even(images.bincount(minlength=UNEQUAL[label]))


def test_the_choice_of_images_does_not_follow_the_choice_of_classes() -> None:
    one = sampler(np.full(8, 8), EpisodeShape(ways=1, shots=1, queries=0))
    batches = [one.sample(step, tasks=1) for step in range(800)]
    alike = sum(int(batch.support % 8 == batch.classes) for batch in batches)
    assert 60 < alike < 140


def test_classes_get_each_label_equally_often() -> None:
    classes = sampler(np.full(5, 18)).sample(0, tasks=5_000).classes
    assert is_even(classes[:, 0].bincount(minlength=5))


def test_a_class_of_just_enough_images_is_used_whole() -> None:
    batch = sampler(np.full(5, 18)).sample(0, tasks=2)
    images = torch.cat([batch.support, batch.query], dim=1)
    assert torch.equal(images.sort().values, torch.arange(90).expand(2, -1))


def test_offsets_may_be_a_tensor_that_starts_late() -> None:
    late = EpisodeSampler(torch.from_numpy(offsets(UNEQUAL)) + 1000, SHAPE, seed=0).sample(0, tasks=2)
    assert torch.equal(late.support, sampler().sample(0, tasks=2).support + 1000)


def test_a_small_class_is_named() -> None:
    sizes = UNEQUAL.copy()
    sizes[2] = 17
    with pytest.raises(DataError, match=r"birds/train: class 2 \(heron\) has 17 images; 18 per class"):
        sampler(sizes, name="birds/train", class_names=["a", "b", "heron", "d", "e", "f", "g", "h"])
    with pytest.raises(DataError, match="class 2 has 17 images"):
        sampler(sizes)


def test_too_few_classes_are_counted() -> None:
    with pytest.raises(DataError, match="birds/train has 4 classes; 5 are needed"):
        sampler(np.full(4, 20), name="birds/train")


def test_offsets_must_rise() -> None:
    with pytest.raises(DataError, match="class offsets"):
        EpisodeSampler(np.array([0, 20, 10, 40]), SHAPE, seed=0)


def test_an_empty_episode_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 shots"):
        EpisodeShape(ways=5, shots=0, queries=15)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_draws_the_episodes_of_each_step() -> None:
    on_gpu = sampler(device="cuda")
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        on_gpu.sample(step, tasks=4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = on_gpu.sample(step, tasks=4)
    for number in (0, 1, 77):
        step.fill_(number)
        graph.replay()
        expected = sampler().sample(number, tasks=4)
        assert torch.equal(drawn.support.cpu(), expected.support)
        assert torch.equal(drawn.query.cpu(), expected.query)
