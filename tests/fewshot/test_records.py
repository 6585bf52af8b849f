"""Evaluating finished runs, and the records of what they reached."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from wheretolearn.cli.fewshot import evaluate, resume
from wheretolearn.data import glyphs, image_set
from wheretolearn.data.image_set import ImageSplit
from wheretolearn.data.load import load_set
from wheretolearn.engine.eager import EagerEvaluator
from wheretolearn.errors import ConfigError, DataError, UserError
from wheretolearn.fewshot.records import result_records
from wheretolearn.fewshot.tasks import TaskSource, split_of
from wheretolearn.fewshot.trained import best_folders, evaluate_run, held_out_splits, load_trained
from wheretolearn.fewshot.training import train
from wheretolearn.masks import load as load_mask
from wheretolearn.presets import Evaluate, load_preset
from wheretolearn.runs import environment
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import load_all, save
from wheretolearn.storage import load_weights

PRESET = "table1.sparse-maml.shot5"
CROSS_DOMAIN = "table4.sparse-maml.shot5.cub"


@pytest.fixture
def sets(stripes):
    """Sets that hold out one split or two; one of them is a part of what was published."""

    def split(name):
        drawn = stripes()
        return ImageSplit(name, drawn.images, drawn.class_offsets, drawn.classes, drawn.groups)

    image_set.write("one", {name: split(f"one/{name}") for name in ("train", "test")}, {})
    info = {"complete": False, "classes": "test 8 of 10"}
    image_set.write("part", {name: split(f"part/{name}") for name in ("train", "test")}, info)
    image_set.write("two", {name: split(f"two/{name}") for name in ("train", "east", "west")}, {})


@pytest.fixture
def trained(new_run, sets):
    def make(name, seed=0, **settings):
        run = new_run(name, seed, **{"data": "one", "preset": PRESET, "scale": "paper", **settings})
        train(run)
        return run

    return make


@pytest.fixture
def small_presets(monkeypatch, small):
    """Presets with the settings of the runs that are trained here, and a cross-domain cell on a set that is here."""

    def load(name, scale="paper"):
        where = Evaluate("part", None, 3) if name == CROSS_DOMAIN else Evaluate()
        return replace(load_preset(name, scale=scale), settings={**small, "data": "one"}, evaluate=where)

    for module in ("fewshot", "runs"):
        monkeypatch.setattr(f"wheretolearn.{module}.records.load_preset", load)


def change(run, **info):
    """Edit what run.json says."""
    run.close()
    file = run.path / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **info}))
    return RunFolder.open(run.path)


def test_a_set_without_splits_says_how_to_get_them(stripes):
    drawn = stripes()
    flat = ImageSplit("flat/all", drawn.images, drawn.class_offsets, drawn.classes, drawn.groups)
    image_set.write("flat", {"all": flat}, {})
    with pytest.raises(DataError, match=r"it has all\. Put its class folders into train, validation and test"):
        split_of(load_set("flat"), "train")


def test_an_ensemble_predicts_by_the_mean_of_probabilities(trained):
    run = trained("run", validate_every=1, outer_steps=5)
    found = evaluate_run(run, "test", tasks=7, steps=3, ensemble=True)
    config, model, _ = load_trained(run)
    source = TaskSource(image_set.load("one").splits["test"], config.episode, run.seed, "test")
    tasks = list(source.tasks(0, 7))
    total = 0
    assert len(best_folders(run)) == 3
    for folder in best_folders(run):
        model.load_state_dict(load_weights(folder / "model.safetensors")[0])
        mask = load_mask(folder / "mask.safetensors", model)
        total += EagerEvaluator(model, mask, config.inner).probabilities(tasks, 3)
    labels = torch.stack([task.query_labels for task in tasks])
    expected = (total.argmax(-1) == labels).float().mean(1)
    assert found.task_accuracies == pytest.approx(expected.tolist())
    assert found.models == 3
    assert "ensemble of 3" in found.sentence()
    assert (run.path / "evaluations" / "one-test-7-tasks-3-steps-ensemble-of-3.json").exists()


def test_a_run_is_evaluated_without_the_images_it_learned_from(trained, monkeypatch):
    run = trained("run")
    expected = evaluate_run(run, "test", data="part", tasks=3)
    monkeypatch.setattr("wheretolearn.fewshot.trained.load_set", lambda name: {"part": image_set.load("part")}[name])
    assert evaluate_run(run, "test", data="part", tasks=3) == expected


@pytest.mark.parametrize("name", ["own", "glyphs"])
def test_images_of_another_size_say_what_to_add(trained, name, monkeypatch):
    run = trained("run")
    images = np.zeros((5, 28, 28, 3), dtype=np.uint8)
    split = ImageSplit(name, images, np.arange(6), tuple("abcde"), ("",) * 5)
    image_set.write(name, {"test": split}, {})
    monkeypatch.setattr(glyphs, "load", lambda **_: image_set.load(name))
    with pytest.raises(DataError, match="has images of 28x28x3, the model was trained on 16x16x1") as told:
        evaluate_run(run, "test", data=name, tasks=2)
    command = "`wheretolearn data add my-own PATH --size 16 --channels 1`"
    assert (command in str(told.value)) == (name == "own")
    assert ("data add" in str(told.value)) == (name == "own")


def test_a_run_of_lower_precision_is_evaluated_on_a_cpu_in_float32(trained):
    run = trained("run")
    expected = evaluate_run(run, "test", tasks=3)
    changed = change(run, config={**run.config, "precision": "bfloat16"})
    assert evaluate_run(changed, "test", tasks=3) == expected
    assert expected.precision == "float32"


def test_a_record_holds_what_is_needed_to_judge_the_number(trained, small_presets, tmp_path):
    runs = [trained("a", seed=3), trained("b", seed=5)]
    facts = {"commit": "0123456789abcdef", "hardware": "a big GPU", "versions": {"torch": "9.9"}}
    runs = [change(run, **facts) for run in runs]
    evaluations = {run: [evaluate_run(run, "test", tasks=6)] for run in runs}
    accuracy, sparsity = result_records(evaluations)
    assert (accuracy.name, accuracy.metric, accuracy.unit) == (PRESET, "accuracy", "%")
    assert accuracy.seeds == (3, 5)
    assert accuracy.values == pytest.approx([100 * evaluations[run][0].accuracy for run in runs])
    assert {name: getattr(accuracy, name) for name in facts} == facts
    times = [run.metrics()[-1]["elapsed_seconds"] for run in runs]
    assert accuracy.wall_seconds == pytest.approx(sum(times) / 2)
    assert accuracy.config["data"] == "one"
    width = 100 * evaluations[runs[0]][0].half_width
    for part in (
        "6 tasks of one/test for each seed",
        f"95 % interval over tasks +-{width:.2f} ",
        "K_test 2",
        "float32",
        "time of one run (mean)",
        f"measured on {environment.hardware()} at commit {environment.git_commit()}",
    ):
        assert part in accuracy.notes
    assert "at once" not in accuracy.notes
    assert (sparsity.metric, sparsity.seeds) == ("sparsity", (3, 5))
    shares = [load_trained(run)[2].sparsity() for run in runs]
    assert sparsity.values == pytest.approx([100 * share.overall for share in shares])
    assert f"block1.conv {50 * (shares[0].by_layer['block1.conv'] + shares[1].by_layer['block1.conv']):.1f}" in (
        sparsity.notes
    )
    for record in (accuracy, sparsity):
        save(record, tmp_path / "records")
    assert load_all(tmp_path / "records") == [accuracy, sparsity]


def test_the_paper_stands_beside_the_number_it_gives_and_no_other(trained, small_presets):
    run = trained("run")
    preset = load_preset(PRESET)
    assert preset.paper is not None
    own, other, slow = (
        evaluate_run(run, "test", tasks=2),
        evaluate_run(run, "test", data="part", tasks=2),
        evaluate_run(run, "test", tasks=2, steps=7),
    )
    ensemble = evaluate_run(run, "test", tasks=2, ensemble=True)
    records = result_records({run: [own, other, slow, ensemble]})
    assert (records[0].paper_value, records[0].paper_std) == (preset.paper.value, preset.paper.std)
    assert [record.metric for record in records] == [
        "accuracy",
        "accuracy on part",
        "accuracy after 7 steps",
        "ensemble accuracy",
        "sparsity",
    ]
    assert [record.paper_value for record in records[1:]] == [None] * 4
    assert "K_test 7" in records[2].notes


@pytest.mark.parametrize(
    "settings", [{"ways": 2}, {"data": "part"}, {"outer_steps": 7}, {"mask": "relu"}, {"test_inner_steps": 3}]
)
def test_another_experiment_than_the_preset_is_not_compared_with_the_paper(trained, small_presets, settings):
    run = trained("run", **settings)
    for record in result_records({run: [evaluate_run(run, "test", tasks=2, steps=2)]}, PRESET):
        assert record.paper_value is None
        assert f"differs from the preset: {next(iter(settings))}=" in record.notes


def test_how_a_run_was_computed_and_watched_does_not_matter_to_the_paper(trained, small_presets):
    first = trained("first")
    run = trained(
        *("run", 0),
        **{"engine": "eager", "validate_every": 2, "validation_tasks": 3, "validation_inner_steps": 1, "log_every": 1},
        **{"checkpoint_every": 3, "keep_best": 2, "start_from": str(first.path)},
    )
    run = change(run, config={**run.config, "precision": "bfloat16"})
    record = result_records({run: [evaluate_run(run, "test", tasks=2)]})[0]
    assert record.paper_value == load_preset(PRESET).paper.value
    assert "differs from the preset: engine=" in record.notes


def test_the_sparsity_of_another_experiment_is_not_compared_with_the_paper(trained, small_presets):
    alike, other = trained("alike"), trained("other", ways=2)
    name = "table3.sparse-maml.shot5"
    assert result_records({alike: []}, name)[0].paper_value == load_preset(name).paper.value
    assert result_records({other: []}, name)[0].paper_value is None


def test_the_sparsity_of_a_part_is_that_of_this_part(trained, small_presets):
    run = trained("run")
    shares = load_trained(run)[2].sparsity()
    gains = [share for name, share in shares.by_tensor.items() if name.endswith("norm.weight")]
    expected = {
        "figure1.center": ("sparsity", shares.overall),
        "figureS1.left": ("sparsity of batch-norm gains", sum(gains) / len(gains)),
        "figureS1.right.0.5": ("sparsity of head.bias", shares.by_tensor["head.bias"]),
    }
    assert len(gains) == 4
    assert len({share for _, share in expected.values()}) == 3
    for preset, (metric, share) in expected.items():
        (record,) = result_records({run: []}, preset)
        assert (record.metric, record.mean) == (metric, pytest.approx(100 * share))


def recorded(folder):
    return {(record.name, record.metric): record for record in load_all(folder)}


def test_a_preset_says_what_is_measured(trained, small_presets, tmp_path, capsys):
    run, folder = trained("run"), tmp_path / "records"
    evaluate([run.path], tasks=2, record=folder, preset_name=CROSS_DOMAIN)
    assert "part/test: " in capsys.readouterr().out
    cell = recorded(folder)[CROSS_DOMAIN, "accuracy"]
    assert cell.paper_value == load_preset(CROSS_DOMAIN).paper.value
    assert "2 tasks of part/test for each seed" in cell.notes
    assert "K_test 3" in cell.notes
    evaluate([run.path], tasks=2, record=folder, preset_name=CROSS_DOMAIN, data=["one"])
    evaluate([run.path], tasks=2, record=folder, preset_name=CROSS_DOMAIN, steps=0)
    evaluate([run.path], tasks=2, record=folder, preset_name=CROSS_DOMAIN, data=["two"], splits=["west"], steps=1)
    found = recorded(folder)
    assert found[CROSS_DOMAIN, "accuracy"] == cell
    others = {"accuracy on one", "accuracy after 0 steps", "accuracy on two/west after 1 step"}
    assert {metric for _, metric in found} == {"accuracy", "sparsity", *others}
    assert all(found[CROSS_DOMAIN, metric].paper_value is None for metric in others)


def test_the_split_that_a_preset_measures_is_the_default(trained, capsys, tmp_path, monkeypatch, small):
    run = trained("run", data="two")

    def load(name, scale="paper"):
        return replace(load_preset(name), settings={**small, "data": "two"}, evaluate=Evaluate(split="west"))

    for module in ("fewshot", "runs"):
        monkeypatch.setattr(f"wheretolearn.{module}.records.load_preset", load)
    evaluate([run.path], tasks=2, record=tmp_path / "records")
    out = capsys.readouterr().out
    assert "two/west" in out
    assert "two/east" not in out
    assert (PRESET, "accuracy") in recorded(tmp_path / "records")
    evaluate([run.path], tasks=2, data=["one"])  # a set that the preset does not speak of
    assert "one/test" in capsys.readouterr().out
    evaluate([run.path], tasks=2, splits=["east", "east"])
    assert capsys.readouterr().out.count("two/east") == 1


def test_a_run_of_a_preset_that_is_no_more_can_be_measured(trained, capsys):
    evaluate([trained("run", preset="table0.forgotten").path], tasks=2)
    assert "one/test: " in capsys.readouterr().out


def test_a_record_does_not_take_the_place_of_one_with_other_seeds(trained, small_presets, tmp_path, capsys):
    runs, folder = [trained(f"seed{seed}", seed) for seed in (0, 1)], tmp_path / "records"
    evaluate([run.path for run in runs], tasks=2, record=folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    with pytest.raises(UserError, match=r"record of table1.*, accuracy, .*lack: 0; .*delete that record, or choose"):
        evaluate([runs[1].path], tasks=3, record=folder)
    assert capsys.readouterr().out == ""  # before anything was measured
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    evaluate([run.path for run in runs], tasks=3, record=folder)
    assert "3 tasks" in recorded(folder)[PRESET, "accuracy"].notes


@pytest.mark.parametrize("content", [None, "", '{"step": 6}\n'])
@pytest.mark.parametrize("mask", ["binary", "fixed"])
def test_a_run_that_does_not_say_how_long_it_took_is_not_recorded(trained, tmp_path, capsys, content, mask):
    run = trained("run", mask=mask)
    file = run.path / "metrics.jsonl"
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with pytest.raises(UserError, match=r"run/metrics.jsonl does not say how long .*without --record"):
        evaluate([run.path], tasks=2, record=tmp_path / "records")
    assert capsys.readouterr().out == ""
    evaluate([run.path], tasks=2)


def test_a_folder_for_records_that_cannot_be_written_is_refused_first(trained, tmp_path, capsys):
    run = trained("run")
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "records", Path("/proc/records")):
        with pytest.raises(UserError, match=r"cannot write records to .*(file|proc).*choose another folder"):
            evaluate([run.path], tasks=2, record=folder)
    assert capsys.readouterr().out == ""


def test_a_record_is_not_replaced_by_one_of_another_experiment(trained, tmp_path, capsys):
    folder = tmp_path / "records"
    evaluate([trained("run").path], tasks=2, record=folder)
    before = load_all(folder)
    capsys.readouterr()
    with pytest.raises(UserError, match=r"with other settings: width=4 there, 5 here\. Choose another folder"):
        evaluate([trained("wide", width=5).path], tasks=2, record=folder)
    assert capsys.readouterr().out == ""  # before anything was measured
    assert load_all(folder) == before
    evaluate([trained("again", log_every=1).path], tasks=2, record=folder)


def test_the_cell_of_another_protocol_is_refused(trained, capsys):
    with pytest.raises(ConfigError, match=r"of the protocol continual, but .*run is fewshot"):
        evaluate([trained("run").path], preset_name="table5.sgd.many")
    assert capsys.readouterr().out == ""


def test_a_ridge_head_takes_no_inner_steps_and_has_no_sparsity(trained, capsys):
    ridge = {"head": "ridge", "mask": "fixed", "inner_steps": 0, "test_inner_steps": 0, "preset": None}
    runs = [trained(f"seed{seed}", seed, **ridge) for seed in (0, 1)]
    with pytest.raises(UserError, match=r"seed0 solves its head on the support images and takes no inner steps"):
        evaluate([run.path for run in runs], tasks=2, steps=7)
    with pytest.raises(UserError, match="takes no inner steps"):
        evaluate_run(runs[0], "test", tasks=2, steps=7)
    assert capsys.readouterr().out == ""
    evaluate([run.path for run in runs], tasks=2)
    evaluate([runs[0].path], tasks=2, steps=0)
    out = capsys.readouterr().out
    assert "the same settings, 2 seeds: one/test: " in out
    assert "sparsity" not in out


def test_no_sparsity_is_shown_while_a_run_with_a_ridge_head_trains(new_run, sets, capsys):
    ridge = {"head": "ridge", "mask": "fixed", "inner_steps": 0, "test_inner_steps": 0}
    for name, settings, shown in (("ridge", ridge, False), ("mask", {}, True)):
        run = new_run(name, **settings)
        run.close()
        resume([run.path], device="cpu")
        out, progress = capsys.readouterr()
        assert f"{name}: best validation accuracy" in out
        assert f"{name}: step 6 of 6  validation" in progress
        assert ("sparsity " in out, "sparsity " in progress) == (shown, shown)


def test_a_copy_of_a_run_is_not_another_seed(trained, tmp_path, capsys):
    run = trained("run")
    shutil.copytree(run.path, tmp_path / "copy")
    with pytest.raises(ConfigError, match=r"run and .*copy have the same seed 0"):
        evaluate([run.path, tmp_path / "copy"], tasks=2)
    assert capsys.readouterr().out == ""
    evaluate([run.path, trained("wide", width=5).path], tasks=2)  # the same seed, other settings
    assert "std over seeds" not in capsys.readouterr().out


def test_settings_that_differ_from_the_preset_are_noted(trained):
    run = trained("run", seed=1)
    notes = result_records({run: []})[0].notes
    assert 'differs from the preset: data="one"' in notes
    assert "width=4" in notes
    assert "outer_steps=6" in notes


def test_a_subset_is_noted(trained):
    run = trained("run")
    evaluations = [evaluate_run(run, "test", tasks=2), evaluate_run(run, "test", data="part", tasks=2)]
    own, other, _ = result_records({run: evaluations})
    assert "part is a subset: test 8 of 10 classes" in other.notes
    assert "subset" not in own.notes


def test_each_of_several_splits_has_a_metric_of_its_own(trained, small_presets):
    run = trained("run", data="two")
    assert held_out_splits(run) == ["east", "west"]
    evaluations = [evaluate_run(run, split, tasks=2) for split in ("east", "train")]
    assert [record.metric for record in result_records({run: evaluations})[:2]] == [
        "accuracy on east",
        "accuracy on train",
    ]
    run = trained("other")
    cross = evaluate_run(run, "west", data="two", tasks=2)
    assert result_records({run: [cross]})[0].metric == "accuracy on two/west"


def test_a_quick_run_is_not_compared_with_the_paper(trained):
    run = trained("run", scale="quick")
    record = result_records({run: [evaluate_run(run, "test", tasks=2)]})[0]
    assert record.name == f"{PRESET} at quick scale"
    assert record.paper_value is None


def test_runs_trained_at_once_or_at_different_commits_are_noted(trained):
    one, two = change(trained("a"), commit="aaaa"), change(trained("b", seed=1), commit="bbbb")
    with one:
        one.log(7, elapsed_seconds=100.0, runs_at_once=4)
    record = result_records({one: [], two: []})[0]
    assert "trained 1 or 4 at once" in record.notes
    assert "trained at commits aaaa and bbbb" in record.notes
    assert record.commit == "aaaa"


def test_a_mask_that_is_not_learned_has_no_record_of_sparsity(trained):
    run = trained("run", mask="fixed")
    assert result_records({run: []}) == []


def test_where_another_run_lay_is_not_recorded(trained):
    first = trained("first")
    second = trained("second", start_from=str(first.path))
    assert result_records({second: []})[0].config["start_from"] == "first"


def test_what_cannot_be_recorded_says_why(trained, new_run):
    stranger = trained("stranger", preset=None, scale=None)
    with pytest.raises(UserError, match=r"stranger does not say which preset.*--preset-name"):
        result_records({stranger: []})
    assert result_records({stranger: []}, preset_name=PRESET)[0].name == PRESET
    with pytest.raises(ConfigError, match="no preset is called"):
        result_records({stranger: []}, preset_name="tabel1")
    one, two, wide = trained("one"), trained("two"), trained("wide", seed=1, width=5)
    with pytest.raises(ConfigError, match=r"have the same seed 0"):
        result_records({one: [], two: []})
    with pytest.raises(ConfigError, match=r"differ in width=5: record them apart"):
        result_records({one: [], wide: []})
    with pytest.raises(UserError, match="is not finished"):
        result_records({new_run("new", preset=PRESET): []})
