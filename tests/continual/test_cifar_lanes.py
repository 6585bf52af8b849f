"""Convolutional networks of all lanes in closed form against any module with autograd."""

import pytest
import torch

from wheretolearn.continual.cifar_lanes import CifarLanes
from wheretolearn.continual.lanes import ModuleLanes
from wheretolearn.models import build

LANES, EXAMPLES, STEPS = 3, 7, 4


def networks(side):
    models = [build("cifar_net", ways=5, width=6, hidden=8, size=side, seed=seed).double() for seed in range(LANES)]
    for model in models:  # biases start at zero: move them, or their part is not tested
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(1))
    return ModuleLanes(models), CifarLanes(models)


def examples(side):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(LANES, EXAMPLES, 3, side, side, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 5, (LANES, EXAMPLES), generator=generator)
    shares = torch.rand(LANES, EXAMPLES, dtype=torch.float64, generator=generator)
    shares[:, -1] = 0  # a place in memory that is still empty
    return inputs, labels, shares


def assert_close(found, expected):
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("side", [16, 13], ids=["even", "odd"])
def test_closed_form_equals_autograd(side):
    slow, fast = networks(side)
    inputs, labels, shares = examples(side)
    assert torch.equal(fast.weights, slow.weights)
    assert_close(fast.logits(fast.weights, inputs), slow.logits(slow.weights, inputs))
    for weighing in (None, shares):
        expected = slow.gradient(slow.weights, inputs, labels, weighing)
        assert_close(fast.gradient(fast.weights, inputs, labels, weighing), expected)


@pytest.mark.parametrize("every", [True, False], ids=["every step", "final step"])
@pytest.mark.parametrize("steps", [1, STEPS])
def test_look_ahead_equals_the_readable_one(every, steps):
    slow, fast = networks(13)
    inputs, labels, shares = examples(13)
    rates = torch.rand(fast.weights.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) / 10
    found = fast.look_ahead(fast.weights, rates, inputs, labels, shares, steps, every)
    expected = slow.look_ahead(slow.weights, rates, inputs, labels, shares, steps, every)
    for one, two in zip(found, expected, strict=True):
        assert_close(one, two)


def test_nothing_given_is_changed():
    _, fast = networks(13)
    inputs, labels, shares = examples(13)
    rates = torch.full_like(fast.weights, 0.1)
    given = [fast.weights, rates, inputs, labels, shares]
    before = [tensor.clone() for tensor in given]
    fast.look_ahead(*given, STEPS, True)
    fast.gradient(fast.weights, inputs, labels, shares)
    assert all(torch.equal(one, two) for one, two in zip(given, before, strict=True))
