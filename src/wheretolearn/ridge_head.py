"""MetaOptNet's way: no inner steps; the head is solved in closed form on the support features (Lee et al., 2019).

model = with_ridge_head(Conv4(ways=5), ways=5)          # model(x) now gives features
logits = ridge_logits(model, x, y, x_query)             # the query loss of these trains the body, through the solve
model.head = solved_head(model, x, y)                   # an ordinary network for this task
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wheretolearn.errors import ConfigError


class RidgeHead(nn.Module):
    """Stands where the linear head did, and lets features pass. Learned: the scale of the logits.

    Ridge regression on one-hot labels gives values around 0 .. 1, too close for a softmax: hence the scale.
    """

    def __init__(self, ways: int, regularisation: float = 50.0, initial_scale: float = 10.0) -> None:
        if ways < 1:
            raise ConfigError(f"a ridge head needs 1 way or more, not {ways}")
        for name, value in (("regularisation", regularisation), ("initial_scale", initial_scale)):
            if not value > 0:
                raise ConfigError(f"{name} of a ridge head must be greater than 0, not {value}")
        super().__init__()
        self.ways = ways
        self.regularisation = regularisation  # MetaOptNet's own value, for features that are not normalised
        self.log_scale = nn.Parameter(torch.tensor(math.log(initial_scale)))

    def forward(self, features: Tensor) -> Tensor:
        return features


def with_ridge_head(model: nn.Module, ways: int, regularisation: float = 50.0) -> nn.Module:
    """The same model, its layer ``head`` replaced."""
    if not isinstance(getattr(model, "head", None), nn.Module):
        raise ConfigError(f"a ridge head takes the place of a layer called head, and {type(model).__name__} has none")
    model.head = RidgeHead(ways, regularisation)
    return model


def ridge_logits(
    model: nn.Module, support_inputs: Tensor, support_labels: Tensor, query_inputs: Tensor, ways: int | None = None
) -> Tensor:
    """Logits of the query inputs; differentiable in all of the model's parameters. ``ways``: as the head has it."""
    weight = _solved_weight(model, support_inputs, support_labels, ways)
    features = model(query_inputs).to(weight.dtype)
    with torch.autocast(features.device.type, enabled=False):
        return F.linear(features, weight)


def solved_head(model: nn.Module, support_inputs: Tensor, support_labels: Tensor, ways: int | None = None) -> nn.Linear:
    """The head that ``ridge_logits`` uses, scale included, as a layer of its own."""
    with torch.no_grad():
        weight = _solved_weight(model, support_inputs, support_labels, ways)
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(weight)
    return head


def _solved_weight(model: nn.Module, inputs: Tensor, labels: Tensor, ways: int | None) -> Tensor:
    """[ways, features]: argmin_W |X W' - Y|^2 + regularisation |W|^2, times the scale."""
    head = getattr(model, "head", None)
    if not isinstance(head, RidgeHead):
        raise ConfigError("this model's head is not a ridge head: make one with with_ridge_head(model, ways)")
    if labels.shape != (len(inputs),) or len(inputs) == 0:
        raise ConfigError(
            f"a ridge head is solved with one label for each support input: got labels of shape {tuple(labels.shape)} "
            f"for {len(inputs)} inputs"
        )
    targets = _one_hot(labels, head.ways if ways is None else ways)
    features = model(inputs)
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    with torch.autocast(features.device.type, enabled=False):
        # As many unknowns as support images, of which there are few: (X X' + regularisation I) A = Y, W' = X' A.
        gram = features @ features.T
        gram = gram + head.regularisation * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        coefficients: Tensor = torch.linalg.solve(gram, targets.to(gram.dtype))
        weight: Tensor = head.log_scale.exp() * (coefficients.T @ features)
        return weight


def _one_hot(labels: Tensor, ways: int) -> Tensor:
    numbers = labels.long()
    if labels.is_floating_point() or bool(((numbers < 0) | (numbers >= ways)).any()):
        raise ConfigError(f"the labels for a ridge head of {ways} ways must be whole numbers from 0 to {ways - 1}")
    return F.one_hot(numbers, ways)
