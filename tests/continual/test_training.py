"""Runs side by side: as good as alone, exact after a stop."""

from contextlib import ExitStack

import pytest
import torch

from wheretolearn.config import to_dict
from wheretolearn.continual import training
from wheretolearn.continual.config import ContinualConfig
from wheretolearn.continual.metrics import backward_transfer, forward_transfer, retained_accuracy
from wheretolearn.errors import MismatchError, NonFiniteError
from wheretolearn.runs import checkpoint
from wheretolearn.runs.folder import RunFolder
from wheretolearn.storage import load_weights

QUICK = {
    "problem": "rotations", "tasks": 3, "examples": 60, "classes": 5, "batch": 10, "width": 12, "glances": 2,
    "memory": 20, "matrix_images": 10, "log_every": 2, "checkpoint_every": 4,
}  # fmt: skip
LEARNERS = ["sgd", "er", "mer", "gem", "la-maml", "sparse-la-maml", "sparse-relu-la-maml"]


@pytest.fixture
def new_run(tmp_path):
    with ExitStack() as open_runs:

        def make(name, seed, **settings):
            config = ContinualConfig(**{**QUICK, **settings})
            return open_runs.enter_context(RunFolder.create(tmp_path / name, to_dict(config), seed, "continual"))

        yield make


def outcome(run):
    """All that a finished run leaves, but for times."""
    weights, _ = load_weights(run.path / "model.safetensors")
    measured = {name: value for name, value in training.result(run).items() if name not in ("seconds", "runs_at_once")}
    logged = [{k: v for k, v in record.items() if k != "elapsed_seconds"} for record in run.metrics()]
    return weights, measured, logged


@pytest.mark.parametrize("learner", LEARNERS)
def test_lanes_equal_separate_runs(new_run, learner):
    together = [new_run(f"both{seed}", seed, learner=learner, lr=lr) for seed, lr in ((4, 0.05), (9, 0.1))]
    training.train_together(together)
    for run in together:
        alone = new_run(f"alone{run.seed}", run.seed, learner=learner, lr=run.config["lr"])
        training.train_together([alone])
        (weights, measured, _), (expected, expected_measured, _) = outcome(run), outcome(alone)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
        assert measured["ra"] == pytest.approx(expected_measured["ra"], abs=0.05)
        assert (run.path / "model.safetensors").exists()


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_run_cut_off_in_mid_task_goes_on_bit_for_bit(new_run, learner):
    whole = [new_run(f"whole{seed}", seed, learner=learner) for seed in (0, 1)]
    training.train_together(whole)
    cut = [new_run(f"cut{seed}", seed, learner=learner) for seed in (0, 1)]

    def interrupt(run, step, values):
        if step == 10:  # two batches after a checkpoint, in the middle of the second task
            raise Interrupted

    with pytest.raises(Interrupted):
        training.train_together(cut, interrupt)
    assert not training.finished(cut[0])
    assert checkpoint.load_latest(cut[0]).step == 8
    for run in cut:
        run.close()
    again = [RunFolder.open(run.path) for run in cut]
    training.train_together(again)
    for run, expected in zip(again, whole, strict=True):
        run.close()
        found, reference = outcome(run), outcome(expected)
        assert found[1:] == reference[1:]
        for name, value in reference[0].items():
            assert torch.equal(found[0][name], value)
        one, two = (checkpoint.load_latest(r).state["learner"] for r in (run, expected))
        assert one.keys() == two.keys()
        for name, value in two.items():
            assert torch.equal(one[name], value), name


def test_a_run_without_a_checkpoint_starts_with_its_own_weights_beside_one_that_has_one(new_run):
    """One was stopped before its first batch and saved, the other killed before it saved anything."""
    straight = [new_run(f"straight{seed}", seed) for seed in (0, 1)]
    for run in straight:
        training.train_together([run])
    saved, bare = new_run("saved", 0), new_run("bare", 1)
    training._Lanes([saved], "cpu", None, None).save()
    assert checkpoint.load_latest(saved).step == 0
    training.train_together([saved, bare])
    for run, expected in zip((saved, bare), straight, strict=True):
        for name, value in outcome(expected)[0].items():
            torch.testing.assert_close(outcome(run)[0][name], value, rtol=1e-4, atol=1e-5)


