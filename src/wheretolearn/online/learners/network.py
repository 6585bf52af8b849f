"""A model's passes at weights that a learner holds, and the pieces of learning that several learners share."""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from wheretolearn import batch_norm
from wheretolearn.engine import conv4_cpu
from wheretolearn.engine.compiled import CompiledArithmetic
from wheretolearn.engine.conv4_cpu import Conv4OnCPU
from wheretolearn.engine.graphed import Adaptation, Arithmetic, Job
from wheretolearn.engine.task import Task

Tensors = dict[str, Tensor]


class Network:
    """The architecture, which changes nothing: weights come as named tensors. Batch norm uses batch statistics."""

    def __init__(self, model: nn.Module):
        self._module = copy.deepcopy(model)
        batch_norm.fix_mode(self._module, "batch")

    def start(self) -> Tensors:
        """A copy of the model's trainable weights."""
        return {name: p.detach().clone() for name, p in self._module.named_parameters() if p.requires_grad}

    def logits(self, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        logits: Tensor = functional_call(self._module, dict(weights), (inputs,))
        return logits

    def loss(self, weights: Mapping[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(weights, inputs), labels)


def gradients(loss: Callable[[Tensors], Tensor], weights: Tensors) -> Tensors:
    """Of a function of named weights, at these weights."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
    with torch.enable_grad():
        values = torch.autograd.grad(loss(leaves), list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, values, strict=True))


LearnerArithmetic = Conv4OnCPU | CompiledArithmetic


def arithmetic_for(model: nn.Module) -> LearnerArithmetic:
    """The fastest one for a learner by itself; lanes on a GPU have their own."""
    return Conv4OnCPU(model) if conv4_cpu.supports(model) else CompiledArithmetic(model, compiled=False)


def adapted(
    arithmetic: Arithmetic, weights: Tensors, rates: Tensors, inputs: Tensor, labels: Tensor, steps: int
) -> Adaptation:
    """What inner steps on a batch make of the weights that have rates."""
    (found,) = arithmetic.adaptations([Job(weights, rates, Task(inputs, labels, inputs, labels))], steps)
    return found


def loss_of(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of ``[..., images, ways]``, mean over the images; no image counts more than its type can tell."""
    own = probabilities.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return -own.clamp_min(torch.finfo(own.dtype).tiny).log().mean(-1)


def adam(*groups: tuple[Tensors, float]) -> torch.optim.Adam:
    """Adam for tensors by name, each group with its learning rate; groups may be empty.

    Its moments are there from the start and change in place, so that a CUDA graph can record its steps.
    """
    filled = [(list(tensors.values()), lr) for tensors, lr in groups if tensors]
    on_gpu = filled[0][0][0].is_cuda
    optimizer = torch.optim.Adam([{"params": tensors, "lr": lr} for tensors, lr in filled], capturable=on_gpu)
    for parameter in _parameters(optimizer):
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device if on_gpu else "cpu"),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """An optimizer's moments and counters, by number of the parameter and name."""
    return {
        f"{number}.{key}": value
        for number, parameter in enumerate(_parameters(optimizer))
        for key, value in optimizer.state[parameter].items()
    }


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def copied(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """A copy of tensors for a ``state()``, under ``prefix.name``."""
    return {f"{prefix}.{name}": tensor.clone() for name, tensor in tensors.items()}


@torch.no_grad()
def copy_into(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Give tensors the values of the same names, in place."""
    for name, tensor in tensors.items():
        if values[name].shape != tensor.shape:  # copying would broadcast
            raise RuntimeError(f"{name} has the shape {tuple(tensor.shape)}, not {tuple(values[name].shape)}")
        tensor.copy_(values[name])


@torch.no_grad()
def copy_back(prefix: str, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Put what ``copied`` stored back in place."""
    copy_into(tensors, {name: state[f"{prefix}.{name}"] for name in tensors})


def under(prefix: str, state: Mapping[str, Tensor], device: torch.device) -> Tensors:
    """A copy of the part of a state below ``prefix``, which may be empty."""
    start = f"{prefix}."
    return {
        name.removeprefix(start): tensor.to(device, copy=True)
        for name, tensor in state.items()
        if name.startswith(start)
    }
