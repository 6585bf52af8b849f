"""All settings of a few-shot run."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from wheretolearn import masks, models
from wheretolearn.batch_norm import BatchNormMode
from wheretolearn.config import setting
from wheretolearn.data.episodes import EpisodeShape
from wheretolearn.engine.choose import EngineKind
from wheretolearn.engine.graphed import Precision
from wheretolearn.engine.task import InnerLoop
from wheretolearn.errors import ConfigError
from wheretolearn.masks import GradientMask

MaskKind = Literal["binary", "relu", "exp", "linear", "fixed", "generated"]


@dataclass(frozen=True)
class FewShotConfig:
    data: str = setting("glyphs", "image set to learn from; see `wheretolearn data list`")
    train_split: str = setting("train", "split whose classes make the training tasks")
    validation_split: str = setting("validation", "split that early stopping looks at")
    ways: int = setting(5, "classes per task")
    shots: int = setting(1, "labelled images per class")
    queries: int = setting(15, "held-out images per class")

    model: Literal["conv4", "resnet12"] = setting("conv4", "network")
    width: int = setting(64, "channels of conv4")
    resnet_size: Literal["small", "large"] = setting("small", "channels of resnet12: 64-128-256-512 or 64-160-320-640")
    bias: bool = setting(True, "whether conv4 has bias parameters")
    batch_norm: BatchNormMode = setting("batch", "statistics used: batch (transductive), support or running")

    mask: MaskKind = setting("binary", "kind of gradient mask; fixed learns none (MAML, ANIL, BOIL)")
    adapt: str = setting("all", "parameters the inner loop may change: all, head, body, or a pattern of names")
    initial_sparsity: float | None = setting(None, "share of closed weights at the start; none: as initialised")
    straight_through_scale: float = setting(1.0, "factor of the straight-through gradient of binary masks")
    order: Literal["first", "second"] = setting("first", "meta-gradient: first order, or through the inner loop")

    inner_steps: int = setting(5, "gradient steps per task in training (K_train)")
    test_inner_steps: int = setting(10, "gradient steps per task in validation and testing (K_test)")
    inner_lr: float = setting(0.1, "inner learning rate (alpha); 1 for relu, exp and linear masks")
    inner_clip_norm: float | None = setting(None, "bound on the norm of each inner gradient")

    outer_steps: int = setting(40_000, "updates of theta and mask")
    tasks_per_step: int = setting(4, "tasks per update")
    theta_lr: float = setting(1e-3, "outer learning rate of the weights (gamma_theta)")
    mask_lr: float = setting(1e-3, "outer learning rate of the mask (gamma_m)")
    optimizer: Literal["adam", "nesterov"] = setting("adam", "outer optimizer; nesterov is SGD with momentum 0.9")

    engine: EngineKind = setting("auto", "eager, graphed (CUDA graphs, compiled), or auto: the fast one where it can")
    precision: Precision = setting("float32", "of the network's passes on a GPU: float32, tf32 or bfloat16")

    validate_every: int = setting(500, "outer steps between validations")
    validation_tasks: int = setting(300, "tasks per validation")
    log_every: int = setting(50, "outer steps between records of loss and sparsity")
    checkpoint_every: int = setting(500, "outer steps between checkpoints")

    def __post_init__(self) -> None:
        positive = (
            "ways shots queries width inner_lr outer_steps tasks_per_step validate_every validation_tasks log_every "
            "checkpoint_every theta_lr mask_lr straight_through_scale inner_clip_norm"
        )
        for name in positive.split():
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be greater than 0, not {getattr(self, name)}")
        for name in ("inner_steps", "test_inner_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.initial_sparsity is not None and not 0 <= self.initial_sparsity <= 1:
            raise ConfigError(f"initial_sparsity must lie between 0 and 1, not {self.initial_sparsity}")
        if self.mask == "fixed" and self.initial_sparsity is not None:
            raise ConfigError("initial_sparsity has no meaning for mask=fixed; leave it out, or choose another mask")

    @property
    def inner(self) -> InnerLoop:
        return InnerLoop(self.inner_steps, self.inner_lr, self.batch_norm, self.inner_clip_norm, self.order)

    @property
    def episode(self) -> EpisodeShape:
        return EpisodeShape(self.ways, self.shots, self.queries)

    def build_model(self, image_size: int, channels: int, seed: int) -> nn.Module:
        if self.model == "conv4":
            settings: dict[str, Any] = {"size": image_size, "width": self.width, "bias": self.bias}
        else:
            settings = {"size": self.resnet_size}
        return models.build(self.model, ways=self.ways, channels=channels, seed=seed, **settings)

    def build_mask(self, model: nn.Module, seed: int) -> GradientMask:
        if self.mask == "fixed":
            return masks.fixed(model, self.adapt)
        settings: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed)}
        if self.initial_sparsity is not None:
            if self.mask not in ("binary", "relu", "generated"):
                raise ConfigError(f"initial_sparsity has no meaning for mask={self.mask}, which never closes a weight")
            settings["initial_sparsity"] = self.initial_sparsity
        if self.mask in ("binary", "generated"):
            settings["straight_through_scale"] = self.straight_through_scale
        return masks.MAKERS[self.mask](model, self.adapt, **settings)
