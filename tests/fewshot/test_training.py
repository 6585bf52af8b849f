import json
import os
import shutil
import signal
from dataclasses import fields, replace
from typing import get_args
from unittest.mock import Mock

import pytest
import torch

from wheretolearn import batch_norm, inner_loop, masks
from wheretolearn.config import from_dict
from wheretolearn.data import image_set
from wheretolearn.data.image_set import ImageSet, ImageSplit
from wheretolearn.engine import eager
from wheretolearn.engine.conv4_cpu import Conv4OnCPU
from wheretolearn.engine.eager import EagerEngine, EagerEvaluator
from wheretolearn.errors import ConfigError, DataError, MismatchError, NonFiniteError, Stopped, UserError
from wheretolearn.fewshot import training, worker
from wheretolearn.fewshot.config import FewShotConfig, MaskKind
from wheretolearn.fewshot.learner import new_learner
from wheretolearn.fewshot.tasks import TaskSource, check_images, known_classes
from wheretolearn.fewshot.trained import best_folders, evaluate_run, load_trained, planned
from wheretolearn.fewshot.training import train, train_together
from wheretolearn.runs import checkpoint
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.workers import Outcome
from wheretolearn.storage import load_weights, save_weights

pytestmark = pytest.mark.usefixtures("stripes")


def final_state(run):
    return checkpoint.load_latest(run).state


def without_identity(state):
    """As early versions saved it."""
    return {key: value for key, value in state.items() if key not in ("seed", "settings")}


def assert_equal(one, two, path=""):
    assert type(one) is type(two), path
    if isinstance(one, dict):
        assert one.keys() == two.keys(), path
        for key in one:
            if key not in ("seconds", "random", "settings"):
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
    for name, tensor in learner.best[0].model.items():
        assert torch.equal(model.state_dict()[name], tensor)
    for name, tensor in learner.best[0].mask.items():
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
@pytest.mark.parametrize(
    "settings",
    [{"mask": "binary"}, {"mask": "generated"}, {"average_decay": 0.5}],
    ids=["binary", "generated", "average"],
)
def test_a_stopped_and_resumed_run_equals_a_straight_one(new_run, stop_at, settings):
    straight = new_run("straight", **settings)
    train(straight)
    stopped = new_run("stopped", **settings)

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


@pytest.mark.parametrize("settings", [{}, {"mask": "generated", "mask_optimizer": "nesterov"}, {"learn_theta": False}])
def test_running_means_are_validated_and_kept_and_training_goes_on_without_them(new_run, stripes, settings):
    settings = {**settings, "outer_steps": 25, "validate_every": 25, "checkpoint_every": 1, "log_every": 1}
    plain, averaged = new_run("plain", **settings), new_run("averaged", average_decay=0.6, **settings)
    states = []

    def keep(step, values):
        if step > 1:  # the checkpoint of the step before
            states.append(final_state(plain))

    train(plain, keep)
    states.append(final_state(plain))
    learner = train(averaged)
    assert len(states) == 25
    for part in ("model", "mask"):
        assert_equal(final_state(averaged)[part], states[-1][part])
        for name, kept in getattr(learner.best[0], part).items():
            mean = torch.zeros(kept.shape)
            for step, state in enumerate(states, start=1):
                weight = max(0.4, 10 / (9 + step))
                mean = (1 - weight) * mean + weight * state[part][name]
            learned = name != "noise" and name not in dict(learner.model.named_buffers())
            torch.testing.assert_close(kept, mean if learned else states[-1][part][name])
    assert plain.metrics()[-1]["loss"] == averaged.metrics()[-1]["loss"]
    accuracy = [run.metrics()[-1]["validation_accuracy"] for run in (plain, averaged)]
    assert accuracy[1] == learner.best_accuracy
    config, model, mask = load_trained(averaged)
    assert averaged.metrics()[-1]["sparsity"] == mask.sparsity().overall
    tasks = TaskSource(stripes(), config.episode, averaged.seed, "validation").tasks(0, config.validation_tasks)
    assert EagerEvaluator(model, mask, config.inner).accuracies(tasks, 2).mean().item() == accuracy[1]


def test_training_does_not_depend_on_global_random_state(new_run):
    torch.manual_seed(1)
    train(one := new_run("one"))
    torch.manual_seed(2)
    train(two := new_run("two"))
    assert_equal(final_state(one), final_state(two))


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

    def poisoned(engine, steps):
        if steps == [4]:
            engine.lanes[0].model.block2.conv.weight.data.fill_(float("nan"))
        outer_step(engine, steps)

    monkeypatch.setattr(EagerEngine, "outer_step", poisoned)
    with pytest.raises(NonFiniteError, match=r"outer step 5, task 0, inner step 0, layer block2\.conv"):
        train(run)
    saved = checkpoint.load_latest(run)
    assert saved.step == 4
    assert saved.state["model"]["block2.conv.weight"].isfinite().all()


def test_a_checkpoint_of_another_model_is_refused_by_its_shapes_where_it_knows_no_settings(new_run):
    run, other = new_run(), new_run("other", width=5)
    train(other)
    checkpoint.save(run, without_identity(final_state(other)), 2)
    with pytest.raises(MismatchError, match=r"block1\.conv\.weight is \[5, 1, 3, 3\] in it but \[4, 1, 3, 3\]"):
        train(run)


