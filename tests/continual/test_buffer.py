import torch

from wheretolearn.continual.buffer import ReplayBuffer


def filled(seeds, size, examples, batch):
    buffer = ReplayBuffer(torch.as_tensor(seeds), size, (1,), torch.float64)
    for start in range(0, examples, batch):
        numbers = torch.arange(start, start + batch)
        labels = numbers.expand(len(buffer.seeds), -1)
        buffer.add(labels.unsqueeze(-1).double(), labels)
    return buffer


def kept(buffer):
    return buffer.state()["labels"]


def test_keeps_everything_until_full():
    buffer = filled([1, 2], 20, 20, 5)
    assert kept(buffer).sort(1).values.tolist() == [list(range(20))] * 2
    assert torch.equal(buffer.state()["inputs"][..., 0].long(), kept(buffer))


def test_every_example_is_in_memory_with_the_same_probability():
    """2000 lanes with seeds of their own: the number of times each example is kept is binomial."""
    lanes, size, examples = 2000, 10, 50
    for batch in (1, 10, 25):  # examples of one batch can compete for the same place
        buffer = filled(range(lanes), size, examples, batch)
        labels = kept(buffer)
        assert (labels.sort(1).values.diff(dim=1) > 0).all()  # nobody twice
        share = torch.bincount(labels.flatten(), minlength=examples) / lanes
        expected = size / examples
        deviation = (expected * (1 - expected) / lanes) ** 0.5
        assert (share - expected).abs().max() < 4.5 * deviation
        chi_squared = ((share - expected) ** 2).sum() / deviation**2
        assert 20 < chi_squared < 90  # about 50 degrees of freedom


def test_samples_are_different_examples_from_memory_each_equally_likely():
    buffer = filled(range(3000), 8, 8, 8)
    drawn = buffer.sample(3, 7)
    assert drawn.valid.all()
    assert (drawn.labels.sort(1).values.diff(dim=1) > 0).all()
    assert torch.equal(drawn.inputs[..., 0].long(), drawn.labels)
    share = torch.bincount(drawn.labels.flatten(), minlength=8) / 3000
    assert (share - 3 / 8).abs().max() < 0.04
    assert not torch.equal(drawn.labels, buffer.sample(3, 8).labels)
    assert torch.equal(drawn.labels, buffer.sample(3, 7).labels)


def test_what_is_not_there_yet_is_not_valid():
    buffer = ReplayBuffer(torch.tensor([0]), 10, (1,))
    assert not buffer.sample(4, 0).valid.any()
    buffer.add(torch.ones(1, 2, 1), torch.full((1, 2), 3))
    drawn = buffer.sample(4, 0)
    assert drawn.valid.tolist() == [[True, True, False, False]]
    assert drawn.labels[drawn.valid].tolist() == [3, 3]
    assert buffer.sample(40, 0).labels.shape == (1, 10)


def test_a_restored_buffer_goes_on_exactly():
    whole = filled([3, 4], 6, 40, 5)
    part = filled([3, 4], 6, 20, 5)
    restored = ReplayBuffer(torch.tensor([3, 4]), 6, (1,), torch.float64)
    restored.restore({name: t.clone() for name, t in part.state().items()})
    for start in range(20, 40, 5):
        labels = torch.arange(start, start + 5).expand(2, -1)
        restored.add(labels.unsqueeze(-1).double(), labels)
    for name, tensor in whole.state().items():
        assert torch.equal(restored.state()[name], tensor)


def test_lanes_draw_as_they_would_alone():
    both = filled([5, 9], 4, 30, 3)
    for lane, seed in enumerate((5, 9)):
        alone = filled([seed], 4, 30, 3)
        assert torch.equal(kept(both)[lane], kept(alone)[0])
        assert torch.equal(both.sample(2, 1).labels[lane], alone.sample(2, 1).labels[0])
