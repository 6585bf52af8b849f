"""Cells: what there is, what is recorded of it, and how it compares."""

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from wheretolearn.config import to_dict
from wheretolearn.errors import ConfigError
from wheretolearn.presets import Paper, load_preset
from wheretolearn.reproduce.cells import all_cells, cells_named, compare, default_seeds, load_records, look_up
from wheretolearn.reproduce.protocols import config_of
from wheretolearn.runs.records import record_name
from wheretolearn.runs.results import ResultRecord, save
from wheretolearn.version import __version__

TABLES = ["table1", "table2", "table3", "table4", "table5", "table6"]
TABLES += ["tableS1", "tableS3", "tableS4", "tableS5", "tableS7"]
SOURCES = ["accuracy", "accuracy on omniglot", "accuracy on mnist", "accuracy on fashion-mnist"]
TENSORS = ["layer1.weight", "layer2.weight", "head.weight", "layer1.bias", "layer2.bias", "head.bias"]


def recorded(preset: str, metric: str, values: tuple[float, ...] = (50.0, 52.0), **changes: object) -> ResultRecord:
    record = ResultRecord(
        name=preset,
        metric=metric,
        values=values,
        seeds=tuple(range(len(values))),
        versions={"wheretolearn": __version__},
        config=to_dict(config_of(load_preset(preset))),
        wall_seconds=60.0,
        hardware="an abacus",
        date="2026-01-01",
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def paper_numbers(tables: dict[str, dict]) -> Iterator[tuple[str, str, list[float]]]:
    """(row, measure, [value, std]) of every number of the paper's tables, with the names of presets."""
    for table in ("table1", "table2", "table3"):
        for method, own in tables[table].items():
            for shots in ("shot1", "shot5"):
                if shots in own:
                    yield f"{table}.{method}.{shots}", "sparsity" if table == "table3" else "accuracy", own[shots]
    for shots, methods in tables["table4"].items():
        for method, numbers in methods.items():
            for data, number in zip(("tiered", "cub", "cars"), numbers, strict=True):
                yield f"table4.{method}.{shots}.{data}", "accuracy", number
    for method, problems in tables["table5"].items():
        for problem, own in problems.items():
            yield f"table5.{method}.{problem}", "RA", own["ra"]
            yield f"table5.{method}.{problem}", "BTI", own["bti"]
    for method, streams in tables["table6"].items():
        group = "tableS9" if method == "c-maml-fixed" else "table6"  # the supplement has it
        for p in ("p98", "p90"):
            for measure, number in zip(SOURCES, streams[p], strict=False):
                yield f"{group}.{method}.{p}", measure, number
    for size_and_shots, methods in tables["table_s1"].items():
        size, shots = size_and_shots.split("-")
        for method, numbers in methods.items():
            row = f"tableS1.{size}.{method}.{shots}"
            names = [(row, "accuracy"), (f"{row}.ensemble", "ensemble accuracy"), (f"{row}.sparsity", "sparsity")]
            for (name, measure), number in zip(names, numbers, strict=False):
                yield name, measure, number
    for method, number in tables["table_s3"].items():
        yield f"tableS3.{method}", "accuracy", number
    for shots, rows in tables["table_s4"].items():
        for initial, final, *accuracy in rows:
            yield f"tableS4.{shots}.init{initial}", "accuracy", accuracy
            yield f"tableS4.{shots}.init{initial}.sparsity", "sparsity", [final]
    for problem, methods in tables["table_s5"].items():
        for method, (weights, biases, overall) in methods.items():
            yield f"tableS5.{method}.{problem}", "sparsity", [overall]
            for tensor, share in zip(TENSORS, [*weights, *biases], strict=True):
                yield f"tableS5.{method}.{problem}", f"sparsity of {tensor}", [share]
    for method, sizes in tables["table_s7"].items():
        for size, number in sizes.items():
            yield f"tableS7.{method}.{size.replace('m', 'memory')}", "RA", number


def test_every_number_of_the_papers_tables_is_a_cell(real_data: Path) -> None:
    source = real_data.parent / "paper" / "results.toml"
    if not source.exists():
        pytest.skip("no list of the paper's numbers beside the real image data")
    cells = {(cell.preset.name, cell.measure): cell.paper for cell in all_cells()}
    count = 0
    for row, measure, number in paper_numbers(tomllib.loads(source.read_text())):
        paper = cells[row, measure]
        assert paper is not None, row
        assert [paper.value, *([paper.std] if len(number) > 1 else [])] == number, row
        count += 1
    assert count > 250


def test_all_tables_have_cells_table_by_table() -> None:
    tables = list(dict.fromkeys(cell.table for cell in all_cells()))
    assert [table for table in tables if table in TABLES] == TABLES
    first_figure = next(place for place, table in enumerate(tables) if table.startswith("figure"))
    assert all(table.startswith("figure") for table in tables[first_figure:])
    assert not any(cell.preset.name.startswith("demo") for cell in all_cells())


def test_cells_are_named_by_table_row_or_group_in_any_case() -> None:
    assert {cell.preset.name for cell in cells_named(["TABLES5"])} == {
        f"tableS5.{method}.{problem}"
        for method in ("la-maml", "sparse-la-maml")
        for problem in ("rotations", "permutations", "many")
    }
    assert len(cells_named(["table5.sparse-la-maml"])) == 6  # RA and BTI of three problems
    assert [cell.measure for cell in cells_named(["table5.sparse-la-maml.many", "table5.sparse-la-maml"])] == [
        "RA", "BTI", "RA", "BTI", "RA", "BTI",
    ]  # fmt: skip


def test_rows_keep_cells_by_whole_parts_of_their_names() -> None:
    names = {cell.preset.name for cell in cells_named(["table5"], ["la-maml", "gem.many"])}
    assert names == {
        "table5.la-maml.rotations",
        "table5.la-maml.permutations",
        "table5.la-maml.many",
        "table5.gem.many",
    }


def test_a_decimal_is_one_part_of_a_name() -> None:
    assert {cell.preset.name for cell in cells_named(["figure1.left.0"])} == {"figure1.left.0"}
    assert {cell.preset.name for cell in cells_named(["figure1", "figureS1"], ["right.0"])} == {
        "figure1.right.0",
        "figureS1.right.0",
    }
    assert {cell.preset.name for cell in cells_named(["figure1"], ["0.25"])} == {
        "figure1.left.0.25",
        "figure1.right.0.25",
    }


def test_rows_without_names_are_looked_for_everywhere() -> None:
    assert {cell.table for cell in cells_named([], ["boil.shot5"])} == {"table1", "table2", "table4"}
    with pytest.raises(ConfigError, match="no row of any table is called 'bowl'; see `reproduce --list`"):
        cells_named([], ["bowl"])


@pytest.mark.parametrize("nothing", ["", "."])
def test_an_empty_name_does_not_mean_everything(nothing: str) -> None:
    with pytest.raises(ConfigError, match="no table, figure or row is called"):
        cells_named([nothing])
    with pytest.raises(ConfigError, match="no row of table6 is called"):
        cells_named(["table6"], [nothing])


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'figureS4\.alpa'; the nearest: figureS4\.alpha, "):
        cells_named(["figureS4.alpa"])
    with pytest.raises(ConfigError, match=r"no table, figure or row is called 'tabel5'; the nearest: .*table5"):
        cells_named(["tabel5"])
    with pytest.raises(ConfigError, match=r"no row of table3 is called 'gem'; there are: sparse-relu-maml\.shot1, "):
        cells_named(["table3"], ["gem"])


def test_seeds_are_the_papers() -> None:
    assert [default_seeds(table, "paper") for table in ("table5", "table2", "figure3")] == [5, 3, 3]
    assert [default_seeds(table, "quick") for table in ("table1", "table5", "table6")] == [3, 5, 2]


@pytest.mark.parametrize(
    ("values", "paper", "measure", "verdict"),
    [
        ((49.0, 49.0), (50.0, 0.5), "RA", "matches"),  # exactly two standard deviations
        ((48.9, 48.9), (50.0, 0.5), "RA", "misses"),
        ((51.1, 51.1), (50.0, 0.5), "RA", "better"),
        ((51.1, 51.1), (50.0, 0.5), "sparsity of head.bias", "misses"),  # more is not better
        ((51.0,), (50.0, None), "sparsity", "matches"),  # one point
        ((51.2,), (50.0, None), "sparsity", "misses"),
        ((51.2, 53.2), (50.0, None), "sparsity", "matches"),  # two of ours: 2 * 1.41
        ((-7.0, -7.2), (-8.0, 0.1), "BTI", "better"),
    ],
)
def test_verdicts(values: tuple[float, ...], paper: tuple[float, float | None], measure: str, verdict: str) -> None:
    record = ResultRecord("x", measure, values=values, seeds=tuple(range(len(values))))
    assert compare(record, Paper("t", *paper), measure) == verdict


def test_a_cell_is_answered_by_its_record_or_by_one_of_the_same_runs_and_measure() -> None:
    records = [recorded("table1.sparse-maml.shot5", "sparsity"), recorded("table1.sparse-maml.shot5", "accuracy")]
    found = {(one.cell.preset.name, one.cell.measure): one for one in look_up(all_cells(), records)}
    assert found["table3.sparse-maml.shot5", "sparsity"].record is records[0]
    assert found["table1.sparse-maml.shot5", "accuracy"].record is records[1]
    assert found["tableS3.sparse-maml", "accuracy"].record is records[1]
    # The same training, but tested on other images, or another training.
    assert found["table4.sparse-maml.shot5.cub", "accuracy"].status == "not run"
    assert found["table3.sparse-maml.shot1", "sparsity"].status == "not run"


def test_of_several_records_the_valid_the_own_and_the_one_with_more_seeds_come_first() -> None:
    (cell,) = [own for own in cells_named(["tableS3.sparse-maml"]) if own.measure == "accuracy"]
    own = recorded("tableS3.sparse-maml", "accuracy")
    stale = replace(own, versions={"wheretolearn": "0.0.1"})
    other = recorded("table1.sparse-maml.shot5", "accuracy", values=(1.0, 2.0, 3.0))
    assert look_up([cell], [other, own])[0].record is own
    assert look_up([cell], [stale, other])[0].record is other
    fewer = recorded("table1.sparse-maml.shot5", "accuracy", values=(1.0,))
    assert look_up([cell], [fewer, other])[0].record is other


def test_a_record_of_other_settings_or_another_version_is_stale() -> None:
    good = recorded("table5.la-maml.many", "RA")
    watched = recorded("table5.la-maml.many", "RA", config=good.config | {"log_every": 7})
    other = recorded("table5.la-maml.many", "RA", config=good.config | {"mask_lr": 9.0})
    gone = recorded("table5.la-maml.many", "RA", config=good.config | {"warp": 1})
    old = recorded("table5.la-maml.many", "RA", versions={"wheretolearn": "0.0.1"})
    cell = next(cell for cell in cells_named(["table5.la-maml.many"]) if cell.measure == "RA")
    found = [look_up([cell], [record])[0] for record in (good, watched, other, gone, old)]
    assert [one.status for one in found] == ["recorded", "recorded", "stale", "stale", "stale"]
    assert found[2].stale == "made with other settings than the preset's: mask_lr=9.0"
    assert found[3].stale == 'its settings: unknown setting "warp"'
    assert found[4].stale == "made by version 0.0.1"
    assert [one.verdict for one in found[2:]] == [None, None, None]


def test_settings_without_effect_on_a_learner_make_no_record_stale() -> None:
    config = recorded("table6.bgd.p98", "accuracy").config
    (cell, *_) = cells_named(["table6.bgd.p98"])
    for change, expected in (({"buffer": 7}, "recorded"), ({"samples": 7}, "stale")):
        (found,) = look_up([cell], [recorded("table6.bgd.p98", "accuracy", config=config | change)])
        assert found.status == expected


def test_records_are_read_from_a_folder_and_from_those_of_the_protocols_in_it(tmp_path: Path) -> None:
    save(recorded("table6.bgd.p98", "accuracy"), tmp_path)
    save(recorded("table5.la-maml.many", "RA"), tmp_path / "continual")
    save(recorded("table1.sparse-maml.shot5", "accuracy"), tmp_path / "fewshot")
    (tmp_path / "schema.json").write_text("{}")
    (tmp_path / "package.json").write_text('{"name": "of something else"}')
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "x.json").write_text("{}")
    names = [own.name for own in load_records(tmp_path)]
    assert names == ["table6.bgd.p98", "table1.sparse-maml.shot5", "table5.la-maml.many"]


def test_cells_of_the_quick_scale_have_no_paper_numbers_and_measure_what_its_streams_have() -> None:
    cells = cells_named(["table6.c-maml.p98"], scale="quick")
    assert [(cell.measure, cell.paper) for cell in cells] == [("accuracy", None)]
    record = recorded("table6.c-maml.p98", "accuracy")
    small = replace(record, name=record_name("table6.c-maml.p98", "quick"), config=to_dict(config_of(cells[0].preset)))
    assert look_up(cells, [record], "quick")[0].status == "not run"
    assert look_up(cells, [small], "quick")[0].status == "recorded"
