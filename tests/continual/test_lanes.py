"""Perceptrons of all lanes in closed form against any module with autograd."""

import pytest
import torch

from wheretolearn.continual.lanes import ModuleLanes
from wheretolearn.continual.mlp_lanes import MLPLanes
from wheretolearn.models import build

LANES, EXAMPLES = 3, 9


def networks(sizes, lanes=LANES):
    models = [build("mlp", sizes=sizes, seed=seed).double() for seed in range(lanes)]
    for model in models:  # biases start at zero: move them, or their part is not tested
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(1))
    return ModuleLanes(models), MLPLanes(models)


def examples(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(LANES, EXAMPLES, sizes[0], dtype=torch.float64, generator=generator)
    labels = torch.randint(0, sizes[-1], (LANES, EXAMPLES), generator=generator)
    shares = torch.rand(LANES, EXAMPLES, dtype=torch.float64, generator=generator)
    return inputs, labels, shares


def named(network, flat):
    return {name: view.clone() for name, view in network.views(flat).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sizes", [(30, 8, 7, 5), (12, 6, 4), (10, 3)], ids=["two hidden", "one hidden", "linear"])
def test_closed_form_equals_autograd(sizes):
    slow, fast = networks(sizes)
    inputs, labels, shares = examples(sizes)
    assert_same(named(fast, fast.weights), named(slow, slow.weights))
    torch.testing.assert_close(fast.logits(fast.weights, inputs), slow.logits(slow.weights, inputs))
    for weighing in (None, shares):
        expected = slow.gradient(slow.weights, inputs, labels, weighing)
        assert_same(named(fast, fast.gradient(fast.weights, inputs, labels, weighing)), named(slow, expected))


@pytest.mark.parametrize("sizes", [(30, 8, 7, 5), (12, 6, 4), (10, 3)], ids=["two hidden", "one hidden", "linear"])
@pytest.mark.parametrize("every", [True, False], ids=["every step", "final step"])
def test_look_ahead_without_forming_the_first_layer_equals_the_readable_one(sizes, every):
    slow, fast = networks(sizes)
    inputs, labels, shares = examples(sizes)
    generator = torch.Generator().manual_seed(5)
    rates = {
        name: torch.rand(v.shape, dtype=v.dtype, generator=generator) for name, v in named(slow, slow.weights).items()
    }
    by_lane = [{name: v[lane] for name, v in rates.items()} for lane in range(LANES)]
    steps = 5
    found = fast.look_ahead(fast.weights, fast.load(by_lane), inputs, labels, shares, steps, every)
    expected = slow.look_ahead(slow.weights, slow.load(by_lane), inputs, labels, shares, steps, every)
    for one, two in zip(found, expected, strict=True):
        assert_same(named(fast, one), named(slow, two))
        assert two.abs().max() > 0.01


def test_lanes_do_not_see_each_other():
    sizes = (12, 6, 4)
    _, fast = networks(sizes)
    inputs, labels, shares = examples(sizes)
    rates = torch.full_like(fast.weights, 0.1)
    together = fast.look_ahead(fast.weights, rates, inputs, labels, shares, 4, True)
    for lane in range(LANES):
        own = slice(lane, lane + 1)
        alone = fast.look_ahead(fast.weights[own], rates[own], inputs[own], labels[own], shares[own], 4, True)
        for one, two in zip(together, alone, strict=True):
            torch.testing.assert_close(one[own], two, rtol=1e-12, atol=1e-14)
