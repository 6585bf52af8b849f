"""C-MAML and its variants against a straightforward transcription in float64: autograd, lists, Adam by hand."""

import math

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from wheretolearn import masks
from wheretolearn.engine.compiled import CompiledArithmetic
from wheretolearn.engine.fused import FusedConv4
from wheretolearn.errors import ConfigError, DataError, NonFiniteError
from wheretolearn.models import build
from wheretolearn.online import c_maml_lanes
from wheretolearn.online.c_maml_lanes import CMAMLLanes
from wheretolearn.online.learners.batch_buffer import BatchBuffer
from wheretolearn.online.learners.c_maml import CMAML
from wheretolearn.online.learners.c_maml_masks import TensorRates, c_maml_mask
from wheretolearn.online.recorded import DIVERGED

WAYS, SHOTS, SIZE = 5, 3, 16
INNER_LR, INNER_STEPS = 0.4, 6
LR, MASK_LR, MARGIN, UPDATE_SCALE, BUFFER = 0.01, 0.03, 1.0, 0.7, 4
# Tasks by step. Each letter has a class order of its own; A has that of a, for other images: too like it to be noticed.
STREAM = "aaabcdddaaaAAAAbbbcc"
# Whether a switch is detected, and how many batches are kept then, from the fourth step on: an odd buffer, an empty
# one, a lone batch, an even buffer, a switch that goes unnoticed (A), a full buffer, an empty one, an odd one.
EVENTS = [(True, 3), (True, 0), (True, 1), (False, 0), (False, 1), (True, 2), (False, 0), (False, 1)]
EVENTS += [(False, 2), (False, 3), (False, 4), (False, 5), (True, 0), (False, 1), (False, 2), (True, 3), (False, 0)]
RESTARTS = ["at once", "next batch"]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
OTHER = "bbbbbbcccaaadddddbba"  # as long as STREAM, with switches at other steps


def network(dtype=torch.float64, width=6):
    return build("conv4", ways=WAYS, channels=1, size=SIZE, width=width, seed=0).to(dtype)


def batches(stream, dtype=torch.float64, noise=0.3):
    generator = torch.Generator().manual_seed(1)
    prototypes, change = torch.randn(2, WAYS, 1, SIZE, SIZE, generator=generator, dtype=dtype)
    labels = torch.arange(WAYS).repeat_interleave(SHOTS)
    for task in stream:
        drawn = torch.randn(WAYS * SHOTS, 1, SIZE, SIZE, generator=generator, dtype=dtype)
        shown = prototypes + 0.5 * change if task.isupper() else prototypes
        yield shown[labels] + noise * drawn, (labels + ord(task.lower())) % WAYS


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(context, m, function):
        return function(m)

    @staticmethod
    def backward(context, gradient):
        return gradient, None


RATES = {
    "c-maml": lambda m: m,
    "c-maml-fixed": lambda m: torch.tensor(INNER_LR, dtype=torch.float64),
    "sparse-c-maml": lambda m: INNER_LR * StraightThrough.apply(m, lambda m: (m >= 0).to(m.dtype)),
    "sparse-relu-c-maml": lambda m: StraightThrough.apply(m, lambda m: m.clamp(min=0)),
}


class Adam:
    def __init__(self, lr):
        self.lr, self.count, self.first, self.second = lr, 0, {}, {}

    def step(self, values, gradients):
        self.count += 1
        for name, g in gradients.items():
            self.first[name] = 0.9 * self.first.get(name, 0) + 0.1 * g
            self.second[name] = 0.999 * self.second.get(name, 0) + 0.001 * g**2
            mean = self.first[name] / (1 - 0.9**self.count)
            scale = (self.second[name] / (1 - 0.999**self.count)) ** 0.5 + 1e-8
            values[name] = (values[name] - self.lr * mean / scale).detach()


