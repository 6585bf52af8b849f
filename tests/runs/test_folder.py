import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from wheretolearn.errors import UserError
from wheretolearn.runs.folder import RunFolder


def create(path: Path) -> RunFolder:
    return RunFolder.create(path, {"inner_lr": 0.1, "limit": math.inf}, seed=3, protocol="fewshot")


def test_run_json_says_what_was_run(tmp_path: Path) -> None:
    with create(tmp_path / "runs" / "a"):
        info = json.loads((tmp_path / "runs" / "a" / "run.json").read_text())
    assert info["config"] == {"inner_lr": 0.1, "limit": {"$float": "inf"}}
    assert info["seed"] == 3
    assert info["protocol"] == "fewshot"
    assert {"python", "torch", "numpy", "wheretolearn"} <= info["versions"].keys()
    assert info["hardware"]
    assert info["argv"] == sys.argv
    assert info["started"].endswith("+00:00")
    assert "commit" in info


def test_a_run_opens_as_it_was_created(tmp_path: Path) -> None:
    create(tmp_path).close()
    run = RunFolder.open(tmp_path)
    assert (run.config, run.seed, run.protocol) == ({"inner_lr": 0.1, "limit": math.inf}, 3, "fewshot")
    assert os.fspath(run) == str(tmp_path)


def test_a_run_knows_its_preset(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", {}, 0, "fewshot", "table1.maml.shot1", "quick"):
        run = RunFolder.open(tmp_path / "run")
    assert (run.preset, run.scale) == ("table1.maml.shot1", "quick")


def test_a_run_of_an_early_version_opens_without_a_preset(tmp_path: Path) -> None:
    create(tmp_path).close()
    info = json.loads((tmp_path / "run.json").read_text())
    assert info.pop("preset") is info.pop("scale") is None
    (tmp_path / "run.json").write_text(json.dumps(info))
    run = RunFolder.open(tmp_path)
    assert (run.preset, run.scale) == (None, None)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=f"{tmp_path} is not empty and not a run: choose another folder"):
        create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    create(tmp_path).close()
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(UserError, match="already holds a run: resume it"):
        create(tmp_path)
    assert (tmp_path / "run.json").read_bytes() == before
    with RunFolder.open(tmp_path) as run:
        run.lock()  # the refusal did not keep it


def test_a_run_that_died_before_run_json_does_not_block_its_folder(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("123\n")
    (tmp_path / ".run.json.1-2.tmp").write_text("{")
    with create(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "run.lock"]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"cannot create the folder {tmp_path}/file"):
        create(tmp_path / "file")


def test_a_run_for_which_no_file_can_be_opened_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(UserError, match=r"run in .*empty: Too many open files"):
            create(tmp_path / "empty")
        with pytest.raises(UserError, match=r"cannot write to .*empty: Too many open files"):
            RunFolder(tmp_path / "empty").lock()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_lock_on_a_full_disk_is_reported_and_let_go(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(UserError, match="cannot write to"):
            create(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    create(tmp_path).close()


def test_opening_what_is_not_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} is not a run folder: it has no run.json"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("text", ['{"seed": 1', "[]", '{"seed": 1}'])
def test_damaged_run_json_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json is damaged"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", "abc"),
        ("seed", 1.5),
        ("seed", True),
        ("seed", -1),
        ("seed", 2**31),
        ("config", 5),
        ("config", [["inner_lr", 1]]),
        ("protocol", None),
        ("preset", 5),
        ("scale", ["quick"]),
        ("threads", 0),
        ("threads", True),
        ("threads", "2"),
    ],
)
def test_a_value_that_run_json_cannot_hold_is_named(tmp_path: Path, name: str, value: object) -> None:
    create(tmp_path).close()
    info = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**info, name: value}))
    with pytest.raises(UserError, match=rf"run\.json is damaged: its {name} "):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("seed", [-1, 2**31, 99999999999999999999])
def test_a_seed_out_of_range_is_refused_before_anything_is_written(tmp_path: Path, seed: int) -> None:
    with pytest.raises(UserError, match=f"between 0 and 2147483647, not {seed}"):
        RunFolder.create(tmp_path / "run", {}, seed, "fewshot")
    assert not (tmp_path / "run").exists()