@pytest.fixture
def stopped(new_run):
    """A run that stopped after two steps, closed."""

    def interrupt(step, values):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with new_run() as run, pytest.raises(Stopped):
        train(run, interrupt)
    return run


def change(run, **values):
    info = json.loads((run.path / "run.json").read_text())
    settings = info["config"]
    for name, value in values.items():
        (settings if name in settings else info)[name] = value
    (run.path / "run.json").write_text(json.dumps(info))


@pytest.mark.parametrize(
    ("changed", "told"),
    [({"inner_lr": 0.9}, r"inner_lr=0\.1"), ({"seed": 9}, "seed=0"), ({"start_from": "other"}, "start_from=none")],
)
def test_a_checkpoint_of_other_settings_or_another_seed_is_refused(stopped, changed, told):
    before = {file: file.read_bytes() for file in (stopped.path / "checkpoints").iterdir()}
    change(stopped, **changed)
    message = rf"belongs to other settings than run\.json has \(it was saved with {told}\)"
    with RunFolder.open(stopped.path) as run, pytest.raises(MismatchError, match=message):
        train(run)
    assert {file: file.read_bytes() for file in (stopped.path / "checkpoints").iterdir()} == before


def test_a_run_cannot_end_before_the_step_it_has_reached(stopped):
    before = {file: file.read_bytes() for file in (stopped.path / "checkpoints").iterdir()}
    change(stopped, outer_steps=1)
    with RunFolder.open(stopped.path) as run, pytest.raises(ConfigError, match=r"taken 2 outer steps .*too few"):
        train(run)
    assert {file: file.read_bytes() for file in (stopped.path / "checkpoints").iterdir()} == before
    change(stopped, outer_steps=2)
    with RunFolder.open(stopped.path) as run:
        assert train(run).step == 2


def test_a_run_under_way_can_be_told_to_keep_fewer_of_the_best(new_run):
    def interrupt(step, values):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with new_run(validate_every=1, keep_best=3) as run, pytest.raises(Stopped):
        train(run, interrupt)
    assert len(final_state(run)["best"]) == 3
    change(run, keep_best=2)
    with RunFolder.open(run.path) as run:
        assert len(train(run).best) == len(best_folders(run)) == 2


def test_models_of_an_earlier_end_do_not_stay_among_the_best(new_run):
    with new_run(validate_every=1, keep_best=3) as run:
        assert len(train(run).best) == len(best_folders(run)) == 3
    (run.path / "model.safetensors").unlink()
    change(run, keep_best=1, outer_steps=run.config["outer_steps"] + 1)
    with RunFolder.open(run.path) as run:
        train(run)
        assert best_folders(run) == [run.path]


def test_a_run_under_way_can_be_told_to_go_on_for_longer(stopped):
    change(stopped, outer_steps=9, checkpoint_every=2)
    with RunFolder.open(stopped.path) as run:
        assert train(run).step == 9


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


def test_too_few_images_in_a_class_is_an_error_before_anything_is_written(small):
    config = from_dict(FewShotConfig, {**small, "queries": 6})
    with pytest.raises(DataError, match=r"stripes/train.*6.*7"):
        check_images(config, image_set.load("stripes"))


def test_an_unknown_split_lists_the_known_ones(small):
    config = from_dict(FewShotConfig, {**small, "validation_split": "val"})
    with pytest.raises(DataError, match="it has train"):
        check_images(config, image_set.load("stripes"))


def test_an_unfinished_run_cannot_be_evaluated(new_run):
    with pytest.raises(UserError, match="is not finished"):
        evaluate_run(new_run(), "train")


def test_a_run_that_is_told_to_go_on_is_finished_only_at_its_new_end(new_run):
    with new_run(outer_steps=2) as run:
        train(run)
        assert training.finished(run)
    change(run, outer_steps=4)
    with RunFolder.open(run.path) as run:
        assert not training.finished(run)
        assert not training.finished(RunFolder(run.path))  # of which nothing has been read
        with pytest.raises(UserError, match="is not finished: go on with"):
            evaluate_run(run, "train")
        train(run)
        assert training.finished(run)
    change(run, outer_steps=3)  # it has ended, later than that
    with RunFolder.open(run.path) as run:
        assert training.finished(run)
        with pytest.raises(MismatchError, match=r"put run\.json back"):
            evaluate_run(run, "train")


def test_patience_can_be_given_to_a_run_that_has_lost_it(new_run):
    with new_run(patience=1) as run:
        train(run)
    for patience, ended in ((1, True), (2, False), (None, False)):
        change(run, patience=patience)
        assert training.finished(RunFolder.open(run.path)) == ended


@pytest.mark.parametrize("identity", ['{"settings": x}', "[]", '{"settings": []}'])
def test_a_damaged_model_is_finished_and_told_by_what_reads_it(new_run, identity):
    with new_run() as run:
        train(run)
    file = run.path / "model.safetensors"
    stored = json.dumps(load_weights(file)[1]["identity"])[1:-1].encode()
    content = file.read_bytes()
    assert stored in content
    damaged = json.dumps(identity)[1:-1].encode()
    file.write_bytes(content.replace(stored, damaged.ljust(len(stored))))
    assert training.finished(run)
    with pytest.raises(UserError, match="damaged"):
        evaluate_run(run, "train")


