from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn import functional as F

from wheretolearn.continual.lanes import LaneNetwork, ModuleLanes
from wheretolearn.continual.learners.gem import GEM, project
from wheretolearn.continual.learners.sgd import SGD
from wheretolearn.continual.mlp_lanes import MLPLanes
from wheretolearn.errors import ConfigError, NonFiniteError
from wheretolearn.models.mlp import MLP

SIZES = (6, 8, 4)
SEEDS = torch.tensor([3, 11])


def perceptrons(lanes: int = 2) -> list[MLP]:
    torch.manual_seed(0)
    return [MLP(SIZES).double() for _ in range(lanes)]


def batch(seed: int, lanes: int = 2, examples: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(lanes, examples, SIZES[0], generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, SIZES[-1], (lanes, examples), generator=generator)


def gradients(seed: int, lanes: int = 3, past: int = 4, weights: int = 12) -> tuple[Tensor, Tensor]:
    """New and past gradients; the first past one is at odds with the new one."""
    generator = torch.Generator().manual_seed(seed)
    new = torch.randn(lanes, weights, generator=generator, dtype=torch.float64)
    old = torch.randn(lanes, past, weights, generator=generator, dtype=torch.float64)
    old[:, 0] *= -(new * old[:, 0]).sum(1, keepdim=True).sign()
    return new, old


def margins(value: float, lanes: int = 3) -> Tensor:
    return torch.full((lanes, 1), value, dtype=torch.float64)


def best_of_all_active_sets(gradient: Tensor, past: Tensor, margin: float) -> Tensor:
    """The dual programme's solution, by trying every choice of the weights that are at their bound."""
    best, least = gradient, float("inf")
    for is_free in product([False, True], repeat=len(past)):
        weights, free = torch.full((len(past),), margin, dtype=past.dtype), torch.tensor(is_free)
        if free.any():
            rest = gradient + weights[~free] @ past[~free]
            weights[free] = torch.linalg.solve(past[free] @ past[free].mT, -past[free] @ rest)
        candidate = gradient + weights @ past
        if (weights >= margin - 1e-12).all() and candidate.norm() < least:
            best, least = candidate, candidate.norm().item()
    return best


@pytest.mark.parametrize("margin", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_no_product_with_a_past_gradient_is_negative_after_projection(seed: int, margin: float) -> None:
    gradient, past = gradients(seed)
    projected = project(gradient, past, margins(margin))
    assert (past @ projected.unsqueeze(-1)).min() >= -1e-8


@pytest.mark.parametrize("margin", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_projection_is_the_best_of_all_active_sets(seed: int, margin: float) -> None:
    gradient, past = gradients(seed)
    projected = project(gradient, past, margins(margin))
    expected = torch.stack([best_of_all_active_sets(g, p, margin) for g, p in zip(gradient, past, strict=True)])
    torch.testing.assert_close(projected, expected, rtol=0, atol=1e-7)


def test_projection_is_the_nearest_gradient_that_satisfies_the_constraints() -> None:
    gradient, past = gradients(7, lanes=1)
    g, constraints = gradient[0].numpy(), past[0].numpy()
    nearest = minimize(
        lambda v: np.square(v - g).sum(),
        np.zeros_like(g),
        jac=lambda v: 2 * (v - g),
        constraints={"type": "ineq", "fun": lambda v: constraints @ v, "jac": lambda v: constraints},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert nearest.success
    projected = project(gradient, past, margins(0.0, 1))
    np.testing.assert_allclose(projected[0].numpy(), nearest.x, atol=1e-6)


@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_lanes_that_violate_no_constraint_are_left_alone(margin: float) -> None:
    gradient, past = gradients(1)
    past[1] *= (past[1] @ gradient[1]).sign().unsqueeze(-1)
    projected = project(gradient, past, margins(margin))
    assert torch.equal(projected[1], gradient[1])
    assert not torch.equal(projected[0], gradient[0])


def test_a_margin_adds_every_past_gradient_at_least_so_often() -> None:
    gradient = torch.tensor([[-1.0, 2.0, 0.0]], dtype=torch.float64)
    past = torch.eye(3, dtype=torch.float64)[:2].unsqueeze(0)
    projected = project(gradient, past, margins(0.5, 1))
    torch.testing.assert_close(projected, torch.tensor([[0.0, 2.5, 0.0]], dtype=torch.float64), rtol=0, atol=1e-8)


def test_parallel_and_vanishing_past_gradients_are_no_obstacle() -> None:
    gradient, past = gradients(2)
    past = torch.stack([past[:, 0], 3 * past[:, 0], torch.zeros_like(gradient), past[:, 1]], 1)
    projected = project(gradient, past, margins(0.0))
    expected = torch.stack([best_of_all_active_sets(g, p[[0, 3]], 0.0) for g, p in zip(gradient, past, strict=True)])
    torch.testing.assert_close(projected, expected, rtol=0, atol=1e-7)


def test_infinite_gradients_are_reported() -> None:
    gradient, past = gradients(2)
    past[0, 0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match="gem: a gradient is not finite"):
        project(gradient, past, margins(0.0))


@pytest.mark.parametrize("make", [MLPLanes, ModuleLanes])
def test_a_step_is_that_of_the_projected_gradient(make: type[LaneNetwork]) -> None:
    models = perceptrons()
    network = make(models)  # type: ignore[call-arg]
    learner = GEM(network, SEEDS, lr=0.1, tasks=2, memory_per_task=5, memory_strength=0.5, clip_norm=1.0)
    inputs, _ = batch(1)
    # The two likeliest classes for the same inputs: the gradients are at odds.
    labels, old_labels = learner.predict(inputs).topk(2).indices.unbind(-1)
    learner.remember(inputs, old_labels, 0)
    learner.observe(inputs, labels, task=1)
    for lane, model in enumerate(models):
        rows = []
        for wanted in (labels[lane], old_labels[lane]):
            loss = F.cross_entropy(model(inputs[lane]), wanted)
            row = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
            rows.append(row * min(1.0, 1.0 / (row.norm().item() + 1e-6)))
        gradient, past = rows
        assert gradient @ past < 0
        gradient = best_of_all_active_sets(gradient, past.unsqueeze(0), 0.5)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        after = torch.cat([view[lane].flatten() for view in network.views(learner.weights).values()])
        torch.testing.assert_close(after, before - 0.1 * gradient, rtol=0, atol=1e-8)


def test_lanes_side_by_side_learn_as_lanes_alone() -> None:
    models = perceptrons()
    rates, strengths = torch.tensor([0.05, 0.2]), torch.tensor([0.0, 0.5])

    def run(lanes: slice) -> GEM:
        learner = GEM(
            MLPLanes(models[lanes]),
            SEEDS[lanes],
            lr=rates[lanes],
            tasks=3,
            memory_per_task=4,
            memory_strength=strengths[lanes],
            glances=2,
        )
        for number in range(9):
            inputs, labels = batch(number)
            learner.observe(inputs[lanes], labels[lanes], task=number // 3)
        return learner

    together = run(slice(0, 2))
    for lane in range(2):
        alone = run(slice(lane, lane + 1))
        for name, tensor in alone.state().items():
            expected = together.state()[name] if name == "looks" else together.state()[name][lane : lane + 1]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-9, msg=name)


def test_each_task_keeps_its_latest_examples() -> None:
    learner = GEM(MLPLanes(perceptrons()), SEEDS, lr=0.1, tasks=3, memory_per_task=3)

    def show(first: int, last: int, task: int) -> None:
        labels = torch.arange(first, last + 1).expand(2, -1)
        learner.remember(labels.unsqueeze(-1).expand(-1, -1, SIZES[0]).double(), labels, task)

    def kept(task: int) -> list[int]:
        assert learner.inputs is not None
        assert torch.equal(learner.inputs[..., 0].long(), learner.labels)
        assert torch.equal(learner.labels[0], learner.labels[1])
        return sorted(learner.labels[0, task].tolist())

    show(1, 2, task=0)
    show(3, 4, task=0)
    assert kept(0) == [2, 3, 4]
    show(5, 11, task=1)
    assert kept(1) == [9, 10, 11]
    show(12, 13, task=1)
    assert kept(1) == [11, 12, 13]
    assert kept(0) == [2, 3, 4]
    assert kept(2) == [0, 0, 0]
    assert learner.stored.tolist() == [[4, 9, 0]] * 2


def test_examples_are_stored_at_the_first_glance_of_fresh_batches_only() -> None:
    learner = GEM(MLPLanes(perceptrons()), SEEDS, lr=0.1, tasks=2, memory_per_task=50, glances=3)
    learner.observe(*batch(0), task=0, fresh=False)
    assert learner.stored.sum() == 0
    learner.observe(*batch(0), task=0)
    assert learner.stored.tolist() == [[5, 0]] * 2


def test_a_restored_learner_goes_on_as_it_would_have() -> None:
    def fresh() -> GEM:
        return GEM(MLPLanes(perceptrons()), SEEDS, lr=0.1, tasks=2, memory_per_task=4, glances=2)

    straight, resumed = fresh(), fresh()
    for number in range(4):
        straight.observe(*batch(number), task=number // 3)
    stored = {name: tensor.clone() for name, tensor in straight.state().items()}
    resumed.restore(stored)
    for number in range(4, 7):
        straight.observe(*batch(number), task=1)
        resumed.observe(*batch(number), task=1)
    for name, tensor in straight.state().items():
        assert torch.equal(tensor, resumed.state()[name]), name
        assert name == "looks" or len(tensor) == 2


def test_gem_forgets_less_than_sgd() -> None:
    """Two tasks on different parts of the input, with the same labels for opposite signs."""
    generator = torch.Generator().manual_seed(5)

    def task_batch(task: int, examples: int = 10) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, 2, (1, examples), generator=generator)
        inputs = torch.randn(1, examples, SIZES[0], generator=generator, dtype=torch.float64)
        inputs[..., 0] += (2.0 if task == 0 else -2.0) * (2 * labels - 1)
        inputs[..., 1] += 2.0 * task
        return inputs, labels

    stream = [(task_batch(number // 40), number // 40) for number in range(80)]
    tests = [task_batch(task, 500) for task in (0, 1)]
    network, seed = MLPLanes(perceptrons(1)), SEEDS[:1]
    accuracy = {}
    for name, learner in {
        "sgd": SGD(network, seed, lr=0.1),
        "gem": GEM(network, seed, lr=0.1, tasks=2, memory_per_task=20),
    }.items():
        for (inputs, labels), task in stream:
            learner.observe(inputs, labels, task=task)
        accuracy[name] = [(learner.predict(x).argmax(-1) == y).double().mean().item() for x, y in tests]
    assert accuracy["gem"][0] > accuracy["sgd"][0] + 0.15, accuracy
    assert accuracy["gem"][1] > 0.7, accuracy


def test_unusable_numbers_are_reported() -> None:
    network = MLPLanes(perceptrons())
    with pytest.raises(ConfigError, match="memory_per_task = 0"):
        GEM(network, SEEDS, lr=0.1, tasks=2, memory_per_task=0)
    with pytest.raises(ConfigError, match="memory for 2 tasks and was shown task number 2"):
        GEM(network, SEEDS, lr=0.1, tasks=2, memory_per_task=3).observe(*batch(0), task=2)
