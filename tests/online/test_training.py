"""Runs in one process: what a learner gets to see and when, what is measured, stopping, resuming, failing."""

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from wheretolearn.config import to_dict
from wheretolearn.errors import MismatchError, NonFiniteError, Stopped
from wheretolearn.online import training
from wheretolearn.online.config import GLYPHS
from wheretolearn.online.learners.base import OnlineLearner
from wheretolearn.online.learners.network import arithmetic_for
from wheretolearn.online.problem import Problem, SourceImages
from wheretolearn.online.training import finished, result, settings_of, train, train_together
from wheretolearn.runs import checkpoint
from wheretolearn.runs.folder import RunFolder
from wheretolearn.storage import read_json, write_json

pytestmark = pytest.mark.usefixtures("glyphs")


class Scripted(OnlineLearner):
    """Predicts what it is told to, and remembers all it was shown."""

    def __init__(self, answer, ways=10, alarms=()):
        self.answer, self.ways, self.alarms = answer, ways, alarms
        self.seen: list[tuple[str, Tensor]] = []
        self.step = 0

    def predict(self, inputs: Tensor) -> Tensor:
        self.seen.append(("predict", inputs))
        chosen = self.answer(self, inputs)
        return torch.nn.functional.one_hot(chosen, self.ways).float()

    def observe(self, inputs: Tensor, labels: Tensor) -> None:
        self.seen.append(("observe", inputs))
        self.labels = labels
        self.step += 1

    @property
    def detected(self) -> bool:
        return self.step - 1 in self.alarms

    def state(self) -> dict[str, Tensor]:
        return {"step": torch.tensor(self.step)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.step = int(state["step"])


def with_learner(monkeypatch, make):
    monkeypatch.setattr(training, "make_learner", lambda config, model, seed, _: make())


def stream(run):
    config = settings_of(run)
    return Problem(config, run.seed, SourceImages(config.sources))


def test_every_batch_is_predicted_before_its_labels_are_shown(make_run, monkeypatch):
    learner = Scripted(lambda own, inputs: torch.zeros(len(inputs), dtype=torch.int64))
    with_learner(monkeypatch, lambda: learner)
    with make_run() as run:
        train(run)
        problem = stream(run)
    assert [kind for kind, _ in learner.seen] == ["predict", "observe"] * 24
    for step in range(24):
        for _, inputs in learner.seen[2 * step : 2 * step + 2]:
            assert torch.equal(inputs, problem.batch(step).inputs)


@pytest.mark.parametrize(
    "peek",
    [
        lambda own, inputs: torch.arange(10).repeat_interleave(5),  # by place in the batch
        lambda own, inputs: getattr(own, "labels", torch.zeros(len(inputs), dtype=torch.int64)),  # last step's labels
    ],
)
def test_a_learner_that_peeks_gains_nothing(peek, make_run, monkeypatch):
    with_learner(monkeypatch, lambda: Scripted(peek))
    with make_run(steps=200) as run:
        train(run)
        assert abs(result(run)["accuracy"] - 0.1) < 4 * (0.1 * 0.9 / (200 * 50)) ** 0.5


def test_what_is_measured_follows_from_predictions_and_stream(make_run, monkeypatch):
    alarms = (3, 9, 10, 20)
    with_learner(monkeypatch, lambda: Scripted(lambda own, x: torch.full((len(x),), own.step % 3), alarms=alarms))
    with make_run(learner="c-maml", seed=4) as run:
        train(run)
        problem, found, records = stream(run), result(run), run.metrics()
    assert found["accuracy"] == pytest.approx(0.1)  # always one label: five of fifty
    assert found["accuracy_by_source"] == {
        name: pytest.approx(0.1) for number, name in enumerate(problem.names) if (problem.source == number).any()
    }
    assert found["switches"] == int(problem.switched[1:].sum()) > 0
    assert [record["step"] for record in records] == [6, 12, 18, 24]
    assert [len(record["accuracies"]) for record in records] == [6] * 4
    assert [step for record in records for step in record["detected"]] == [alarm + 1 for alarm in alarms]
    told = [(switch["step"], switch["source"]) for record in records for switch in record["switches"]]
    steps = problem.switched.nonzero().flatten().tolist()
    assert told == [(step + 1, problem.names[problem.source[step]]) for step in steps]


def assert_same_end(one: RunFolder, two: RunFolder):
    states = [checkpoint.load_latest(run) for run in (one, two)]
    assert states[0].step == states[1].step
    learners = [saved.state["learner"] for saved in states]
    assert learners[0].keys() == learners[1].keys()
    assert all(torch.equal(tensor, learners[1][name]) for name, tensor in learners[0].items())
    results = [{**result(run), "seconds": 0, "runs_at_once": 0} for run in (one, two)]
    assert results[0] == results[1]
    metrics = [[{**record, "elapsed_seconds": 0} for record in run.metrics()] for run in (one, two)]
    assert metrics[0] == metrics[1]


class StopAt:
    """Ends the process's work with a signal after some steps."""

    def __init__(self, step):
        self.step = step

    def __call__(self, step, values):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("learner", ["online-adam", "bgd", "metacog", "c-maml", "sparse-c-maml", "sparse-relu-c-maml"])
def test_a_run_that_was_stopped_goes_on_as_if_it_never_had(learner, make_run):
    settings = {"learner": learner, "samples": 2, "switch_margin": 0.5, "buffer": 5}
    with make_run("straight", **settings) as straight, make_run("stopped", **settings) as stopped:
        train(straight)
        with pytest.raises(Stopped, match="stopped after step 11 of 24 and saved; go on with `wheretolearn resume"):
            train(stopped, StopAt(11))
        assert not finished(stopped)
        assert checkpoint.load_latest(stopped).step == 11
        train(stopped)
        assert_same_end(straight, stopped)


def test_runs_side_by_side_are_what_they_are_alone(make_run):
    alone, together = ([make_run(f"{where}{seed}", seed=seed) for seed in (0, 1)] for where in ("alone", "both"))
    for run in alone:
        train(run)
    train_together(together)
    for one, two in zip(alone, together, strict=True):
        assert_same_end(one, two)
    assert result(together[0])["runs_at_once"] == 2
    assert result(alone[0])["accuracy"] != result(alone[1])["accuracy"]


def test_lanes_that_take_steps_together_are_what_they_are_alone(make_run, monkeypatch):
    """As on a GPU. One has learned for a while before, one ends earlier, one diverges; none keeps the others."""
    settings = {"learner": "sparse-c-maml", "switch_margin": 0.05, "buffer": 5, "inner_steps": 2, "inner_lr": 0.02}
    longer, shorter = {"steps": 24, **settings}, {"steps": 16, **settings}
    alone = [make_run("one", seed=0, **longer), make_run("two", seed=1, **shorter)]
    together = [make_run("lane1", seed=0, **longer), make_run("lane2", seed=1, **shorter)]
    bad = make_run("bad", seed=2, **settings | {"inner_lr": 1e30})
    for run in alone:
        train(run)
    monkeypatch.setattr(training, "LANES_ON", ("cpu",))
    monkeypatch.setattr(training, "arithmetic_of", lambda _, model, __: arithmetic_for(model))  # as alone, on a CPU
    with pytest.raises(Stopped):
        train(together[0], StopAt(5))
    with pytest.raises(NonFiniteError, match=r"(?s)1 of 3 runs failed:.*bad, step \d+: the loss of a batch"):
        train_together([*together, bad])
    for one, two in zip(alone, together, strict=True):
        expected, found = result(one), result(two)
        assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=0.01)  # an image or two by rounding
        assert found["detection"] == expected["detection"]
        learned = [theta_and_mask(run) for run in (one, two)]
        assert (learned[1] - learned[0]).norm() < 0.01 * learned[0].norm()  # rounding errors grow
    assert (theta_and_mask(alone[1]) - theta_and_mask(alone[0])).norm() > 0.5 * theta_and_mask(alone[0]).norm()


