"""The page about runs: one section for each stream, with figures that have their data behind them."""

import base64
import csv
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from wheretolearn.cli.common import find_runs
from wheretolearn.cli.report import report
from wheretolearn.errors import UserError
from wheretolearn.report import fewshot
from wheretolearn.report.runs import run_sections
from wheretolearn.report.sections import report_page
from wheretolearn.runs.folder import RunFolder


@pytest.fixture(scope="module")
def page(runs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "page.html"
    report([runs_folder], None, out)
    return out.read_text()


def figures_of(page: str) -> list[str]:
    return re.findall(r'<figure class="shown.*?</figure>', page, flags=re.DOTALL)


def data_of(page: str, name: str) -> list[dict[str, str]]:
    """What the figure's link saves."""
    (held,) = re.findall(rf'href="data:text/csv;charset=utf-8;base64,([^"]*)" download="[^"]*{name}\.csv"', page)
    return list(csv.DictReader(base64.b64decode(held).decode().splitlines()))


def test_every_stream_has_a_section_that_the_contents_name(page: str) -> None:
    headings = re.findall(r'<section class="card" id="([^"]*)">', page)
    assert headings == [
        "few-shot-5-way-1-shot-stripes",
        "continual-3-rotations-of-stripes",
        "online-stripes-p-0-8",
        "the-runs",
    ]
    assert re.findall(r'<a href="#([^"]*)">', page) == headings


def test_every_figure_can_be_saved_and_has_its_data(page: str) -> None:
    figures = figures_of(page)
    titles = [re.findall("<h3>(.*?)</h3>", figure)[0] for figure in figures]
    for start in (
        *("Outer loss", "Validation accuracy", "Weights that cannot change", "Which weights are plastic"),
        *("Do seeds open", "Accuracy on every task after every task", "Accuracy over the stream", "Recovery"),
    ):
        assert any(title.startswith(start) for title in titles), start
    for figure in figures:
        assert "<svg" in figure
        assert 'class="save"' in figure
        assert "base64," in figure.partition('class="tools"')[2]
    names = re.findall(r'data-name="([^"]*)"', page)
    assert len(set(names)) == len(names) == len(figures)


def test_the_data_of_a_figure_is_what_the_run_measured(page: str, runs_folder: Path) -> None:
    runs = [RunFolder.open(runs_folder / f"fewshot-binary-seed{seed}") for seed in (0, 1)]
    found = [row for row in data_of(page, "validation-accuracy") if "binary" in row["runs_of"]]
    assert [row["outer_step"] for row in found] == ["3", "6"]
    for row in found:
        own = [
            record["validation_accuracy"]
            for run in runs
            for record in run.metrics()
            if record["step"] == int(row["outer_step"])
        ]
        assert float(row["accuracy_mean"]) == pytest.approx(sum(own) / 2)
        assert row["runs"] == "2"


def test_a_run_that_was_cut_short_is_drawn_as_far_as_it_is(page: str) -> None:
    steps = [int(row["outer_step"]) for row in data_of(page, "training-loss") if "relu" in row["runs_of"]]
    assert max(steps) == 4
    assert "66.7\u00a0% done" in page


def test_nothing_on_the_page_points_outside_it_and_no_id_comes_twice(page: str) -> None:
    assert not re.findall(r'(?:src|href|action)="(?!data:|#)[^"]*"|url\((?!#)|@import', page)
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(set(ids)) == len(ids)
    for referred in re.findall(r"url\(#([^)]*)\)", page):
        assert referred in ids


def test_numbers_of_a_matrix_do_not_follow_the_theme(page: str) -> None:
    """They stand on cells of the same colours in light and dark."""
    (matrix,) = (figure for figure in figures_of(page) if "after every task: sparse" in figure)
    assert not re.search(r"(fill|stroke): var\(--card\)", matrix)
    assert "#fdfdfd" in matrix


def test_details_tell_seed_settings_and_state(page: str) -> None:
    details = page.partition('id="the-runs"')[2]
    row = next(row for row in re.findall("<tr>.*?</tr>", details, flags=re.DOTALL) if "continual-sgd" in row)
    assert "finished" in row
    assert "learner=&quot;sgd&quot;" in row
    assert "examples=40" in row


def test_names_on_a_page_are_text(runs_folder: Path, tmp_path: Path) -> None:
    source = RunFolder.open(runs_folder / "fewshot-fixed-seed0")
    with RunFolder.create(tmp_path / "<b>&", source.config, 0, "fewshot") as run:
        for record in source.metrics():
            run.log(**record)
    page = report_page("title", "", run_sections([run], lambda _: None))
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;" in page


def test_a_new_run_is_left_out_and_alone_it_is_an_error(runs_folder: Path, tmp_path: Path) -> None:
    old = RunFolder.open(runs_folder / "fewshot-fixed-seed0")
    with RunFolder.create(tmp_path / "new", old.config, 3, "fewshot") as new:
        notes: list[str] = []
        run_sections([old, new], notes.append)
        assert notes == [f"{new.path} has measured nothing yet and is left out"]
        with pytest.raises(UserError, match="nothing to report yet"):
            run_sections([new], notes.append)


def test_of_many_new_runs_some_are_named(runs_folder: Path, tmp_path: Path) -> None:
    old = RunFolder.open(runs_folder / "fewshot-fixed-seed0")
    new = [RunFolder.create(tmp_path / f"new{seed}", old.config, seed, "fewshot") for seed in range(5)]
    for run in new:
        run.close()
    notes: list[str] = []
    run_sections([old, *new], notes.append)
    named = ", ".join(str(run.path) for run in new[:3])
    assert notes == [f"{named} and 2 more have measured nothing yet and are left out"]


def test_damaged_measurements_are_named(runs_folder: Path, tmp_path: Path) -> None:
    with RunFolder.create(
        tmp_path / "run", RunFolder.open(runs_folder / "fewshot-fixed-seed0").config, 0, "fewshot"
    ) as run:
        run.log(1, loss="high")
    with pytest.raises(UserError, match=r"metrics.jsonl is damaged"):
        fewshot.read_run(run)


def test_a_finished_run_whose_metrics_are_gone_is_shown_by_its_result(runs_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(runs_folder / "continual-sgd-seed0", tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    sections = run_sections([RunFolder.open(tmp_path / "run")], lambda _: None)
    assert [section.heading for section in sections] == ["Continual: 3 rotations of stripes", "The runs"]


def test_runs_are_found_at_the_least_depth_that_has_any(
    runs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "runs"
    deep = top / "reproduce" / "quick"
    shutil.copytree(runs_folder / "continual-sgd-seed0", deep / "sgd")
    shutil.copytree(runs_folder / "fewshot-fixed-seed0", top / "tried" / "once" / "fixed")
    shutil.copytree(runs_folder / "fewshot-fixed-seed0", top / "tried" / "once" / "fixed" / "copy")
    shutil.copytree(runs_folder / "fewshot-fixed-seed0", top / ".trash" / "fixed")
    (top / "again").symlink_to(top)  # in a circle
    (top / "closed").mkdir()
    plain = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "closed":
            raise PermissionError
        return plain(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)

    def found() -> list[str]:
        return [str(run.path.relative_to(top)) for run in find_runs([top], lambda _, runs: runs)]

    assert found() == ["reproduce/quick/sgd", "tried/once/fixed"]
    shutil.copytree(runs_folder / "fewshot-fixed-seed0", top / "mine")
    assert found() == ["mine"]  # as before there were deeper ones


def test_mistakes_are_told(runs_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        report([tmp_path / "absent"], None, tmp_path / "page.html")
    with pytest.raises(UserError, match="is not a run folder, and holds none"):
        report([tmp_path], None, tmp_path / "page.html")
    run = runs_folder / "fewshot-fixed-seed0"
    with pytest.raises(UserError, match="is a folder: give -o a file"):
        report([run], None, tmp_path)
    with pytest.raises(UserError, match=r"cannot write .*page\.html: there is no folder .*absent"):
        report([run], None, tmp_path / "absent" / "page.html")
    with pytest.raises(UserError, match="needs the runs"):
        report([], None, tmp_path / "page.html", keep_curves=True)
    with RunFolder.create(tmp_path / "other", {}, 0, "dreaming") as other, pytest.raises(UserError, match="dreaming"):
        report([other.path], None, tmp_path / "page.html")


def test_the_command_writes_a_page_and_tells_mistakes_in_one_line(
    run_command: Callable[..., Any], runs_folder: Path, tmp_path: Path
) -> None:
    run = runs_folder / "continual-sgd-seed0"
    done = run_command("report", run, "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "Continual: 3 rotations of stripes" in (tmp_path / "page.html").read_text()
    failed = run_command("report", "--records", tmp_path, "-o", tmp_path / "other.html")
    assert failed.returncode == 1
    assert failed.stderr.startswith(f"error: {tmp_path} holds no records")
    assert len(failed.stderr.splitlines()) == 1
    assert not (tmp_path / "other.html").exists()
