import math
import pickle

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
    "rows": masks.rows,
    "curvature": lambda model, select="all", generator=None: masks.curvature(model, select),
    "shrinkage": masks.shrinkage,
}


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


def random_like(tensors):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


def perturbed(mask):
    """Away from any special start value."""
    for m in mask.raw.values():
        m += 0.3 * torch.randn(m.shape, generator=torch.Generator().manual_seed(2))
    return mask


def updates(mask, gradients, moved, lr=0.1):
    return mask.updates(mask.multipliers(), gradients, moved if mask.uses_moved else {}, lr)


class TestContract:
    """What every kind of mask must do."""

    def test_updates_have_the_parameters_names_and_shapes(self, make):
        model = small_network()
        parameters = dict(model.named_parameters())
        result = updates(perturbed(make(model)), random_like(parameters), random_like(parameters))
        assert {n: u.shape for n, u in result.items()} == {n: p.shape for n, p in parameters.items()}

    def test_updates_are_linear_in_gradients_and_displacements(self, make):
        model = small_network()
        mask = perturbed(make(model))
        one = random_like(dict(model.named_parameters()))
        two = {name: tensor.flip(0) + 1 for name, tensor in one.items()}
        mixed = {name: 2 * one[name] - two[name] for name in one}
        expected = updates(mask, one, two), updates(mask, two, one)
        for name, update in updates(mask, mixed, {n: 2 * two[n] - one[n] for n in one}).items():
            torch.testing.assert_close(update, 2 * expected[0][name] - expected[1][name], rtol=1e-4, atol=1e-4)

    def test_displacements_go_in_entry_by_entry(self, make):
        model = small_network()
        mask = perturbed(make(model))
        still = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        one = {name: still[name].index_fill(0, torch.tensor(1), 1.0) for name in still}
        for name, update in updates(mask, still, one).items():
            assert (update[one[name] == 0] == 0).all()

    def test_elementwise_masks_multiply_entry_by_entry(self, make):
        model = small_network()
        mask = perturbed(make(model))
        multipliers, gradients = mask.multipliers(), random_like(dict(model.named_parameters()))
        if not mask.elementwise:
            assert type(mask).updates is not masks.GradientMask.updates
            return
        assert {n: m.shape for n, m in multipliers.items()} == {n: p.shape for n, p in model.named_parameters()}
        for name, update in updates(mask, gradients, {}).items():
            assert torch.equal(update, multipliers[name] * gradients[name])

    def test_batch_norm_can_be_left_out(self, make):
        model = small_network()
        mask = make(model, select=masks.without_batch_norm(model))
        assert mask.names == ("0.weight", "0.bias", "4.weight", "4.bias")
        assert mask.sparsity().by_layer["1"] == 1.0

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
        openness = mask.openness()
        if mask.elementwise:
            assert all(torch.equal(openness[name], m.abs()) for name, m in mask.multipliers().items())
        sparsity = mask.sparsity()
        closed = total = 0
        for name, value in openness.items():
            share = (value <= mask.closed_below).double().mean().item()
            assert sparsity.by_tensor[name] == pytest.approx(share)
            closed += share * value.numel()
            total += value.numel()
        assert sparsity.overall == pytest.approx(closed / total)
        assert set(sparsity.by_layer) == {"0", "1", "4"}

    def test_a_subset_leaves_the_rest_closed(self, make):
        model = small_network()
        mask = make(model, select=["0.*", "4.weight"])
        assert mask.names == ("0.weight", "0.bias", "4.weight")
        gradients = random_like({name: model.get_parameter(name) for name in mask.names})
        assert set(updates(mask, gradients, gradients)) == set(mask.names)
        assert mask.sparsity().by_layer["1"] == 1.0
        assert mask.sparsity().by_tensor["4.bias"] == 1.0

    def test_saved_and_loaded_masks_are_equal(self, make, tmp_path):
        model = small_network()
        mask = perturbed(make(model))
        mask.save(tmp_path / "mask.safetensors")
        loaded = masks.load(tmp_path / "mask.safetensors", model)
        assert type(loaded) is type(mask)
        assert (loaded.kind, loaded.names, loaded.shapes) == (mask.kind, mask.names, mask.shapes)
        assert loaded.settings() == mask.settings()
        assert list(loaded.raw) == list(mask.raw)  # the order that an optimizer's state goes by
        for name, tensor in mask.tensors().items():
            assert torch.equal(loaded.tensors()[name], tensor)
        for name, multiplier in mask.multipliers().items():
            assert torch.equal(loaded.multipliers()[name], multiplier)
        upstream = random_like(mask.multipliers())
        for name, gradient in mask.pull_back(upstream).items():
            assert torch.equal(loaded.pull_back(upstream)[name], gradient)

    def test_goes_to_other_processes(self, make):
        mask = perturbed(make(small_network()))
        sent = pickle.loads(pickle.dumps(mask))
        for name, multiplier in mask.multipliers().items():
            assert torch.equal(sent.multipliers()[name], multiplier)

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


