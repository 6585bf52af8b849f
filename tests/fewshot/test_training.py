import os
import signal
from contextlib import ExitStack
from typing import get_args

import numpy as np
import pytest
import torch

from wheretolearn import inner_loop, masks
from wheretolearn.config import from_dict, to_dict
from wheretolearn.data import image_set
from wheretolearn.data.image_set import ImageSplit
from wheretolearn.engine import eager
from wheretolearn.engine.eager import EagerEngine
from wheretolearn.errors import ConfigError, DataError, MismatchError, NonFiniteError, Stopped, UserError
from wheretolearn.fewshot.config import FewShotConfig, MaskKind
from wheretolearn.fewshot.tasks import TaskSource, check_images
from wheretolearn.fewshot.trained import evaluate_run, load_trained
from wheretolearn.fewshot.training import new_learner, train
from wheretolearn.runs import checkpoint
from wheretolearn.runs.folder import RunFolder

SMALL = {
    "data": "stripes",
    "train_split": "train",
    "validation_split": "train",
    "queries": 3,
    "width": 4,
    "inner_steps": 2,
    "test_inner_steps": 2,
    "outer_steps": 6,
    "tasks_per_step": 2,
    "validate_every": 3,
    "validation_tasks": 4,
    "log_every": 2,
    "checkpoint_every": 2,
}


def stripes(classes=8, drawings=6, name="stripes"):
    """Classes that differ in the place of a bright stripe: easy to learn, quick to draw."""
    random = np.random.default_rng(0)
    images = random.integers(0, 60, (classes * drawings, 16, 16, 1), dtype=np.uint8)
    for label in range(classes):
        images[label * drawings : (label + 1) * drawings, 2 * label : 2 * label + 2] += 150
    return ImageSplit(
        f"{name}/train",
        images,
        np.arange(0, classes * drawings + 1, drawings),
        tuple(f"stripe {label}" for label in range(classes)),
        ("",) * classes,
    )


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERETOLEARN_DATA", str(tmp_path / "data"))
    image_set.write("stripes", {"train": stripes()}, {})


@pytest.fixture
def new_run(tmp_path):
    with ExitStack() as runs:

        def make(name="run", seed=0, **settings):
            config = from_dict(FewShotConfig, {**SMALL, **settings})
            return runs.enter_context(RunFolder.create(tmp_path / name, to_dict(config), seed, "fewshot"))

        yield make


def final_state(run):
    return checkpoint.load_latest(run).state


def assert_equal(one, two, path=""):
    assert type(one) is type(two), path
    if isinstance(one, dict):
        assert one.keys() == two.keys(), path
        for key in one:
            if key not in ("seconds", "random"):
                assert_equal(one[key], two[key], f"{path}/{key}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, two), path
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), path
        for index, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_equal(a, b, f"{path}/{index}")
    else:
        assert one == two, path


def without_times(records):
    return [{key: value for key, value in record.items() if key != "elapsed_seconds"} for record in records]


@pytest.mark.parametrize("mask", ["binary", "relu", "exp", "linear", "fixed", "generated"])
def test_a_run_ends_with_a_model_and_a_mask_that_load(new_run, mask):
    run = new_run(mask=mask, inner_lr=0.1)
    learner = train(run)
    _, model, loaded = load_trained(run)
    assert loaded.kind == mask
    for name, tensor in learner.best["model"].items():
        assert torch.equal(model.state_dict()[name], tensor)
    for name, tensor in learner.best["mask"].items():
        assert torch.equal(loaded.tensors()[name], tensor)
    steps = [record["step"] for record in run.metrics()]
    assert steps == [1, 2, 3, 4, 6]
    assert {r["step"] for r in run.metrics() if "validation_accuracy" in r} == {3, 6}


@pytest.mark.parametrize("mode", ["batch", "support", "running"])
@pytest.mark.parametrize("order", ["first", "second"])
def test_learning_beats_chance_on_an_easy_problem(new_run, mode, order):
    run = new_run(outer_steps=60, width=8, batch_norm=mode, order=order, inner_lr=0.2, theta_lr=0.01, validate_every=60)
    train(run)
    assert evaluate_run(run, "train", tasks=40).accuracy > 0.4  # chance: 0.2


