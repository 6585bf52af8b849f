"""Figures of online runs: what is drawn is what was measured."""

import csv
import warnings

import pytest
from matplotlib.figure import Figure

from wheretolearn.cli.figures import figures
from wheretolearn.cli.report import report
from wheretolearn.config import to_dict
from wheretolearn.errors import UserError
from wheretolearn.online.config import OnlineConfig
from wheretolearn.report.lines import save
from wheretolearn.report.online import accuracy_by_source, draw, group_runs, read_run, recovery, sparsity_over_time
from wheretolearn.runs.folder import RunFolder

TENSORS = {"block1.conv.weight": 0.9, "block1.norm.weight": 0.1, "block1.conv.bias": 0.2, "head.weight": 0.5}


def make(folder, seed=0, shift=0.0, switches=(1, 4), masked=True, **settings):
    """A run of six steps in two records, with two sources."""
    with RunFolder.create(folder, to_dict(OnlineConfig(steps=6, **settings)), seed, "online") as run:
        accuracies = [0.1 + shift, 0.5, 0.9, 0.2 + shift, 0.4, 0.6]
        for end in (3, 6):
            seen = accuracies[:end]
            run.log(
                end,
                accuracy=sum(seen) / end,
                accuracy_by_source={"letters": seen[0]} | ({"arrows": seen[3]} if end > 3 else {}),
                accuracies=accuracies[end - 3 : end],
                switches=[{"step": s, "source": "letters"} for s in switches if end - 3 < s <= end],
                **({"sparsity_by_tensor": {name: share / end for name, share in TENSORS.items()}} if masked else {}),
            )
        return run


def rows(drawing, folder):
    _, path = save(drawing, folder)
    return list(csv.DictReader(path.read_text().splitlines()))


def test_accuracies_are_means_over_seeds(tmp_path):
    runs = [read_run(make(tmp_path / str(seed), seed, shift)) for seed, shift in ((0, 0.0), (1, 0.06))]
    (group,) = group_runs(runs)
    found = {(row["source"], row["steps"]): row for row in rows(accuracy_by_source(group), tmp_path)}
    assert found.keys() == {("all", "3"), ("all", "6"), ("letters", "3"), ("letters", "6"), ("arrows", "6")}
    assert float(found["all", "3"]["accuracy_mean"]) == pytest.approx((0.5 + 0.52) / 2)
    assert float(found["arrows", "6"]["accuracy_mean"]) == pytest.approx(0.23)
    assert float(found["arrows", "6"]["accuracy_std"]) == pytest.approx(0.06 / 2**0.5)
    assert found["letters", "3"]["runs"] == "2"


def test_recovery_is_of_steps_after_a_change(tmp_path):
    groups = group_runs([read_run(make(tmp_path / "run"))])
    found = rows(recovery(groups), tmp_path)
    assert [(row["step_of_task"], float(row["accuracy_mean"])) for row in found] == [("1", 0.2), ("2", 0.4), ("3", 0.6)]


def test_a_flat_line_is_drawn_without_a_warning(tmp_path):
    with RunFolder.create(tmp_path / "run", to_dict(OnlineConfig(steps=1)), 0, "online") as run:
        run.log(1, accuracy=0.5, accuracy_by_source={"letters": 0.5}, accuracies=[0.5], switches=[])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (group,) = group_runs([read_run(run)])
        low, high = accuracy_by_source(group).figure.axes[0].get_ylim()
    assert low < 0.5 < high


def labels(figure: Figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_sparsity_shows_layers_and_keeps_all_tensors_in_its_data(tmp_path):
    (group,) = group_runs([read_run(make(tmp_path / "run"))])
    drawing = sparsity_over_time(group)
    assert sorted(labels(drawing.figure)) == ["block1.conv weights", "head weights"]
    assert {row["tensor"] for row in rows(drawing, tmp_path)} == TENSORS.keys()


def test_changes_of_the_task_are_drawn_of_a_single_run_only(tmp_path):
    one, two = (read_run(make(tmp_path / str(seed), seed)) for seed in (0, 1))
    alone, both = accuracy_by_source(group_runs([one])[0]), accuracy_by_source(group_runs([one, two])[0])
    assert "Upright lines: the task changes." in alone.caption
    assert "the task changes" not in both.caption


def test_groups_are_named_by_their_learners_and_drawn_together(tmp_path):
    sparse = read_run(make(tmp_path / "sparse"))
    plain = read_run(make(tmp_path / "plain", masked=False, learner="online-adam", lr=0.1))
    drawings = {drawing.stem: drawing for drawing in draw(group_runs([sparse, plain]))}
    assert drawings.keys() == {
        "accuracy-by-source-sparse-c-maml",
        "accuracy-by-source-online-adam",
        "accuracy-over-time",
        "recovery",
        "sparsity-over-time-sparse-c-maml",
    }
    assert sorted(labels(drawings["accuracy-over-time"].figure)) == ["online-adam", "sparse-c-maml"]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"accuracy": 0.5, "accuracy_by_source": {}}'])
def test_a_damaged_result_is_named_by_pages_and_figures(text, tmp_path):
    run = make(tmp_path / "run")
    (run.path / "result.json").write_text(text)
    for draw_it in (lambda: report([run.path], None, tmp_path / "page.html"), lambda: figures([run.path])):
        with pytest.raises(UserError, match=r"run/result\.json is damaged"):
            draw_it()
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert not (run.path / "figures").exists()


def test_a_damaged_record_is_named(tmp_path):
    run = make(tmp_path / "run")
    with RunFolder.open(run.path) as opened:
        opened.log(7, accuracies=[0.5])
        with pytest.raises(UserError, match=r"metrics.jsonl is damaged: its accuracies cannot be read"):
            read_run(opened)
