"""Finding out where a number first stopped being finite."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wheretolearn.batch_norm import BatchNormMode
from wheretolearn.inner_loop import Loss, adapt
from wheretolearn.masks import GradientMask, layer_of


def locate_non_finite(
    model: nn.Module,
    mask: GradientMask,
    support_loss: Loss | Sequence[Loss],
    query_loss: Loss,
    *,
    steps: int,
    inner_lr: float,
    batch_norm_mode: BatchNormMode = "batch",
    clip_norm: float | None = None,
) -> str | None:
    """Repeat one task and name the inner step and layer where infinity or NaN first appears; None if it never does."""

    def adapted_after(count: int) -> tuple[Tensor, Loss, Sequence[tuple[str, Tensor]], nn.Module]:
        losses = support_loss if callable(support_loss) else support_loss[:count]
        adapted = adapt(
            model,
            mask,
            losses,
            steps=count,
            inner_lr=inner_lr,
            batch_norm_mode=batch_norm_mode,
            clip_norm=clip_norm,
        )
        following = support_loss if callable(support_loss) else support_loss[min(count, steps - 1)]
        return adapted.losses, following, list(adapted.parameters.items()), adapted.module()

    losses, *_ = adapted_after(steps)
    bad = (~losses.isfinite()).nonzero()
    step = int(bad[0]) if len(bad) else steps
    _, following, parameters, network = adapted_after(step)
    where = f"inner step {step}" if step < steps else "the query pass"
    for name, value in parameters:
        if not value.isfinite().all():
            return f"{where}, layer {layer_of(name)}: the update of {name} before it was not finite"
    layer = _first_bad_layer(network, following if step < steps else query_loss)
    return f"{where}, {layer}" if layer else None


def _first_bad_layer(network: nn.Module, loss: Loss) -> str | None:
    found: list[str] = []

    def watch(name: str, module: nn.Module) -> None:
        def look(module: nn.Module, inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and not output.isfinite().all():
                found.append(name)

        handles.append(module.register_forward_hook(look))

    handles: list[torch.utils.hooks.RemovableHandle] = []
    for name, module in network.named_modules():
        if not list(module.children()):
            watch(name, module)
    try:
        with torch.no_grad():
            value = loss(network)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return f"layer {found[0]}: its output was not finite"
    return None if value.isfinite().all() else "the loss itself, after finite outputs of every layer"
