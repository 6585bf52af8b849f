"""Every setting reaches the learner that it is for."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from wheretolearn.batch_norm import parameter_names
from wheretolearn.errors import ConfigError
from wheretolearn.online.config import FROZEN, LearnerKind, OnlineConfig
from wheretolearn.online.learners.bgd import BGD
from wheretolearn.online.learners.bgd_inner import GatesInner, WeightsInner
from wheretolearn.online.learners.c_maml import CMAML
from wheretolearn.online.learners.make import make_learner
from wheretolearn.online.learners.maml import MAML
from wheretolearn.online.learners.online_adam import OnlineAdam

# None is a default.
SETTINGS = OnlineConfig(
    width=4, lr=0.02, inner_steps=3, inner_lr=0.25, mask_lr=0.07, mask_init="kaiming", switch_margin=0.9,
    update_scale=0.6, buffer=7, restart="next batch", mean_eta=4.0, initial_std=0.03, samples=2, l1=0.2, logit_init=0.8,
    clip_norm=9.0, order="second",
)  # fmt: skip
SHAPE = (16, 16, 1)


def made(learner, **settings):
    pretrain = learner in ("maml", "anil")
    config = replace(SETTINGS, **{"learner": learner, "pretrain": pretrain, **settings})
    model = config.build_model(SHAPE, 0)
    return model, make_learner(config, model, 5)


def rates_of(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def test_no_setting_of_these_tests_is_the_default():
    defaults = OnlineConfig()
    names = "width lr inner_steps inner_lr mask_lr switch_margin update_scale buffer mean_eta initial_std samples l1"
    for name in [*names.split(), "restart", "logit_init", "clip_norm", "order"]:
        assert getattr(SETTINGS, name) != getattr(defaults, name), name


@pytest.mark.parametrize("kind", ["sparse-c-maml", "sparse-relu-c-maml"])
def test_masks_start_apart_from_the_weights(kind, likeness):
    config = replace(SETTINGS, learner=kind, width=32)
    model = config.build_model(SHAPE, 5)
    raw = make_learner(config, model, 5).mask.tensors()
    names = [name for name in raw if "norm" not in name]
    assert likeness([dict(model.named_parameters())[name] for name in names], [raw[name] for name in names]) < 0.06


@pytest.mark.parametrize("kind", ["c-maml", "c-maml-fixed", "sparse-c-maml", "sparse-relu-c-maml"])
def test_c_maml_and_its_variants(kind):
    model, learner = made(kind)
    assert type(learner) is CMAML
    assert rates_of(learner.optimizer) == ([0.02] if kind == "c-maml-fixed" else [0.02, 0.07])
    assert (learner.inner_steps, learner.switch_margin, learner.update_scale, learner.buffer_limit) == (3, 0.9, 0.6, 7)
    assert learner.restart == "next batch"
    rates = learner.rates()
    assert set(rates) == {name for name, _ in model.named_parameters()} - parameter_names(model)
    values = torch.cat([rate.flatten() for rate in rates.values()])
    if kind in ("c-maml", "c-maml-fixed"):
        assert values.unique().tolist() == [0.25]
    elif kind == "sparse-c-maml":
        assert values.unique().tolist() == [0.0, 0.25]
        assert (made(kind, mask_init="open")[1].rates()["head.weight"] == 0.25).all()
    else:
        assert 0.005 <= values.min() < 0.02
        assert 0.09 < values.max() <= 0.1
    assert set(made(kind, adapt_norm=True)[1].rates()) == {name for name, _ in model.named_parameters()}


UPPER = ("block[34].*", "head.*")


def adapted_by(learner):
    return set(learner.inner.names if isinstance(learner, BGD) else learner.phi)


@pytest.mark.parametrize("kind", ["c-maml", "c-maml-fixed", "sparse-c-maml", "sparse-relu-c-maml", "maml", "metabgd"])
def test_only_a_part_may_adapt(kind):
    model, learner = made(kind, adapt=UPPER)
    whole = {name for name, _ in model.named_parameters()} - parameter_names(model)
    assert adapted_by(learner) == {name for name in whole if name[:6] not in ("block1", "block2")}
    assert adapted_by(made(kind, adapt="head")[1]) == {"head.weight", "head.bias"}
    with pytest.raises(ConfigError, match=r"no trainable parameter matches 'block5\.\*'"):
        made(kind, adapt=("head.*", "block5.*"))


def test_masks_depend_on_the_seed():
    config = replace(SETTINGS, learner="sparse-c-maml")
    model = config.build_model(SHAPE, 0)
    first, again, other = (make_learner(config, model, seed).mask.raw["head.weight"] for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kind", ["maml", "anil"])
def test_maml_and_anil(kind):
    model, learner = made(kind)
    assert type(learner) is MAML
    assert learner.inner_steps == 3
    whole = {name for name, _ in model.named_parameters()} - parameter_names(model)
    assert set(learner.rates) == ({"head.weight", "head.bias"} if kind == "anil" else whole)
    assert all((rate == 0.25).all() for rate in learner.rates.values())


def test_online_adam():
    _, learner = made("online-adam")
    assert type(learner) is OnlineAdam
    assert rates_of(learner.optimizer) == [0.02]


@pytest.mark.parametrize("kind", ["bgd", "metabgd", "metacog"])
def test_bgd_and_its_kin(kind):
    model, learner = made(kind)
    assert type(learner) is BGD
    assert (learner.mean_eta, learner.samples, learner.clip_norm, learner.seed) == (4.0, 2, 9.0, 5)
    assert learner.std.unique().tolist() == pytest.approx([0.03])
    inner = learner.inner
    if kind == "bgd":
        assert inner is None
        return
    assert type(inner) is (WeightsInner if kind == "metabgd" else GatesInner)
    assert (inner.steps, inner.lr, inner.order) == (3, 0.25, "second")
    moved = set(inner.names) if kind == "metabgd" else {*inner.gated, *inner.head}
    assert moved == {name for name, _ in model.named_parameters()} - parameter_names(model)
    if kind == "metacog":
        assert (inner.l1, inner.logit_init) == (0.2, 0.8)
        assert set(inner.head) == {"head.weight", "head.bias"}


@pytest.mark.parametrize("kind", get_args(LearnerKind))
def test_settings_that_are_called_unused_have_no_effect(kind):
    generator = torch.Generator().manual_seed(0)
    stream = [(torch.randn(20, 1, 16, 16, generator=generator), torch.arange(20) % 10) for _ in range(4)]
    defaults, states = OnlineConfig(), []
    _, learner = made(kind, adapt="block4.*")
    config = replace(SETTINGS, learner=kind, pretrain=kind in FROZEN, adapt="block4.*")
    changed = {name: getattr(defaults, name) for name in config.unused if not name.startswith("pretrain_")}
    assert changed
    for own in (learner, made(kind, **{"adapt": "block4.*", **changed})[1]):
        for inputs, labels in stream:
            own.observe(inputs, labels)
        states.append(own.state())
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
