from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wheretolearn.continual.buffer import ReplayBuffer
from wheretolearn.continual.lanes import LaneNetwork, ModuleLanes
from wheretolearn.continual.learners.mer import MER
from wheretolearn.continual.mlp_lanes import MLPLanes
from wheretolearn.data.random_bits import random_bits_by_lane
from wheretolearn.errors import ConfigError
from wheretolearn.models.mlp import MLP

SEEDS = torch.tensor([3, 11])


def perceptrons(sizes: tuple[int, ...] = (6, 8, 7, 4)) -> list[MLP]:
    torch.manual_seed(0)
    models = [MLP(sizes).double() for _ in SEEDS]
    for model in models:
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)  # biases too
    return models


def batch(seed: int, examples: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2, examples, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 4, (2, examples), generator=generator)


def transcription(
    model: nn.Module,
    seed: Tensor,
    batches: list[tuple[Tensor, Tensor]],
    *,
    lr: float,
    beta: float,
    gamma: float,
    steps: int,
    replay_batch: int,
    memory: int,
    glances: int,
    clip_norm: float | None,
) -> nn.Module:
    """Algorithm 1 of the MER paper for one network, in plain loops; only the draws come from the package."""
    model, draws = deepcopy(model), ReplayBuffer(seed, memory, (6,), torch.float64)
    parameters = list(model.parameters())

    def pull_back(old: list[Tensor], share: float) -> None:
        for parameter, start in zip(parameters, old, strict=True):
            parameter.data = start + share * (parameter.data - start)

    looks = 0
    for inputs, labels in batches:
        for glance in range(glances):
            order = random_bits_by_lane((len(labels),), seed, "glance", looks)[0].argsort()
            keys = random_bits_by_lane((len(labels), steps), seed, "batches of mer", looks)[0]
            for x, y, example_keys in zip(inputs[order], labels[order], keys, strict=True):
                start = [parameter.data.clone() for parameter in parameters]
                for key in example_keys:
                    before = [parameter.data.clone() for parameter in parameters]
                    old = draws.sample(replay_batch - 1, key)
                    examples = [
                        (a, b) for a, b, there in zip(old.inputs[0], old.labels[0], old.valid[0], strict=True) if there
                    ]
                    for a, b in [(x, y), *examples]:
                        loss = F.cross_entropy(model(a.unsqueeze(0)), b.unsqueeze(0))
                        gradients = torch.autograd.grad(loss, parameters)
                        length = torch.cat([g.flatten() for g in gradients]).norm().item()
                        factor = 1.0 if clip_norm is None else min(1.0, clip_norm / (length + 1e-6))
                        for parameter, gradient in zip(parameters, gradients, strict=True):
                            parameter.data = parameter.data - lr * factor * gradient
                    pull_back(before, beta)
                pull_back(start, gamma)
                if glance == 0:
                    draws.add(x.view(1, 1, -1), y.view(1, 1))
            looks += 1
    return model


@pytest.mark.parametrize("make", [MLPLanes, ModuleLanes])
@pytest.mark.parametrize("clip_norm", [None, 0.7])
def test_learning_equals_the_plain_algorithm(make: type[LaneNetwork], clip_norm: float | None) -> None:
    models = perceptrons()
    settings = {"lr": 0.2, "beta": 0.3, "gamma": 0.6, "steps": 2, "replay_batch": 4, "memory": 5, "glances": 2}
    network = make(models)  # type: ignore[call-arg]
    learner = MER(network, SEEDS, **settings, clip_norm=clip_norm)  # type: ignore[arg-type]
    stream = [batch(0), batch(1)]
    for inputs, labels in stream:
        learner.observe(inputs, labels)
    learned = network.views(learner.weights)
    for lane, model in enumerate(models):
        own_stream = [(inputs[lane], labels[lane]) for inputs, labels in stream]
        expected = transcription(model, SEEDS[lane : lane + 1], own_stream, **settings, clip_norm=clip_norm)  # type: ignore[arg-type]
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(learned[name][lane], parameter.detach(), rtol=0, atol=1e-12)
            assert not torch.allclose(parameter, model.get_parameter(name), atol=1e-4)


