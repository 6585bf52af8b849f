"""K masked gradient steps on one task, and the gradient that the outer loop learns from.

This is the readable path, for any ``nn.Module``; faster engines are tested against it.

    adapted = adapt(model, mask, lambda net: F.cross_entropy(net(x), y), steps=5, inner_lr=0.1)
    accumulate(adapted, lambda net: F.cross_entropy(net(x_query), y_query))   # fills .grad of model and mask
    network = adapted.module()                                               # an ordinary nn.Module

First order (the default) needs no graph through the loop: with g_out the query gradient at phi_K,
d L / d theta = g_out and d L / d multiplier = -inner_lr * g_out * sum_k g_in(k) (Eq. 5), so one running sum of inner
gradients is kept and memory does not grow with the number of steps. Masks that are not elementwise take the same
derivative of their step, at the sums of what went into it; where a mask pulls weights back, older steps fade in these
sums as they do in phi. Second order is a path of its own.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from wheretolearn import batch_norm
from wheretolearn.batch_norm import BatchNormMode
from wheretolearn.errors import ConfigError, MismatchError
from wheretolearn.masks import GradientMask, trainable_shapes

Loss = Callable[[nn.Module], Tensor]  # the network in, a scalar out
Tensors = dict[str, Tensor]
T = TypeVar("T")


@dataclass
class Adapted:
    """What an inner loop leaves behind: the adapted weights, and all that the outer loop needs."""

    model: nn.Module  # as it was, with theta
    mask: GradientMask
    parameters: Tensors  # phi_K: every trainable parameter
    buffers: Tensors
    gradient_sum: Tensors  # sum of the inner gradients of each covered parameter; empty for fixed masks
    moved_sum: Tensors  # sum of phi_k - theta before each step, for masks that use it: there, both sums fade
    losses: Tensor  # [steps] support loss before each step
    inner_lr: float
    batch_norm: BatchNormMode
    theta_version: int  # tells whether the model's weights have changed since
    mask_version: int

    def evaluate(self, loss: Loss) -> Tensor:
        """Any function of the adapted network (a loss, predictions), as the query pass sees it; no gradient."""
        with torch.no_grad():
            return self._query(loss, self.parameters)

    def module(self) -> nn.Module:
        """The adapted network as a module of its own, batch-norm mode built in; the original is untouched."""
        return network_with(self.model, self.parameters, self.buffers, self.batch_norm)

    def _query(self, function: Callable[[nn.Module], T], parameters: Tensors) -> T:
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        with batch_norm.normalising(self.model, by_batch=self.batch_norm == "batch"):
            return run_with(self.model, parameters, buffers, function)


@dataclass
class MetaGradient:
    """The gradient of one task's query loss. ``mask.pull_back(multipliers)`` is the gradient of the raw mask."""

    loss: Tensor
    theta: Tensors
    multipliers: Tensors


def adapt(
    model: nn.Module,
    mask: GradientMask,
    support_loss: Loss | Sequence[Loss],
    *,
    steps: int,
    inner_lr: float,
    batch_norm_mode: BatchNormMode = "batch",
    clip_norm: float | None = None,
) -> Adapted:
    """Take ``steps`` masked gradient steps from the model's weights; the model itself is not changed.

    ``support_loss`` may be a list with one loss per step. ``clip_norm`` bounds the norm of each inner gradient.
    """
    step_losses = _losses_by_step(support_loss, steps)
    _check_rate(inner_lr)
    batch_norm.check_mode(model, batch_norm_mode)
    multipliers = mask.multipliers()
    parameters = _theta(model, mask)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    start = {name: parameters[name].clone() for name in mask.names} if mask.uses_moved else {}
    gradient_sum = {name: _wide_zeros(parameters[name]) for name in mask.names} if mask.raw else {}
    moved_sum = {name: _wide_zeros(tensor) for name, tensor in start.items()}
    kept = _kept(mask, multipliers, moved_sum, inner_lr) if mask.uses_moved else {}
    for name in mask.names:
        parameters[name].requires_grad_()
    losses = []
    with torch.enable_grad(), batch_norm.normalising(model, by_batch=batch_norm_mode != "running"):
        for step_loss in step_losses:
            loss, gradients = _inner_pass(model, parameters, buffers, step_loss, mask.names)
            gradients = clipped(gradients, clip_norm)
            with torch.no_grad():
                moved = {name: parameters[name] - tensor for name, tensor in start.items()}
                for name, update in mask.updates(multipliers, gradients, moved, inner_lr).items():
                    parameters[name].sub_(update, alpha=inner_lr)
                for sums, values in ((gradient_sum, gradients), (moved_sum, moved)):
                    for name, total in sums.items():
                        if name in kept:  # what d phi / d multiplier was before this step goes through its pull
                            total.mul_(kept[name])
                        total.add_(values[name])
            torch.clear_autocast_cache()  # it would go on using casts of the old weights
            losses.append(loss)
            del gradients  # before the next forward pass
    parameters = {name: parameter.detach() for name, parameter in parameters.items()}
    if batch_norm_mode == "support":
        _collect_statistics(model, parameters, buffers, support_loss)
    return Adapted(
        model=model,
        mask=mask,
        parameters=parameters,
        buffers=buffers,
        gradient_sum=gradient_sum,
        moved_sum=moved_sum,
        losses=torch.stack(losses) if losses else torch.empty(0),
        inner_lr=inner_lr,
        batch_norm=batch_norm_mode,
        theta_version=version(model.parameters()),
        mask_version=version(mask.tensors().values()),
    )


