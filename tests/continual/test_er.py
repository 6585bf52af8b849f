import torch
from torch.nn import functional as F

from wheretolearn.continual.learners.er import ExperienceReplay
from wheretolearn.continual.learners.sgd import SGD
from wheretolearn.continual.mlp_lanes import MLPLanes
from wheretolearn.models import build

SIZES, BATCH, REPLAY = (12, 6, 4), 5, 3
SEEDS, RATES = torch.tensor([3, 8]), torch.tensor([0.3, 0.7])


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        inputs = torch.rand(2, BATCH, SIZES[0], dtype=torch.float64, generator=generator)
        yield inputs, torch.randint(0, SIZES[-1], (2, BATCH), generator=generator)


def test_a_step_is_autograd_on_batch_and_replayed_examples_together():
    models = [build("mlp", sizes=SIZES, seed=seed).double() for seed in (0, 1)]
    learner = ExperienceReplay(MLPLanes(models), SEEDS, lr=RATES, memory=4, replay_batch=REPLAY)
    (first, second) = batches()
    learner.observe(*first)
    before = learner.network.views(learner.weights.clone())
    past = learner.buffer.sample(REPLAY, learner.looks)  # what the next step draws
    assert past.valid.all()
    sgd = SGD(learner.network, SEEDS, lr=RATES)
    sgd.restore({"weights": learner.weights, "looks": learner.looks})

    learner.observe(*second)
    sgd.observe(*second)
    found, without_replay = learner.network.views(learner.weights), sgd.network.views(sgd.weights)
    for lane, model in enumerate(models):
        model.load_state_dict({name: view[lane] for name, view in before.items()})
        inputs, labels = (torch.cat([new[lane], old[lane]]) for new, old in zip(second, past[:2], strict=True))
        assert (inputs[BATCH:].unsqueeze(1) == first[0][lane]).all(-1).any(1).all()  # all of them from the first batch
        loss = F.cross_entropy(model(inputs), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            expected = parameter.detach() - RATES[lane].double() * gradient
            torch.testing.assert_close(found[name][lane], expected, rtol=0, atol=1e-12)
            assert not torch.allclose(found[name][lane], without_replay[name][lane], atol=1e-4)


def test_the_first_batch_of_all_has_nothing_to_replay():
    network = MLPLanes([build("mlp", sizes=SIZES, seed=seed).double() for seed in (0, 1)])
    learner, sgd = ExperienceReplay(network, SEEDS, lr=RATES, memory=4), SGD(network, SEEDS, lr=RATES)
    first, _ = batches()
    learner.observe(*first)
    sgd.observe(*first)
    torch.testing.assert_close(learner.weights, sgd.weights, rtol=0, atol=1e-12)
    assert not torch.allclose(learner.weights, network.weights, atol=1e-4)
