"""The page from records: every cell of every table, and the paper's figures as far as they are on record."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wheretolearn.config import to_dict
from wheretolearn.errors import UserError
from wheretolearn.presets import list_presets, load_preset
from wheretolearn.report.curves import Curves, curves_of, load_curves, matching, save_curves
from wheretolearn.report.paper_figures import FIGURES, OverTime, Redrawn, redrawn
from wheretolearn.report.records import record_page
from wheretolearn.reproduce.cells import all_cells
from wheretolearn.reproduce.protocols import config_of
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import ResultRecord, measured, save


def record(preset: str, metric: str, values: dict[int, float]) -> ResultRecord:
    config = to_dict(config_of(load_preset(preset)))
    return measured(preset, metric, values, wall_seconds=61.0, config=config)


def fake_run(folder: Path, preset: str, seed: int, **changes: object) -> RunFolder:
    """A continual run that measured a sparsity of 10 %, 20 % ... plus its seed, after each of its first three tasks."""
    config = to_dict(config_of(load_preset(preset))) | changes
    with RunFolder.create(folder / f"{preset}-{seed}", config, seed, "continual", preset, "paper") as run:
        for task in range(3):
            share = (10 * (task + 1) + seed) / 100
            shares = {"layer1.weight": share, "layer1.bias": 1.0}
            run.log(100 * (task + 1), task=task, accuracies=[0.5] * 3, sparsity=share, sparsity_by_tensor=shares)
    return run


def test_every_cell_of_every_table_is_on_the_page(tmp_path: Path) -> None:
    ours = record("table5.sparse-la-maml.rotations", "RA", {0: 77.0, 1: 78.0})
    save(ours, tmp_path / "continual")
    save(record("table5.la-maml.rotations", "RA", {0: 60.0}), tmp_path / "continual")
    page = record_page(tmp_path)
    rows = re.findall("<tr>.*?</tr>", page.partition('<section class="card"')[2], flags=re.DOTALL)
    words = [" ".join(re.sub("<wbr>", "", re.sub("<(?!wbr)[^>]*>", " ", row)).split()) for row in rows]
    measures: dict[str, set[str]] = {}
    for cell in all_cells():
        measures.setdefault(cell.table, set()).add(cell.measure)
    for cell in all_cells():
        if cell.table.startswith("table"):
            named = f"{cell.measure} " if len(measures[cell.table]) > 1 else ""  # else the caption names it
            name = f"{cell.preset.name.partition('.')[2]} {named}"
            assert any(row.startswith(name) for row in words), name
    assert "sparse-la-maml.rotations RA 77.77 ± 0.58 77.50 ± 0.71 matches 2 1 min 01 s" in words
    assert "la-maml.rotations RA 77.42 ± 0.65 60.00 misses 1 1 min 01 s" in words
    assert "sgd.rotations RA 53.38 ± 1.53 not run" in words
    for figure in FIGURES:
        assert f'id="{figure.name}"' in page


def test_the_page_says_why_a_number_is_stale_and_what_the_paper_s_stands_for(tmp_path: Path) -> None:
    ours = record("table5.sgd.rotations", "RA", {0: 50.0})
    save(replace(ours, config={**ours.config, "lr": 9.0}), tmp_path / "continual")
    notes = re.findall("<details>.*?</details>", record_page(tmp_path), flags=re.DOTALL)
    (table5,) = (note for note in notes if "La-MAML paper" in note)
    assert "<code>sgd.rotations</code>: stale: made with other settings than the preset&#x27;s: lr=9.0" in table5
    assert "<code>sgd.rotations</code>, <code>sgd.permutations</code>, <code>sgd.many</code>" in table5
    assert any("chosen on seed 100" in note for note in notes)  # a remark on all of Table 6


def test_a_folder_without_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no records"):
        record_page(tmp_path)


def test_records_at_another_scale_are_an_error_not_a_page_of_nothing(tmp_path: Path) -> None:
    ours = record("table5.sgd.many", "RA", {0: 30.0})
    save(replace(ours, name="table5.sgd.many at quick scale"), tmp_path / "continual")
    with pytest.raises(UserError, match="holds no records at the paper's scale"):
        record_page(tmp_path)


def test_figures_cover_every_preset_of_a_figure() -> None:
    """So that none can be run and then not be seen."""
    wanted = {preset.name for preset in list_presets() if preset.name.startswith("figure")}
    shown: set[str] = set()
    for figure in FIGURES:
        for panel in figure.panels:
            if isinstance(panel, OverTime):
                shown |= set(panel.presets.values())
            else:
                prefixes = tuple(f"{prefix}." for prefix, _ in panel.lines.values())
                shown |= {name for name in wanted if name.startswith(prefixes)}
    assert wanted <= shown
    assert [figure.name for figure in FIGURES] == [
        *("figure1", "figure2", "figureS1", "figureS2", "figure3", "figure4", "figureS3", "figureS4", "figureS5")
    ]


def test_curves_are_kept_and_read_again(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path, "table5.la-maml.rotations", seed) for seed in (0, 2)]
    (path,) = save_curves(runs, tmp_path)
    assert path == tmp_path / "curves" / "table5.la-maml.rotations.csv"
    (curves,) = load_curves(tmp_path)
    assert curves.over == "tasks learned"
    weight, bias = curves.lines
    assert (weight.name, bias.name) == ("layer1.weight", "layer1.bias")
    assert weight.x.tolist() == [1, 2, 3]
    assert weight.mean == pytest.approx(np.array([0.11, 0.21, 0.31]))
    assert weight.std == pytest.approx(np.full(3, 0.02 / 2**0.5), abs=1e-5)
    assert bias.runs.tolist() == [2, 2, 2]
    # Figure 3 shows runs of Table 5.
    assert matching([curves], load_preset("figure3.la-maml")) is curves
    assert matching([curves], load_preset("figure3.sparse-la-maml")) is None


def test_runs_that_are_not_their_presets_have_no_part_in_its_curves(tmp_path: Path) -> None:
    name = "table5.la-maml.rotations"
    assert curves_of([fake_run(tmp_path, name, 0, mask_lr=9.0)]) == []
    assert len(curves_of([fake_run(tmp_path, name, 1, log_every=7)])) == 1  # no other experiment
    gone = fake_run(tmp_path, name, 2)
    gone.info["preset"] = "table5.gone"
    assert curves_of([gone]) == []


def test_damaged_curves_are_named(tmp_path: Path) -> None:
    path = tmp_path / "curves" / "table5.la-maml.rotations.csv"
    path.parent.mkdir()
    path.write_text("tensor,tasks_learned,sparsity_mean\n")
    with pytest.raises(UserError, match=r"la-maml.rotations.csv cannot be read as curves"):
        load_curves(tmp_path)


def panels(name: str, records: list[ResultRecord], curves: list[Curves]) -> dict[str, Redrawn]:
    (figure,) = (figure for figure in FIGURES if figure.name == name)
    return {one.panel.where: one for one in redrawn(figure, all_cells(), records, curves)}


def test_a_figure_is_redrawn_as_far_as_it_is_on_record(tmp_path: Path) -> None:
    curves = curves_of([fake_run(tmp_path, "table5.la-maml.rotations", 0)])
    records = [
        record(f"figure3.width.{width}", metric, {0: value, 1: value + 2})
        for width, metric, value in ((50, "RA", 70.0), (50, "sparsity", 9.0), (200, "RA", 75.0))
    ]
    found = panels("figure3", records, curves)
    left, center, right = (found[where] for where in ("left", "center", "right"))
    assert left.missing == ""
    assert left.drawing is not None
    assert ("layer1.weight", 2, 0.2, "", 1) in left.drawing.rows
    assert center.drawing is None
    assert center.missing == "wheretolearn reproduce figure3"
    assert right.drawing is not None
    rows = {tuple(row[:2]): row[2] for row in right.drawing.rows}
    assert rows == pytest.approx(
        {("retained accuracy", 50): 0.71, ("retained accuracy", 200): 0.76, ("closed weights", 50): 0.1}
    )
    assert right.missing


def test_records_of_other_settings_are_not_drawn() -> None:
    stale = record("figureS4.alpha.0.1", "RA", {0: 70.0})
    stale = replace(stale, config={**stale.config, "glances": 99})
    assert panels("figureS4", [stale], [])[""].drawing is None
