"""The real command in real processes: what it prints, how it ends, and what survives."""

import errno
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from wheretolearn import cli
from wheretolearn.cli import fewshot
from wheretolearn.cli.common import check_open_files
from wheretolearn.data import glyphs
from wheretolearn.errors import Stopped, UserError
from wheretolearn.fewshot.trained import Evaluation
from wheretolearn.runs import checkpoint, environment, workers
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import load_all
from wheretolearn.runs.shortages import shortages_told
from wheretolearn.storage import load_weights
from wheretolearn.version import __version__

pytestmark = pytest.mark.xdist_group("glyphs")  # drawn once, by whichever process runs these

QUICK = [
    *("--preset", "demo.sparse-maml", "--threads", 1),
    *("--set", "width=8", "--set", "tasks_per_step=2", "--set", "outer_steps=40", "--set", "checkpoint_every=10"),
    *("--set", "validate_every=20", "--set", "validation_tasks=4", "--set", "log_every=1"),
]
LONG = "n" * 300  # a name that no file can have


def assert_message(result, *parts, code=1):
    """One message, no traceback."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


def test_version():
    """In a Python that starts from nothing: what is loaded says nothing."""
    done = subprocess.run([sys.executable, "-m", "wheretolearn", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"wheretolearn {__version__}\n", "")


@pytest.mark.parametrize(
    "command", ["", "train", "continual", "resume", "evaluate", "demo", "presets", "settings", "data", "data add"]
)
def test_help_explains_every_command(run_command, command):
    result = run_command(*command.split(), "--help")
    assert result.returncode == 0
    assert "Usage:" in result.stdout
    assert len(result.stdout.splitlines()) > 5


def test_presets_are_listed_and_shown(run_command):
    listed = run_command("presets").stdout
    assert "demo.sparse-maml" in listed
    assert "demo.maml" in listed
    shown = run_command("presets", "demo.maml").stdout
    rows = {
        cells[1].strip(): cells[2].strip() for cells in (line.split("│") for line in shown.splitlines()) if cells[1:]
    }
    assert rows["mask"] == '"fixed"'
    assert rows["bias"] == "true"
    assert rows["inner_clip_norm"] == "none"


def test_settings_are_listed_with_defaults_and_meaning(run_command):
    shown = run_command("settings").stdout
    assert "test_inner_steps" in shown
    assert "K_test" in shown


def test_unknown_preset_names_the_nearest(run_command, tmp_path):
    result = run_command("train", tmp_path / "run", "--preset", "demo.sparse-mamll")
    assert_message(result, "demo.sparse-maml")
    assert not (tmp_path / "run").exists()


def test_unknown_key_names_the_nearest(run_command, tmp_path):
    result = run_command("train", tmp_path / "run", "--preset", "demo.maml", "--set", "inner_rl=1")
    assert_message(result, "inner_rl", "inner_lr")
    assert not (tmp_path / "run").exists()


def test_wrong_type_says_what_is_expected(run_command, tmp_path):
    result = run_command("train", tmp_path / "run", "--preset", "demo.maml", "--set", "ways=many")
    assert_message(result, '"ways" expects int, got "many"')


def test_a_set_that_is_not_here_says_how_to_get_it(run_command, tmp_path):
    result = run_command("train", tmp_path / "run", "--set", "data=omniglot", WHERETOLEARN_DATA=str(tmp_path / "data"))
    assert_message(result, "omniglot", "wheretolearn data get omniglot")


def test_a_class_with_too_few_images_is_named(run_command, tmp_path):
    environ = {"WHERETOLEARN_DATA": str(tmp_path / "data")}
    for label in range(6):
        folder = tmp_path / "mine" / f"class {label}"
        folder.mkdir(parents=True)
        for number in range(2 if label == 4 else 8):
            Image.fromarray(np.full((30, 30, 3), 40 * label, np.uint8)).save(folder / f"{number}.png")
    assert run_command("data", "add", "mine", tmp_path / "mine", "--size", 20, **environ).returncode == 0
    splits = ("--set", "train_split=all", "--set", "validation_split=all")
    result = run_command("train", tmp_path / "run", "--set", "data=mine", "--set", "queries=5", *splits, **environ)
    assert_message(result, "class 4", "2", "6")
    assert not (tmp_path / "run").exists()


def test_an_unwritable_data_folder_is_named(tmp_path, monkeypatch, capsys):
    """Called in this process, where one drawing of each glyph is enough to have no place for it."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(glyphs, "DRAWINGS", 1)
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: None)  # it could not be undone
    monkeypatch.setenv("WHERETOLEARN_DATA", str(tmp_path / "file" / "x"))
    monkeypatch.setattr(sys, "argv", ["wheretolearn", "data", "sheet", "glyphs", str(tmp_path / "sheet.png")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    result = subprocess.CompletedProcess(sys.argv, ended.value.code, *capsys.readouterr())
    assert_message(result, str(tmp_path / "file"))


def test_a_gpu_that_is_not_there(run_command, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert_message(run_command("train", tmp_path / "run", *QUICK, "--device", "cuda"), "no GPU")


@pytest.mark.parametrize(
    "slip",
    [
        ("--set", "adapt=zzz"),
        ("--set", "initial_sparsity=2"),
        ("--set", "mask=exp", "--set", "initial_sparsity=0.5"),
        ("--set", "engine=eager", "--set", "precision=bfloat16"),
        ("--device", "tpu"),
        ("--device", "meta"),
    ],
)
def test_a_slip_leaves_no_run_behind(run_command, tmp_path, slip):
    assert_message(run_command("train", tmp_path / "run", *QUICK, *slip))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "demo"])
@pytest.mark.parametrize(("seed", "bound"), [(-1, "0"), (2**31, "2147483647"), (99999999999999999999, "2147483647")])
def test_a_seed_out_of_range_says_the_range(run_command, tmp_path, command, seed, bound):
    where = ["--folder", tmp_path / "run"] if command == "demo" else [tmp_path / "run"]
    assert_message(run_command(command, *where, "--seed", seed), "'--seed'", bound, code=2)
    assert not (tmp_path / "run").exists()


def test_a_setting_that_would_do_nothing_is_refused_before_anything_is_written(run_command, tmp_path):
    quick = ["train", tmp_path / "run", "--preset", "table1.fomaml.shot1", "--scale", "quick"]
    refused = run_command(*quick, "--set", "model=resnet12", "--set", "width=16")
    assert_message(refused, "width=16 is for model=conv4 and would do nothing here: leave it out")
    assert_message(run_command(*quick, "--set", "mask_lr=0.1"), "mask_lr=0.1 is for a mask that is learned")
    assert not (tmp_path / "run").exists()


def test_a_setting_of_some_runs_is_taken_though_it_does_nothing_in_others(run_command, tmp_path):
    presets = ["--preset", "demo.maml", "--preset", "demo.sparse-maml"]
    done = run_command("train", tmp_path, *presets, *TINY, "--set", "mask_lr=0.2", "--set", "outer_steps=2")
    assert done.returncode == 0, done.stderr
    assert RunFolder.open(tmp_path / "demo.sparse-maml-seed0").config["mask_lr"] == 0.2


def test_a_fresh_demo_deletes_no_stranger(run_command, tmp_path):
    (tmp_path / "maml").mkdir()
    (tmp_path / "maml" / "thesis.txt").write_text("years of work")
    assert_message(run_command("demo", "--folder", tmp_path, "--fresh"), str(tmp_path / "maml"), "not deleted")
    assert (tmp_path / "maml" / "thesis.txt").read_text() == "years of work"


def test_a_folder_that_holds_a_run_is_not_overwritten(run_command, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    assert_message(run_command("train", tmp_path / "run", *QUICK), "not empty")
    assert (tmp_path / "run" / "thesis.txt").read_text() == "years of work"


def start(environ, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "wheretolearn", *map(str, arguments)], env=environ, stderr=subprocess.PIPE, text=True
    )


def wait_for_step(path, step, process):
    """Wait until the run's metrics have reached a step; the process must be alive all the while."""
    while True:
        assert process.poll() is None, process.stderr.read()
        if (path / "run.json").exists() and any(r["step"] >= step for r in RunFolder.open(path).metrics()):
            return
        time.sleep(0.02)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, run_command):
    """An uninterrupted run on the demo's data, of its network made narrow."""
    path = tmp_path_factory.mktemp("straight") / "run"
    run_command("train", path, *QUICK).check_returncode()
    return path


