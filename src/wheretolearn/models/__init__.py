"""The networks of the paper, as plain modules. The classification layer is called ``head`` and comes last."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from wheretolearn.errors import ConfigError
from wheretolearn.models.cifar_net import CifarNet
from wheretolearn.models.conv4 import Conv4
from wheretolearn.models.mlp import MLP
from wheretolearn.models.resnet12 import ResNet12

__all__ = ["MLP", "CifarNet", "Conv4", "ResNet12", "build"]

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "conv4": Conv4,
    "resnet12": ResNet12,
    "mlp": MLP,
    "cifar_net": CifarNet,
}


def build(name: str, *, seed: int | None = None, **settings: Any) -> nn.Module:
    """The model called ``name``, on the CPU: ``conv4``, ``resnet12``, ``mlp`` or ``cifar_net``.

    The same ``seed`` gives the same weights and leaves PyTorch's own random state alone; without one the
    weights come from that state.
    """
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}; {_nearest(name, MODELS)}")
    model = MODELS[name]
    known = inspect.signature(model).parameters
    for setting in settings:
        if setting not in known:
            raise ConfigError(f"model {name!r} has no setting {setting!r}; {_nearest(setting, known)}")
    with torch.device("cpu"):
        if seed is None:
            return model(**settings)
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed: it would reseed every accelerator as well.
            torch.default_generator.manual_seed(seed)
            return model(**settings)


def _nearest(given: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(known)}"