def test_a_trained_run_without_checkpoints_is_not_trained_anew(new_run):
    with new_run() as run:
        train(run)
        shutil.rmtree(run.path / "checkpoints")
        kept = run.metrics()
        with pytest.raises(UserError, match="has its model but no checkpoint: evaluate it, or train anew"):
            train(run)
        assert run.metrics() == kept
    change(run, outer_steps=99)
    with RunFolder.open(run.path) as run, pytest.raises(UserError, match=r"put run\.json back as it was and evaluate"):
        train(run)


@pytest.mark.parametrize(("changed", "told"), [({"inner_lr": 0.9}, r"inner_lr=0\.1"), ({"seed": 9}, "seed=0")])
def test_a_trained_model_of_other_settings_than_its_run_is_not_evaluated(new_run, changed, told):
    with new_run(outer_steps=2) as run:
        train(run)
    change(run, test_inner_steps=1)
    with RunFolder.open(run.path) as run:
        assert evaluate_run(run, "train", tasks=1).steps == 1
    change(run, **changed)
    for measure in (planned, evaluate_run):
        with (
            RunFolder.open(run.path) as run,
            pytest.raises(MismatchError, match=rf"its model belongs to other settings .*saved with \w*{told}\)"),
        ):
            measure(run, split="train", data="stripes")


def test_a_model_of_an_early_version_is_evaluated(new_run):
    run = new_run()
    train(run)
    expected = evaluate_run(run, "train", tasks=2)
    tensors, about = load_weights(run.path / "model.safetensors")
    assert about.pop("identity")
    save_weights(run.path / "model.safetensors", tensors, about)
    assert evaluate_run(run, "train", tasks=2) == expected


def test_evaluation_on_images_of_another_size_is_refused(new_run, stripes):
    run = new_run()
    train(run)
    split = stripes(name="wide")
    wide = ImageSplit("wide/train", split.images.repeat(2, 1), split.class_offsets, split.classes, split.groups)
    image_set.write("wide", {"train": wide}, {})
    for measure in (planned, evaluate_run):
        with pytest.raises(DataError, match=r"32x16x1.*16x16x1"):
            measure(run, split="train", data="wide")


