import pytest
import torch
from torch import nn

from wheretolearn import masks
from wheretolearn.errors import ConfigError, MismatchError
from wheretolearn.storage import load_weights, save_weights


def small_network(width=4):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(width * 36, 3)
    )


KINDS = {
    "binary": masks.binary,
    "relu": masks.relu,
    "dying-relu": lambda model, **k: masks.relu(model, straight_through=False, **k),
    "exp": masks.exp,
    "linear": masks.linear,
    "fixed": masks.fixed,
    "generated": lambda model, **k: masks.generated(model, latent_size=7, **k),
}


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


def random_like(tensors):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


class TestContract:
    """What every kind of mask must do."""

    def test_multipliers_have_the_parameters_names_and_shapes(self, make):
        model = small_network()
        multipliers = make(model).multipliers()
        assert {n: m.shape for n, m in multipliers.items()} == {n: p.shape for n, p in model.named_parameters()}

    def test_pull_back_gives_a_gradient_for_each_raw_parameter(self, make):
        mask = make(small_network())
        gradients = mask.pull_back(random_like(mask.multipliers()))
        assert {n: g.shape for n, g in gradients.items()} == {n: m.shape for n, m in mask.raw.items()}

    def test_pull_back_is_linear(self, make):
        mask = make(small_network())
        one = random_like(mask.multipliers())
        three = mask.pull_back({name: 3 * g for name, g in one.items()})
        for name, gradient in mask.pull_back(one).items():
            torch.testing.assert_close(three[name], 3 * gradient)

    def test_sparsity_counts_closed_multipliers(self, make):
        mask = make(small_network())
        multipliers = mask.multipliers()
        sparsity = mask.sparsity()
        closed = total = 0
        for name, multiplier in multipliers.items():
            share = (multiplier.abs() <= mask.closed_below).double().mean().item()
            assert sparsity.by_tensor[name] == pytest.approx(share)
            closed += share * multiplier.numel()
            total += multiplier.numel()
        assert sparsity.overall == pytest.approx(closed / total)
        assert set(sparsity.by_layer) == {"0", "1", "4"}

    def test_a_subset_leaves_the_rest_closed(self, make):
        model = small_network()
        mask = make(model, select=["0.*", "4.weight"])
        assert mask.names == ("0.weight", "0.bias", "4.weight")
        assert set(mask.multipliers()) == set(mask.names)
        assert mask.sparsity().by_layer["1"] == 1.0
        assert mask.sparsity().by_tensor["4.bias"] == 1.0

    def test_saved_and_loaded_masks_are_equal(self, make, tmp_path):
        model = small_network()
        mask = make(model)
        mask.save(tmp_path / "mask.safetensors")
        loaded = masks.load(tmp_path / "mask.safetensors", model)
        assert type(loaded) is type(mask)
        assert (loaded.kind, loaded.names, loaded.shapes) == (mask.kind, mask.names, mask.shapes)
        for name, multiplier in mask.multipliers().items():
            assert torch.equal(loaded.multipliers()[name], multiplier)
        upstream = random_like(mask.multipliers())
        for name, gradient in mask.pull_back(upstream).items():
            assert torch.equal(loaded.pull_back(upstream)[name], gradient)

    def test_loading_into_another_model_names_the_tensor(self, make, tmp_path):
        make(small_network()).save(tmp_path / "mask.safetensors")
        with pytest.raises(MismatchError, match=r"0\.weight"):
            masks.load(tmp_path / "mask.safetensors", small_network(width=5))

    def test_moves_to_another_dtype(self, make):
        multipliers = make(small_network()).to(torch.float64).multipliers()
        assert {m.dtype for m in multipliers.values()} == {torch.float64}

    def test_optimizer_changes_what_the_mask_does(self, make):
        mask = make(small_network())
        if not mask.raw:
            assert list(mask.parameters()) == []
            return
        before = mask.multipliers()
        optimizer = torch.optim.SGD(mask.parameters(), lr=1.0)
        for name, gradient in mask.pull_back({n: torch.ones_like(m) for n, m in before.items()}).items():
            mask.raw[name].grad = gradient
        optimizer.step()
        assert any(not torch.equal(before[name], m) for name, m in mask.multipliers().items())


def test_every_maker_and_rule_is_under_the_contract():
    assert set(KINDS) == set(masks.MAKERS) | set(masks.RULES)


def test_binary_is_open_at_exactly_zero():
    mask = masks.binary(nn.Linear(2, 2), init=masks.constant(0.0))
    assert all((m == 1).all() for m in mask.multipliers().values())


def test_default_binary_initialisation_closes_about_half():
    sparsity = masks.binary(small_network(width=64)).sparsity()
    assert sparsity.by_tensor["0.weight"] == pytest.approx(0.5, abs=0.06)
    assert sparsity.by_tensor["4.weight"] == pytest.approx(0.5, abs=0.02)
    assert abs(masks.kaiming(torch.Size([64, 3, 3, 3])).mean()) < 1e-6


