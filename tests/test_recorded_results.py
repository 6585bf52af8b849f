"""The records in results/ belong to the presets whose names they have."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from wheretolearn.config import from_dict
from wheretolearn.continual.config import ContinualConfig
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.online.config import OnlineConfig
from wheretolearn.presets import load_preset

CONFIGS = {"fewshot": FewShotConfig, "continual": ContinualConfig, "online": OnlineConfig}
RECORDS = sorted(Path(__file__).parents[1].glob("results/[!b]*/*.json"))  # all but benchmarks


def test_there_are_records():
    assert len(RECORDS) > 100


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_has_the_settings_of_its_preset_or_says_where_it_differs(path):
    record = json.loads(path.read_text())
    preset = load_preset(record["name"])
    kind = CONFIGS[preset.protocol]
    ours, stated = (from_dict(kind, settings, where=path.name) for settings in (record["config"], preset.settings))
    unused = getattr(ours, "unused", ())
    names = [field.name for field in fields(kind) if field.name not in unused]
    differing = [name for name in names if getattr(ours, name) != getattr(stated, name)]
    assert [name for name in differing if f"{name}=" not in record["notes"]] == []
    assert len(record["values"]) == len(record["seeds"]) == len(set(record["seeds"]))
    assert sum(record["values"]) / len(record["values"]) == pytest.approx(record["mean"])
    for needed in ("commit", "hardware", "wall_seconds", "date", "versions"):
        assert record[needed], needed
