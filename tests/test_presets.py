import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from wheretolearn.config import from_dict
from wheretolearn.errors import ConfigError
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.presets import Evaluate, Paper, Preset, Scale, list_presets, load_preset, scale_named

DEMO = """
[demo.maml]
protocol = "fewshot"
about = "MAML on glyphs"
[demo.maml.settings]
steps = 5
model = { width = 32, kind = "conv4" }

[demo.sparse-maml]
about = "sparse-MAML on glyphs"
extends = "demo.maml"
paper = { table = "table1", value = 67.03, std = 0.74 }
settings = { mask = "binary", model = { width = 64 } }

[demo.sparse-maml-plus]
about = "sparse-MAML+ on glyphs"
extends = "demo.sparse-maml"
settings.steps = 10
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "demo.toml").write_text(DEMO)
    (tmp_path / "notes.txt").write_text("not a preset")
    return tmp_path


def refusal(folder: Path, text: str) -> str:
    (folder / "more.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        list_presets(folder)
    return str(caught.value)


def test_a_preset_extends_another_setting_by_setting(folder: Path) -> None:
    assert load_preset("demo.sparse-maml", folder) == Preset(
        name="demo.sparse-maml",
        protocol="fewshot",
        about="sparse-MAML on glyphs",
        paper=Paper("table1", 67.03, 0.74),
        settings={"steps": 5, "mask": "binary", "model": {"width": 64, "kind": "conv4"}},
    )


def test_extending_goes_through_a_chain_but_the_paper_value_is_not_inherited(folder: Path) -> None:
    preset = load_preset("demo.sparse-maml-plus", folder)
    assert preset.settings == {"steps": 10, "mask": "binary", "model": {"width": 64, "kind": "conv4"}}
    assert preset.paper is None


def test_presets_are_listed_group_by_group_in_the_order_of_their_file(folder: Path) -> None:
    (folder / "a.toml").write_text('[z]\nabout = "x"\nextends = "demo.maml"\n[demo.late]\nextends = "demo.maml"')
    names = [preset.name for preset in list_presets(folder)]
    assert names == ["demo.late", "demo.maml", "demo.sparse-maml", "demo.sparse-maml-plus", "z"]


def test_a_cell_can_share_a_training_and_measure_something_else(folder: Path) -> None:
    (folder / "cells.toml").write_text("""
    [table3]
    sparse-maml = { extends = "demo.sparse-maml", measure = "sparsity", paper = { value = 75 } }
    "sparse-maml.cub" = { extends = "demo.sparse-maml", evaluate = { data = "cub", steps = 100 } }
    """)
    base, cell, cub = (
        load_preset(name, folder) for name in ("demo.sparse-maml", "table3.sparse-maml", "table3.sparse-maml.cub")
    )
    assert base.settings == cell.settings == cub.settings
    assert (base.measure, cell.measure, cub.measure) == ("accuracy", "sparsity", "accuracy")
    assert (base.evaluate, cub.evaluate) == (Evaluate(), Evaluate(data="cub", steps=100))
    assert cell.paper == Paper("table3", 75.0)
    assert cell.about == "sparse-MAML on glyphs, sparsity"
    assert cub.about == "sparse-MAML on glyphs, tested on cub"


def test_other_numbers_of_the_same_run_are_not_inherited_and_not_those_of_a_small_run(folder: Path) -> None:
    (folder / "cells.toml").write_text("""
    [table5.a]
    extends = "demo.maml"
    measure = "RA"
    paper = { value = 77.77, std = 0.58 }
    also = { BTI = { value = -8.16, std = 0.61 }, "sparsity of head.bias" = { value = 100, table = "tableS5" } }
    [table5.b]
    extends = "table5.a"
    """)
    assert load_preset("table5.a", folder).also == {
        "BTI": Paper("table5", -8.16, 0.61),
        "sparsity of head.bias": Paper("tableS5", 100.0),
    }
    assert load_preset("table5.b", folder).also == {}
    assert load_preset("table5.a", folder, scale="quick").also == {}


def test_a_preset_after_another_starts_from_its_run(folder: Path) -> None:
    (folder / "two.toml").write_text("""
    [phase.two]
    extends = "demo.sparse-maml"
    after = "demo.maml"
    [phase.two-again]
    extends = "phase.two"
    """)
    for name in ("phase.two", "phase.two-again"):
        preset = load_preset(name, folder)
        assert preset.after == "demo.maml"
        assert preset.settings["start_from"] == "runs/demo.maml"


SWEEP = """
[figure.steps]
extends = "demo.maml"
about = "by steps"
settings = { steps = 1, rate = 0.5 }
sweep = { steps = [5, 15], test_steps = [6, 16] }
[figure.rate]
extends = "figure.steps.15"
sweep = { rate = [0.10, 0.25] }
"""


def test_a_sweep_is_one_preset_per_point(folder: Path) -> None:
    (folder / "sweep.toml").write_text(SWEEP)
    points = {preset.name: preset for preset in list_presets(folder) if preset.name.startswith("figure")}
    assert list(points) == ["figure.steps.5", "figure.steps.15", "figure.rate.0.1", "figure.rate.0.25"]
    swept = {name: [point.settings[key] for key in ("steps", "test_steps", "rate")] for name, point in points.items()}
    assert swept == {
        "figure.steps.5": [5, 6, 0.5],
        "figure.steps.15": [15, 16, 0.5],
        "figure.rate.0.1": [15, 16, 0.1],
        "figure.rate.0.25": [15, 16, 0.25],
    }
    assert points["figure.steps.5"].about == "by steps, steps 5"
    assert points["figure.rate.0.25"].about == "by steps, rate 0.25"


QUICK = """
[quick.demo]
about = "small"
settings = { steps = 2, rate = 0.9 }
evaluate = { split = "characters", data = "none" }
[quick.demo.sparse-maml.settings]
steps = 3
"""


def test_the_quick_scale_is_laid_over_prefixes_and_what_extends_them(folder: Path) -> None:
    (folder / "quick.toml").write_text(QUICK)
    (folder / "sweep.toml").write_text(SWEEP)
    assert not any(preset.name.startswith("quick") for preset in list_presets(folder))
    assert load_preset("demo.maml", folder).settings["steps"] == 5

    def quick(name: str) -> Preset:
        return load_preset(name, folder, scale="quick")

    assert quick("demo.maml").settings == {"steps": 2, "rate": 0.9, "model": {"width": 32, "kind": "conv4"}}
    assert quick("demo.maml").evaluate == Evaluate(split="characters")
    assert quick("demo.maml").about == "MAML on glyphs; quick: small"
    assert quick("demo.sparse-maml").settings["steps"] == 3
    assert quick("demo.sparse-maml").paper is None  # glyphs are not the paper's images
    # Its own row comes after that of the preset it extends, though its own settings say otherwise.
    assert quick("demo.sparse-maml-plus").settings["steps"] == 2
    # Swept settings are the point of a sweep.
    assert quick("figure.steps.15").settings["steps"] == 15
    assert quick("figure.rate.0.1").settings["rate"] == 0.1
    assert quick("figure.rate.0.1").settings["steps"] == 15


def test_an_unknown_scale_lists_the_choices() -> None:
    assert scale_named("quick") == "quick"
    with pytest.raises(ConfigError, match="there is no scale 'fast': choose paper or quick"):
        scale_named("fast")


def test_a_quick_row_for_nothing_is_refused(folder: Path) -> None:
    message = refusal(folder, "[quick.demo.mamml]\nsettings = {}")
    assert message.startswith('"quick.demo.mamml" is laid over no preset; the nearest: demo.maml')


def test_an_unknown_value_in_a_quick_row_is_refused(folder: Path) -> None:
    assert refusal(folder, "[quick.demo]\nsteps = 3") == 'more.toml: unknown "steps" in quick.demo'


def test_the_lists_of_a_sweep_must_have_one_length(folder: Path) -> None:
    message = refusal(folder, '[a]\nextends = "demo.maml"\nsweep = { steps = [1, 2], rate = [1] }')
    assert message.endswith("preset a: the lists of a sweep go together and need one length; found steps 2, rate 1")
    assert "found steps 0" in refusal(folder, '[a]\nextends = "demo.maml"\nsweep = { steps = [] }')


def test_a_sweep_over_equal_values_is_refused(folder: Path) -> None:
    message = refusal(folder, '[a]\nextends = "demo.maml"\nsweep = { rate = [0.1, 0.10] }')
    assert message.startswith('preset "a.0.1" is defined twice')


def test_a_group_is_not_a_preset_and_says_how_to_see_it(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r'"demo" is a group of 3 presets; see `wheretolearn presets demo`'):
        load_preset("demo", folder)


def test_coming_after_something_unknown_names_the_nearest(folder: Path) -> None:
    message = refusal(folder, '[a]\nextends = "demo.maml"\nafter = "demo.mamml"')
    assert message.startswith('preset "a" comes after "demo.mamml", which does not exist; the nearest: demo.maml')


def test_an_unknown_measure_lists_the_choices(folder: Path) -> None:
    message = refusal(folder, '[a]\nextends = "demo.maml"\nmeasure = "loss"')
    assert '"measure" expects one of "accuracy", "ensemble accuracy", "sparsity",' in message
    assert '"RA", "BTI", got "loss"' in message


def test_an_unknown_key_of_evaluate_names_the_preset(folder: Path) -> None:
    message = refusal(folder, '[a]\nextends = "demo.maml"\nevaluate = { dat = "cub" }')
    assert message == 'preset a, evaluate: unknown setting "dat"; did you mean "data"?'


def test_a_preset_needs_an_about_from_somewhere(folder: Path) -> None:
    assert refusal(folder, '[a]\nprotocol = "fewshot"').startswith('preset "a" needs an "about"')


def test_loaded_settings_are_the_callers_own(folder: Path) -> None:
    load_preset("demo.maml", folder).settings["model"]["width"] = 1
    assert load_preset("demo.maml", folder).settings["model"]["width"] == 32


def test_unknown_name_gives_the_nearest_and_the_command(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_preset("demo.sparse-mml", folder)
    message = str(caught.value)
    assert message.startswith('no preset is called "demo.sparse-mml"; the nearest: demo.sparse-maml, ')
    assert "`wheretolearn presets`" in message


def test_a_circle_is_shown(folder: Path) -> None:
    text = """
    [a]
    about = "x"
    extends = "b"
    [b]
    about = "x"
    extends = "a"
    """
    assert refusal(folder, text) == "presets extend each other in a circle: a -> b -> a"


def test_extending_something_unknown_names_the_nearest(folder: Path) -> None:
    message = refusal(folder, '[a]\nabout = "x"\nextends = "demo.mamml"')
    assert message.startswith('preset "a" extends "demo.mamml", which does not exist; the nearest: demo.maml')


def test_a_name_in_two_files_names_both(folder: Path) -> None:
    message = refusal(folder, '[demo.maml]\nprotocol = "online"\nabout = "x"')
    assert message == 'preset "demo.maml" is defined twice: in demo.toml and in more.toml'


def test_unknown_key_in_a_preset_names_file_preset_and_nearest(folder: Path) -> None:
    message = refusal(folder, '[a]\nprotocol = "online"\nabout = "x"\nsetings = {}')
    assert message == 'more.toml, preset a: unknown setting "setings"; did you mean "settings"?'


def test_unknown_protocol_lists_the_choices(folder: Path) -> None:
    message = refusal(folder, '[a]\nprotocol = "fewshots"\nabout = "x"')
    assert '"protocol" expects one of "fewshot", "continual", "online" or none, got "fewshots"' in message


def test_a_preset_needs_a_protocol_from_somewhere(folder: Path) -> None:
    assert refusal(folder, '[a]\nabout = "x"').endswith("must name one protocol; found none")


def test_a_preset_cannot_change_the_protocol_it_extends(folder: Path) -> None:
    message = refusal(folder, '[a]\nabout = "x"\nprotocol = "online"\nextends = "demo.maml"')
    assert message.endswith("must name one protocol; found fewshot, online")


def test_a_value_outside_presets_is_refused(folder: Path) -> None:
    assert refusal(folder, "[group]\nsteps = 3") == 'more.toml: "steps" stands outside a preset, in group'


def test_invalid_toml_names_the_file(folder: Path) -> None:
    assert refusal(folder, "a = = b").startswith("more.toml is not valid TOML")


def test_the_presets_of_the_package_are_all_valid() -> None:
    for preset in list_presets():
        assert load_preset(preset.name) == preset
        assert preset.about


SCALES: tuple[Scale, ...] = ("paper", "quick")


@cache
def configs() -> dict[tuple[str, Scale], FewShotConfig]:
    return {
        (preset.name, scale): from_dict(FewShotConfig, preset.settings, where=f"{preset.name} at scale {scale}")
        for scale in SCALES
        for preset in list_presets(scale=scale)
        if preset.protocol == "fewshot"
    }


BUILDING = (
    "model",
    "resnet_size",
    "bias",
    "t_net",
    "head",
    "mask",
    "adapt",
    "adapt_norm",
    "mask_init",
    "initial_sparsity",
)


def test_every_preset_builds_its_network_and_mask_at_both_scales() -> None:
    # What builds the same is built once, on the smallest images and, for conv4, at the smallest width.
    kinds = {tuple(getattr(config, part) for part in BUILDING): config for config in configs().values()}
    assert len(kinds) > 20
    for config in kinds.values():
        model = replace(config, width=4).build_model(16, 1, seed=0)
        sparsity = config.build_mask(model, seed=0).sparsity().overall
        assert 0 <= sparsity <= 1
        if config.initial_sparsity is not None:
            assert sparsity == pytest.approx(config.initial_sparsity, abs=0.02)


def test_every_quick_preset_needs_no_download_and_few_steps() -> None:
    for (name, scale), config in configs().items():
        if scale == "quick" and not name.startswith("demo"):
            assert config.data == "glyphs", name
            assert config.outer_steps <= 300, name
            assert load_preset(name, scale="quick").evaluate.split in ("characters", "scripts"), name


@pytest.mark.parametrize("scale", SCALES)
def test_cells_of_one_training_share_their_settings(scale: Scale) -> None:
    def settings(name: str) -> FewShotConfig:
        return configs()[name, scale]

    for shot in ("shot1", "shot5"):
        for method in ("sparse-maml", "sparse-relu-maml", "sparse-maml-plus"):
            cells = [
                f"table3.{method}.{shot}",
                *(f"table4.{method}.{shot}.{data}" for data in ("tiered", "cub", "cars")),
            ]
            assert {settings(cell) for cell in cells} == {settings(f"table1.{method}.{shot}")}
        assert settings(f"tableS1.small.maml.{shot}.ensemble") == settings(f"table2.maml.{shot}")
    assert settings("figure1.center") == settings("figure1.right.0.5") == settings("figureS1.left")


def test_sparse_maml_has_the_settings_of_the_papers_table() -> None:
    config = configs()["table1.sparse-maml.shot5", "paper"]
    assert (config.inner_steps, config.test_inner_steps, config.inner_lr, config.mask_lr) == (35, 100, 0.25, 0.0075)
    config = configs()["table1.sparse-maml.shot1", "paper"]
    assert (config.shots, config.tasks_per_step, config.inner_lr, config.outer_steps) == (1, 4, 0.1, 40_000)
    assert load_preset("table4.sparse-maml.shot1.cub").evaluate == Evaluate("cub", steps=35)
    assert load_preset("table4.sparse-maml.shot5.tiered").evaluate == Evaluate("tiered-imagenet", steps=100)


@pytest.fixture(scope="module")
def results(real_data: Path) -> dict[str, Any]:
    path = real_data.parent / "paper" / "results.toml"
    if not path.is_file():
        pytest.skip("no list of the paper's numbers beside the real image data")
    return tomllib.loads(path.read_text())


Cells = dict[str, tuple[str, float, float | None]]  # preset, and its measure where it has several: measure, value, std


def cells_by_shot(table: dict[str, Any], prefix: str, measure: str) -> Cells:
    return {
        f"{prefix}.{method}.{shot}": (measure, *pair(numbers))
        for method, row in table.items()
        for shot, numbers in row.items()
        if shot.startswith("shot")
    }


def pair(numbers: list[float]) -> tuple[float, float | None]:
    return numbers[0], numbers[1] if len(numbers) > 1 else None


def cells_of_table4(table: dict[str, Any]) -> Cells:
    return {
        f"table4.{method}.{shot}.{data}": ("accuracy", *pair(numbers))
        for shot, methods in table.items()
        for method, row in methods.items()
        for data, numbers in zip(("tiered", "cub", "cars"), row, strict=True)
    }


def cells_of_table_s1(table: dict[str, Any]) -> Cells:
    cells: Cells = {}
    measures = {"": "accuracy", ".ensemble": "ensemble accuracy", ".sparsity": "sparsity"}
    for row, methods in table.items():
        size, shot = row.split("-")
        for method, columns in methods.items():
            for (ending, measure), numbers in zip(measures.items(), columns, strict=False):
                cells[f"tableS1.{size}.{method}.{shot}{ending}"] = (measure, *pair(numbers))
    return cells


def cells_of_table_s4(table: dict[str, Any]) -> Cells:
    cells: Cells = {}
    for shot, rows in table.items():
        for initial, final, accuracy, std in rows:
            cells[f"tableS4.{shot}.init{initial}"] = ("accuracy", accuracy, std)
            cells[f"tableS4.{shot}.init{initial}.sparsity"] = ("sparsity", final, None)
    return cells


def cells_of_table5(table: dict[str, Any]) -> Cells:
    cells: Cells = {}
    for method, problems in table.items():
        for problem, numbers in problems.items():
            cells[f"table5.{method}.{problem}"] = ("RA", *pair(numbers["ra"]))
            cells[f"table5.{method}.{problem} BTI"] = ("BTI", *pair(numbers["bti"]))
    return cells


def cells_of_table_s5(table: dict[str, Any]) -> Cells:
    cells: Cells = {}
    for problem, methods in table.items():
        for method, (weights, biases, overall) in methods.items():
            name = f"tableS5.{method}.{problem}"
            cells[name] = ("sparsity", overall, None)
            for kind, shares in {"weight": weights, "bias": biases}.items():
                for layer, share in zip(("layer1", "layer2", "head"), shares, strict=True):
                    measure = f"sparsity of {layer}.{kind}"
                    cells[f"{name} {measure}"] = (measure, share, None)
    return cells


TEXT_OF_TABLE_S7: Cells = {  # shares of closed weights, in the text beside the table
    "tableS7.sparse-la-maml.memory200 sparsity": ("sparsity", 1.6, 0.68),
    "tableS7.sparse-la-maml.memory1000 sparsity": ("sparsity", 1.0, 0.70),
    "tableS7.sparse-la-maml.memory200 sparsity of head.weight": ("sparsity of head.weight", 57.5, 0.87),
    "tableS7.sparse-la-maml.memory1000 sparsity of head.weight": ("sparsity of head.weight", 64.75, 0.83),
    "tableS7.la-maml.memory200 sparsity": ("sparsity", 96.3, 1.5),
    "tableS7.la-maml.memory1000 sparsity": ("sparsity", 34.0, 1.39),
}


def cells_of_table_s7(table: dict[str, Any]) -> Cells:
    return TEXT_OF_TABLE_S7 | {
        f"tableS7.{method}.{size.replace('m', 'memory')}": ("RA", *pair(numbers))
        for method, row in table.items()
        for size, numbers in row.items()
    }


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], Cells], int]] = {
    "table1": ("table1", lambda table: cells_by_shot(table, "table1", "accuracy"), 20),
    "table2": ("table2", lambda table: cells_by_shot(table, "table2", "accuracy"), 11),
    "table3": ("table3", lambda table: cells_by_shot(table, "table3", "sparsity"), 6),
    "table4": ("table4", cells_of_table4, 36),
    "tableS1": ("table_s1", cells_of_table_s1, 40),
    "tableS3": ("table_s3", lambda table: {f"tableS3.{n}": ("accuracy", *pair(row)) for n, row in table.items()}, 4),
    "tableS4": ("table_s4", cells_of_table_s4, 8),
    "table5": ("table5", cells_of_table5, 30),
    "tableS5": ("table_s5", cells_of_table_s5, 42),
    "tableS7": ("table_s7", cells_of_table_s7, 16),
}


@pytest.mark.parametrize("table", TABLES)
def test_every_number_of_the_paper_has_exactly_one_preset(results: dict[str, Any], table: str) -> None:
    key, cells, count = TABLES[table]
    stated = cells(results[key])
    assert len(stated) == count
    found = {
        preset.name: (preset.measure, preset.paper.value, preset.paper.std)
        for preset in list_presets()
        if preset.paper is not None and preset.paper.table == table
    }
    found |= {
        f"{preset.name} {measure}": (measure, number.value, number.std)
        for preset in list_presets()
        for measure, number in preset.also.items()
        if number.table == table
    }
    assert found == stated
