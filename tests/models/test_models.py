import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wheretolearn.errors import ConfigError
from wheretolearn.models import MLP, CifarNet, Conv4, ResNet12, build

INPUTS = {
    "conv4": ({"width": 8}, (3, 3, 84, 84)),
    "resnet12": ({}, (2, 3, 32, 32)),
    "mlp": ({}, (3, 1, 28, 28)),
    "cifar_net": ({"width": 16, "hidden": 32}, (3, 3, 32, 32)),
}


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def small(name: str, seed: int | None = 0) -> tuple[nn.Module, torch.Tensor]:
    settings, shape = INPUTS[name]
    generator = torch.Generator().manual_seed(0)
    return build(name, seed=seed, **settings), torch.rand(shape, generator=generator)


def resnet12_count(widths: tuple[int, ...], ways: int, channels: int) -> int:
    total = 0
    for inputs, width in zip((channels, *widths), widths, strict=False):
        convolutions = 9 * inputs * width + 2 * 9 * width * width + inputs * width
        total += convolutions + 4 * 2 * width
    return total + widths[-1] * ways + ways


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Conv4(), 121_093),
        (Conv4(bias=False), 121_093 - 4 * 64 - 4 * 64 - 5),
        (Conv4(ways=10, channels=1, size=28), 640 + 3 * 36_928 + 4 * 128 + 650),
        (MLP(), 89_610),
        (CifarNet(), 4_480 + 2 * 230_560 + 819_520 + 102_720 + 3_210),
        (ResNet12(), resnet12_count((64, 128, 256, 512), 5, 3)),
        (ResNet12(ways=7, size="large", channels=1), resnet12_count((64, 160, 320, 640), 7, 1)),
    ],
)
def test_parameter_counts(model: nn.Module, expected: int) -> None:
    assert parameter_count(model) == expected


@pytest.mark.parametrize("name", INPUTS)
def test_head_is_the_last_layer(name: str) -> None:
    model, _ = small(name)
    names = [name for name, _ in model.named_parameters()]
    assert names[-2:] == ["head.weight", "head.bias"]
    assert list(dict(model.named_children()))[-1] == "head"


@pytest.mark.parametrize("name", INPUTS)
def test_gradients_reach_every_parameter(name: str) -> None:
    model, images = small(name)
    logits = model(images)
    assert logits.shape == (len(images), model.get_submodule("head").out_features)
    F.cross_entropy(logits, torch.arange(len(images))).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.ndim > 1)


