"""Meta-gradients that go through the inner steps (MAML, Meta-SGD): backwards through them, one at a time.

A step is phi' = phi - rate * g(phi). So a gradient v with respect to phi' becomes one with respect to phi when
(dg/dphi)^T (rate * v) is taken off it: a product with the Hessian. That is one small program, compiled once and run for
every step; memory holds the weights before each step, and no graph of all steps.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp

from wheretolearn.engine.compiled import CompiledArithmetic, rates_of, silent_compiler
from wheretolearn.engine.graphed import Job, JobGradient, Precision, Tensors
from wheretolearn.engine.passes import Fast, Passes
from wheretolearn.engine.still_body import FEATURES, body_and_head
from wheretolearn.inner_loop import clipped

# A name, as the compiler cannot read `tuple[...]` in the signature of a function within a function.
ProductAndGradients = tuple[Tensor, Tensors]


class HessianProducts:
    """Products of the inner loss's Hessian and a vector, for a network or for its head alone."""

    def __init__(self, passes: Passes, clip_norm: float | None, fast: Fast):
        def backward(weights: Tensors, cotangent: Tensors, inputs: Tensor, labels: Tensor) -> tuple[Tensors, Tensors]:
            def product(weights: Tensors) -> ProductAndGradients:
                moving = {name: weights[name] for name in cotangent}
                still = {name: tensor for name, tensor in weights.items() if name not in cotangent}
                gradients = clipped(passes.gradient_of_moving(moving, still, inputs, labels)[0], clip_norm)
                return torch.stack([(gradients[name] * cotangent[name]).sum() for name in cotangent]).sum(), gradients

            back, gradients = grad(product, has_aux=True)(weights)
            return back, gradients

        def forward(weights: Tensors, cotangent: Tensors, inputs: Tensor, labels: Tensor) -> tuple[Tensors, Tensors]:
            """The Hessian is symmetric: this is how the gradient changes when weights move along the cotangent."""

            def gradient(weights: Tensors) -> Tensors:
                found: Tensors = passes.gradient_of_moving(weights, {}, inputs, labels)[0]
                return found

            direction = {name: cotangent.get(name, torch.zeros_like(tensor)) for name, tensor in weights.items()}
            gradients, back = jvp(gradient, (weights,), (direction,))[:2]
            return back, {name: gradients[name] for name in cotangent}

        self._forward, self._backward = fast(forward), fast(backward)
        self._can_go_forward: bool | None = None if clip_norm is None else False  # None: not tried yet
        with silent_compiler():  # the first use of forward mode loads its rules, with remarks about torch.jit
            jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))

    def pulled_back(
        self, weights: Tensors, cotangent: Tensors, inputs: Tensor, labels: Tensor
    ) -> tuple[Tensors, Tensors]:
        """(dg/dweights)^T cotangent, for all weights, moving or still; and the inner gradient g itself.

        Forward mode needs far fewer sums for batch norm, but takes no advantage of weights that stand still (which the
        features of a head are among), and some operations do not have it.
        """
        moving, all_of_them = (sum(tensor.numel() for tensor in some.values()) for some in (cotangent, weights))
        mostly_moving = 2 * moving >= all_of_them
        if mostly_moving and self._can_go_forward is None:
            self._can_go_forward = self._tried_forward(weights, cotangent, inputs, labels)
        way = self._forward if mostly_moving and self._can_go_forward else self._backward
        return way(weights, cotangent, inputs, labels)

    def _tried_forward(self, *arguments: Any) -> bool:
        try:
            self._forward(*arguments)
        except Exception:  # what is wrong in both modes shows in the other
            return False
        return True


class SecondOrderArithmetic(CompiledArithmetic):
    """Adapts as the first-order arithmetic does."""

    def __init__(
        self, model: nn.Module, clip_norm: float | None = None, precision: Precision = "float32", compiled: bool = True
    ):
        super().__init__(model, clip_norm, precision, compiled)
        self._products: dict[Passes, HessianProducts] = {}

    def _meta_gradient(self, job: Job, steps: int) -> JobGradient:
        if not job.rates:  # no step changes anything: there is nothing to differentiate through
            return super()._meta_gradient(job, steps)
        task = job.task
        rates = rates_of(job)
        moving = {name: job.theta[name] for name in rates}
        sums = {name: torch.zeros_like(tensor) for name, tensor in moving.items()}
        passes, still, body = self._for_inner_steps(job, steps)
        before = []
        for _ in range(steps):
            before.append(moving)
            moving, sums = passes.inner_step(moving, sums, still, rates, task.support_inputs, task.support_labels)
        outer, loss = self._whole.outer_gradient({**job.theta, **moving}, task.query_inputs, task.query_labels)
        if passes not in self._products:
            self._products[passes] = HessianProducts(passes, self._clip_norm, self._fast)
        of_rates = {name: torch.zeros_like(rate) for name, rate in rates.items()}
        of_weights = {name: outer[name] for name in (*moving, *still) if name != FEATURES}
        if body is not None:
            of_weights[FEATURES] = torch.zeros_like(still[FEATURES])
        for moving in reversed(before):
            cotangent = {name: rate * of_weights[name] for name, rate in rates.items()}
            back, gradients = self._products[passes].pulled_back(
                {**moving, **still}, cotangent, task.support_inputs, task.support_labels
            )
            of_rates = {name: total - of_weights[name] * gradients[name] for name, total in of_rates.items()}
            of_weights = {name: gradient - back[name] for name, gradient in of_weights.items()}
        if body is not None:
            to_features = of_weights.pop(FEATURES)
            of_body = body.gradients(body_and_head(job.theta)[0], task.support_inputs, to_features)
            of_weights |= {name: outer[name] + gradient for name, gradient in of_body.items()}
        outer = {**outer, **of_weights}
        return JobGradient(outer, sums, loss, of_rates)