@pytest.mark.parametrize("wanted", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("maker", [masks.binary, masks.relu])
def test_wanted_initial_sparsity_is_met_in_every_tensor(maker, wanted):
    mask = maker(small_network(width=10), initial_sparsity=wanted)
    for name, share in mask.sparsity().by_tensor.items():
        assert share == pytest.approx(wanted, abs=0.5 / mask.raw[name].numel() + 1e-9), name


def test_initial_sparsity_out_of_range_is_refused():
    with pytest.raises(ConfigError, match="between 0 and 1"):
        masks.binary(nn.Linear(2, 2), initial_sparsity=50)


def test_relu_starts_open_and_within_the_papers_range():
    for multiplier in masks.relu(small_network()).multipliers().values():
        assert 0.05 <= multiplier.min() <= multiplier.max() <= 0.1


def test_straight_through_revives_a_closed_rate_and_la_maml_does_not():
    model = nn.Linear(2, 1)
    upstream = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    closed = masks.constant(-0.1)
    assert (masks.relu(model, init=closed).pull_back(upstream)["weight"] == 1).all()
    dead = masks.relu(model, init=closed, straight_through=False)
    assert (dead.pull_back(upstream)["weight"] == 0).all()


def test_straight_through_scale_halves_the_gradient():
    mask = masks.binary(nn.Linear(2, 1), straight_through_scale=0.5)
    gradient = mask.pull_back({"weight": torch.ones(1, 2), "bias": torch.ones(1)})
    assert (gradient["weight"] == 0.5).all()


def test_same_generator_seed_gives_the_same_mask(make):
    if make is masks.fixed:
        return
    one, two, other = (make(small_network(), generator=torch.Generator().manual_seed(s)) for s in (3, 3, 4))
    assert all(torch.equal(one.raw[n], two.raw[n]) for n in one.raw)
    assert any(not torch.equal(one.raw[n], other.raw[n]) for n in one.raw)


def test_head_and_body_split_the_model():
    model = small_network()
    assert masks.fixed(model, "head").names == ("4.weight", "4.bias")
    assert masks.fixed(model, "body").names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert masks.fixed(model, "head").sparsity().by_layer == {"0": 1.0, "1": 1.0, "4": 0.0}


def test_frozen_parameters_are_not_covered():
    model = small_network()
    model[0].weight.requires_grad_(False)
    assert "0.weight" not in masks.binary(model).shapes


def test_tied_weights_are_covered_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert masks.binary(model).names == ("0.weight", "0.bias", "1.bias")


def test_a_pattern_that_matches_nothing_names_a_near_parameter():
    with pytest.raises(ConfigError, match=r"no trainable parameter matches '4\.wieght'.* such as 4\.weight"):
        masks.binary(small_network(), select="4.wieght")


def test_generated_mask_needs_filters():
    with pytest.raises(ConfigError, match="filter"):
        masks.generated(nn.Linear(2, 2))


def test_generated_masks_filters_follow_the_formula_and_the_rest_are_plain():
    mask = masks.generated(small_network(), latent_size=5)
    latent = mask.noise * mask.raw["latent.scale"] + mask.raw["latent.mean"]
    m = (mask.raw["0.weight.projection"] @ latent).view(4, 1, 3, 3) + mask.raw["0.weight.offset"]
    assert torch.equal(mask.multipliers()["0.weight"], (m >= 0).float())
    assert torch.equal(mask.multipliers()["4.weight"], (mask.raw["4.weight"] >= 0).float())


def test_only_noise_changes_when_a_generated_mask_is_resampled():
    mask = masks.generated(small_network(), latent_size=50, initial_noise=3.0)
    raw = {name: m.clone() for name, m in mask.raw.items()}
    before = mask.multipliers()
    mask.resample()
    assert all(torch.equal(raw[name], mask.raw[name]) for name in raw)
    assert not torch.equal(before["0.weight"], mask.multipliers()["0.weight"])
    assert torch.equal(before["4.weight"], mask.multipliers()["4.weight"])


def test_a_file_that_is_no_mask_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(MismatchError, match="holds no gradient mask"):
        masks.load(tmp_path / "other.safetensors", small_network())


def test_loaded_tensors_are_copied_in_place():
    model = small_network()
    one = masks.binary(model, generator=torch.Generator().manual_seed(1))
    two = masks.binary(model, generator=torch.Generator().manual_seed(2))
    held = two.raw["0.weight"]
    two.load_tensors(one.tensors())
    assert held is two.raw["0.weight"]
    assert torch.equal(held, one.raw["0.weight"])


def test_a_half_precision_model_gets_a_float32_mask():
    mask = masks.binary(nn.Linear(3, 3).to(torch.bfloat16))
    assert mask.raw["weight"].dtype is torch.float32


@pytest.mark.parametrize(
    "damage",
    [
        lambda tensors, metadata: metadata.pop("settings"),
        lambda tensors, metadata: metadata.update(settings="[]"),
        lambda tensors, metadata: metadata.update(shapes="no json"),
        lambda tensors, metadata: metadata.update(kind="cubic"),
        lambda tensors, metadata: metadata.update(names='["nobody"]'),
        lambda tensors, metadata: tensors.pop("0.weight"),
        lambda tensors, metadata: tensors.update({"0.weight": torch.ones(1)}),
    ],
)
def test_damaged_mask_files_are_refused(damage, tmp_path):
    model = small_network()
    masks.binary(model).save(tmp_path / "good.safetensors")
    tensors, metadata = load_weights(tmp_path / "good.safetensors")
    damage(tensors, metadata)
    save_weights(tmp_path / "bad.safetensors", tensors, metadata)
    with pytest.raises(MismatchError, match="holds no gradient mask"):
        masks.load(tmp_path / "bad.safetensors", model)


def test_settings_survive_saving(tmp_path):
    model = small_network()
    for make in (masks.binary, KINDS["generated"]):
        make(model, straight_through_scale=0.5).save(tmp_path / "mask.safetensors")
        assert masks.load(tmp_path / "mask.safetensors", model).straight_through_scale == 0.5


def test_a_generated_mask_without_its_noise_is_refused(tmp_path):
    model = small_network()
    KINDS["generated"](model).save(tmp_path / "good.safetensors")
    tensors, metadata = load_weights(tmp_path / "good.safetensors")
    del tensors["noise"]
    save_weights(tmp_path / "bad.safetensors", tensors, metadata)
    with pytest.raises(MismatchError, match="noise"):
        masks.load(tmp_path / "bad.safetensors", model)


def test_kaiming_bounds():
    filters = masks.kaiming(torch.Size([200, 4, 3, 3]))
    assert filters.abs().max().item() == pytest.approx((6 / 36) ** 0.5, rel=0.05)
    vector = masks.kaiming(torch.Size([5000]))
    assert vector.abs().max().item() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("make", [masks.exp, masks.linear])
def test_learned_rates_start_in_the_range_of_meta_sgd(make):
    for multiplier in make(small_network()).multipliers().values():
        assert 0.05 <= multiplier.min() <= multiplier.max() <= 0.1


def test_small_rates_count_as_closed_and_the_threshold_is_stated():
    for make, raw in ((masks.exp, -8.0), (masks.linear, 1e-4)):
        mask = make(nn.Linear(3, 3), init=masks.constant(raw))
        assert mask.closed_below == 1e-3
        assert mask.sparsity().overall == 1.0


class TestGenerated:
    def test_settings_have_their_effect(self):
        mask = masks.generated(small_network(), initial_noise=0.0, straight_through_scale=0.5)
        assert mask.raw["0.weight.projection"].shape == (36, 1600)
        assert mask.raw["0.weight.projection"].abs().max().item() == pytest.approx(1600**-0.5, rel=0.05)
        before = mask.multipliers()["0.weight"]
        mask.resample()
        assert torch.equal(before, mask.multipliers()["0.weight"])
        ones = {name: torch.ones_like(m) for name, m in mask.multipliers().items()}
        assert (mask.pull_back(ones)["0.weight.offset"] == 0.5).all()
        assert (mask.pull_back(ones)["4.bias"] == 0.5).all()

    @pytest.mark.parametrize("wanted", [0.1, 0.9])
    def test_wanted_initial_sparsity_holds_for_generated_tensors_too(self, wanted):
        sparsity = masks.generated(small_network(width=16), latent_size=50, initial_sparsity=wanted).sparsity()
        assert sparsity.by_tensor["0.weight"] == pytest.approx(wanted, abs=0.01)
        assert sparsity.overall == pytest.approx(wanted, abs=0.01)


def test_equal_values_cannot_be_shifted_to_a_share():
    with pytest.raises(ConfigError, match="equal values"):
        masks.binary(nn.Linear(3, 3), init=masks.constant(0.1), initial_sparsity=0.5)


def test_parameters_without_entries_do_no_harm():
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(3, 0))
            self.linear = nn.Linear(2, 2)

    assert masks.binary(Empty(), initial_sparsity=0.5).sparsity().by_tensor["nothing"] == 0.0


def test_an_empty_selection_is_refused():
    for make in (masks.fixed, masks.binary, KINDS["generated"]):
        with pytest.raises(ConfigError, match="empty"):
            make(small_network(), select=[])


def test_complex_parameters_are_refused():
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ConfigError, match="complex"):
        masks.binary(model)


def test_a_parametrised_head_is_one_layer():
    model = nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    assert set(masks.fixed(model, "body").names) == {"0.weight", "0.bias"}