def test_what_cannot_be_measured_fails_before_any_measurement(new_run, stripes, monkeypatch):
    run = new_run(validate_every=1, keep_best=3)
    train(run)
    assert planned(run, "stripes", "train", ensemble=True).models == 3
    image_set.write("scarce", {"train": stripes(drawings=3)}, {})
    with pytest.raises(DataError, match="has 3 images; 4 per class are needed"):
        planned(run, "scarce", "train")
    image_set.write("few", {"train": stripes(classes=4)}, {})
    with pytest.raises(DataError, match="has 4 classes; 5 are needed"):
        planned(run, "few", "train")
    with monkeypatch.context() as patch:
        patch.setattr("wheretolearn.storage.TemporaryFile", Mock(side_effect=PermissionError))
        with pytest.raises(UserError, match=r"cannot keep results in .*evaluations: .* cannot be written to"):
            planned(run, "stripes", "train")
    (run.path / "best" / "3" / "mask.safetensors").unlink()
    planned(run, "stripes", "train")
    with pytest.raises(UserError, match=r"best/3/mask\.safetensors is missing"):
        planned(run, "stripes", "train", ensemble=True)


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
        ({"ways": 1}, "at least 2"),
        ({"inner_steps": -1}, "inner_steps must not be negative"),
        ({"mask": "fixed", "initial_sparsity": 0.5}, "no meaning for mask=fixed"),
        ({"mask": "binry"}, "binary"),
        ({"inner_ls": 0.1}, "inner_lr"),
        ({"inner_lr": "high"}, "inner_lr"),
        ({"learn_theta": False, "batch_norm": "running"}, "would change its statistics"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(FewShotConfig, settings)


def test_initial_sparsity_reaches_the_mask(small):
    config = from_dict(FewShotConfig, {**small, "initial_sparsity": 0.9})
    learner = new_learner(config, (16, 16, 1), seed=0)
    assert learner.mask.sparsity().overall == pytest.approx(0.9, abs=0.02)


def test_tasks_of_a_step_are_the_same_whatever_came_before(small):
    split = image_set.load("stripes").splits["train"]
    config = from_dict(FewShotConfig, small)
    fresh = list(TaskSource(split, config.episode, 0, "train").tasks(7, 2))
    used = TaskSource(split, config.episode, 0, "train")
    list(used.tasks(0, 2))
    for one, two in zip(fresh, used.tasks(7, 2), strict=True):
        assert torch.equal(one.query_inputs, two.query_inputs)


class Spy:
    """Records the settings with which adaptation is asked for, and the tasks it sees."""

    def __init__(self, monkeypatch):
        self.steps, self.inputs = [], []
        for method in ("meta_gradients", "probabilities"):
            monkeypatch.setattr(Conv4OnCPU, method, self._watched(getattr(Conv4OnCPU, method)))

    def _watched(self, method):
        def watched(arithmetic, jobs, steps):
            self.steps.append(steps)
            self.inputs.append(jobs[0].task.support_inputs)
            return method(arithmetic, jobs, steps)

        return watched


def test_passes_on_a_cpu_are_as_exact_as_float32_allows(stripes, small):
    """PyTorch's batch norm is a thousand times less exact there with channels innermost."""
    config = from_dict(FewShotConfig, {**small, "model": "resnet12", "ways": 8, "shots": 30})
    learner = new_learner(config, (16, 16, 1), seed=0)
    task = next(TaskSource(stripes(drawings=40), config.episode, 0, "train").tasks(0, 1))
    outputs = {}
    for dtype in (torch.float32, torch.float64):
        network = learner.model.to(dtype)
        batch_norm.fix_mode(network, "batch")
        outputs[dtype] = network(task.support_inputs.to(dtype)).double()
    torch.testing.assert_close(outputs[torch.float32], outputs[torch.float64], rtol=1e-5, atol=1e-5)


def test_training_and_validation_each_use_their_own_number_of_steps(new_run, monkeypatch):
    spy = Spy(monkeypatch)
    run = new_run(inner_steps=1, test_inner_steps=3, outer_steps=1, validation_tasks=2)
    train(run)
    assert spy.steps == [1, 1, 3, 3]
    evaluate_run(run, "train", tasks=2)
    assert spy.steps[4:] == [3, 3]
    evaluate_run(run, "train", tasks=2, steps=5)
    assert spy.steps[6:] == [5, 5]


def test_validation_can_take_another_number_of_steps_than_testing(new_run, monkeypatch):
    spy = Spy(monkeypatch)
    run = new_run(inner_steps=1, test_inner_steps=3, validation_inner_steps=2, outer_steps=1, validation_tasks=2)
    train(run)
    evaluate_run(run, "train", tasks=2)
    assert spy.steps == [1, 1, 2, 2, 3, 3]


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


def test_the_gradient_is_the_mean_over_tasks(new_run, small):
    """Adam hides a constant factor, so look at its first moment, 0.1 times the gradient."""
    config = from_dict(FewShotConfig, {**small, "mask": "fixed", "outer_steps": 1, "validation_tasks": 1})
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


def test_each_group_has_its_own_learning_rate_and_optimizer(small):
    for name, kind in (("adam", torch.optim.Adam), ("nesterov", torch.optim.SGD)):
        config = from_dict(FewShotConfig, {**small, "optimizer": name, "theta_lr": 0.5, "mask_lr": 0.25})
        optimizer = new_learner(config, (16, 16, 1), seed=0).optimizer
        assert type(optimizer) is kind
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert all(group["nesterov"] and group["momentum"] == 0.9 for group in optimizer.param_groups)


def test_settings_of_mask_and_inner_loop_reach_them(small):
    config = from_dict(
        FewShotConfig,
        {**small, "straight_through_scale": 0.5, "inner_clip_norm": 2.0, "adapt": "head", "order": "second"},
    )
    mask = new_learner(config, (16, 16, 1), seed=0).mask
    assert mask.straight_through_scale == 0.5
    assert mask.names == ("head.weight", "head.bias")
    assert (config.inner.clip_norm, config.inner.order, config.inner.steps) == (2.0, "second", 2)


def test_random_masks_are_drawn_anew_at_each_step_from_seed_and_step_alone(new_run):
    noises = []

    def watch(step, values):
        noises.append(engines[0].lanes[0].mask.noise.clone())

    engines = []
    original = EagerEngine.outer_step

    def outer_step(engine, steps):
        engines.append(engine)
        original(engine, steps)

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
    add_gradient = eager.add_gradient

    def poisoned(model, mask, gradient, weight):
        add_gradient(model, mask, gradient, weight)
        model.head.weight.grad[0, 0] = float("nan")

    monkeypatch.setattr(eager, "add_gradient", poisoned)
    with pytest.raises(NonFiniteError, match=r"gradient is not finite: outer step 1, head\.weight"):
        train(run)
    assert checkpoint.load_latest(run) is None


def test_every_mask_maker_can_be_chosen_in_settings():
    assert set(get_args(MaskKind)) == set(masks.MAKERS)


# Several runs in one sitting


def grouped(monkeypatch):
    """How many lanes each engine had that was made."""
    sizes = []
    make_engine = training.make_engine

    def watched(lanes, **settings):
        sizes.append(len(lanes))
        return make_engine(lanes, **settings)

    monkeypatch.setattr(training, "make_engine", watched)
    return sizes


def assert_same_runs(alone, together):
    assert_equal(final_state(alone), final_state(together))
    once = [{k: v for k, v in record.items() if k != "runs_at_once"} for record in together.metrics()]
    assert without_times(alone.metrics()) == without_times(once)
    for folder in (".", "best/2"):
        for name in ("model.safetensors", "mask.safetensors"):
            one, two = (load_weights(run.path / folder / name) for run in (alone, together))
            assert_equal(one[0], two[0])
            assert one[1] == two[1]


DIFFERENT = [
    {"seed": 3},
    {"seed": 3, "mask": "fixed", "inner_lr": 0.2, "init": "kaiming", "validation_inner_steps": 1},
    {"seed": 4, "mask": "generated", "optimizer": "nesterov", "theta_lr": 0.01},
    {"seed": 5, "mask": "relu", "outer_steps": 4, "validate_every": 2, "log_every": 1, "checkpoint_every": 3},
    {"seed": 6, "mask": "exp", "adapt": "head", "mask_optimizer": "nesterov", "outer_clamp": 0.001},
    {"seed": 7, "average_decay": 0.5, "mask_optimizer": "nesterov"},
]


def test_lanes_equal_runs_trained_alone_bit_for_bit(new_run, monkeypatch):
    alone = [new_run(f"alone{number}", **settings) for number, settings in enumerate(DIFFERENT)]
    for run in alone:
        train(run)
    together = [new_run(f"together{number}", **settings) for number, settings in enumerate(DIFFERENT)]
    sizes = grouped(monkeypatch)
    learners = train_together(together)
    assert sizes == [6, 5]  # one of them ends after four steps
    assert [learner.step for learner in learners] == [6, 6, 6, 4, 6, 6]
    for one, two in zip(alone, together, strict=True):
        assert_same_runs(one, two)
        assert {record["runs_at_once"] for record in two.metrics()} == {6}


@pytest.mark.parametrize(
    "other",
    [{"width": 5}, {"inner_steps": 1}, {"tasks_per_step": 1}, {"shots": 2}, {"batch_norm": "support"}, {"ways": 3}],
)
def test_runs_of_another_shape_get_an_engine_of_their_own(new_run, monkeypatch, other):
    settings = [{"seed": 0}, {"seed": 1, **other}, {"seed": 2}]
    alone = [new_run(f"alone{number}", **each) for number, each in enumerate(settings)]
    for run in alone:
        train(run)
    together = [new_run(f"together{number}", **each) for number, each in enumerate(settings)]
    sizes = grouped(monkeypatch)
    train_together(together)
    assert sizes == [2, 1]
    for one, two in zip(alone, together, strict=True):
        assert_same_runs(one, two)


def test_runs_of_two_engines_count_the_time_they_wait_for_each_other(new_run, monkeypatch):
    now = [0.0]
    outer_step = EagerEngine.outer_step

    def ten_seconds(engine, steps):
        outer_step(engine, steps)
        if engine.lanes[0].seed == 1:
            now[0] += 10.0

    monkeypatch.setattr(EagerEngine, "outer_step", ten_seconds)
    monkeypatch.setattr(training.time, "perf_counter", lambda: now[0])
    runs = [new_run("quick", seed=0, log_every=1), new_run("slow", seed=1, width=5, log_every=1)]
    train_together(runs)
    quick, slow = ([record["elapsed_seconds"] for record in run.metrics()] for run in runs)
    assert quick == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]  # its steps come first
    assert slow == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]


