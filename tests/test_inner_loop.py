"""The closed forms against plain autograd, and the inner loop on every kind of module."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from wheretolearn import masks
from wheretolearn.delta import SparseDelta
from wheretolearn.errors import ConfigError, MismatchError
from wheretolearn.inner_loop import (
    accumulate,
    adapt,
    clipped,
    meta_gradient,
    second_order_meta_gradient,
    update_statistics,
)

LR = 0.3


class Step(torch.autograd.Function):
    """1[m >= 0] forwards, identity backwards: the paper's definition, written as autograd wants it."""

    @staticmethod
    def forward(ctx, m):
        return (m >= 0).to(m.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class ReluThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, m):
        return torch.relu(m)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def generated_by_autograd(raw, name, noise):
    if f"{name}.projection" not in raw:
        return Step.apply(raw[name])
    offset = raw[f"{name}.offset"]
    latent = noise * raw["latent.scale"] + raw["latent.mean"]
    return Step.apply((raw[f"{name}.projection"] @ latent).view_as(offset) + offset)


def row_of(raw, name, noise):
    """Straight-through Gumbel-softmax of the layer's logits, in the shape of the parameter."""
    owner = name.replace("bias", "weight")
    position = list(raw).index(owner) * 3  # every layer of this network has three units
    chance = torch.special.ndtr(noise[position : position + 3])
    noisy = raw[owner] + torch.log(chance / (1 - chance))
    soft = torch.sigmoid(noisy / 0.6)
    hard = (noisy >= 0).to(soft.dtype) + soft - soft.detach()
    return hard.view(-1, *[1] * (dict(network().named_parameters())[name].dim() - 1))


def turned(raw, name, gradient):
    matrices = [raw[f"{name}.{mode}"] for mode in ("out", "in", "kernel") if f"{name}.{mode}" in raw]
    formula = {1: "po,o->p", 2: "po,qi,oi->pq", 3: "po,qi,lk,oik->pql"}[len(matrices)]
    flat = gradient.flatten(2) if gradient.dim() > 2 else gradient
    return torch.einsum(formula, *matrices, flat).view_as(gradient)


def proximal(raw, name, gradient, moved):
    strength = raw[name].exp()
    after = (moved - LR * gradient) / (1 + LR * strength)
    return (moved - after) / LR


def away_from_start(make):
    def made(model, generator=None):
        mask = make(model)
        for m in mask.raw.values():
            m += 0.3 * torch.randn(m.shape, generator=torch.Generator().manual_seed(5))
        return mask

    return made


# How an inner step of the kinds that are not elementwise goes: (raw, name, gradient, phi - theta) -> update
STEPS = {
    "curvature": (away_from_start(masks.curvature), lambda raw, name, g, _: turned(raw, name, g)),
    "shrinkage": (away_from_start(masks.shrinkage), proximal),
}

KINDS = {
    "binary": (masks.binary, lambda raw, name, _: Step.apply(raw[name])),
    "relu": (
        lambda model, **k: masks.relu(model, init=masks.uniform(-0.3, 0.8), **k),
        lambda raw, name, _: ReluThrough.apply(raw[name]),
    ),
    "dying-relu": (
        lambda model, **k: masks.relu(model, init=masks.uniform(-0.3, 0.8), straight_through=False, **k),
        lambda raw, name, _: torch.relu(raw[name]),
    ),
    "exp": (masks.exp, lambda raw, name, _: raw[name].exp()),
    "linear": (
        lambda model, **k: masks.linear(model, init=masks.uniform(-0.3, 0.8), **k),
        lambda raw, name, _: raw[name],
    ),
    "fixed": (lambda model, **k: masks.fixed(model), lambda raw, name, _: 1.0),
    "generated": (lambda model, **k: masks.generated(model, latent_size=6, **k), generated_by_autograd),
    "rows": (lambda model, **k: masks.rows(model, temperature=0.6, initial_logit=0.4, **k), row_of),
}


def steps_of(kind, mask):
    """The kind's inner step as autograd would write it."""
    if kind in STEPS:
        return STEPS[kind][1]
    noise = getattr(mask, "noise", None)
    return lambda raw, name, gradient, _: KINDS[kind][1](raw, name, noise) * gradient


def maker(kind):
    return (STEPS if kind in STEPS else KINDS)[kind][0]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 16, 3)).double()


def batch(seed, size=6):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.arange(size) % 3


def classification(x, y):
    return lambda net: F.cross_entropy(net(x), y)


SUPPORT, QUERY = classification(*batch(1)), classification(*batch(2, 9))


