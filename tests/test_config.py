from dataclasses import FrozenInstanceError, dataclass, field
from typing import Literal

import pytest
import torch

from wheretolearn.config import describe, from_dict, merge, parse_overrides, setting, to_dict, toml_text
from wheretolearn.continual.config import ContinualConfig
from wheretolearn.errors import ConfigError
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.online.config import OnlineConfig


@dataclass(frozen=True)
class ModelConfig:
    width: int = setting(64, "channels per layer")
    kind: Literal["conv4", "mlp"] = setting("conv4", "which network")

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"width must be at least 1, got {self.width}")


@dataclass(frozen=True)
class TrainConfig:
    dataset: str
    inner_lr: float = setting(0.1, "step size of the inner loop")
    steps: int = setting(5, "inner steps")
    first_order: bool = setting(True, "leave out second derivatives")
    clip: float | None = setting(None, "largest gradient norm")
    note: str | None = setting(None, "free text")
    layers: tuple[int, ...] = setting((64, 64), "sizes")
    crop: tuple[int, float] = setting((84, 0.5), "size and scale")
    model: ModelConfig = field(default=ModelConfig(width=32))


def read(**values: object) -> TrainConfig:
    return from_dict(TrainConfig, {"dataset": "glyphs", **values}, where="my.toml")


def refusal(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read(**values)
    return str(caught.value)


def test_values_and_defaults_are_read() -> None:
    config = read(steps=3, clip=2.0, layers=[1, 2, 3], crop=[10, 1], model={"kind": "mlp"})
    assert config == TrainConfig(
        "glyphs", steps=3, clip=2.0, layers=(1, 2, 3), crop=(10, 1.0), model=ModelConfig(32, "mlp")
    )


def test_a_table_given_in_part_keeps_the_rest_of_its_default() -> None:
    assert read(model={"kind": "mlp"}).model.width == 32


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(FrozenInstanceError):
        read().steps = 4  # type: ignore[misc]


def test_unknown_key_names_the_nearest_key_and_the_source() -> None:
    assert refusal(inner_lrr=0.1) == 'my.toml: unknown setting "inner_lrr"; did you mean "inner_lr"?'


def test_unknown_nested_key_is_named_in_full() -> None:
    assert refusal(model={"widht": 3}) == 'my.toml: unknown setting "model.widht"; did you mean "model.width"?'


def test_nested_setting_given_at_the_top_is_pointed_to_its_table() -> None:
    assert 'did you mean "model.width"?' in refusal(width=3)


def test_unknown_key_near_nothing_lists_what_is_known() -> None:
    message = refusal(zzz=1)
    assert "known settings: dataset, inner_lr, steps" in message


def test_missing_required_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r'my.toml: missing setting "dataset" \(string\)'):
        from_dict(TrainConfig, {}, where="my.toml")


def test_error_without_a_source_starts_with_the_problem() -> None:
    with pytest.raises(ConfigError, match=r'^unknown setting "stepss"'):
        from_dict(TrainConfig, {"dataset": "x", "stepss": 1})


def test_the_largest_number_of_float32_is_accepted() -> None:
    largest = torch.finfo(torch.float32).max
    assert read(inner_lr=largest, clip=-largest).inner_lr == largest


def test_int_is_accepted_for_float_and_becomes_one() -> None:
    assert isinstance(read(inner_lr=1).inner_lr, float)


BEYOND_FLOAT32 = "which is beyond 3.403e+38, the largest number of float32"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"steps": True}, '"steps" expects int, got true'),
        ({"steps": 2.0}, '"steps" expects int, got 2.0'),
        ({"steps": "2"}, '"steps" expects int, got "2"; write the number without quotes, as 2'),
        ({"steps": 2**31}, '"steps" expects int, got 2147483648, which is beyond 2147483647'),
        ({"inner_lr": ".5"}, '"inner_lr" expects float, got ".5"; write the number without quotes, as 0.5'),
        ({"inner_lr": True}, '"inner_lr" expects float, got true'),
        ({"inner_lr": float("nan")}, '"inner_lr" expects float, got nan, which is not finite'),
        ({"inner_lr": float("inf")}, '"inner_lr" expects float, got inf, which is not finite'),
        ({"inner_lr": 1e300}, f'"inner_lr" expects float, got 1e+300, {BEYOND_FLOAT32}'),
        ({"inner_lr": -3.5e38}, f'"inner_lr" expects float, got -3.5e+38, {BEYOND_FLOAT32}'),
        ({"inner_lr": 10**400}, f'"inner_lr" expects float, got {10**400}, {BEYOND_FLOAT32}'),
        ({"clip": 10**39}, f'"clip" expects float or none, got {10**39}, {BEYOND_FLOAT32}'),
        ({"clip": float("-inf")}, '"clip" expects float or none, got -inf, which is not finite'),
        ({"first_order": 1}, '"first_order" expects true or false, got 1'),
        ({"first_order": "True"}, '"first_order" expects true or false, got "True"; write true'),
        ({"dataset": 3}, '"dataset" expects string, got 3'),
        ({"clip": "big"}, '"clip" expects float or none, got "big"'),
        ({"clip": "3"}, '"clip" expects float or none, got "3"; write the number without quotes, as 3'),
        ({"layers": 3}, '"layers" expects list of int, got 3'),
        ({"layers": [1, "a"]}, '"layers[1]" expects int, got "a"'),
        ({"crop": [1]}, '"crop" expects list of (int, float), got [1]'),
        ({"model": 3}, '"model" expects table, got 3'),
        ({"model": {"kind": "conv5"}}, '"model.kind" expects one of "conv4", "mlp", got "conv5"'),
    ],
)
def test_wrong_type_names_key_value_and_expected_type(values: dict[str, object], expected: str) -> None:
    assert refusal(**values) == f"my.toml: {expected}"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *[(FewShotConfig, name) for name in ("inner_lr", "theta_lr", "mask_lr", "mask_init")],
        *[(OnlineConfig, name) for name in ("lr", "inner_lr", "mask_lr", "mean_eta", "initial_std", "logit_init")],
        *[(ContinualConfig, name) for name in ("lr", "mask_lr")],
    ],
)
def test_rates_that_overflow_in_an_optimizer_are_refused(kind: type, name: str) -> None:
    linear = {"mask": "linear"} if kind is FewShotConfig else {}
    from_dict(kind, {**linear, name: 1e30})
    with pytest.raises(ConfigError, match=rf"{name} must lie between -1e\+30 and 1e\+30, not 1\.1e\+30"):
        from_dict(kind, {**linear, name: 1.1e30})
    if name in ("mask_init", "logit_init"):
        with pytest.raises(ConfigError, match=rf"{name} must lie between"):
            from_dict(kind, {**linear, name: -1.1e30})


