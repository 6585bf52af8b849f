"""BGD's update against its published form and against known expectations; MetaBGD and MetaCOG against autograd."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from wheretolearn.data.random_bits import normal
from wheretolearn.engine.compiled import CompiledArithmetic
from wheretolearn.engine.second_order import SecondOrderArithmetic
from wheretolearn.errors import ConfigError
from wheretolearn.online.learners.bgd import BGD, shortened, updated
from wheretolearn.online.learners.bgd_inner import GatesInner, WeightsInner

MEAN_ETA, STD, SAMPLES, SEED = 3.0, 0.05, 4, 11
STEPS, LR, L1, LOGIT = 3, 0.2, 0.01, 0.4


def small_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(count):
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        yield (
            torch.randn(9, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (9,), generator=generator),
        )


def test_update_has_the_known_expectation_for_a_quadratic_loss():
    """L = sum c (w - t)^2 / 2, so g = c (mean + std noise - t), E[g] = c (mean - t) and E[g noise] = c std."""
    curvature = torch.tensor([0.5, 2.0, 8.0], dtype=torch.float64)
    target = torch.tensor([1.0, -1.0, 0.3], dtype=torch.float64)
    mean, std = torch.tensor([[0.2, 0.4, 0.3], [0.3, 0.1, 0.2]], dtype=torch.float64)
    noise = normal((400_000, 3), 5, dtype=torch.float64)
    new_mean, new_std = updated(mean, std, curvature * (mean + std * noise - target), noise, mean_eta=0.7)
    expected_mean = mean - 0.7 * std**2 * curvature * (mean - target)
    half = curvature * std**2 / 2
    torch.testing.assert_close(new_mean, expected_mean, rtol=0, atol=2e-4)
    torch.testing.assert_close(new_std, std * (torch.sqrt(1 + half**2) - half), rtol=0, atol=2e-4)
    # Two opposite noises have mean 0 and variance 1 exactly, so that they are exact for a quadratic loss.
    noise = torch.tensor([[1.0] * 3, [-1.0] * 3], dtype=torch.float64)
    new_mean, new_std = updated(mean, std, curvature * (mean + std * noise - target), noise, mean_eta=0.7)
    torch.testing.assert_close(new_mean, expected_mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(new_std, std * (torch.sqrt(1 + half**2) - half), rtol=1e-12, atol=0)


def test_certainty_about_a_quadratic_grows_as_that_of_a_posterior():
    """For small steps std follows Bayes' rule: a batch of curvature c adds c to the precision 1 / std^2."""
    std, curvature = torch.tensor([0.1], dtype=torch.float64), 0.01
    noise = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    for _ in range(50):
        gradients = curvature * std * noise
        _, std = updated(torch.zeros(1, dtype=torch.float64), std, gradients, noise, mean_eta=1.0)
    torch.testing.assert_close(1 / std**2, torch.tensor([100 + 50 * curvature], dtype=torch.float64), rtol=1e-5, atol=0)


def mean_loss(model, weights, batch):
    return F.cross_entropy(functional_call(model, weights, (batch[0],)), batch[1])


def adapt_weights(model, theta, batch, second_order):
    phi = dict(theta)
    for _ in range(STEPS):
        loss = mean_loss(model, phi, batch)
        gradients = torch.autograd.grad(loss, list(phi.values()), create_graph=second_order, retain_graph=True)
        phi = {name: p - LR * g for (name, p), g in zip(phi.items(), gradients, strict=True)}
    return phi


def adapt_gates(model, theta, batch, second_order):
    head = {name: theta[name] for name in ("3.weight", "3.bias")}
    logits = {
        name: torch.full_like(t, LOGIT).detach().requires_grad_() for name, t in theta.items() if name not in head
    }

    def weights():
        return {name: theta[name] * torch.sigmoid(z) for name, z in logits.items()} | head

    for _ in range(STEPS):
        loss = mean_loss(model, weights(), batch)
        loss = loss + L1 * sum(torch.sigmoid(z).sum() for z in logits.values())
        moved = logits | head
        gradients = torch.autograd.grad(loss, list(moved.values()), create_graph=second_order, retain_graph=True)
        moved = {name: z - LR * g for (name, z), g in zip(moved.items(), gradients, strict=True)}
        head, logits = {name: moved[name] for name in head}, {name: moved[name] for name in logits}
    return weights()


def inner_loop(kind, model, order):
    if kind == "metabgd":
        return WeightsInner(model, steps=STEPS, lr=LR, order=order)
    if kind == "metacog":
        return GatesInner(model, steps=STEPS, lr=LR, l1=L1, logit_init=LOGIT, order=order)
    return None