@pytest.mark.parametrize("name", ["conv4", "resnet12", "cifar_net"])
def test_channels_last_input_gives_the_same_logits(name: str) -> None:
    model, images = small(name)
    model = model.double()
    expected = model(images.double())
    actual = model(images.double().to(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", INPUTS)
def test_traces_as_one_graph(name: str) -> None:
    model, images = small(name)
    program = torch.export.export(model, (images,))
    torch.testing.assert_close(program.module()(images), model(images))


@pytest.mark.parametrize("name", INPUTS)
def test_a_seed_fixes_the_weights_and_spares_global_state(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (small(name, seed)[0].state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_without_a_seed_weights_come_from_global_state() -> None:
    torch.manual_seed(5)
    first = build("mlp").state_dict()
    torch.manual_seed(5)
    again = build("mlp").state_dict()
    assert torch.equal(first["head.weight"], again["head.weight"])
    assert not torch.equal(first["head.weight"], build("mlp").state_dict()["head.weight"])


def test_conv4_names_its_layers() -> None:
    names = [name for name, _ in Conv4().named_parameters()]
    assert names[:4] == ["block1.conv.weight", "block1.conv.bias", "block1.norm.weight", "block1.norm.bias"]


def test_conv4_leaves_one_position_of_a_28_pixel_image() -> None:
    model = Conv4(ways=10, channels=1, size=28)
    shapes = []
    model.block4.register_forward_hook(lambda block, inputs, output: shapes.append(output.shape))
    model(torch.rand(2, 1, 28, 28))
    assert shapes == [(2, 64, 1, 1)]


def test_conv4_without_bias_has_no_shift_anywhere_and_still_learns() -> None:
    model = Conv4(bias=False, width=8)
    assert {name.rsplit(".", 1)[1] for name, _ in model.named_parameters()} == {"weight"}
    model(torch.rand(3, 3, 84, 84)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    # No shift and no bias: an all-zero image gives all-zero logits.
    assert torch.equal(model(torch.zeros(3, 3, 84, 84)), torch.zeros(3, 5))


def test_conv4_refuses_images_that_pool_away() -> None:
    with pytest.raises(ConfigError, match="16x16, not 12x12"):
        Conv4(size=12)


def test_kaiming_start_of_conv4() -> None:
    plain, larger = (dict(build("conv4", seed=3, init=init).named_parameters()) for init in ("default", "kaiming"))
    for name, parameter in larger.items():
        if name.endswith(("conv.weight", "head.weight")):
            fan_in = parameter[0].numel()
            assert parameter.abs().max().item() == pytest.approx((6 / fan_in) ** 0.5, rel=0.01)
            assert plain[name].abs().max().item() == pytest.approx((1 / fan_in) ** 0.5, rel=0.01)
            assert abs(parameter.mean().item()) < 0.01
        else:
            assert torch.equal(parameter, plain[name])


def test_t_net_starts_as_plain_conv4_with_the_same_weights() -> None:
    plain, transformed = (build("conv4", seed=3, width=8, t_net=t_net) for t_net in (False, True))
    weights = transformed.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.state_dict().items())
    images = torch.rand(4, 3, 84, 84, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(transformed(images), plain(images))


def test_t_net_names_what_it_adds_and_uses_it() -> None:
    model = Conv4(width=8, t_net=True)
    added = {f"block{n}.transform.weight" for n in (1, 2, 3, 4)} | {"head_transform.weight"}
    assert model.transform_names() == added == set(model.state_dict()) - set(Conv4(width=8).state_dict())
    assert Conv4(width=8).transform_names() == set()
    assert [name for name, _ in model.named_parameters()][-2:] == ["head.weight", "head.bias"]
    images = torch.rand(4, 3, 84, 84, generator=torch.Generator().manual_seed(0))
    before = model(images)
    for name in sorted(added):
        weight = model.get_parameter(name)
        with torch.no_grad():
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        after = model(images)
        assert not torch.allclose(after, before), name
        before = after
    F.cross_entropy(before, torch.arange(4)).backward()
    assert all(model.get_parameter(name).grad is not None for name in added)


def test_mlp_follows_its_recipe() -> None:
    model = build("mlp", seed=3)
    weight = model.get_parameter("layer1.weight")
    assert weight.std().item() == pytest.approx((2 / 784) ** 0.5, rel=0.02)
    assert not model.get_parameter("layer1.bias").any()
    assert not model.get_parameter("head.bias").any()
    images = torch.rand(2, 784)
    hidden = F.relu(F.linear(images, weight))
    hidden = F.relu(F.linear(hidden, model.get_parameter("layer2.weight")))
    torch.testing.assert_close(model(images), F.linear(hidden, model.get_parameter("head.weight")))


def test_mlp_may_be_a_single_layer_and_needs_two_sizes() -> None:
    assert [name for name, _ in MLP((4, 3)).named_parameters()] == ["head.weight", "head.bias"]
    with pytest.raises(ConfigError, match="sizes"):
        MLP((784,))


def test_cifar_net_flattens_to_4x4_positions() -> None:
    model = CifarNet()
    shapes = []
    model.conv3.register_forward_hook(lambda layer, inputs, output: shapes.append(output.shape))
    model(torch.rand(2, 3, 32, 32))
    assert shapes == [(2, 160, 4, 4)]
    assert CifarNet(size=28)(torch.rand(2, 3, 28, 28)).shape == (2, 10)


def test_resnet12_weights_are_xavier_uniform() -> None:
    model = build("resnet12", seed=0)
    for name in ("block1.conv1", "block3.shortcut_conv", "head"):
        weight = model.get_parameter(f"{name}.weight")
        positions = weight[0, 0].numel() if weight.ndim == 4 else 1
        bound = (6 / ((weight.shape[0] + weight.shape[1]) * positions)) ** 0.5
        assert 0.97 * bound < weight.abs().max() <= bound
    assert not model.get_parameter("head.bias").any()


def test_resnet12_block_adds_its_shortcut() -> None:
    block = build("resnet12", seed=0).get_submodule("block1")
    images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        block.get_parameter("norm3.weight").zero_()  # silences the three convolutions
    shortcut = F.batch_norm(F.conv2d(images, block.get_parameter("shortcut_conv.weight")), None, None, training=True)
    torch.testing.assert_close(block(images), F.max_pool2d(F.leaky_relu(shortcut, 0.1), 2))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("conv5", {}, "unknown model 'conv5'; did you mean 'conv4'"),
        ("transformer", {}, "choose one of conv4, resnet12, mlp, cifar_net"),
        ("conv4", {"way": 5}, "model 'conv4' has no setting 'way'; did you mean 'ways'"),
        ("resnet12", {"size": "huge"}, "choose one of small, large"),
    ],
)
def test_mistakes_are_named(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, **settings)
