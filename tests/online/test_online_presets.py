"""The presets of online learning: settings of the paper, and small versions that run anywhere."""

from functools import cache

import pytest

from wheretolearn.config import from_dict
from wheretolearn.online.config import OnlineConfig
from wheretolearn.presets import list_presets, load_preset

METHODS = {
    "online-adam": "online-adam", "fine-tuning": "online-adam", "maml": "maml", "anil": "anil", "bgd": "bgd",
    "metacog": "metacog", "metabgd": "metabgd", "c-maml": "c-maml", "sparse-c-maml": "sparse-c-maml",
    "c-maml-fixed": "c-maml-fixed", "sparse-relu-c-maml": "sparse-relu-c-maml",
}  # fmt: skip
PARTS = ("omniglot", "mnist", "fashion-mnist")


@cache
def configs(scale):
    return {
        preset.name: from_dict(OnlineConfig, preset.settings, where=preset.name)
        for preset in list_presets(scale=scale)
        if preset.protocol == "online"
    }


def test_every_cell_has_a_preset():
    cells = {f"table6.{method}.{p}" for method in METHODS for p in ("p98", "p90")}
    ablated = ("c-maml", "c-maml-fixed", "sparse-c-maml", "sparse-relu-c-maml")
    cells |= {f"tableS9.{method}.{p}" for method in ablated for p in ("p98", "p90")}
    assert configs("paper").keys() == configs("quick").keys() == cells


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "p"), [("p98", 0.98), ("p90", 0.9)])
def test_all_methods_face_the_same_stream(method, name, p):
    config = configs("paper")[f"table6.{method}.{name}"]
    assert config.learner == METHODS[method]
    assert config.p == p
    assert [source.label for source in config.sources] == list(PARTS)
    assert [source.probability for source in config.sources] == [0.5, 0.25, 0.25]
    assert (config.sources[0].classes, config.steps, config.ways, config.shots, config.width) == (
        1000,
        10000,
        10,
        5,
        64,
    )
    assert config.pretrain == (method in ("fine-tuning", "maml", "anil"))
    assert (config.pretrain_classes, config.pretrain_validation_classes) == (900, 100)


@pytest.mark.parametrize(
    ("cell", "lr", "alpha", "gamma"),
    [
        ("c-maml.p98", 0.005, 0.1, 0.005),
        ("c-maml.p90", 0.001, 0.1, 0.001),
        ("c-maml-fixed.p98", 0.005, 0.1, None),
        ("c-maml-fixed.p90", 0.001, 0.3, None),
        ("sparse-c-maml.p98", 0.005, 0.3, 0.01),
        ("sparse-c-maml.p90", 0.001, 0.3, 0.003),
        ("sparse-relu-c-maml.p98", 0.005, None, 0.01),
        ("sparse-relu-c-maml.p90", 0.001, None, 0.01),
    ],
)
def test_c_maml_has_the_papers_settings(cell, lr, alpha, gamma):
    config = configs("paper")[f"tableS9.{cell}"]
    assert config.lr == lr
    assert alpha in (None, config.inner_lr)
    assert gamma in (None, config.mask_lr)
    expected = (3.0, 1000.0) if cell.endswith("p98") else (1.5, 1.0)
    assert (config.switch_margin, config.update_scale) == expected
    assert (config.inner_steps, config.buffer) == (16, 100)


def test_the_papers_numbers_are_those_of_all_steps_and_of_each_set():
    preset = load_preset("table6.sparse-c-maml.p98")
    assert (preset.paper.value, preset.paper.std) == (94.2, 0.4)
    assert [preset.also[f"accuracy on {part}"].value for part in PARTS] == [97.3, 93.4, 86.3]
    for preset in list_presets():
        if preset.name.startswith("table6.") and preset.also:
            total = sum(
                share * preset.also[f"accuracy on {part}"].value
                for share, part in zip((0.5, 0.25, 0.25), PARTS, strict=True)
            )
            inconsistent = preset.name == "table6.sparse-relu-c-maml.p98"
            assert (abs(total - preset.paper.value) > 2) == inconsistent, preset.name
            assert not inconsistent or "do not average" in preset.paper.note


def test_small_versions_need_no_download():
    for config in configs("quick").values():
        assert {source.data for source in config.sources} == {"glyphs"}
        assert config.steps <= 300
        assert config.width <= 16
        assert config.pretrain_steps <= 100