def unrolled(model, mask, step_of, steps, detach):
    """Autograd through the whole inner loop; ``detach`` cuts second-order terms, all of which come from gradients."""
    (xs, ys), (xq, yq) = batch(1), batch(2, 9)
    theta = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    raw = {n: m.detach().clone().requires_grad_() for n, m in mask.raw.items()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    phi = dict(theta)
    for _ in range(steps):
        loss = F.cross_entropy(functional_call(model, {**phi, **buffers}, (xs,)), ys)
        gradients = torch.autograd.grad(loss, list(phi.values()), create_graph=True)
        moved = {n: p - theta[n] for n, p in phi.items()}
        if detach:
            gradients = [g.detach() for g in gradients]
        phi = {n: p - LR * step_of(raw, n, g, moved[n]) for (n, p), g in zip(phi.items(), gradients, strict=True)}
    loss = F.cross_entropy(functional_call(model, {**phi, **buffers}, (xq,)), yq)
    gradients = torch.autograd.grad(loss, [*theta.values(), *raw.values()])
    return (
        dict(zip(theta, gradients, strict=False)),
        dict(zip(raw, gradients[len(theta) :], strict=True)),
        phi,
    )


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("kind", [*KINDS, *STEPS])
def test_first_order_closed_form_equals_autograd(kind, steps):
    make = maker(kind)
    model = network()
    mask = make(model, generator=torch.Generator().manual_seed(3)) if kind != "fixed" else make(model)
    mask.to(torch.float64)
    theta, raw, phi = unrolled(model, mask, steps_of(kind, mask), steps, detach=True)
    adapted = adapt(model, mask, SUPPORT, steps=steps, inner_lr=LR)
    gradient = meta_gradient(adapted, QUERY)
    for name in theta:
        torch.testing.assert_close(adapted.parameters[name], phi[name], rtol=0, atol=1e-10)
        torch.testing.assert_close(gradient.theta[name], theta[name], rtol=0, atol=1e-10)
    pulled = mask.pull_back(gradient.multipliers)
    assert set(pulled) == set(raw)
    for name in raw:
        torch.testing.assert_close(pulled[name], raw[name], rtol=0, atol=1e-10)
    if raw:
        assert any(g.abs().max() > 1e-4 for g in raw.values())


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", [*KINDS, *STEPS])
def test_second_order_equals_autograd(kind, steps):
    model = network()
    mask = maker(kind)(model).to(torch.float64)
    theta, raw, _ = unrolled(model, mask, steps_of(kind, mask), steps, detach=False)
    gradient = second_order_meta_gradient(model, mask, SUPPORT, QUERY, steps=steps, inner_lr=LR)
    for name in theta:
        torch.testing.assert_close(gradient.theta[name], theta[name], rtol=0, atol=1e-10)
    pulled = mask.pull_back(gradient.multipliers)
    assert set(pulled) == set(raw)
    for name in raw:
        torch.testing.assert_close(pulled[name], raw[name], rtol=0, atol=1e-10)


def test_second_order_maml_equals_finite_differences():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    mask = masks.fixed(model)
    x, y = torch.randn(5, 4).double(), torch.randn(5, 2).double()

    def support(net):
        return F.mse_loss(net(x), y)

    def query(net):
        return F.mse_loss(net(2 * x), -y)

    gradient = second_order_meta_gradient(model, mask, support, query, steps=3, inner_lr=LR)

    def outer_loss():
        return adapt(model, mask, support, steps=3, inner_lr=LR).evaluate(query).item()

    epsilon = 1e-6
    first_order = meta_gradient(adapt(model, mask, support, steps=3, inner_lr=LR), query)
    for name, parameter in model.named_parameters():
        flat = parameter.data.view(-1)
        for i in range(flat.numel()):
            flat[i] += epsilon
            above = outer_loss()
            flat[i] -= 2 * epsilon
            below = outer_loss()
            flat[i] += epsilon
            assert gradient.theta[name].view(-1)[i].item() == pytest.approx((above - below) / (2 * epsilon), abs=1e-7)
    assert not torch.allclose(first_order.theta["0.weight"], gradient.theta["0.weight"], atol=1e-4)


def test_second_order_goes_through_attention():
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 2)).double()
    x, y = torch.randn(5, 3, 4).double(), torch.tensor([0, 1, 0, 1, 0])
    mask, loss, step = masks.fixed(model), classification(x, y), {"steps": 2, "inner_lr": LR}
    gradient = second_order_meta_gradient(model, mask, loss, loss, **step).theta["0.self_attn.in_proj_weight"]
    weight, values = model[0].self_attn.in_proj_weight, []
    for sign in (1, -1):
        weight.data[9, 2] += sign * 1e-6
        values.append(adapt(model, mask, loss, **step).evaluate(loss).item())
        weight.data[9, 2] -= sign * 1e-6
    assert gradient[9, 2].item() == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-7)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: masks.linear(model, init=masks.uniform(-0.1, 0.4)),  # Meta-SGD
        away_from_start(masks.curvature),
        away_from_start(masks.shrinkage),
    ],
)
def test_second_order_of_the_mask_equals_finite_differences(make):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 2)).double()
    mask = make(model).to(torch.float64)
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()

    def support(net):
        return F.mse_loss(net(x), y)

    def query(net):
        return F.mse_loss(net(x + 1), y)

    gradient = second_order_meta_gradient(model, mask, support, query, steps=2, inner_lr=1.0)
    pulled = mask.pull_back(gradient.multipliers)
    for name, m in mask.raw.items():
        flat = m.view(-1)
        for i in range(flat.numel()):
            values = []
            for sign in (1, -1):
                flat[i] += sign * 1e-6
                values.append(adapt(model, mask, support, steps=2, inner_lr=1.0).evaluate(query).item())
                flat[i] -= sign * 1e-6
            assert pulled[name].view(-1)[i].item() == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-7)


def test_first_order_gradient_of_shrinkage_is_a_fading_sum_of_displacements():
    """d L / d lambda = -alpha g_out sum_k (phi_k - theta) / (1 + alpha lambda)^(K - k + 1), k = 1 .. K."""
    model = network()
    mask = away_from_start(masks.shrinkage)(model).to(torch.float64)
    gradient = meta_gradient(adapt(model, mask, SUPPORT, steps=3, inner_lr=LR), QUERY)
    paths = {k: adapt(model, mask, SUPPORT, steps=k, inner_lr=LR).parameters for k in (1, 2, 3)}
    for name, parameter in model.named_parameters():
        strength = mask.raw[name].exp()
        total = sum((path[name] - parameter.detach()) / (1 + LR * strength) ** (4 - k) for k, path in paths.items())
        expected = -LR * gradient.theta[name] * total
        pulled = mask.pull_back(gradient.multipliers)[name]  # with respect to log lambda
        torch.testing.assert_close(pulled, expected * strength, rtol=0, atol=1e-12)


@pytest.mark.parametrize("log_strength", [-4.0, 4.6, 12.0])
def test_first_order_gradient_of_shrinkage_equals_autograd_however_strong_the_pull(log_strength):
    model = network()
    mask = masks.shrinkage(model, init=masks.constant(log_strength)).to(torch.float64)
    _, expected, _ = unrolled(model, mask, steps_of("shrinkage", mask), 35, detach=True)
    found = mask.pull_back(meta_gradient(adapt(model, mask, SUPPORT, steps=35, inner_lr=LR), QUERY).multipliers)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-12)


def test_shrinkage_stays_stable_where_a_plain_step_would_explode():
    model = network()
    mask = masks.shrinkage(model, init=masks.constant(5.0)).to(torch.float64)  # alpha lambda = 45
    adapted = adapt(model, mask, SUPPORT, steps=100, inner_lr=LR)
    assert adapted.losses.isfinite().all()
    assert adapted.losses[-1] < adapted.losses[0]


