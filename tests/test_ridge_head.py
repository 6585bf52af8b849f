"""The closed-form head against a direct solution, autograd through it, and its life as a model's head."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wheretolearn import masks
from wheretolearn.diagnosis import locate_non_finite
from wheretolearn.errors import ConfigError
from wheretolearn.inner_loop import accumulate, adapt
from wheretolearn.models import build
from wheretolearn.ridge_head import RidgeHead, ridge_logits, solved_head, with_ridge_head

WAYS = 3


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, WAYS)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def network(regularisation=0.5):
    return with_ridge_head(Network(), WAYS, regularisation).double()


def batch(seed, size):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator, dtype=torch.float64), torch.arange(size) % WAYS


@pytest.mark.parametrize("size", [WAYS, 40])  # fewer and more images than features
def test_logits_are_those_of_a_direct_least_squares_solution(size):
    model = network()
    (x, y), (query, _) = batch(1, size), batch(2, 7)
    with torch.no_grad():
        features, targets = torch.tanh(model.body(x)), torch.eye(WAYS, dtype=x.dtype)[y]
        # The penalty as six more equations: sqrt(regularisation) * W = 0.
        equations = torch.cat([features, 0.5**0.5 * torch.eye(6, dtype=x.dtype)])
        weight = torch.linalg.lstsq(equations, torch.cat([targets, torch.zeros(6, WAYS, dtype=x.dtype)])).solution
        expected = model.head.log_scale.exp() * torch.tanh(model.body(query)) @ weight
    torch.testing.assert_close(ridge_logits(model, x, y, query), expected, rtol=0, atol=1e-10)


def test_the_body_learns_through_the_solve():
    model = network()
    (x, y), (query, labels) = batch(1, 6), batch(2, 9)
    mask = masks.fixed(model, "none")

    def query_loss(net):
        return F.cross_entropy(ridge_logits(net, x, y, query), labels)

    adapted = adapt(model, mask, lambda net: net(x).sum(), steps=0, inner_lr=1.0)
    accumulate(adapted, query_loss)
    for parameter in model.parameters():
        for index in range(parameter.numel()):
            flat = parameter.data.view(-1)
            values = []
            for sign in (1, -1):
                flat[index] += sign * 1e-6
                values.append(query_loss(model).item())
                flat[index] -= sign * 1e-6
            expected = (values[0] - values[1]) / 2e-6
            assert parameter.grad.view(-1)[index].item() == pytest.approx(expected, abs=1e-7)
    assert model.head.log_scale.grad.abs() > 1e-4


def test_the_solved_head_makes_an_ordinary_network():
    model = network()
    (x, y), (query, _) = batch(1, 6), batch(2, 9)
    expected = ridge_logits(model, x, y, query)
    model.head = solved_head(model, x, y)
    assert type(model.head) is nn.Linear
    torch.testing.assert_close(model(query), expected)


def test_unused_classes_get_logits_too():
    x, y = batch(1, 4)
    assert ridge_logits(network(), x, y % 2, x, ways=5).shape == (4, 5)


@pytest.mark.parametrize(("name", "settings"), [("conv4", {"size": 28, "width": 8, "channels": 1}), ("resnet12", {})])
def test_the_papers_networks_take_it_as_their_last_layer(name, settings):
    model = with_ridge_head(build(name, ways=WAYS, seed=0, **settings), WAYS)
    assert [n for n, _ in model.named_parameters()][-1] == "head.log_scale"
    assert not any("head.weight" in n for n in model.state_dict())
    shape = (6, 1, 28, 28) if name == "conv4" else (6, 3, 16, 16)
    x, y = torch.rand(shape, generator=torch.Generator().manual_seed(0)), torch.arange(6) % WAYS
    logits = ridge_logits(model, x, y, x)
    F.cross_entropy(logits, y).backward()
    assert logits.shape == (6, WAYS)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_half_precision_features_are_solved_in_float32():
    model = network().to(torch.bfloat16)
    (x, y), (query, _) = batch(1, 6), batch(2, 9)
    logits = ridge_logits(model, x.to(torch.bfloat16), y, query.to(torch.bfloat16))
    assert logits.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        automatic = ridge_logits(network().float(), x.float(), y, query.float())
    assert automatic.dtype is torch.float32
    torch.testing.assert_close(
        automatic, ridge_logits(network().float(), x.float(), y, query.float()), rtol=0, atol=0.2
    )


def test_a_bad_layer_is_found():
    model = network()
    with torch.no_grad():
        model.body.weight[0, 0] = float("nan")
    x, y = batch(1, 6)
    place = locate_non_finite(
        model,
        masks.fixed(model, "none"),
        lambda net: net(x).sum(),
        lambda net: F.cross_entropy(ridge_logits(net, x, y, x), y),
        steps=0,
        inner_lr=1.0,
    )
    assert place is not None
    assert "body" in place


def test_mistakes():
    x, y = batch(1, 6)
    with pytest.raises(ConfigError, match="not a ridge head"):
        ridge_logits(Network().double(), x, y, x)
    with pytest.raises(ConfigError, match="Linear has none"):
        with_ridge_head(nn.Linear(2, 2), 2)
    with pytest.raises(ConfigError, match=r"regularisation .* greater than 0"):
        RidgeHead(WAYS, regularisation=0.0)
    with pytest.raises(ConfigError, match="1 way or more, not 0"):
        with_ridge_head(Network(), 0)
    for labels in (y + 1, y - 1, y + 0.5):
        with pytest.raises(ConfigError, match="3 ways must be whole numbers from 0 to 2"):
            ridge_logits(network(), x, labels, x)
    for inputs, labels in ((x, y[:4]), (x, y[:, None]), (x[:0], y[:0])):
        with pytest.raises(ConfigError, match="one label for each support input: got labels of shape"):
            ridge_logits(network(), inputs, labels, x)
    with pytest.raises(ConfigError, match="2 ways must be whole numbers from 0 to 1"):
        ridge_logits(network(), x, y, x, ways=2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_labels_may_be_whole_numbers_of_any_type(dtype):
    x, y = batch(1, 6)
    assert torch.equal(ridge_logits(network(), x, y.to(dtype), x), ridge_logits(network(), x, y, x))