def version(tensors: Iterable[Tensor]) -> int:
    """A number that grows with every change of the tensors in place."""
    return sum(tensor._version for tensor in tensors if not tensor.is_inference())  # those count no changes


def meta_gradient(adapted: Adapted, query_loss: Loss) -> MetaGradient:
    """First-order gradient of the query loss with respect to theta and the mask's multipliers, in closed form."""
    if version(adapted.mask.tensors().values()) != adapted.mask_version:
        raise MismatchError(
            "the mask has changed since the model was adapted with it, and the gradient would be wrong: take it "
            "before the mask is resampled, loaded or updated by an optimizer, or adapt anew"
        )
    parameters = {name: p.detach().requires_grad_() for name, p in adapted.parameters.items()}
    with torch.enable_grad():
        loss, found = adapted._query(_with_gradients(query_loss, parameters, tuple(parameters)), parameters)
    _must_depend(found, "query")
    outer = _filled(found, parameters, tuple(parameters))
    return MetaGradient(loss, theta=outer, multipliers=_multiplier_gradients(adapted, outer))


def _multiplier_gradients(adapted: Adapted, outer: Tensors) -> Tensors:
    if adapted.mask.elementwise:
        return {
            name: outer[name] * inner_sum * -adapted.inner_lr  # Eq. 5
            for name, inner_sum in adapted.gradient_sum.items()
        }
    multipliers = {name: m.detach().requires_grad_() for name, m in adapted.mask.multipliers().items()}
    with torch.enable_grad():
        total = adapted.mask.updates(multipliers, adapted.gradient_sum, adapted.moved_sum, adapted.inner_lr)
        towards = [outer[name].to(total[name].dtype) * -adapted.inner_lr for name in total]
        values = torch.autograd.grad(list(total.values()), list(multipliers.values()), towards)
    return dict(zip(multipliers, values, strict=True))


