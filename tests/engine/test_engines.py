"""The fast engine against the readable one: same tasks, same updates."""

import pytest
import torch
from torch import nn

from wheretolearn import masks, models
from wheretolearn.engine.choose import choose, make_engine, make_evaluator
from wheretolearn.engine.eager import EagerEngine
from wheretolearn.engine.graphed import GraphedEngine
from wheretolearn.engine.task import InnerLoop, Task
from wheretolearn.errors import ConfigError, NonFiniteError

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


def trained(kind, mask_kind, device, dtype, steps=3, start=0, optimizer="adam", **inner):
    model = models.build("conv4", ways=5, channels=1, size=16, width=4, seed=0).to(device, dtype)
    mask = MASKS[mask_kind](
        model, **({"generator": torch.Generator().manual_seed(1)} if mask_kind not in ("maml", "anil", "boil") else {})
    )
    mask.to(dtype)
    groups = [{"params": list(model.parameters()), "lr": 1e-2}]
    if mask.raw:
        groups.append({"params": list(mask.parameters()), "lr": 5e-2})
    if optimizer == "adam":
        outer = torch.optim.Adam(groups, capturable=device == "cuda")
    else:
        outer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)
    settings = InnerLoop(**{"steps": 3, "inner_lr": 0.1, **inner})
    # Compiling takes long; each kind of mask is recorded, one of them compiled too.
    extra = {"compiled": mask_kind == "binary"} if kind is GraphedEngine else {}
    engine = kind(model, mask, outer, lambda step: tasks_of(step, device, dtype), settings, seed=5, **extra)
    losses = []
    for step in range(start, start + steps):
        engine.outer_step(step)
        losses.append(engine.last_loss())
    return model, mask, outer, losses


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
def test_graphed_equals_eager_in_float32(device):
    one = trained(EagerEngine, "binary", device, torch.float32, steps=2)
    two = trained(GraphedEngine, "binary", device, torch.float32, steps=2)
    assert one[3] == pytest.approx(two[3], abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_graphed_equals_eager_with_clipping_and_nesterov(device):
    settings = {"optimizer": "nesterov", "clip_norm": 0.05}
    one = trained(EagerEngine, "binary", device, torch.float64, **settings)
    assert_same(one, trained(GraphedEngine, "binary", device, torch.float64, **settings), 1e-8)


@pytest.mark.parametrize("device", DEVICES)
def test_a_new_engine_goes_on_where_another_stopped(device):
    """As a resumed run does: weights, mask and optimizer state are carried over, the graph is not."""
    whole = trained(GraphedEngine, "generated", device, torch.float64, steps=4)
    model, mask, outer, _ = trained(GraphedEngine, "generated", device, torch.float64, steps=2)
    engine = GraphedEngine(
        model,
        mask,
        outer,
        lambda step: tasks_of(step, device, torch.float64),
        InnerLoop(3, 0.1),
        seed=5,
        compiled=False,
    )
    for step in (2, 3):
        engine.outer_step(step)
    engine.last_loss()
    assert_same(whole, (model, mask, outer, whole[3]), 1e-8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask_kind", ["binary", "anil"])
def test_both_evaluators_agree_and_follow_the_model(device, mask_kind):
    model, mask, _, _ = trained(EagerEngine, mask_kind, device, torch.float64)
    inner = InnerLoop(3, 0.1)
    evaluators = [make_evaluator(model, mask, inner, kind=kind, lanes=2) for kind in ("eager", "graphed")]
    for _ in range(2):
        measured = [evaluate(tasks_of(9, device, torch.float64, count=5), 4) for evaluate in evaluators]
        assert measured[0].shape == (5,)
        torch.testing.assert_close(measured[0].float(), measured[1].float(), rtol=0, atol=1e-6)
        with torch.no_grad():  # the second round must see the new weights
            model.head.weight.copy_(model.head.weight.flip(0))


@pytest.mark.parametrize("device", DEVICES)
def test_evaluation_after_no_steps_is_the_model_itself(device):
    model, mask, _, _ = trained(EagerEngine, "binary", device, torch.float64)
    tasks = tasks_of(9, device, torch.float64, count=2)
    measured = make_evaluator(model, mask, InnerLoop(3, 0.1), kind="graphed", lanes=2)(tasks, 0)
    expected = [(model(t.query_inputs).argmax(1) == t.query_labels).double().mean().item() for t in tasks]
    assert measured.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_non_finite_loss_is_reported_with_its_step(device):
    model = models.build("conv4", ways=5, channels=1, size=16, width=4, seed=0).to(device)
    mask = masks.binary(model)

    def poisoned(step):
        tasks = tasks_of(step, device, torch.float32)
        bad = torch.where(torch.as_tensor(step, device=device) == 2, float("nan"), 1.0)
        return [Task(t.support_inputs, t.support_labels, t.query_inputs * bad, t.query_labels) for t in tasks]

    outer = torch.optim.Adam(model.parameters(), capturable=device == "cuda")
    engine = GraphedEngine(model, mask, outer, poisoned, InnerLoop(2, 0.1), compiled=False)
    for step in range(2):
        engine.outer_step(step)
    assert engine.last_loss() > 0
    for step in (2, 3):
        engine.outer_step(step)
    with pytest.raises(NonFiniteError, match="outer step 3"):
        engine.last_loss()


def test_what_the_graphed_engine_does_not_support_runs_eagerly():
    model = models.build("conv4", width=4, seed=0)
    optimizer = torch.optim.Adam(model.parameters())
    engine = make_engine(model, masks.fixed(model), optimizer, lambda step: [], InnerLoop(1, 0.1))
    assert engine.name == "eager"
    for inner, reason in [
        (InnerLoop(1, 0.1, order="second"), "second-order"),
        (InnerLoop(1, 0.1, batch_norm="support"), "support"),
    ]:
        assert choose(model, inner, "auto", "float32") == "eager"
        with pytest.raises(ConfigError, match=reason):
            choose(model, inner, "graphed", "float32")
    with pytest.raises(ConfigError, match="dropout"):
        choose(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), InnerLoop(1, 0.1), "graphed", "float32")


def test_bfloat16_without_a_gpu_is_refused():
    model = models.build("conv4", width=4, seed=0)
    with pytest.raises(ConfigError, match="bfloat16 needs the graphed engine on a GPU"):
        choose(model, InnerLoop(1, 0.1), "auto", "bfloat16")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bfloat16_stays_close_to_float32_and_keeps_state_in_float32():
    model = models.build("conv4", ways=5, channels=1, size=16, width=4, seed=0).to("cuda")
    mask = masks.binary(model, generator=torch.Generator().manual_seed(1))
    outer = torch.optim.Adam([*model.parameters(), *mask.parameters()], lr=1e-3, capturable=True)
    engine = GraphedEngine(
        model, mask, outer, lambda step: tasks_of(step, "cuda", torch.float32), InnerLoop(3, 0.1), precision="bfloat16"
    )
    engine.outer_step(0)
    exact = trained(EagerEngine, "binary", "cuda", torch.float32, steps=1)
    assert engine.last_loss() == pytest.approx(exact[3][0], abs=0.05)
    assert {p.dtype for p in [*model.parameters(), *mask.parameters()]} == {torch.float32}
