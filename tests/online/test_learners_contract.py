"""What every online learner promises."""

import pytest
import torch

from wheretolearn.engine.fused import FusedConv4
from wheretolearn.models import build
from wheretolearn.online.learners.bgd import BGD
from wheretolearn.online.learners.bgd_inner import GatesInner, WeightsInner
from wheretolearn.online.learners.c_maml import CMAML
from wheretolearn.online.learners.c_maml_masks import c_maml_mask
from wheretolearn.online.learners.maml import MAML
from wheretolearn.online.learners.online_adam import OnlineAdam
from wheretolearn.online.recorded import DIVERGED, RecordedStep

WAYS, SHOTS, SIZE = 4, 2, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def network(seed):
    return build("conv4", ways=WAYS, channels=1, size=SIZE, width=4, seed=seed)


def c_maml(variant):
    def make(model):
        mask, inner_lr = c_maml_mask(variant, model, inner_lr=0.3, generator=torch.Generator().manual_seed(5))
        return CMAML(
            model, mask, inner_steps=3, inner_lr=inner_lr, lr=0.01, mask_lr=0.05, switch_margin=0.4, update_scale=1.0,
            buffer=4,
        )  # fmt: skip

    return make


def bgd(inner=lambda model: None, clip_norm=None):
    settings = {"mean_eta": 5.0, "initial_std": 0.02, "samples": 2, "seed": 3, "clip_norm": clip_norm}
    return lambda model: BGD(model, **settings, inner=inner(model))


LEARNERS = {
    "c-maml": c_maml("c-maml"),
    "c-maml-fixed": c_maml("c-maml-fixed"),
    "sparse-c-maml": c_maml("sparse-c-maml"),
    "sparse-relu-c-maml": c_maml("sparse-relu-c-maml"),
    "maml": lambda model: MAML(model, inner_steps=2, inner_lr=0.1),
    "anil": lambda model: MAML(model, inner_steps=2, inner_lr=0.1, select="head"),
    "online-adam": lambda model: OnlineAdam(model, lr=0.01),
    "bgd": bgd(),
    "metabgd": bgd(lambda model: WeightsInner(model, steps=2, lr=0.1), clip_norm=4.0),
    "metacog": bgd(lambda model: GatesInner(model, steps=2, lr=0.1, l1=0.01)),
}
FROZEN = ("maml", "anil")  # they start from the weights they are given, and only adapt


def batches(stream):
    generator = torch.Generator().manual_seed(1)
    prototypes = torch.randn(WAYS, 1, SIZE, SIZE, generator=generator)
    labels = torch.arange(WAYS).repeat_interleave(SHOTS)
    return [
        (
            prototypes[labels] + 0.3 * torch.randn(WAYS * SHOTS, 1, SIZE, SIZE, generator=generator),
            (labels + ord(task)) % WAYS,
        )
        for task in stream
    ]


def wait(device):
    if device == "cuda":  # steps are only queued
        torch.cuda.synchronize()


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def run(learner, stream):
    """Everything that shows: predictions, detections, and the state in the end."""
    shown = []
    for inputs, labels in stream:
        shown.append(learner.predict(inputs))
        learner.observe(inputs, labels)
        shown.append(torch.tensor(learner.detected))
    return shown, learner.state()


@pytest.mark.parametrize("name", LEARNERS)
def test_a_restored_learner_goes_on_bit_for_bit(name):
    stream = batches("aaabbcccca")
    learner = LEARNERS[name](network(0))
    states, shown = [], []
    for step in range(len(stream)):
        states.append(learner.state())
        shown += run(learner, stream[step : step + 1])[0]
    kept = [{key: tensor.clone() for key, tensor in state.items()} for state in states]
    final = learner.state()
    # Into a learner with a past of its own, all of which the state must replace.
    other = LEARNERS[name](network(0 if name in FROZEN else 7))
    run(other, batches("ddda"))
    for split in (4, 2, 0):  # right after a detected switch, with batches kept, before the first step
        other.restore(states[split])
        assert equal(other.state(), kept[split])
        shown_again, final_again = run(other, stream[split:])
        assert all(torch.equal(a, b) for a, b in zip(shown[2 * split :], shown_again, strict=True))
        assert equal(final, final_again)
    assert all(map(equal, states, kept)), "a state that was taken has changed"


