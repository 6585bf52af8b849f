"""Networks of which inner steps change only the last layers (ANIL): the layers before run once per task.

What they make of the support images is the same at every inner step. It stands among the weights of the last layers, as
one that does not move: there a gradient finds it that goes through the inner steps, and on to the layers before.
"""

import copy
from collections.abc import Callable, Collection
from itertools import takewhile
from typing import Any, ParamSpec, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from wheretolearn.engine.graphed import T, Tensors

P = ParamSpec("P")
FEATURES = "features of the support images"  # no parameter has such a name


class Call(Protocol):
    """How an arithmetic calls a module, in its precision."""

    def __call__(self, module: nn.Module, weights: Tensors, inputs: Tensor) -> Tensor: ...


class Fast(Protocol):
    """How an arithmetic makes a function fast: the same function, perhaps compiled."""

    def __call__(self, function: Callable[P, T], /) -> Callable[P, T]: ...


class StillBody:
    """A network cut in two before its last layers."""

    def __init__(self, network: nn.Module, last: str, call: Call, fast: Fast):
        self._last = last
        last_layers, body = network.get_submodule(last), _without(network, last)

        def features(weights: Tensors, images: Tensor) -> Tensor:
            return call(body, weights, images)

        def gradients(weights: Tensors, images: Tensor, to_features: Tensor) -> Tensors:
            found: Tensors = grad(lambda own: (features(own, images) * to_features).sum())(weights)
            return found

        def outputs_of_last(weights: Tensors, images: Tensor) -> Tensor:
            own = {name.removeprefix(f"{last}."): tensor for name, tensor in weights.items() if name != FEATURES}
            return call(last_layers, own, weights[FEATURES])

        self.features = fast(features)  # what the body makes of images
        self.gradients = fast(gradients)  # of the body's weights, given those of the features
        self.outputs_of_last = outputs_of_last  # the features are among the weights: images are not looked at

    def split(self, theta: Tensors) -> tuple[Tensors, Tensors]:
        """Weights of the body and of the last layers."""
        return _split(theta, self._last)


def last_layers(network: nn.Module, moving: Collection[str], weights: Tensors, images: Tensor) -> str | None:
    """The module that has all moving weights, if the network ends with it: it is called once to see that."""
    paths = [parameter.split(".")[:-1] for parameter in moving]
    name = ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False)))
    if not name or _shares_weights(network, name):
        return None
    calls: list[tuple[Any, Any]] = []
    hook = network.get_submodule(name).register_forward_hook(lambda _, inputs, outputs: calls.append((inputs, outputs)))
    try:
        with torch.no_grad():
            outputs = functional_call(network, weights, (images,))
            features = functional_call(_without(network, name), _split(weights, name)[0], (images,))
            ((given,), result) = calls.pop()
            ends_there = not calls and result is outputs
            same_again = torch.allclose(given, features, atol=1e-5)  # a body may have noise of its own
    except Exception:  # the body looks into the last layers; or all of it fails, which shows elsewhere
        return None
    finally:
        hook.remove()
    return name if ends_there and same_again else None


def _split(weights: Tensors, last: str) -> tuple[Tensors, Tensors]:
    of_last = {name: tensor for name, tensor in weights.items() if name.startswith(f"{last}.")}
    return {name: tensor for name, tensor in weights.items() if name not in of_last}, of_last


def _without(network: nn.Module, last: str) -> nn.Module:
    body = copy.deepcopy(network)
    body.set_submodule(last, nn.Identity())
    return body


def _shares_weights(network: nn.Module, name: str) -> bool:
    """Whether weights of a module are used outside it too."""
    parameters = list(network.named_parameters(remove_duplicate=False))
    inside = {id(tensor) for parameter, tensor in parameters if parameter.startswith(f"{name}.")}
    return any(id(tensor) in inside for parameter, tensor in parameters if not parameter.startswith(f"{name}."))
