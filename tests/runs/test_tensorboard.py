"""Event files hold what metrics.jsonl holds, whatever happened on the way."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from wheretolearn.cli import app
from wheretolearn.errors import UserError
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.tensorboard import scalars

glyphs = pytest.mark.xdist_group("glyphs")  # drawn once, by whichever process runs these

Series = dict[str, list[tuple[int, float]]]


def create(path: Path) -> RunFolder:
    return RunFolder.create(path, {}, seed=0, protocol="fewshot", tensorboard=True)


def events(run: Path) -> Series:
    """All scalars in the event files of a run, by tag, in the order in which they were written."""
    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    read.Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def expected(run: Path) -> Series:
    series: Series = {}
    for record in RunFolder.open(run).metrics():
        for tag, value in scalars(record):
            series.setdefault(tag, []).append((record["step"], float(np.float32(value))))  # as event files store it
    return series


def test_numbers_of_a_record_become_scalars_and_lists_do_not() -> None:
    record = {"step": 3, "loss": 0.5, "task": 2, "by_layer": {"step": 1.0, "head": 0.25}, "all": [1, 2], "stage": "x"}
    assert dict(scalars(record)) == {"loss": 0.5, "task": 2, "by_layer/step": 1.0, "by_layer/head": 0.25}


def test_events_are_there_as_soon_as_they_are_logged(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.log(1, loss=0.5, sparsity_by_layer={"block1.conv": 0.25, "head": 0.75}, accuracies=[1.0])
        run.log(20, loss=math.nan)
        found = events(tmp_path)
    assert found["sparsity_by_layer/block1.conv"] == [(1, 0.25)]
    assert found["sparsity_by_layer/head"] == [(1, 0.75)]
    assert found["loss"][0] == (1, 0.5)
    assert math.isnan(found["loss"][1][1])
    assert found.keys() == {"loss", "sparsity_by_layer/block1.conv", "sparsity_by_layer/head"}


def test_a_run_that_did_not_ask_has_no_events(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, {}, seed=0, protocol="fewshot") as run:
        run.log(1, loss=0.5)
        run.rewind(0)
    assert not (tmp_path / "tensorboard").exists()


def test_the_choice_is_kept_when_a_run_is_opened_again(tmp_path: Path) -> None:
    create(tmp_path).close()
    assert "tensorboard" not in RunFolder.open(tmp_path).config
    with RunFolder.open(tmp_path) as run:
        run.log(1, loss=0.5)
    assert events(tmp_path) == {"loss": [(1, 0.5)]}


def test_a_rewound_run_has_each_step_once(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        for step in (1, 2, 3, 4):
            run.log(step, loss=step / 2)
    with RunFolder.open(tmp_path) as run:
        run.rewind(2)
        assert events(tmp_path) == {"loss": [(1, 0.5), (2, 1.0)]}
        run.log(3, loss=8.0)
        run.rewind(3)  # also in one sitting, as when lanes are separated
        run.log(4, loss=9.0)
    assert events(tmp_path) == {"loss": [(1, 0.5), (2, 1.0), (3, 8.0), (4, 9.0)]}
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_an_event_file_that_a_crash_cut_short_is_made_whole(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.log(1, loss=0.5)
        run.log(2, loss=1.0)
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    with RunFolder.open(tmp_path) as run:
        run.log(3, loss=1.5)
    assert events(tmp_path) == {"loss": [(1, 0.5), (2, 1.0), (3, 1.5)]}


def test_wall_time_is_training_time(tmp_path: Path) -> None:
    """So an interrupted run has the same events as one that never stopped."""
    with create(tmp_path) as run:
        for step in (1, 2):
            run.log(step, loss=0.5, elapsed_seconds=100.0 * step)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    first, second = read.Scalars("loss")
    assert second.wall_time - first.wall_time == pytest.approx(100.0)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        (tmp_path / "tensorboard").write_text("in the way")
        with pytest.raises(UserError, match=f"cannot write {tmp_path}/tensorboard"):
            run.log(1, loss=0.5)


def test_a_choice_that_run_json_cannot_hold_is_named(tmp_path: Path) -> None:
    create(tmp_path).close()
    info = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**info, "tensorboard": "yes"}))
    with pytest.raises(UserError, match=r"run\.json is damaged: its tensorboard cannot be 'yes'"):
        RunFolder.open(tmp_path)


FEWSHOT = [
    *("--preset", "demo.sparse-maml", "--threads", "1", "--set", "outer_steps=4", "--set", "log_every=1"),
    *("--set", "validate_every=2", "--set", "validation_tasks=2", "--set", "width=8", "--set", "inner_steps=1"),
]
CONTINUAL = [
    *("--preset", "table5.sparse-la-maml.rotations", "--scale", "quick", "--set", "width=16", "--set", "glances=2"),
    *("--set", "tasks=10", "--set", "log_every=1", "--set", "checkpoint_every=10", "--seeds", "2", "--workers", "2"),
]
ONLINE = [
    *("--preset", "table6.sparse-c-maml.p98", "--scale", "quick"),
    *("--set", "steps=20", "--set", "log_every=5", "--set", "width=8"),
]


@glyphs
@pytest.mark.parametrize(
    ("command", "options", "kinds"),
    [
        ("train", FEWSHOT, {"loss", "validation_accuracy", "sparsity", "sparsity_by_layer"}),
        ("online", ONLINE, {"accuracy", "accuracy_by_source", "sparsity", "sparsity_by_tensor"}),
    ],
)
def test_every_protocol_writes_what_its_metrics_hold(tmp_path, command, options, kinds):
    app([command, str(tmp_path / "run"), *options, "--device", "cpu", "--tensorboard"], standalone_mode=False)
    found = events(tmp_path / "run")
    assert found == expected(tmp_path / "run")
    assert kinds <= {tag.partition("/")[0] for tag in found}


@glyphs
def test_kill_9_of_worker_processes_and_resume_leaves_neither_duplicates_nor_gaps(tmp_path, run_command, hold_at):
    started = [sys.executable, "-m", "wheretolearn", "continual", str(tmp_path / "runs"), *CONTINUAL]
    process = subprocess.Popen(
        [*started, "--device", "cpu", "--tensorboard"], env=hold_at(15), stderr=subprocess.DEVNULL
    )
    paths = [tmp_path / "runs" / f"table5.sparse-la-maml.rotations-seed{seed}" for seed in (0, 1)]
    while not all((path / "metrics.jsonl").exists() and RunFolder.open(path).metrics()[14:] for path in paths):
        assert process.poll() is None
        time.sleep(0.02)
    for path in paths:
        os.kill(int((path / "run.lock").read_text()), signal.SIGKILL)  # its worker
    process.wait()
    assert not any((path / "result.json").exists() for path in paths)
    done = run_command("resume", tmp_path / "runs", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    for path in paths:
        found = events(path)
        assert found == expected(path)
        assert [step for step, _ in found["sparsity"]] == list(range(1, 201))
        assert "sparsity_by_tensor/head.weight" in found


def test_without_the_package_the_error_says_how_to_get_it(tmp_path, run_command):
    """In a real process, on a machine that lacks it."""
    (tmp_path / "lacking" / "tensorboard").mkdir(parents=True)
    (tmp_path / "lacking" / "tensorboard" / "__init__.py").write_text('raise ImportError("No module tensorboard")')
    done = run_command("train", tmp_path / "run", "--tensorboard", PYTHONPATH=str(tmp_path / "lacking"))
    assert done.returncode == 1
    assert "pip install 'wheretolearn[tensorboard]'`, or leave out --tensorboard" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "continual", "online"])
def test_every_command_checks_for_the_package_first(tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as if it could not be imported
    with pytest.raises(UserError, match="or leave out --tensorboard"):
        app([command, str(tmp_path / "run"), "--tensorboard"], standalone_mode=False)
    assert not (tmp_path / "run").exists()


@glyphs
def test_a_run_that_goes_on_without_the_package_says_what_to_do(tmp_path, monkeypatch):
    run = tmp_path / "run"
    app(["train", str(run), *FEWSHOT, "--device", "cpu", "--tensorboard"], standalone_mode=False)
    (run / "model.safetensors").unlink()  # a kill at the very end
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=re.escape(f'or set "tensorboard" to false in {run / "run.json"}')):
        app(["resume", str(run), "--device", "cpu"], standalone_mode=False)
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**info, "tensorboard": False}))
    app(["resume", str(run), "--device", "cpu"], standalone_mode=False)
    assert (run / "model.safetensors").exists()