def test_when_a_lane_ends_no_time_is_lost(new_run, monkeypatch):
    now = [0.0]
    outer_step = EagerEngine.outer_step

    def a_second(engine, steps):
        outer_step(engine, steps)
        now[0] += 1.0

    monkeypatch.setattr(EagerEngine, "outer_step", a_second)
    monkeypatch.setattr(training.time, "perf_counter", lambda: now[0])
    runs = [new_run("short", outer_steps=3), new_run("long", seed=1, log_every=1), new_run("other", width=5)]
    train_together(runs)
    assert [record["elapsed_seconds"] for record in runs[1].metrics()] == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]


def test_processes_and_their_threads_fit_the_cores(new_run, monkeypatch):
    """Runs begun alone have as many threads as there are cores; together they would be in each other's way."""
    taken = {}
    monkeypatch.setattr(worker, "train_in_workers", lambda *_, at_once, **__: taken.update(at_once=at_once))
    monkeypatch.setattr(worker.environment, "cores", lambda: 4)
    runs = [new_run(f"run {number}") for number in range(3)]
    for threads, expected in ((None, 3), (2, 2), (4, 1), (16, 1)):
        runs[0].threads = threads
        worker.train_in_processes(runs, lambda *_: None)
        assert taken["at_once"] == expected
    worker.train_in_processes(runs, lambda *_: None, workers=2)
    assert taken["at_once"] == 2


def test_classes_that_a_run_learned_from_are_known_by_their_names(small, stripes):
    config = from_dict(FewShotConfig, small)
    known, new = (stripes(classes=8), stripes(classes=4))
    new = replace(new, classes=("stripe 7", "dot 1", "dot 2", "dot 3"))
    images = ImageSet("stripes", {"train": known, "test": new}, {})
    assert "1 of 4 classes in stripes/test are" in known_classes(config, images, "test")
    assert known_classes(config, replace(images, name="another"), "test") is None
    assert known_classes(config, ImageSet("stripes", {"test": new}, {}), "test") is None


def test_what_may_differ_between_lanes_are_settings():
    assert set(training._FREE_IN_A_LANE) <= {field.name for field in fields(FewShotConfig)}