def test_groups_whose_runs_are_all_at_work_keep_what_they_recorded(make_run, monkeypatch):
    made = []
    original = training.CMAMLLanes
    monkeypatch.setattr(training, "LANES_ON", ("cpu",))
    monkeypatch.setattr(
        training, "CMAMLLanes", lambda learners, *rest: made.append(learners) or original(learners, *rest)
    )
    runs = [
        make_run("a", seed=0, steps=2, inner_steps=1),
        make_run("b", seed=1, steps=4, inner_steps=1),
        make_run("c", seed=2, steps=4, inner_steps=2),
        make_run("d", seed=3, steps=4, inner_steps=2),
    ]
    train_together(runs)
    assert all(map(finished, runs))
    (first, second), others, alone = made
    assert [learner.inner_steps for learner in (first, second, *others)] == [1, 1, 2, 2]
    assert alone == [second]


def test_a_run_that_stops_beside_one_that_failed_tells_both(make_run):
    bad, good = make_run("bad", learner="online-adam", lr=1e30), make_run("good", learner="online-adam")

    def stop(run, step, values):
        if run is good and step == 20:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(
        Stopped, match=r"step 20 of 24 and saved; go on with `wheretolearn resume .*good`\n.*bad failed: "
    ):
        train_together([bad, good], stop)
    assert checkpoint.load_latest(good).step == 20


