"""Where the fastest arithmetic cannot run, the next one does, and the user hears of it."""

import pytest
import torch

from wheretolearn import masks, models
from wheretolearn.engine import choose
from wheretolearn.engine.choose import arithmetic_that_runs, make_arithmetic, make_evaluator
from wheretolearn.engine.eager import EagerEvaluator
from wheretolearn.engine.fallback import FirstThatRuns
from wheretolearn.engine.graphed import jobs_of
from wheretolearn.engine.task import InnerLoop, Task
from wheretolearn.errors import ConfigError

INNER = InnerLoop(2, 0.1)


@pytest.fixture
def model():
    return models.build("conv4", ways=3, width=16, channels=1, size=16, seed=0)


def a_task(seed=0):
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(3).repeat(2)
    images = torch.rand((2, 6, 1, 16, 16), generator=random)
    return Task(images[0], labels, images[1], labels)


class Broken:
    """Fails as kernels do on a GPU that is too small for them."""

    def __init__(self, *_, **__):
        pass

    def settings(self, *_):
        raise RuntimeError("out of resource: shared memory\nRequired: 200000")

    meta_gradients = adaptations = probabilities = settings


@pytest.mark.parametrize("ask", ["meta_gradients", "adaptations", "probabilities"])
def test_the_next_one_takes_over_and_gives_what_it_gives_alone(model, ask):
    jobs = jobs_of(model, masks.fixed(model), INNER, [a_task(0), a_task(1)])
    working = make_arithmetic("graphed", model, INNER)
    notes = []
    both = FirstThatRuns({"the fast one": Broken, "the slow one": lambda: working}, notes.append)
    with torch.no_grad():
        found, expected = getattr(both, ask)(jobs, 2), getattr(working, ask)(jobs, 2)
        getattr(both, ask)(jobs, 2)
    assert notes == ["the fast one cannot run here, a slower way is tried: out of resource: shared memory"]
    if ask == "probabilities":
        assert torch.equal(found, expected)
        return
    losses = [[result.loss for result in results] for results in (found, expected)]
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))


def test_what_cannot_even_be_made_is_passed_over(model):
    def missing():
        raise ImportError("no module called triton")

    both = FirstThatRuns({"kernels": missing, "the slow one": lambda: make_arithmetic("graphed", model, INNER)})
    with both.settings(), torch.no_grad():
        assert both.probabilities(jobs_of(model, masks.fixed(model), INNER, [a_task()]), 1).shape == (1, 6, 3)


@pytest.mark.parametrize("error", [ConfigError("wrong"), torch.OutOfMemoryError("out of memory")])
def test_a_slower_way_is_no_answer_to_these(model, error):
    def fail():
        raise error

    notes = []
    both = FirstThatRuns(
        {"kernels": fail, "the slow one": lambda: make_arithmetic("graphed", model, INNER)}, notes.append
    )
    with pytest.raises(type(error)):
        both.probabilities([], 1)
    assert not notes


def test_the_last_one_says_why_it_fails():
    with pytest.raises(RuntimeError, match="shared memory"):
        FirstThatRuns({"one": Broken, "two": Broken}).probabilities([], 1)


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_from_kernels_over_the_compiler_to_plain_operations(model, precision, monkeypatch):
    tried = []

    class Uncompilable(choose.CompiledArithmetic):
        def __init__(self, model, clip_norm, precision, compiled):
            tried.append(compiled)
            super().__init__(model, clip_norm, precision, compiled)

        def _job_probabilities(self, job, steps):
            if tried[-1]:
                raise RuntimeError("Failed to find C compiler")
            return super()._job_probabilities(job, steps)

    monkeypatch.setattr(choose, "FusedConv4", Broken)
    monkeypatch.setattr(choose, "CompiledArithmetic", Uncompilable)
    notes = []
    arithmetic = arithmetic_that_runs("fused", model, INNER, precision, notes.append)
    with torch.no_grad():
        assert arithmetic.probabilities(jobs_of(model, masks.fixed(model), INNER, [a_task()]), 1).shape == (1, 6, 3)
    assert tried == [True, False]
    assert [note.split(" cannot")[0] for note in notes] == ["the fused engine", "the graphed engine"]


def test_float16_has_no_slower_way(model, monkeypatch):
    monkeypatch.setattr(choose, "FusedConv4", Broken)
    notes = []
    arithmetic = arithmetic_that_runs("fused", model, INNER, "float16", notes.append)
    with pytest.raises(
        ConfigError, match="precision=float16 needs the fused engine: use one of float32, tf32, bfloat16"
    ):
        arithmetic.probabilities([], 1)
    assert "shared memory" in notes[0]


def test_an_evaluation_goes_on_without_kernels(model, monkeypatch):
    mask = masks.fixed(model)
    expected = EagerEvaluator(model, mask, INNER).accuracies([a_task(seed) for seed in range(3)], 2)
    monkeypatch.setattr(choose, "choose", lambda *_: "fused")
    monkeypatch.setattr(choose, "FusedConv4", Broken)
    notes = []
    evaluator = make_evaluator(model, mask, INNER, notify=notes.append)
    assert torch.equal(evaluator.accuracies([a_task(seed) for seed in range(3)], 2), expected)
    assert len(notes) == 1
    with pytest.raises(RuntimeError, match="shared memory"):  # who asks for kernels hears that there are none
        make_evaluator(model, mask, INNER, kind="fused").accuracies([a_task()], 2)