def test_lanes_resume_from_different_steps(new_run, monkeypatch):
    straight = [new_run(f"straight{seed}", seed=seed) for seed in range(3)]
    for run in straight:
        train(run)
    runs = [new_run(f"run{seed}", seed=seed) for seed in range(3)]

    def stop_at(wanted):
        return lambda run, step, values: os.kill(os.getpid(), signal.SIGTERM) if step == wanted else None

    with pytest.raises(Stopped, match="after step 1 of 6"):
        train_together([runs[0]], stop_at(1))
    with pytest.raises(Stopped, match=r"stopped 2 runs and saved them; go on with `wheretolearn resume \S+ \S+`"):
        train_together(runs[:2], stop_at(3))
    assert [checkpoint.load_latest(run).step for run in runs[:2]] == [3, 2]
    assert checkpoint.load_latest(runs[2]) is None
    sizes = grouped(monkeypatch)
    train_together(runs)
    assert sizes == [3, 2, 1]
    for one, two in zip(straight, runs, strict=True):
        assert_same_runs(one, two)


def test_a_stop_saves_runs_of_all_shapes(new_run):
    runs = [new_run("a"), new_run("b", width=5), new_run("c", seed=1)]

    def stop(run, step, values):
        if run is runs[0] and step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stopped) as caught:
        train_together(runs, stop)
    assert all(str(run.path) in str(caught.value) for run in runs)
    assert [checkpoint.load_latest(run).step for run in runs] == [1, 0, 1]
    train_together(runs)
    train(straight := new_run("straight", width=5))
    assert_same_runs(straight, runs[1])


def test_a_run_that_is_finished_stays_as_it_is(new_run):
    done, other = new_run("done"), new_run("other", seed=1)
    train(done)
    before = (done.path / "metrics.jsonl").read_bytes()
    state = final_state(done)
    train_together([done, other])
    assert (done.path / "metrics.jsonl").read_bytes() == before
    assert_equal(final_state(done), state)
    assert training.finished(other)


def test_a_loss_that_is_not_finite_ends_its_run_alone(new_run):
    settings = [{"seed": 0}, {"seed": 1, "inner_lr": 1e30}, {"seed": 2}]
    alone = [new_run(f"alone{number}", **each) for number, each in enumerate(settings)]
    train(alone[0])
    train(alone[2])
    together = [new_run(f"together{number}", **each) for number, each in enumerate(settings)]
    notes = []
    with pytest.raises(NonFiniteError) as caught:
        train_together(together, notify=notes.append)
    assert "1 of 3 runs failed" in str(caught.value)
    assert f"{together[1].path}: the loss is not finite: outer step 1" in str(caught.value)
    assert str(together[0].path) not in str(caught.value)
    assert any("goes on from its checkpoint" in note for note in notes)
    assert_same_runs(alone[0], together[0])
    assert_same_runs(alone[2], together[2])
    assert not training.finished(together[1])


def test_a_run_that_cannot_be_opened_does_not_keep_others_from_training(new_run):
    good, bad = new_run("good"), new_run("bad")
    train(bad)
    for file in (bad.path / "checkpoints").glob("*.pt"):
        file.write_bytes(b"no checkpoint")
    with pytest.raises(UserError, match=r"1 of 2 runs failed:\n.*bad: .*is damaged"):
        train_together([bad, good])
    assert training.finished(good)


def test_runs_that_no_engine_can_run_do_not_keep_others_from_training(new_run, monkeypatch):
    make_engine = training.make_engine

    def full(lanes, **settings):
        if lanes[0].inner.steps == 1:
            raise ConfigError("precision=float16 needs a fast engine: out of memory")
        return make_engine(lanes, **settings)

    monkeypatch.setattr(training, "make_engine", full)
    good, *bad = new_run("good"), new_run("bad0", inner_steps=1), new_run("bad1", seed=1, inner_steps=1)
    with pytest.raises(ConfigError, match=r"2 of 3 runs failed:\n.*bad0, .*bad1: .*out of memory"):
        train_together([*bad, good])
    assert training.finished(good)
    with pytest.raises(ConfigError, match=r"^precision=float16 needs a fast engine: out of memory$"):
        train(bad[0])


@pytest.mark.parametrize("mixed", [False, True])
def test_a_state_written_on_a_gpu_goes_on_here(small, mixed):
    """There Adam is told to keep its step count on the GPU; that must not come along."""
    config = from_dict(FewShotConfig, {**small, "mask_optimizer": "nesterov"} if mixed else small)
    learner, other = (new_learner(config, (16, 16, 1), 0) for _ in range(2))
    for tensor in (*learner.model.parameters(), *learner.mask.parameters()):
        tensor.grad = torch.ones_like(tensor)
    learner.optimizer.step()
    state = learner.state()
    for group in state["optimizer"]["param_groups"]:
        if "capturable" in group:
            group["capturable"] = True
    other.restore(1, state, "run")
    for one in (learner, other):
        for tensor in (*one.model.parameters(), *one.mask.parameters()):
            tensor.grad = torch.ones_like(tensor)
        one.optimizer.step()
    for name, tensor in learner.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name])


def test_a_note_of_the_engine_reaches_the_user(new_run, monkeypatch):
    make_engine = training.make_engine

    def with_note(lanes, **settings):
        engine = make_engine(lanes, **settings)
        engine.note = "slow today"
        return engine

    monkeypatch.setattr(training, "make_engine", with_note)
    notes = []
    train(new_run(), notify=notes.append)
    assert notes == ["slow today"]


