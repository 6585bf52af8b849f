"""Which parameters of a model a mask covers."""

import fnmatch
from collections.abc import Sequence
from difflib import get_close_matches

import torch
from torch import nn

from wheretolearn import batch_norm
from wheretolearn.errors import ConfigError

# "all"; "head", which is the layer defined last, or "body", all others; or glob patterns over parameter names.
Select = str | Sequence[str]


def layer_of(parameter_name: str) -> str:
    """The module that owns a parameter: ``block1.conv.weight`` belongs to ``block1.conv``."""
    # A parametrised layer keeps its tensors under LAYER.parametrizations.NAME.
    name = parameter_name.partition(".parametrizations.")
    return (name[0] if name[1] else parameter_name.rpartition(".")[0]) or "(top level)"


def trainable_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Shape of every parameter that requires a gradient; a tied parameter counts once, under its first name."""
    shapes = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ConfigError(f"parameter {name} has no shape yet: run the model once on an example first")
        if parameter.requires_grad:
            if parameter.is_complex():
                raise ConfigError(f"parameter {name} is complex; masks are made for real parameters only")
            shapes[name] = parameter.shape
    if not shapes:
        raise ConfigError("the model has no parameter that requires a gradient, so there is nothing to adapt")
    return shapes


def selected_names(model: nn.Module, select: Select) -> tuple[str, ...]:
    """The trainable parameters that ``select`` chooses, in the model's order."""
    names = tuple(trainable_shapes(model))
    if select == "all":
        return names
    if select in ("head", "body"):
        head = layer_of(names[-1])
        other = next((name for name in names if "head" in name.split(".")[:-1]), None)
        if other is not None and "head" not in head.split("."):
            raise ConfigError(
                f"{select!r} takes the layer defined last, here {head}, for the head, but {other} comes before it: "
                f"choose parameters by pattern, such as '{other.partition('head')[0]}head.*'"
            )
        chosen = tuple(name for name in names if (layer_of(name) == head) == (select == "head"))
        if not chosen:
            raise ConfigError(f"the model has a single layer, {head}, so it has no body to adapt")
        return chosen
    patterns = [select] if isinstance(select, str) else list(select)
    if not patterns:
        raise ConfigError("the list of parameter patterns is empty: name at least one, or select 'all'")
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            near = get_close_matches(pattern, names, n=1, cutoff=0.0)
            raise ConfigError(
                f"no trainable parameter matches {pattern!r}; there are {len(names)}, such as {near[0]}"
                f" (patterns use *, e.g. '{layer_of(near[0])}.*')"
            )
    return tuple(name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))


def without_batch_norm(model: nn.Module, select: Select = "all") -> tuple[str, ...]:
    """What ``select`` chooses, less the scale and shift of batch norm, which then never change: a ``select`` itself."""
    norm = batch_norm.parameter_names(model)
    chosen = tuple(name for name in selected_names(model, select) if name not in norm)
    if not chosen:
        selected = select if isinstance(select, str) else ", ".join(select)
        raise ConfigError(f"{selected} selects only batch-norm parameters, and these are to stay as they are")
    return chosen
