"""Figures of continual runs, from folders that hold made-up measurements."""

import csv
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from wheretolearn.cli.figures import figures
from wheretolearn.config import to_dict
from wheretolearn.continual.config import ContinualConfig
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.report.continual import (
    WHITE,
    ContinualRun,
    accuracy_matrix,
    accuracy_over_tasks,
    draw,
    group_runs,
    read_run,
    sparsity_over_tasks,
    sparsity_within_tasks,
    sweep,
    swept_setting,
)
from wheretolearn.report.lines import save
from wheretolearn.runs.folder import RunFolder
from wheretolearn.storage import read_json, write_json

TENSORS = ("layer1.weight", "layer1.bias", "head.weight", "head.bias")
BATCHES = 4  # of each task


def accuracy(seed: int, learned: int, tested: int) -> float:
    return 0.9 - 0.05 * (learned - tested) + 0.01 * seed if tested <= learned else 0.1


def share(seed: int, batches: int, tensor: int) -> float:
    return batches * (tensor + 1) / 100 + 0.02 * seed


def fake_run(path: Path, seed: int, tasks: int = 3, learned: int | None = None, **settings: Any) -> Path:
    """A run that has learned some of its tasks, and is finished where it has learned all."""
    config = ContinualConfig(tasks=tasks, **settings)
    masked = config.learner != "sgd"
    matrix = [[accuracy(seed, i, j) for j in range(tasks)] for i in range(tasks)]
    with RunFolder.create(path, to_dict(config), seed, "continual") as run:
        for batch in range(1, BATCHES * (tasks if learned is None else learned) + 1):
            task, place = divmod(batch, BATCHES)
            values: dict[str, Any] = {}
            if place == 0:
                row = matrix[task - 1]
                values = {"task": task - 1, "accuracies": row, "accuracy": statistics.fmean(row[:task])}
            if masked and batch % 2 == 0:
                shares = {name: share(seed, batch, number) for number, name in enumerate(TENSORS)}
                values |= {"sparsity": shares["layer1.weight"], "sparsity_by_tensor": shares}
            if values:
                run.log(batch, **values)
        if learned is None:
            measured: dict[str, Any] = {"ra": statistics.fmean(matrix[-1]), "accuracy_matrix": matrix}
            measured |= {"bti": -0.1, "forward_transfer": 0.0, "seconds": 1.0, "runs_at_once": 1}
            if masked:
                measured |= {"sparsity": 0.3 + seed / 100 - config.width / 1000, "sparsity_by_tensor": {}}
            write_json(run.path / "result.json", measured)
    return path


def two_seeds(folder: Path, **settings: Any) -> list[ContinualRun]:
    return [read_run(RunFolder.open(fake_run(folder / f"seed{seed}", seed, **settings))) for seed in (0, 1)]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts if isinstance(text, Annotation)]


def test_the_matrix_holds_means_and_deviations_over_seeds(tmp_path: Path) -> None:
    (group,) = group_runs(two_seeds(tmp_path))
    svg, table = save(accuracy_matrix(group), tmp_path)
    rows = rows_of(table)
    assert len(rows) == 9
    for row in rows:
        values = [accuracy(seed, int(row["task_learned"]) - 1, int(row["task_tested"]) - 1) for seed in (0, 1)]
        assert float(row["accuracy_mean"]) == pytest.approx(statistics.fmean(values))
        assert float(row["accuracy_std"]) == pytest.approx(statistics.stdev(values))
        assert row["runs"] == "2"
    text = svg.read_text()
    for words in ("Accuracy on every task after every task", "task tested", "last task learned", "mean of 2 seeds"):
        assert words in text


def test_a_matrix_writes_its_numbers_for_20_tasks_and_not_for_21(tmp_path: Path) -> None:
    few, many = (
        group_runs([read_run(RunFolder.open(fake_run(tmp_path / str(tasks), 0, tasks=tasks)))])[0] for tasks in (20, 21)
    )
    drawn = accuracy_matrix(few).figure.axes[0]
    assert [text.get_text() for text in drawn.texts][:2] == ["90", "10"]
    assert len(drawn.texts) == 400
    assert not accuracy_matrix(many).figure.axes[0].texts


def test_numbers_of_a_matrix_stand_out_from_their_cells(tmp_path: Path) -> None:
    (group,) = group_runs(two_seeds(tmp_path))
    inks = {text.get_text(): text.get_color() for text in accuracy_matrix(group).figure.axes[0].texts}
    assert inks["90"] == "black"
    assert inks["10"] == WHITE


