import torch
from torch import nn
from torch.nn import functional as F

from wheretolearn import masks
from wheretolearn.diagnosis import locate_non_finite


class Explosive(nn.Module):
    def forward(self, x):
        return x / 0.0


def network(middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), middle, nn.Linear(4, 2))


def locate(model, **settings):
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0])

    def loss(net):
        return F.cross_entropy(net(x), y)

    return locate_non_finite(model, masks.fixed(model), loss, loss, **{"steps": 3, "inner_lr": 0.1, **settings})


def test_finite_everywhere_is_none():
    assert locate(network(nn.Tanh())) is None


def test_names_the_layer_whose_output_is_not_finite():
    assert locate(network(Explosive())) == "inner step 0, layer 1: its output was not finite"


def test_names_the_step_after_a_diverging_update():
    place = locate(network(nn.Identity()), inner_lr=1e38)
    assert place is not None
    assert place.startswith(("inner step 1", "inner step 2", "the query pass"))


def test_names_the_loss_when_every_layer_is_finite():
    model = network(nn.Tanh())
    x = torch.randn(5, 3)
    place = locate_non_finite(
        model, masks.fixed(model), lambda net: net(x).sum() / 0.0, lambda net: net(x).sum(), steps=2, inner_lr=0.1
    )
    assert place == "inner step 0, the loss itself, after finite outputs of every layer"


def test_leaves_no_hooks_behind():
    model = network(Explosive())
    locate(model)
    assert all(not module._forward_hooks for module in model.modules())