def second_order_meta_gradient(
    model: nn.Module,
    mask: GradientMask,
    support_loss: Loss | Sequence[Loss],
    query_loss: Loss,
    *,
    steps: int,
    inner_lr: float,
    batch_norm_mode: BatchNormMode = "batch",
    clip_norm: float | None = None,
) -> MetaGradient:
    """The full gradient, through the inner loop (MAML, Meta-SGD); time and memory grow with ``steps``.

    In the batch-norm mode ``support`` the statistics that the query pass uses count as constants.
    """
    step_losses = _losses_by_step(support_loss, steps)
    _check_rate(inner_lr)
    batch_norm.check_mode(model, batch_norm_mode)
    theta = {name: p.requires_grad_() for name, p in _theta(model, mask).items()}
    learned = bool(mask.raw)
    multipliers = {name: m.detach().clone().requires_grad_(learned) for name, m in mask.multipliers().items()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    parameters = dict(theta)
    # Of the ways to attend, only plain products have second derivatives.
    with torch.enable_grad(), _no_recomputation(), sdpa_kernel(SDPBackend.MATH):
        with batch_norm.normalising(model, by_batch=batch_norm_mode != "running"):
            for step_loss in step_losses:
                _, gradients = _inner_pass(model, parameters, buffers, step_loss, mask.names, create_graph=True)
                gradients = clipped(gradients, clip_norm)
                moved = {name: parameters[name] - theta[name] for name in mask.names} if mask.uses_moved else {}
                for name, update in mask.updates(multipliers, gradients, moved, inner_lr).items():
                    parameters[name] = parameters[name] - (inner_lr * update).to(parameters[name].dtype)
        if batch_norm_mode == "support":
            _collect_statistics(model, parameters, buffers, support_loss)
        with batch_norm.normalising(model, by_batch=batch_norm_mode == "batch"):
            loss = run_with(model, parameters, buffers, query_loss)
        leaves = {f"theta.{n}": t for n, t in theta.items()}
        if learned:
            leaves |= {f"multiplier.{n}": t for n, t in multipliers.items()}
        found = _gradients(loss, leaves, tuple(leaves))
    _must_depend(found, "query")
    gradients = _filled(found, leaves, tuple(leaves))
    return MetaGradient(
        loss.detach(),
        theta={name: gradients[f"theta.{name}"] for name in theta},
        multipliers={name: gradients[f"multiplier.{name}"] for name in multipliers if learned},
    )


def accumulate(adapted: Adapted, query_loss: Loss, weight: float = 1.0) -> Tensor:
    """Add a task's first-order gradient to ``.grad`` of the model's parameters and of the mask; return its loss."""
    gradient = meta_gradient(adapted, query_loss)
    add_gradient(adapted.model, adapted.mask, gradient, weight)
    return gradient.loss


def add_gradient(model: nn.Module, mask: GradientMask, gradient: MetaGradient, weight: float = 1.0) -> None:
    """Add a meta-gradient, times ``weight``, to the ``.grad`` of model and mask, for any torch optimizer to use."""
    targets: list[tuple[Tensor, Tensor]] = []
    theta = dict(model.named_parameters())
    targets += [(theta[name], value) for name, value in gradient.theta.items()]
    if mask.raw:
        targets += [(mask.raw[name], value) for name, value in mask.pull_back(gradient.multipliers).items()]
    for tensor, value in targets:
        value = (value * weight).to(tensor.dtype)
        tensor.grad = value if tensor.grad is None else tensor.grad + value


def update_statistics(model: nn.Module, loss: Loss) -> None:
    """Move the model's stored batch-norm statistics towards those of one pass (for the mode ``running``)."""
    with torch.no_grad(), batch_norm.normalising(model, by_batch=True):
        loss(model)


def network_with(
    model: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], mode: BatchNormMode
) -> nn.Module:
    """A copy of the model that holds these tensors, where given, and keeps to a batch-norm mode."""
    # Activations that a module keeps have a graph behind them, and cannot be copied with it.
    seen: set[int] = set()
    kept = (tensor for module in model.modules() for tensor in _tensors_in(vars(module), seen) if not tensor.is_leaf)
    network = copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in kept})
    with torch.no_grad():
        for name, tensor in (*network.named_parameters(), *network.named_buffers(remove_duplicate=False)):
            replacement = parameters.get(name, buffers.get(name))
            if replacement is None:
                continue
            if name in parameters or (replacement.shape, replacement.dtype) == (tensor.shape, tensor.dtype):
                tensor.copy_(replacement)
            else:  # a buffer that a pass has assigned anew, with another shape or type
                owner, _, own_name = name.rpartition(".")
                setattr(network.get_submodule(owner), own_name, replacement.clone())
    batch_norm.fix_mode(network, mode)
    return network


