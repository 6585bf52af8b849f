"""Networks of which inner steps change only the head (ANIL): the layers before it need not run at every step.

What they make of the support images stays the same. It stands among the weights of the head, as one that does not move:
there a gradient finds it that goes through the inner steps, and on to the layers before.
"""

import copy
from collections.abc import Collection
from typing import Protocol

from torch import Tensor, nn
from torch.func import grad

from wheretolearn.engine.graphed import Tensors
from wheretolearn.engine.passes import Fast, Passes
from wheretolearn.models.conv4 import Conv4
from wheretolearn.models.resnet12 import ResNet12

FEATURES = "features of the support images"  # no parameter has such a name
_PREFIX = "head."


class Call(Protocol):
    """How an arithmetic calls a module, in its precision."""

    def __call__(self, module: nn.Module, weights: Tensors, inputs: Tensor) -> Tensor: ...


def only_head_moves(network: nn.Module, moving: Collection[str]) -> bool:
    """Whether inner steps change nothing but the linear layer that a network is known to end with."""
    if type(network) not in (Conv4, ResNet12) or getattr(network, "head_transform", None) is not None:
        return False
    if type(network.head) is not nn.Linear or network._forward_hooks:  # hooks may do anything to the head's outputs
        return False
    return bool(moving) and all(name.startswith(_PREFIX) for name in moving)


class StillBody:
    """A network cut in two before its head."""

    def __init__(self, network: nn.Module, call: Call, clip_norm: float | None, fast: Fast):
        head = network.get_submodule("head")
        body = copy.deepcopy(network)
        body.set_submodule("head", nn.Identity())

        def features(weights: Tensors, images: Tensor) -> Tensor:
            return call(body, weights, images)

        def gradients(weights: Tensors, images: Tensor, to_features: Tensor) -> Tensors:
            found: Tensors = grad(lambda own: (features(own, images) * to_features).sum())(weights)
            return found

        def outputs_of_head(weights: Tensors, images: Tensor) -> Tensor:  # of the features, not of the images
            own = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items() if name != FEATURES}
            return call(head, own, weights[FEATURES])

        self.features = fast(features)  # what the body makes of images
        self.gradients = fast(gradients)  # of the body's weights, given those of the features
        self.passes_of_head = Passes(outputs_of_head, clip_norm, fast)  # with the features among the weights


def body_and_head(weights: Tensors) -> tuple[Tensors, Tensors]:
    head = {name: tensor for name, tensor in weights.items() if name.startswith(_PREFIX)}
    return {name: tensor for name, tensor in weights.items() if name not in head}, head
