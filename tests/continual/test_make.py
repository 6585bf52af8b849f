"""Every setting reaches the learner that it is for."""

from dataclasses import replace

import pytest
import torch

from wheretolearn.continual.cifar_lanes import CifarLanes
from wheretolearn.continual.config import LOOK_AHEAD, ContinualConfig
from wheretolearn.continual.lanes import ModuleLanes
from wheretolearn.continual.learners.er import ExperienceReplay
from wheretolearn.continual.learners.gem import GEM
from wheretolearn.continual.learners.la_maml import LaMAML
from wheretolearn.continual.learners.make import _side_by_side, make_learner
from wheretolearn.continual.learners.mer import MER
from wheretolearn.continual.learners.sgd import SGD
from wheretolearn.continual.mlp_lanes import MLPLanes
from wheretolearn.errors import ConfigError
from wheretolearn.masks.elementwise import RULES
from wheretolearn.models import build

# None is a default.
SETTINGS = ContinualConfig(
    glances=3, width=7, hidden_layers=1, lr=0.03, mask_lr=0.4, memory=17, replay_batch=6, meta_loss="final",
    clip_norm=1.5, straight_through_scale=0.3, memory_strength=0.2, mer_steps=4, mer_beta=0.6, mer_gamma=0.7,
)  # fmt: skip
SEEDS, RATES, MASK_RATES = (5, 6), (0.03, 0.05), (0.4, 0.8)
IMAGE, CLASSES, TASKS = (4, 4, 1), 3, 5


def make(learner, **settings):
    configs = [
        replace(SETTINGS, **{"learner": learner, "lr": lr, "mask_lr": mask_lr, **settings})
        for lr, mask_lr in zip(RATES, MASK_RATES, strict=True)
    ]
    return make_learner(configs, SEEDS, IMAGE, CLASSES, TASKS)


def by_lane(tensor):
    assert tensor.shape == (2, 1)
    return tensor.flatten().tolist()


def test_no_setting_of_these_tests_is_the_default():
    defaults = ContinualConfig()
    names = (
        "glances", "width", "hidden_layers", "lr", "mask_lr", "memory", "replay_batch", "meta_loss", "clip_norm",
        "straight_through_scale", "memory_strength", "mer_steps", "mer_beta", "mer_gamma",
    )  # fmt: skip
    assert [name for name in names if getattr(SETTINGS, name) == getattr(defaults, name)] == []


@pytest.mark.parametrize("kind", ["sgd", "er", "mer", "gem", *LOOK_AHEAD])
def test_lanes_have_their_seeds_and_networks(kind):
    learner = make(kind)
    assert learner.seeds.tolist() == list(SEEDS)
    assert learner.glances == 3
    assert isinstance(learner.network, MLPLanes)
    for lane, seed in enumerate(SEEDS):
        expected = dict(SETTINGS.build_model(IMAGE, CLASSES, seed).named_parameters())
        views = learner.network.views(learner.weights)
        assert {name: tuple(view[lane].shape) for name, view in views.items()} == {
            "layer1.weight": (7, 16), "layer1.bias": (7,), "head.weight": (3, 7), "head.bias": (3,)
        }  # fmt: skip
        assert all(torch.equal(view[lane], expected[name]) for name, view in views.items())


@pytest.mark.parametrize(("kind", "made"), [("sgd", SGD), ("er", ExperienceReplay), ("mer", MER), ("gem", GEM)])
def test_rates_of_learners_without_a_mask(kind, made):
    learner = make(kind)
    assert type(learner) is made
    assert by_lane(learner.lr) == pytest.approx(RATES)
    assert learner.closed() == {}


@pytest.mark.parametrize("kind", ["er", "mer", *LOOK_AHEAD])
def test_replay(kind):
    learner = make(kind)
    assert (learner.memory_size, learner.replay_batch) == (17, 6)


def test_sgd_replays_nothing():
    learner = make("sgd")
    assert (learner.memory_size, learner.replay_batch) == (0, 0)


def test_mer():
    learner = make("mer")
    assert learner.steps == 4
    assert (learner.beta.item(), learner.gamma.item()) == pytest.approx((0.6, 0.7))
    assert learner.clip_norm is None  # the setting is La-MAML's


def test_gem():
    learner = make("gem")
    assert (learner.tasks, learner.memory_per_task) == (TASKS, 3)  # 17 // 5
    assert by_lane(learner.margin) == pytest.approx([0.2, 0.2])
    assert learner.clip_norm is None  # the setting is La-MAML's


def test_gem_keeps_no_more_than_it_was_given():
    assert make("gem", memory=5).memory_per_task == 1
    with pytest.raises(ConfigError, match=r"memory=4 is less than one .* 5 tasks: .*memory=5 or more"):
        make("gem", memory=4)


@pytest.mark.parametrize(
    ("kind", "rule", "scale"),
    [("la-maml", "dying-relu", 1.0), ("sparse-la-maml", "binary", 0.3), ("sparse-relu-la-maml", "relu", 1.0)],
)
def test_look_ahead(kind, rule, scale):
    learner = make(kind)
    assert type(learner) is LaMAML
    assert learner.rule is RULES[rule]
    assert by_lane(learner.alpha) == pytest.approx(RATES)
    assert by_lane(learner.mask_lr) == pytest.approx(MASK_RATES)
    assert (learner.every_step, learner.clip_norm, learner.scale) == (False, 1.5, scale)
    assert make(kind, meta_loss="every-step").every_step
    assert make(kind, clip_norm=None).clip_norm is None
    start = learner.rates()  # all open, at alpha_0
    assert start.min(1).values.tolist() == start.max(1).values.tolist() == pytest.approx(RATES)


def test_convolutional_networks_learn_all_at_once_on_a_gpu():
    models = [build("cifar_net", width=4, seed=seed) for seed in (0, 1)]
    assert type(_side_by_side(models, "cuda")) is CifarLanes
    assert type(_side_by_side(models, "cpu")) is ModuleLanes


def test_images_that_are_not_square_are_refused_for_it():
    config = replace(SETTINGS, learner="er", problem="split", model="cifar_net")
    with pytest.raises(ConfigError, match="square images, not 12x16"):
        config.build_model((12, 16, 3), 10, 0)


def test_a_network_that_is_no_perceptron():
    config = replace(SETTINGS, learner="er", problem="split", model="cifar_net")
    learner = make_learner([config], [5], (32, 32, 3), 10, 5)
    assert isinstance(learner.network, ModuleLanes)
    expected = config.build_model((32, 32, 3), 10, 5)
    views = learner.network.views(learner.weights)
    assert all(torch.equal(views[name][0], parameter) for name, parameter in expected.named_parameters())
