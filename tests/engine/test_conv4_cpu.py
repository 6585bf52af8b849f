"""Conv4's passes written out for a CPU, against the same arithmetic by autograd, and against float64."""

import pytest
import torch
from torch.nn import functional as F

from wheretolearn import batch_norm
from wheretolearn.engine.compiled import CompiledArithmetic
from wheretolearn.engine.conv4_cpu import Conv4OnCPU, Pass, Patches, supports
from wheretolearn.engine.graphed import Job
from wheretolearn.engine.task import Task
from wheretolearn.models import build

WAYS = 4


def network(dtype=torch.float64, **settings):
    """Scales of either sign, shifts and biases other than zero."""
    model = build("conv4", **{"ways": WAYS, "channels": 1, "size": 16, "width": 6, "seed": 0, **settings})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def task(model, images=9):
    generator = torch.Generator().manual_seed(2)
    shape = (2, images, model.block1.conv.in_channels, model.image_size, model.image_size)
    # A mean that is not zero and a black border, as drawings have; other images to be judged by.
    support, query = F.pad(torch.rand(shape, generator=generator)[..., 2:-2, 2:-2] + 0.5, (2, 2, 2, 2))
    labels = torch.arange(images) % WAYS
    dtype = model.head.weight.dtype
    return Task(support.to(dtype), labels, query.to(dtype), labels.flip(0))


def job_of(model, selected=lambda name: True):
    theta = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(3)
    rates = {
        name: 0.2 * torch.rand(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in theta.items()
        if selected(name)
    }
    return Job(theta, rates, task(model))


def assert_same(one, two, tolerance=1e-9):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert (tensor - two[name]).abs().max() <= tolerance * (1 + two[name].abs().max()), name


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"channels": 3, "size": 30, "width": 5},
        {"size": 33},
        {"bias": False},
        {"channels": 3, "size": 84, "width": 2},
    ],
    ids=str,
)
def test_meta_gradients_equal_those_of_autograd(settings):
    model = network(**settings)
    job, autograd = job_of(model), CompiledArithmetic(model, compiled=False)
    (mine,), (expected,) = (arithmetic.meta_gradients([job], 3) for arithmetic in (Conv4OnCPU(model), autograd))
    torch.testing.assert_close(mine.loss, expected.loss)
    assert_same(mine.inner_sum, expected.inner_sum)
    assert_same(mine.outer, expected.outer)
    assert all(expected.outer[name].abs().max() > 1e-4 for name in expected.outer if not name.endswith("conv.bias"))


@pytest.mark.parametrize(
    "selected",
    [
        lambda name: "head" in name,
        lambda name: "block1" not in name and "block2" not in name,
        lambda name: "norm" not in name,
        lambda name: name == "block2.norm.bias",
    ],
    ids=["head", "upper half", "all but batch norm", "one shift"],
)
def test_weights_without_rates_stay(selected):
    model = network()
    model.block3.conv.weight.requires_grad_(False)  # in no job's theta: the network's own
    job, autograd, mine = job_of(model, selected), CompiledArithmetic(model, compiled=False), Conv4OnCPU(model)
    (found,), (expected,) = (arithmetic.adaptations([job], 3) for arithmetic in (mine, autograd))
    adapted = found.weights
    assert adapted.keys() == job.rates.keys()
    assert all((adapted[name] != job.theta[name]).any() for name in adapted if not name.endswith("conv.bias"))
    assert_same(adapted, expected.weights)
    assert_same({"before": found.before, "loss": found.loss}, {"before": expected.before, "loss": expected.loss})
    assert_same(mine.meta_gradients([job], 3)[0].outer, autograd.meta_gradients([job], 3)[0].outer)
    torch.testing.assert_close(mine.probabilities([job, job], 3), autograd.probabilities([job, job], 3))
    weights = {**job.theta, **adapted}
    torch.testing.assert_close(
        mine.logits(weights, job.task.query_inputs), autograd.logits(weights, job.task.query_inputs)
    )