def test_shrinkage_ends_near_the_minimum_of_the_penalised_loss():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    mask = masks.shrinkage(model, init=masks.constant(0.5)).to(torch.float64)
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()

    def support(net):
        return F.mse_loss(net(x), y)

    network = adapt(model, mask, support, steps=400, inner_lr=LR).module()
    support(network).backward()
    for name, parameter in network.named_parameters():
        moved = parameter - model.get_parameter(name)
        pull = mask.raw[name].exp() * moved
        torch.testing.assert_close(parameter.grad, -pull, rtol=0, atol=1e-10)


def test_the_model_is_left_as_it_was():
    model = network()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    meta_gradient(adapt(model, masks.binary(model), SUPPORT, steps=3, inner_lr=LR), QUERY)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert modes == [module.training for module in model.modules()]
    assert all(p.grad is None for p in model.parameters())


def test_closed_weights_do_not_move_and_open_ones_do():
    model = network()
    mask = masks.binary(model, initial_sparsity=0.5)
    adapted = adapt(model, mask, SUPPORT, steps=2, inner_lr=LR)
    for name, multiplier in mask.multipliers().items():
        moved = adapted.parameters[name] != dict(model.named_parameters())[name]
        assert not moved[multiplier == 0].any()
    moved = adapted.parameters["4.weight"] != model[4].weight
    assert moved[mask.multipliers()["4.weight"] == 1].float().mean() > 0.9


def test_a_subset_mask_still_gives_every_parameter_an_outer_gradient():
    model = network()
    adapted = adapt(model, masks.fixed(model, "head"), SUPPORT, steps=2, inner_lr=LR)
    assert torch.equal(adapted.parameters["0.weight"], model[0].weight)
    assert meta_gradient(adapted, QUERY).theta["0.weight"].abs().max() > 0


def test_accumulate_fills_grad_for_torch_optimizers_and_adds_up():
    model = network()
    mask = masks.binary(model).to(torch.float64)
    adapted = adapt(model, mask, SUPPORT, steps=2, inner_lr=LR)
    expected = meta_gradient(adapted, QUERY)
    accumulate(adapted, QUERY)
    accumulate(adapted, QUERY, weight=2.0)
    torch.testing.assert_close(model[0].weight.grad, 3 * expected.theta["0.weight"])
    torch.testing.assert_close(mask.raw["0.weight"].grad, 3 * mask.pull_back(expected.multipliers)["0.weight"])


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda model: masks.generated(model, latent_size=6), lambda mask: mask.resample()),
        (masks.rows, lambda mask: mask.resample()),
        (masks.exp, lambda mask: mask.raw["4.weight"].add_(1.0)),
        (masks.shrinkage, lambda mask: mask.load_tensors(mask.tensors())),
        (masks.binary, lambda mask: torch.optim.Adam(mask.parameters()).step()),
    ],
)
def test_a_mask_that_has_changed_since_is_refused(make, change):
    model = network()
    mask = make(model)
    adapted = adapt(model, mask, SUPPORT, steps=1, inner_lr=LR)
    accumulate(adapted, QUERY)
    change(mask)
    for function in (meta_gradient, accumulate):
        with pytest.raises(MismatchError, match="before the mask is resampled, loaded or updated by an optimizer"):
            function(adapted, QUERY)
    accumulate(adapt(model, mask, SUPPORT, steps=1, inner_lr=LR), QUERY)


def test_several_tasks_may_be_adapted_to_before_their_gradients_are_taken():
    model = network()
    mask = masks.generated(model, latent_size=6).to(torch.float64)
    optimizer = torch.optim.Adam([*model.parameters(), *mask.parameters()])
    for _ in range(2):
        optimizer.zero_grad()
        mask.resample()
        mask.sparsity()
        for adapted in [adapt(model, mask, SUPPORT, steps=1, inner_lr=LR) for _ in range(2)]:
            accumulate(adapted, QUERY)
            meta_gradient(adapted, QUERY)
        optimizer.step()


def test_one_loss_per_step():
    model = network()
    mask = masks.fixed(model)
    losses = [classification(*batch(seed)) for seed in (1, 2)]
    both = adapt(model, mask, losses, steps=2, inner_lr=LR)
    first = adapt(model, mask, losses[0], steps=1, inner_lr=LR).module()
    second = adapt(first, masks.fixed(first), losses[1], steps=1, inner_lr=LR)
    torch.testing.assert_close(both.parameters["4.weight"], second.parameters["4.weight"])
    with pytest.raises(ConfigError, match="one per step"):
        adapt(model, mask, losses, steps=3, inner_lr=LR)


def test_zero_steps_is_the_model_itself():
    model = network()
    adapted = adapt(model, masks.binary(model), SUPPORT, steps=0, inner_lr=LR)
    x, _ = batch(2)
    assert torch.equal(adapted.evaluate(lambda net: net(x)), model(x))


def test_works_inside_no_grad():
    model = network()
    with torch.no_grad():
        adapted = adapt(model, masks.fixed(model), SUPPORT, steps=2, inner_lr=LR)
        assert adapted.losses[1] < adapted.losses[0]


def test_clip_norm_bounds_the_step():
    model = network()
    mask = masks.fixed(model)
    adapted = adapt(model, mask, SUPPORT, steps=1, inner_lr=1.0, clip_norm=0.01)
    moved = torch.cat([(adapted.parameters[n] - p).flatten() for n, p in model.named_parameters()])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)
    free = adapt(model, mask, SUPPORT, steps=1, inner_lr=1.0)
    loose = adapt(model, mask, SUPPORT, steps=1, inner_lr=1.0, clip_norm=1e6)
    torch.testing.assert_close(free.parameters["0.weight"], loose.parameters["0.weight"])


def test_clipped_gradients_are_the_ones_summed_for_the_mask():
    model = network()
    adapted = adapt(
        model, masks.linear(model, init=masks.constant(1.0)), SUPPORT, steps=1, inner_lr=1.0, clip_norm=0.01
    )
    total = torch.cat([g.flatten() for g in adapted.gradient_sum.values()])
    assert total.norm().item() == pytest.approx(0.01, rel=1e-3)


