"""The real command: several runs, kill and resume, results, records, figures, and errors of one or two lines."""

import json
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from wheretolearn.cli.fewshot import resume
from wheretolearn.cli.online import online
from wheretolearn.errors import UserError
from wheretolearn.online.training import finished
from wheretolearn.runs import checkpoint
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import load_all

pytestmark = pytest.mark.usefixtures("glyphs")

PRESET = "table6.sparse-c-maml.p90"
STEPS = 60
TINY = {"width": 4, "steps": STEPS, "inner_steps": 1, "log_every": 1, "checkpoint_every": 10, "buffer": 8}
QUICK = ["--preset", PRESET, "--scale", "quick", *(f"--set={name}={value}" for name, value in TINY.items())]


@pytest.fixture(scope="module")
def straight(glyphs, once, run_command):
    """Two seeds, never interrupted, each in a process of its own; and what was printed."""

    def run(folder):
        command = ["online", "runs", *QUICK, "--seeds", "2", "--workers", "2", "--record", "records"]
        done = run_command(*command, cwd=folder)
        assert done.returncode == 0, done.stderr
        (folder / "printed.json").write_text(json.dumps({"stdout": done.stdout, "stderr": done.stderr}))

    folder = once("online-straight", run)
    return folder, SimpleNamespace(**json.loads((folder / "printed.json").read_text()))


@pytest.fixture
def paths(straight):
    return [straight[0] / "runs" / f"{PRESET}-seed{seed}" for seed in (0, 1)]


def test_results_are_printed_over_seeds(straight):
    _, done = straight
    assert f"{PRESET} at quick scale, 2 seeds, in %:" in done.stdout
    for measure in ("accuracy", "accuracy on letters", "sparsity", "sparsity of head.weight", "switch recall"):
        row = next(line for line in done.stdout.splitlines() if line.startswith(f"│ {measure} "))
        assert "±" in row, row


def test_progress_is_told_off_a_terminal(straight):
    lines = [line for line in straight[1].stderr.splitlines() if line.startswith(f"{PRESET}-seed1: step {STEPS} of")]
    assert len(lines) == 1
    assert "accuracy" in lines[0]
    assert "sparsity" in lines[0]


def test_results_are_recorded_over_seeds(straight, paths):
    records = {record.metric: record for record in load_all(straight[0] / "records")}
    record = records["accuracy"]
    assert record.name == f"{PRESET} at quick scale"
    assert record.seeds == (0, 1)
    assert record.values == tuple(100 * json.loads((path / "result.json").read_text())["accuracy"] for path in paths)
    assert record.paper_value is None
    assert "sparsity of block1.conv.weight" in records
    assert "differs from the preset" in record.notes


def assert_same_end(one, two):
    """Bit for bit: weights, mask, buffer, and what was measured."""
    states = [checkpoint.load_latest(path) for path in (one, two)]
    assert states[0].step == states[1].step == STEPS
    learners = [saved.state["learner"] for saved in states]
    assert learners[0].keys() == learners[1].keys()
    assert all(torch.equal(tensor, learners[1][name]) for name, tensor in learners[0].items())
    assert torch.equal(states[0].state["right"], states[1].state["right"])
    results = [json.loads((path / "result.json").read_text()) for path in (one, two)]
    for found in results:
        assert found.pop("seconds") > 0
        found.pop("runs_at_once")
    assert results[0] == results[1]
    metrics = [[{**record, "elapsed_seconds": 0} for record in RunFolder.open(path).metrics()] for path in (one, two)]
    assert metrics[0] == metrics[1]


def start(environ, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "wheretolearn", *map(str, arguments)], env=environ, stderr=subprocess.PIPE, text=True
    )


def wait_for_step(path, step, process):
    """Wait until a run has come this far; the process must be alive all the while."""
    while True:
        assert process.poll() is None, process.stderr.read()
        if (path / "run.json").exists() and any(record["step"] >= step for record in RunFolder.open(path).metrics()):
            return
        time.sleep(0.01)


def test_kill_9_in_mid_stream_and_resume_equals_a_straight_run(paths, tmp_path, run_command, hold_at):
    process = start(hold_at(13), "online", tmp_path / "run", *QUICK)
    wait_for_step(tmp_path / "run", 13, process)
    process.kill()
    process.communicate()
    assert not finished(RunFolder.open(tmp_path / "run"))
    assert checkpoint.load_latest(tmp_path / "run").step == 10
    resumed = run_command("resume", tmp_path / "run")
    assert resumed.returncode == 0, resumed.stderr
    assert f"{PRESET} at quick scale, seed 0, in %:" in resumed.stdout
    assert_same_end(paths[0], tmp_path / "run")