@pytest.mark.parametrize("sizes", [(6, 4), (6, 8, 4), (6, 8, 7, 4)])
@pytest.mark.parametrize("clip_norm", [None, 0.7])
def test_the_closed_form_equals_the_readable_path(sizes: tuple[int, ...], clip_norm: float | None) -> None:
    models = perceptrons(sizes)
    inputs, labels = batch(0, examples=6)
    present = torch.tensor([[True, False, True, True, False, True], [True] * 6])
    lr = torch.tensor([[0.2], [0.4]], dtype=torch.float64)
    results = []
    for network in (MLPLanes(models), ModuleLanes(models)):
        start = network.weights.clone()
        after = network.sgd_in_order(network.weights, lr, inputs, labels, present, clip_norm)
        assert torch.equal(network.weights, start)
        assert not torch.allclose(after, start, atol=1e-3)
        results.append(network.views(after))
    for name, view in results[0].items():
        torch.testing.assert_close(view, results[1][name], rtol=0, atol=1e-12)


def test_lanes_side_by_side_learn_as_lanes_alone() -> None:
    models = perceptrons()
    rates, betas, gammas = torch.tensor([0.05, 0.2]), torch.tensor([0.2, 1.0]), torch.tensor([1.0, 0.4])

    def run(lanes: slice) -> MER:
        network = MLPLanes(models[lanes])
        learner = MER(network, SEEDS[lanes], lr=rates[lanes], beta=betas[lanes], gamma=gammas[lanes], memory=7, steps=2)
        for number in range(4):
            inputs, labels = batch(number)
            learner.observe(inputs[lanes], labels[lanes])
        return learner

    together = run(slice(0, 2)).state()
    for lane in range(2):
        for name, tensor in run(slice(lane, lane + 1)).state().items():
            expected = together[name] if name == "looks" else together[name][lane : lane + 1]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-12)


def test_a_restored_learner_goes_on_as_it_would_have() -> None:
    def fresh() -> MER:
        return MER(MLPLanes(perceptrons()), SEEDS, lr=0.1, memory=7, glances=2)

    straight, resumed = fresh(), fresh()
    for number in range(3):
        straight.observe(*batch(number))
    resumed.restore({name: tensor.clone() for name, tensor in straight.state().items()})
    for number in range(3, 6):
        straight.observe(*batch(number))
        resumed.observe(*batch(number))
    for name, tensor in straight.state().items():
        assert torch.equal(tensor, resumed.state()[name]), name


def test_examples_are_offered_to_memory_at_the_first_glance_of_fresh_batches_only() -> None:
    learner = MER(MLPLanes(perceptrons()), SEEDS, lr=0.1, memory=50, glances=3)
    learner.observe(*batch(0), fresh=False)
    learner.observe(*batch(1))
    assert learner.buffer is not None
    assert learner.buffer.seen.tolist() == [4, 4]
    for lane in range(2):
        stored = learner.buffer.inputs[lane, :4]
        assert torch.equal(stored.sort(0).values, batch(1)[0][lane].sort(0).values)


def test_without_memory_it_learns_from_the_incoming_examples_alone() -> None:
    network = MLPLanes(perceptrons())
    learner = MER(network, SEEDS, lr=0.1, beta=1.0, memory=0)
    inputs, labels = batch(0, examples=1)
    learner.observe(inputs, labels)
    expected = network.weights - 0.1 * network.gradient(network.weights, inputs, labels)
    torch.testing.assert_close(learner.weights, expected, rtol=0, atol=1e-12)


def test_unusable_numbers_are_reported() -> None:
    with pytest.raises(ConfigError, match="steps = 0"):
        MER(MLPLanes(perceptrons()), SEEDS, lr=0.1, memory=5, steps=0)