class Unusual(nn.Module):
    """Tied weights, a frozen parameter, an unused one, dropout, a buffer that forward changes, a sub-module call."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.head = nn.Linear(4, 2)

    def features(self, x):
        self.calls += 1
        return self.dropout(torch.tanh(self.second(torch.tanh(self.first(x))) * self.frozen))

    def forward(self, x):
        return self.head(self.features(x))


def test_unusual_modules():
    torch.manual_seed(0)
    model = Unusual().eval()
    x, y = torch.randn(6, 4), torch.tensor([0, 1] * 3)
    mask = masks.binary(model, initial_sparsity=0.0)
    assert set(mask.names) == {
        "first.weight",
        "first.bias",
        "second.bias",
        "unused",
        "head.weight",
        "head.bias",
    }
    adapted = adapt(model, mask, lambda net: F.cross_entropy(net.head(net.features(x)), y), steps=4, inner_lr=0.5)
    assert model.calls == 0
    assert adapted.buffers["calls"] == 4
    assert torch.equal(adapted.parameters["unused"], model.unused)
    gradient = meta_gradient(adapted, lambda net: F.cross_entropy(net(x), y))
    assert torch.equal(gradient.theta["unused"], torch.zeros(3))
    assert "frozen" not in gradient.theta
    network = adapted.module()
    assert network.second.weight is network.first.weight
    assert not torch.equal(network.first.weight, model.first.weight)
    torch.testing.assert_close(network(x), adapted.evaluate(lambda net: net(x)))


def test_a_module_that_keeps_its_activations_can_be_copied():
    class Keeping(nn.Linear):
        def forward(self, x):
            self.kept = super().forward(x)
            return self.kept

    torch.manual_seed(0)
    model, x, y = Keeping(4, 2), torch.randn(6, 4), torch.tensor([0, 1] * 3)
    adapted = adapt(model, masks.fixed(model), lambda net: F.cross_entropy(net(x), y), steps=1, inner_lr=1.0)
    model(x)
    torch.testing.assert_close(adapted.module()(x), adapted.evaluate(lambda net: net(x)))


def test_a_module_that_keeps_activations_in_containers_can_be_copied():
    class Keeping(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.kept = {"all": []}
            self.kept["itself"] = self.kept

        def forward(self, x):
            self.kept["all"].append((super().forward(x),))
            return self.kept["all"][-1][0]

    torch.manual_seed(0)
    model, x, y = Keeping(), torch.randn(6, 4), torch.tensor([0, 1] * 3)
    adapted = adapt(model, masks.fixed(model), lambda net: F.cross_entropy(net(x), y), steps=1, inner_lr=1.0)
    model(x)
    torch.testing.assert_close(adapted.module()(x), adapted.evaluate(lambda net: net(x)))


class Lazy(nn.Linear):
    """Makes a buffer in its first pass, from the data that it then sees, and assigns another anew in every pass."""

    def __init__(self, declared):
        super().__init__(4, 2)
        if declared:
            self.register_buffer("mean", None)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        if getattr(self, "mean", None) is None:
            self.register_buffer("mean", x.mean(0))
        self.seen = x.mean(1)
        return super().forward(x - self.mean)


@pytest.mark.parametrize("declared", [True, False])
def test_a_buffer_made_in_a_pass_would_reach_the_next_task(declared):
    torch.manual_seed(0)
    model, x, y = Lazy(declared), torch.randn(6, 4), torch.tensor([0, 1] * 3)
    before = model.state_dict()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"made mean in a pass.*run the model once"):
            adapt(model, masks.fixed(model), lambda net: F.cross_entropy(net(x), y), steps=2, inner_lr=0.1)
        assert model.state_dict().keys() == before.keys()
        assert getattr(model, "mean", None) is None
    model(x)
    assert torch.equal(model.mean, x.mean(0))


class Losing(nn.Linear):
    """Loses a buffer in every pass."""

    def __init__(self, lose, persistent=True):
        super().__init__(4, 2)
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)
        self.lose = lose

    def forward(self, x):
        self.lose(self, "seen")
        return super().forward(x)


@pytest.mark.parametrize("lose", [lambda model, name: setattr(model, name, None), delattr], ids=["None", "deleted"])
def test_a_buffer_lost_in_a_pass_is_an_error_that_names_it(lose):
    model, x, y = Losing(lose), torch.randn(6, 4), torch.tensor([0, 1] * 3)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"set its buffer seen to None or deleted it in a pass"):
            adapt(model, masks.fixed(model), lambda net: F.cross_entropy(net(x), y), steps=1, inner_lr=0.1)
    assert torch.equal(model.seen, torch.zeros(()))


def test_a_shared_buffer_is_changed_under_all_its_names_or_not_at_all():
    class Counting(nn.Linear):
        def __init__(self, in_place):
            super().__init__(4, 2)
            self.register_buffer("first", torch.zeros(()))
            self.register_buffer("second", self.first)
            self.in_place = in_place

        def forward(self, x):
            if self.in_place:
                self.second += 1
            else:
                self.second = self.second + 1
            return super().forward(x)

    x, y = torch.randn(6, 4), torch.tensor([0, 1] * 3)
    model = Counting(in_place=True)
    adapted = adapt(model, masks.fixed(model), lambda net: F.cross_entropy(net(x), y), steps=3, inner_lr=0.1)
    assert adapted.buffers["first"] == adapted.module().second == 3
    model = Counting(in_place=False)
    with pytest.raises(ConfigError, match=r"one of the names of its buffer first in a pass"):
        adapt(model, masks.fixed(model), lambda net: F.cross_entropy(net(x), y), steps=3, inner_lr=0.1)


class LazyParts(nn.Linear):
    """Makes a part of a kind in its first pass, where a plain None may have kept its place."""

    def __init__(self, part, announced):
        super().__init__(4, 4)
        self.part = part
        if announced:
            self.made = None

    def forward(self, x):
        if getattr(self, "made", None) is None:
            if self.part == "buffer":
                vars(self).pop("made", None)  # which register_buffer refuses to replace
                self.register_buffer("made", x.mean(0))
            elif self.part == "parameter":
                self.made = nn.Parameter(x.mean(0))
            else:
                self.made = nn.BatchNorm1d(4, affine=False)
        return super().forward(x)


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("part", ["buffer", "parameter", "module"])
@pytest.mark.parametrize("wrong", ["the part", "no scalar", "an exception"])
def test_a_pass_that_is_refused_for_any_reason_leaves_nothing_in_the_model(part, wrong, announced):
    model, x, y = LazyParts(part, announced), torch.randn(6, 4), torch.tensor([0, 1] * 3)

    def loss(net):
        values = F.cross_entropy(net(x), y, reduction="none" if wrong == "no scalar" else "mean")
        if wrong == "an exception":
            raise ZeroDivisionError
        return values

    for _ in range(2):
        with pytest.raises((ConfigError, ZeroDivisionError), match=r"made made" if wrong == "the part" else None):
            adapt(model, masks.fixed(model), loss, steps=2, inner_lr=0.1)
        assert list(model.state_dict()) == ["weight", "bias"]
        assert list(model.children()) == []
        assert getattr(model, "made", "gone") == (None if announced else "gone")
    model(x)  # as the error says
    adapt(model, masks.fixed(model), lambda net: F.cross_entropy(net(x), y), steps=1, inner_lr=0.1)


@pytest.mark.parametrize("change", ["dropped", "replaced"])
def test_a_pass_cannot_drop_or_replace_a_part(change):
    class Changing(nn.Sequential):
        def forward(self, x):
            out = super().forward(x)
            if change == "dropped":
                del self[0]
            else:
                self[0] = nn.Linear(4, 3)
            return out

    model, x, y = Changing(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(6, 4), torch.tensor([0, 1] * 3)
    before = dict(model.named_parameters())
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"dropped or replaced 0\.weight"):
            adapt(model, masks.fixed(model), lambda net: F.cross_entropy(net(x), y), steps=1, inner_lr=0.1)
        after = dict(model.named_parameters())
        assert after.keys() == before.keys()
        assert all(after[name] is before[name] for name in before)


def test_a_buffer_deleted_in_a_refused_pass_stays_out_of_the_state():
    model, x, y = Losing(delattr, persistent=False), torch.randn(6, 4), torch.tensor([0, 1] * 3)
    with pytest.raises(ConfigError, match="deleted it"):
        adapt(model, masks.fixed(model), lambda net: F.cross_entropy(net(x), y), steps=1, inner_lr=0.1)
    assert list(model.state_dict()) == ["weight", "bias"]


def test_an_adapted_network_says_so_where_the_model_has_lost_a_buffer():
    model, x, y = nn.Linear(4, 2), torch.randn(6, 4), torch.tensor([0, 1] * 3)
    model.register_buffer("seen", torch.zeros(()))
    adapted = adapt(model, masks.fixed(model), lambda net: F.cross_entropy(net(x), y), steps=1, inner_lr=0.1)
    del model.seen
    with pytest.raises(MismatchError, match="no buffer seen any more"):
        adapted.evaluate(lambda net: net(x))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_scripted_part_adapts():
    model, x, y = nn.Sequential(torch.jit.script(nn.Linear(4, 3)), nn.Linear(3, 2)), torch.randn(6, 4), torch.ones(6)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        adapt(model, masks.fixed(model), lambda net: F.mse_loss(net(x)[:, 0], y), steps=2, inner_lr=0.1)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), before, strict=True))


def test_a_buffer_assigned_anew_may_take_another_type():
    class Scaling(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.register_buffer("scale", torch.tensor(1))

        def forward(self, x):
            if self.training:
                self.scale = x.detach().std()
            return super().forward(x) * self.scale

    torch.manual_seed(0)
    model, x, y = Scaling(), 0.5 * torch.randn(6, 4), torch.tensor([0, 1] * 3)
    adapted = adapt(model, masks.fixed(model), lambda net: F.cross_entropy(net(x), y), steps=1, inner_lr=0.1)
    model.eval()
    for network in (adapted.module(), SparseDelta.of(adapted).apply(model)):
        torch.testing.assert_close(network(x), adapted.evaluate(lambda net: net(x)))
    assert torch.equal(model.scale, torch.tensor(1))


def test_a_buffer_assigned_anew_may_take_another_shape(tmp_path):
    torch.manual_seed(0)
    model, x, y = Lazy(True), torch.randn(6, 4), torch.tensor([0, 1] * 3)
    model(torch.randn(3, 4))
    mean, query = model.mean, torch.randn(5, 4)
    adapted = adapt(model, masks.fixed(model), lambda net: F.cross_entropy(net(x), y), steps=2, inner_lr=0.1)
    assert model.mean is mean
    delta = SparseDelta.of(adapted)
    delta.save(tmp_path / "delta.safetensors")
    for network in (adapted.module(), SparseDelta.load(tmp_path / "delta.safetensors").apply(model)):
        assert torch.equal(network.seen, x.mean(1))
        torch.testing.assert_close(network(query), adapted.evaluate(lambda net: net(query)))


class Checkpointed(nn.Sequential):
    """Gives up the activations of its middle, and computes them again in the backward pass."""

    def __init__(self, recomputing=True):
        super().__init__(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        self.recomputing = recomputing

    def middle(self, x):
        return torch.tanh(self[1](torch.tanh(x)))

    def forward(self, x):
        x = self[0](x)
        x = checkpoint(self.middle, x, use_reentrant=False) if self.recomputing else self.middle(x)
        return self[2](x)


def test_activations_computed_again_are_those_of_the_adapted_weights():
    torch.manual_seed(0)
    plain, recomputing = Checkpointed(False).double(), Checkpointed().double()
    recomputing.load_state_dict(plain.state_dict())
    x, y = torch.randn(6, 4).double(), torch.tensor([0, 1] * 3)

    def loss(net):
        return F.cross_entropy(net(x), y)

    gradients = []
    for model in (plain, recomputing):
        adapted = adapt(model, masks.linear(model, init=masks.constant(1.0)), loss, steps=5, inner_lr=0.5)
        gradients.append((adapted.losses, meta_gradient(adapted, loss)))
    (losses, expected), (found_losses, found) = gradients
    assert losses[-1] < losses[0]
    torch.testing.assert_close(found_losses, losses)
    for name, value in (expected.theta | {f"m.{n}": g for n, g in expected.multipliers.items()}).items():
        torch.testing.assert_close((found.theta | {f"m.{n}": g for n, g in found.multipliers.items()})[name], value)
    with pytest.raises(ConfigError, match="cannot go through activation checkpointing"):
        second_order_meta_gradient(recomputing, masks.fixed(recomputing), loss, loss, steps=2, inner_lr=0.5)


def test_a_query_loss_that_does_not_depend_on_the_network_is_an_error():
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 2), torch.randn(6, 4), torch.tensor([0, 1] * 3)
    adapted = adapt(model, masks.fixed(model), lambda net: F.cross_entropy(net(x), y), steps=1, inner_lr=1.0)
    other = nn.Linear(4, 2)
    for loss in (lambda net: F.cross_entropy(net(x), y).detach(), lambda net: F.cross_entropy(other(x), y)):
        with pytest.raises(ConfigError, match="does not depend on the weights of the network"):
            accumulate(adapted, loss)
        with pytest.raises(ConfigError, match="does not depend on the weights of the network"):
            second_order_meta_gradient(model, masks.fixed(model), loss, loss, steps=0, inner_lr=0.5)


@pytest.mark.parametrize("select", ["all", "head"])
def test_a_support_loss_that_does_not_depend_on_the_network_is_an_error(select):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(6, 4), torch.tensor([0, 1] * 3)
    mask, other, good = masks.binary(model, select), nn.Linear(4, 2), classification(x, y)
    bad = (lambda net: good(net).detach(), lambda net: good(other), lambda net: torch.zeros(()))
    for loss in bad:
        with pytest.raises(ConfigError, match="the support loss does not depend on the weights of the network"):
            adapt(model, mask, [good, loss], steps=2, inner_lr=0.1)
        with pytest.raises(ConfigError, match="the support loss does not depend on the weights of the network"):
            second_order_meta_gradient(model, mask, loss, good, steps=1, inner_lr=0.1)
        adapt(model, masks.fixed(model, "none"), loss, steps=1, inner_lr=0.1)


def test_a_support_loss_may_leave_out_what_the_mask_covers():
    """As where layers are skipped at random, or steps have losses of their own."""
    torch.manual_seed(0)
    model = Unusual().eval()
    x, y = torch.randn(6, 4), torch.tensor([0, 1] * 3)
    mask, whole = masks.fixed(model, "head"), classification(x, y)
    losses = [lambda net: net.features(x).square().mean(), whole]
    adapted = adapt(model, mask, losses, steps=2, inner_lr=0.1)
    assert adapted.buffers["calls"] == 2
    once = adapt(model, mask, whole, steps=1, inner_lr=0.1)
    assert torch.equal(adapted.parameters["head.weight"], once.parameters["head.weight"])
    second = second_order_meta_gradient(model, mask, losses, whole, steps=2, inner_lr=0.1)
    expected = second_order_meta_gradient(model, mask, whole, whole, steps=1, inner_lr=0.1)
    torch.testing.assert_close(second.theta, expected.theta)


def test_clipping_bounds_gradients_whose_norm_half_precision_cannot_hold():
    gradients = clipped({"w": torch.full((400, 400), 300.0, dtype=torch.float16)}, 400.0)
    assert gradients["w"].dtype == torch.float16
    assert torch.linalg.vector_norm(gradients["w"].double()).item() == pytest.approx(400.0, rel=1e-2)


@pytest.mark.parametrize("inner_lr", [float("nan"), float("inf"), 1e39])
def test_an_inner_rate_that_float32_does_not_hold_is_an_error(inner_lr):
    model, x = nn.Linear(4, 2), torch.randn(6, 4)
    for function in (adapt, second_order_meta_gradient):
        losses = [lambda net: net(x).sum()] * (1 if function is adapt else 2)
        with pytest.raises(ConfigError, match=r"inner_lr must be a finite number of float32's range, not "):
            function(model, masks.fixed(model), *losses, steps=1, inner_lr=inner_lr)


def test_tied_weights_get_the_gradient_of_both_uses():
    torch.manual_seed(0)
    model = Unusual().eval().double()
    x, y = torch.randn(6, 4).double(), torch.tensor([0, 1] * 3)
    adapted = adapt(model, masks.fixed(model), lambda net: F.cross_entropy(net(x), y), steps=1, inner_lr=1.0)
    F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(model.first.weight - adapted.parameters["first.weight"], model.first.weight.grad)


def test_dropout_follows_the_models_mode():
    torch.manual_seed(0)
    model = Unusual()
    x, y = torch.randn(6, 4), torch.tensor([0, 1] * 3)

    def adapted():
        return adapt(model, masks.fixed(model), lambda net: F.cross_entropy(net(x), y), steps=1, inner_lr=1.0)

    model.train()
    assert not torch.equal(adapted().losses, adapted().losses)
    model.eval()
    assert torch.equal(adapted().losses, adapted().losses)


def test_a_loss_that_uses_no_covered_parameter_changes_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mask = masks.binary(model, select="1.*")
    adapted = adapt(model, mask, lambda net: net[0](torch.ones(1, 2)).sum(), steps=2, inner_lr=1.0)
    assert torch.equal(adapted.parameters["1.weight"], model[1].weight)


def test_a_loss_must_be_one_number():
    model = network()
    with pytest.raises(ConfigError, match="single number"):
        adapt(model, masks.fixed(model), lambda net: net(batch(1)[0]), steps=1, inner_lr=1.0)


def test_a_mask_of_another_model_is_refused():
    with pytest.raises(MismatchError, match=r"weight of shape \(2, 3\)"):
        adapt(nn.Linear(4, 2), masks.binary(nn.Linear(3, 2)), SUPPORT, steps=1, inner_lr=1.0)


@pytest.mark.parametrize("unfrozen", [True, False])
def test_a_mask_made_before_parameters_were_unfrozen_or_covered_ones_frozen_is_refused(unfrozen):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(6, 4), torch.tensor([0, 1] * 3)
    model[0].requires_grad_(not unfrozen)
    mask = masks.binary(model)
    model[0].requires_grad_(unfrozen)
    known, found = r"0\.weight of shape \(3, 4\)", r"no trainable 0\.weight"
    known, found = (found, known) if unfrozen else (known, found)
    with pytest.raises(MismatchError, match=rf"made for {known}, the model has {found}\. Make it anew"):
        adapt(model, mask, classification(x, y), steps=1, inner_lr=0.1)
    with pytest.raises(MismatchError, match="Make it anew"):
        second_order_meta_gradient(model, mask, classification(x, y), classification(x, y), steps=1, inner_lr=0.1)


def test_what_a_mask_does_not_cover_may_be_frozen_later():
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(6, 4), torch.tensor([0, 1] * 3)
    mask = masks.binary(model, "head")
    model[0].requires_grad_(False)
    accumulate(adapt(model, mask, classification(x, y), steps=1, inner_lr=0.1), classification(x, y))
    assert model[0].weight.grad is None


class TestBatchNorm:
    def test_batch_mode_uses_the_query_batch(self):
        model = network()
        adapted = adapt(model, masks.fixed(model), SUPPORT, steps=2, inner_lr=LR)
        x, _ = batch(2, 9)
        alone, together = (adapted.evaluate(lambda net, x=x, n=n: net(x[:n]))[:2] for n in (2, 9))
        assert not torch.allclose(alone, together)

    @pytest.mark.parametrize("mode", ["support", "running"])
    def test_other_modes_predict_each_query_on_its_own(self, mode):
        model = network()
        adapted = adapt(model, masks.fixed(model), SUPPORT, steps=2, inner_lr=LR, batch_norm_mode=mode)
        x, _ = batch(2, 9)
        alone, together = (adapted.evaluate(lambda net, x=x, n=n: net(x[:n]))[:2] for n in (2, 9))
        torch.testing.assert_close(alone, together)

    def test_support_mode_keeps_the_statistics_of_the_support_under_the_adapted_weights(self):
        model = network()
        adapted = adapt(model, masks.fixed(model), SUPPORT, steps=2, inner_lr=LR, batch_norm_mode="support")
        x, _ = batch(1)
        features = F.conv2d(x, adapted.parameters["0.weight"], adapted.parameters["0.bias"])
        torch.testing.assert_close(adapted.buffers["1.running_mean"], features.mean((0, 2, 3)))
        torch.testing.assert_close(adapted.buffers["1.running_var"], features.var((0, 2, 3)))
        assert torch.equal(model[1].running_mean, torch.zeros(3).double())

    def test_running_mode_normalises_inner_steps_with_stored_statistics(self):
        model = network()
        model[1].running_mean.fill_(0.7)
        x, y = batch(1)
        adapted = adapt(model, masks.fixed(model), SUPPORT, steps=1, inner_lr=LR, batch_norm_mode="running")
        model.eval()
        torch.testing.assert_close(adapted.losses[0], F.cross_entropy(model(x), y))
        assert (adapted.buffers["1.running_mean"] == 0.7).all()

    def test_stored_statistics_move_when_asked(self):
        model = network()
        update_statistics(model, SUPPORT)
        assert model[1].num_batches_tracked == 1
        assert not torch.equal(model[1].running_mean, torch.zeros(3).double())

    @pytest.mark.parametrize("mode", ["batch", "support", "running"])
    @pytest.mark.parametrize("training", [True, False])
    def test_the_adapted_module_predicts_what_the_query_pass_does(self, mode, training):
        model = network()
        adapted = adapt(model, masks.binary(model), SUPPORT, steps=3, inner_lr=LR, batch_norm_mode=mode)
        x, _ = batch(2, 9)
        expected = adapted.evaluate(lambda net: net(x))
        module = adapted.module()
        for _ in range(2):  # a pass must not spoil the next one either
            torch.testing.assert_close(module.train(training)(x), expected)
            torch.testing.assert_close(module.eval()(x), expected)
        torch.testing.assert_close(copy.deepcopy(module)(x), expected)

    @pytest.mark.parametrize("fixed", ["support", "running"])
    @pytest.mark.parametrize("mode", ["batch", "support", "running"])
    def test_an_adapted_module_can_be_adapted_again_in_any_mode(self, fixed, mode):
        model = network()
        module = adapt(model, masks.fixed(model), SUPPORT, steps=0, inner_lr=LR, batch_norm_mode=fixed).module()
        plain = network()
        plain.load_state_dict(module.state_dict())
        x, y = batch(5, 9)
        loss, found = lambda net: F.cross_entropy(net(3 * x + 1), y), []
        for one in (plain, module):
            adapted = adapt(one, masks.fixed(one), loss, steps=2, inner_lr=LR, batch_norm_mode=mode)
            found.append((adapted.losses, adapted.evaluate(lambda net: net(x))))
        torch.testing.assert_close(found[1], found[0])
        torch.testing.assert_close(module.train()(x), module.eval()(x))  # and still keeps to its own

    def test_support_mode_needs_layers_that_track_statistics(self):
        model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 2))
        with pytest.raises(ConfigError, match="track_running_stats"):
            adapt(model, masks.fixed(model), SUPPORT, steps=1, inner_lr=1.0, batch_norm_mode="support")

    def test_unknown_mode(self):
        model = network()
        with pytest.raises(ConfigError, match="batch, support, running"):
            adapt(model, masks.fixed(model), SUPPORT, steps=1, inner_lr=1.0, batch_norm_mode="instance")


PEAK = """
import resource, sys, torch
from torch import nn
from torch.nn import functional as F
from wheretolearn import masks
from wheretolearn.inner_loop import accumulate, adapt
from wheretolearn.models import build