@pytest.mark.parametrize("stop_at", [1, 3, 4])
@pytest.mark.parametrize("mask", ["binary", "generated"])
def test_a_stopped_and_resumed_run_equals_a_straight_one(new_run, stop_at, mask):
    straight = new_run("straight", mask=mask)
    train(straight)
    stopped = new_run("stopped", mask=mask)

    def interrupt(step, values):
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match=f"after step {stop_at} of 6"):
        train(stopped, interrupt)
    assert checkpoint.load_latest(stopped).step == stop_at
    stopped.close()
    with RunFolder.open(stopped.path) as resumed:
        train(resumed)
    assert_equal(final_state(straight), final_state(stopped))
    assert without_times(straight.metrics()) == without_times(resumed.metrics())


def test_a_crash_between_checkpoints_loses_nothing_but_time(new_run):
    straight, crashed = new_run("straight", log_every=1), new_run("crashed", log_every=1)
    train(straight)

    def crash(step, values):
        if step == 5:  # one step after the checkpoint at 4
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(crashed, crash)
    assert crashed.metrics()[-1]["step"] == 5
    elapsed = crashed.metrics()[3]["elapsed_seconds"]
    train(crashed)
    assert crashed.metrics()[4]["elapsed_seconds"] > elapsed
    assert_equal(final_state(straight), final_state(crashed))
    assert without_times(straight.metrics()) == without_times(crashed.metrics())


def test_the_same_seed_gives_the_same_run_and_another_does_not(new_run):
    one, two, other = new_run("one"), new_run("two"), new_run("other", seed=1)
    for run in (one, two, other):
        train(run)
    assert_equal(final_state(one), final_state(two))
    weights = [final_state(run)["model"]["block1.conv.weight"] for run in (one, other)]
    assert not torch.equal(*weights)


def test_training_does_not_depend_on_global_random_state(new_run):
    torch.manual_seed(1)
    train(one := new_run("one"))
    torch.manual_seed(2)
    train(two := new_run("two"))
    assert_equal(final_state(one), final_state(two))


def test_the_best_model_by_validation_is_kept(new_run, monkeypatch):
    values = iter([0.9, 0.3])
    monkeypatch.setattr(
        "wheretolearn.fewshot.training.make_evaluator",
        lambda *a, **k: lambda tasks, steps: torch.tensor([next(values)]),
    )
    learner = train(new_run())
    assert (learner.best_step, learner.best_accuracy) == (3, pytest.approx(0.9))


def test_a_non_finite_loss_names_task_step_and_layer_and_keeps_the_checkpoint(new_run):
    run = new_run(inner_lr=1e30, theta_lr=1e-9)
    with pytest.raises(NonFiniteError) as caught:
        train(run)
    message = str(caught.value)
    assert "outer step 1, task 0" in message
    assert "inner step" in message or "query pass" in message
    assert "layer" in message
    assert NonFiniteError.exit_code not in (0, UserError.exit_code)


def test_a_later_non_finite_loss_keeps_the_last_good_checkpoint(new_run, monkeypatch):
    run = new_run()
    outer_step = EagerEngine.outer_step

    def poisoned(engine, step):
        if step == 4:
            engine.model.block2.conv.weight.data.fill_(float("nan"))
        outer_step(engine, step)

    monkeypatch.setattr(EagerEngine, "outer_step", poisoned)
    with pytest.raises(NonFiniteError, match=r"outer step 5, task 0, inner step 0, layer block2\.conv"):
        train(run)
    saved = checkpoint.load_latest(run)
    assert saved.step == 4
    assert saved.state["model"]["block2.conv.weight"].isfinite().all()


def test_a_checkpoint_of_another_model_is_refused(new_run):
    run, other = new_run(), new_run("other", width=5)
    train(other)
    checkpoint.save(run, final_state(other), 2)
    with pytest.raises(MismatchError, match=r"block1\.conv\.weight is \[5, 1, 3, 3\] in it but \[4, 1, 3, 3\]"):
        train(run)


def test_a_corrupted_checkpoint_falls_back_and_says_so(new_run):
    straight, run = new_run("straight"), new_run()
    train(straight)
    train(run)
    newest = max((run.path / "checkpoints").glob("*.pt"))
    newest.write_bytes(newest.read_bytes()[:-100])
    (run.path / "model.safetensors").unlink()
    learner = train(run)
    assert any("damaged" in note for note in learner.notes)
    assert_equal(final_state(straight), final_state(run))


