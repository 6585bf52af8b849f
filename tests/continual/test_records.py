"""Records of finished continual runs: their numbers, the paper's beside them, and how they came to be."""

import json
import statistics
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest

from wheretolearn.config import from_dict, to_dict
from wheretolearn.continual.config import ContinualConfig
from wheretolearn.continual.records import CONTINUAL, measured_by, measures
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.presets import load_preset
from wheretolearn.runs import records
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import load_all, save_records

PRESET = "table5.sparse-la-maml.rotations"
result_records = partial(records.result_records, CONTINUAL)
SPARSITY = {"layer1.weight": 0.05, "layer1.bias": 0.7, "head.weight": 0.8}


@pytest.fixture
def finished_run(tmp_path):
    """A run with a preset's settings and a result as training writes it."""
    with ExitStack() as folders:

        def make(name, seed=0, *, preset=PRESET, scale="paper", result=None, info=None, **settings):
            loaded = load_preset(preset or PRESET).settings
            config = to_dict(from_dict(ContinualConfig, {**loaded, **settings}))
            path = tmp_path / name
            folders.enter_context(RunFolder.create(path, config, seed, "continual", preset, scale))
            found = {"ra": 0.77, "bti": -0.08, "forward_transfer": 0.5, "seconds": 60.0 + seed, "runs_at_once": 3}
            found |= {"sparsity": 0.07, "sparsity_by_tensor": SPARSITY}
            (path / "result.json").write_text(json.dumps(found if result is None else {**found, **result}))
            file = path / "run.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **(info or {})}))
            return folders.enter_context(RunFolder.open(path))

        yield make


def by_metric(records):
    assert len({record.metric for record in records}) == len(records)
    return {record.metric: record for record in records}


def test_a_record_holds_what_is_needed_to_judge_the_number(finished_run):
    facts = {"commit": "0123456789abcdef", "hardware": "a big CPU", "versions": {"torch": "9.9"}}
    runs = [
        finished_run("a", 3, info=facts, result={"ra": 0.76}),
        finished_run("b", 5, info=facts, result={"ra": 0.78, "runs_at_once": 2}),
    ]
    records = by_metric(result_records(runs))
    record = records["RA"]
    assert (record.name, record.unit, record.seeds, record.values) == (PRESET, "%", (3, 5), (76.0, 78.0))
    assert record.std == pytest.approx(statistics.stdev([76, 78]))
    assert {name: getattr(record, name) for name in facts} == facts
    assert record.wall_seconds == 64.0
    assert record.config == runs[0].config
    assert record.notes == "time of one run (mean), 2 or 3 at once in one process"
    assert records["forward transfer"].notes.startswith("on the first 1000 test images of each task; ")
    assert [records[name].mean for name in ("sparsity", "sparsity of layer1.bias")] == pytest.approx([7, 70])


def test_each_measure_has_the_papers_number_beside_it(finished_run):
    runs = [finished_run("a", 0), finished_run("b", 1)]
    records = by_metric(result_records(runs))
    stated = {name: (record.paper_value, record.paper_std) for name, record in records.items() if record.paper_value}
    assert stated == {"RA": (77.77, 0.58), "BTI": (-8.16, 0.61)}
    # The same runs are those of another table.
    records = by_metric(result_records(runs, "tableS5.sparse-la-maml.rotations"))
    stated = {name: record.paper_value for name, record in records.items() if record.paper_value is not None}
    assert stated == {
        "sparsity": 7.13,
        "sparsity of layer1.weight": 5,
        "sparsity of layer1.bias": 67,
        "sparsity of head.weight": 80,
    }


def test_a_number_that_the_paper_took_from_elsewhere_says_so(finished_run):
    records = by_metric(result_records([finished_run("run", preset="table5.mer.rotations")]))
    assert records["RA"].paper_value == 77.42
    assert "the paper's number: taken from the La-MAML paper" in records["RA"].notes


def test_learners_without_a_mask_have_no_record_of_sparsity(finished_run):
    run = finished_run("run", preset="table5.sgd.many")
    found = json.loads((run.path / "result.json").read_text())
    del found["sparsity"], found["sparsity_by_tensor"]
    (run.path / "result.json").write_text(json.dumps(found))
    assert list(measures(run)) == ["RA", "BTI", "forward transfer"]
    assert by_metric(result_records([run])).keys() == {"RA", "BTI", "forward transfer"}