torch.set_num_threads(1)
model = build("conv4", ways=5, channels=3, size=42, width=32, seed=0)
mask = masks.binary(model)
x, y = torch.randn(25, 3, 42, 42), torch.arange(25) % 5
adapted = adapt(model, mask, lambda net: F.cross_entropy(net(x), y), steps=int(sys.argv[1]), inner_lr=0.01)
accumulate(adapted, lambda net: F.cross_entropy(net(x), y))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_peak_memory_does_not_grow_with_the_number_of_steps():
    """Real processes, real peaks: K = 50 within 5 % of K = 5."""
    # Freed tensors go back to the system at once, so that the peak is what is held and not how the heap fragments.
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    peaks = {}
    for steps in (5, 50):
        command = [sys.executable, "-c", PEAK, str(steps)]
        peaks[steps] = int(subprocess.run(command, check=True, capture_output=True, env=environ).stdout)
    assert peaks[50] < 1.05 * peaks[5], peaks


class TestModulesThatShare:
    def test_a_module_used_twice_is_given_back_whole(self):
        torch.manual_seed(0)
        twice = nn.Linear(4, 4).double()
        model = nn.Sequential(twice, nn.Tanh(), twice, nn.Linear(4, 3).double())
        weight, before = twice.weight, twice.weight.detach().clone()
        x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
        loss = classification(x, y)
        adapted = adapt(model, masks.fixed(model), loss, steps=1, inner_lr=1.0)
        meta_gradient(adapted, loss)
        adapted.evaluate(loss)
        assert twice.weight is weight
        assert isinstance(weight, nn.Parameter)
        assert torch.equal(weight, before)
        loss(model).backward()
        torch.testing.assert_close(weight - adapted.parameters["0.weight"], weight.grad)

    def test_a_buffer_that_forward_assigns_anew_is_followed(self):
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(2, 2)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x):
                self.calls = self.calls + 1
                return self.linear(x)

        model = Counting()
        loss = classification(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))
        adapted = adapt(model, masks.fixed(model), loss, steps=3, inner_lr=0.1)
        assert adapted.buffers["calls"] == 3
        assert model.calls == 0

    def test_evaluation_does_not_change_the_adapted_buffers(self):
        model = Unusual().eval()
        x, y = torch.randn(6, 4), torch.tensor([0, 1] * 3)
        adapted = adapt(model, masks.fixed(model), classification(x, y), steps=2, inner_lr=0.1)
        adapted.evaluate(lambda net: net(x))
        meta_gradient(adapted, classification(x, y))
        assert adapted.buffers["calls"] == 2


