from pathlib import Path

import pytest

from wheretolearn.errors import ConfigError
from wheretolearn.presets import Paper, Preset, list_presets, load_preset

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


def test_presets_are_listed_by_name(folder: Path) -> None:
    names = [preset.name for preset in list_presets(folder)]
    assert names == ["demo.maml", "demo.sparse-maml", "demo.sparse-maml-plus"]


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