def test_all_checkpoints_corrupted_is_an_error_that_names_them(new_run):
    run = new_run()
    train(run)
    for file in (run.path / "checkpoints").glob("*.pt"):
        file.write_bytes(b"no checkpoint")
    with pytest.raises(UserError, match=r"step-0+6.*is damaged"):
        train(run)


def test_too_few_images_in_a_class_is_an_error_before_anything_is_written():
    config = from_dict(FewShotConfig, {**SMALL, "queries": 6})
    with pytest.raises(DataError, match=r"stripes/train.*6.*7"):
        check_images(config, image_set.load("stripes"))


def test_an_unknown_split_lists_the_known_ones():
    config = from_dict(FewShotConfig, {**SMALL, "validation_split": "val"})
    with pytest.raises(DataError, match="it has train"):
        check_images(config, image_set.load("stripes"))


def test_an_unfinished_run_cannot_be_evaluated(new_run):
    with pytest.raises(UserError, match="is not finished"):
        evaluate_run(new_run(), "train")


def test_evaluation_on_images_of_another_size_is_refused(new_run):
    run = new_run()
    train(run)
    split = stripes(name="wide")
    wide = ImageSplit("wide/train", split.images.repeat(2, 1), split.class_offsets, split.classes, split.groups)
    image_set.write("wide", {"train": wide}, {})
    with pytest.raises(DataError, match=r"32x16x1.*16x16x1"):
        evaluate_run(run, "train", data="wide")