class Transcription:
    """The algorithm step by step, with nothing clever in it. ``raw`` names the weights that the inner loop moves."""

    def __init__(self, model, variant, raw, restart):
        self.model, self.rate, self.restart = model, RATES[variant], restart
        self.theta = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.raw = {name: m.clone() for name, m in raw.items()}
        self.learned = variant != "c-maml-fixed"
        self.phi = {name: self.theta[name] for name in raw}
        self.flagged, self.kept, self.events = False, [], []
        self.adam, self.mask_adam = Adam(LR), Adam(MASK_LR)

    def loss(self, weights, batch):
        return F.cross_entropy(functional_call(self.model, weights, (batch[0],)), batch[1])

    def adapt(self, theta, start, raw, batch):
        phi = dict(start)
        for _ in range(INNER_STEPS):
            gradients = torch.autograd.grad(self.loss({**theta, **phi}, batch), list(phi.values()), retain_graph=True)
            phi = {name: p - self.rate(raw[name]) * g for (name, p), g in zip(phi.items(), gradients, strict=True)}
        return phi

    def observe(self, batch):
        before = self.loss({**self.theta, **self.phi}, batch).item()
        self.phi = self.adapted(self.theta if self.flagged and self.restart == "next batch" else self.phi, batch)
        after = self.loss({**self.theta, **self.phi}, batch).item()
        self.flagged = after + MARGIN <= before
        self.events.append((self.flagged, len(self.kept)))
        if (self.flagged and self.kept) or len(self.kept) > BUFFER:
            self.meta_update()
            self.kept = []
        else:
            self.kept.append(batch)
        if self.flagged and self.restart == "at once":
            self.phi = self.adapted(self.theta, batch)

    def adapted(self, start, batch):
        start = {name: start[name].clone().requires_grad_() for name in self.phi}
        return {name: p.detach() for name, p in self.adapt(self.theta, start, self.raw, batch).items()}

    def meta_update(self):
        if len(self.kept) == 1:
            self.kept = self.kept * 2
        half = math.ceil(len(self.kept) / 2)
        supports, queries = self.kept[:half], self.kept[half:]
        theta = {name: t.clone().requires_grad_() for name, t in self.theta.items()}
        raw = {name: m.clone().requires_grad_() for name, m in self.raw.items()}
        losses = []
        for support, query in zip(supports, queries, strict=False):
            phi = self.adapt(theta, {name: theta[name] for name in raw}, raw, support)
            losses.append(self.loss({**theta, **phi}, query))
        loss = sum(losses) / len(losses)
        loss = (1 - math.exp(-UPDATE_SCALE * loss.item())) * loss
        leaves = [*theta.values(), *(raw.values() if self.learned else ())]
        gradients = torch.autograd.grad(loss, leaves)
        self.adam.step(self.theta, dict(zip(theta, gradients, strict=False)))
        if self.learned:
            self.mask_adam.step(self.raw, dict(zip(raw, gradients[len(theta) :], strict=True)))


def learner_of(variant, model, select="all", **settings):
    start = {"sparse-relu-c-maml": masks.uniform(-0.1, 0.9)}.get(variant)  # some rates closed, others large
    mask, inner_lr = c_maml_mask(
        variant, model, inner_lr=INNER_LR, select=select, init=start, generator=torch.Generator().manual_seed(3)
    )
    chosen = {
        "inner_steps": INNER_STEPS, "inner_lr": inner_lr, "lr": LR, "mask_lr": MASK_LR, "switch_margin": MARGIN,
        "update_scale": UPDATE_SCALE, "buffer": BUFFER, "pairs_at_once": 1,
    }  # fmt: skip
    return CMAML(model, mask, **chosen | settings)


@pytest.mark.parametrize("restart", RESTARTS)
@pytest.mark.parametrize("variant", RATES)
def test_twenty_steps_equal_the_transcription(variant, restart):
    model = network()
    # Batch norm's scale and shift stay out of the inner loop, so that there are weights that only theta has.
    learner = learner_of(variant, model, select=masks.without_batch_norm(model), restart=restart)
    raw = learner.mask.raw or {name: torch.zeros(()) for name in learner.mask.names}
    oracle = Transcription(model, variant, raw, restart)
    mask_before = {name: m.clone() for name, m in learner.mask.raw.items()}
    for inputs, labels in batches(STREAM):
        expected = functional_call(model, {**oracle.theta, **oracle.phi}, (inputs,))
        torch.testing.assert_close(learner.predict(inputs), expected, rtol=1e-7, atol=1e-9)
        learner.observe(inputs, labels)
        oracle.observe((inputs, labels))
        assert learner.detected == oracle.flagged
        for mine, theirs in ((learner.theta, oracle.theta), (learner.phi, oracle.phi), (learner.mask.raw, oracle.raw)):
            for name, tensor in mine.items():
                torch.testing.assert_close(tensor, theirs[name], rtol=1e-7, atol=1e-9)
    assert oracle.events[3:] == EVENTS
    if variant.startswith("sparse"):
        flips = {name: ((m >= 0) != (mask_before[name] >= 0)).any() for name, m in learner.mask.raw.items()}
        assert sum(flips.values()) >= 5  # the mask's own learning mattered
        by_tensor = learner.mask.sparsity().by_tensor
        assert learner.closed() == {name: by_tensor[name] for name in learner.mask.names}
        assert 0.05 < learner.closed()["block2.conv.weight"] < 0.9
        assert "block2.norm.weight" not in learner.closed()
    else:
        assert learner.closed() == {}