def test_lanes_saved_at_different_steps_go_on_from_the_last_common_one_bit_for_bit(new_run):
    """A kill between two saves leaves some lanes a checkpoint ahead."""
    whole = [new_run(f"whole{seed}", seed) for seed in (0, 1, 2)]
    training.train_together(whole)
    cut = [new_run(f"cut{seed}", seed) for seed in (0, 1, 2)]
    saves = []

    def interrupt(run, state, step, save=checkpoint.save):
        saves.append(step)
        if len(saves) == 5:  # the second of three lanes, the second time
            raise Interrupted
        return save(run, state, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", interrupt)
        with pytest.raises(Interrupted):
            training.train_together(cut)
    assert [checkpoint.load_latest(run).step for run in cut] == [8, 4, 4]
    assert [[run.seed for run in group] for group in training.lane_groups(cut[::-1])] == [[0, 1, 2]]
    training.train_together(cut[::-1])
    for run, expected in zip(cut, whole, strict=True):
        assert outcome(run)[1:] == outcome(expected)[1:]
        for name, value in outcome(expected)[0].items():
            assert torch.equal(outcome(run)[0][name], value)


def test_a_damaged_common_checkpoint_parts_lanes_whose_latest_are_whole(new_run):
    """A kill left one lane a checkpoint ahead, and its earlier one, the other's latest, is damaged."""
    runs = [new_run(str(seed), seed, learner="sgd") for seed in (0, 1)]
    lanes = training._Lanes(runs, "cpu", None, None)
    for _ in range(2):
        lanes.advance()
        lanes.save()
    next((runs[0].path / "checkpoints").glob("step-000000001.*")).write_bytes(b"junk")
    next((runs[1].path / "checkpoints").glob("step-000000002.*")).unlink()
    assert [checkpoint.load_latest(run).step for run in runs] == [2, 1]
    steps = []
    training.train_together(runs, lambda run, step, values: steps.append((run.seed, step)))
    assert all(training.finished(run) for run in runs)
    assert {(0, 2), (1, 1)} <= set(steps)
    assert (0, 1) not in steps


def test_a_lane_whose_folder_was_renamed_goes_on_alone(new_run, tmp_path):
    runs = [new_run(str(seed), seed, learner="sgd") for seed in (0, 1)]
    lanes = training._Lanes(runs, "cpu", None, None)
    lanes.advance()
    lanes.save()
    for run in runs:
        run.close()
    runs[0].path.rename(tmp_path / "renamed")
    again = [RunFolder.open(tmp_path / name) for name in ("renamed", "1")]
    assert training.lane_groups(again) == [[run] for run in again]
    training.train_together(again)
    for run in again:
        run.close()
        assert training.finished(run)


def test_a_checkpoint_of_other_settings_is_refused(new_run):
    run = new_run("run", 0, learner="sgd")
    lanes = training._Lanes([run], "cpu", None, None)
    lanes.save()
    lanes.progress[0].batches = 1
    lanes.save()
    for change in ({"width": 5}, {"learner": "la-maml"}):
        run.info["config"] = {**to_dict(ContinualConfig(**{**QUICK, "learner": "sgd"})), **change}
        with pytest.raises(MismatchError, match="its checkpoint belongs to other settings"):
            training.train_together([run])


def stopped_run(new_run, **early):
    """A run of which a checkpoint is there; ``early`` entries take the place of what it stores of its settings."""
    run = new_run("run", 3, learner="la-maml")
    lanes = training._Lanes([run], "cpu", None, None)
    lanes.advance()
    lanes.save()
    if early:
        saved = checkpoint.load_latest(run)
        state = {name: value for name, value in saved.state.items() if name not in ("seed", "settings")}
        checkpoint.save(run, state | early, 2)
    return run


@pytest.mark.parametrize(
    ("change", "told"),
    [({"lr": 0.7}, "lr="), ({"mask_lr": 0.9}, "mask_lr="), ({"problem": "permutations"}, 'problem="rotations"')],
)
def test_a_checkpoint_of_other_settings_is_refused_where_all_sizes_fit(new_run, change, told):
    run = stopped_run(new_run)
    run.info["config"] = run.config | change
    with pytest.raises(MismatchError, match=f"belongs to other settings than run.json has .it was saved with {told}"):
        training.train_together([run])


def test_a_checkpoint_of_other_settings_does_not_keep_lanes_beside_it_from_learning(new_run):
    runs = [new_run(str(seed), seed, learner="la-maml") for seed in (0, 1)]
    lanes = training._Lanes(runs, "cpu", None, None)
    lanes.advance()
    lanes.save()
    runs[0].info["config"] = runs[0].config | {"lr": 0.7}
    with pytest.raises(MismatchError, match=r"1 of 2 runs failed:\n.*/0: "):
        training.train_together(runs)
    assert [training.finished(run) for run in runs] == [False, True]


def test_a_checkpoint_of_another_seed_is_refused(new_run):
    run = stopped_run(new_run)
    run.info["seed"] = 4
    with pytest.raises(MismatchError, match=r"saved with seed=3\)"):
        training.train_together([run])


@pytest.mark.parametrize("early", [{}, {"of an early version": True}])
def test_a_checkpoint_goes_on_with_other_settings_that_change_no_result(new_run, early):
    run = stopped_run(new_run, **early)
    run.info["config"] = run.config | {"checkpoint_every": 7}
    training.train_together([run])
    assert training.finished(run)


def test_what_is_written(new_run):
    run = new_run("run", 1, learner="sparse-la-maml", width=64, glances=5)
    training.train_together([run])
    records = run.metrics()
    ends = [record for record in records if "task" in record]
    assert [record["task"] for record in ends] == [0, 1, 2]
    assert [record["step"] for record in ends] == [6, 12, 18]
    assert all(len(record["accuracies"]) == 3 for record in ends)
    assert [r["step"] for r in records] == sorted({*range(2, 19, 2), 6, 12, 18})
    measured = training.result(run)
    assert 0 < measured["sparsity"] < 1
    assert set(measured["sparsity_by_tensor"]) == {
        f"{layer}.{part}" for layer in ("layer1", "layer2", "head") for part in ("weight", "bias")
    }
    matrix = torch.tensor(measured["accuracy_matrix"], dtype=torch.float64)
    assert measured["ra"] == pytest.approx(matrix[-1].mean().item())
    assert measured["bti"] == pytest.approx((matrix[-1] - matrix.diagonal()).mean().item())
    assert measured["ra"] > 0.4  # chance is 0.2
    assert [record["accuracies"] for record in ends] == [pytest.approx(row) for row in measured["accuracy_matrix"]]


def test_runs_that_learn_differently_are_not_lanes_of_one_program(new_run):
    runs = [
        new_run("a", 0, lr=0.1), new_run("b", 1, lr=0.2),
        new_run("c", 0, glances=1), new_run("d", 0, learner="sgd"),
    ]  # fmt: skip
    assert [[run.path.name for run in group] for group in training.lane_groups(runs)] == [["a", "b"], ["c"], ["d"]]


def test_a_run_that_diverges_says_so(new_run):
    run = new_run("run", 0, learner="sgd", lr=1e30)
    with pytest.raises(NonFiniteError, match="not finite"):
        training.train_together([run])


def test_metrics_by_hand():
    matrix = torch.tensor([[0.9, 0.2, 0.1], [0.7, 0.8, 0.3], [0.6, 0.5, 0.9]])
    assert retained_accuracy(matrix) == pytest.approx(2.0 / 3)
    assert backward_transfer(matrix) == pytest.approx((-0.3 - 0.3 + 0.0) / 3)
    assert forward_transfer(matrix, torch.tensor([0.1, 0.1, 0.1])) == pytest.approx((0.1 + 0.2) / 2)
    assert forward_transfer(matrix[:1, :1], torch.tensor([0.1])) == 0