def test_blocks_that_no_inner_step_changes_are_passed_once(monkeypatch):
    passed = []
    first, later = Pass._first, Pass._later
    monkeypatch.setattr(Pass, "_first", lambda self, eps: (passed.append(1), first(self, eps))[1])
    monkeypatch.setattr(Pass, "_later", lambda self, n, eps: (passed.append(n), later(self, n, eps))[1])
    model = network()
    for lowest in (1, 3, 5):  # 5: the head alone
        job = job_of(model, lambda name, lowest=lowest: "head" in name or int(name[len("block")]) >= lowest)
        passed.clear()
        Conv4OnCPU(model).meta_gradients([job], 3)
        assert [passed.count(n) for n in (1, 2, 3, 4)] == [(1 if n < lowest else 3) + 1 for n in (1, 2, 3, 4)]
        passed.clear()
        Conv4OnCPU(model).adaptations([job], 3)  # one more pass of what changes, for the loss at the end
        assert [passed.count(n) for n in (1, 2, 3, 4)] == [1 if n < lowest else 4 for n in (1, 2, 3, 4)]


def test_a_job_is_left_as_it_was():
    model = network()
    job = job_of(model)
    theta, rates = ({name: tensor.clone() for name, tensor in part.items()} for part in (job.theta, job.rates))
    Conv4OnCPU(model).meta_gradients([job, job], 2)
    assert all(torch.equal(job.theta[name], tensor) for name, tensor in theta.items())
    assert all(torch.equal(job.rates[name], tensor) for name, tensor in rates.items())


@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_batch_norm_is_exact_in_float32(offset):
    """At the size of the online streams, where PyTorch's, with channels innermost, is off by 5e-5 of the largest."""
    model = network(torch.float32, width=64, size=28)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    images = task(model, images=50).support_inputs + offset
    outcome = Pass(weights, Patches(images), eps=1e-5)
    exact = network(width=64, size=28)
    batch_norm.fix_mode(exact, "batch")
    for number, mine in enumerate(outcome.blocks, start=1):
        inputs = images if mine.inputs is None else mine.inputs  # each block by itself, from the inputs that it had
        with torch.no_grad():
            expected = exact.get_submodule(f"block{number}")(inputs.double())
        assert (mine.outputs - expected).abs().max() < 3e-6 * expected.max()


def test_gradients_are_exact_in_float32():
    exact = network(width=16)
    (expected,) = CompiledArithmetic(exact, compiled=False).meta_gradients([job_of(exact)], 1)
    inexact = network(torch.float32, width=16)
    (mine,) = Conv4OnCPU(inexact).meta_gradients([job_of(inexact)], 1)
    assert_same(mine.inner_sum, expected.inner_sum, 4e-6)
    assert_same(mine.outer, expected.outer, 1e-5)


def test_a_scale_of_zero():
    model = network()
    with torch.no_grad():
        model.block2.norm.weight.zero_()
    job = job_of(model)
    (mine,), (expected,) = (
        arithmetic.meta_gradients([job], 0)
        for arithmetic in (Conv4OnCPU(model), CompiledArithmetic(model, compiled=False))
    )
    # All that pooling sees is equal, so the scale's own gradient is that of whichever it takes for the largest.
    assert mine.outer.pop("block2.norm.weight").isfinite().all()
    del expected.outer["block2.norm.weight"]
    assert_same(mine.outer, expected.outer)


def test_numbers_that_overflow_are_not_hidden():
    model = network(torch.float32)
    with torch.no_grad():
        model.block3.conv.weight.mul_(1e25)
    assert not Conv4OnCPU(model).meta_gradients([job_of(model)], 0)[0].loss.isfinite()


def test_what_it_can_run():
    assert supports(network())
    assert not supports(network(t_net=True))
    assert not supports(build("mlp"))
    assert not supports(network().to("meta"))