def test_literal_does_not_take_true_for_one() -> None:
    @dataclass(frozen=True)
    class Shots:
        shots: Literal[1, 5] = 1

    assert from_dict(Shots, {"shots": 5}).shots == 5
    with pytest.raises(ConfigError, match="one of 1, 5, got true"):
        from_dict(Shots, {"shots": True})


def test_int_stays_an_int_where_float_is_allowed_too() -> None:
    @dataclass(frozen=True)
    class Amount:
        amount: float | int = 1.0

    assert type(from_dict(Amount, {"amount": 3}).amount) is int


@pytest.mark.parametrize("value", [None, "none"])
def test_none_can_be_written_as_a_word(value: object) -> None:
    config = read(clip=value, note=value)
    assert config.clip is None
    assert config.note is None


def test_none_is_refused_where_it_is_not_allowed() -> None:
    assert refusal(steps=None) == 'my.toml: "steps" expects int, got none'


def test_own_range_check_is_told_where() -> None:
    assert refusal(model={"width": 0}) == "my.toml: in model: width must be at least 1, got 0"


def test_to_dict_is_plain_and_reads_back() -> None:
    config = read(clip=0.5, model={"width": 7})
    values = to_dict(config)
    assert values["layers"] == [64, 64]
    assert values["model"] == {"width": 7, "kind": "conv4"}
    assert from_dict(TrainConfig, values) == config


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=3", {"steps": 3}),
        ("inner_lr=1e-3", {"inner_lr": 0.001}),
        ("first_order=false", {"first_order": False}),
        ("model.width = 32", {"model": {"width": 32}}),
        ("layers=[1, 2]", {"layers": [1, 2]}),
        ('note="3"', {"note": "3"}),
        ("dataset=mini-imagenet", {"dataset": "mini-imagenet"}),
        ("note=a=b", {"note": "a=b"}),
        ("note=", {"note": ""}),
        ("note=2024-01-01", {"note": "2024-01-01"}),
        ("note=1\nsteps=2", {"note": "1\nsteps=2"}),
        ("model={width = 3}", {"model": {"width": 3}}),
    ],
)
def test_override_values_are_toml_or_else_strings(override: str, expected: dict[str, object]) -> None:
    assert parse_overrides([override]) == expected


def test_overrides_of_one_table_come_together_and_the_last_wins() -> None:
    overrides = parse_overrides(["model.width=1", "model.kind=mlp", "model.width=2"])
    assert overrides == {"model": {"width": 2, "kind": "mlp"}}


@pytest.mark.parametrize("value", [True, 3, 1e-4, "conv4", [1, 2], {"width": 3}])
def test_values_are_shown_as_overrides_read_them(value: object) -> None:
    assert parse_overrides([f"a={toml_text(value)}"]) == {"a": value}


def test_none_is_shown_as_the_word_that_is_read() -> None:
    assert toml_text(None) == "none"
    assert read(**parse_overrides(["clip=none"])).clip is None


@pytest.mark.parametrize("override", ["steps", "=3", "model..width=3", ".=3"])
def test_malformed_override_shows_an_example(override: str) -> None:
    with pytest.raises(ConfigError, match=r"write key=value, such as inner_lr=0\.1"):
        parse_overrides([override])


def test_merge_is_nested_and_leaves_its_arguments_alone() -> None:
    base = {"a": 1, "model": {"width": 1, "kind": "mlp"}}
    merged = merge(base, {"model": {"width": 2}, "b": 3})
    assert merged == {"a": 1, "b": 3, "model": {"width": 2, "kind": "mlp"}}
    merged["model"]["kind"] = "conv4"
    assert base == {"a": 1, "model": {"width": 1, "kind": "mlp"}}


def test_describe_lists_nested_settings_with_their_effective_defaults() -> None:
    rows = {row.key: row for row in describe(TrainConfig)}
    assert rows["dataset"].default == "required"
    assert rows["inner_lr"] == ("inner_lr", "float", "0.1", "step size of the inner loop")
    assert rows["clip"][1:3] == ("float or none", "none")
    assert rows["layers"][1:3] == ("list of int", "[64, 64]")
    assert rows["model.width"] == ("model.width", "int", "32", "channels per layer")
    assert rows["model.kind"][1:3] == ('one of "conv4", "mlp"', '"conv4"')
