"""Meta-gradients that go through the inner steps (MAML, Meta-SGD): backwards through them, one at a time.

A step is phi' = phi - rate * g(phi). So a gradient v with respect to phi' becomes one with respect to phi when
(dg/dphi)^T (rate * v) is taken off it: a product with the Hessian. That is one small program, compiled once and run for
every step; memory holds the weights before each step, and no graph of all steps.
"""

import torch
from torch import Tensor, nn
from torch.func import grad

from wheretolearn.engine.compiled import CompiledArithmetic, rates_of
from wheretolearn.engine.graphed import Job, JobGradient, Precision, Tensors


class SecondOrderArithmetic(CompiledArithmetic):
    """Adapts as the first-order arithmetic does."""

    def __init__(
        self, model: nn.Module, clip_norm: float | None = None, precision: Precision = "float32", compiled: bool = True
    ):
        super().__init__(model, clip_norm, precision, compiled)

        def product(weights: Tensors, cotangent: Tensors, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensors]:
            moving = {name: weights[name] for name in cotangent}
            still = {name: tensor for name, tensor in weights.items() if name not in cotangent}
            gradients = self._inner_gradient(moving, still, inputs, labels)
            return torch.stack([(gradients[name] * cotangent[name]).sum() for name in cotangent]).sum(), gradients

        def pulled_back(
            weights: Tensors, cotangent: Tensors, inputs: Tensor, labels: Tensor
        ) -> tuple[Tensors, Tensors]:
            """(dg/dweights)^T cotangent, for all weights, moving or still; and the inner gradient g itself."""
            back, gradients = grad(product, has_aux=True)(weights, cotangent, inputs, labels)
            return back, gradients

        self._pulled_back = self._fast(pulled_back)

    def _meta_gradient(self, job: Job, steps: int) -> JobGradient:
        task = job.task
        rates = rates_of(job)
        still = {name: tensor for name, tensor in job.theta.items() if name not in rates}
        moving = {name: job.theta[name] for name in rates}
        sums = {name: torch.zeros_like(tensor) for name, tensor in moving.items()}
        before = []
        for _ in range(steps):
            before.append(moving)
            moving, sums = self._inner_step(moving, sums, still, rates, task.support_inputs, task.support_labels)
        outer, loss = self._outer_gradient({**moving, **still}, task.query_inputs, task.query_labels)
        of_rates = {name: torch.zeros_like(rate) for name, rate in rates.items()}
        for moving in reversed(before):
            cotangent = {name: rate * outer[name] for name, rate in rates.items()}
            weights = {**moving, **still}
            back, gradients = self._pulled_back(weights, cotangent, task.support_inputs, task.support_labels)
            of_rates = {name: total - outer[name] * gradients[name] for name, total in of_rates.items()}
            outer = {name: gradient - back[name] for name, gradient in outer.items()}
        return JobGradient(outer, sums, loss, of_rates)
