"""What has to be run: shared trainings, recorded ones left out, folders and image sets checked before a start."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from wheretolearn.config import to_dict
from wheretolearn.engine import fused
from wheretolearn.engine.graphed import Precision
from wheretolearn.errors import DataError, Stopped, UserError
from wheretolearn.presets import Scale, load_preset
from wheretolearn.reproduce import run
from wheretolearn.reproduce.cells import cells_named, default_seeds
from wheretolearn.reproduce.plan import (
    FEWSHOT_LANES,
    Plan,
    Training,
    _can_have,
    batches,
    check_data,
    check_records,
    check_runs,
    estimate,
    make_plan,
    parts_per_training,
)
from wheretolearn.reproduce.protocols import config_of
from wheretolearn.reproduce.run import Watch, split
from wheretolearn.runs import environment
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import ResultRecord
from wheretolearn.version import __version__


def plan_of(
    *names: str,
    folder: Path = Path("none"),
    records: tuple[ResultRecord, ...] = (),
    seeds: int = 2,
    scale: Scale = "paper",
    again: bool = False,
    precision: Precision | None = None,
) -> Plan:
    return make_plan(cells_named(names, scale=scale), records, lambda _: seeds, scale, folder, again, precision)


def recorded(preset: str, metric: str, seeds: int = 2) -> ResultRecord:
    return ResultRecord(
        name=preset,
        metric=metric,
        values=(1.0,) * seeds,
        seeds=tuple(range(seeds)),
        versions={"wheretolearn": __version__},
        config=to_dict(config_of(load_preset(preset))),
        wall_seconds=100.0,
        hardware="an abacus",
    )


def make_run(plan: Plan, seed: int, **changes: object) -> RunFolder:
    training = plan.trainings[0]
    config = to_dict(training.config(seed)) | changes
    with RunFolder.create(training.place(seed), config, seed, training.preset.protocol) as run:
        return run


def test_tables_that_are_measured_on_the_same_runs_share_them() -> None:
    plan = plan_of("table5.la-maml.many", "tableS5.la-maml.many", "figureS3.many.la-maml")
    assert [training.preset.name for training in plan.trainings] == ["table5.la-maml.many"]
    assert [preset.name for preset in plan.trainings[0].to_record] == [
        "table5.la-maml.many",
        "tableS5.la-maml.many",
        "figureS3.many.la-maml",
    ]


def test_a_table_alone_names_its_runs_as_the_others_do() -> None:
    assert [own.preset.name for own in plan_of("tableS5.la-maml.many").trainings] == ["table5.la-maml.many"]
    tested_elsewhere = plan_of("table4.sparse-maml.shot5", "tableS3.sparse-maml").trainings
    assert [own.preset.name for own in tested_elsewhere] == ["table1.sparse-maml.shot5"]


def test_tables_with_other_numbers_of_seeds_share_the_larger() -> None:
    cells = cells_named(["table2.maml.shot5", "tableS1.small.maml.shot5"])
    plan = make_plan(cells, [], lambda table: 3 if table == "table2" else 5, "paper", Path("none"))
    assert [training.seeds for training in plan.trainings] == [(0, 1, 2, 3, 4)]


def test_a_run_that_starts_from_another_comes_after_it_seed_by_seed(tmp_path: Path) -> None:
    start, masked = plan_of("tableS4.shot5.init0", folder=tmp_path).trainings
    assert (start.preset.name, masked.preset.name) == ("table1.fomaml.shot5", "tableS4.shot5.init0")
    assert start.seeds == masked.seeds == (0, 1)
    assert start.to_record == []
    assert masked.config(1).start_from == str(tmp_path / "table1.fomaml.shot5-seed1")


def test_a_start_is_not_trained_for_runs_that_are_finished(tmp_path: Path) -> None:
    masked = plan_of("tableS4.shot5.init0", folder=tmp_path).trainings[1]
    for seed in masked.seeds:
        masked.place(seed).mkdir(parents=True)
        for name in ("run.json", "model.safetensors"):
            (masked.place(seed) / name).touch()
    again = plan_of("tableS4.shot5.init0", folder=tmp_path)
    assert [training.preset.name for training in again.trainings] == ["tableS4.shot5.init0"]


def test_what_is_recorded_with_these_seeds_is_left_out() -> None:
    name = "table5.la-maml.many"
    both = (recorded(name, "RA"), recorded(name, "BTI"))
    assert plan_of(name, records=both).trainings == []
    assert len(plan_of(name, records=both[:1]).trainings) == 1  # BTI is missing
    assert len(plan_of(name, records=both, seeds=3).trainings) == 1
    assert plan_of(name, records=both, seeds=1).trainings == []
    assert len(plan_of(name, records=both, again=True).trainings) == 1
    stale = tuple(replace(own, versions={"wheretolearn": "0.0.1"}) for own in both)
    assert len(plan_of(name, records=stale).trainings) == 1


def test_runs_are_missing_begun_or_finished(tmp_path: Path) -> None:
    plan = plan_of("table5.la-maml.many", folder=tmp_path, seeds=3)
    make_run(plan, 0)
    make_run(plan, 1)
    (plan.trainings[0].place(0) / "result.json").write_text("{}")
    torn = plan.trainings[0].place(2)  # a kill before run.json
    torn.mkdir()
    (torn / "run.lock").touch()
    assert plan.trainings[0].states() == {0: "finished", 1: "begun", 2: "missing"}
    assert [plan.count(state) for state in ("missing", "begun", "finished")] == [1, 1, 1]
    check_runs(plan)
    make_run(plan, 2)  # what the kill left is not in the way


def test_other_runs_in_the_folder_are_refused(tmp_path: Path) -> None:
    plan = plan_of("table5.la-maml.many", folder=tmp_path)
    make_run(plan, 0, log_every=3)  # no other experiment
    check_runs(plan)
    run = make_run(plan, 1, mask_lr=0.7)
    with pytest.raises(UserError, match=r"seed1 holds a run with other settings: mask_lr=0\.7\. Move it away, or"):
        check_runs(plan)
    info = json.loads((run.path / "run.json").read_text())
    info["versions"]["wheretolearn"] = "0.0.1"
    info["config"] = to_dict(plan.trainings[0].config(1))
    (run.path / "run.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=r"holds a run of version 0\.0\.1"):
        check_runs(plan)


def test_missing_image_sets_are_told_with_their_rows_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERETOLEARN_DATA", str(tmp_path))
    with pytest.raises(DataError) as caught:
        check_data(plan_of("table4.sparse-maml.shot1", "table5.sgd.many"))
    text = str(caught.value)
    assert "cub is needed for table4.sparse-maml.shot1.cub: `wheretolearn data get cub`" in text
    assert "mnist is needed for table5.sgd.many: `wheretolearn data get mnist`" in text
    with pytest.raises(DataError, match="mnist is needed for every row"):
        check_data(plan_of("table5"))
    check_data(plan_of("table5", "table6", scale="quick"))


def test_rows_that_can_be_run_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wheretolearn.data.image_set.exists", lambda name: name != "cub")
    with pytest.raises(DataError, match=r"with --rows: table4\.boil\.shot1\.cars, table4\.boil\.shot1\.tiered$"):
        check_data(plan_of("table4.boil.shot1"))


def test_seeds_on_record_are_not_lost(tmp_path: Path) -> None:
    name = "table5.la-maml.many"
    records = (recorded(name, "RA", 3), recorded(name, "BTI", 3))
    with pytest.raises(
        UserError, match=r"holds a record of table5\.la-maml\.many, RA, with seeds that would be lost: 2"
    ):
        check_records(plan_of(name, records=records, again=True), records, tmp_path)
    check_records(plan_of(name, records=records, again=True, seeds=3), records, tmp_path)


def test_a_folder_that_cannot_hold_records_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write records to .*file/results/continual: .*file cannot be written"):
        check_records(plan_of("table5.la-maml.many"), (), tmp_path / "file" / "results")


def test_time_is_estimated_from_records_of_the_same_runs() -> None:
    plan = plan_of("tableS5.la-maml.many", seeds=5)
    assert estimate(plan, [], 2, "cpu").seconds is None
    abacus = recorded("table5.la-maml.many", "RA")
    found = estimate(plan, [abacus], 2, "cpu")  # two programs side by side
    assert (found.seconds, found.basis) == (100.0, "runs recorded on an abacus")
    here = replace(abacus, metric="BTI", hardware=environment.hardware(), wall_seconds=30.0)
    found = estimate(plan, [abacus, here], 2, "cpu")
    assert (found.seconds, found.basis) == (30.0, "runs recorded on this hardware")
    more = estimate(plan_of("tableS5.la-maml.many", "table5.gem.many", seeds=5), [here], 2, "cpu")
    assert more.basis.endswith("not counting 5 runs of unknown length")
    graphics = replace(abacus, hardware="NVIDIA H200; an abacus")
    assert estimate(plan, [graphics], 2, "cuda").seconds == 100.0
    assert estimate(plan, [graphics], 2, "cpu").seconds is None  # a GPU's time says nothing about a CPU's
    assert estimate(plan_of("table5.sgd.many", seeds=0), [], 2, "cpu").basis == "all runs are finished"
    streams = [recorded(f"table6.bgd.{p}", "accuracy") for p in ("p98", "p90")]
    assert estimate(plan_of("table6.bgd", seeds=1), streams, 1, "cuda").seconds == 100.0  # side by side


@pytest.mark.parametrize("table", ["table5", "table6"])
def test_small_runs_have_reference_times(table: str) -> None:
    plan = plan_of(table, scale="quick", seeds=default_seeds(table, "quick"))
    found = estimate(plan, [], 2, "cpu")
    assert found.seconds is not None
    assert 30 < found.seconds < 300
    assert found.basis == "times measured on 2 cores of an Intel Xeon"


def test_seeds_share_a_program_unless_cores_would_be_idle() -> None:
    assert parts_per_training(plan_of("table5"), 2, "cpu") == 1
    assert parts_per_training(plan_of("table5.sgd.many"), 2, "cpu") == 2
    assert parts_per_training(plan_of("table5.sgd.many"), 2, "cuda") == 1
    # Not by what is left to do: an interrupted run must go on with the same lanes.
    records = (recorded("table5.la-maml.many", "RA"), recorded("table5.la-maml.many", "BTI"))
    assert parts_per_training(plan_of("table5.la-maml.many", "table5.er.many", records=records), 2, "cpu") == 1
    assert split([0, 1, 2, 3, 4], 2) == [[0, 1], [2, 3, 4]]
    assert split([0, 1], 4) == [[0], [1]]


def test_methods_that_cannot_have_a_precision_take_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    _can_have.cache_clear()
    monkeypatch.setattr(fused, "find_spec", lambda _: object())  # as on a machine with Triton
    wanted = {
        "table1.sparse-maml.shot5": ("float16", "bfloat16"),
        "table1.anil.shot5": ("tf32", "bfloat16"),  # second order
        "table2.metaoptnet.shot5": ("tf32", "tf32"),
        "table6.c-maml.p98": ("float16", "bfloat16"),
        "table6.bgd.p98": ("tf32", "tf32"),
        "table5.sgd.many": (None, None),
    }
    for place, precision in enumerate(("float16", "bfloat16")):
        trainings = plan_of(*wanted, precision=precision).trainings
        found = {own.preset.name: getattr(own.config(0), "precision", None) for own in trainings}
        assert found == {name: pair[place] for name, pair in wanted.items()}
    assert {getattr(own.config(0), "precision", "float32") for own in plan_of(*wanted).trainings} == {"float32"}


def test_without_triton_there_is_no_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    _can_have.cache_clear()
    monkeypatch.setattr(fused, "find_spec", lambda _: None)
    names = ("table1.sparse-maml.shot5", "table6.c-maml.p98")
    for precision, had in (("float16", "tf32"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        assert {own.config(0).precision for own in plan_of(*names, precision=precision).trainings} == {had}
    _can_have.cache_clear()


def test_a_run_of_another_precision_is_not_gone_on_with(tmp_path: Path) -> None:
    name = "table6.c-maml.p98"
    run = make_run(plan_of(name, folder=tmp_path, seeds=1, precision="float16"), 0)
    check_runs(plan_of(name, folder=tmp_path, seeds=1, precision="float16"))
    with pytest.raises(UserError, match=r"holds a run in float16: go on with it on a GPU, with `--precision float16`"):
        check_runs(plan_of(name, folder=tmp_path, seeds=1))
    (run.path / "result.json").write_text("{}")  # finished: it can be measured anywhere
    check_runs(plan_of(name, folder=tmp_path, seeds=1))


def test_times_on_a_gpu_are_those_of_the_same_precision_where_there_are_any() -> None:
    slow = recorded("table6.c-maml.p98", "accuracy")
    fast = replace(slow, config={**slow.config, "precision": "float16"}, wall_seconds=10.0)
    for precision, seconds in (("float32", 100.0), ("float16", 10.0)):
        assert estimate(plan_of("table6.c-maml.p98", precision=precision), [slow, fast], 2, "cuda").seconds == seconds
    other = estimate(plan_of("table6.c-maml.p98"), [fast], 2, "cuda")
    assert (other.seconds, other.basis) == (10.0, "runs recorded on an abacus in float16")


def test_trainings_that_share_a_gpu_take_as_long_as_the_longest() -> None:
    names = [f"table1.{method}.shot5" for method in ("sparse-maml", "sparse-relu-maml", "exp-maml")]
    records = [replace(recorded(name, "accuracy"), wall_seconds=100.0 * n) for n, name in enumerate(names, start=1)]
    plan = plan_of(*names, records=(), seeds=1)
    assert estimate(plan, records, 2, "cuda").seconds == 300.0
    assert estimate(plan, records, 2, "cpu").seconds == 300.0  # two at a time
    assert estimate(plan_of(*names, seeds=6), records, 2, "cuda").seconds == 600.0


def test_on_a_gpu_streams_go_together() -> None:
    trainings = plan_of("table6.c-maml", "table6.bgd").trainings
    assert len(trainings) == 4
    assert batches("online", trainings, "cuda") == batches("online", trainings, "cpu") == [trainings]


def test_on_a_gpu_few_shot_trainings_go_together_where_they_can_be_lanes() -> None:
    names = [f"table1.{method}.shot5" for method in ("sparse-maml", "fomaml", "sparse-relu-maml", "exp-maml", "anil")]
    trainings = plan_of(*names, "table1.sparse-maml.shot1", seeds=1).trainings
    found = batches("fewshot", trainings, "cuda")
    assert sorted(own.preset.name for batch in found for own in batch) == sorted([*names, "table1.sparse-maml.shot1"])
    for batch in found:
        assert sum(len(own.seeds) for own in batch) <= FEWSHOT_LANES
        configs = [config_of(own.preset) for own in batch]
        assert len({(c.shots, c.inner_steps, c.tasks_per_step) for c in configs}) == 1
    together = next(batch for batch in found if batch[0].preset.name == names[0])
    assert {own.preset.name for own in together} >= {names[0], "table1.sparse-relu-maml.shot5"}
    assert batches("fewshot", trainings, "cpu") == [trainings]
    # Seeds are lanes too: a training is never torn apart, and fills what it can.
    for seeds, sizes in ((3, [2, 1]), (5, [1, 1, 1]), (9, [1, 1, 1])):
        several = plan_of(names[0], "table1.sparse-relu-maml.shot5", "table1.exp-maml.shot5", seeds=seeds).trainings
        assert [len(batch) for batch in batches("fewshot", several, "cuda")] == sizes


def test_a_machine_without_matplotlib_keeps_no_curves_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    watch = Watch(*(lambda *_: None,) * 3, notes.append, lambda: None)
    monkeypatch.setattr(run, "find_spec", lambda _: None)
    run._Work(plan_of("table5.sgd.many"), tmp_path, "cuda", 1, watch, False)._keep_curves([])
    assert notes == ["no curves are kept, as matplotlib is missing: `report --keep-curves` does it elsewhere"]


@pytest.mark.parametrize("others", [(), ("table1.sparse-maml.shot1",)])
def test_a_signal_that_finds_every_run_at_its_end_stops_before_more_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...]
) -> None:
    trained: list[str] = []

    def train(work: run._Work, trainings: Sequence[Training]) -> None:
        trained.extend(own.preset.name for own in trainings)
        for own in trainings:
            for seed in own.seeds:
                place = make_run(Plan("paper", [], [own], 1), seed).path
                (place / "model.safetensors").touch()
        work.stop()

    told: list[str] = []
    watch = Watch(*(lambda *_: None,) * 4, lambda: told.append("stop"))
    monkeypatch.setattr(run._Work, "train", train)
    plan = plan_of("table1.sparse-maml.shot5", *others, folder=tmp_path)
    with pytest.raises(Stopped, match="the same command goes on"):  # testing comes next, or the other
        run.carry_out(plan, tmp_path / "results", "cuda", 1, watch)
    assert trained == ["table1.sparse-maml.shot5"]
    assert told == ["stop"]


def test_a_signal_that_finds_everything_done_stops_nothing_and_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(work: run._Work, trainings: Sequence[Training]) -> None:
        for own in trainings:
            (make_run(Plan("paper", [], [own], 1), 0).path / "result.json").write_text("{}")
        work.stop()

    watch = Watch(*(lambda *_: None,) * 4, lambda: None)
    monkeypatch.setattr(run._Work, "train", train)
    plan = plan_of("table5.sgd.rotations", folder=tmp_path, seeds=1)
    with pytest.raises(UserError, match=r"result\.json is damaged") as caught:  # as it holds no accuracies
        run.carry_out(plan, tmp_path / "results", "cpu", 1, watch)
    assert not isinstance(caught.value, Stopped)