def theta_and_mask(run):
    state = checkpoint.load_latest(run).state["learner"]
    return torch.cat([tensor.flatten() for name, tensor in state.items() if name.startswith(("theta.", "mask."))])


def test_a_run_killed_between_its_last_step_and_its_result_only_lacks_the_result(make_run):
    with make_run() as run:
        train(run)
        expected = result(run)
        (run.path / "result.json").unlink()
        train(run)
        assert {**result(run), "seconds": 0} == {**expected, "seconds": 0}


def test_a_finished_run_is_left_as_it_is(make_run):
    with make_run() as run:
        train(run)
        before = (run.path / "result.json").stat().st_mtime_ns
        train(run)
        assert (run.path / "result.json").stat().st_mtime_ns == before


def test_a_run_that_diverges_says_so_and_does_not_keep_others_from_their_ends(make_run):
    bad = make_run("bad", learner="online-adam", lr=1e30)
    good = make_run("good", learner="online-adam")
    with pytest.raises(NonFiniteError, match=r"(?s)1 of 2 runs failed:.*bad: predictions are not finite at step") as e:
        train_together([bad, good])
    assert "use a smaller lr. Checkpoints saved before are good" in str(e.value)
    assert finished(good)
    assert not finished(bad)


def test_a_run_that_diverges_names_the_rates_that_its_learner_has(make_run):
    run = make_run(learner="metabgd", inner_steps=1, samples=1, mean_eta=1e30)
    with run, pytest.raises(NonFiniteError, match=r"use a smaller inner_lr or mean_eta, or set clip_norm\."):
        train(run)


def test_a_loss_that_the_learner_finds_not_finite_names_run_and_step(make_run):
    with (
        make_run(learner="c-maml-fixed", inner_lr=1e30) as run,
        pytest.raises(NonFiniteError, match=r"run, step \d+: "),
    ):
        train(run)


def edit(run: RunFolder, seed: int | None = None, **settings):
    """Change run.json by hand."""
    info = read_json(run.path / "run.json")
    info["config"] |= settings
    info["seed"] = info["seed"] if seed is None else seed
    write_json(run.path / "run.json", info)


@pytest.fixture
def stopped(make_run) -> RunFolder:
    with make_run() as run, pytest.raises(Stopped):
        train(run, StopAt(8))
    return run


OTHER_SOURCES = [to_dict(replace(source, probability=p)) for source, p in zip(GLYPHS, (0.25, 0.5, 0.25), strict=True)]