@pytest.mark.parametrize("make", [masks.binary, masks.generated])
@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_straight_through_scale_with_which_nothing_can_be_learned_is_refused(make, scale):
    with pytest.raises(ConfigError, match="straight_through_scale must be a finite number greater than 0"):
        make(small_network(), straight_through_scale=scale)


def test_same_generator_seed_gives_the_same_mask(make):
    if make is masks.fixed:
        return
    one, two, other = (make(small_network(), generator=torch.Generator().manual_seed(s)).tensors() for s in (3, 3, 4))
    assert all(torch.equal(one[n], two[n]) for n in one)
    if make not in (KINDS["curvature"], KINDS["shrinkage"]):  # these start from constants
        assert any(not torch.equal(one[n], other[n]) for n in one)


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


def test_parameters_may_differ_in_precision(make):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3).double(), nn.Conv2d(2, 2, 3).bfloat16())
    mask, parameters = perturbed(make(model)), dict(model.named_parameters())
    like = {name: gradient.to(parameters[name].dtype) for name, gradient in random_like(parameters).items()}
    assert {n: u.shape for n, u in updates(mask, like, like).items()} == {n: p.shape for n, p in parameters.items()}
    gradients = mask.pull_back({name: torch.ones_like(m) for name, m in mask.multipliers().items()})
    assert {n: g.shape for n, g in gradients.items()} == {n: m.shape for n, m in mask.raw.items()}


def test_generated_mask_needs_a_latent_vector():
    with pytest.raises(ConfigError, match="latent_size must be 1 or more, not 0"):
        masks.generated(small_network(), latent_size=0)


@pytest.mark.parametrize("select", ["head", "body"])
@pytest.mark.parametrize("last", ["stem", "header"])
def test_a_head_that_is_not_the_last_layer_must_be_named(select, last):
    model = nn.Sequential(nn.ModuleDict({"head": nn.Linear(3, 2), last: nn.Linear(4, 3)}))
    said = rf"'{select}' takes the layer defined last, here 0.{last}, .* 0.head.weight comes before it.*'0.head.\*'"
    with pytest.raises(ConfigError, match=said):
        masks.fixed(model, select)
    assert masks.fixed(model, "0.head.*").names == ("0.head.weight", "0.head.bias")


def test_a_head_of_several_layers_has_its_last_one_adapt():
    model = nn.ModuleDict({"body": nn.Linear(4, 3), "head": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))})
    assert masks.fixed(model, "head").names == ("head.1.weight", "head.1.bias")


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


@pytest.mark.parametrize("make", [masks.generated, masks.rows])
def test_a_parameter_called_noise_is_refused_where_the_mask_has_noise_of_its_own(make):
    model = nn.Sequential(nn.Conv2d(1, 2, 3))
    model.register_parameter("noise", nn.Parameter(torch.zeros(2)))
    with pytest.raises(ConfigError, match="give the parameter 'noise' another name"):
        make(model)


def test_rows_take_an_empty_parameter():
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    mask = masks.rows(model)
    assert mask.pull_back(mask.multipliers())["empty"].shape == (0,)


def test_loaded_tensors_are_copied_in_place():
    model = small_network()
    one = masks.binary(model, generator=torch.Generator().manual_seed(1))
    two = masks.binary(model, generator=torch.Generator().manual_seed(2))
    held = two.raw["0.weight"]
    two.load_tensors(one.tensors())
    assert held is two.raw["0.weight"]
    assert torch.equal(held, one.raw["0.weight"])