def _tensors_in(value: object, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in built-in containers, at any depth; ``seen`` has the containers looked into."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, set)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, seen)


class _Host(nn.Module):
    """Lets ``functional_call`` hand a loss the whole module, sub-modules and all, with other weights in it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module], T]) -> T:
        return function(self.model)


def run_with(
    model: nn.Module, parameters: Mapping[str, Tensor], buffers: dict[str, Tensor], function: Callable[[nn.Module], T]
) -> T:
    """``function(model)`` with these tensors in place of the model's own. ``buffers`` follows what the pass changes."""
    before = _tensors_by_name(model)
    given = {**buffers, **parameters}
    name_of = {id(tensor): name for name, tensor in before.items() if name in given}
    # Each place of a tied tensor is named, and each shared module once: torch's own handling of ties leaves the
    # replacements behind in a module that is used twice.
    tensors: dict[str, Tensor] = {}
    places: dict[str, list[str]] = {}  # of each parameter and buffer
    for prefix, module in model.named_modules():
        for own_name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if (name := name_of.get(id(tensor))) is not None:
                place = ".".join(filter(None, ("model", prefix, own_name)))
                tensors[place] = given[name]
                places.setdefault(name, []).append(place)
    if gone := [name for name in buffers if name not in places]:
        raise MismatchError(f"the model has no buffer {gone[0]} any more: adapt it anew, as it is now")
    with _leaving_as_it_was(model):
        result: T = functional_call(_Host(model), tensors, (function,), tie_weights=False)
        after = _tensors_by_name(model)
        if made := [name for name in after if name not in before]:
            raise ConfigError(
                f"the model made {made[0]} in a pass on one task, and the next task would find it: "
                "run the model once on an example before it is adapted, so that all its parts are there"
            )
        for name in buffers:
            buffers[name] = _left_in(name, [tensors[place] for place in places[name]])
        if lost := [name for name, tensor in before.items() if after.get(name) is not tensor]:
            raise ConfigError(
                f"the model dropped or replaced {lost[0]}, or the module that it is in, in a pass on one task, and the "
                "next would not find it: keep all modules, and choose among them in forward"
            )
    return result


def _left_in(name: str, found: Sequence[object]) -> Tensor:
    """What a pass left in the places of a buffer, which it may have assigned anew rather than changed in place."""
    first = found[0]
    if not isinstance(first, Tensor) or not all(isinstance(tensor, Tensor) for tensor in found):
        raise ConfigError(
            f"the model set its buffer {name} to None or deleted it in a pass, and nothing would be left to go "
            "on from: keep a tensor in it, an empty one if need be"
        )
    if any(tensor is not first for tensor in found):
        raise ConfigError(
            f"the model assigned a tensor to one of the names of its buffer {name} in a pass, and the others "
            "kept theirs: change it in place, or give each name a buffer of its own"
        )
    return first.detach()


def _tensors_by_name(model: nn.Module) -> Tensors:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@contextmanager
def _leaving_as_it_was(model: nn.Module) -> Iterator[None]:
    """After an error a model has the modules, parameters and buffers that it had before."""
    registers = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
    before = [
        (vars(module), dict(vars(module)), {name: copy.copy(getattr(module, name)) for name in registers})
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)  # which nothing can be added to
    ]
    try:
        yield
    except BaseException:
        for present, attributes, registered in before:
            for names in registered.values():
                for name in names:  # torch gives what was deleted back as a plain attribute
                    present.pop(name, None)
            # A part takes the place of a plain attribute of its name, such as None.
            present.update({name: value for name, value in attributes.items() if name not in present} | registered)
        raise


def _wide_zeros(like: Tensor) -> Tensor:
    """Zeros in at least float32: a sum of many half-precision gradients would lose the small ones."""
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


@torch.no_grad()
def _kept(mask: GradientMask, multipliers: Tensors, like: Tensors, inner_lr: float) -> Tensors:
    """The share of phi - theta that a step without a gradient leaves: d phi_k+1 / d phi_k in first order."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    ones = {name: torch.ones_like(tensor) for name, tensor in like.items()}
    return {name: 1 - inner_lr * pull for name, pull in mask.updates(multipliers, zeros, ones, inner_lr).items()}


def check_adaptation(model: nn.Module, mask: GradientMask, steps: int, inner_lr: float) -> None:
    """Raise what ``adapt`` raises of these, for those that adapt in a way of their own."""
    _check_steps(steps)
    _check_rate(inner_lr)
    _check_mask(model, mask)


def _theta(model: nn.Module, mask: GradientMask) -> Tensors:
    _check_mask(model, mask)
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def _check_mask(model: nn.Module, mask: GradientMask) -> None:
    shapes = trainable_shapes(model)
    for name in (*mask.names, *shapes):  # what is frozen later and not covered is closed, as the mask says
        if mask.shapes.get(name) != shapes.get(name):
            known, found = (
                f"{name} of shape {tuple(of[name])}" if name in of else f"no trainable {name}"
                for of in (mask.shapes, shapes)
            )
            raise MismatchError(
                "the mask was made for another model, or before parameters were frozen or unfrozen: "
                f"it was made for {known}, the model has {found}. Make it anew for the model as it is now, with "
                "select= to adapt a part of it"
            )


def _check_rate(inner_lr: float) -> None:
    if not abs(inner_lr) <= torch.finfo(torch.float32).max:
        raise ConfigError(f"inner_lr must be a finite number of float32's range, not {inner_lr}")


def _check_steps(steps: int) -> None:
    if not isinstance(steps, int) or steps < 0:
        raise ConfigError(f"the number of inner steps must be a whole number and not negative, got {steps}")


def _losses_by_step(loss: Loss | Sequence[Loss], steps: int) -> Sequence[Loss]:
    if torch.is_inference_mode_enabled():
        raise ConfigError("adaptation needs gradients: call it outside torch.inference_mode (no_grad is fine)")
    _check_steps(steps)
    if callable(loss):
        return [loss] * steps
    if len(loss) != steps:
        raise ConfigError(f"{len(loss)} support losses were given for {steps} inner steps: give one per step")
    return loss


def _inner_pass(
    model: nn.Module,
    parameters: Tensors,
    buffers: Tensors,
    loss: Loss,
    names: Sequence[str],
    create_graph: bool = False,
) -> tuple[Tensor, Tensors]:
    """A support loss and its gradients: it may leave out what is covered, but not all of the network's weights."""
    value, gradients = run_with(model, parameters, buffers, _with_gradients(loss, parameters, names, create_graph))
    if names and not gradients:  # what is not covered has no graph in this pass
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        _must_depend(run_with(model, leaves, copies, _with_gradients(loss, leaves, tuple(leaves)))[1], "support")
    return value, _filled(gradients, parameters, names)