def test_training_ends_when_validation_has_not_improved_for_long(new_run, monkeypatch):
    values = iter([0.5, 0.9, 0.8, 0.9, 0.7, 0.6])
    monkeypatch.setattr(EagerEvaluator, "accuracies", lambda *_: torch.tensor([next(values)], dtype=torch.float64))
    run = new_run(validate_every=2, outer_steps=30, patience=2)
    learner = train(run)
    assert (learner.best_step, learner.step) == (
        4,
        4 + 2 * 3,
    )  # the third validation after the best one is one too many
    assert training.finished(run)
    assert [record["step"] for record in run.metrics() if "validation_accuracy" in record] == [2, 4, 6, 8, 10]


@pytest.mark.parametrize(("first", "validated"), [(0, [2, 4, 6]), (3, [4, 6]), (4, [4, 6]), (100, [6])])
def test_validation_can_begin_late(new_run, first, validated):
    run = new_run(validate_every=2, validate_from=first)
    assert train(run).best_step in validated
    assert [record["step"] for record in run.metrics() if "validation_accuracy" in record] == validated


def test_validations_left_out_are_no_failures(new_run, monkeypatch):
    values = iter([0.9, 0.8, 0.7, 0.6, 0.5])
    monkeypatch.setattr(EagerEvaluator, "accuracies", lambda *_: torch.tensor([next(values)], dtype=torch.float64))
    settings = {"validate_every": 2, "patience": 1}
    with new_run(outer_steps=2, **settings) as run:
        train(run)
    change(run, outer_steps=30, validate_from=9)
    with RunFolder.open(run.path) as run:
        assert train(run).step == 12  # the first validation there is no better, and one more
        assert [record["step"] for record in run.metrics() if "validation_accuracy" in record] == [2, 10, 12]


# The best models


def test_the_best_models_by_validation_are_kept(new_run, monkeypatch):
    values = iter([0.3, 0.9, 0.5, 0.9, 0.1, 0.6])
    monkeypatch.setattr(EagerEvaluator, "accuracies", lambda *_: torch.tensor([next(values)], dtype=torch.float64))
    weights = {}
    engines = []
    make_engine = training.make_engine
    monkeypatch.setattr(training, "make_engine", lambda *a, **k: engines.append(make_engine(*a, **k)) or engines[-1])

    def remember(step, _):
        lane = engines[0].lanes[0]
        weights[step] = lane.model.head.weight.detach().clone(), lane.mask.raw["head.weight"].detach().clone()

    run = new_run(validate_every=1, keep_best=3)
    learner = train(run, remember)
    assert (learner.best_step, learner.best_accuracy) == (2, 0.9)
    assert [(best.step, best.accuracy) for best in learner.best] == [(2, 0.9), (4, 0.9), (6, 0.6)]
    assert best_folders(run) == [run.path, run.path / "best" / "2", run.path / "best" / "3"]
    for folder, step in zip(best_folders(run), (2, 4, 6), strict=True):
        tensors, about = load_weights(folder / "model.safetensors")
        assert torch.equal(tensors["head.weight"], weights[step][0])
        assert torch.equal(load_weights(folder / "mask.safetensors")[0]["head.weight"], weights[step][1])
        assert about["step"] == str(step)
        assert json.loads(about["image_shape"]) == [16, 16, 1]


def test_keep_best_bounds_what_is_kept(new_run):
    run = new_run(validate_every=1, keep_best=1)
    assert len(train(run).best) == 1
    assert best_folders(run) == [run.path]
    with pytest.raises(UserError, match=r"has kept one model.*keep_best=3 and several validations"):
        evaluate_run(run, "train", tasks=2, ensemble=True)


@pytest.mark.parametrize("validated", [True, False])
def test_a_checkpoint_of_an_early_version_resumes(new_run, validated):
    straight, run = new_run("straight"), new_run()
    learner = train(straight)
    stop_step = 4 if validated else 2

    def interrupt(step, values):
        if step == stop_step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        train(run, interrupt)
    state = without_identity(final_state(run))
    best = state.pop("best")
    assert len(best) == int(validated)
    old = {"best_accuracy": -1.0, "best_step": 0, "best": {}}
    if validated:
        old = {"best_accuracy": best[0].pop("accuracy"), "best_step": best[0].pop("step"), "best": best[0]}
    checkpoint.save(run, {**state, **old}, stop_step)
    info = json.loads((run.path / "run.json").read_text())
    for name in ("keep_best", "outer_clamp", "mask_optimizer", "start_from", "learn_theta"):
        del info["config"][name]
    del info["preset"], info["scale"]
    (run.path / "run.json").write_text(json.dumps(info))
    run.close()
    with RunFolder.open(run.path) as early:
        assert early.preset is None
        resumed = train(early)
    assert (resumed.best_step, resumed.best_accuracy) == (learner.best_step, learner.best_accuracy)
    assert_equal(final_state(straight), final_state(run))


# Settings of the outer loop