def test_accuracy_over_tasks_is_the_mean_over_tasks_seen(tmp_path: Path) -> None:
    (group,) = group_runs(two_seeds(tmp_path))
    drawing = accuracy_over_tasks([group])
    _, table = save(drawing, tmp_path)
    expected = [
        statistics.fmean(accuracy(seed, task, seen) for seed in (0, 1) for seen in range(task + 1)) for task in range(3)
    ]
    assert [float(row["accuracy_mean"]) for row in rows_of(table)] == pytest.approx(expected)
    assert labels(drawing.figure) == ["sparse-la-maml"]


def test_sparsity_has_a_line_per_tensor_biases_dashed(tmp_path: Path) -> None:
    (group,) = group_runs(two_seeds(tmp_path))
    drawing = sparsity_over_tasks(group)
    assert labels(drawing.figure) == ["layer1 weights", "layer1 biases", "head weights", "head biases"]
    assert [line.get_linestyle() for line in drawing.figure.axes[0].lines] == ["-", "--", "-", "--"]
    svg, table = save(drawing, tmp_path)
    assert "layer1 biases" in svg.read_text()
    rows = rows_of(table)
    assert [row["tensor"] for row in rows] == [name for name in TENSORS for _ in range(3)]
    for row in rows:
        values = [share(seed, BATCHES * int(row["tasks_learned"]), TENSORS.index(row["tensor"])) for seed in (0, 1)]
        assert float(row["sparsity_mean"]) == pytest.approx(statistics.fmean(values))
        assert float(row["sparsity_std"]) == pytest.approx(statistics.stdev(values))


def test_several_passes_show_sparsity_within_tasks(tmp_path: Path) -> None:
    (group,) = group_runs(two_seeds(tmp_path, epochs=10))
    assert [drawing.stem for drawing in draw([group])][-1] == "sparsity-within-tasks"
    drawing = sparsity_within_tasks(group)
    axes = drawing.figure.axes[0]
    upright = [line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1]
    assert upright == [4, 8, 12]  # where tasks end
    assert {"task 1", "task 2", "task 3"} <= {text.get_text() for text in axes.texts}
    assert [row[1] for row in drawing.rows[:6]] == [2, 4, 6, 8, 10, 12]


def test_one_pass_has_no_figure_within_tasks(tmp_path: Path) -> None:
    stems = [drawing.stem for drawing in draw(group_runs(two_seeds(tmp_path)))]
    assert stems == ["accuracy-matrix", "accuracy-over-tasks", "sparsity-over-tasks"]


def test_a_learner_without_mask_has_no_sparsity(tmp_path: Path) -> None:
    stems = [drawing.stem for drawing in draw(group_runs(two_seeds(tmp_path, learner="sgd")))]
    assert stems == ["accuracy-matrix", "accuracy-over-tasks"]


def test_a_single_run_has_no_deviation(tmp_path: Path) -> None:
    (group,) = group_runs(two_seeds(tmp_path)[:1])
    drawing = accuracy_over_tasks([group])
    assert [row[3:] for row in drawing.rows] == [("", 1)] * 3
    assert not drawing.figure.axes[0].collections  # no band
    assert "seeds" not in drawing.caption


def test_runs_that_differ_in_seed_only_are_one_group(tmp_path: Path) -> None:
    runs = [*two_seeds(tmp_path / "wide", width=100), *two_seeds(tmp_path / "narrow", width=20)]
    groups = group_runs(runs)
    assert [(group.label, group.slug, len(group.runs)) for group in groups] == [
        ("width 20", "width-20", 2),
        ("width 100", "width-100", 2),
    ]
    assert labels(accuracy_over_tasks(groups).figure) == ["width 20", "width 100"]


def test_runs_that_differ_in_many_settings_have_file_names_of_bearable_length(tmp_path: Path) -> None:
    many = {"lr": 0.123, "mask_lr": 0.4, "memory": 17, "replay_batch": 6, "meta_loss": "final", "clip_norm": 1.5}
    many |= {"straight_through_scale": 0.3, "memory_strength": 0.2, "mer_steps": 4, "mer_beta": 0.6, "mer_gamma": 0.7}
    settings: list[dict[str, Any]] = [{}, many, {**many, "mer_gamma": 0.8}, {**many, "mer_gamma": 0.9}]
    runs = [run for number, own in enumerate(settings) for run in two_seeds(tmp_path / str(number), **own)]
    groups = group_runs(runs)
    assert all(len(group.label) > 100 for group in groups)
    assert len({group.slug for group in groups}) == 4
    assert all(40 < len(group.slug) < 85 for group in groups)
    assert len({drawing.stem for drawing in draw(groups)}) == len(draw(groups))