def test_evaluation_is_recorded_and_repeatable(new_run):
    run = new_run()
    train(run)
    one, two = (evaluate_run(run, "train", tasks=5) for _ in range(2))
    assert one == two
    assert len(one.task_accuracies) == 5
    assert (run.path / "evaluations" / "stripes-train-5-tasks-2-steps.json").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ways": 0}, "ways must be greater than 0"),
        ({"inner_steps": -1}, "inner_steps must not be negative"),
        ({"mask": "fixed", "initial_sparsity": 0.5}, "no meaning for mask=fixed"),
        ({"mask": "binry"}, "binary"),
        ({"inner_ls": 0.1}, "inner_lr"),
        ({"inner_lr": "high"}, "inner_lr"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(FewShotConfig, settings)


def test_initial_sparsity_reaches_the_mask():
    config = from_dict(FewShotConfig, {**SMALL, "initial_sparsity": 0.9})
    learner = new_learner(config, (16, 16, 1), seed=0)
    assert learner.mask.sparsity().overall == pytest.approx(0.9, abs=0.02)


def test_tasks_of_a_step_are_the_same_whatever_came_before():
    split = image_set.load("stripes").splits["train"]
    config = from_dict(FewShotConfig, SMALL)
    fresh = list(TaskSource(split, config.episode, 0, "train").tasks(7, 2))
    used = TaskSource(split, config.episode, 0, "train")
    list(used.tasks(0, 2))
    for one, two in zip(fresh, used.tasks(7, 2), strict=True):
        assert torch.equal(one.query_inputs, two.query_inputs)


class Spy:
    """Records the settings with which adaptation is asked for, and the tasks it sees."""

    def __init__(self, monkeypatch):
        self.steps, self.inputs = [], []
        adapt = eager.adapt

        def watched(model, mask, support_loss, **settings):
            self.steps.append(settings["steps"])
            self.inputs.append(support_loss.__self__.support_inputs)
            return adapt(model, mask, support_loss, **settings)

        monkeypatch.setattr(eager, "adapt", watched)


def test_training_and_validation_each_use_their_own_number_of_steps(new_run, monkeypatch):
    spy = Spy(monkeypatch)
    run = new_run(inner_steps=1, test_inner_steps=3, outer_steps=1, validation_tasks=2)
    train(run)
    assert spy.steps == [1, 1, 3, 3]
    evaluate_run(run, "train", tasks=2)
    assert spy.steps[4:] == [3, 3]
    evaluate_run(run, "train", tasks=2, steps=5)
    assert spy.steps[6:] == [5, 5]


def test_training_validation_and_test_tasks_are_drawn_apart(new_run, monkeypatch):
    spy = Spy(monkeypatch)
    run = new_run(outer_steps=1, tasks_per_step=2, validation_tasks=2)
    train(run)
    evaluate_run(run, "train", tasks=2)
    first_of_each = spy.inputs[0], spy.inputs[2], spy.inputs[4]
    for one, two in [(0, 1), (0, 2), (1, 2)]:
        assert not torch.equal(first_of_each[one], first_of_each[two])


def test_second_order_is_another_training(new_run):
    states = []
    for order in ("first", "second"):
        run = new_run(order, order=order, outer_steps=1, mask="fixed")
        train(run)
        states.append(final_state(run)["optimizer"]["state"][0]["exp_avg"])
    assert not torch.allclose(*states, rtol=0.05)


def test_the_gradient_is_the_mean_over_tasks(new_run):
    """Adam hides a constant factor, so look at its first moment, 0.1 times the gradient."""
    config = from_dict(FewShotConfig, {**SMALL, "mask": "fixed", "outer_steps": 1, "validation_tasks": 1})
    run = new_run(mask="fixed", outer_steps=1, validation_tasks=1)
    train(run)
    learner = new_learner(config, (16, 16, 1), seed=0)
    split = image_set.load("stripes").splits["train"]
    total = 0
    for task in TaskSource(split, config.episode, 0, "train").tasks(0, 2):
        adapted = inner_loop.adapt(learner.model, learner.mask, task.support_loss, steps=2, inner_lr=0.1)
        total += inner_loop.meta_gradient(adapted, task.query_loss).theta["block1.conv.weight"]
    moment = final_state(run)["optimizer"]["state"][0]["exp_avg"]
    torch.testing.assert_close(moment, 0.1 * total / 2)


def test_each_group_has_its_own_learning_rate_and_optimizer():
    for name, kind in (("adam", torch.optim.Adam), ("nesterov", torch.optim.SGD)):
        config = from_dict(FewShotConfig, {**SMALL, "optimizer": name, "theta_lr": 0.5, "mask_lr": 0.25})
        optimizer = new_learner(config, (16, 16, 1), seed=0).optimizer
        assert type(optimizer) is kind
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert all(group["nesterov"] and group["momentum"] == 0.9 for group in optimizer.param_groups)


def test_settings_of_mask_and_inner_loop_reach_them():
    config = from_dict(
        FewShotConfig,
        {**SMALL, "straight_through_scale": 0.5, "inner_clip_norm": 2.0, "adapt": "head", "order": "second"},
    )
    mask = new_learner(config, (16, 16, 1), seed=0).mask
    assert mask.straight_through_scale == 0.5
    assert mask.names == ("head.weight", "head.bias")
    assert (config.inner.clip_norm, config.inner.order, config.inner.steps) == (2.0, "second", 2)


def test_random_masks_are_drawn_anew_at_each_step_from_seed_and_step_alone(new_run):
    noises = []

    def watch(step, values):
        noises.append(engines[0].mask.noise.clone())

    engines = []
    original = EagerEngine.outer_step

    def outer_step(engine, step):
        engines.append(engine)
        original(engine, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagerEngine, "outer_step", outer_step)
        train(new_run("one", mask="generated", outer_steps=2), watch)
        engines.clear()
        train(new_run("two", mask="generated", outer_steps=2), watch)
    assert not torch.equal(noises[0], noises[1])
    assert torch.equal(noises[0], noises[2])
    assert torch.equal(noises[1], noises[3])


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_change(new_run, monkeypatch):
    run = new_run()
    accumulate = eager.accumulate

    def poisoned(adapted, query_loss, weight):
        loss = accumulate(adapted, query_loss, weight)
        adapted.model.head.weight.grad[0, 0] = float("nan")
        return loss

    monkeypatch.setattr(eager, "accumulate", poisoned)
    with pytest.raises(NonFiniteError, match=r"gradient is not finite: outer step 1, head\.weight"):
        train(run)
    assert checkpoint.load_latest(run) is None


def test_every_mask_maker_can_be_chosen_in_settings():
    assert set(get_args(MaskKind)) == set(masks.MAKERS)