def test_it_goes_on_with_the_threads_it_was_begun_with(paths, tmp_path, monkeypatch):
    straight = RunFolder.open(paths[0])
    assert straight.threads == 1
    used = []
    monkeypatch.setattr("wheretolearn.cli.online.train_together", lambda *_, **__: used.append(torch.get_num_threads()))
    with RunFolder.create(tmp_path / "run", straight.config, 0, "online", threads=3):
        resume([tmp_path / "run"], device="cpu")
    assert used == [3]
    assert torch.get_num_threads() == 1  # what comes after in this process has its own


def test_sigterm_saves_several_runs_and_resume_goes_on(paths, tmp_path, run_command, hold_at):
    folder = tmp_path / "runs"
    process = start(hold_at(2), "online", folder, *QUICK, "--seeds", 2, "--workers", 2)
    stopped = [folder / f"{PRESET}-seed{seed}" for seed in (0, 1)]
    for path in stopped:
        wait_for_step(path, 2, process)
    process.send_signal(signal.SIGTERM)
    _, message = process.communicate()
    assert process.returncode == 75, message
    assert "stopping after this step" in message
    assert "saved them; go on with `wheretolearn resume" in message
    assert "Traceback" not in message
    assert [checkpoint.load_latest(path).step for path in stopped] == [2, 2]
    assert run_command("resume", folder, "--workers", 2).returncode == 0
    for path, other in zip(paths, stopped, strict=True):
        assert_same_end(path, other)


def test_evaluate_shows_and_records_what_was_measured(straight, tmp_path, run_command):
    cell = "tableS9.sparse-c-maml.p90"
    shown = run_command("evaluate", straight[0] / "runs", "--preset-name", cell, "--record", tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert f"{cell} at quick scale, 2 seeds" in shown.stdout
    assert {record.name for record in load_all(tmp_path)} == {f"{cell} at quick scale"}


def test_figures_are_drawn_of_several_seeds(straight, tmp_path, run_command):
    drawn = run_command("figures", straight[0] / "runs", "-o", tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    stems = ("accuracy-by-source", "recovery", "sparsity-over-time")
    assert {path.name for path in tmp_path.iterdir()} == {f"{stem}.{kind}" for stem in stems for kind in ("svg", "csv")}


def assert_refused(done, *parts):
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
    for part in parts:
        assert part in done.stderr


def test_mistakes_are_told_in_a_line_or_two_and_leave_nothing_behind(tmp_path, run_command):
    run = tmp_path / "run"
    assert_refused(run_command("online", run, "--set", "lernr=maml"), 'unknown setting "lernr"', '"learner"')
    assert_refused(run_command("online"), "give a folder for the run, or a --preset")
    assert not run.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"overrides": ["learner=maml"]}, "set pretrain=true"),
        ({"overrides": ["precision=float16"]}, "precision=float16 needs the fused engine on a GPU"),
        (
            {"overrides": ["precision=float16", "learner=bgd"]},
            "no first-order inner loop",
        ),
        (
            {"overrides": ["precision=float16", "learner=metabgd", "order=second"]},
            "no first-order inner loop that could run",
        ),
        (
            {"overrides": ["precision=float16", "learner=c-maml", "pretrain=true", "order=second"]},
            "pre-training of order=second has no precision=float16",
        ),
        ({"presets": ["table5.sgd.many"]}, "use `wheretolearn continual`"),
        ({"overrides": ['sources=[{data="mnist"}]']}, "image set 'mnist' is not in"),
        ({"overrides": ["adapt=block5.*"]}, r"no trainable parameter matches 'block5\.\*'; there are"),
        (
            {"overrides": ["learner=online-adam", "pretrain=true", "adapt=block5.*"]},
            r"pre-training: no trainable parameter matches 'block5\.\*'; there are",
        ),
        ({"overrides": ["pretrain=true", "pretrain_classes=900"]}, "but source letters has"),
        (
            {"overrides": ["pretrain=true", "pretrain_queries=500"]},
            r"pre-training with pretrain_queries=500: letters: class 0 .* has 20 images; 505 per class are needed",
        ),
    ],
)
def test_what_can_never_start_leaves_no_folder_behind(arguments, message, tmp_path):
    with pytest.raises(UserError, match=message) as found:
        online(tmp_path / "run", device="cpu", **arguments)
    assert len(str(found.value).splitlines()) <= 2
    assert not (tmp_path / "run").exists()


def test_options_of_few_shot_evaluation_are_refused(straight, run_command):
    assert_refused(
        run_command("evaluate", straight[0] / "runs", "--steps", "3"),
        "--steps: not for online runs, which are measured",
    )


def test_a_damaged_result_is_named(straight, paths, tmp_path, run_command):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_bytes((paths[0] / "run.json").read_bytes())
    (tmp_path / "run" / "result.json").write_text('{"accuracy": 0.5}')
    assert_refused(run_command("evaluate", tmp_path / "run"), "result.json is damaged: it lacks what was measured")


def test_settings_of_online_runs_are_listed(run_command):
    shown = run_command("settings", "online")
    assert shown.returncode == 0
    assert "switch_margin" in shown.stdout
