"""What batch norm does in an inner loop, by name.

``batch``    every pass normalises with the statistics of its own batch, the query pass too (transductive: the
             paper's setting). Stored statistics are neither used nor changed.
``support``  inner steps use their own batch; the query pass uses the statistics of the support data under the
             adapted weights, so that a prediction does not depend on the other queries. Gradients take these
             statistics as constants.
``running``  every pass uses the statistics stored in the model; refresh them with ``update_statistics``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from wheretolearn.errors import ConfigError

BatchNormMode = Literal["batch", "support", "running"]
_FIXED = "keeps_to_stored_statistics"  # an attribute of layers; off while another mode is asked for


def layers(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def parameter_names(model: nn.Module) -> set[str]:
    """Scale and shift of every batch-norm layer."""
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name, _ in module.named_parameters(recurse=False)
    }


def check_mode(model: nn.Module, mode: str) -> None:
    if mode not in get_args(BatchNormMode):
        raise ConfigError(f"unknown batch-norm mode {mode!r}; choose one of {', '.join(get_args(BatchNormMode))}")
    if mode != "batch" and any(layer.running_mean is None for layer in layers(model)):
        raise ConfigError(
            f"batch-norm mode {mode!r} needs layers that store statistics, and this model has one with "
            "track_running_stats=False: use the mode 'batch', or let the layers track statistics"
        )


@contextmanager
def normalising(model: nn.Module, by_batch: bool, cumulative: bool = False) -> Iterator[None]:
    """Within the context, batch-norm layers use batch statistics or stored ones; nothing else is touched.

    ``cumulative`` makes stored statistics the plain average over the passes made, rather than a moving one.
    """
    found = layers(model)
    before = [(layer.training, layer.momentum) for layer in found]
    fixed = [layer for layer in found if getattr(layer, _FIXED, False)]
    try:
        for layer in fixed:
            setattr(layer, _FIXED, False)
        for layer in found:
            layer.training = by_batch
            if cumulative:
                layer.momentum = None
        yield
    finally:
        for layer, (training, momentum) in zip(found, before, strict=True):
            layer.training, layer.momentum = training, momentum
        for layer in fixed:
            setattr(layer, _FIXED, True)


def fix_mode(model: nn.Module, mode: BatchNormMode) -> None:
    """Make the mode of an adapted model permanent, so that ``eval()`` and ``train()`` do not alter its predictions."""
    check_mode(model, mode)
    for layer in layers(model):
        if mode == "batch":
            # Without stored statistics a layer uses those of the batch in eval mode too.
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        else:
            setattr(layer, _FIXED, True)
            layer.register_forward_pre_hook(_use_stored_statistics)


def _use_stored_statistics(layer: nn.Module, inputs: object) -> None:
    if getattr(layer, _FIXED, True):
        layer.training = False
