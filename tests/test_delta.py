import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wheretolearn import masks
from wheretolearn.delta import SparseDelta
from wheretolearn.errors import MismatchError
from wheretolearn.inner_loop import adapt
from wheretolearn.storage import load_weights, save_weights


def network(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


def adapted_network(mode="batch", sparsity=0.9):
    model = network()
    x, y = torch.randn(12, 5), torch.arange(12) % 3
    mask = masks.binary(model, initial_sparsity=sparsity)
    return (
        model,
        x,
        adapt(model, mask, lambda net: F.cross_entropy(net(x), y), steps=3, inner_lr=0.2, batch_norm_mode=mode),
    )


@pytest.mark.parametrize("mode", ["batch", "support", "running"])
def test_a_stored_delta_gives_the_adapted_network_back_exactly(mode, tmp_path):
    model, x, adapted = adapted_network(mode)
    SparseDelta.of(adapted).save(tmp_path / "delta.safetensors")
    network = SparseDelta.load(tmp_path / "delta.safetensors").apply(model)
    assert torch.equal(network(x), adapted.module()(x))
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, adapted.parameters[name])


def test_only_changed_entries_are_kept():
    model, _, adapted = adapted_network(sparsity=0.9)
    delta = SparseDelta.of(adapted)
    changed = sum((adapted.parameters[n] != p).sum().item() for n, p in model.named_parameters())
    assert delta.changed == changed
    assert 0 < delta.changed <= 0.11 * delta.total
    assert delta.total == sum(p.numel() for p in model.parameters())
    assert delta.buffers == {}


@pytest.fixture
def file_size(tmp_path):
    def measure(sparsity):
        torch.manual_seed(0)
        model = nn.Linear(500, 50)
        x, y = torch.randn(20, 500), torch.arange(20)
        mask = masks.binary(model, initial_sparsity=sparsity)
        adapted = adapt(model, mask, lambda net: F.cross_entropy(net(x), y), steps=1, inner_lr=1.0)
        SparseDelta.of(adapted).save(tmp_path / "delta.safetensors")
        return (tmp_path / "delta.safetensors").stat().st_size

    return measure


def test_a_sparser_mask_gives_a_smaller_file(file_size):
    assert file_size(sparsity=0.9) < 0.2 * file_size(sparsity=0.0)


@pytest.mark.parametrize(("sparsity", "stored_as"), [(0.99, torch.int32), (0.5, torch.uint8)])
def test_positions_are_stored_in_the_smaller_way(sparsity, stored_as, tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(500, 50)
    x, y = torch.randn(20, 500), torch.arange(20)
    mask = masks.binary(model, select="weight", initial_sparsity=sparsity)
    adapted = adapt(model, mask, lambda net: F.cross_entropy(net(x), y), steps=1, inner_lr=1.0)
    SparseDelta.of(adapted).save(tmp_path / "delta.safetensors")
    assert load_weights(tmp_path / "delta.safetensors")[0]["position/weight"].dtype == stored_as
    network = SparseDelta.load(tmp_path / "delta.safetensors").apply(model)
    assert torch.equal(network.weight, adapted.parameters["weight"])


def test_a_delta_with_a_strange_buffer_is_refused():
    model, _, adapted = adapted_network()
    delta = SparseDelta.of(adapted)
    delta.buffers["nobody"] = torch.ones(1)
    with pytest.raises(MismatchError, match="nobody"):
        delta.apply(model)


def test_a_delta_refuses_other_weights():
    _, _, adapted = adapted_network()
    other = network()
    with torch.no_grad():
        other[0].weight += 1
    with pytest.raises(MismatchError, match="other weights"):
        SparseDelta.of(adapted).apply(other)


def test_a_delta_refuses_another_architecture():
    _, _, adapted = adapted_network()
    with pytest.raises(MismatchError, match=r"0\.weight"):
        SparseDelta.of(adapted).apply(network(width=9))


def test_a_file_that_is_no_delta_is_refused(tmp_path):
    masks.binary(network()).save(tmp_path / "mask.safetensors")
    with pytest.raises(MismatchError, match="holds no sparse delta"):
        SparseDelta.load(tmp_path / "mask.safetensors")


def test_channels_last_models():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)).to(memory_format=torch.channels_last)
    x, y = torch.randn(6, 2, 4, 4), torch.arange(6) % 3
    adapted = adapt(model, masks.binary(model), lambda net: F.cross_entropy(net(x), y), steps=2, inner_lr=0.1)
    assert torch.equal(SparseDelta.of(adapted).apply(model)(x), adapted.module()(x))


def test_a_delta_taken_after_the_optimizers_step_is_refused():
    model, _, adapted = adapted_network()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(MismatchError, match="before the optimizer's step"):
        SparseDelta.of(adapted)


def test_other_stored_statistics_are_other_weights():
    model, _, adapted = adapted_network("running")
    delta = SparseDelta.of(adapted)
    model[1].running_mean += 5
    with pytest.raises(MismatchError, match="other weights"):
        delta.apply(model)


@pytest.mark.parametrize(
    "damage",
    [
        lambda tensors, metadata: metadata.pop("shapes"),
        lambda tensors, metadata: metadata.update(shapes="[1]"),
        lambda tensors, metadata: metadata.update(batch_norm="none"),
        lambda tensors, metadata: tensors.pop("value/0.weight"),
        lambda tensors, metadata: tensors.update({"value/0.weight": torch.ones(1)}),
        lambda tensors, metadata: tensors.update({"position/0.weight": tensors["position/0.weight"] + 1000}),
        lambda tensors, metadata: tensors.update({"other/0.weight": torch.ones(1)}),
        lambda tensors, metadata: tensors.update({"position/0.weight": torch.tensor(1, dtype=torch.uint8)}),
    ],
)
def test_damaged_deltas_are_refused(damage, tmp_path):
    _, _, adapted = adapted_network()
    SparseDelta.of(adapted).save(tmp_path / "good.safetensors")
    tensors, metadata = load_weights(tmp_path / "good.safetensors")
    damage(tensors, metadata)
    save_weights(tmp_path / "bad.safetensors", tensors, metadata)
    with pytest.raises(MismatchError, match="holds no sparse delta"):
        SparseDelta.load(tmp_path / "bad.safetensors")
