"""All settings of an online run."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from torch import nn

from wheretolearn import models
from wheretolearn.config import check_rates, setting
from wheretolearn.engine.graphed import Precision
from wheretolearn.errors import ConfigError
from wheretolearn.online.learners.bgd_inner import Order
from wheretolearn.online.learners.c_maml import Restart

LearnerKind = Literal[
    "online-adam",
    "maml",
    "anil",
    "bgd",
    "metabgd",
    "metacog",
    "c-maml",
    "c-maml-fixed",
    "sparse-c-maml",
    "sparse-relu-c-maml",
]
MASKED = ("sparse-c-maml", "sparse-relu-c-maml")  # those that close weights to their inner loop
DETECTING = ("c-maml", "c-maml-fixed", *MASKED)  # those that look for changes of the task
FROZEN = ("maml", "anil")  # those that never change the weights they start from
INCIDENTAL = frozenset({"precision", "log_every", "checkpoint_every"})  # settings that make no other experiment

GLYPH_LETTERS = ("latin", "greek", "cyrillic", "armenian", "phonetic", "fraktur", "calligraphic", "syllabics")


@dataclass(frozen=True)
class Source:
    """Where the tasks of a stream come from: the classes of all splits of an image set, in order."""

    data: str = setting("glyphs", "image set; see `wheretolearn data list`")
    probability: float = setting(1.0, "how likely a new task is of this source")
    groups: tuple[str, ...] = setting((), "take only classes of these groups (scripts, alphabets); []: all")
    classes: int | None = setting(None, "take only so many classes, the first; none: all")
    name: str = setting("", "what results call it; default: the set's name")

    @property
    def label(self) -> str:
        return self.name or self.data


# Like the paper's three: one source of many classes, and two of ten, whose tasks differ in the order of labels only.
GLYPHS = (
    Source("glyphs", 0.5, GLYPH_LETTERS, None, "letters"),
    Source("glyphs", 0.25, ("arrows",), 10, "arrows"),
    Source("glyphs", 0.25, ("geometric",), 10, "shapes"),
)


@dataclass(frozen=True)
class OnlineConfig:
    sources: tuple[Source, ...] = setting(GLYPHS, "image sets, each with the probability that a new task is of it")
    p: float = setting(0.98, "probability that the task stays the same from one step to the next")
    steps: int = setting(10_000, "batches of the stream")
    ways: int = setting(10, "classes per task")
    shots: int = setting(5, "images per class in every batch")

    width: int = setting(64, "channels of the network, conv4")

    learner: LearnerKind = setting("sparse-c-maml", "method")
    lr: float = setting(0.005, "learning rate of the weights, by Adam; not of bgd and its kin")
    inner_steps: int = setting(16, "gradient steps of the inner loop on each batch")
    inner_lr: float = setting(0.1, "inner learning rate (alpha_0); sparse-relu-c-maml has learned ones only")
    mask_lr: float = setting(0.01, "learning rate of the mask, or of c-maml's step sizes (gamma_m)")
    mask_init: Literal["kaiming", "open"] = setting(
        "kaiming", "how sparse-c-maml's mask starts: half closed, or all open"
    )
    switch_margin: float = setting(3.0, "c-maml: by how much adapting must lower the loss to mean a new task (lambda)")
    update_scale: float = setting(1000.0, "c-maml: a meta-update counts 1 - exp(-update_scale * its loss) (gamma_um)")
    restart: Restart = setting("at once", "c-maml: which batch is the first to start from theta after a switch")
    buffer: int = setting(100, "c-maml: more batches than this make a meta-update without a new task")

    mean_eta: float = setting(10.0, "bgd and its kin: learning rate of the means")
    initial_std: float = setting(0.01, "bgd and its kin: standard deviation of every weight at the start")
    samples: int = setting(5, "bgd and its kin: Monte Carlo samples for each update")
    clip_norm: float | None = setting(
        None, "bgd and its kin: bound on the norm of each sample's gradient, which is of the sum over a batch"
    )
    l1: float = setting(0.1, "metacog: strength of the L1 penalty on its mask")
    logit_init: float = setting(0.5, "metacog: mask logits at the start of every inner loop")

    adapt: str | tuple[str, ...] = setting(
        "all", "parameters the inner loop may change: all, head, body, or patterns of names"
    )
    adapt_norm: bool = setting(False, "true: the inner loop also changes scale and shift of batch norm")
    order: Order = setting("first", "meta-gradient of metabgd, metacog and pre-training; c-maml's is first")

    precision: Precision = setting(
        "float32", "of passes on a GPU: float32, tf32; for c-maml and first-order metabgd also bfloat16 or float16"
    )

    pretrain: bool = setting(False, "start from weights meta-trained on classes of the first source; maml and anil do")
    pretrain_classes: int = setting(300, "classes of the first source to pre-train on, the first")
    pretrain_validation_classes: int = setting(50, "classes after those, to choose the best weights with")
    pretrain_steps: int = setting(5000, "outer steps of pre-training, with lr, inner_steps and inner_lr")
    pretrain_tasks: int = setting(4, "tasks per outer step of pre-training")
    pretrain_queries: int = setting(15, "held-out images per class of those tasks")
    pretrain_validate_every: int = setting(500, "outer steps between validations of pre-training")
    pretrain_patience: int | None = setting(
        None, "more validations than this in a row without better weights end pre-training; none: never"
    )
    pretrain_seed: int = setting(0, "seed of pre-training, which all runs share")

    log_every: int = setting(100, "steps between records of accuracy and sparsity")
    checkpoint_every: int = setting(500, "steps between checkpoints")

    def __post_init__(self) -> None:
        self._check_ranges()
        if not 0 <= self.p <= 1:
            raise ConfigError(f"p must lie between 0 and 1, not {self.p}")
        self._check_sources()
        if self.learner in FROZEN and not self.pretrain:
            raise ConfigError(
                f"learner={self.learner} never changes the weights it starts from, so these must know something: "
                "set pretrain=true"
            )
        if self.pretrain and self.learner in ("bgd", "metabgd", "metacog"):
            raise ConfigError(f"learner={self.learner} starts from random weights: leave out pretrain=true")
        if self.precision in ("bfloat16", "float16") and not (self.plain_inner_loop and self.inner_order == "first"):
            raise ConfigError(
                f"learner={self.learner} has no first-order inner loop that could run in precision={self.precision}: "
                "use float32 or tf32"
            )
        if self.precision == "float16" and self.pretrain and self.order == "second":
            raise ConfigError("pre-training of order=second has no precision=float16: use float32, tf32 or bfloat16")

    @property
    def plain_inner_loop(self) -> bool:
        """Whether the learner's inner loop is that of few-shot learning, so that its engines can run it."""
        return self.learner in (*DETECTING, "metabgd")

    @property
    def inner_order(self) -> Literal["first", "second"]:
        """Of the gradients that the learner takes through its inner loop."""
        return "first" if self.learner in DETECTING else self.order

    @property
    def unused(self) -> frozenset[str]:
        """Settings that have no effect on this learner."""
        pretraining = {field.name for field in fields(self) if field.name.startswith("pretrain_")}
        inner_loop = {"inner_steps", "inner_lr", "adapt", "adapt_norm"}
        bgd = {"mean_eta", "initial_std", "samples", "clip_norm"}
        of_some = inner_loop | pretraining | bgd | {"lr", "order", "l1", "logit_init"}
        of_some |= {"mask_lr", "mask_init", "switch_margin", "update_scale", "buffer", "restart"}
        used = {
            "online-adam": {"lr"},
            "maml": inner_loop,
            "anil": inner_loop,
            "bgd": bgd,
            "metabgd": inner_loop | bgd | {"order"},
            "metacog": inner_loop | bgd | {"order", "l1", "logit_init"},
        }.get(self.learner, inner_loop | {"lr", "switch_margin", "update_scale", "buffer", "restart"})
        if self.learner in ("c-maml", *MASKED):
            used = used | {"mask_lr"}
        if self.learner == "sparse-c-maml":
            used = used | {"mask_init"}
        if self.learner == "sparse-relu-c-maml":
            used = used - {"inner_lr"}
        if self.pretrain:
            used = used | pretraining | inner_loop | {"lr", "order"}
        if self.learner in ("anil", "metacog"):  # which adapt the head, and gate the body
            used = used - {"adapt"}
        return frozenset(of_some - used)

    def _check_ranges(self) -> None:
        positive = (
            "steps shots width lr inner_lr buffer mean_eta initial_std samples clip_norm pretrain_classes "
            "pretrain_steps pretrain_tasks pretrain_queries pretrain_validate_every pretrain_patience log_every "
            "checkpoint_every"
        )
        for name in positive.split():
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be greater than 0, not {getattr(self, name)}")
        for name in ("inner_steps", "mask_lr", "switch_margin", "update_scale", "l1", "pretrain_seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}")
        check_rates(self, "lr inner_lr mask_lr mean_eta initial_std logit_init")
        for name in ("ways", "pretrain_validation_classes"):
            if getattr(self, name) < 2:
                raise ConfigError(f"{name} must be at least 2, not {getattr(self, name)}")
        if self.pretrain and min(self.pretrain_classes, self.pretrain_validation_classes) < self.ways:
            raise ConfigError(
                f"pre-training needs at least {self.ways} classes (ways) to train on and as many to validate with"
            )

    def _check_sources(self) -> None:
        if not self.sources:
            raise ConfigError('a stream needs at least one source, such as sources=[{data="mnist"}]')
        for source in self.sources:
            if source.probability < 0:
                raise ConfigError(f"the probability of source {source.label} must not be negative")
            if source.classes is not None and source.classes < self.ways:
                raise ConfigError(
                    f"source {source.label} is cut to {source.classes} classes, but tasks have ways={self.ways}"
                )
        total = sum(source.probability for source in self.sources)
        if not math.isclose(total, 1, abs_tol=1e-6):
            raise ConfigError(f"the probabilities of the sources must sum to 1, not {total:g}")
        labels = [source.label for source in self.sources]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ConfigError(f"two sources are called {twice}: give each a name of its own")

    def build_model(self, image_shape: tuple[int, int, int], seed: int) -> nn.Module:
        height, _, channels = image_shape
        return models.build("conv4", ways=self.ways, channels=channels, size=height, width=self.width, seed=seed)
