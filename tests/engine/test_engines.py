"""The fast engine against the readable one: same tasks, same updates."""

import copy
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from wheretolearn import masks, models
from wheretolearn.engine import compiled
from wheretolearn.engine.choose import choose, make_engine, make_evaluator
from wheretolearn.engine.compiled import CompiledArithmetic
from wheretolearn.engine.conv4_cpu import Conv4OnCPU
from wheretolearn.engine.eager import EagerEngine
from wheretolearn.engine.graphed import GraphedEngine, _memory_of, jobs_of
from wheretolearn.engine.second_order import SecondOrderArithmetic
from wheretolearn.engine.task import InnerLoop, Lane, Task
from wheretolearn.errors import ConfigError, NonFiniteError
from wheretolearn.fewshot.learner import MixedOptimizer
from wheretolearn.fewshot.running_mean import RunningMean
from wheretolearn.ridge_head import ridge_logits, with_ridge_head

GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: graphs are recorded there")
)
DEVICES = ["cpu", GPU]

MASKS = {
    "binary": masks.binary,
    "relu": lambda model, **k: masks.relu(model, init=masks.uniform(-0.1, 0.3), **k),
    "exp": masks.exp,
    "linear": masks.linear,
    "maml": lambda model, **k: masks.fixed(model),
    "anil": lambda model, **k: masks.fixed(model, "head"),
    "boil": lambda model, **k: masks.fixed(model, "body"),
    "generated": lambda model, **k: masks.generated(model, latent_size=6, **k),
    "subset": lambda model, **k: masks.binary(model, select=["block4.*", "head.weight"], **k),
}


def tasks_of(step, device, dtype, count=3):
    """Tasks as a function of the step, in tensor operations that a graph can record."""
    step = torch.as_tensor(step, device=device)
    base = torch.linspace(0, 1, 15 * 16 * 16, device=device, dtype=torch.float64).view(15, 1, 16, 16)
    result = []
    for number in range(count):
        waves = torch.sin(base * (37.0 + 11 * number + step)) + base.flip(0)
        inputs = waves.to(dtype)
        labels = torch.arange(15, device=device) % 5
        result.append(Task(inputs[:5], labels[:5], inputs[5:], labels[5:]))
    return result


def new_lane(mask_kind, device, dtype, optimizer="adam", seed=0, draw=None, outer_clamp=None, **inner):
    model = models.build("conv4", ways=5, channels=1, size=16, width=4, seed=seed).to(device, dtype)
    learned = mask_kind not in ("maml", "anil", "boil")
    mask = MASKS[mask_kind](model, **({"generator": torch.Generator().manual_seed(1 + seed)} if learned else {}))
    mask.to(dtype)
    groups = [{"params": list(model.parameters()), "lr": 1e-2}]
    if mask.raw:
        groups.append({"params": list(mask.parameters()), "lr": 5e-2})
    if optimizer == "adam":
        outer = torch.optim.Adam(groups, capturable=device == "cuda")
    else:
        outer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)
    settings = InnerLoop(**{"steps": 3, "inner_lr": 0.1, **inner})
    draw = draw or (lambda step: tasks_of(step, device, dtype))
    return Lane(model, mask, outer, draw, settings, seed=5 + seed, outer_clamp=outer_clamp)


def graphed(lanes, compiled=False, precision="float32"):
    first = lanes[0]
    arithmetic = CompiledArithmetic if first.inner.order == "first" else SecondOrderArithmetic
    return GraphedEngine(lanes, arithmetic(first.model, first.inner.clip_norm, precision, compiled))


def run(engine, steps=3, start=0):
    losses = []
    for step in range(start, start + steps):
        engine.outer_step([step] * len(engine.lanes))
        losses.append(engine.last_losses())
    return losses


def trained(kind, mask_kind, device, dtype, steps=3, **settings):
    lane = new_lane(mask_kind, device, dtype, **settings)
    # Compiling takes long; each kind of mask is recorded, one of them compiled too.
    engine = EagerEngine([lane]) if kind is EagerEngine else graphed([lane], compiled=mask_kind == "binary")
    losses = run(engine, steps)
    return lane.model, lane.mask, lane.optimizer, [loss for (loss,) in losses]


