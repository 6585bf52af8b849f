"""What the settings of a few-shot run make of model and mask, and which do not go together."""

import math
from typing import get_args

import pytest
import torch

from wheretolearn import masks
from wheretolearn.errors import ConfigError
from wheretolearn.fewshot.config import FewShotConfig, MaskKind
from wheretolearn.ridge_head import RidgeHead

RIDGE = {"head": "ridge", "mask": "fixed", "inner_steps": 0, "test_inner_steps": 0}


def made(**settings):
    config = FewShotConfig(**{"width": 8, **settings})
    model = config.build_model(image_size=28, channels=1, seed=0)
    return model, config.build_mask(model, seed=0)


def layers_of(names):
    return {masks.layer_of(name) for name in names}


@pytest.mark.parametrize("kind", get_args(MaskKind))
def test_every_mask_kind_is_made(kind):
    model, mask = made(mask=kind)
    assert mask.kind == kind
    assert mask.names == tuple(name for name, _ in model.named_parameters())


# All kinds but one on resnet12: generated masks of so many weights fill gigabytes.
@pytest.mark.parametrize(
    ("network", "kind"),
    [(n, k) for n in ("conv4", "resnet12") for k in get_args(MaskKind) if (n, k) != ("resnet12", "generated")],
)
def test_batch_norm_can_be_kept_from_the_inner_loop(network, kind):
    model, mask = made(mask=kind, model=network, adapt_norm=False)
    norm = {name for name, m in model.named_modules() if isinstance(m, torch.nn.BatchNorm2d)}
    assert norm
    assert layers_of(mask.names) == layers_of(mask.shapes) - norm
    sparsity = mask.sparsity().by_layer
    assert all(sparsity[layer] == 1.0 for layer in norm)


@pytest.mark.parametrize("kind", ["binary", "relu", "linear", "exp"])
def test_masks_start_apart_from_the_weights(kind, likeness):
    model, mask = made(width=32, mask=kind)
    names = [name for name in mask.names if "norm" not in name]
    raw = mask.tensors()
    starts = [raw[name].exp() if kind == "exp" else raw[name] for name in names]
    assert likeness([dict(model.named_parameters())[name] for name in names], starts) < 0.06
    again = FewShotConfig(width=32, mask=kind).build_mask(model, seed=0).tensors()
    assert all(torch.equal(raw[name], again[name]) for name in names)


def test_the_start_of_the_weights_can_be_chosen():
    plain, larger = made()[0], made(init="kaiming")[0]
    assert larger.head.weight.abs().max() > 2 * plain.head.weight.abs().max()


@pytest.mark.parametrize("kind", get_args(MaskKind))
def test_transformations_of_t_net_are_kept_from_the_inner_loop(kind):
    _, mask = made(mask=kind, t_net=True)
    kept = {f"block{n}.transform.weight" for n in (1, 2, 3, 4)} | {"head_transform.weight"}
    assert set(mask.shapes) - set(mask.names) == kept
    _, mask = made(mask=kind, t_net=True, adapt="body", adapt_norm=False)
    assert layers_of(mask.names) == {f"block{n}.conv" for n in (1, 2, 3, 4)}


@pytest.mark.parametrize("kind", ["relu", "exp", "linear", "shrinkage"])
def test_mask_init_is_the_start_value_of_every_multiplier(kind):
    _, mask = made(mask=kind, mask_init=0.3)
    expected = 1 / 0.3 if kind == "shrinkage" else 0.3  # shrinkage is given by its strength, 1 / variance
    assert all(
        math.isclose(v, expected, rel_tol=1e-5) for m in mask.multipliers().values() for v in m.unique().tolist()
    )


def test_a_ridge_head_takes_the_place_of_head_and_inner_loop():
    model, mask = made(**RIDGE)
    assert isinstance(model.head, RidgeHead)
    assert model.head.ways == 5
    assert mask.names == ()
    assert mask.sparsity().overall == 1.0
    assert FewShotConfig(**RIDGE).inner.head == "ridge"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "ridge"}, "head=ridge has no inner loop: it needs mask=fixed, inner_steps=0, test_inner_steps=0"),
        ({**RIDGE, "t_net": True}, "needs t_net=false"),
        ({**RIDGE, "validation_inner_steps": 5}, "needs validation_inner_steps=0"),
        ({**RIDGE, "order": "second"}, "needs order=first"),
        ({"t_net": True, "model": "resnet12"}, "t_net=true needs model=conv4, not resnet12"),
        ({"init": "kaiming", "model": "resnet12"}, "init=kaiming needs model=conv4, not resnet12"),
        ({"validation_inner_steps": 0}, "validation_inner_steps=0 would choose among models that have not adapted"),
        ({"mask": "binary", "mask_init": 0.1}, "mask_init has no meaning for mask=binary"),
        ({"mask": "exp", "mask_init": 0.0}, "mask_init must be greater than 0 for mask=exp"),
        ({"mask": "relu", "mask_init": 0.1, "initial_sparsity": 0.5}, "give only one"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ConfigError, match=message):
        FewShotConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({"model": "resnet12", "resnet_size": "large"}, "width bias"),
        ({"mask": "exp"}, "resnet_size straight_through_scale"),
        ({"mask": "fixed"}, "resnet_size straight_through_scale mask_lr mask_optimizer"),
        ({"mask": "generated", "start_from": "runs/first"}, "resnet_size init"),
        ({"learn_theta": False}, "resnet_size theta_lr"),  # the optimizer is the mask's too
        ({"learn_theta": False, "mask_optimizer": "adam"}, "resnet_size theta_lr optimizer"),
        (RIDGE, "resnet_size straight_through_scale mask_lr mask_optimizer inner_lr inner_clip_norm adapt_norm"),
    ],
)
def test_settings_without_an_effect_are_known(settings, idle):
    assert FewShotConfig(**settings).without_effect().keys() == set(idle.split())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapt": "*.norm.*", "adapt_norm": False}, "only batch-norm"),
        ({"adapt": "*.transform.*", "t_net": True}, "only transformations"),
        ({"mask": "rows", "initial_sparsity": 0.5}, "no meaning for mask=rows"),
        ({"mask": "curvature", "initial_sparsity": 0.5}, "no meaning for mask=curvature"),
    ],
)
def test_settings_that_do_not_fit_the_model(settings, message):
    with pytest.raises(ConfigError, match=message):
        made(**settings)