def test_the_same_seed_twice_is_refused(tmp_path: Path) -> None:
    runs = [read_run(RunFolder.open(fake_run(tmp_path / name, 0))) for name in ("a", "b")]
    with pytest.raises(ConfigError, match="same seed 0"):
        group_runs(runs)


def test_a_sweep_finds_the_setting_and_its_means(tmp_path: Path) -> None:
    groups = group_runs([run for width in (50, 20) for run in two_seeds(tmp_path / str(width), width=width)])
    assert swept_setting(groups) == "width"
    drawing = sweep(groups)
    assert drawing.columns == (
        "width",
        *("ra_mean", "ra_std", "ra_runs"),
        *("sparsity_mean", "sparsity_std", "sparsity_runs"),
    )
    ra = [statistics.fmean(accuracy(seed, 2, tested) for tested in range(3)) for seed in (0, 1)]
    expected = [statistics.fmean(ra), statistics.stdev(ra), 2]
    for row, width in zip(drawing.rows, (20, 50), strict=True):
        sparsity = [0.3 + seed / 100 - width / 1000 for seed in (0, 1)]
        assert list(row) == pytest.approx([width, *expected, statistics.fmean(sparsity), statistics.stdev(sparsity), 2])
    upper, lower = drawing.figure.axes
    assert upper.get_shared_x_axes().joined(upper, lower)
    assert [label.get_text() for label in lower.get_xticklabels()] == ["20", "50"]


def test_a_sweep_over_far_values_is_logarithmic(tmp_path: Path) -> None:
    rates = (0.01, 0.1, 0.5)
    runs = [read_run(RunFolder.open(fake_run(tmp_path / str(lr), 0, lr=lr))) for lr in rates]
    assert sweep(group_runs(runs)).figure.axes[0].get_xscale() == "log"


def test_a_sweep_over_words_draws_points_apart(tmp_path: Path) -> None:
    learners = ("sgd", "la-maml")
    runs = [read_run(RunFolder.open(fake_run(tmp_path / name, 0, learner=name))) for name in learners]
    drawing = sweep(group_runs(runs))
    assert [row[0] for row in drawing.rows] == list(learners)
    assert drawing.rows[0][4:] == ("", "", 0)  # SGD has no mask
    assert drawing.figure.axes[0].lines[0].get_linestyle() == "None"


def test_a_sweep_needs_one_setting_that_differs(tmp_path: Path) -> None:
    alike = two_seeds(tmp_path / "alike")
    with pytest.raises(ConfigError, match="same settings but for seeds"):
        swept_setting(group_runs(alike))
    other = read_run(RunFolder.open(fake_run(tmp_path / "other", 0, width=20, lr=0.3)))
    with pytest.raises(ConfigError, match="differ in width and lr"):
        sweep(group_runs([*alike, other]))


def test_a_sweep_leaves_out_unfinished_runs(tmp_path: Path) -> None:
    runs = two_seeds(tmp_path / "done", width=20)
    runs.append(read_run(RunFolder.open(fake_run(tmp_path / "going", 0, learned=2, width=50))))
    with pytest.raises(ConfigError, match="finished runs with at least two values"):
        sweep(group_runs(runs))


def test_an_unfinished_run_is_drawn_as_far_as_it_is(tmp_path: Path) -> None:
    done = read_run(RunFolder.open(fake_run(tmp_path / "done", 0)))
    going = read_run(RunFolder.open(fake_run(tmp_path / "going", 1, learned=2)))
    assert going.tasks_learned == 2
    (group,) = group_runs([done, going])
    over_tasks = accuracy_over_tasks([group])
    assert [row[-1] for row in over_tasks.rows] == [2, 2, 1]
    assert over_tasks.rows[2][2] == pytest.approx(statistics.fmean(accuracy(0, 2, seen) for seen in range(3)))
    assert "mean of 1 to 2 seeds" in over_tasks.caption
    assert {row[0]: row[-1] for row in accuracy_matrix(group).rows} == {1: 2, 2: 2, 3: 1}


def test_tasks_that_no_run_has_reached_stay_blank(tmp_path: Path) -> None:
    (group,) = group_runs([read_run(RunFolder.open(fake_run(tmp_path / "going", 1, learned=1)))])
    drawing = accuracy_matrix(group)
    assert len(drawing.rows) == 3
    (drawn,) = drawing.figure.axes[0].collections
    assert np.ma.count_masked(drawn.get_array()) == 6