def test_metrics_come_back(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.log(1, loss=0.5, layers=[1, 2], note="ä\n|")
        run.log(2, loss=np.float32(0.25), by_layer={"a": 1})
        assert RunFolder.open(tmp_path).metrics() == [
            {"step": 1, "loss": 0.5, "layers": [1, 2], "note": "ä\n|"},
            {"step": 2, "loss": 0.25, "by_layer": {"a": 1}},
        ]


def test_non_finite_metrics_stay_valid_json(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.log(1, loss=math.nan, best=-math.inf)
        line = (tmp_path / "metrics.jsonl").read_text()
        assert line == '{"step": 1, "loss": {"$float": "nan"}, "best": {"$float": "-inf"}}\n'
        (record,) = run.metrics()
        assert math.isnan(record["loss"])
        assert record["best"] == -math.inf


def test_a_run_without_metrics_has_none(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        assert run.metrics() == []
        run.rewind(0)
        assert run.metrics() == []


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', '{"step": 2}', "\0\0\0"])
def test_a_torn_last_line_is_left_out_and_does_not_spoil_the_next(tmp_path: Path, torn: str) -> None:
    with create(tmp_path) as run:
        run.log(1, loss=1.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    with RunFolder.open(tmp_path) as run:
        assert run.metrics() == [{"step": 1, "loss": 1.0}]
        run.log(2, loss=2.0)
        assert run.metrics() == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]


def test_damage_before_the_last_line_is_an_error_with_its_line(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
        with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: damaged"):
            run.metrics()


def test_rewind_makes_a_resumed_run_equal_to_a_straight_one(tmp_path: Path) -> None:
    with create(tmp_path / "straight") as straight:
        for step in range(1, 8):
            straight.log(step, loss=1 / step)
    with create(tmp_path / "resumed") as run:
        for step in range(1, 6):
            run.log(step, loss=1 / step)
    with (tmp_path / "resumed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "l')
    with RunFolder.open(tmp_path / "resumed") as run:
        run.rewind(3)
        for step in range(4, 8):
            run.log(step, loss=1 / step)
    contents = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("straight", "resumed")]
    assert contents[0] == contents[1]


def test_logging_goes_on_after_rewinding_an_open_run(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        for step in (1, 2, 3):
            run.log(step)
        run.rewind(1)
        run.log(2, again=True)
        assert run.metrics() == [{"step": 1}, {"step": 2, "again": True}]


def test_a_crash_while_rewinding_keeps_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*arguments: object) -> None:
        raise KeyboardInterrupt

    with create(tmp_path) as run:
        run.log(1)
        run.log(2)
        monkeypatch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            run.rewind(1)
        assert [record["step"] for record in run.metrics()] == [1, 2]


def test_a_full_disk_while_logging_is_reported_and_leaves_whole_lines(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.log(1, text="x" * 100)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))  # cuts the second record in two
        try:
            with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl"):
                run.log(2, text="x" * 100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        run.log(3)
        assert [record["step"] for record in run.metrics()] == [1, 3]


def test_a_second_writer_is_refused_but_a_reader_is_not(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.log(1)
        other = RunFolder.open(tmp_path)
        assert other.metrics() == [{"step": 1}]
        for write in (lambda: other.log(2), lambda: other.rewind(0)):
            with pytest.raises(UserError, match=f"{tmp_path} is in use: process {os.getpid()} is writing"):
                write()
        assert other.metrics() == [{"step": 1}]
    other.log(2)
    assert len(other.metrics()) == 2
    other.close()


HOLD = """
import sys, time
from wheretolearn.runs.folder import RunFolder
run = RunFolder.open(sys.argv[1])
run.log(1)
print("locked", flush=True)
time.sleep(600)
"""


def test_a_living_process_keeps_its_lock_and_a_killed_one_does_not(tmp_path: Path) -> None:
    create(tmp_path).close()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with RunFolder.open(tmp_path) as run:
            with pytest.raises(UserError, match=f"process {process.pid} is writing"):
                run.log(2)
            process.send_signal(signal.SIGKILL)
            process.wait()
            run.log(2)
            assert [record["step"] for record in run.metrics()] == [1, 2]
