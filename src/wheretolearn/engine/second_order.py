"""Meta-gradients that go through the inner steps (MAML, Meta-SGD), by autograd, each task on a stream of its own."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wheretolearn.engine.compiled import CompiledArithmetic
from wheretolearn.engine.graphed import Job, JobGradient, Precision, Tensors
from wheretolearn.inner_loop import clipped


class SecondOrderArithmetic(CompiledArithmetic):
    """Adapts as the first-order arithmetic does where no gradient is asked for. Not compiled: that ends at one order.

    Time and memory grow with the number of inner steps.
    """

    def __init__(
        self, model: nn.Module, clip_norm: float | None = None, precision: Precision = "float32", compiled: bool = True
    ):
        super().__init__(model, clip_norm, precision, compiled)
        self._clip_norm = clip_norm

    @torch.enable_grad()
    def _meta_gradient(self, job: Job, steps: int) -> JobGradient:
        task = job.task
        theta = {name: tensor.detach().requires_grad_() for name, tensor in job.theta.items()}
        rates = {name: rate.detach().requires_grad_() for name, rate in job.rates.items()}
        moving = {name: theta[name] for name in rates}
        sums = {name: torch.zeros_like(tensor) for name, tensor in moving.items()}
        for _ in range(steps):
            loss = self._loss({**theta, **moving}, task.support_inputs, task.support_labels)
            gradients = clipped(_gradients(loss, moving, create_graph=True), self._clip_norm)
            moving = {name: tensor - rates[name] * gradients[name] for name, tensor in moving.items()}  # Eq. 4
            sums = {name: total + gradients[name].detach() for name, total in sums.items()}
        loss = self._loss({**theta, **moving}, task.query_inputs, task.query_labels)
        leaves = {f"theta.{n}": t for n, t in theta.items()} | {f"rate.{n}": t for n, t in rates.items()}
        found = _gradients(loss, leaves)
        outer = {name: found[f"theta.{name}"] for name in theta}
        return JobGradient(outer, sums, loss.detach(), {name: found[f"rate.{name}"] for name in rates})

    def _loss(self, parameters: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self._outputs_of(parameters, inputs), labels)


def _gradients(loss: Tensor, tensors: Tensors, create_graph: bool = False) -> Tensors:
    values = torch.autograd.grad(loss, list(tensors.values()), create_graph=create_graph, materialize_grads=True)
    return dict(zip(tensors, values, strict=True))