def test_the_same_runs_give_the_same_files(tmp_path: Path) -> None:
    runs = [run for width in (50, 20) for run in two_seeds(tmp_path / str(width), width=width, epochs=2)]
    contents = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        groups = group_runs(runs)
        paths = [path for drawing in [*draw(groups), sweep(groups)] for path in save(drawing, tmp_path / name)]
        contents.append({path.name: path.read_bytes() for path in paths})
    assert len(contents[0]) == 2 * (2 * 3 + 2)
    assert contents[0] == contents[1]


def test_names_in_any_script_can_be_drawn(tmp_path: Path) -> None:
    (group,) = group_runs(two_seeds(tmp_path, data="\u4e2d$x^{<&"))
    for drawing in draw([group]):
        svg, _ = save(drawing, tmp_path)
        assert "\u4e2d$x^{&lt;&amp;" in svg.read_text()


@pytest.mark.parametrize(
    "damage", [{"accuracy_matrix": [[0.1, 0.2]]}, {"accuracy_matrix": None}, {"ra": "high"}, {"bti": None}]
)
def test_a_damaged_result_names_its_file(damage: dict[str, Any], tmp_path: Path) -> None:
    path = fake_run(tmp_path / "run", 0)
    write_json(path / "result.json", read_json(path / "result.json") | damage)
    with pytest.raises(UserError, match=r"run/result\.json is damaged"):
        read_run(RunFolder.open(path))


def test_the_command_draws_a_folder_of_runs(run_command: Any, tmp_path: Path) -> None:
    for width in (20, 50):
        for seed in (0, 1):
            fake_run(tmp_path / f"width{width}-seed{seed}", seed, width=width)
    result = run_command("figures", tmp_path)
    assert result.returncode == 0, result.stderr
    stems = ["accuracy-over-tasks", "sweep-width"]
    stems += [f"{what}-width-{width}" for what in ("accuracy-matrix", "sparsity-over-tasks") for width in (20, 50)]
    files = {tmp_path / "figures" / f"{stem}.{ending}" for stem in stems for ending in ("svg", "csv")}
    assert set((tmp_path / "figures").iterdir()) == files
    assert set(result.stdout.splitlines()) == {f"wrote {file}" for file in files}
    assert not result.stderr


def test_the_command_says_what_it_cannot_draw(run_command: Any, tmp_path: Path) -> None:
    fake_run(tmp_path / "runs" / "done", 0, learner="sgd")
    fake_run(tmp_path / "runs" / "going", 0, learned=1, lr=0.3)
    fake_run(tmp_path / "runs" / "new", 1, learned=0, lr=0.3)
    RunFolder.create(tmp_path / "runs" / "other", {}, 0, "fewshot").close()
    result = run_command("figures", tmp_path / "runs", "-o", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    notes = result.stderr.splitlines()
    expected = [
        "other is a run of the protocol fewshot, left out",
        "going is not finished: drawn as far as it is, 1 of 3 tasks learned",
        "new has measured nothing yet and is left out",
        "no sweep is drawn: these runs differ in learner and lr",
        "no sparsity is drawn of sgd",
    ]
    for words in expected:
        assert sum(words in note for note in notes) == 1
    assert len(notes) == len(expected)
    assert (tmp_path / "out" / "accuracy-over-tasks.svg").exists()


def test_the_command_puts_figures_where_given_runs_meet(run_command: Any, tmp_path: Path) -> None:
    first, second = (fake_run(tmp_path / name / "run", seed) for seed, name in enumerate(("a", "b")))
    assert run_command("figures", first, second).returncode == 0
    rows = rows_of(tmp_path / "figures" / "accuracy-over-tasks.csv")
    assert [row["runs"] for row in rows] == ["2", "2", "2"]
    assert all(math.isfinite(float(row["accuracy_std"])) for row in rows)


def test_a_mistake_is_one_message(run_command: Any, tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "few", {}, 0, "fewshot").close()
    result = run_command("figures", tmp_path / "few")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "fewshot: figures are drawn of continual and online runs; `wheretolearn report" in result.stderr


def test_folders_without_runs_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder, and holds none"):
        figures([tmp_path])
    with pytest.raises(UserError, match="nowhere is not a run folder"):
        figures([tmp_path / "nowhere"])


def test_a_run_that_has_measured_nothing_leaves_no_folder(tmp_path: Path) -> None:
    fake_run(tmp_path / "new", 0, learned=0)
    with pytest.raises(UserError, match="nothing to draw yet"):
        figures([tmp_path / "new"])
    assert not (tmp_path / "new" / "figures").exists()
