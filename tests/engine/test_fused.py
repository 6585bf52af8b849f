"""The kernels for Conv4 against plain autograd: on a GPU as they are, elsewhere in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from wheretolearn import masks, models
from wheretolearn.engine import fused
from wheretolearn.engine.choose import choose, make_engine
from wheretolearn.engine.compiled import CompiledArithmetic
from wheretolearn.engine.eager import EagerEngine
from wheretolearn.engine.fused import FusedConv4, Tile
from wheretolearn.engine.graphed import GraphedEngine, GraphedEvaluator, jobs_of
from wheretolearn.engine.task import InnerLoop, Lane, Task
from wheretolearn.errors import ConfigError

pytest.importorskip("triton", reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: too large for the interpreter")


@pytest.fixture(autouse=DEVICE == "cpu")
def few_large_blocks(monkeypatch):
    """The interpreter's time goes by the number of blocks, whatever their size."""
    monkeypatch.setattr(fused, "TILES", {name: Tile(1024) for name in fused.TILES})


def new_model(size=16, channels=3, width=16, ways=5, seed=0, bias=True):
    model = models.build("conv4", ways=ways, channels=channels, size=size, width=width, seed=seed, bias=bias)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():  # batch norm away from 1 and 0, some scales negative
            if "norm" in name:
                p.add_(torch.randn(p.shape, generator=generator) * 0.7)
    return model.to(DEVICE)