def test_pairs_in_chunks_give_the_same():
    one_by_one = learner_of("sparse-c-maml", network())
    in_chunks = learner_of("sparse-c-maml", network(), pairs_at_once=2)
    for inputs, labels in batches("aaaaaab"):
        one_by_one.observe(inputs, labels)
        in_chunks.observe(inputs, labels)
    for name, tensor in one_by_one.theta.items():
        torch.testing.assert_close(in_chunks.theta[name], tensor, rtol=1e-12, atol=1e-12)
    assert not torch.equal(one_by_one.theta["head.weight"], dict(network().named_parameters())["head.weight"])


def test_pairs_of_a_buffer():
    buffer = BatchBuffer()
    expected = {1: [(0, 0)], 2: [(0, 1)], 3: [(0, 2)], 4: [(0, 2), (1, 3)], 5: [(0, 3), (1, 4)]}
    for count, pairs in expected.items():
        buffer.add(torch.full((2, 3), float(count)), torch.full((2,), count))
        assert buffer.count == count
        assert buffer.pairs() == pairs
        tasks = list(buffer.tasks())
        assert [(int(task.support_labels[0]) - 1, int(task.query_labels[0]) - 1) for task in tasks] == pairs
        assert all((task.query_inputs == task.query_labels[0]).all() for task in tasks)
    with pytest.raises(DataError, match=r"a batch of shape \(1, 3\) after one of \(2, 3\)"):
        buffer.add(torch.zeros(1, 3), torch.zeros(1))
    buffer.clear()
    assert (buffer.count, buffer.state()) == (0, {})


def test_a_buffer_keeps_copies():
    inputs, labels = torch.ones(2, 3), torch.ones(2)
    buffer = BatchBuffer()
    buffer.add(inputs, labels)
    inputs.zero_()
    labels.zero_()
    (task,) = buffer.tasks()
    assert (task.support_inputs == 1).all()
    assert (task.support_labels == 1).all()


def test_a_buffer_takes_the_memory_of_what_it_holds():
    learner = learner_of("c-maml", network(), buffer=10**12)
    learner.observe(torch.zeros(5, 1, 16, 16, dtype=torch.float64), torch.arange(5))
    assert learner.buffer.count == 1


def test_c_maml_learns_one_rate_per_tensor_of_either_sign():
    model = network()
    rates = TensorRates(model, "head", rate=0.25)
    rates.raw["head.bias"].fill_(-0.5)
    assert rates.multipliers()["head.weight"].unique().tolist() == [0.25]
    assert rates.multipliers()["head.bias"].tolist() == [-0.5] * WAYS
    gradients = {"head.weight": torch.ones(WAYS, 6), "head.bias": torch.arange(5.0)}
    assert {name: g.item() for name, g in rates.pull_back(gradients).items()} == {"head.weight": 30, "head.bias": 10}


def test_it_learns_two_alternating_tasks():
    learner = learner_of("sparse-c-maml", network(torch.float32), inner_lr=0.1, mask_lr=0.01, buffer=20)
    correct, noticed = [], []
    stream = ("a" * 8 + "b" * 8) * 6
    for step, (inputs, labels) in enumerate(batches(stream, torch.float32, noise=1.0)):
        right = (learner.predict(inputs).argmax(1) == labels).float().mean().item()
        learner.observe(inputs, labels)
        if step % 8 == 0:
            noticed.append(learner.detected)
        else:
            correct.append(right)
    assert sum(correct[-40:]) / 40 > 0.6  # chance: 0.2
    assert sum(noticed[1:]) >= 8


def test_losses_that_are_not_finite_are_reported_and_change_nothing():
    learner = learner_of("sparse-c-maml", network())
    (inputs, labels), (more, more_labels) = batches("aa")
    learner.observe(inputs, labels)
    before = learner.state()
    with pytest.raises(NonFiniteError, match="not finite: nan before adapting to it"):
        learner.observe(more * math.nan, more_labels)
    after = learner.state()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="must be 1 or more, not 6, 0 and 1"):
        learner_of("c-maml", network(), buffer=0)
    with pytest.raises(ConfigError, match="choose one of c-maml, c-maml-fixed, sparse-c-maml, sparse-relu-c-maml"):
        c_maml_mask("fancy-c-maml", network(), inner_lr=0.1)
    model = network()
    with pytest.raises(ConfigError, match="one factor per weight, not 'curvature'"):
        CMAML(
            model, masks.curvature(model), inner_steps=1, inner_lr=1, lr=1, mask_lr=1, switch_margin=1, update_scale=1
        )


