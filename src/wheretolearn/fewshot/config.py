"""All settings of a few-shot run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from wheretolearn import masks, models
from wheretolearn.batch_norm import BatchNormMode
from wheretolearn.config import check_rates, setting, toml_text
from wheretolearn.data.episodes import EpisodeShape
from wheretolearn.data.random_bits import torch_generator
from wheretolearn.engine.choose import EngineKind
from wheretolearn.engine.graphed import Precision
from wheretolearn.engine.task import InnerLoop
from wheretolearn.errors import ConfigError
from wheretolearn.masks import GradientMask
from wheretolearn.models.conv4 import Init
from wheretolearn.ridge_head import with_ridge_head

MaskKind = Literal["binary", "relu", "exp", "linear", "fixed", "generated", "rows", "curvature", "shrinkage"]

OptimizerKind = Literal["adam", "nesterov"]

# How a run is computed and watched. Whatever else differs makes another experiment.
INCIDENTAL = frozenset(
    {
        *("engine", "precision", "validate_every", "validate_from", "validation_tasks", "validation_inner_steps"),
        *("log_every", "checkpoint_every", "keep_best", "start_from"),
    }
)
# What may be changed in run.json after training, and what while a run is under way, which may then end at another step.
CHANGEABLE_ONCE_TRAINED = INCIDENTAL - {"start_from"} | {"test_inner_steps"}
CHANGEABLE = CHANGEABLE_ONCE_TRAINED | {"outer_steps", "patience"}


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
    init: Init = setting("default", "start of conv4's weights: default (PyTorch's) or kaiming (2.4 times larger)")
    bias: bool = setting(True, "whether conv4 has bias parameters")
    t_net: bool = setting(False, "give conv4 transformations that only the outer loop learns (T-net, MT-net)")
    head: Literal["linear", "ridge"] = setting("linear", "ridge: solved on the support features, no inner steps")
    batch_norm: BatchNormMode = setting("batch", "statistics used: batch (transductive), support or running")

    mask: MaskKind = setting("binary", "kind of gradient mask; fixed learns none (MAML, ANIL, BOIL)")
    adapt: str | tuple[str, ...] = setting(
        "all", "parameters the inner loop may change: all, head, body, or patterns of names"
    )
    adapt_norm: bool = setting(True, "false: the inner loop never changes scale and shift of batch norm")
    mask_init: float | None = setting(
        None, "start value of every multiplier of relu, exp and linear masks, or of shrinkage strengths; none: as usual"
    )
    initial_sparsity: float | None = setting(None, "share of closed weights at the start; none: as initialised")
    straight_through_scale: float = setting(1.0, "factor of the straight-through gradient of binary masks")
    order: Literal["first", "second"] = setting("first", "meta-gradient: first order, or through the inner loop")

    inner_steps: int = setting(5, "gradient steps per task in training (K_train)")
    test_inner_steps: int = setting(
        10, "gradient steps per task in testing, and in validation if it has no own (K_test)"
    )
    inner_lr: float = setting(0.1, "inner learning rate (alpha); 1 for relu, exp and linear masks")
    inner_clip_norm: float | None = setting(None, "bound on the norm of each inner gradient")

    outer_steps: int = setting(40_000, "updates of theta and mask")
    tasks_per_step: int = setting(4, "tasks per update")
    theta_lr: float = setting(1e-3, "outer learning rate of the weights (gamma_theta)")
    mask_lr: float = setting(1e-3, "outer learning rate of the mask (gamma_m)")
    optimizer: OptimizerKind = setting("adam", "outer optimizer; nesterov is SGD with momentum 0.9")
    mask_optimizer: OptimizerKind | None = setting(None, "outer optimizer of the mask; none: the same as optimizer")
    outer_clamp: float | None = setting(None, "bound on every entry of the outer gradients of theta and mask")
    average_decay: float | None = setting(
        None, "validate and keep means of theta and mask over outer steps, with this decay (0.999, say); none: the last"
    )
    start_from: str | None = setting(None, "folder of a finished run whose weights training starts from")
    learn_theta: bool = setting(True, "false: the weights stay as they start, only the mask is learned")

    engine: EngineKind = setting(
        "auto", "eager (autograd), graphed (CUDA graphs), fused (kernels of conv4), auto: the fastest"
    )
    precision: Precision = setting("float32", "of the network's passes on a GPU: float32, tf32, bfloat16 or float16")

    validate_every: int = setting(500, "outer steps between validations")
    validate_from: int = setting(0, "outer step before which there is no validation, as early models are not the best")
    validation_tasks: int = setting(300, "tasks per validation")
    validation_inner_steps: int | None = setting(
        None, "gradient steps per task in validation; none: test_inner_steps. Fewer are faster"
    )
    patience: int | None = setting(
        None, "more validations than this in a row without a better model end training; none: never"
    )
    log_every: int = setting(50, "outer steps between records of loss and sparsity")
    checkpoint_every: int = setting(500, "outer steps between checkpoints")
    keep_best: int = setting(3, "best models by validation that are kept, for ensembles")

    def __post_init__(self) -> None:
        positive = (
            "ways shots queries width inner_lr outer_steps tasks_per_step validate_every validation_tasks log_every "
            "checkpoint_every theta_lr mask_lr straight_through_scale inner_clip_norm outer_clamp keep_best patience"
        )
        for name in positive.split():
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be greater than 0, not {getattr(self, name)}")
        check_rates(self, "inner_lr theta_lr mask_lr mask_init")
        if self.ways == 1:
            raise ConfigError("ways must be at least 2: with one class there is nothing to tell apart")
        for name in ("inner_steps", "test_inner_steps", "validation_inner_steps", "validate_from"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.validation_inner_steps == 0 < self.test_inner_steps:
            raise ConfigError(
                "validation_inner_steps=0 would choose among models that have not adapted: 1 at least, or leave it out"
            )
        if self.average_decay is not None and not 0 < self.average_decay < 1:
            raise ConfigError(f"average_decay must lie between 0 and 1, not {self.average_decay}")
        if self.average_decay is not None and self.batch_norm == "running":
            raise ConfigError(
                "average_decay takes means of weights, and batch_norm=running has statistics that belong to the last "
                "weights: choose batch_norm=batch or support, or leave out average_decay"
            )
        if self.initial_sparsity is not None and not 0 <= self.initial_sparsity <= 1:
            raise ConfigError(f"initial_sparsity must lie between 0 and 1, not {self.initial_sparsity}")
        if self.mask == "fixed" and self.initial_sparsity is not None:
            raise ConfigError("initial_sparsity has no meaning for mask=fixed; leave it out, or choose another mask")
        self._check_mask_init()
        for name, usual in (("t_net", False), ("init", "default")):
            if getattr(self, name) != usual and self.model != "conv4":
                raise ConfigError(f"{name}={str(getattr(self, name)).lower()} needs model=conv4, not {self.model}")
        if self.head == "ridge":
            self._check_ridge()
        if not self.learn_theta and self.mask == "fixed":
            raise ConfigError("learn_theta=false with mask=fixed leaves nothing to learn; choose another mask")
        if not self.learn_theta and self.batch_norm == "running":
            raise ConfigError(
                "learn_theta=false keeps the model as it is, and batch_norm=running would change its statistics: "
                "choose batch or support"
            )

    def _check_mask_init(self) -> None:
        if self.mask_init is None:
            return
        if self.mask not in ("relu", "exp", "linear", "shrinkage"):
            raise ConfigError(f"mask_init has no meaning for mask={self.mask}; leave it out")
        if self.initial_sparsity is not None:
            raise ConfigError("mask_init makes all multipliers equal, so initial_sparsity cannot be met: give only one")
        if self.mask_init <= 0 and self.mask != "linear":
            raise ConfigError(f"mask_init must be greater than 0 for mask={self.mask}, not {self.mask_init}")

    def _check_ridge(self) -> None:
        wanted: dict[str, Any] = {
            "mask": "fixed",
            "inner_steps": 0,
            "test_inner_steps": 0,
            "adapt": "all",
            "order": "first",
            "t_net": False,
            **({"validation_inner_steps": 0} if self.validation_inner_steps is not None else {}),
        }
        wrong = [name for name, value in wanted.items() if getattr(self, name) != value]
        if wrong:
            needed = ", ".join(f"{name}={str(wanted[name]).lower()}" for name in wrong)
            raise ConfigError(f"head=ridge has no inner loop: it needs {needed}")

    def without_effect(self) -> dict[str, str]:
        """Settings that nothing here asks for, whatever they are, each with what it is for."""
        closes = self.mask in ("binary", "generated")
        needed = {
            "width": (self.model == "conv4", "model=conv4"),
            "bias": (self.model == "conv4", "model=conv4"),
            "resnet_size": (self.model == "resnet12", "model=resnet12"),
            "init": (self.start_from is None, "weights that start anew, not from another run's"),
            "straight_through_scale": (closes, "mask=binary or generated"),
            "mask_lr": (self.mask != "fixed", "a mask that is learned"),
            "mask_optimizer": (self.mask != "fixed", "a mask that is learned"),
            "theta_lr": (self.learn_theta, "weights that are learned"),
            "optimizer": (self.learn_theta or self.mask_optimizer is None, "weights that are learned"),
            "inner_lr": (self.head != "ridge", "an inner loop, not head=ridge"),
            "inner_clip_norm": (self.head != "ridge", "an inner loop, not head=ridge"),
            "adapt_norm": (self.head != "ridge", "an inner loop, not head=ridge"),
        }
        return {name: what_for for name, (has_effect, what_for) in needed.items() if not has_effect}

    @property
    def inner(self) -> InnerLoop:
        return InnerLoop(self.inner_steps, self.inner_lr, self.batch_norm, self.inner_clip_norm, self.order, self.head)

    @property
    def episode(self) -> EpisodeShape:
        return EpisodeShape(self.ways, self.shots, self.queries)

    def build_model(self, image_size: int, channels: int, seed: int) -> nn.Module:
        if self.model == "conv4":
            settings: dict[str, Any] = {name: getattr(self, name) for name in ("width", "bias", "t_net", "init")}
            settings["size"] = image_size
        else:
            settings = {"size": self.resnet_size}
        model = models.build(self.model, ways=self.ways, channels=channels, seed=seed, **settings)
        return with_ridge_head(model, self.ways) if self.head == "ridge" else model

    def build_mask(self, model: nn.Module, seed: int) -> GradientMask:
        if self.head == "ridge":
            return masks.fixed(model, "none")
        select = self._adapted_names(model)
        settings: dict[str, Any] = {}
        if self.mask not in ("fixed", "curvature"):  # these start from constants
            settings["generator"] = torch_generator(seed, "mask")  # not the seed alone: the weights were drawn with it
        if self.mask_init is not None:
            logarithmic = self.mask in ("exp", "shrinkage")
            settings["init"] = masks.constant(math.log(self.mask_init) if logarithmic else self.mask_init)
        if self.initial_sparsity is not None:
            if self.mask not in ("binary", "relu", "generated"):
                raise ConfigError(
                    f"initial_sparsity has no meaning for mask={self.mask}; it is for binary, relu and generated"
                )
            settings["initial_sparsity"] = self.initial_sparsity
        if self.mask in ("binary", "generated"):
            settings["straight_through_scale"] = self.straight_through_scale
        return masks.MAKERS[self.mask](model, select, **settings)

    def _adapted_names(self, model: nn.Module) -> Sequence[str]:
        """The parameters that the inner loop may change."""
        choose = masks.selected_names if self.adapt_norm else masks.without_batch_norm
        names = choose(model, self.adapt)
        if isinstance(model, models.Conv4):
            kept = model.transform_names()
            names = tuple(name for name in names if name not in kept)
        if not names:
            raise ConfigError(
                f"adapt={toml_text(self.adapt)} selects only transformations of t_net, which the inner loop keeps"
            )
        return names
