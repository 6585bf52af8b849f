"""The learner that settings ask for."""

from torch import nn

from wheretolearn import masks
from wheretolearn.data.random_bits import torch_generator
from wheretolearn.engine.graphed import Arithmetic
from wheretolearn.online.config import OnlineConfig
from wheretolearn.online.learners.base import OnlineLearner
from wheretolearn.online.learners.bgd import BGD
from wheretolearn.online.learners.bgd_inner import GatesInner, InnerLoop, WeightsInner
from wheretolearn.online.learners.c_maml import CMAML
from wheretolearn.online.learners.c_maml_masks import c_maml_mask
from wheretolearn.online.learners.maml import MAML
from wheretolearn.online.learners.online_adam import OnlineAdam


def make_learner(
    config: OnlineConfig, model: nn.Module, seed: int, arithmetic: Arithmetic | None = None
) -> OnlineLearner:
    """A learner that starts from the model's weights, on its device; metabgd may leave its inner loop to an engine."""
    kind = config.learner
    select = masks.selected_names if config.adapt_norm else masks.without_batch_norm
    if kind == "online-adam":
        return OnlineAdam(model, lr=config.lr)
    if kind == "maml" or kind == "anil":
        names = select(model, "head" if kind == "anil" else config.adapt)
        return MAML(model, inner_steps=config.inner_steps, inner_lr=config.inner_lr, select=names)
    if kind == "bgd" or kind == "metabgd" or kind == "metacog":
        return BGD(
            model,
            mean_eta=config.mean_eta,
            initial_std=config.initial_std,
            samples=config.samples,
            seed=seed,
            clip_norm=config.clip_norm,
            inner=_inner_loop(config, model),
            arithmetic=arithmetic,
        )
    # Masks are drawn on the CPU, so that they do not depend on the device.
    start = masks.constant(config.inner_lr) if kind == "sparse-c-maml" and config.mask_init == "open" else None
    draws = torch_generator(seed, "mask")  # not the seed alone: the weights were drawn with it
    names = select(model, config.adapt)
    mask, inner_lr = c_maml_mask(kind, model, inner_lr=config.inner_lr, select=names, init=start, generator=draws)
    return CMAML(
        model,
        mask,
        inner_steps=config.inner_steps,
        inner_lr=inner_lr,
        lr=config.lr,
        mask_lr=config.mask_lr,
        switch_margin=config.switch_margin,
        update_scale=config.update_scale,
        buffer=config.buffer,
        restart=config.restart,
    )


def _inner_loop(config: OnlineConfig, model: nn.Module) -> InnerLoop | None:
    select = masks.selected_names if config.adapt_norm else masks.without_batch_norm
    if config.learner == "metabgd":
        names = select(model, config.adapt)
        return WeightsInner(model, steps=config.inner_steps, lr=config.inner_lr, order=config.order, select=names)
    if config.learner == "metacog":
        return GatesInner(
            model,
            steps=config.inner_steps,
            lr=config.inner_lr,
            l1=config.l1,
            logit_init=config.logit_init,
            order=config.order,
            select=select(model, "body"),
        )
    return None