def learners(variant, device, dtype=torch.float64, restarts=RESTARTS):
    """Two that differ in a rate and perhaps in how they start anew."""
    both = zip((0.03, 0.1), restarts, strict=True)
    return [learner_of(variant, network(dtype).to(device), mask_lr=rate, restart=restart) for rate, restart in both]


def streams(device, dtype=torch.float64):
    both = [list(batches(stream, dtype)) for stream in (STREAM, OTHER)]
    return [[(x.to(device), y.to(device)) for x, y in pair] for pair in zip(*both, strict=True)]


def stacked(pair):
    return tuple(torch.stack(parts) for parts in zip(*pair, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("restarts", [RESTARTS, ["at once", "at once"]], ids=["both", "at once"])
@pytest.mark.parametrize("variant", ["sparse-c-maml", "c-maml", "c-maml-fixed"])
def test_lanes_learn_what_each_learns_alone(variant, restarts, device, monkeypatch):
    monkeypatch.setattr(c_maml_lanes, "JOBS_AT_ONCE", (1, 3))  # two lanes have up to four pairs at once
    alone, together = (learners(variant, device, restarts=restarts) for _ in range(2))
    lanes = CMAMLLanes(together, CompiledArithmetic(network().to(device), compiled=False))
    detections = []
    for pair in streams(device):
        expected = []
        for learner, (inputs, labels) in zip(alone, pair, strict=True):
            expected.append((learner.predict(inputs).argmax(1) == labels).sum().item())
            learner.observe(inputs, labels)
        assert lanes.step(*stacked(pair)).tolist() == expected
        assert [one.detected for one in together] == [one.detected for one in alone]
        detections.append(together[0].detected)
    if variant == "sparse-c-maml":
        assert len(detections) - 3 == len(EVENTS)
        assert any(detections)
        assert not torch.equal(together[0].theta["head.weight"], together[1].theta["head.weight"])
    for one, two in zip(alone, together, strict=True):
        state = two.state()
        for name, tensor in one.state().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-7, atol=1e-9)


def test_losses_that_are_not_finite_stop_their_lane_only():
    alone, (good, bad) = learners("sparse-c-maml", "cpu")[0], learners("sparse-c-maml", "cpu")
    lanes = CMAMLLanes([good, bad], CompiledArithmetic(network(), compiled=False))
    first, second, *_ = streams("cpu")
    lanes.step(*stacked(first))
    assert not lanes.failed
    kept = bad.buffer.count
    (inputs, labels) = second[1]
    right = lanes.step(*stacked([second[0], (inputs * float("nan"), labels)]))
    assert list(lanes.failed) == [1]
    assert "the loss of a batch is not finite" in str(lanes.failed[1])
    assert right.tolist()[1] == DIVERGED
    assert bad.buffer.count == kept
    for inputs, labels in (first[0], second[0]):
        alone.observe(inputs, labels)
    assert all(torch.allclose(good.state()[name], tensor) for name, tensor in alone.state().items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("precision", "far_off"), [("float32", 0.05), ("tf32", 0.35)])
def test_kernels_for_conv4_give_the_same(precision, far_off):
    device, dtype = "cuda", torch.float32
    slow, fast = (
        [learner_of("sparse-c-maml", network(dtype, width=64).to(device), mask_lr=rate) for rate in (0.03, 0.1)]
        for _ in range(2)
    )
    model = network(dtype, width=64).to(device)
    reference = CMAMLLanes(slow, CompiledArithmetic(model, compiled=False))
    lanes = CMAMLLanes(fast, FusedConv4(model, precision))
    for pair in streams(device, dtype)[:4]:  # before rounding errors have grown, but with a meta-update
        reference.step(*stacked(pair))
        lanes.step(*stacked(pair))
        torch.testing.assert_close(lanes.losses, reference.losses, rtol=0.02, atol=0.02)
    before = dict(model.named_parameters())
    for own, theirs in zip(fast, slow, strict=True):
        for name, tensor in own.theta.items():
            if not name.endswith("conv.bias"):  # its gradient is rounding noise, which Adam makes as large as any
                off = (tensor - theirs.theta[name]).abs() > 0.25 * LR
                # Adam's first step is a gradient's sign. These are so small after adapting that rounding the factors
                # of every product to TF32 turns a fifth of them; half would be chance.
                assert off.float().mean() < far_off, name
    assert any(not torch.equal(own.theta["head.weight"], before["head.weight"]) for own in fast)
