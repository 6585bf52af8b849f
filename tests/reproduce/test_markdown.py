"""REPRODUCIBILITY.md: complete, true to the records, and up to date."""

import re
from dataclasses import replace
from pathlib import Path

from wheretolearn.config import to_dict
from wheretolearn.presets import load_preset
from wheretolearn.reproduce.cells import all_cells, load_records
from wheretolearn.reproduce.markdown import page
from wheretolearn.reproduce.protocols import config_of
from wheretolearn.runs.results import ResultRecord
from wheretolearn.version import __version__

REPOSITORY = Path(__file__).parents[2]
VERDICTS = {"matches", "better", "**misses**", "*stale*", "not run", "measured"}


def rows(text: str, table: str) -> list[list[str]]:
    """The table of one section, cell by cell."""
    section = re.split(r"^## ", text.partition(f"\n## {table}: ")[2], flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def recorded(metric: str, value: float, **changes: object) -> ResultRecord:
    record = ResultRecord(
        name="table5.mer.many",
        metric=metric,
        values=(value, value),
        seeds=(0, 1),
        versions={"wheretolearn": __version__, "torch": "9.9"},
        config=to_dict(config_of(load_preset("table5.mer.many"))),
        wall_seconds=90.0,
        hardware="an abacus",
        commit="0123456789abcdef",
        date="2026-01-01",
        notes="beads were shared with others",
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def test_the_page_in_the_repository_is_up_to_date() -> None:
    assert (REPOSITORY / "REPRODUCIBILITY.md").read_text(encoding="utf-8") == page(
        load_records(REPOSITORY / "results")
    ), "records or presets have changed: `wheretolearn reproduce --markdown REPRODUCIBILITY.md`"


def test_every_cell_is_there_with_a_verdict() -> None:
    text = page([])
    for table, name in (
        *((f"table{number}", f"Table {number}") for number in "123456"),
        *((f"tableS{number}", f"Table S{number}") for number in "13457"),
        *((f"figure{number}", f"Figure {number}") for number in ("1", "2", "3", "4", "S1", "S2", "S3", "S4")),
    ):
        wanted = [[c.preset.name.partition(".")[2], c.measure] for c in all_cells() if c.table == table]
        assert wanted
        assert [row[:2] for row in rows(text, name)] == wanted
        assert {row[5] for row in rows(text, name)} == {"not run"}


def test_a_cell_shows_both_numbers_the_verdict_and_what_it_took() -> None:
    text = page([recorded("RA", 47.0), recorded("BTI", -25.0), recorded("forward transfer", 0.5)])
    found = {row[1]: row for row in rows(text, "Table 5") if row[0] == "mer.many"}
    assert found["RA"][2:] == ["47.40 ± 0.35", "47.00 ± 0.00", "2", "matches"]
    assert found["BTI"][2:] == ["-17.78 ± 0.39", "-25.00 ± 0.00", "2", "**misses**"]
    assert found["forward transfer"][2:] == ["-", "0.50 ± 0.00", "2", "measured"]
    assert "- `mer.many`: 2 min a run, an abacus, torch 9.9, commit 0123456789, 2026-01-01\n" in text
    assert "- `mer.many`: beads were shared with others\n" in text
    assert "- `sgd.rotations`, `sgd.permutations`, `sgd.many`, `mer.rotations`" in text  # whose numbers the paper took
    assert "`wheretolearn reproduce table5`" in text


def test_what_no_longer_counts_is_shown_as_stale_and_says_why() -> None:
    old = recorded("RA", 47.0, versions={"wheretolearn": "0.0.1"})
    gone = recorded("RA", 47.0, name="table5.gone.many")
    text = page([old, gone])
    assert ["mer.many", "RA", "47.40 ± 0.35", "47.00 ± 0.00", "2", "*stale*"] in rows(text, "Table 5")
    assert "- `mer.many`: stale: made by version 0.0.1\n" in text
    assert "no preset has their names any more: `table5.gone.many` RA" in text


def test_measures_beside_the_papers_can_be_stale_too_and_lost_records_stand_in_no_table() -> None:
    old = recorded("forward transfer", 1.0, versions={"wheretolearn": "0.0.1"})
    lost = recorded("RA", 2.0, name="table5.gone.many")
    text = page([old, lost])
    found = {(row[0], row[1]): row[5] for row in rows(text, "Table 5")}
    assert found["mer.many", "forward transfer"] == "*stale*"
    assert ("gone.many", "RA") not in found
    assert "no preset has their names any more: `table5.gone.many` RA" in text


def test_the_summary_counts_what_the_tables_show() -> None:
    text = page(load_records(REPOSITORY / "results"))
    cells = [row for line in text.splitlines() if line.startswith("| [") for row in [line.strip("|").split("|")]]
    for title, *counts in cells:
        name = re.search(r"\[(.*?)\]", title)[1]  # type: ignore[index]
        shown = [row[5] for row in rows(text, name)]
        assert set(shown) <= VERDICTS
        order = ("matches", "better", "**misses**", "*stale*", "not run")
        assert [int(count or 0) for count in map(str.strip, counts[:5])] == [shown.count(own) for own in order], name


def test_links_of_the_summary_lead_to_headings() -> None:
    text = page([])
    headings = {
        re.sub(r"[^\w\- ]", "", line[3:].lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("## ")
    }
    links = re.findall(r"\]\(#(.*?)\)", text)
    assert len(links) > 15
    assert set(links) <= headings