@pytest.mark.parametrize(
    ("change", "saved_with"),
    [
        ({"width": 6}, "width=4"),
        ({"learner": "c-maml-fixed"}, 'learner="sparse-c-maml"'),
        ({"learner": "online-adam"}, 'learner="sparse-c-maml"'),
        ({"shots": 1}, "shots=5"),
        ({"buffer": 2}, "buffer=100"),
        ({"seed": 3}, "seed=0"),
        ({"sources": OTHER_SOURCES}, 'sources=[{data = "glyphs", probability = 0.5'),
        ({"seed": 3, "p": 0.5}, "seed=0, p=0.8"),
        ({"inner_lr": 0.3}, "inner_lr=0.1"),
        ({"steps": 30}, "steps=24"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(change, saved_with, stopped):
    edit(stopped, **change)
    told = re.escape(f"belongs to other settings than run.json has (it was saved with {saved_with}")
    with RunFolder.open(stopped.path) as changed, pytest.raises(MismatchError, match=told):
        train(changed)


def test_a_result_is_not_measured_anew_from_other_settings(make_run):
    with make_run() as run:
        train(run)
    (run.path / "result.json").unlink()
    edit(run, seed=3)
    with RunFolder.open(run.path) as changed, pytest.raises(MismatchError, match=r"\(it was saved with seed=0\)"):
        train(changed)
    assert not finished(run)


@pytest.mark.parametrize("change", [{"log_every": 2, "checkpoint_every": 4}, {"precision": "tf32"}, {"samples": 2}])
def test_settings_that_make_no_other_run_may_change_before_it_goes_on(change, stopped):
    edit(stopped, **change)
    with RunFolder.open(stopped.path) as changed:
        train(changed)
        assert finished(changed)


def as_saved_before(run: RunFolder, **early):
    """Give the last checkpoint what early versions kept of the settings."""
    saved = checkpoint.load_latest(run)
    state = {name: value for name, value in saved.state.items() if name not in ("seed", "settings")}
    with RunFolder.open(run.path) as opened:
        checkpoint.save(opened, state | early, saved.step)  # in the place of the other


@pytest.mark.parametrize("early", [{"stored": [10, 5, 100]}, {}])
def test_checkpoints_of_early_versions_are_taken_as_ever(early, make_run, stopped):
    with make_run("straight") as straight:
        train(straight)
    as_saved_before(stopped, kind="sparse-c-maml", **early)
    with RunFolder.open(stopped.path) as opened:
        train(opened)
        assert_same_end(straight, opened)


def test_checkpoints_of_early_versions_are_refused_for_what_they_kept(stopped):
    as_saved_before(stopped, kind="sparse-c-maml", stored=[10, 5, 100])
    for change, saved_with in (({"learner": "c-maml"}, 'learner="sparse-c-maml"'), ({"buffer": 2}, "buffer=100")):
        kept = dict(read_json(stopped.path / "run.json")["config"])
        edit(stopped, **change)
        with RunFolder.open(stopped.path) as changed, pytest.raises(MismatchError, match=saved_with):
            train(changed)
        edit(stopped, **kept)


def drawn(run: RunFolder, part: str) -> Tensor:
    """The matrices and filters of a new run, of theta or of its mask: at first both are drawn at random."""
    learner = training._Member(run, {}, "cpu", None, None, 1).learner
    tensors = learner.theta if part == "theta" else learner.mask.raw
    return torch.cat([tensor.flatten() for tensor in tensors.values() if tensor.ndim > 1])


@pytest.mark.parametrize("part", ["theta", "mask"])
def test_runs_of_two_seeds_start_from_other_weights_and_masks(part, make_run):
    one, again, other = (drawn(make_run(name, seed=seed), part) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert torch.equal(one, again)
    assert (one != other).double().mean() > 0.99


def test_sparsity_is_the_share_of_all_weights_that_the_mask_covers(make_run):
    with make_run() as run:
        train(run)
        found, record = result(run), run.metrics()[-1]
    shares = found["sparsity_by_tensor"]
    state = checkpoint.load_latest(run).state["learner"]
    sizes = {name: state[f"theta.{name}"].numel() for name in shares}
    assert not any("norm" in name for name in shares)
    assert any("norm" in name for name in state)
    expected = sum(shares[name] * sizes[name] for name in shares) / sum(sizes.values())
    assert found["sparsity"] == record["sparsity"] == pytest.approx(expected, rel=1e-12)
    assert expected != pytest.approx(sum(shares.values()) / len(shares), rel=1e-3)  # tensors count by their sizes


def test_a_stream_that_learns_gets_better(make_run):
    with make_run(steps=60, p=1.0, width=8, inner_steps=4, inner_lr=0.3, learner="sparse-c-maml") as run:
        train(run)
        accuracies = [value for record in run.metrics() for value in record["accuracies"]]
    assert sum(accuracies[-10:]) / 10 > 0.6
    assert sum(accuracies[:1]) < 0.3


def test_runs_whose_batches_differ_in_size_are_not_lanes_of_one_group(make_run, monkeypatch):
    monkeypatch.setattr(training, "LANES_ON", ("cpu",))
    runs = [make_run(str(shots), seed=0, steps=2, inner_steps=1, shots=shots) for shots in (2, 3)]
    train_together(runs)
    assert all(finished(run) for run in runs)
