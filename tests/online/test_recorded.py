"""Steps that cannot be recorded as CUDA graphs run without them, as if nothing had happened."""

import pytest
import torch
from torch import nn

from wheretolearn import masks
from wheretolearn.engine.compiled import CompiledArithmetic
from wheretolearn.errors import NonFiniteError
from wheretolearn.online import recorded
from wheretolearn.online.c_maml_lanes import CMAMLLanes
from wheretolearn.online.learners.c_maml import CMAML
from wheretolearn.online.learners.online_adam import OnlineAdam
from wheretolearn.online.recorded import RecordedStep

STEPS = 6


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(9, 4, generator=generator), torch.arange(3).repeat_interleave(3)) for _ in range(STEPS)]


def cannot_record(work, *_):
    """As on a GPU: the work is done once, and recording it fails."""
    work()
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


def assert_same(one, two):
    first, second = one.state(), two.state()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_step(monkeypatch):
    monkeypatch.setattr(recorded, "record", cannot_record)
    plain, tried = (OnlineAdam(network(), lr=0.01) for _ in range(2))
    notes = []
    steps = [RecordedStep(learner, torch.device("cpu"), notify=notes.append) for learner in (plain, tried)]
    steps[1].recording = True
    for inputs, labels in batches(0):
        found = [torch.zeros((), dtype=torch.int32) for _ in steps]
        for step, right in zip(steps, found, strict=True):
            step.step(inputs, labels, right)
        assert found[0] == found[1]
    assert_same(plain, tried)
    assert len(notes) == 1
    assert notes[0].endswith("runs without one, which is slower: operation not permitted when stream is capturing")


def c_maml():
    model = network()
    return CMAML(
        model,
        masks.binary(model),
        inner_steps=2,
        inner_lr=0.1,
        lr=0.01,
        mask_lr=0.1,
        switch_margin=0.01,
        update_scale=1.0,
        buffer=2,
    )


def test_lanes(monkeypatch):
    monkeypatch.setattr(CMAMLLanes, "_recorded", lambda self, work: cannot_record(work))
    plain, tried = ([c_maml(), c_maml()] for _ in range(2))
    notes = []
    lanes = [
        CMAMLLanes(learners, CompiledArithmetic(network(), compiled=False), notes.append) for learners in (plain, tried)
    ]
    lanes[1].recording = True
    before = plain[0].state()
    for one, two in zip(batches(1), batches(2), strict=True):
        found = [own.step(*map(torch.stack, zip(one, two, strict=True))) for own in lanes]
        assert torch.equal(*found)
    for learner, other in zip(plain, tried, strict=True):
        assert_same(learner, other)
    assert not torch.equal(before["theta.0.weight"], plain[0].state()["theta.0.weight"])  # it made meta-updates
    assert len(notes) == 1


def test_what_is_wrong_with_a_run_is_no_reason_to_go_on_without_a_graph(monkeypatch):
    def diverged(*_):
        raise NonFiniteError("not finite")

    monkeypatch.setattr(recorded, "record", diverged)
    step = RecordedStep(OnlineAdam(network(), lr=0.01), torch.device("cpu"))
    step.recording = True
    (first, second, *_) = batches(0)
    step.step(*first, torch.zeros((), dtype=torch.int32))
    with pytest.raises(NonFiniteError):
        step.step(*second, torch.zeros((), dtype=torch.int32))
