"""The records in results/ are as results/schema.json says, and say the same as their presets."""

import json
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest

from wheretolearn.presets import Preset
from wheretolearn.reproduce.cells import all_cells, load_records, staleness
from wheretolearn.runs.results import ResultRecord, measured, save

RESULTS = Path(__file__).parents[2] / "results"
SCHEMA = json.loads((RESULTS / "schema.json").read_text())
FILES = [path for folder in ("fewshot", "continual", "online") for path in sorted((RESULTS / folder).glob("*.json"))]


def problems(record: dict[str, object]) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(record)]


def test_the_schema_is_one_and_names_every_field_of_a_record() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    computed = {"mean", "std", "interval", "difference", "within_stds"}
    assert set(SCHEMA["properties"]) == set(SCHEMA["required"]) == {own.name for own in fields(ResultRecord)} | computed


def test_every_record_is_as_the_schema_says() -> None:
    assert len(FILES) > 100
    assert {path.name: found for path in FILES if (found := problems(json.loads(path.read_text())))} == {}


def test_a_new_record_is_as_the_schema_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERETOLEARN_COMMIT", "0123456789")
    record = measured("table5.x at quick scale", "RA", {0: 50.0, 1: 52.0}, wall_seconds=1.0, config={"lr": 0.1})
    assert problems(json.loads(save(record, tmp_path).read_text())) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"seeds": [0, 0]}, "non-unique"),
        ({"values": []}, "non-empty"),
        ({"sparsity": 101}, "maximum"),
        ({"commit": "yesterday"}, "does not match"),
        ({"versions": {}}, "required"),
        ({"better": True}, "Additional properties"),
    ],
)
def test_what_is_wrong_is_found(change: dict[str, object], complaint: str) -> None:
    record = json.loads(FILES[0].read_text()) | change
    assert any(complaint in found for found in problems(record)), problems(record)


def test_no_record_in_the_repository_is_stale_without_being_flagged() -> None:
    """A changed preset makes its records stale: REPRODUCIBILITY.md then says so, and so must this count."""
    presets: dict[str, Preset] = {cell.preset.name: cell.preset for cell in all_cells()}
    records = load_records(RESULTS)
    assert [own.name for own in records if own.name not in presets] == []
    stale = {own.name for own in records if staleness(own, presets[own.name])}
    page = (RESULTS.parent / "REPRODUCIBILITY.md").read_text()
    for name in stale:
        assert f"| {name.partition('.')[2]} |" in page
    assert (" *stale* |" in page) == bool(stale)