@pytest.mark.parametrize(
    ("kind", "order", "by_an_engine"),
    [
        ("bgd", "first", False),
        ("metabgd", "first", False),
        ("metabgd", "first", True),
        ("metabgd", "second", False),
        ("metabgd", "second", True),
        ("metacog", "first", False),
        ("metacog", "second", False),
    ],
)
def test_steps_equal_a_hand_transcription_with_the_same_noise(kind, order, by_an_engine):
    model = small_network()
    engine = CompiledArithmetic if order == "first" else SecondOrderArithmetic
    arithmetic = engine(model, compiled=False) if by_an_engine else None
    inner = inner_loop(kind, model, order)
    learner = BGD(
        model, mean_eta=MEAN_ETA, initial_std=STD, samples=SAMPLES, seed=SEED, inner=inner, arithmetic=arithmetic
    )
    assert (learner.arithmetic is not None) == by_an_engine
    adapt = {"bgd": lambda model, theta, *_: theta, "metabgd": adapt_weights, "metacog": adapt_gates}[kind]
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    std = {name: torch.full_like(p, STD) for name, p in mean.items()}
    total, last = sum(p.numel() for p in mean.values()), None
    for step, batch in enumerate(batches(4)):
        drawn = normal((SAMPLES, total), SEED, "noise of bgd", torch.tensor(step), dtype=torch.float64)
        gradient_sum = {name: torch.zeros_like(p) for name, p in mean.items()}
        product_sum = {name: torch.zeros_like(p) for name, p in mean.items()}
        for sample in range(SAMPLES):
            pieces = drawn[sample].split([p.numel() for p in mean.values()])
            noise = {name: piece.view(mean[name].shape) for name, piece in zip(mean, pieces, strict=True)}
            theta = {name: (mean[name] + std[name] * noise[name]).requires_grad_() for name in mean}
            adapted = adapt(model, theta, last or batch, order == "second")
            loss = F.cross_entropy(functional_call(model, adapted, (batch[0],)), batch[1], reduction="sum")
            for name, g in zip(theta, torch.autograd.grad(loss, list(theta.values())), strict=True):
                gradient_sum[name] += g
                product_sum[name] += g * noise[name]
        for name in mean:
            expected, product = gradient_sum[name] / SAMPLES, product_sum[name] / SAMPLES
            mean[name] = mean[name] - MEAN_ETA * std[name] ** 2 * expected
            root = torch.sqrt(1 + (product * std[name] / 2) ** 2)
            std[name] = std[name] * root - product * std[name] ** 2 / 2
        last = batch
        learner.observe(*batch)
        for own, theirs in ((learner.mean, mean), (learner.std, std)):
            torch.testing.assert_close(own, torch.cat([t.flatten() for t in theirs.values()]), rtol=1e-9, atol=1e-12)
        theta = {name: tensor.clone().requires_grad_() for name, tensor in mean.items()}
        logits = functional_call(model, adapt(model, theta, batch, False), (batch[0],))
        torch.testing.assert_close(learner.predict(batch[0]), logits.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("gradient", [1e-3, 1.0, 1e6, 1e22, -1e-3, -1.0, -1e6, -1e22])
def test_certainty_keeps_its_digits_in_single_precision(gradient):
    single, double = (
        updated(*(torch.full(shape, value, dtype=dtype) for shape, value in values), mean_eta=1.0)[1]
        for dtype in (torch.float32, torch.float64)
        for values in [[((1,), 0.0), ((1,), 0.01), ((1, 1), gradient), ((1, 1), 1.0)]]
    )
    published = 0.01 * ((1 + (gradient * 0.005) ** 2) ** 0.5 - gradient * 0.005)
    assert single.item() == pytest.approx(double.item(), rel=1e-6)
    if abs(gradient) < 1e4:  # where the published form itself has digits left
        assert double.item() == pytest.approx(published, rel=1e-9)
    assert 0 < single.item() < torch.inf


def test_long_gradients_are_shortened_and_those_that_are_not_finite_count_for_nothing():
    very_long = shortened(torch.full((1, 100), 1e30), 2.0)
    torch.testing.assert_close(very_long, torch.full((1, 100), 0.2))
    found = shortened(torch.tensor([[3.0, 4.0], [0.3, -0.4], [torch.inf, 1.0], [1.0, torch.nan]]), 2.0)
    torch.testing.assert_close(found, torch.tensor([[1.2, 1.6], [0.3, -0.4], [0.0, 0.0], [0.0, 0.0]]))


def test_a_bound_on_gradients_bounds_the_update():
    def made(clip_norm):
        settings = {"mean_eta": MEAN_ETA, "initial_std": STD, "samples": SAMPLES, "seed": SEED, "clip_norm": clip_norm}
        return BGD(small_network(), **settings)

    free, loose, tight = made(None), made(1e6), made(0.1)
    before = free.mean.clone()
    for learner in (free, loose, tight):
        learner.observe(*next(batches(1)))
    torch.testing.assert_close(loose.mean, free.mean)
    longest = MEAN_ETA * STD**2 * 0.1
    assert 0 < (tight.mean - before).norm() <= longest * (1 + 1e-9)
    assert (free.mean - before).norm() > 10 * longest

    by_engine = BGD(
        small_network(), mean_eta=MEAN_ETA, initial_std=STD, samples=SAMPLES, seed=SEED, clip_norm=0.1,
        inner=inner_loop("metabgd", small_network(), "second"),
        arithmetic=SecondOrderArithmetic(small_network(), compiled=False),
    )  # fmt: skip
    by_engine.observe(*next(batches(1)))
    assert 0 < (by_engine.mean - before).norm() <= longest * (1 + 1e-9)

    exploded = made(0.1)
    exploded.gradient = lambda weights, support, query: torch.full_like(weights, torch.inf)
    exploded.observe(*next(batches(1)))
    torch.testing.assert_close(exploded.mean, before)
    torch.testing.assert_close(exploded.std, torch.full_like(before, STD))


def test_settings_that_cannot_work_are_refused():
    for wrong in ({"samples": 0}, {"initial_std": 0.0}):
        with pytest.raises(ConfigError, match="bgd needs at least one sample and an initial standard deviation"):
            BGD(small_network(), **{"mean_eta": 1.0, "initial_std": 0.1, "samples": 1, "seed": 0} | wrong)