class TestPrecision:
    def test_autocast_sees_the_new_weights_at_every_step(self):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        loss = classification(torch.randn(6, 4), torch.arange(6) % 3)
        with torch.autocast("cpu", torch.bfloat16):
            adapted = adapt(model, masks.fixed(model), loss, steps=5, inner_lr=0.5)
        assert (adapted.losses.diff() < 0).all()

    @pytest.mark.parametrize("make", [masks.binary, masks.fixed, masks.rows, masks.curvature, masks.shrinkage])
    def test_half_precision_models_adapt_and_meta_learn(self, make):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(torch.bfloat16)
        mask = make(model)
        loss = classification(torch.randn(6, 4).to(torch.bfloat16), torch.arange(6) % 3)
        adapted = adapt(model, mask, loss, steps=2, inner_lr=0.1)
        assert {g.dtype for g in adapted.gradient_sum.values()} <= {torch.float32}
        accumulate(adapted, loss)
        assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
        second = second_order_meta_gradient(model, mask, loss, loss, steps=2, inner_lr=0.1)
        assert all(g.isfinite().all() for g in second.theta.values())

    def test_inference_mode_is_refused_rather_than_silently_doing_nothing(self):
        model = network()
        with torch.inference_mode(), pytest.raises(ConfigError, match="inference_mode"):
            adapt(model, masks.fixed(model), SUPPORT, steps=1, inner_lr=LR)


