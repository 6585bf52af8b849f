"""All settings of a continual run."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from wheretolearn import models
from wheretolearn.config import check_rates, setting
from wheretolearn.continual.learners.la_maml import MetaLoss
from wheretolearn.data.streams import ClassOrder
from wheretolearn.errors import ConfigError

ProblemKind = Literal["rotations", "permutations", "split"]
LearnerKind = Literal["sgd", "er", "mer", "gem", "la-maml", "sparse-la-maml", "sparse-relu-la-maml"]
LOOK_AHEAD = ("la-maml", "sparse-la-maml", "sparse-relu-la-maml")
INCIDENTAL = frozenset({"matrix_images", "log_every", "checkpoint_every"})  # settings that make no other experiment


@dataclass(frozen=True)
class ContinualConfig:
    data: str = setting("glyphs", "image set; see `wheretolearn data list`")
    problem: ProblemKind = setting("rotations", "rotations, permutations of pixels, or split: new classes in each task")
    tasks: int = setting(20, "tasks of rotations and permutations")
    examples: int = setting(100, "training images per task of rotations and permutations")
    classes: int = setting(10, "classes, where a set has others for testing than for training (glyphs, omniglot)")
    classes_per_task: int = setting(2, "new classes in each task of split")
    class_order: ClassOrder = setting("fixed", "of split: fixed, or shuffled by the seed")

    batch: int = setting(10, "examples that arrive at a time")
    glances: int = setting(1, "looks at each batch, in another order each time")
    epochs: int = setting(1, "passes through the images of a task before the next comes; more than 1 is multi-pass")

    model: Literal["mlp", "cifar_net"] = setting("mlp", "network")
    width: int = setting(100, "units of each hidden layer of mlp, or channels of cifar_net")
    hidden_layers: int = setting(2, "hidden layers of mlp")

    learner: LearnerKind = setting("sparse-la-maml", "method")
    lr: float = setting(0.1, "learning rate of the weights; alpha_0 of La-MAML and its variants")
    mask_lr: float = setting(1.0, "learning rate of the mask, or of La-MAML's rates (gamma_m)")
    memory: int = setting(200, "examples kept for replay, in all; for gem shared out among the tasks")
    replay_batch: int = setting(10, "examples from memory beside each batch; mer counts the incoming one among them")
    meta_loss: MetaLoss = setting("every-step", "La-MAML's meta-loss: the mean over every inner step, or the final one")
    clip_norm: float | None = setting(2.0, "bound on the norm of La-MAML's gradients of weights and of mask")
    straight_through_scale: float = setting(0.5, "factor of the straight-through gradient of sparse-la-maml")
    memory_strength: float = setting(0.5, "margin of gem's constraints")
    mer_steps: int = setting(1, "batches per example of mer")
    mer_beta: float = setting(0.1, "mer: Reptile step within a batch")
    mer_gamma: float = setting(1.0, "mer: Reptile step across batches")

    matrix_images: int = setting(1000, "test images per task for the accuracy matrix; its diagonal and end take all")
    log_every: int = setting(20, "batches between records of sparsity")
    checkpoint_every: int = setting(200, "batches between checkpoints")

    def __post_init__(self) -> None:
        at_least = {
            "tasks": 1, "examples": 1, "classes": 2, "classes_per_task": 1, "batch": 1, "glances": 1, "epochs": 1,
            "width": 1, "hidden_layers": 0, "memory": 0, "replay_batch": 0, "mer_steps": 1, "matrix_images": 1,
            "log_every": 1, "checkpoint_every": 1,
        }  # fmt: skip
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("lr", "clip_norm"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("mask_lr", "memory_strength"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}")
        check_rates(self, "lr mask_lr")
        for name in ("mer_beta", "mer_gamma"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} must lie above 0 and be at most 1, not {getattr(self, name)}")
        if self.model == "cifar_net" and self.problem != "split":
            raise ConfigError(f"problem={self.problem} is for flat images: use model=mlp")
        if self.learner in ("mer", "gem") and self.memory < 1:
            raise ConfigError(f"learner={self.learner} needs a memory")

    def build_model(self, image_shape: tuple[int, int, int], classes: int, seed: int) -> nn.Module:
        height, wide, channels = image_shape
        if self.model == "mlp":
            sizes = (height * wide * channels, *[self.width] * self.hidden_layers, classes)
            return models.build("mlp", sizes=sizes, seed=seed)
        if height != wide:
            raise ConfigError(f"model=cifar_net takes square images, not {height}x{wide}: use model=mlp")
        return models.build("cifar_net", ways=classes, width=self.width, channels=channels, size=height, seed=seed)