def test_theta_and_mask_can_have_optimizers_of_their_own(small):
    config = from_dict(FewShotConfig, {**small, "optimizer": "adam", "mask_optimizer": "nesterov", "mask_lr": 0.25})
    learner = new_learner(config, (16, 16, 1), seed=0)
    assert [type(part) for part in learner.optimizer.parts] == [torch.optim.Adam, torch.optim.SGD]
    theta, raw = learner.model.head.bias, learner.mask.raw["head.bias"]
    before = theta.detach().clone(), raw.detach().clone()
    theta.grad, raw.grad = torch.full_like(theta, 4.0), torch.full_like(raw, 4.0)
    learner.optimizer.step()
    torch.testing.assert_close(theta, before[0] - 1e-3)  # Adam: the learning rate, whatever the gradient
    torch.testing.assert_close(raw, before[1] - 0.25 * 4 * 1.9)  # Nesterov: (1 + momentum) times the gradient


@pytest.mark.parametrize("kinds", [("adam", "nesterov"), ("nesterov", "adam")])
def test_a_run_with_two_optimizers_resumes_exactly(new_run, kinds):
    settings = {"optimizer": kinds[0], "mask_optimizer": kinds[1]}
    straight, run = new_run("straight", **settings), new_run(**settings)
    train(straight)

    def interrupt(step, values):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        train(run, interrupt)
    train(run)
    assert_same_runs(straight, run)
    optimizer = final_state(run)["optimizer"]
    assert len(optimizer["state"]) == sum(len(group["params"]) for group in optimizer["param_groups"])


def test_outer_gradients_are_clamped(new_run):
    """SGD without a past moves by 1.9 times the gradient: the first step shows the clamp."""
    run = new_run(optimizer="nesterov", theta_lr=1.0, mask_lr=1.0, outer_clamp=1e-3, outer_steps=1)
    train(run)
    moved = [state["momentum_buffer"].abs().max() for state in final_state(run)["optimizer"]["state"].values()]
    assert max(moved) == pytest.approx(1e-3)
    train(free := new_run("free", optimizer="nesterov", theta_lr=1.0, mask_lr=1.0, outer_steps=1))
    moved = [state["momentum_buffer"].abs().max() for state in final_state(free)["optimizer"]["state"].values()]
    assert max(moved) > 1e-3


def test_the_mask_can_be_learned_after_theta(new_run, tmp_path):
    first = new_run("first", mask="fixed")
    train(first)
    second = new_run("second", seed=7, start_from=str(first.path), learn_theta=False, checkpoint_every=4)
    start, _ = load_weights(first.path / "model.safetensors")

    def interrupt(step, values):
        if step == 2:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(second, interrupt)
    first.path.rename(tmp_path / "gone")
    train(second)
    assert_equal(dict(final_state(second)["model"]), dict(start))
    fresh = new_learner(from_dict(FewShotConfig, second.config), (16, 16, 1), seed=7)
    assert not torch.equal(final_state(second)["mask"]["head.weight"], fresh.mask.raw["head.weight"])
    assert second.config["start_from"] == str(first.path)


def test_weights_are_learned_from_another_start(new_run):
    train(first := new_run("first"))
    train(second := new_run("second", start_from=str(first.path)))
    train(fresh := new_run("fresh"))
    weights = [final_state(run)["model"]["head.weight"] for run in (first, second, fresh)]
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])


def test_a_start_that_does_not_fit_is_refused(new_run, tmp_path):
    train(wide := new_run("wide", width=5))
    with pytest.raises(MismatchError, match=r"start_from: .*block1\.conv\.weight is \[5, 1, 3, 3\] in it but \[4"):
        train(new_run("a", start_from=str(wide.path)))
    with pytest.raises(UserError, match=r"start_from: .*nowhere is not a finished run: it has no model\.safetensors"):
        train(new_run("b", start_from=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learn_theta": False, "mask": "fixed"}, "leaves nothing to learn"),
        ({"keep_best": 0}, "keep_best must be greater than 0"),
        ({"validation_inner_steps": -1}, "validation_inner_steps must not be negative"),
        ({"outer_clamp": -1.0}, "outer_clamp must be greater than 0"),
        ({"average_decay": 1.0}, r"average_decay must lie between 0 and 1, not 1\.0"),
        ({"average_decay": 0.9, "batch_norm": "running"}, "choose batch_norm=batch or support"),
        ({"mask_optimizer": "sgd"}, "mask_optimizer"),
    ],
)
def test_bad_settings_of_the_outer_loop(settings, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(FewShotConfig, settings)


def test_runs_that_wait_for_a_worker_are_locked(new_run, monkeypatch):
    runs = [new_run("one"), new_run("two", seed=1)]

    def workers(commands, *, on_start, **_):
        first, second = commands
        on_start(first)
        with RunFolder.open(first) as taken_over:
            taken_over.lock()
        with RunFolder.open(second) as waiting, pytest.raises(UserError, match="in use"):
            waiting.lock()
        return Outcome(tuple(commands), (), {})

    monkeypatch.setattr("wheretolearn.runs.workers.run_workers", workers)
    worker.train_in_processes(runs, lambda *_: None)
    for run in runs:
        with RunFolder.open(run.path) as again:
            again.lock()
