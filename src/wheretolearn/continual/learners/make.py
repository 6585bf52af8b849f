"""The learner that settings ask for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wheretolearn.continual.cifar_lanes import CifarLanes
from wheretolearn.continual.config import ContinualConfig
from wheretolearn.continual.lanes import LaneNetwork, ModuleLanes
from wheretolearn.continual.learners.base import Learner
from wheretolearn.continual.learners.er import ExperienceReplay
from wheretolearn.continual.learners.gem import GEM
from wheretolearn.continual.learners.la_maml import LaMAML, LookAheadRule
from wheretolearn.continual.learners.mer import MER
from wheretolearn.continual.learners.sgd import SGD
from wheretolearn.continual.mlp_lanes import MLPLanes
from wheretolearn.errors import ConfigError
from wheretolearn.models.cifar_net import CifarNet
from wheretolearn.models.mlp import MLP

RULES: dict[str, LookAheadRule] = {
    "la-maml": "dying-relu",
    "sparse-la-maml": "binary",
    "sparse-relu-la-maml": "relu",
}


def make_learner(
    configs: Sequence[ContinualConfig],
    seeds: Sequence[int],
    image_shape: tuple[int, int, int],
    classes: int,
    tasks: int,
    device: str = "cpu",
) -> Learner:
    """One lane per config and seed; the configs differ in learning rates only."""
    config = configs[0]
    models = [own.build_model(image_shape, classes, seed).to(device) for own, seed in zip(configs, seeds, strict=True)]
    network = _side_by_side(models, device)
    own_seeds = torch.tensor(list(seeds), device=device)
    lr = _by_lane(configs, "lr", device)
    common: dict[str, Any] = {"glances": config.glances}
    replay = common | {"memory": config.memory, "replay_batch": config.replay_batch}
    if config.learner == "sgd":
        return SGD(network, own_seeds, lr=lr, **common)
    if config.learner == "er":
        return ExperienceReplay(network, own_seeds, lr=lr, **replay)
    if config.learner == "mer":
        return MER(
            network, own_seeds, lr=lr, beta=config.mer_beta, gamma=config.mer_gamma, steps=config.mer_steps, **replay
        )
    if config.learner == "gem":
        if config.memory < tasks:
            raise ConfigError(
                f"memory={config.memory} is less than one example for each of {tasks} tasks: "
                f"gem needs memory={tasks} or more"
            )
        return GEM(
            network,
            own_seeds,
            lr=lr,
            tasks=tasks,
            memory_per_task=config.memory // tasks,
            memory_strength=config.memory_strength,
            **common,
        )
    rule = RULES[config.learner]
    return LaMAML(
        network,
        own_seeds,
        rule=rule,
        alpha=lr,
        mask_lr=_by_lane(configs, "mask_lr", device),
        meta_loss=config.meta_loss,
        clip_norm=config.clip_norm,
        straight_through_scale=config.straight_through_scale if rule == "binary" else 1.0,
        **replay,
    )


def _side_by_side(models: Sequence[nn.Module], device: str) -> LaneNetwork:
    perceptrons = [model for model in models if isinstance(model, MLP)]
    if perceptrons:
        return MLPLanes(perceptrons)
    convolutional = [model for model in models if isinstance(model, CifarNet)]
    if convolutional and torch.device(device).type == "cuda":  # on a CPU one lane after another is faster
        return CifarLanes(convolutional)
    return ModuleLanes(models)


def _by_lane(configs: Sequence[ContinualConfig], name: str, device: str) -> Tensor:
    return torch.tensor([getattr(config, name) for config in configs], device=device)
