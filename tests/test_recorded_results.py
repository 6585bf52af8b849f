"""The records in results/ belong to the presets whose names they have."""

import json
import re
from pathlib import Path

import pytest

from wheretolearn.config import differences, from_dict
from wheretolearn.continual.config import ContinualConfig
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.online.config import OnlineConfig
from wheretolearn.presets import load_preset

CONFIGS = {"fewshot": FewShotConfig, "continual": ContinualConfig, "online": OnlineConfig}
RECORDS = sorted(Path(__file__).parents[1].glob("results/[!b]*/*.json"))  # all but benchmarks


def test_there_are_records():
    assert len(RECORDS) > 100


def states(notes, setting):
    """Whether notes give a setting as NAME=VALUE, and not only as the end or the start of another."""
    return re.search(rf"(^|[ ,]){re.escape(setting)}($|[ ,;])", notes) is not None


@pytest.mark.parametrize(
    ("notes", "stated"),
    [
        ("differs from the preset: inner_steps=35", True),
        ('differs from the preset: precision="tf32", inner_steps=35, adapt="head"; time of one run', True),
        ("inner_steps=35; K_test 10", True),
        ("differs from the preset: validation_inner_steps=35", False),
        ("differs from the preset: inner_steps=3, ways=5", False),
        ("differs from the preset: inner_steps=350", False),
        ("differs from the preset: inner_steps=35.5", False),
        ("", False),
    ],
)
def test_a_setting_is_stated_by_its_whole_name_and_value(notes, stated):
    assert states(notes, "inner_steps=35") == stated


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_has_the_settings_of_its_preset_or_says_where_it_differs(path):
    record = json.loads(path.read_text())
    preset = load_preset(record["name"])
    kind = CONFIGS[preset.protocol]
    ours, stated = (from_dict(kind, settings, where=path.name) for settings in (record["config"], preset.settings))
    differing = differences(stated, ours).values()
    assert [setting for setting in differing if not states(record["notes"], setting)] == []
    assert len(record["values"]) == len(record["seeds"]) == len(set(record["seeds"]))
    assert sum(record["values"]) / len(record["values"]) == pytest.approx(record["mean"])
    for needed in ("commit", "hardware", "wall_seconds", "date", "versions"):
        assert record[needed], needed
