"""The real command in real processes: what it prints, how it ends, and what survives."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from wheretolearn.runs import checkpoint
from wheretolearn.runs.folder import RunFolder
from wheretolearn.storage import load_weights
from wheretolearn.version import __version__

pytestmark = pytest.mark.xdist_group("glyphs")  # drawn once, by whichever process runs these

QUICK = [
    *("--preset", "demo.sparse-maml", "--threads", 1),
    *("--set", "outer_steps=40", "--set", "checkpoint_every=10"),
    *("--set", "validate_every=20", "--set", "validation_tasks=4", "--set", "log_every=1"),
]


def assert_message(result, *parts, code=1):
    """One message, no traceback."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


def test_version(run_command):
    assert run_command("--version").stdout.strip() == f"wheretolearn {__version__}"


@pytest.mark.parametrize(
    "command", ["", "train", "resume", "evaluate", "demo", "presets", "settings", "data", "data add"]
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


def test_an_unwritable_data_folder_is_named(run_command, tmp_path):
    (tmp_path / "file").write_text("in the way")
    result = run_command(
        "data", "sheet", "glyphs", tmp_path / "sheet.png", WHERETOLEARN_DATA=str(tmp_path / "file" / "x")
    )
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


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "wheretolearn", *map(str, arguments)], stderr=subprocess.PIPE, text=True
    )


def wait_for_step(path, step, process):
    """Wait until the run's metrics have reached a step; the process must be alive all the while."""
    while True:
        assert process.poll() is None, process.stderr.read()
        if (path / "run.json").exists() and any(r["step"] >= step for r in RunFolder.open(path).metrics()):
            return
        time.sleep(0.02)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run on the demo's network and data."""
    path = tmp_path_factory.mktemp("straight") / "run"
    subprocess.run(
        [sys.executable, "-m", "wheretolearn", "train", str(path), *map(str, QUICK)], check=True, capture_output=True
    )
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


def test_kill_9_and_resume_equals_a_straight_run_bit_for_bit(straight, tmp_path, run_command):
    path = tmp_path / "run"
    process = start("train", path, *QUICK)
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
def test_a_signal_saves_and_exits_with_its_own_code(straight, tmp_path, run_command, number):
    path = tmp_path / "run"
    process = start("train", path, *QUICK)
    wait_for_step(path, 13, process)
    process.send_signal(number)
    _, message = process.communicate()
    assert process.returncode == 75, message
    assert "stopping after this step" in message
    assert "wheretolearn resume" in message
    assert checkpoint.load_latest(path).step >= 13
    assert run_command("resume", path, "--threads", 1).returncode == 0
    assert_same_end(straight, path)


def test_two_processes_cannot_write_one_run(tmp_path, run_command):
    path = tmp_path / "run"
    process = start("train", path, *QUICK)
    wait_for_step(path, 1, process)
    assert_message(run_command("resume", path), "is in use", str(process.pid))
    process.kill()
    process.communicate()


def test_a_corrupted_checkpoint_is_reported_and_the_one_before_used(straight, tmp_path, run_command):
    path = tmp_path / "run"
    process = start("train", path, *QUICK)
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
    assert run_command("train", path, *QUICK, "--set", "width=8", "--set", "outer_steps=10").returncode == 0
    saved = checkpoint.load_latest(straight)
    checkpoint.save(path, saved.state, saved.step)
    assert_message(run_command("resume", path), "belongs to another model", "block1.conv.weight")


def test_a_non_finite_loss_has_its_own_exit_code(tmp_path, run_command):
    result = run_command("train", tmp_path / "run", *QUICK, "--set", "inner_lr=1e30")
    assert_message(result, "outer step", "task", "layer", code=3)


def test_evaluate_prints_an_interval(straight, run_command):
    result = run_command("evaluate", straight, "--split", "characters", "--tasks", 5, "--threads", 1)
    assert result.returncode == 0, result.stderr
    assert "glyphs/characters:" in result.stdout
    assert "+-" in result.stdout
    assert_message(run_command("evaluate", straight, "--split", "nothing"), "characters", "scripts")


def test_evaluate_takes_the_splits_that_training_left_out(straight, run_command):
    result = run_command("evaluate", straight, "--tasks", 2, "--threads", 1)
    assert result.returncode == 0, result.stderr
    assert [line.partition(":")[0] for line in result.stdout.splitlines()] == ["glyphs/characters", "glyphs/scripts"]


def test_evaluate_takes_several_splits(straight, run_command):
    splits = ("--split", "validation", "--split", "scripts")
    result = run_command("evaluate", straight, *splits, "--tasks", 2, "--threads", 1)
    assert [line.partition(":")[0] for line in result.stdout.splitlines()] == ["glyphs/validation", "glyphs/scripts"]


def test_evaluate_where_results_cannot_be_kept(straight, tmp_path, run_command):
    shutil.copytree(straight, tmp_path / "run", ignore=shutil.ignore_patterns("evaluations"))
    (tmp_path / "run" / "evaluations").write_text("in the way")
    result = run_command("evaluate", tmp_path / "run", "--split", "scripts", "--tasks", 2)
    assert_message(result, str(tmp_path / "run" / "evaluations"))


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