class TestSecondOrderSettings:
    """Each setting must reach the second-order path too."""

    def gradient(self, **settings):
        model = network()
        support = settings.pop("support", SUPPORT)
        return second_order_meta_gradient(
            model, masks.fixed(model), support, QUERY, **{"steps": 2, "inner_lr": LR, **settings}
        )

    def test_clip_norm(self):
        free, clipped = self.gradient(), self.gradient(clip_norm=1e-3)
        model = network()
        still = second_order_meta_gradient(model, masks.fixed(model), SUPPORT, QUERY, steps=0, inner_lr=LR)
        assert abs(clipped.loss - still.loss) < 0.01 * abs(free.loss - still.loss)

    def test_one_loss_per_step(self):
        losses = [classification(*batch(seed)) for seed in (1, 3)]
        listed = self.gradient(support=losses)
        model = network()
        adapted = adapt(model, masks.fixed(model), losses, steps=2, inner_lr=LR)
        torch.testing.assert_close(listed.loss, adapted.evaluate(QUERY))
        assert not torch.allclose(listed.loss, self.gradient().loss)

    @pytest.mark.parametrize("mode", ["batch", "support", "running"])
    def test_batch_norm_mode(self, mode):
        model = network()
        model[1].running_mean.fill_(0.3)
        settings = {"steps": 2, "inner_lr": LR, "batch_norm_mode": mode}
        gradient = second_order_meta_gradient(model, masks.fixed(model), SUPPORT, QUERY, **settings)
        expected = adapt(model, masks.fixed(model), SUPPORT, **settings).evaluate(QUERY)
        torch.testing.assert_close(gradient.loss, expected)