def assert_same_end(one, two):
    """Bit for bit: weights, mask, optimizer state, best model, and the files that a user takes away."""
    states = [checkpoint.load_latest(path) for path in (one, two)]
    assert states[0].step == states[1].step == 40
    flat = [dict(flatten(saved.state)) for saved in states]
    assert flat[0].keys() == flat[1].keys()
    assert sum(isinstance(value, torch.Tensor) for value in flat[0].values()) > 50
    for key, value in flat[0].items():
        if "seconds" in key or key.startswith("/random"):
            continue
        same = torch.equal(value, flat[1][key]) if isinstance(value, torch.Tensor) else value == flat[1][key]
        assert same, key
    assert_same_models(one, two)


def assert_same_models(one, two):
    for name in ("model.safetensors", "mask.safetensors"):
        (tensors, metadata), (others, other_metadata) = load_weights(one / name), load_weights(two / name)
        assert metadata == other_metadata
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensor, others[key]) for key, tensor in tensors.items())


def flatten(value, path=""):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from flatten(item, f"{path}/{index}")
    else:
        yield path, value


def test_kill_9_and_resume_equals_a_straight_run_bit_for_bit(straight, tmp_path, run_command, hold_at):
    path = tmp_path / "run"
    process = start(hold_at(25), "train", path, *QUICK)
    wait_for_step(path, 25, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.stderr.close()
    assert checkpoint.load_latest(path).step == 20
    assert not (path / "model.safetensors").exists()
    resumed = run_command("resume", path, "--threads", 1)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_end(straight, path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits_with_its_own_code(straight, tmp_path, run_command, hold_at, number):
    path = tmp_path / "run"
    process = start(hold_at(13), "train", path, *QUICK)
    wait_for_step(path, 13, process)
    process.send_signal(number)
    _, message = process.communicate()
    assert process.returncode == 75, message
    assert "stopping after this step" in message
    assert "wheretolearn resume" in message
    assert checkpoint.load_latest(path).step == 13
    assert run_command("resume", path, "--threads", 1).returncode == 0
    assert_same_end(straight, path)


def test_two_processes_cannot_write_one_run(tmp_path, run_command, hold_at):
    path = tmp_path / "run"
    process = start(hold_at(1), "train", path, *QUICK)
    wait_for_step(path, 1, process)
    assert_message(run_command("resume", path), "is in use", str(process.pid))
    process.kill()
    process.communicate()


def test_a_corrupted_checkpoint_is_reported_and_the_one_before_used(straight, tmp_path, run_command, hold_at):
    path = tmp_path / "run"
    process = start(hold_at(25), "train", path, *QUICK)
    wait_for_step(path, 25, process)
    process.kill()
    process.communicate()
    newest = max((path / "checkpoints").glob("step-*.pt"))
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    resumed = run_command("resume", path, "--threads", 1)
    assert resumed.returncode == 0, resumed.stderr
    assert "damaged" in resumed.stderr
    assert_same_end(straight, path)


def test_a_checkpoint_of_another_model_is_refused(straight, tmp_path, run_command):
    path = tmp_path / "run"
    assert run_command("train", path, *QUICK, "--set", "width=4", "--set", "outer_steps=10").returncode == 0
    saved = checkpoint.load_latest(straight)
    checkpoint.save(path, saved.state, saved.step)
    assert_message(run_command("resume", path), "belongs to other settings", "width=8", "start anew")


def test_a_non_finite_loss_has_its_own_exit_code(tmp_path, run_command):
    result = run_command("train", tmp_path / "run", *QUICK, "--set", "inner_lr=1e30")
    assert_message(result, "outer step", "task", "layer", code=3)


def headings(result):
    return [line.partition(":")[0] for line in result.stdout.splitlines()]


def test_evaluate_prints_an_interval(straight, run_command):
    result = run_command("evaluate", straight, "--split", "characters", "--tasks", 5, "--threads", 1)
    assert result.returncode == 0, result.stderr
    assert "glyphs/characters:" in result.stdout
    assert "+-" in result.stdout
    assert_message(run_command("evaluate", straight, "--split", "nothing"), "characters", "scripts")


def test_evaluate_takes_the_splits_that_training_left_out(straight, run_command):
    result = run_command("evaluate", straight, "--tasks", 2, "--threads", 1)
    assert result.returncode == 0, result.stderr
    assert headings(result) == ["glyphs/characters", "glyphs/scripts", "sparsity"]
    assert "(block1.conv " in result.stdout.splitlines()[-1]


def test_evaluate_takes_several_splits(straight, run_command):
    splits = ("--split", "validation", "--split", "scripts")
    result = run_command("evaluate", straight, *splits, "--tasks", 2, "--threads", 1)
    assert headings(result) == ["glyphs/validation", "glyphs/scripts", "sparsity"]


def test_measuring_classes_that_the_run_learns_from_is_told(straight, tmp_path, run_command):
    splits = ("--split", "train", "--split", "scripts")
    evaluated = run_command("evaluate", straight, *splits, "--tasks", 2, "--threads", 1)
    short = ("--set", "outer_steps=1", "--set", "validation_split=train")
    trained = run_command("train", tmp_path / "run", *QUICK, *short)
    for result in (evaluated, trained):
        assert result.returncode == 0, result.stderr
        assert result.stderr.count("605 of 605 classes in glyphs/train are classes of glyphs/train") == 1
        assert "scripts are" not in result.stderr


def test_evaluate_where_results_cannot_be_kept(straight, tmp_path, run_command):
    shutil.copytree(straight, tmp_path / "run", ignore=shutil.ignore_patterns("evaluations"))
    (tmp_path / "run" / "evaluations").write_text("in the way")
    result = run_command("evaluate", tmp_path / "run", "--split", "scripts", "--tasks", 2)
    assert_message(result, str(tmp_path / "run" / "evaluations"))
    assert result.stdout == ""


def test_what_is_measured_is_shown_even_where_it_cannot_be_kept(straight, tmp_path, run_command):
    shutil.copytree(straight, tmp_path / "run", ignore=shutil.ignore_patterns("evaluations"))
    steps = RunFolder.open(straight).config["test_inner_steps"]
    in_the_way = tmp_path / "run" / "evaluations" / f"glyphs-scripts-2-tasks-{steps}-steps.json"
    in_the_way.mkdir(parents=True)
    splits = ("--split", "scripts", "--split", "validation")
    result = run_command("evaluate", tmp_path / "run", *splits, "--tasks", 2, "--threads", 1)
    assert_message(result, "cannot write", str(in_the_way))
    assert headings(result) == ["glyphs/scripts", "glyphs/validation", "sparsity"]
    assert (in_the_way.parent / f"glyphs-validation-2-tasks-{steps}-steps.json").is_file()


@pytest.mark.parametrize("command", ["resume", "evaluate"])
@pytest.mark.parametrize(("name", "value"), [("seed", "abc"), ("config", 5), ("config", {"outer_steps": "many"})])
def test_a_damaged_run_json_is_named(straight, tmp_path, run_command, command, name, value):
    shutil.copytree(straight, tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    assert_message(run_command(command, tmp_path / "run"), str(tmp_path / "run"))


def test_resume_of_a_finished_run_changes_nothing(straight, tmp_path, run_command):
    shutil.copytree(straight, tmp_path / "run")
    assert run_command("resume", tmp_path / "run").returncode == 0
    assert_same_end(straight, tmp_path / "run")
    assert (straight / "metrics.jsonl").read_bytes() == (tmp_path / "run" / "metrics.jsonl").read_bytes()


def test_resume_of_no_run(run_command, tmp_path):
    assert_message(run_command("resume", tmp_path), "is not a run folder")


def test_the_environment_has_a_data_folder_of_its_own():
    assert "image-sets" in os.environ["WHERETOLEARN_DATA"]


# Several runs at once

TINY = [*QUICK[4:], "--set", "width=4"]


def worker_of(path):
    """The process that writes to a run."""
    return int((path / "run.lock").read_text())


@pytest.fixture(scope="module")
def several(tmp_path_factory, run_command):
    """Two presets with two seeds each, trained by one command."""
    folder = tmp_path_factory.mktemp("several") / "runs"
    presets = ("--preset", "demo.sparse-maml", "--preset", "demo.maml", "--seed", 3, "--seeds", 2)
    done = run_command("train", folder, *presets, *TINY, "--set", "outer_steps=6", "--set", "validate_every=2")
    assert done.returncode == 0, done.stderr
    return folder, done


def test_several_runs_have_folders_named_by_preset_and_seed(several):
    folder, done = several
    names = [f"demo.{method}-seed{seed}" for method in ("maml", "sparse-maml") for seed in (3, 4)]
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        run = RunFolder.open(folder / name)
        assert (f"{run.preset}-seed{run.seed}", run.scale) == (name, "paper")
        assert {record["runs_at_once"] for record in run.metrics()} == {min(4, environment.cores())}
        assert f"{name}: best validation accuracy" in done.stdout
        assert f"{name}: step 4 of 6  validation" in done.stderr  # a line per validation, off a terminal
        assert (folder / name / "best" / "3" / "model.safetensors").exists()


def test_each_of_several_runs_is_the_run_alone(several, tmp_path, run_command):
    alone = run_command(
        *("train", tmp_path / "run", "--preset", "demo.sparse-maml", "--seed", 4, *TINY, "--threads", 1),
        *("--set", "outer_steps=6", "--set", "validate_every=2"),
    )
    assert alone.returncode == 0, alone.stderr
    for name in ("model.safetensors", "mask.safetensors", "best/2/model.safetensors"):
        one, two = load_weights(tmp_path / "run" / name), load_weights(several[0] / "demo.sparse-maml-seed4" / name)
        assert one[1] == two[1]
        assert all(torch.equal(tensor, two[0][key]) for key, tensor in one[0].items())


def test_several_runs_are_evaluated_and_recorded_over_seeds(several, tmp_path, run_command):
    result = run_command(
        *("evaluate", several[0], "--split", "scripts", "--tasks", 3, "--steps", 1, "--threads", 1),
        *("--data", "glyphs", "--ensemble", "--record", tmp_path / "records"),
    )
    assert result.returncode == 0, result.stderr
    assert "demo.maml-seed3: glyphs/scripts: " in result.stdout
    assert "demo.sparse-maml, 2 seeds: glyphs/scripts: " in result.stdout
    assert "demo.sparse-maml, 2 seeds: glyphs/scripts, ensemble of 3: " in result.stdout
    assert "demo.sparse-maml, 2 seeds: sparsity: " in result.stdout
    records = load_all(tmp_path / "records")
    assert sorted((record.name, record.metric) for record in records) == [
        ("demo.maml", "accuracy on scripts after 1 step"),
        ("demo.maml", "ensemble accuracy on scripts after 1 step"),
        ("demo.sparse-maml", "accuracy on scripts after 1 step"),
        ("demo.sparse-maml", "ensemble accuracy on scripts after 1 step"),
        ("demo.sparse-maml", "sparsity"),
    ]
    assert all(record.seeds == (3, 4) for record in records)
    assert all("K_test 1" in record.notes for record in records if "accuracy" in record.metric)


def test_a_run_without_a_preset_is_recorded_under_the_name_given(several, tmp_path, run_command):
    shutil.copytree(several[0] / "demo.maml-seed3", tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    info = json.loads(file.read_text())
    del info["preset"], info["scale"]  # as early versions wrote it
    file.write_text(json.dumps(info))
    evaluate = ("evaluate", tmp_path / "run", "--split", "scripts", "--tasks", 2, "--record", tmp_path / "records")
    result = run_command(*evaluate)
    assert_message(result, str(tmp_path / "run"), "--preset-name")
    assert result.stdout == ""  # before anything was measured
    assert_message(run_command(*evaluate, "--preset-name", "demo.mmal"), "demo.maml")
    assert run_command(*evaluate, "--preset-name", "demo.maml").returncode == 0
    assert [record.name for record in load_all(tmp_path / "records")] == ["demo.maml"]


def test_kill_9_of_several_runs_and_resume_equals_a_straight_run(straight, tmp_path, run_command, hold_at):
    folder = tmp_path / "runs"
    process = start(hold_at(12), "train", folder, *QUICK, "--seeds", 2, "--workers", 2)
    paths = [folder / f"demo.sparse-maml-seed{seed}" for seed in (0, 1)]
    for path in paths:
        wait_for_step(path, 12, process)
    workers = [worker_of(path) for path in paths]
    assert process.pid not in workers
    for pid in (*workers, process.pid):  # the workers first: without it they would save and end
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert [checkpoint.load_latest(path).step for path in paths] == [10, 10]
    resumed = run_command("resume", folder, "--threads", 1)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_end(straight, paths[0])
    assert checkpoint.load_latest(paths[1]).step == 40
    assert_message(run_command("resume", folder), "holds no run that is unfinished")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_several_runs_and_saves_them(tmp_path, hold_at, number):
    folder = tmp_path / "runs"
    process = start(hold_at(2), "train", folder, "--preset", "demo.maml", "--seeds", 3, "--workers", 2, *TINY)
    paths = [folder / f"demo.maml-seed{seed}" for seed in range(3)]
    for path in paths[:2]:
        wait_for_step(path, 2, process)
    process.send_signal(number)
    _, message = process.communicate()
    assert process.returncode == 75, message
    assert "Traceback" not in message
    assert "stopped 3 runs and saved them; go on with `wheretolearn resume" in message
    assert all(str(path) in message for path in paths)
    for path in paths[:2]:
        assert checkpoint.load_latest(path).step == RunFolder.open(path).metrics()[-1]["step"] == 2
    assert checkpoint.load_latest(paths[2]) is None  # two at a time: it had not begun


def test_runs_go_on_with_the_threads_they_were_begun_with(tmp_path, run_command, hold_at):
    command = ["--preset", "demo.sparse-maml", "--seeds", 3, "--workers", 3, *TINY, "--set", "outer_steps=4"]
    command += ["--threads", 3]  # sums have other last digits than with one, which tests have by default
    run_command("train", tmp_path / "straight", *command).check_returncode()
    process = start(hold_at(2), "train", tmp_path / "stopped", *command)
    paths = [tmp_path / "stopped" / f"demo.sparse-maml-seed{seed}" for seed in range(3)]
    for path in paths:
        wait_for_step(path, 2, process)
    process.send_signal(signal.SIGINT)
    process.communicate()
    for left in (paths[0], tmp_path / "stopped"):  # one alone, in the process of the command, then two at once
        resumed = run_command("resume", left)
        assert resumed.returncode == 0, resumed.stderr
        assert "another number of threads" not in resumed.stderr
    for path in paths:
        assert_same_models(tmp_path / "straight" / path.name, path)


def test_a_run_is_measured_with_the_threads_it_was_trained_with(straight, tmp_path, monkeypatch):
    run = shutil.copytree(straight, tmp_path / "run")
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(info | {"threads": 3}))
    taken = []

    def measure(*_, **__):
        taken.append(torch.get_num_threads())
        return Evaluation("glyphs", "characters", 1, 0.5, 0.1, (0.5, 0.5))

    monkeypatch.setattr(fewshot, "evaluate_run", measure)
    before = torch.get_num_threads()
    for cores, threads in ((4, None), (4, 2), (2, None)):
        monkeypatch.setattr(environment, "cores", lambda cores=cores: cores)
        fewshot.evaluate([run], splits=["characters"], device="cpu", threads=threads)
    assert (taken, torch.get_num_threads()) == ([3, 2, 2], before)  # no more than there are cores


def test_another_number_of_threads_is_told_in_one_note(tmp_path, monkeypatch, capsys):
    taken = []
    monkeypatch.setattr(fewshot, "_continue", lambda runs, *_: taken.append([run.threads for run in runs]))
    paths = [tmp_path / name for name in ("early", "same", "other")]
    for path, threads in zip(paths, (None, 2, 3), strict=True):
        RunFolder.create(path, {}, 0, "fewshot", threads=threads).close()
    monkeypatch.setattr(fewshot.environment, "cores", lambda: 3)
    fewshot.resume(paths, device="cpu")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(fewshot.environment, "cores", lambda: 2)
    fewshot.resume(paths, device="cpu")
    assert capsys.readouterr().err.startswith("begun with 3 threads, more than the 2 cores here")
    fewshot.resume(paths, device="cpu", threads=2)
    assert capsys.readouterr().err == (
        f"{paths[2]}: begun with another number of threads, so the end may differ in the last digits\n"
    )
    assert taken == [[None, 2, 3], [None, 2, 3], [2, 2, 2]]


def test_a_worker_that_dies_is_named_and_the_others_go_on(tmp_path, hold_at):
    folder = tmp_path / "runs"
    paths = [folder / f"demo.maml-seed{seed}" for seed in (0, 1)]
    environ = hold_at(2, runs=paths[1].name)
    process = start(environ, "train", folder, "--preset", "demo.maml", "--seeds", 2, "--workers", 2, *TINY)
    wait_for_step(paths[1], 2, process)
    os.kill(worker_of(paths[1]), signal.SIGKILL)
    _, message = process.communicate()
    assert process.returncode == 1
    assert f"1 of 2 runs failed:\n{paths[1]}: its process was ended by SIGKILL" in message
    assert (paths[0] / "model.safetensors").exists()
    assert not (paths[1] / "model.safetensors").exists()


def test_a_loss_of_one_of_several_runs_has_its_exit_code(tmp_path, run_command):
    result = run_command("train", tmp_path / "runs", "--seeds", 2, *QUICK, "--set", "inner_lr=1e30")
    assert_message(result, "2 of 2 runs failed", "demo.sparse-maml-seed1: the loss is not finite", code=3)


@pytest.mark.parametrize(
    ("slip", "parts"),
    [
        (["--scale", "huge"], ["huge", "paper or quick"]),
        (["--seeds", 2, "--seed", 2**31 - 1], ["seeds end at 2147483647"]),
        (["--preset", "demo.maml", "--preset", "demo.mmal"], ["demo.mmal", "demo.maml"]),
        (["--set", "start_from=nowhere"], ["start_from", "nowhere", "not a finished run"]),
        (["--preset", "tableS4.shot1.init0", "--scale", "quick"], ["table1.fomaml.shot1", "start_from=FOLDER"]),
        (["--set", "learn_theta=false", "--set", "mask=fixed"], ["nothing to learn"]),
    ],
)
def test_a_slip_with_several_runs_leaves_none_behind(run_command, tmp_path, slip, parts):
    assert_message(run_command("train", tmp_path / "runs", *slip), *parts)
    assert not (tmp_path / "runs").exists()


def limited_to(files, *arguments):
    """The real command where no more files may be open at once."""
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (files, files))
    started = [sys.executable, "-m", "wheretolearn", *map(str, arguments)]
    return subprocess.run(started, preexec_fn=limit, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("command", "limit", "seeds", "workers", "needed"),
    [("train", 47, 15, 15, 107), ("continual", 72, 40, 1, 115), ("online", 256, 400, 4, 844)],
)
def test_more_runs_than_files_can_be_open_leave_none_behind(tmp_path, command, limit, seeds, workers, needed):
    """Each worker costs the parent three files, and one with all the runs has two of each."""
    many = (tmp_path / "many", "--device", "cpu", "--seeds", seeds, "--workers", workers)
    result = limited_to(limit, command, *many)
    assert_message(result, f"{seeds} runs keep up to {needed} files open", f"allows {limit}", "start fewer runs")
    assert not (tmp_path / "many").exists()


def test_as_many_runs_as_files_can_be_open_are_done(tmp_path):
    brief = [f"--set={setting}" for setting in ("tasks=2", "examples=10", "width=4", "memory=10", "matrix_images=10")]
    many = (tmp_path / "many", "--device", "cpu", "--seeds", 40, "--workers", 1, *brief, "--set", "log_every=1")
    result = limited_to(115, "continual", *many)
    assert result.returncode == 0, result.stderr
    assert len(list((tmp_path / "many").glob("*/result.json"))) == 40


def test_more_runs_than_files_can_be_open_are_not_resumed(monkeypatch, tmp_path):
    for seed in range(3):
        RunFolder.create(tmp_path / f"run{seed}", {}, seed, "fewshot").close()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (33, 33))
    with pytest.raises(UserError, match="1 runs keep up to 34 files open"):
        fewshot.resume([tmp_path / "run0"], device="cpu")
    with pytest.raises(UserError, match="3 runs keep up to 44 files open"):
        fewshot.resume([tmp_path], device="cpu", workers=2)


@pytest.mark.parametrize(("device", "expected"), [("cpu", 247), ("cuda", 232)])
def test_a_limit_on_open_files_is_raised_where_the_machine_allows_it(monkeypatch, device, expected):
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (60, 5000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    check_open_files(4, device, 9, tensorboard=False)
    check_open_files(100, device, 5, tensorboard=False)
    assert raised == [(expected, 5000)]


def test_files_that_run_out_all_the_same_are_told_in_one_line(tmp_path, monkeypatch, capsys):
    """Called in this process, where starting workers can be made to fail."""

    def refuse(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(workers, "run_workers", refuse)
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: None)  # it could not be undone
    monkeypatch.setattr(sys, "argv", ["wheretolearn", "train", str(tmp_path / "runs"), "--seeds", "2", "--device=cpu"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    result = subprocess.CompletedProcess(sys.argv, ended.value.code, *capsys.readouterr())
    assert_message(result, "error: too many files are open at once", "fewer runs or workers", "ulimit -n")


@pytest.mark.parametrize(
    "arguments",
    [
        *(["train", LONG, "--set=data=glyphs"], ["continual", LONG, "--preset=table5.sgd.many"], ["resume", LONG]),
        *(["evaluate", LONG], ["figures", LONG], ["report", LONG], ["report", f"--records={LONG}"]),
        *(["data", "add", "mine", LONG], ["data", "add", LONG, "."]),
    ],
    ids=lambda arguments: " ".join(arguments).replace(LONG, "LONG"),
)
def test_names_that_are_too_long_are_told_in_one_line(tmp_path, run_command, arguments):
    result = run_command(*arguments, cwd=tmp_path, WHERETOLEARN_DATA=str(tmp_path))
    assert_message(result, "error: ", LONG, "too long")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("kind", [UserError, Stopped])
def test_an_error_that_names_a_lack_of_files_says_what_to_do(kind):
    """Once, also where a worker tells its parent, which tells it on."""
    with pytest.raises(kind) as told, shortages_told(), shortages_told():
        raise kind("cannot write to runs/seed2: Too many open files")
    first, second = str(told.value).splitlines()
    assert first == "cannot write to runs/seed2: Too many open files"
    assert "fewer runs or workers" in second
    assert "ulimit -n" in second


def memory_is_counted():
    """Whether the machine refuses more memory than it has, rather than kill whoever then uses it."""
    policy = Path("/proc/sys/vm/overcommit_memory")
    return policy.is_file() and policy.read_text().strip() != "1"


needs_counted_memory = pytest.mark.skipif(not memory_is_counted(), reason="this machine grants memory it has not")


@needs_counted_memory
@pytest.mark.parametrize(
    ("command", "settings", "asked"),
    [
        ("train", ["width=2000000"], "144000000000000 bytes"),
        ("train", ["tasks_per_step=2000000000"], "bytes"),
        ("train", ["outer_steps=1", "validation_tasks=2000000000"], "bytes"),
        ("continual", ["memory=2000000000"], "bytes"),
        ("online", ["learner=metabgd", "samples=2000000000"], "bytes"),
    ],
)
@pytest.mark.parametrize("seeds", [1, 2])
def test_sizes_beyond_all_memory_end_in_one_line(tmp_path, run_command, command, settings, asked, seeds):
    small = [f"--set={setting}" for setting in ("width=8", *settings)]
    result = run_command(command, tmp_path / "run", "--device", "cpu", "--seeds", seeds, *small)
    assert_message(result, "not enough memory", asked, "make smaller", "in a new run, width")


@needs_counted_memory
def test_more_tasks_than_fit_in_memory_are_refused(straight, run_command):
    result = run_command("evaluate", straight, "--split", "scripts", "--tasks", 2_000_000_000)
    assert_message(result, "not enough memory", "--tasks")


@pytest.mark.parametrize("option", ["--tasks", "--steps"])
def test_options_have_an_upper_bound(straight, run_command, option):
    result = run_command("evaluate", straight, option, 10**21)
    assert_message(result, option, "2147483647", code=2)


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        *[("train", f"{name}=1e300") for name in ("inner_lr", "theta_lr", "mask_lr", "outer_clamp", "mask_init")],
        *[("train", f"{name}=3e38") for name in ("theta_lr", "mask_lr")],
        *[("online", f"{name}=1e300") for name in ("lr", "mask_lr", "initial_std", "logit_init")],
        *[("online", f"{name}=3e38") for name in ("lr", "mask_lr")],
        *[("continual", f"{name}=1e300") for name in ("lr", "mask_lr", "clip_norm")],
    ],
)
def test_numbers_too_large_to_calculate_with_leave_no_run_behind(tmp_path, run_command, command, setting):
    mask = ["--set", "mask=relu"] if command == "train" else []
    result = run_command(command, tmp_path / "run", *mask, "--set", setting, "--seeds", 2)
    assert_message(result, setting.partition("=")[0])
    assert not (tmp_path / "run").exists()


def test_a_preset_at_quick_scale_trains_and_its_mask_after_it(tmp_path, run_command):
    brief = [*TINY, "--threads", 1, "--scale", "quick", "--set", "outer_steps=2"]
    first = run_command("train", tmp_path / "first", "--preset", "table1.fomaml.shot1", *brief)
    assert first.returncode == 0, first.stderr
    run = RunFolder.open(tmp_path / "first")
    assert (run.preset, run.scale, run.config["data"]) == ("table1.fomaml.shot1", "quick", "glyphs")
    second = run_command(
        *("train", tmp_path / "second", "--preset", "tableS4.shot1.init0", *brief),
        *("--set", f"start_from={os.path.relpath(tmp_path / 'first')}"),
    )
    assert second.returncode == 0, second.stderr
    assert RunFolder.open(tmp_path / "second").config["start_from"] == str(tmp_path / "first")
    weights = [load_weights(tmp_path / name / "model.safetensors")[0] for name in ("first", "second")]
    assert all(torch.equal(tensor, weights[1][key]) for key, tensor in weights[0].items())


def test_several_runs_take_no_place_of_others(several, run_command):
    folder, _ = several
    result = run_command("train", folder, "--preset", "demo.maml", "--seeds", 9, *TINY)
    assert_message(result, "demo.maml-seed3", "already holds a run")
    assert not (folder / "demo.maml-seed0").exists()
    result = run_command("train", folder / "demo.maml-seed3", "--preset", "demo.maml", "--seeds", 2)
    assert_message(result, "is itself a run")


def test_a_start_of_another_shape_is_refused_before_anything_is_written(several, tmp_path, run_command):
    start_from = f"start_from={several[0] / 'demo.maml-seed3'}"
    result = run_command("train", tmp_path / "run", "--preset", "demo.maml", "--set", start_from)
    assert_message(result, "start_from", "block1.conv.weight is [4, 1, 3, 3] in it but [32, 1, 3, 3]")
    assert not (tmp_path / "run").exists()


def test_evaluating_a_folder_leaves_out_what_is_not_finished(several, tmp_path, run_command):
    shutil.copytree(several[0], tmp_path / "runs")
    (tmp_path / "runs" / "demo.maml-seed4" / "model.safetensors").unlink()
    evaluate = ("--split", "scripts", "--tasks", 2, "--threads", 1)
    result = run_command("evaluate", tmp_path / "runs", *evaluate)
    assert result.returncode == 0, result.stderr
    assert "demo.maml-seed4: not finished, left out" in result.stderr
    assert "demo.maml-seed3" in result.stdout
    assert "demo.maml-seed4" not in result.stdout
    named = run_command("evaluate", tmp_path / "runs" / "demo.maml-seed4", *evaluate)
    assert_message(named, "is not finished", "wheretolearn resume")