@pytest.mark.parametrize("name", LEARNERS)
def test_predicting_changes_nothing_and_takes_no_notice_of_the_model(name):
    model = network(0)
    learner = LEARNERS[name](model)
    stream = batches("aab")
    before_any = learner.predict(stream[0][0])
    run(learner, stream)
    state, rest = learner.state(), torch.get_rng_state()
    first = learner.predict(stream[0][0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(first, learner.predict(stream[0][0]))
    assert not first.requires_grad
    assert first.shape == (WAYS * SHOTS, WAYS)
    assert equal(state, learner.state())
    assert torch.equal(rest, torch.get_rng_state())
    assert not torch.equal(first, before_any)


@pytest.mark.parametrize("name", LEARNERS)
def test_only_c_maml_looks_for_switches_and_only_masks_close(name):
    learner = LEARNERS[name](network(0))
    run(learner, batches("aaab"))
    if name.endswith("c-maml") or name == "c-maml-fixed":
        assert learner.detected
    else:
        assert not learner.detected
    assert (learner.closed() != {}) == (name in ("sparse-c-maml", "sparse-relu-c-maml"))
    assert all(isinstance(share, float) and 0 <= share <= 1 for share in learner.closed().values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in LEARNERS if "c-maml" not in name])
def test_a_recorded_step_predicts_and_learns_what_the_plain_one_does(name, device):
    stream = [(inputs.double().to(device), labels.to(device)) for inputs, labels in batches("aaabbcccca")]
    plain, fast = (LEARNERS[name](network(0).double().to(device)) for _ in range(2))
    recorded, found_right = RecordedStep(fast, torch.device(device)), torch.zeros((), dtype=torch.int32, device=device)
    for inputs, labels in stream:
        right = (plain.predict(inputs).argmax(1) == labels).sum()
        plain.observe(inputs, labels)
        recorded.step(inputs, labels, found_right)
        wait(device)
        assert found_right.item() == right
    found = fast.state()
    for key, tensor in plain.state().items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-7, atol=1e-9)
    recorded.step(inputs * float("nan"), labels, found_right)
    wait(device)
    assert found_right.item() == DIVERGED


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_metabgd_by_kernels_of_its_own_equals_autograd_cuda():
    model = build("conv4", ways=WAYS, channels=1, size=SIZE, width=16, seed=0).cuda()
    inner = WeightsInner(model, steps=4, lr=0.1)
    plain, fast = (
        BGD(model, mean_eta=5.0, initial_std=0.02, samples=3, seed=3, inner=inner, arithmetic=arithmetic)
        for arithmetic in (None, FusedConv4(model))
    )
    recorded, right = RecordedStep(fast, torch.device("cuda")), torch.zeros((), dtype=torch.int32, device="cuda")
    for inputs, labels in batches("aabb"):
        plain.observe(inputs.cuda(), labels.cuda())
        recorded.step(inputs.cuda(), labels.cuda(), right)
    wait("cuda")
    for own, theirs in ((fast.mean, plain.mean), (fast.std, plain.std), (fast.in_use, plain.in_use)):
        torch.testing.assert_close(own, theirs, rtol=0, atol=2e-4)
    assert not torch.allclose(fast.in_use, fast.mean, atol=1e-2)


def test_noise_depends_on_the_seed_and_the_step():
    stream = batches("ab")
    make = lambda seed: BGD(network(0), mean_eta=5.0, initial_std=0.02, samples=2, seed=seed)  # noqa: E731
    first, again, other = make(0), make(0), make(1)
    early = first.noise()
    for learner in (first, again, other):
        run(learner, stream)
    assert torch.equal(first.std, again.std)
    assert not torch.equal(first.std, other.std)
    assert not torch.equal(early, first.noise())