def _with_gradients(
    loss: Loss, parameters: Mapping[str, Tensor], names: Sequence[str], create_graph: bool = False
) -> Callable[[nn.Module], tuple[Tensor, Tensors]]:
    """A function that gives a loss and its ``_gradients``.

    The backward pass belongs inside: what recomputes activations there (checkpointing) must meet the same weights.
    """

    def loss_and_gradients(network: nn.Module) -> tuple[Tensor, Tensors]:
        value = loss(network)
        gradients = _gradients(value, parameters, names, create_graph)
        return value.detach(), gradients

    return loss_and_gradients


@contextmanager
def _no_recomputation() -> Iterator[None]:
    """Refuse what would recompute activations with theta where phi belongs: the last backward pass comes too late."""
    message = (
        "second-order gradients cannot go through activation checkpointing, or other hooks on saved tensors such as "
        "save_on_cpu: take first order, or leave them out"
    )
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(message):
            yield
    except RuntimeError as error:
        if message in str(error):
            raise ConfigError(message) from None
        raise


def _gradients(
    loss: Tensor, parameters: Mapping[str, Tensor], names: Sequence[str], create_graph: bool = False
) -> Tensors:
    """Gradients by name, of those parameters that the loss uses."""
    if not isinstance(loss, Tensor):
        raise ConfigError(f"a loss must be a tensor, this one is a {type(loss).__name__}: do not call .item() on it")
    if loss.dim() != 0:
        raise ConfigError(f"a loss must be a single number, this one has shape {tuple(loss.shape)}: take its mean")
    if not names or not loss.requires_grad:
        return {}
    wanted = [parameters[name] for name in names]
    values = torch.autograd.grad(loss, wanted, create_graph=create_graph, allow_unused=True)
    # A sparse embedding has sparse gradients; masks and sums are dense.
    return {name: value.to_dense() for name, value in zip(names, values, strict=True) if value is not None}


def _filled(gradients: Tensors, parameters: Mapping[str, Tensor], names: Sequence[str]) -> Tensors:
    """Zero for the parameters that a loss does not use."""
    return {name: gradients[name] if name in gradients else torch.zeros_like(parameters[name]) for name in names}


def _must_depend(gradients: Tensors, kind: str) -> None:
    if not gradients:
        raise ConfigError(
            f"the {kind} loss does not depend on the weights of the network that it is given: "
            "is it computed without gradients, detached, or from another network?"
        )


def clipped(gradients: Tensors, clip_norm: float | None) -> Tensors:
    """All scaled down together, where their common norm is larger than ``clip_norm``."""
    if clip_norm is None or not gradients:
        return gradients
    if not clip_norm > 0:
        raise ConfigError(f"clip_norm must be greater than 0, not {clip_norm}")
    # In half precision a norm overflows long before its numbers do.
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    return {name: gradient * scale for name, gradient in gradients.items()}


def _collect_statistics(
    model: nn.Module, parameters: Mapping[str, Tensor], buffers: Tensors, support_loss: Loss | Sequence[Loss]
) -> None:
    """Replace the stored statistics in ``buffers`` by those of the support data under the adapted weights."""
    for name, buffer in buffers.items():
        if name.rpartition(".")[2] == "num_batches_tracked":
            buffer.zero_()
    with torch.no_grad(), batch_norm.normalising(model, by_batch=True, cumulative=True):
        for loss in [support_loss] if callable(support_loss) else support_loss:
            run_with(model, parameters, buffers, loss)
