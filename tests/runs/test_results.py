import json
import math
from pathlib import Path

import pytest

from wheretolearn.errors import ConfigError, UserError
from wheretolearn.runs.results import (
    ResultRecord,
    confidence_interval,
    duration,
    load_all,
    measured,
    save,
    short_commit,
)


def record(**changes: object) -> ResultRecord:
    values: dict[str, object] = {
        "name": "table1.sparse-maml",
        "metric": "accuracy",
        "values": (66.0, 67.0, 68.0),
        "seeds": (0, 1, 2),
        "paper_value": 67.03,
        "paper_std": 0.74,
        "hardware": "one GPU",
        "wall_seconds": 3725.0,
        "commit": "0123456789abcdef+changes",
        "versions": {"torch": "2.11"},
        "config": {"steps": 35, "model": {"width": 64}},
    }
    return ResultRecord(**{**values, **changes})  # type: ignore[arg-type]


def test_mean_and_sample_std_over_seeds() -> None:
    assert record().mean == 67.0
    assert record().std == 1.0
    assert record(values=(1.0, 2.0, 3.0, 4.0), seeds=(0, 1, 2, 3)).std == pytest.approx(math.sqrt(5 / 3))


def test_one_seed_has_no_std() -> None:
    single = record(values=(66.0,), seeds=(0,))
    assert (single.mean, single.std) == (66.0, None)


def test_a_record_without_values_has_no_numbers() -> None:
    empty = record(values=(), seeds=())
    assert (empty.mean, empty.std, empty.difference, empty.within_stds) == (None, None, None, None)


def test_difference_to_the_paper_is_signed() -> None:
    assert record().difference == pytest.approx(-0.03)
    assert record(paper_value=60.0).difference == pytest.approx(7.0)
    assert record(paper_value=None).difference is None


@pytest.mark.parametrize(
    ("paper", "std", "expected"),
    [
        (67.03, 0.74, 1),
        (66.26, 0.74, 1),
        (67.75, 0.74, 2),
        (60.0, 1.0, 7),
        (67.03, None, None),
        (67.03, 0.0, None),
    ],
)
def test_within_how_many_stds_of_the_paper(paper: float, std: float | None, expected: int | None) -> None:
    assert record(paper_value=paper, paper_std=std).within_stds == expected


def test_values_and_seeds_must_match() -> None:
    with pytest.raises(ConfigError, match="3 values for 1 seeds"):
        record(seeds=(0,))


def test_impossible_records_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"x: a seed counts once, got \(3, 3\)"):
        ResultRecord("x", "RA", values=(1.0, 2.0), seeds=(3, 3))
    for wrong in ({"wall_seconds": -1.0}, {"paper_std": -0.1}):
        with pytest.raises(ConfigError, match="x: wall_seconds and paper_std cannot be negative"):
            ResultRecord("x", "RA", values=(1.0,), seeds=(3,), **wrong)  # type: ignore[arg-type]


def test_values_must_be_finite() -> None:
    with pytest.raises(ConfigError, match="must be finite"):
        record(values=(1.0, math.nan, 2.0))


def test_records_are_saved_and_loaded(tmp_path: Path) -> None:
    other = record(name="table5.la-maml", metric="RA / final", values=(77.25,), seeds=(4,))
    paths = [save(record(), tmp_path / "out"), save(other, tmp_path / "out")]
    assert [path.name for path in paths] == [
        "table1.sparse-maml.accuracy.json",
        "table5.la-maml.RA-final.json",
    ]
    assert load_all(tmp_path / "out") == [record(), other]


def test_saving_is_stable_and_shows_the_computed_numbers(tmp_path: Path) -> None:
    first = save(record(), tmp_path).read_bytes()
    assert save(load_all(tmp_path)[0], tmp_path).read_bytes() == first
    values = json.loads(first)
    assert list(values)[:3] == ["name", "metric", "unit"]
    assert (values["mean"], values["std"], values["within_stds"]) == (67.0, 1.0, 1)


def test_no_folder_yet_means_no_records(tmp_path: Path) -> None:
    assert load_all(tmp_path / "none") == []


def test_a_number_changed_by_hand_is_noticed(tmp_path: Path) -> None:
    path = save(record(), tmp_path)
    path.write_text(path.read_text().replace('"mean": 67.0', '"mean": 69.0'))
    with pytest.raises(UserError, match=r"mean is 69\.0, but its values give 67\.0"):
        load_all(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", '{"name": "a"}', '{"name": "a", "metric": "b", "vals": []}'])
def test_a_file_that_is_no_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(UserError, match=r"bad\.json"):
        load_all(tmp_path)


def test_durations_and_commits_are_short() -> None:
    assert [duration(seconds) for seconds in (35.04, 600.0, 3725.0)] == ["35.0 s", "10 min", "1 h 02 min"]
    assert [short_commit(name) for name in ("0123456789abcdef+changes", None)] == ["0123456789+changes", ""]


def test_measured_fills_in_where_and_when() -> None:
    made = measured("demo", "accuracy", {4: 90.0, 5: 92.0}, wall_seconds=1.5, config={"a": 1}, paper_value=91.0)
    assert (made.seeds, made.values, made.mean, made.difference) == ((4, 5), (90.0, 92.0), 91.0, 0.0)
    assert made.hardware
    assert "torch" in made.versions
    assert len(made.date) == len("2024-01-31")


def test_confidence_interval_over_tasks() -> None:
    mean, half_width = confidence_interval([0.0, 1.0] * 200)
    assert mean == 0.5
    assert half_width == pytest.approx(1.959964 * math.sqrt(0.25 * 400 / 399) / 20)


def test_confidence_interval_of_one_value_is_unbounded() -> None:
    assert confidence_interval([3.0]) == (3.0, math.inf)


def test_confidence_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one value"):
        confidence_interval([])