def test_another_experiment_has_no_number_of_the_papers(finished_run):
    (changed,) = (r for r in result_records([finished_run("a", lr=0.2)]) if r.metric == "RA")
    assert changed.paper_value is None
    assert "differs from the preset: lr=0.2" in changed.notes
    (small,) = (r for r in result_records([finished_run("b", scale="quick")]) if r.metric == "RA")
    assert (small.name, small.paper_value) == (f"{PRESET} at quick scale", None)


def test_how_a_run_was_watched_does_not_make_it_another_experiment(finished_run):
    record = by_metric(result_records([finished_run("a", log_every=7, checkpoint_every=9)]))["RA"]
    assert record.paper_value == 77.77
    assert "differs from the preset: log_every=7, checkpoint_every=9" in record.notes


def test_runs_that_are_no_sample_are_refused(finished_run):
    with pytest.raises(ConfigError, match="have the same seed 0"):
        result_records([finished_run("a"), finished_run("b")])
    with pytest.raises(ConfigError, match=r"differ in lr=0\.2: record them apart"):
        result_records([finished_run("c"), finished_run("d", 1, lr=0.2)])


def test_a_run_without_a_preset_needs_its_name(finished_run):
    run = finished_run("a", preset=None, scale=None)
    with pytest.raises(UserError, match="give --preset-name"):
        result_records([run])
    assert by_metric(result_records([run], PRESET))["RA"].paper_value == 77.77
    with pytest.raises(ConfigError, match=r"of the protocol fewshot, but .* is continual"):
        result_records([run], "table1.maml.shot5")


@pytest.mark.parametrize(
    "damage",
    [
        {"sparsity_by_tensor": None},
        {"sparsity": None},
        {"ra": "abc"},
        {"ra": []},
        {"runs_at_once": float("inf")},
        *({name: ...} for name in ("ra", "forward_transfer", "sparsity", "sparsity_by_tensor", "seconds")),
        {"runs_at_once": ...},
    ],
    ids=str,
)
def test_a_damaged_result_is_named(finished_run, damage):
    """``...``: what the file lacks."""
    whole, run = finished_run("whole", 1), finished_run("a")
    file = run.path / "result.json"
    found = {**json.loads(file.read_text()), **damage}
    file.write_text(json.dumps({name: value for name, value in found.items() if value is not ...}))
    for read in (lambda: measures(run), lambda: measured_by([whole, run]), lambda: result_records([run, whole])):
        with pytest.raises(UserError, match=r"a/result\.json is damaged"):
            read()


def test_results_that_do_not_hold_the_same_measures_are_named(finished_run):
    runs = [finished_run("a"), finished_run("b", 1, result={"sparsity_by_tensor": {"head.weight": 0.8}})]
    with pytest.raises(UserError, match=r"b/result\.json or .*a/result\.json is damaged"):
        result_records(runs)


def test_a_record_is_not_replaced_by_one_of_another_experiment(finished_run, tmp_path):
    folder = tmp_path / "records"
    save_records(result_records([finished_run("a")]), folder, CONTINUAL.incidental)
    before = load_all(folder)
    other = result_records([finished_run("b", lr=0.2, clip_norm=None)])
    lost = (
        r"RA, with other settings: lr=0\.15 there, 0\.2 here; clip_norm=2\.0 there, none here\. Choose another folder"
    )
    with pytest.raises(UserError, match=lost):
        save_records(other, folder, CONTINUAL.incidental)
    assert load_all(folder) == before
    again = result_records([finished_run("c", log_every=7, matrix_images=50, result={"ra": 0.5})])
    save_records(again, folder, CONTINUAL.incidental)
    assert by_metric(load_all(folder))["RA"].values == (50.0,)


def test_a_setting_that_older_records_do_not_know_is_no_other_experiment(finished_run, tmp_path):
    records = result_records([finished_run("a")])
    older = [replace(record, config={"lr": record.config["lr"], "forgotten": 1}) for record in records]
    save_records(older, tmp_path / "records", CONTINUAL.incidental)
    save_records(records, tmp_path / "records", CONTINUAL.incidental)
    assert by_metric(load_all(tmp_path / "records"))["RA"].config == records[0].config
