"""The real command in real processes: what it prints and records, how it ends, and what survives."""

import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
import torch

from wheretolearn.cli.common import runs_in
from wheretolearn.cli.continual import _Progress, continual
from wheretolearn.cli.fewshot import evaluate, resume, train
from wheretolearn.continual.training import finished, train_together
from wheretolearn.continual.worker import share_out
from wheretolearn.errors import ConfigError, MismatchError, NonFiniteError, UserError
from wheretolearn.runs import checkpoint
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import load_all
from wheretolearn.storage import load_weights

pytestmark = pytest.mark.xdist_group("glyphs")  # drawn once, by whichever process runs these

PRESET = "table5.sparse-la-maml.rotations"
SMALL = [*("--set", "width=16"), *("--set", "glances=2"), *("--set", "log_every=1"), *("--set", "checkpoint_every=10")]
QUICK = ["--preset", PRESET, "--scale", "quick", *SMALL]
BATCHES = 100


@pytest.fixture(scope="module")
def straight(tmp_path_factory, run_command):
    """Two seeds, never interrupted, each in a process of its own."""
    folder = tmp_path_factory.mktemp("straight")
    command = ["continual", "runs", *QUICK, "--seeds", "2", "--workers", "2", "--record", "records"]
    done = run_command(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture
def paths(straight):
    return [straight[0] / "runs" / f"{PRESET}-seed{seed}" for seed in (0, 1)]


def test_results_are_printed_over_seeds(straight):
    _, done = straight
    assert f"{PRESET} at quick scale, 2 seeds, in %:" in done.stdout
    for measure in ("RA", "BTI", "sparsity", "sparsity of layer1.weight", "sparsity of head.bias", "forward transfer"):
        row = next(line for line in done.stdout.splitlines() if line.startswith(f"│ {measure} "))
        assert "±" in row, row


def test_each_task_has_a_line_off_a_terminal(straight):
    for seed in (0, 1):
        lines = [line for line in straight[1].stderr.splitlines() if line.startswith(f"{PRESET}-seed{seed}: step")]
        assert [line.split("  ")[0].partition("step ")[2] for line in lines] == [
            f"{batches} of {BATCHES}" for batches in (20, 40, 60, 80, 100)
        ]
        assert all(f"task {task}  accuracy" in line for task, line in enumerate(lines, start=1))


def test_results_are_recorded_over_seeds(straight, paths):
    folder, done = straight
    records = {record.metric: record for record in load_all(folder / "records")}
    assert {"RA", "BTI", "sparsity", "sparsity of layer2.bias", "forward transfer"} <= records.keys()
    record = records["RA"]
    assert record.name == f"{PRESET} at quick scale"
    assert record.seeds == (0, 1)
    assert record.values == tuple(100 * json.loads((path / "result.json").read_text())["ra"] for path in paths)
    assert record.paper_value is None
    assert done.stdout.count("recorded records") == len(records)


def assert_same_end(one, two):
    """Bit for bit: the network, the mask, the memory, and what was measured."""
    states = [checkpoint.load_latest(path) for path in (one, two)]
    assert states[0].step == states[1].step == BATCHES
    learners = [saved.state["learner"] for saved in states]
    assert {"weights", "raw", "buffer.inputs", "buffer.labels"} <= learners[0].keys() == learners[1].keys()
    assert all(torch.equal(tensor, learners[1][name]) for name, tensor in learners[0].items())
    weights = [load_weights(path / "model.safetensors")[0] for path in (one, two)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    results = [json.loads((path / "result.json").read_text()) for path in (one, two)]
    assert [found.pop("seconds") > 0 for found in results] == [True, True]
    assert results[0] == results[1]
    metrics = [[{**record, "elapsed_seconds": 0} for record in RunFolder.open(path).metrics()] for path in (one, two)]
    assert metrics[0] == metrics[1]


def start(environ, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "wheretolearn", *map(str, arguments)], env=environ, stderr=subprocess.PIPE, text=True
    )


def wait_for_batch(path, batch, process):
    """Wait until a run has come this far; the process must be alive all the while."""
    while True:
        assert process.poll() is None, process.stderr.read()
        if (path / "run.json").exists() and any(record["step"] >= batch for record in RunFolder.open(path).metrics()):
            return
        time.sleep(0.01)


def test_kill_9_in_the_middle_of_a_task_and_resume_equals_a_straight_run(paths, tmp_path, run_command, hold_at):
    process = start(hold_at(33), "continual", tmp_path / "run", *QUICK)
    wait_for_batch(tmp_path / "run", 33, process)
    process.kill()
    process.communicate()
    assert not finished(RunFolder.open(tmp_path / "run"))
    assert checkpoint.load_latest(tmp_path / "run").step == 30
    resumed = run_command("resume", tmp_path / "run")
    assert resumed.returncode == 0, resumed.stderr
    assert f"{PRESET} at quick scale, seed 0, in %:" in resumed.stdout
    assert_same_end(paths[0], tmp_path / "run")


def test_it_goes_on_with_the_threads_it_was_begun_with(paths, tmp_path, monkeypatch):
    straight = RunFolder.open(paths[0])
    assert straight.threads == 1
    used = []
    monkeypatch.setattr(
        "wheretolearn.cli.continual.train_together", lambda *_, **__: used.append(torch.get_num_threads())
    )
    with RunFolder.create(tmp_path / "run", straight.config, 0, "continual", threads=3):
        resume([tmp_path / "run"], device="cpu")
    assert used == [3]
    assert torch.get_num_threads() == 1  # what comes after in this process has its own


def test_sigterm_saves_several_runs_and_resume_goes_on(paths, tmp_path, run_command, hold_at):
    folder = tmp_path / "runs"
    process = start(hold_at(3), "continual", folder, *QUICK, "--seeds", 2, "--workers", 2)
    stopped = [folder / f"{PRESET}-seed{seed}" for seed in (0, 1)]
    for path in stopped:
        wait_for_batch(path, 3, process)
    process.send_signal(signal.SIGTERM)
    _, message = process.communicate()
    assert process.returncode == 75, message
    assert "stopping after this step" in message
    assert "saved them; go on with `wheretolearn resume" in message
    assert "Traceback" not in message
    for path in stopped:
        assert checkpoint.load_latest(path).step == RunFolder.open(path).metrics()[-1]["step"] == 3
    assert run_command("resume", folder, "--workers", 2).returncode == 0
    for path, other in zip(paths, stopped, strict=True):
        assert_same_end(path, other)


def test_evaluate_shows_and_records_what_was_measured(straight, tmp_path, run_command):
    cell = "tableS5.sparse-la-maml.rotations"
    shown = run_command("evaluate", straight[0] / "runs", "--preset-name", cell, "--record", tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert f"{cell} at quick scale, 2 seeds" in shown.stdout
    assert {record.name for record in load_all(tmp_path)} == {f"{cell} at quick scale"}


def test_a_run_that_is_not_finished_is_not_evaluated(paths, tmp_path):
    shutil.copytree(paths[0], tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(UserError, match=r"is not finished: go on with `wheretolearn resume .*run`"):
        evaluate([tmp_path / "run"], device="cpu")


def test_options_of_few_shot_evaluation_are_refused(paths):
    message = "--split, --tasks, --steps: not for continual runs, which are measured while they learn"
    with pytest.raises(ConfigError, match=message):
        evaluate(paths, ["test"], tasks=5, steps=0, device="cpu")


def test_the_cell_of_another_protocol_is_refused(paths, capsys):
    with pytest.raises(ConfigError, match=r"of the protocol fewshot, but .*seed0 is continual"):
        evaluate(paths, preset_name="table1.maml.shot5", device="cpu")
    assert capsys.readouterr().out == ""


# Called in this process: what is refused before any work.


def refusal(*arguments, **options):
    with pytest.raises(UserError) as caught:
        continual(*arguments, scale="quick", device="cpu", **options)
    return str(caught.value)


def test_a_few_shot_preset_is_sent_to_its_command(tmp_path):
    message = refusal(tmp_path / "run", ["table1.sparse-maml.shot5"])
    assert message.endswith("of the protocol fewshot, which `continual` does not know: use `wheretolearn train`")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="which `train` does not know: use `wheretolearn continual`"):
        train(tmp_path / "run", [PRESET], device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lrr=1", 'unknown setting "lrr"; did you mean "lr"?'),
        ("tasks=none", '"tasks" expects int, got "none"'),
        ("tasks=0", "tasks must be at least 1, not 0"),
        ("examples=9999", "9999"),
        ("model=cifar_net", "use model=mlp"),
        ("learner=gem", "memory=4 is less than one example for each of 5 tasks"),
        ("data=mnits", "mnits"),
    ],
)
def test_a_wrong_setting_leaves_no_run_behind(tmp_path, setting, message):
    assert message in refusal(tmp_path / "run", [PRESET], overrides=["memory=4", setting])
    assert not (tmp_path / "run").exists()


def test_an_unknown_preset_names_the_nearest(tmp_path):
    assert "table5.sparse-la-maml.rotations" in refusal(tmp_path / "run", ["table5.sparse-lamaml.rotations"])


def test_a_group_stands_for_all_its_presets(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr("wheretolearn.cli.continual.take_to_the_end", lambda runs, *_: started.extend(runs))
    monkeypatch.chdir(tmp_path)
    continual(None, ["figure3.width", "figure3.width.50"], scale="quick", seeds=2, overrides=SMALL[3::2], device="cpu")
    widths = [25, 50, 100, 200, 400]
    assert [(run.preset, run.seed, run.config["width"]) for run in started] == [
        (f"figure3.width.{width}", seed, width) for width in widths for seed in (0, 1)
    ]
    assert "figure3.width is a group of 5 presets of 2 seeds: 10 runs" in capsys.readouterr().err
    started.clear()
    continual(None, ["table5.la-maml"], scale="quick", device="cpu")
    names = [f"table5.la-maml.{problem}" for problem in ("rotations", "permutations", "many")]
    assert [str(run.path) for run in started] == [f"runs/table5.la-maml/{name}-seed0" for name in names]
    assert "table5.la-maml is a group of 3 presets: 3 runs" in capsys.readouterr().err


def test_a_group_of_few_shot_presets_is_sent_to_its_command(tmp_path):
    assert refusal(tmp_path / "run", ["table1.maml"]).endswith("use `wheretolearn train`")


def test_a_folder_that_holds_a_run_says_how_to_go_on(paths):
    message = refusal(paths[0], [PRESET])
    assert message == (
        f"{paths[0]} already holds a run: go on with `wheretolearn resume {paths[0]}`, or choose another folder"
    )
    assert "seed0 already holds a run" in refusal(paths[0].parent, [PRESET], seeds=3)
    assert "is itself a run" in refusal(paths[0], [PRESET], seeds=3)


def test_a_run_is_named_after_its_preset_or_by_hand(straight, monkeypatch):
    monkeypatch.chdir(straight[0])
    assert refusal(None, None) == "give a folder for the run, or a --preset, after which it is named"
    shutil.copytree("runs", f"copy/runs/{PRESET}")
    monkeypatch.chdir("copy")
    assert f"runs/{PRESET}/{PRESET}-seed0 already holds a run" in refusal(None, [PRESET], seeds=2)


def test_records_that_cannot_be_written_are_refused_before_any_work(straight, tmp_path):
    assert "give a --preset" in refusal(tmp_path / "run", None, record=tmp_path)
    assert "seeds that these runs lack: 0" in refusal(
        tmp_path / "run", [PRESET], overrides=SMALL[1::2], seed=1, seeds=2, record=straight[0] / "records"
    )
    other = [*SMALL[1::2], "lr=0.2"]
    assert "with other settings: lr=0.05 there, 0.2 here. Choose another folder" in refusal(
        tmp_path / "run", [PRESET], overrides=other, seeds=2, record=straight[0] / "records"
    )
    assert not (tmp_path / "run").exists()


# Sharing out.


@pytest.fixture
def new_runs(paths, tmp_path):
    """Runs that have not begun, by seed with the settings that are their own."""
    config = RunFolder.open(paths[0]).config
    with ExitStack() as folders:
        yield lambda seeds: [
            folders.enter_context(RunFolder.create(tmp_path / str(seed), {**config, **own}, seed, "continual"))
            for seed, own in seeds.items()
        ]


def seeds_of(shares):
    return [[run.seed for run in share] for share in shares]


def test_lanes_are_shared_out_evenly_and_those_of_other_settings_apart(new_runs):
    runs = new_runs({seed: {"lr": 0.1 * (1 + seed), "width": 8 if seed > 4 else 4} for seed in range(7)})
    assert seeds_of(share_out(runs, 1)) == [[0, 1, 2, 3, 4], [5, 6]]
    assert sorted(seeds_of(share_out(runs, 2))) == [[0, 1], [2, 3, 4], [5], [6]]
    assert len(share_out(runs, 16)) == 7
    # As after a stop: three are at one batch and two at another, and nobody needs to part.
    for seeds, step in (((0, 2, 4), 20), ((1, 3), 25)):
        for seed in seeds:
            checkpoint.save(runs[seed], {"lanes": [runs[other].path.name for other in seeds]}, step)
    assert seeds_of(share_out(runs[:5], 2)) == [[0, 2, 4], [1, 3]]


def test_a_run_that_diverges_does_not_keep_its_neighbours_from_their_ends(new_runs, tmp_path):
    brief = {"tasks": 2, "examples": 20, "clip_norm": None, "learner": "er"}
    runs = new_runs({0: {**brief, "lr": 1e30}, 1: {**brief, "lr": 0.01}})
    notes = []
    with pytest.raises(NonFiniteError, match="weights are not finite") as caught:
        train_together(runs, notify=notes.append)
    assert str(caught.value).count("not finite") == 1
    assert len(notes) == 1
    assert [finished(run) for run in runs] == [False, True]
    assert [run.seed for run in runs_in([tmp_path], wanted="unfinished")] == [0]


def test_a_run_that_fails_keeps_no_others_from_their_ends(new_runs):
    brief = {"tasks": 2, "examples": 20}
    runs = new_runs({0: {**brief, "learner": "er"}, 1: {**brief, "learner": "sgd"}, 2: {**brief, "learner": "sgd"}})
    checkpoint.save(runs[0], {"learner": {}, "matrix": None, "seconds": 0.0, "lanes": [runs[0].path.name]}, 1)
    with pytest.raises(MismatchError, match="1 of 3 runs failed"):
        train_together(runs)
    assert [finished(run) for run in runs] == [False, True, True]


def test_a_run_whose_checkpoints_are_damaged_keeps_no_others_from_their_ends(paths, tmp_path, run_command):
    for number, path in enumerate(paths):
        shutil.copytree(path, tmp_path / f"runs/seed{number}")
        (tmp_path / f"runs/seed{number}/result.json").unlink()
    for stored in (tmp_path / "runs/seed0/checkpoints").iterdir():
        stored.write_text("junk")
    done = run_command("resume", "runs", "--device", "cpu", "--workers", "1", cwd=tmp_path)
    assert done.returncode == 1
    assert "error: 1 of 2 runs failed:\nruns/seed0: the checkpoint runs/seed0/checkpoints/step-" in done.stderr
    assert "note: runs/seed0 failed: the checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    assert [finished(RunFolder.open(tmp_path / f"runs/seed{seed}")) for seed in (0, 1)] == [False, True]


def test_of_the_runs_of_one_process_only_those_that_failed_are_named(new_runs, tmp_path, run_command):
    brief = {"tasks": 2, "examples": 20, "clip_norm": None, "learner": "er"}
    for run in new_runs({0: {**brief, "lr": 1e30}, 1: {**brief, "lr": 0.01}}):
        run.close()
    done = run_command("resume", "0", "1", "--device", "cpu", "--workers", "1", cwd=tmp_path)
    assert done.returncode == NonFiniteError.exit_code
    assert finished(RunFolder.open(tmp_path / "1"))
    assert "note: 0 failed: weights are not finite" in done.stderr
    assert "error: 1 of 2 runs failed:\n0: weights are not finite" in done.stderr
    assert done.stderr.count("runs failed") == 1
    assert "1 failed" not in done.stderr


def test_a_run_of_another_protocol_is_refused(tmp_path):
    RunFolder.create(tmp_path / "run", {}, 0, "offline").close()
    with pytest.raises(UserError, match="a run of the protocol offline, which this command does not know"):
        runs_in([tmp_path / "run"], wanted="unfinished")


def test_a_seed_that_is_too_large_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="seeds end at"):
        continual(tmp_path / "run", [PRESET], seed=2**31 - 1, seeds=2)


def test_many_runs_share_a_bar_that_shows_their_mean(new_runs, monkeypatch, capsys):
    monkeypatch.setattr("wheretolearn.cli.continual.MOST_BARS", 1)
    one, two = new_runs({0: {}, 1: {}})
    progress = _Progress([one, two])
    with progress.bars:
        progress.report(one, 20, {"task": 0, "accuracy": 0.5, "sparsity": 0.1})
        progress.report(one, 40, {"task": 1, "accuracy": 0.9, "sparsity": 0.3})
        assert capsys.readouterr().err == ""
        progress.report(two, 20, {"task": 0, "accuracy": 0.7, "sparsity": 0.1})
    assert "runs: step 60 of 200  task 1  accuracy 60.0%  sparsity 20.0%" in capsys.readouterr().err
