"""MAML, ANIL and online Adam against autograd and torch's own optimizer."""

import pytest
import torch
from torch.nn import functional as F

from wheretolearn import masks
from wheretolearn.inner_loop import adapt
from wheretolearn.models import build
from wheretolearn.online.learners.maml import MAML
from wheretolearn.online.learners.online_adam import OnlineAdam

WAYS, SIZE = 4, 16


def network():
    return build("conv4", ways=WAYS, channels=1, size=SIZE, width=4, seed=0).double()


def batches(count):
    generator = torch.Generator().manual_seed(4)
    for _ in range(count):
        yield (
            torch.randn(8, 1, SIZE, SIZE, generator=generator, dtype=torch.float64),
            torch.randint(WAYS, (8,), generator=generator),
        )


@pytest.mark.parametrize("select", ["all", "head"])
def test_maml_and_anil_adapt_to_the_last_batch_alone(select):
    model = network()
    learner = MAML(model, inner_steps=3, inner_lr=0.2, select=select)
    probe = torch.randn(8, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for inputs, labels in batches(3):
        learner.observe(inputs, labels)
        loss = lambda net, x=inputs, y=labels: F.cross_entropy(net(x), y)  # noqa: E731
        adapted = adapt(model, masks.fixed(model, select), loss, steps=3, inner_lr=0.2)
        expected = adapted.evaluate(lambda net: net(probe))
        torch.testing.assert_close(learner.predict(probe), expected, rtol=1e-9, atol=1e-11)


def test_online_adam_takes_the_steps_of_adam():
    model, learner = network(), OnlineAdam(network(), lr=0.02)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for inputs, labels in batches(4):
        torch.testing.assert_close(learner.predict(inputs), model.train()(inputs), rtol=1e-9, atol=1e-11)
        learner.observe(inputs, labels)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        # Rounding differs, and Adam enlarges it where gradients vanish: in biases before batch norm.
        torch.testing.assert_close(learner.weights[name], parameter.detach(), rtol=1e-9, atol=1e-8)
