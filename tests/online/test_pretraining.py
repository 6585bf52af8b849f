"""Pre-trained weights: made once, shared, safe against two processes at once and against a kill."""

import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from wheretolearn import cpu
from wheretolearn.cli.data import list_sets
from wheretolearn.cli.online import take_to_the_end
from wheretolearn.data.image_set import data_root
from wheretolearn.errors import DataError, NonFiniteError, Stopped
from wheretolearn.online import pretraining
from wheretolearn.online.config import GLYPHS, OnlineConfig, Source
from wheretolearn.online.pretraining import (
    cache_folder,
    class_splits,
    few_shot_settings,
    is_cached,
    pretrained_weights,
)
from wheretolearn.online.problem import source_split
from wheretolearn.online.training import finished, result, train, train_together
from wheretolearn.runs import checkpoint
from wheretolearn.runs.folder import RunFolder
from wheretolearn.storage import load_weights

pytestmark = pytest.mark.usefixtures("glyphs")

SMALL = {
    "learner": "maml", "pretrain": True, "width": 4, "steps": 6, "ways": 5, "inner_steps": 1, "log_every": 6,
    "pretrain_classes": 30, "pretrain_validation_classes": 10, "pretrain_steps": 8, "pretrain_tasks": 1,
    "pretrain_queries": 3, "pretrain_validate_every": 8,
}  # fmt: skip


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A data folder that knows the glyphs and nothing else."""
    glyphs = data_root() / "glyphs"
    source_split(GLYPHS[0])  # drawn first, if need be
    monkeypatch.setenv("WHERETOLEARN_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "glyphs").symlink_to(glyphs)
    return tmp_path / "data"


def run_folder(own_cache):
    (run,) = (path.parent for path in (own_cache / ".pretrained").glob("*/run.json"))
    return run


def test_it_learns_from_the_first_classes_and_validates_with_the_next():
    config = OnlineConfig(**SMALL)
    splits, every = class_splits(config), source_split(GLYPHS[0])
    assert splits["train"].classes == every.classes[:30]
    assert splits["validation"].classes == every.classes[30:40]
    assert (splits["validation"].images == every.images[every.class_offsets[30] : every.class_offsets[40]]).all()
    assert splits["validation"].class_offsets[0] == 0


@pytest.mark.parametrize(
    ("learner", "asked", "adapted"),
    [
        ("maml", "all", "all"),
        ("maml", ("block4.*", "head.*"), ("block4.*", "head.*")),
        ("anil", "all", "head"),
        ("online-adam", "all", "all"),
    ],
)
def test_it_is_the_few_shot_training_of_the_learner(learner, asked, adapted):
    settings = {"learner": learner, "lr": 0.002, "inner_lr": 0.07, "order": "second", "adapt": asked}
    config = OnlineConfig(**{**SMALL, **settings})
    few_shot = few_shot_settings(config, class_splits(config))
    assert (few_shot.mask, few_shot.adapt, few_shot.order) == ("fixed", adapted, "second")
    assert (few_shot.inner_steps, few_shot.inner_lr, few_shot.theta_lr) == (1, 0.07, 0.002)
    assert (few_shot.ways, few_shot.shots, few_shot.queries, few_shot.outer_steps) == (5, 5, 3, 8)


def test_runs_of_all_seeds_and_of_other_streams_share_one_pre_training(own_cache, make_run, monkeypatch):
    trainings = []
    original = pretraining.train
    monkeypatch.setattr(pretraining, "train", lambda *a, **k: trainings.append(1) or original(*a, **k))
    for number, changes in enumerate([{}, {"p": 0.5}, {"steps": 7}]):
        with make_run(f"run{number}", seed=number, **{**SMALL, **changes}) as run:
            train(run)
    assert trainings == [1]
    with make_run("other", **{**SMALL, "lr": 0.01}) as run:
        train(run)
    assert trainings == [1, 1]
    assert is_cached(cache_folder(OnlineConfig(**SMALL)))
    assert not is_cached(cache_folder(OnlineConfig(**{**SMALL, "pretrain_seed": 1})))


def test_a_run_starts_from_the_pre_trained_weights_and_then_needs_no_cache(own_cache, make_run):
    with make_run(**SMALL) as run:
        train(run)
        kept, _ = load_weights(run.path / "pretrained.safetensors")
        cached, _ = load_weights(run_folder(own_cache) / "model.safetensors")
        assert all(torch.equal(tensor, cached[name]) for name, tensor in kept.items())
        before = result(run)
        for name in ("result.json", "checkpoints", "metrics.jsonl"):
            path = run.path / name
            if path.is_dir():
                for file in path.iterdir():
                    file.unlink()
            else:
                path.unlink()
        (run_folder(own_cache) / "model.safetensors").unlink()
        train(run)
        assert {**result(run), "seconds": 0} == {**before, "seconds": 0}


def test_too_few_classes_are_refused():
    greek = Source("glyphs", groups=("greek",))
    with pytest.raises(
        DataError, match="wants 30 classes to train on and 20 to validate with, but source glyphs has 45"
    ):
        class_splits(OnlineConfig(**{**SMALL, "sources": (greek,), "pretrain_validation_classes": 20}))


def test_a_signal_stops_it_and_tells_how_to_go_on(own_cache, make_run, monkeypatch):
    original = pretraining.train

    def stop_early(step, values):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    runs = [make_run(name, **SMALL) for name in ("one", "two")]
    with monkeypatch.context() as patch:
        patch.setattr(pretraining, "train", lambda run, _, *rest: original(run, stop_early, *rest))
        with pytest.raises(
            Stopped, match=r"pre-training, which was saved; go on with `wheretolearn resume .*one .*two`"
        ):
            train_together(runs)
    assert checkpoint.load_latest(run_folder(own_cache)).step == 5
    train_together(runs)
    assert all(map(finished, runs))


@pytest.mark.parametrize("go", [train_together, lambda runs: take_to_the_end(runs, "cpu")], ids=["api", "command"])
def test_one_that_fails_is_tried_once_and_keeps_no_other_run_from_its_end(go, own_cache, make_run, monkeypatch):
    attempts = []

    def fail(*_):
        attempts.append(1)
        raise NonFiniteError("a loss is not finite")

    monkeypatch.setattr(pretraining, "train", fail)
    bad = [make_run(f"bad{seed}", seed=seed, **SMALL) for seed in (0, 1)]
    good = make_run("good", **{**SMALL, "learner": "online-adam", "pretrain": False})
    with pytest.raises(
        NonFiniteError, match=r"2 of 3 runs failed:\n.*bad0, .*bad1: pre-training failed: a loss is not finite"
    ):
        go([*bad, good])
    assert finished(good)
    assert not any(map(finished, bad))
    assert attempts == [1]


def test_it_goes_on_with_the_threads_it_was_begun_with(own_cache, make_run, monkeypatch):
    used = []

    def stop(*_):
        used.append(torch.get_num_threads())
        raise Stopped

    monkeypatch.setattr(pretraining, "train", stop)
    with make_run(**SMALL) as run:
        for number in (3, 1):
            with cpu.threads(number), pytest.raises(Stopped):
                train(run)
    assert used == [3, 3]


def test_ctrl_c_while_another_process_does_it_tells_how_to_go_on(own_cache, make_run):
    with make_run(**SMALL) as run:
        pass
    folder = cache_folder(OnlineConfig(**SMALL))
    folder.parent.mkdir()
    with (folder.parent / f"{folder.name}.lock").open("w") as held_by_another:
        fcntl.flock(held_by_another, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "wheretolearn", "resume", str(run.path)]
        waiting = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert "another process does the same pre-training: waiting for it" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        _, message = waiting.communicate()
    assert waiting.returncode == 75, message
    assert message.strip().splitlines() == [
        f"error: stopped while another process did the pre-training; go on with `wheretolearn resume {run.path}`"
    ]


def test_the_list_of_image_sets_says_which_was_made_for_it(own_cache, monkeypatch, capsys):
    pretrained_weights(OnlineConfig(**SMALL))
    monkeypatch.setenv("COLUMNS", "200")
    list_sets()
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "pretraining-" in line)
    assert "as glyphs; made for pre-training" in row


CHILD = """
import sys
from wheretolearn.online.config import OnlineConfig
from wheretolearn.online.pretraining import pretrained_weights
import torch
torch.set_num_threads(1)
pretrained_weights(OnlineConfig(**eval(sys.argv[1])), notify=lambda text: print(text, flush=True))
print("done", flush=True)
"""


def child(settings, environ=None):
    command = [sys.executable, "-c", CHILD, repr(settings)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def wait_for_step(own_cache, step, process):
    while True:
        assert process.poll() is None
        for file in (own_cache / ".pretrained").glob("*/run.json"):
            if any(record["step"] >= step for record in RunFolder.open(file.parent).metrics()):
                return
        time.sleep(0.01)


def test_a_second_process_waits_and_one_that_was_killed_is_taken_over(own_cache, hold_at):
    settings = {**SMALL, "pretrain_steps": 60, "pretrain_validate_every": 20}
    first = child(settings, hold_at(40))
    wait_for_step(own_cache, 1, first)
    second = child(settings)
    wait_for_step(own_cache, 40, first)
    assert checkpoint.load_latest(run_folder(own_cache)).step == 20
    assert second.stdout.readline() == "another process does the same pre-training: waiting for it\n"
    first.kill()
    first.communicate()
    said, _ = second.communicate()
    assert (second.returncode, said) == (0, "done\n")
    records = RunFolder.open(run_folder(own_cache)).metrics()
    steps = [record["step"] for record in records]
    assert steps[-1] == 60
    assert sorted(set(steps)) == steps  # every record once
    weights = pretrained_weights(OnlineConfig(**settings))

    (own_cache / ".pretrained").rename(own_cache / ".before")
    straight = pretrained_weights(OnlineConfig(**settings))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in straight.items())