class TestBadCalls:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"steps": 2.5}, "whole number"),
            ({"steps": -1}, "not negative"),
            ({"clip_norm": -1.0}, "clip_norm must be greater than 0"),
        ],
    )
    def test_settings(self, settings, message):
        model = network()
        with pytest.raises(ConfigError, match=message):
            adapt(model, masks.fixed(model), SUPPORT, **{"steps": 1, "inner_lr": LR, **settings})

    def test_a_loss_that_is_a_plain_number(self):
        model = network()
        with pytest.raises(ConfigError, match=r"do not call \.item"):
            adapt(model, masks.fixed(model), lambda net: SUPPORT(net).item(), steps=1, inner_lr=LR)


def test_sparse_embedding_gradients_are_masked_clipped_and_summed():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    loss = classification(torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 1]))
    adapted = adapt(model, masks.binary(model, initial_sparsity=0.0), loss, steps=2, inner_lr=0.1, clip_norm=1.0)
    moved = adapted.parameters["0.weight"] != model[0].weight
    assert moved[:4].all()
    assert not moved[4].any()


def test_statistics_of_several_support_losses_are_averaged():
    model = network()
    losses = [classification(*batch(seed)) for seed in (1, 2)]
    adapted = adapt(model, masks.fixed(model), losses, steps=2, inner_lr=0.0, batch_norm_mode="support")
    means = [F.conv2d(batch(seed)[0], model[0].weight, model[0].bias).mean((0, 2, 3)) for seed in (1, 2)]
    torch.testing.assert_close(adapted.buffers["1.running_mean"], sum(means).detach() / 2)
    assert model[1].momentum == 0.1


def test_every_maker_and_rule_has_its_oracle():
    assert set(KINDS) | set(STEPS) == set(masks.MAKERS) | set(masks.RULES)
