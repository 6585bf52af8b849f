"""Conv4's passes written out for a CPU, against the same arithmetic by autograd, and against float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wheretolearn import batch_norm, masks
from wheretolearn.engine import fused
from wheretolearn.engine.choose import make_engine, make_evaluator
from wheretolearn.engine.compiled import CompiledArithmetic
from wheretolearn.engine.conv4_cpu import Conv4OnCPU, Pass, Patches, supports
from wheretolearn.engine.graphed import Job
from wheretolearn.engine.task import InnerLoop, Lane, Task
from wheretolearn.errors import ConfigError, MismatchError, NonFiniteError
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


def hooked(model):
    model.block2.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)


CHANGES = {
    "another activation": lambda model: setattr(model.block1, "relu", nn.ELU()),
    "another norm": lambda model: setattr(model.block2, "norm", nn.GroupNorm(2, 6)),
    "another pooling": lambda model: setattr(model.block4, "pool", nn.AvgPool2d(2)),
    "another eps": lambda model: setattr(model.block2.norm, "eps", 0.5),
    "other padding": lambda model: setattr(model.block1.conv, "padding_mode", "reflect"),
    "a head without bias": lambda model: setattr(model, "head", nn.Linear(6, WAYS, bias=False)),
    "a longer head": lambda model: setattr(model, "head", nn.Sequential(nn.Dropout(0), nn.Linear(6, WAYS))),
    "shared weights": lambda model: setattr(model.block3.conv, "weight", model.block2.conv.weight),
    "parametrized weights": lambda model: nn.utils.parametrizations.weight_norm(model.head),
    "a forward of its own": lambda model: setattr(model, "forward", lambda x: 2 * type(model).forward(model, x)),
    "a hook": hooked,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_networks_go_the_readable_way(change):
    model = network()
    assert supports(model)
    CHANGES[change](model)
    assert not supports(model)
    assert "other layers" in fused.unsupported(model, InnerLoop(1, 0.1))
    (lane,) = lanes = [Lane(model, masks.fixed(model), None, None, InnerLoop(1, 0.1))]
    assert make_engine(lanes)._arithmetics == [None]
    tasks = [task(model.double(), images=4)] if change != "a longer head" else []
    for one in tasks:
        readable = make_evaluator(model, lane.mask, lane.inner, kind="eager").probabilities([one], 2)
        assert torch.equal(make_evaluator(model, lane.mask, lane.inner).probabilities([one], 2), readable)


def test_networks_are_unchanged_whatever_batch_norm_keeps():
    model = network(bias=False)
    state = torch.get_rng_state()
    assert supports(model.to(memory_format=torch.channels_last))
    batch_norm.fix_mode(model, "batch")
    assert supports(model)
    assert torch.equal(state, torch.get_rng_state())
    assert not supports(network(t_net=True))


def test_filters_that_cancel_what_varies():
    """Tinted images: rounding may leave their variance below zero."""
    grey = task(network(channels=1)).support_inputs.float() * 255
    model = network(torch.float32, channels=3)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    filters = weights["block1.conv.weight"]
    filters[:, 2] = -(filters[:, 0] + 0.59 * filters[:, 1]) / 0.31
    inputs = torch.cat([grey, 0.59 * grey, 0.31 * grey], dim=1)
    for images in (inputs, inputs + torch.randn(inputs.shape, generator=torch.Generator().manual_seed(4)) * 1e-5):
        assert Pass(weights, Patches(images), eps=1e-5).logits.isfinite().all()


OTHER_LABELS = {
    "uint8": lambda labels: labels.to(torch.uint8),
    "shares": lambda labels: F.one_hot(labels, WAYS).double(),
    "left out": lambda labels: labels.where(labels != 1, -100),
}


@pytest.mark.parametrize("labels", OTHER_LABELS.values(), ids=OTHER_LABELS)
def test_other_labels(labels):
    model = network()
    plain = task(model)
    other = Task(plain.support_inputs, labels(plain.support_labels), plain.query_inputs, labels(plain.query_labels))
    losses = []
    for kind in ("eager", "auto"):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = make_engine(
            [Lane(model, masks.fixed(model), optimizer, lambda step: [other], InnerLoop(2, 0.1))], kind=kind
        )
        engine.outer_step([0])
        losses += engine.last_losses()
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


def test_what_adapt_refuses_is_refused():
    model, other = network(), network(width=1)
    evaluator = make_evaluator(model, masks.fixed(model), InnerLoop(1, 0.1))
    with pytest.raises(ConfigError, match="not negative, got -1"):
        evaluator.accuracies([task(model)], -1)
    with pytest.raises(ConfigError, match="inner_lr must be a finite number"):
        make_evaluator(model, masks.fixed(model), InnerLoop(1, float("nan"))).accuracies([task(model)], 1)
    with pytest.raises(MismatchError, match="made for another model"):
        make_evaluator(model, masks.fixed(other), InnerLoop(1, 0.1)).accuracies([task(model)], 1)


def test_squares_that_overflow_are_explained():
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lane = Lane(model, masks.fixed(model), optimizer, lambda step: [task(model)], InnerLoop(5, 1e7))
    with pytest.raises(NonFiniteError, match=r"outer step 1, task 0, (inner step \d|query pass)"):
        make_engine([lane]).outer_step([0])


def test_frozen_weights_are_those_that_the_model_then_has():
    model, other = network(), network(seed=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("block4", "head")))
    evaluators = [make_evaluator(model, masks.fixed(model), InnerLoop(1, 0.1), kind=kind) for kind in ("eager", "auto")]
    model.load_state_dict(other.state_dict())
    one, two = (evaluator.probabilities([task(model)], 2) for evaluator in evaluators)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-9)


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
