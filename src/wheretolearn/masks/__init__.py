"""Gradient masks: which weights an inner loop may change, and by how much.

Every inner step is ``phi <- phi - inner_lr * multiplier * gradient`` (Eq. 4). A mask owns the raw parameters ``m``
that the outer loop learns, and knows its ``multipliers()``, how a gradient with respect to the multipliers becomes
one for the raw parameters (``pull_back``), and its ``sparsity()``. Masks that do something else with a gradient
(``curvature`` turns it, ``shrinkage`` adds a pull to the start) say so in ``updates``.

    model = Conv4(ways=5)
    mask = masks.binary(model)                        # sparse-MAML: a learned 0/1 per weight
    mask = masks.binary(model, select="block4.*")     # only the last block may change
    mask = masks.fixed(model, select="head")          # ANIL
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from wheretolearn.errors import ConfigError, MismatchError
from wheretolearn.masks.base import GradientMask, Sparsity
from wheretolearn.masks.curvature import CurvatureMask, curvature
from wheretolearn.masks.elementwise import RULES, ElementwiseMask, Rule, binary, exp, linear, relu
from wheretolearn.masks.fixed import FixedMask, fixed
from wheretolearn.masks.generated import GeneratedMask, generated
from wheretolearn.masks.initial import Initialise, constant, kaiming, log_uniform, shifted_to_sparsity, uniform
from wheretolearn.masks.rows import RowsMask, rows
from wheretolearn.masks.selection import Select, layer_of, selected_names, trainable_shapes, without_batch_norm
from wheretolearn.masks.shrinkage import ShrinkageMask, shrinkage
from wheretolearn.storage import check_shapes, load_weights

__all__ = [
    "MAKERS",
    "RULES",
    "CurvatureMask",
    "ElementwiseMask",
    "FixedMask",
    "GeneratedMask",
    "GradientMask",
    "Initialise",
    "RowsMask",
    "Rule",
    "Select",
    "ShrinkageMask",
    "Sparsity",
    "binary",
    "constant",
    "curvature",
    "exp",
    "fixed",
    "generated",
    "kaiming",
    "layer_of",
    "linear",
    "load",
    "log_uniform",
    "relu",
    "rows",
    "selected_names",
    "shifted_to_sparsity",
    "shrinkage",
    "trainable_shapes",
    "uniform",
    "without_batch_norm",
]

MAKERS: dict[str, Callable[..., GradientMask]] = {
    "binary": binary,
    "relu": relu,
    "exp": exp,
    "linear": linear,
    "fixed": fixed,
    "generated": generated,
    "rows": rows,
    "curvature": curvature,
    "shrinkage": shrinkage,
}


def load(path: Path | str, model: nn.Module) -> GradientMask:
    """Read a mask that ``save`` wrote, after checking that it was made for a model of the same names and shapes."""
    path = Path(path)
    tensors, metadata = load_weights(path)
    shapes = trainable_shapes(model)
    like = next(p for p in model.parameters() if p.requires_grad)
    try:
        # A file keeps tensors in the order of their names; optimizers go by that of the mask.
        order = json.loads(metadata["order"]) if "order" in metadata else list(tensors)
        raw = {str(name): tensors[name].to(like.device) for name in order}
        settings = {str(name): float(value) for name, value in json.loads(metadata["settings"]).items()}
        names = [str(name) for name in json.loads(metadata["names"])]
        stored = {str(name): torch.Size(shape) for name, shape in json.loads(metadata["shapes"]).items()}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise _unreadable(path, error) from None
    check_shapes(stored, shapes, path)
    try:
        mask = _rebuilt(metadata["kind"], shapes, names, raw, settings, like)
        mask.pull_back(mask.multipliers())  # shapes that do not go together fail here
        if any(m.shape != shapes[name] for name, m in mask.openness().items()):
            raise ValueError("a tensor has the wrong shape")
    except (KeyError, ValueError, TypeError, RuntimeError, ConfigError, MismatchError) as error:
        raise _unreadable(path, error) from None
    return mask


def _rebuilt(
    kind: str,
    shapes: Mapping[str, torch.Size],
    names: Sequence[str],
    raw: dict[str, Tensor],
    settings: Mapping[str, float],
    like: Tensor,
) -> GradientMask:
    scale = settings.get("straight_through_scale", 1.0)
    match kind:
        case "fixed":
            return FixedMask(shapes, names, like=like)
        case "generated":
            noise = raw.pop("noise")
            return GeneratedMask(shapes, names, raw, noise, scale)
        case "rows":
            noise = raw.pop("noise")
            return RowsMask(shapes, names, raw, noise, settings["temperature"])
        case "curvature":
            return CurvatureMask(shapes, names, raw)
        case "shrinkage":
            return ShrinkageMask(shapes, {name: raw[name] for name in names})
    return ElementwiseMask(kind, shapes, {name: raw[name] for name in names}, scale)


def _unreadable(path: Path, error: Exception) -> MismatchError:
    return MismatchError(
        f"{path} holds no gradient mask that this version can read ({type(error).__name__}: {error}): "
        "give a file written by mask.save"
    )