def new_tasks(count, size, channels, ways=5, support=5, query=10, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def images(number):
        # Neighbouring pixels alike, but no two the same, and a mean away from zero, as in real images.
        x = torch.randn(number, channels, size // 2, size // 2, generator=generator)
        smooth = torch.nn.functional.interpolate(x, size, mode="bilinear")
        return (smooth + 0.2 * torch.randn(smooth.shape, generator=generator) + 0.5).to(DEVICE)

    def labels(number, task):
        return (torch.arange(number, device=DEVICE) + task) % ways  # other ones in each task

    return [Task(images(support), labels(support, t), images(query), labels(query, t)) for t in range(count)]


def jobs(model, tasks, inner_lr=0.05):
    mask = masks.binary(model, generator=torch.Generator().manual_seed(1))
    return jobs_of(model, mask, InnerLoop(1, inner_lr), tasks)


def exact_gradients(model, work, steps):
    """By autograd, without the reduced precision that a GPU's convolutions have by default."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        return CompiledArithmetic(model, compiled=False).meta_gradients(work, steps)


def assert_alike(found, expected, tolerance):
    """Each tensor within a share of its norm: single entries may differ more, where a maximum is a close call."""
    for one, two in zip(found, expected, strict=True):
        assert one.loss.item() == pytest.approx(two.loss.item(), rel=tolerance)
        for part in ("outer", "inner_sum"):
            for name, reference in getattr(two, part).items():
                value = getattr(one, part)[name]
                assert value.shape == reference.shape
                if name.endswith("conv.bias"):  # no effect before batch norm: rounding noise there, nothing here
                    assert (value == 0).all()
                elif reference.norm() > 0:
                    deviation = ((value - reference).norm() / reference.norm()).item()
                    assert deviation < tolerance, f"{part} of {name} is off by {deviation:.1e} of its norm"


@pytest.mark.parametrize(
    ("size", "channels", "ways", "bias"),
    [(16, 3, 5, True), (28, 1, 5, True), (20, 3, 20, True), (16, 1, 5, False)],
    ids=["three channels", "odd sides below", "more ways than images", "no bias"],
)
def test_gradients_equal_autograd(size, channels, ways, bias):
    model = new_model(size, channels, ways=ways, bias=bias)
    work = jobs(model, new_tasks(2, size, channels, ways))
    expected = exact_gradients(model, work, 1)
    assert_alike(FusedConv4(model).meta_gradients(work, 1), expected, 2e-4)
    assert len({result.loss.item() for result in expected}) == 2


def test_gradients_are_summed_over_inner_steps():
    model = new_model(channels=1)
    work = jobs(model, new_tasks(1, 16, 1), inner_lr=0.01)
    assert_alike(FusedConv4(model).meta_gradients(work, 2), exact_gradients(model, work, 2), 1e-3)


@pytest.mark.parametrize("steps", [0, 2])
def test_adaptations_equal_those_by_autograd(steps):
    model = new_model(channels=1)
    work = jobs(model, new_tasks(2, 16, 1), inner_lr=0.01)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        expected = CompiledArithmetic(model, compiled=False).adaptations(work, steps)
    for found, reference, job in zip(FusedConv4(model).adaptations(work, steps), expected, work, strict=True):
        torch.testing.assert_close(found.before, reference.before, rtol=0, atol=1e-4)
        assert found.loss.item() == pytest.approx(reference.loss.item(), rel=1e-3)
        assert found.weights.keys() == reference.weights.keys() == job.rates.keys()
        for name, weight in reference.weights.items():
            torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=2e-4)
    assert (found.weights["block2.conv.weight"] != job.theta["block2.conv.weight"]).any() == (steps > 0)
    assert not torch.equal(expected[0].before, expected[1].before)


def test_half_precision_stays_close_and_its_scaled_gradients_come_back_unscaled():
    model = new_model(channels=1)
    work = jobs(model, new_tasks(2, 16, 1))
    # The second time with gradients that float16 could not hold as they are.
    for _ in range(2):
        assert_alike(FusedConv4(model, "float16").meta_gradients(work, 0), exact_gradients(model, work, 0), 0.02)
        with torch.no_grad():
            model.head.weight.mul_(1e-5)


def test_blank_images_and_ties_are_treated_as_autograd_does():
    """Blank images tie in every pooling window, and a filter of zeros has no variance."""
    model = new_model(channels=1)
    with torch.no_grad():
        model.block2.conv.weight[3] = 0
    task = new_tasks(1, 16, 1)[0]
    inputs = [x.clone() for x in (task.support_inputs, task.query_inputs)]
    for x in inputs:
        x[0] = 0
        x[1] = 0.7
    work = jobs(model, [Task(inputs[0], task.support_labels, inputs[1], task.query_labels)])
    assert_alike(FusedConv4(model).meta_gradients(work, 0), exact_gradients(model, work, 0), 1e-3)


def test_several_blocks_and_steps_per_task(monkeypatch):
    """Work cut small, with a remainder, as on a GPU."""
    monkeypatch.setattr(fused, "TILES", {name: Tile(32 if "norm" in name else 64, 2) for name in fused.TILES})
    for name in ("first block", "convolution", "pool", "norm backward"):  # these take no steps
        monkeypatch.setitem(fused.TILES, name, Tile(64))
    monkeypatch.setattr(fused, "ENOUGH_BLOCKS", 2)
    model = new_model(channels=1)
    work = jobs(model, new_tasks(1, 16, 1, query=6))
    expected = exact_gradients(model, work, 0)
    assert_alike(FusedConv4(model).meta_gradients(work, 0), expected, 2e-4)


def test_lanes_with_masks_of_their_own_equal_the_eager_engine():
    def lanes():
        result = []
        for seed, (kind, lr) in enumerate([("binary", 0.1), ("anil", 0.05), ("relu", 1.0)]):
            model = new_model(channels=1, seed=seed)
            mask = {
                "binary": lambda m: masks.binary(m, generator=torch.Generator().manual_seed(3)),
                "anil": lambda m: masks.fixed(m, "head"),
                "relu": lambda m: masks.relu(m, generator=torch.Generator().manual_seed(4)),
            }[kind](model)
            groups = [{"params": [*model.parameters(), *mask.parameters()], "lr": 0.1}]
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
            tasks = new_tasks(1, 16, 1, seed=seed)
            result.append(Lane(model, mask, optimizer, lambda step, t=tasks: t, InnerLoop(1, lr), seed))
        return result

    expected, found = lanes(), lanes()
    slow, fast = EagerEngine(expected), GraphedEngine(found, FusedConv4(found[0].model))
    slow.outer_step([0, 0, 0])
    fast.outer_step([0, 0, 0])
    assert fast.last_losses() == pytest.approx(slow.last_losses(), rel=1e-4)
    for one, two in zip(found, expected, strict=True):
        for name, p in two.model.named_parameters():
            torch.testing.assert_close(dict(one.model.named_parameters())[name], p, rtol=0, atol=1e-4)
        for name, m in two.mask.raw.items():
            torch.testing.assert_close(one.mask.raw[name], m, rtol=0, atol=1e-4)


def test_probabilities_equal_those_of_the_plain_network():
    model = new_model(channels=1)
    mask = masks.binary(model, generator=torch.Generator().manual_seed(1))
    tasks, inner = new_tasks(3, 16, 1), InnerLoop(1, 0.05)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        expected = CompiledArithmetic(model, compiled=False).probabilities(jobs_of(model, mask, inner, tasks), 1)
    evaluator = GraphedEvaluator(model, mask, inner, FusedConv4(model), lanes=2)
    torch.testing.assert_close(evaluator.probabilities(tasks, 1), expected, rtol=0, atol=1e-4)
    start = evaluator.probabilities(tasks[:1], 0)[0]
    torch.testing.assert_close(start, torch.softmax(model(tasks[0].query_inputs), 1).detach(), rtol=0, atol=1e-4)


def test_what_the_kernels_cannot_do_is_refused():
    inner = InnerLoop(1, 0.1)
    assert "width" in fused.unsupported(new_model(width=24), inner)
    assert "inner_clip_norm" in fused.unsupported(new_model(), InnerLoop(1, 0.1, clip_norm=1.0))
    assert "second-order" in fused.unsupported(new_model(), InnerLoop(1, 0.1, order="second"))
    assert "ResNet12" in fused.unsupported(models.build("resnet12", seed=0), inner)
    assert fused.unsupported(new_model(), inner) is None
    assert "odd size" in fused.unsupported(new_model(size=17), inner)
    for height, width in ((17, 17), (16, 20)):
        images = torch.zeros(5, 3, height, width, device=DEVICE)
        task = Task(images, torch.arange(5, device=DEVICE), images, torch.arange(5, device=DEVICE))
        with pytest.raises(ConfigError, match="square images of even size"):
            FusedConv4(new_model()).meta_gradients(jobs(new_model(), [task]), 1)


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a machine without a GPU")
def test_without_a_gpu_the_fused_engine_is_refused():
    model = new_model()
    with pytest.raises(ConfigError, match="without a GPU"):
        choose(model, masks.binary(model), InnerLoop(1, 0.1), "fused", "float32")


@needs_gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float16"])
def test_gradients_at_full_size_are_as_exact_as_those_of_autograd_cuda(precision):
    """Of one pass: over several steps close calls of ReLU and pooling send even float32 and float64 apart."""
    model = new_model(size=84, width=64)
    tasks = new_tasks(2, 84, 3, support=25, query=75)
    found = FusedConv4(model, precision).meta_gradients(jobs(model, tasks), 0)
    # Numbers of float16 and tf32 have the same length.
    autograd = CompiledArithmetic(model, precision="tf32" if precision == "float16" else precision, compiled=False)
    with autograd.settings():
        usual = autograd.meta_gradients(jobs(model, tasks), 0)
    exact_tasks = [Task(*(t.double() if t.is_floating_point() else t for t in vars(task).values())) for task in tasks]
    exact = exact_gradients(model, jobs(model.double(), exact_tasks), 0)
    for one, two, reference in zip(found, usual, exact, strict=True):
        for name, value in reference.outer.items():
            if not name.endswith("conv.bias"):
                bound = 2 * (two.outer[name] - value).norm() + 5e-3 * value.norm()
                assert (one.outer[name] - value).norm() < bound, name


@needs_gpu
def test_auto_takes_the_fused_engine_and_falls_back_with_a_note_cuda():
    def lane(size):
        model = new_model(size=size)
        optimizer = torch.optim.Adam(model.parameters(), capturable=True)
        tasks = new_tasks(1, size, 3)
        return Lane(model, masks.fixed(model), optimizer, lambda step: tasks, InnerLoop(1, 0.1))

    assert make_engine([lane(16)], precision="tf32").name == "fused"
    assert make_engine([lane(17)], precision="tf32").name == "graphed"
    wide = lane(16)
    images = torch.randn(5, 3, 16, 20, device="cuda")  # the network can, the kernels cannot
    task = Task(images, torch.arange(5, device="cuda"), images, torch.arange(5, device="cuda"))
    engine = make_engine([replace(wide, draw=lambda step: [task])], precision="tf32")
    assert engine.name == "graphed"
    assert "square images" in engine.note