def test_tensors_can_be_loaded_where_raw_parameters_require_gradients():
    model = nn.Linear(3, 3)
    one, two = (masks.binary(model, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    for m in two.parameters():
        m.requires_grad_()
    two.load_tensors(one.tensors())
    assert torch.equal(two.raw["weight"], one.raw["weight"])
    assert two.raw["weight"].requires_grad


@pytest.mark.parametrize("make", [masks.binary, masks.exp, masks.shrinkage])
def test_an_initialisation_of_the_wrong_shape_is_refused(make):
    with pytest.raises(ConfigError, match=r"of shape \(1,\) for weight: it must have \(3, 2\)"):
        make(nn.Linear(2, 3), init=lambda shape, generator: torch.zeros(1))


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
    masks.rows(model, temperature=0.7).save(tmp_path / "mask.safetensors")
    assert masks.load(tmp_path / "mask.safetensors", model).temperature == 0.7


@pytest.mark.parametrize("kind", ["generated", "rows"])
def test_a_random_mask_without_its_noise_is_refused(kind, tmp_path):
    model = small_network()
    KINDS[kind](model).save(tmp_path / "good.safetensors")
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


def test_a_mask_of_nothing_leaves_every_weight_alone(tmp_path):
    model = small_network()
    mask = masks.fixed(model, "none")
    assert mask.names == ()
    assert mask.sparsity().overall == 1.0
    mask.save(tmp_path / "mask.safetensors")
    assert masks.load(tmp_path / "mask.safetensors", model).names == ()


def test_leaving_out_batch_norm_must_leave_something():
    with pytest.raises(ConfigError, match="only batch-norm"):
        masks.without_batch_norm(small_network(), "1.*")
    assert masks.without_batch_norm(nn.Linear(2, 2)) == ("weight", "bias")


class TestRows:
    def test_weights_and_bias_of_a_unit_are_open_or_closed_together(self):
        mask = perturbed(masks.rows(small_network(width=16)))
        multipliers = mask.multipliers()
        rows = multipliers["0.weight"].flatten(1)
        assert ((rows == 0) | (rows == 1)).all()
        assert torch.equal(rows, multipliers["0.bias"].unsqueeze(1).expand_as(rows))
        assert 0 < mask.sparsity().by_tensor["0.weight"] < 1
        assert set(mask.raw) == {"0.weight", "1.weight", "4.weight"}
        assert mask.raw["4.weight"].shape == (3,)

    @pytest.mark.parametrize("logit", [-2.0, 0.0, 1.0])
    def test_a_unit_is_open_with_the_chance_of_its_logit(self, logit):
        mask = masks.rows(nn.Linear(1, 20_000), initial_logit=logit, generator=torch.Generator().manual_seed(0))
        expected = torch.sigmoid(torch.tensor(logit)).item()
        assert mask.multipliers()["bias"].mean().item() == pytest.approx(expected, abs=0.012)

    def test_resampling_draws_one_noise_for_all_units(self):
        mask = masks.rows(small_network(width=16))
        before, asked = mask.multipliers(), []

        def draw(like):
            asked.append(like.shape)
            return torch.full_like(like, 100.0)

        mask.resample(draw)
        assert asked == [(16 + 16 + 3,)]
        assert all((m == 1).all() for m in mask.multipliers().values())
        assert not torch.equal(before["0.bias"], mask.multipliers()["0.bias"])

    def test_gradient_is_that_of_the_binary_gumbel_softmax(self):
        mask = perturbed(masks.rows(nn.Linear(2, 3), temperature=0.5)).to(torch.float64)
        upstream = {name: m.double() for name, m in random_like(mask.multipliers()).items()}
        logits = mask.raw["weight"].clone().requires_grad_()
        chance = torch.special.ndtr(mask.noise)
        soft = torch.sigmoid((logits + torch.log(chance / (1 - chance))) / 0.5)
        loss = (soft.unsqueeze(1) * upstream["weight"]).sum() + (soft * upstream["bias"]).sum()
        (expected,) = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(mask.pull_back(upstream)["weight"], expected)

    def test_extreme_noise_gives_finite_gradients(self):
        mask = masks.rows(nn.Linear(2, 3))
        mask.resample(lambda like: torch.tensor([-30.0, 0.0, 30.0]))
        gradient = mask.pull_back({"weight": torch.ones(3, 2), "bias": torch.ones(3)})["weight"]
        assert gradient.isfinite().all()
        assert mask.multipliers()["bias"].tolist() == [0.0, 1.0, 1.0]

    def test_parameters_of_any_shape_are_covered(self):
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.scalar = nn.Parameter(torch.ones(()))
                self.vector = nn.Parameter(torch.ones(3))
                self.matrix = nn.Parameter(torch.ones(2, 3))

        for make in (masks.rows, masks.curvature, masks.shrinkage):
            mask = make(Odd())
            gradients = random_like({name: torch.ones(shape) for name, shape in mask.shapes.items()})
            assert {n: u.shape for n, u in updates(mask, gradients, gradients).items()} == mask.shapes
            assert {n: v.shape for n, v in mask.openness().items()} == mask.shapes

    def test_temperature_must_be_positive(self):
        with pytest.raises(ConfigError, match="temperature"):
            masks.rows(nn.Linear(2, 2), temperature=0.0)


class TestCurvature:
    def test_starts_as_plain_gradient_descent(self):
        model = small_network()
        gradients = random_like(dict(model.named_parameters()))
        for name, update in updates(masks.curvature(model), gradients, {}).items():
            assert torch.equal(update, gradients[name])

    def test_is_one_matrix_for_each_mode(self):
        model = small_network()
        mask = perturbed(masks.curvature(model))
        gradients = random_like(dict(model.named_parameters()))
        raw, result = mask.raw, updates(mask, gradients, {})
        matrices = raw["0.weight.out"], raw["0.weight.in"], raw["0.weight.kernel"]
        assert [m.shape for m in matrices] == [(4, 4), (1, 1), (9, 9)]
        expected = torch.einsum("po,qi,lk,oik->pql", *matrices, gradients["0.weight"].flatten(2))
        torch.testing.assert_close(result["0.weight"].flatten(2), expected)
        expected = raw["4.weight.out"] @ gradients["4.weight"] @ raw["4.weight.in"].T
        torch.testing.assert_close(result["4.weight"], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(result["1.bias"], raw["1.bias.out"] @ gradients["1.bias"])

    def test_a_weight_counts_as_closed_when_nothing_reaches_it(self):
        mask = masks.curvature(nn.Linear(4, 2))
        mask.raw["weight.out"][:] = torch.tensor([[0.0, 0.0], [1.0, 1.0]])  # the first row closed, no column
        assert mask.sparsity().by_tensor == {"weight": 0.5, "bias": 0.0}
        gradients = {"weight": torch.ones(2, 4), "bias": torch.ones(2)}
        assert (updates(mask, gradients, {})["weight"][0] == 0).all()

    @pytest.mark.parametrize(
        "damage", [lambda t: t.pop("4.bias.out"), lambda t: t.update({"4.bias.out": torch.ones(1, 1)})]
    )
    def test_damaged_files_are_refused(self, damage, tmp_path):
        model = small_network()
        masks.curvature(model).save(tmp_path / "good.safetensors")
        tensors, metadata = load_weights(tmp_path / "good.safetensors")
        damage(tensors)
        save_weights(tmp_path / "bad.safetensors", tensors, metadata)
        with pytest.raises(MismatchError, match=r"holds no gradient mask.*4\.bias\.out"):
            masks.load(tmp_path / "bad.safetensors", model)


class TestShrinkage:
    def test_the_step_solves_its_proximal_problem(self):
        mask = perturbed(masks.shrinkage(nn.Linear(3, 2))).to(torch.float64)
        gradients, lr = {n: g.double() for n, g in random_like(mask.multipliers()).items()}, 0.3
        moved = {name: g.flip(0) for name, g in gradients.items()}
        for name, update in updates(mask, gradients, moved, lr).items():
            after = moved[name] - lr * update
            strength = mask.raw[name].exp()
            # Stationary in: gradient . d + strength / 2 d^2 + |d - moved|^2 / (2 lr)
            stationary = gradients[name] + strength * after + (after - moved[name]) / lr
            torch.testing.assert_close(stationary, torch.zeros_like(stationary))

    @pytest.mark.parametrize("raw", [-1e4, -40.0, 0.0, 40.0, 1e4])
    def test_no_strength_makes_a_step_diverge(self, raw):
        mask = masks.shrinkage(nn.Linear(3, 2), init=masks.constant(raw))
        moved = random_like(mask.multipliers())
        still = {name: torch.zeros_like(m) for name, m in moved.items()}
        for name, update in updates(mask, still, moved, 10.0).items():
            after = moved[name] - 10.0 * update
            assert (after.abs() <= moved[name].abs()).all()
        assert all(g.isfinite().all() for g in mask.pull_back(moved).values())

    def test_strong_pulls_count_as_closed(self):
        strong, weak = (masks.shrinkage(nn.Linear(3, 2), init=masks.constant(raw)) for raw in (7.0, 6.0))
        assert (strong.sparsity().overall, weak.sparsity().overall) == (1.0, 0.0)

    def test_default_strength(self):
        mask = masks.shrinkage(nn.Linear(3, 2))
        torch.testing.assert_close(mask.raw["bias"].exp(), torch.full((2,), 0.1))