def assert_same(one, two, tolerance):
    (model, mask, _, losses), (other_model, other_mask, _, other_losses) = one, two
    for (name, p), (_, q) in zip(model.named_parameters(), other_model.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    for name, m in mask.tensors().items():
        torch.testing.assert_close(m, other_mask.tensors()[name], rtol=0, atol=tolerance)
    assert losses == pytest.approx(other_losses, abs=max(tolerance, 1e-6))  # reported in float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask_kind", MASKS)
def test_graphed_equals_eager_in_float64(device, mask_kind):
    one = trained(EagerEngine, mask_kind, device, torch.float64)
    two = trained(GraphedEngine, mask_kind, device, torch.float64)
    assert_same(one, two, 1e-8)
    start = models.build("conv4", ways=5, channels=1, size=16, width=4, seed=0).state_dict()
    assert not torch.allclose(one[0].block1.conv.weight.cpu(), start["block1.conv.weight"].double(), atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("mask_kind", ["maml", "anil", "boil", "linear", "subset", "binary"])
def test_graphed_equals_eager_in_second_order(device, mask_kind, clip_norm):
    one = trained(EagerEngine, mask_kind, device, torch.float64, order="second", clip_norm=clip_norm)
    two = trained(GraphedEngine, mask_kind, device, torch.float64, order="second", clip_norm=clip_norm)
    assert_same(one, two, 1e-8)
    first = trained(GraphedEngine, mask_kind, device, torch.float64, clip_norm=clip_norm)
    assert not torch.allclose(one[0].block4.conv.weight, first[0].block4.conv.weight, atol=1e-3)


@pytest.fixture
def calls(monkeypatch):
    """Names of the functions that engines of first and second order would compile, as they return."""
    names = []
    make_fast = CompiledArithmetic._fast

    def fast(self, function):
        self._compiled = self.traced
        traced = make_fast(self, function)

        def called(*arguments):
            result = traced(*arguments)
            names.append(function.__name__)
            return result

        return called

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(CompiledArithmetic, "_fast", fast)
    monkeypatch.setattr(CompiledArithmetic, "traced", False, raising=False)
    return names


@pytest.mark.parametrize(
    ("mask_kind", "order", "clip_norm", "way"),
    [("maml", "first", None, set()), ("anil", "first", 0.5, {"features"}), ("boil", "second", None, {"forward"}),
     ("maml", "second", 0.5, {"backward"}), ("subset", "second", None, {"backward"}),
     ("anil", "second", None, {"features", "gradients", "forward"}),
     ("anil", "second", 0.5, {"features", "gradients", "backward"})],
)  # fmt: skip
def test_all_that_is_compiled_is_traced_whole_and_computes_the_same(
    mask_kind, order, clip_norm, way, calls, monkeypatch
):
    """By the compiler's front half, which a machine without a GPU has too."""
    lanes = [new_lane(mask_kind, "cpu", torch.float64, order=order, clip_norm=clip_norm, steps=2) for _ in range(2)]
    run(graphed([lanes[0]]), steps=2)
    calls.clear()
    monkeypatch.setattr(CompiledArithmetic, "traced", True)
    run(graphed([lanes[1]]), steps=2)
    assert set(calls) == {"inner_step", "outer_gradient"} | way
    assert_same(*((lane.model, lane.mask, None, [0.0]) for lane in lanes), 1e-9)


def test_one_process_can_compile_for_many_kinds_of_training(calls, monkeypatch):
    """The compiler by itself refuses, with an error, to keep many versions of a function."""
    monkeypatch.setattr(torch.compiler.config, "recompile_limit", 1)
    monkeypatch.setattr(CompiledArithmetic, "traced", True)
    for order in ("first", "second"):
        for dtype in (torch.float64, torch.float32):
            engine = graphed([new_lane("anil", "cpu", dtype, order=order, steps=1)])
            with engine.arithmetic.settings():  # as where steps are recorded
                run(engine, steps=1)


class Square(torch.autograd.Function):
    """An operation without forward mode, as many are."""

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class Squared(nn.Module):
    def forward(self, x):
        return Square.apply(x)


@pytest.mark.parametrize(
    ("mask_kind", "clip_norm", "square", "forward"),
    [("maml", None, False, True), ("subset", None, False, False), ("maml", 0.5, False, False),
     ("maml", None, True, False)],
)  # fmt: skip
def test_second_order_goes_forward_where_that_is_faster_and_can_be_done(mask_kind, clip_norm, square, forward, calls):
    lanes = [new_lane(mask_kind, "cpu", torch.float64, order="second", clip_norm=clip_norm) for _ in range(2)]
    for lane in lanes if square else ():
        lane.model.block2.append(Squared())
    engine = graphed([lanes[1]])
    run(EagerEngine([lanes[0]]))
    run(engine)
    for one, two in zip(lanes[0].model.parameters(), lanes[1].model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-8)
    assert set(calls) == {"inner_step", "outer_gradient", "forward" if forward else "backward"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask_kind", ["maml", "linear", "anil"])
def test_second_order_in_bfloat16_learns_about_the_same(device, mask_kind):
    lanes = [new_lane(mask_kind, device, torch.float32, order="second") for _ in range(2)]
    losses = [run(graphed([lane], precision=kind)) for lane, kind in zip(lanes, ("float32", "bfloat16"), strict=True)]
    for exact, rounded in zip(*losses, strict=True):
        assert rounded == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("device", DEVICES)
def test_second_order_survives_a_gradient_of_zero(device):
    """A head of zeros gives the body no gradient, so that there is nothing to clip, and a norm without a derivative."""
    lanes = [new_lane("boil", device, torch.float64, order="second", clip_norm=0.5, steps=1) for _ in range(2)]
    for lane in lanes:
        with torch.no_grad():
            lane.model.head.weight.zero_()
    for engine in (EagerEngine([lanes[0]]), graphed([lanes[1]])):
        run(engine, steps=1)
    for one, two in zip(lanes[0].model.parameters(), lanes[1].model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_graphed_equals_eager_in_float32(device):
    one = trained(EagerEngine, "binary", device, torch.float32, steps=2)
    two = trained(GraphedEngine, "binary", device, torch.float32, steps=2)
    assert one[3] == pytest.approx(two[3], abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_graphed_equals_eager_with_clipping_and_nesterov(device):
    settings = {"optimizer": "nesterov", "clip_norm": 0.05}
    one = trained(EagerEngine, "binary", device, torch.float64, **settings)
    assert_same(one, trained(GraphedEngine, "binary", device, torch.float64, **settings), 1e-8)


@pytest.mark.parametrize("mask_kind", MASKS)
def test_the_engine_of_choice_on_a_cpu_equals_the_readable_one(mask_kind):
    """Conv4's passes take the place of ``inner_loop`` there."""
    lanes = [[new_lane(mask_kind, "cpu", torch.float64, seed=seed) for seed in range(2)] for _ in range(2)]
    engines = make_engine(lanes[0], kind="eager"), make_engine(lanes[1])
    losses = [run(engine) for engine in engines]
    tasks = tasks_of(7, "cpu", torch.float64)
    for number in range(2):
        ends = [(own[number].model, own[number].mask, None, [each[number] for each in of])
                for own, of in zip(lanes, losses, strict=True)]  # fmt: skip
        assert_same(*ends, 1e-8)
        start = new_lane(mask_kind, "cpu", torch.float64, seed=number).model.head.weight
        assert (start - ends[0][0].head.weight).abs().max() > 1e-3
        readable, fast = (engine.evaluator(number).probabilities(tasks, 2) for engine in engines)
        torch.testing.assert_close(fast, readable, rtol=0, atol=1e-8)
        alone = make_evaluator(lanes[1][number].model, lanes[1][number].mask, lanes[1][number].inner)
        assert torch.equal(alone.probabilities(tasks, 2), fast)


def counted_passes(monkeypatch):
    """How often Conv4's passes without autograd were asked for gradients."""
    calls = []
    meta_gradients = Conv4OnCPU.meta_gradients
    monkeypatch.setattr(Conv4OnCPU, "meta_gradients", lambda *given: calls.append(given) or meta_gradients(*given))
    return calls


@pytest.mark.parametrize(
    "inner",
    [{"order": "second"}, {"clip_norm": 1.0}, {"batch_norm": "support"}, {"batch_norm": "running"}],
    ids=str,
)
def test_what_passes_without_autograd_cannot_do_goes_the_readable_way(monkeypatch, inner):
    calls = counted_passes(monkeypatch)
    run(make_engine([new_lane("binary", "cpu", torch.float64)]), steps=1)
    assert len(calls) == 3  # one for each task
    lane = new_lane("binary", "cpu", torch.float64, **inner)
    run(make_engine([lane]), steps=1)
    run(make_engine([new_lane("binary", "cpu", torch.float64)], kind="eager"), steps=1)
    assert len(calls) == 3


def test_what_is_not_finite_on_a_cpu_is_explained():
    lane = new_lane("binary", "cpu", torch.float32, inner_lr=1e30)
    with pytest.raises(NonFiniteError, match=r"outer step 1, task 0, inner step \d"):
        run(make_engine([lane]))


@pytest.mark.parametrize("device", DEVICES)
def test_running_means_are_recorded_with_the_optimizer(device):
    lanes = [new_lane("binary", device, torch.float64) for _ in range(2)]
    means = [RunningMean(lane.optimizer, decay=0.6) for lane in lanes]
    for make, lane in zip((lambda lanes: EagerEngine(lanes), graphed), lanes, strict=True):
        run(make([lane]), steps=25)  # from the 17th on the decay is what was asked for
    last = lanes[0].model.head.weight.detach().clone()
    with means[0].in_place(), means[1].in_place():
        assert_same(*((lane.model, lane.mask, None, []) for lane in lanes), 1e-8)
        assert (lanes[0].model.head.weight - last).abs().max() > 1e-3
    assert torch.equal(lanes[0].model.head.weight, last)


@pytest.mark.parametrize("device", DEVICES)
def test_outer_gradients_are_clamped_alike(device):
    """SGD, so that the size of the gradients matters."""
    settings = {"optimizer": "nesterov", "outer_clamp": 1e-3}
    one = trained(EagerEngine, "binary", device, torch.float64, steps=1, **settings)
    assert_same(one, trained(GraphedEngine, "binary", device, torch.float64, steps=1, **settings), 1e-10)
    start = models.build("conv4", ways=5, channels=1, size=16, width=4, seed=0).state_dict()
    moved = max(float((p.detach().cpu() - start[n].double()).abs().max()) for n, p in one[0].named_parameters())
    assert moved == pytest.approx(1e-2 * 1e-3 * 1.9)  # learning rate, clamp, first Nesterov step


def test_the_masks_gradients_are_clamped_too():
    lane = new_lane("binary", "cpu", torch.float64, optimizer="nesterov", outer_clamp=1e-7)
    before = {name: m.clone() for name, m in lane.mask.raw.items()}
    run(EagerEngine([lane]), steps=1)
    moved = max(float((m - before[name]).abs().max()) for name, m in lane.mask.raw.items())
    assert moved == pytest.approx(5e-2 * 1e-7 * 1.9)


@pytest.mark.parametrize("optimizer", ["adam", "nesterov", "mixed"])
def test_what_recording_does_is_undone(optimizer):
    """State that was there comes back; state that came to be is as if it had never been."""

    def lane():
        made = new_lane("generated", "cpu", torch.float64, optimizer="nesterov" if optimizer == "nesterov" else "adam")
        if optimizer != "mixed":
            return made
        parts = (
            torch.optim.Adam(made.model.parameters(), lr=1e-2),
            torch.optim.SGD(made.mask.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
        )
        return replace(made, optimizer=MixedOptimizer(*parts))

    for steps_before in (0, 2):
        straight, disturbed = lane(), lane()
        for number, one in enumerate((straight, disturbed)):
            run(EagerEngine([one]), steps=steps_before)
            if number:
                put_back = _memory_of(one)
                run(EagerEngine([one]), steps=3, start=40)
                put_back()
            run(EagerEngine([one]), steps=2, start=steps_before)
        for name, p in straight.model.named_parameters():
            assert torch.equal(p, dict(disturbed.model.named_parameters())[name])
        for name, m in straight.mask.tensors().items():
            assert torch.equal(m, disturbed.mask.tensors()[name])


def test_weights_outside_the_optimizer_gather_no_gradient():
    lane = new_lane("binary", "cpu", torch.float64)
    alone = replace(lane, optimizer=torch.optim.SGD(lane.mask.parameters(), lr=0.0))
    engine = EagerEngine([alone])
    run(engine, steps=1)
    first = lane.model.head.weight.grad.clone()
    for _ in range(2):
        engine.outer_step([0])
    assert torch.equal(lane.model.head.weight.grad, first)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["eager", "graphed"])
def test_lanes_side_by_side_equal_lanes_alone(device, kind):
    """Other seeds, masks, optimizers, inner learning rates and step numbers do not disturb each other."""

    def lanes():
        return [
            new_lane("binary", device, torch.float64),
            new_lane("anil", device, torch.float64, optimizer="nesterov", seed=1),
            new_lane("generated", device, torch.float64, seed=2, inner_lr=0.05),
        ]

    def engine(some):
        return EagerEngine(some) if kind == "eager" else graphed(some)

    together = lanes()
    side_by_side = engine(together)
    for step in range(2):
        side_by_side.outer_step([step, step + 7, step + 1])
    losses = side_by_side.last_losses()
    for number, (lane, first) in enumerate(zip(lanes(), (0, 7, 1), strict=True)):
        alone = engine([lane])
        for step in range(2):
            alone.outer_step([first + step])
        assert alone.last_losses() == pytest.approx([losses[number]], abs=1e-6)
        for name, p in lane.model.named_parameters():
            torch.testing.assert_close(p, dict(together[number].model.named_parameters())[name], rtol=0, atol=1e-9)
        for name, m in lane.mask.tensors().items():
            torch.testing.assert_close(m, together[number].mask.tensors()[name], rtol=0, atol=1e-9)


def test_lanes_that_do_not_fit_together_are_refused():
    lanes = [new_lane("binary", "cpu", torch.float32, steps=k) for k in (2, 3)]
    with pytest.raises(ConfigError, match="inner_steps"):
        make_engine(lanes)


@pytest.mark.parametrize("device", DEVICES)
def test_a_new_engine_goes_on_where_another_stopped(device):
    """As a resumed run does: weights, mask and optimizer state are carried over, the graph is not."""
    whole = trained(GraphedEngine, "generated", device, torch.float64, steps=4)
    lane = new_lane("generated", device, torch.float64)
    run(graphed([lane]), steps=2)
    run(graphed([lane]), steps=2, start=2)
    assert_same(whole, (lane.model, lane.mask, lane.optimizer, whole[3]), 1e-8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask_kind", ["binary", "anil"])
def test_both_evaluators_agree_and_follow_the_model(device, mask_kind):
    model, mask, _, _ = trained(EagerEngine, mask_kind, device, torch.float64)
    inner = InnerLoop(3, 0.1)
    evaluators = [make_evaluator(model, mask, inner, kind=kind, lanes=2) for kind in ("eager", "graphed")]
    for _ in range(2):
        tasks = tasks_of(9, device, torch.float64, count=5)
        measured = [evaluator.accuracies(tasks, 4) for evaluator in evaluators]
        assert measured[0].shape == (5,)
        torch.testing.assert_close(measured[0], measured[1], rtol=0, atol=1e-6)
        probabilities = [evaluator.probabilities(tasks, 4) for evaluator in evaluators]
        assert probabilities[0].shape == (5, 10, 5)
        torch.testing.assert_close(*probabilities, rtol=0, atol=1e-8)
        torch.testing.assert_close(probabilities[0].sum(-1), torch.ones_like(probabilities[0][..., 0]))
        with torch.no_grad():  # the second round must see the new weights
            model.head.weight.copy_(model.head.weight.flip(0))


@pytest.mark.parametrize("device", DEVICES)
def test_evaluation_after_no_steps_is_the_model_itself(device):
    model, mask, _, _ = trained(EagerEngine, "binary", device, torch.float64)
    tasks = tasks_of(9, device, torch.float64, count=2)
    measured = make_evaluator(model, mask, InnerLoop(3, 0.1), kind="graphed", lanes=2).accuracies(tasks, 0)
    expected = [(model(t.query_inputs).argmax(1) == t.query_labels).double().mean().item() for t in tasks]
    assert measured.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_non_finite_loss_is_reported_with_its_step(device):

    def poisoned(step):
        tasks = tasks_of(step, device, torch.float32)
        bad = torch.where(torch.as_tensor(step, device=device) == 2, float("nan"), 1.0)
        return [Task(t.support_inputs, t.support_labels, t.query_inputs * bad, t.query_labels) for t in tasks]

    good = new_lane("binary", device, torch.float32, seed=1)
    engine = graphed([good, new_lane("binary", device, torch.float32, draw=poisoned)])
    assert all(loss > 0 for losses in run(engine, steps=2) for loss in losses)
    for step in (2, 3):
        engine.outer_step([step, step])
    with pytest.raises(NonFiniteError, match="outer step 3 of seed 5"):
        engine.last_losses()


def test_what_the_graphed_engine_does_not_support_runs_eagerly():
    lane = new_lane("maml", "cpu", torch.float32)
    assert make_engine([lane]).name == "eager"
    for inner, reason in [
        (InnerLoop(1, 0.1, batch_norm="support"), "support"),
        (InnerLoop(1, 0.1, head="ridge"), "ridge"),
    ]:
        assert choose(lane.model, lane.mask, inner, "auto", "float32") == "eager"
        with pytest.raises(ConfigError, match=reason):
            choose(lane.model, lane.mask, inner, "graphed", "float32")
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    with pytest.raises(ConfigError, match="dropout"):
        choose(model, masks.fixed(model), InnerLoop(1, 0.1), "graphed", "float32")


class ReadsBack(nn.Module):
    """A module that no graph can record: Python looks at a value."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(256, 5)

    def forward(self, x):
        return self.head(x.flatten(1) if x.mean().item() < 1e9 else x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: graphs are recorded there")
def test_a_module_that_cannot_be_recorded_runs_eagerly_with_a_note_cuda():
    model = ReadsBack().cuda()
    start = model.head.weight.detach().clone()
    outer = torch.optim.Adam(model.parameters(), capturable=True)
    lane = Lane(model, masks.fixed(model), outer, lambda s: tasks_of(s, "cuda", torch.float32), InnerLoop(2, 0.1))
    with pytest.raises(ConfigError, match="the graphed engine cannot run this"):
        make_engine([lane], kind="graphed")
    engine = make_engine([lane])
    assert engine.name == "eager"
    assert "the graphed engine cannot run this" in engine.note
    assert torch.equal(model.head.weight, start)
    engine.outer_step([0])
    assert engine.last_losses()[0] > 0


@pytest.mark.parametrize(("precision", "engine"), [("bfloat16", "graphed"), ("float16", "fused")])
def test_half_precision_without_a_gpu_is_refused(precision, engine):
    model = models.build("conv4", width=16, seed=0)
    with pytest.raises(ConfigError, match=f"{precision} needs the {engine} engine on a GPU: use precision=float32"):
        choose(model, masks.fixed(model), InnerLoop(1, 0.1), "auto", precision)


def test_only_the_fused_engine_runs_float16():
    model = models.build("conv4", width=16, seed=0)
    with pytest.raises(ConfigError, match="the graphed engine does not support precision=float16"):
        choose(model, masks.fixed(model), InnerLoop(1, 0.1), "graphed", "float16")
    odd = models.build("conv4", width=20, seed=0)
    with pytest.raises(ConfigError, match="fused engine on a GPU, which does not support a width of 20"):
        choose(odd, masks.fixed(odd), InnerLoop(1, 0.1), "auto", "float16")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bfloat16_stays_close_to_float32_and_keeps_state_in_float32():
    lane = new_lane("binary", "cuda", torch.float32)
    losses = run(graphed([lane], compiled=True, precision="bfloat16"), steps=1)
    exact = trained(EagerEngine, "binary", "cuda", torch.float32, steps=1)
    assert losses[0] == pytest.approx(exact[3], abs=0.05)
    assert {p.dtype for p in [*lane.model.parameters(), *lane.mask.parameters()]} == {torch.float32}


@pytest.mark.parametrize("arithmetic", [CompiledArithmetic, SecondOrderArithmetic])
def test_what_the_compiler_says_about_itself_is_kept_from_users_and_other_warnings_are_not(arithmetic):
    compiled = arithmetic(models.build("conv4", width=4, seed=0))
    compiled._compiled = True  # as on a GPU
    with compiled.settings():
        warnings.warn_explicit("softmax is split", UserWarning, "some.py", 1, "torch._inductor.lowering")
        deprecated = "`torch.jit.script_method` is deprecated"
        warnings.warn_explicit(deprecated, DeprecationWarning, "some.py", 1, "torch.jit._script")
        with pytest.raises(UserWarning, match="about the user's tensors"):
            warnings.warn_explicit("about the user's tensors", UserWarning, "some.py", 1, "torch.nn.functional")


def test_a_ridge_head_is_solved_on_each_tasks_support_set():
    model = with_ridge_head(models.build("conv4", ways=5, channels=1, size=16, width=4, seed=0), ways=5).double()
    mask = masks.fixed(model, "none")
    lane = Lane(
        model,
        mask,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        lambda step: tasks_of(0, "cpu", torch.float64),
        InnerLoop(0, 0.1, head="ridge"),
    )
    tasks = tasks_of(0, "cpu", torch.float64)
    expected = [ridge_logits(model, t.support_inputs, t.support_labels, t.query_inputs).softmax(1) for t in tasks]
    engine = make_engine([lane])
    assert engine.name == "eager"
    torch.testing.assert_close(engine.evaluator(0).probabilities(tasks, 0), torch.stack(expected).detach())
    losses = run(engine, steps=15)
    assert losses[-1][0] < 0.85 * losses[0][0]
    assert model.block1.conv.weight.grad.abs().max() > 0  # learned through the solve


def lane_that_adapts(select, model=None, device="cpu", dtype=torch.float64, **inner):
    """With rates of their own for what is selected."""
    model = (model or models.build("conv4", ways=5, channels=1, size=16, width=4, seed=0)).to(device, dtype)
    mask = masks.linear(model, select=select, generator=torch.Generator().manual_seed(1)).to(dtype)
    optimizer = torch.optim.Adam([*model.parameters(), *mask.parameters()], 1e-2, capturable=device == "cuda")
    settings = InnerLoop(**{"steps": 4, "inner_lr": 0.3, **inner})
    return Lane(model, mask, optimizer, lambda step: tasks_of(step, device, dtype, count=2), settings)


def assert_same_training(lanes, steps=3, tolerance=1e-8):
    """Of the first lane by the readable engine, and the second by the fast one."""
    losses = run(EagerEngine([lanes[0]]), steps), run(graphed([lanes[1]]), steps)
    assert_same(
        *((lane.model, lane.mask, None, [loss for (loss,) in own]) for lane, own in zip(lanes, losses, strict=True)),
        tolerance,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["first", "second"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("select", ["head", ["head.weight"], ["head.bias"]])
def test_where_only_the_head_adapts_the_body_sees_the_support_images_once(select, clip_norm, order, device, calls):
    assert_same_training([lane_that_adapts(select, None, device, order=order, clip_norm=clip_norm) for _ in range(2)])
    if device == "cpu":  # a recorded step is replayed without Python
        assert calls.count("features") == 2 * 3  # tasks and outer steps
        assert calls.count("gradients") == (2 * 3 if order == "second" else 0)
        assert calls.count("inner_step") == 2 * 3 * 4


@pytest.mark.parametrize("order", ["first", "second"])
def test_the_body_of_resnet12_is_left_out_too_and_its_frozen_weights_stay(order, calls):
    lanes = [lane_that_adapts("head", models.build("resnet12", channels=1, seed=0), order=order) for _ in range(2)]
    for lane in lanes:
        lane.model.block1.conv1.weight.requires_grad_(False)  # frozen: in no job's theta
    start = lanes[1].model.block1.conv1.weight.clone()
    assert_same_training(lanes, steps=1)
    assert calls.count("features") == 2
    assert torch.equal(lanes[1].model.block1.conv1.weight, start)


class Scaled(models.Conv4):
    def forward(self, x):
        return super().forward(x) * self.head.weight.norm()


def with_a_hook(**settings):
    model = models.Conv4(**settings)
    model.register_forward_hook(lambda module, inputs, outputs: outputs * 2)
    return model


def with_head(model, head):
    model.head = head
    return model


@pytest.mark.parametrize(
    ("make", "select"),
    [(models.Conv4, "all"), (models.Conv4, ["block4.*", "head.*"]), (models.Conv4, ["block4.conv.weight"]),
     (lambda **k: models.Conv4(**k, t_net=True), "head"), (Scaled, "head"), (with_a_hook, "head"),
     (lambda **k: with_head(models.Conv4(**k), nn.Sequential(nn.Tanh(), nn.Linear(4, 5))), "head")],
)  # fmt: skip
def test_the_body_is_passed_where_more_can_change_than_a_linear_layer_that_comes_last(make, select, calls):
    torch.manual_seed(0)
    model = make(ways=5, channels=1, size=16, width=4)
    assert_same_training([lane_that_adapts(select, copy.deepcopy(model), order="second") for _ in range(2)])
    assert "features" not in calls


@pytest.mark.parametrize("order", ["first", "second"])
def test_inner_steps_that_may_change_nothing(order, calls):
    lanes = [new_lane("maml", "cpu", torch.float64, order=order) for _ in range(2)]
    assert_same_training([replace(lane, mask=masks.fixed(lane.model, "none")) for lane in lanes])
    assert "features" not in calls


def test_jobs_with_and_without_the_body_go_side_by_side(calls):
    together, alone = ([lane_that_adapts(select, order="second") for select in ("all", "head")] for _ in range(2))
    losses = run(graphed(together))
    assert calls.count("features") == 2 * 3  # tasks of one lane, and outer steps
    for number, (lane, own) in enumerate(zip(together, alone, strict=True)):
        of_lane, of_own = [each[number] for each in losses], [each[0] for each in run(EagerEngine([own]))]
        assert_same((lane.model, lane.mask, None, of_lane), (own.model, own.mask, None, of_own), 1e-8)


def test_without_inner_steps_the_body_sees_no_support_images(calls):
    assert_same_training([lane_that_adapts("head", order="second", steps=0) for _ in range(2)])
    lane = lane_that_adapts("head")
    GraphedEngine([lane], CompiledArithmetic(lane.model)).evaluator(0).accuracies(lane.draw(0), 0)
    assert "features" not in calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["first", "second"])
def test_in_half_precision_leaving_out_the_body_changes_little(order, dtype, calls, monkeypatch):
    """In a network whose weights are so, and in one that is only passed so."""
    lane = lane_that_adapts("head", dtype=dtype)
    arithmetic = (CompiledArithmetic if order == "first" else SecondOrderArithmetic)(lane.model, precision="bfloat16")
    jobs = jobs_of(lane.model, lane.mask, lane.inner, lane.draw(0))
    cut = arithmetic.meta_gradients(jobs, 4)
    assert "features" in calls
    monkeypatch.setattr(compiled, "only_head_moves", lambda *_: False)
    for one, two in zip(cut, arithmetic.meta_gradients(jobs, 4), strict=True):
        assert one.loss.dtype == two.loss.dtype == torch.float32
        torch.testing.assert_close(one.loss, two.loss, rtol=1e-2, atol=0)
        for name in ("head.weight", "block4.conv.weight", "block1.conv.weight"):
            assert (one.outer[name] - two.outer[name]).norm() < 0.03 * two.outer[name].norm(), name
        for name in lane.mask.names:
            difference = one.to_rate(name) - two.to_rate(name)
            assert difference.norm() < 0.03 * two.to_rate(name).norm(), name
