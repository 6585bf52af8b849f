"""The real command in real processes: plan, records, what is skipped, resumed or refused, and kills at any moment."""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from wheretolearn.cli import app
from wheretolearn.cli.reproduce import _watching
from wheretolearn.config import to_dict
from wheretolearn.errors import Stopped, UserError
from wheretolearn.reproduce.cells import all_cells, cells_named, load_records
from wheretolearn.reproduce.plan import make_plan
from wheretolearn.reproduce.run import AT_WORK, runs_at_once
from wheretolearn.runs.folder import RunFolder

pytestmark = pytest.mark.xdist_group("glyphs")  # drawn once, by whichever process runs these

QUICK = ["table5", "--scale", "quick", "--device", "cpu", "--workers", "2"]
SMALL = [*QUICK, "--rows", "sgd.rotations", "--rows", "er.rotations"]
# What a record says of the time it was made.
OF_THE_TIME = ("wall_seconds", "date")
COMMIT = "0123456789"


def start(folder: Path, *arguments: str, environ: Mapping[str, str] = os.environ) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "wheretolearn", "reproduce", *arguments],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environ, "COLUMNS": "250", "NO_COLOR": "1", "WHERETOLEARN_COMMIT": COMMIT},
    )


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    process = start(folder, *arguments)
    out, err = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def contents(folder: Path) -> dict[str, dict[str, Any]]:
    """Every record, less what differs between two runs of the same."""
    found = {}
    for path in sorted(folder.glob("results/quick/*/*")):
        record = json.loads(path.read_text())
        found[path.name] = {key: value for key, value in record.items() if key not in OF_THE_TIME}
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """Two rows with two seeds, never interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    done = run(folder, *SMALL, "--seeds", "2")
    assert done.returncode == 0, done.stderr
    return folder, done


def test_it_tells_its_plan_goes_through_it_and_records(straight: tuple[Path, Any]) -> None:
    folder, done = straight
    assert "3 cells: 0 recorded, 0 stale, 3 not run" in done.stderr
    assert "2 trainings: 4 runs to do, 0 to resume, 0 finished, in runs/reproduce/quick" in done.stderr
    assert "time: about " in done.stderr
    for row in ("sgd.rotations", "er.rotations"):
        assert f"table5.{row}: begun" in done.stderr
        assert f"table5.{row}: recorded; RA " in done.stderr
    assert set(contents(folder)) == {  # with what the paper has no cells for, as `continual --record` writes
        f"table5.{row}-at-quick-scale.{measure}.json"
        for row in ("er.rotations", "sgd.rotations")
        for measure in ("RA", "BTI", "forward-transfer")
    }
    records = load_records(folder / "results" / "quick")
    assert all(record.seeds == (0, 1) and record.interval is not None for record in records)
    table = [line for line in done.stdout.splitlines() if line.strip().startswith("sgd.rotations ")]
    assert len(table) == 2
    assert all("±" in line and "recorded" in line for line in table)


def call(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """The command in this process, for what trains nothing."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("WHERETOLEARN_COMMIT", COMMIT)
    return CliRunner().invoke(app, ["reproduce", *arguments])


def test_what_is_recorded_is_not_run_again(straight: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = straight
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    done = call(folder, monkeypatch, *SMALL, "--seeds", "2")
    assert done.exit_code == 0
    assert "nothing to run: all is recorded in results/quick" in done.stderr
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_lost_records_are_made_anew_from_the_finished_runs(
    straight: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = straight
    done = call(folder, monkeypatch, *SMALL, "--seeds", "2", "--record", str(tmp_path / "results" / "quick"))
    assert done.exit_code == 0
    assert "0 runs to do, 0 to resume, 4 finished" in done.stderr
    assert ": begun" not in done.stderr
    assert contents(tmp_path) == contents(folder)


def test_a_damaged_run_does_not_keep_others_from_being_recorded(
    straight: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(straight[0] / "runs", tmp_path / "runs")
    damaged = tmp_path / "runs" / "reproduce" / "quick" / "table5.sgd.rotations-seed0" / "result.json"
    damaged.write_text("{")
    done = call(tmp_path, monkeypatch, *SMALL, "--seeds", "2")
    assert "table5.sgd.rotations-seed0/result.json is damaged" in str(done.exception)
    assert {name.partition(".rotations")[0] for name in contents(tmp_path)} == {"table5.er"}


def test_new_runs_write_event_files_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[RunFolder] = []

    def look(module: str, shares: Sequence[Sequence[RunFolder]], *_: object, **__: object) -> None:
        started.extend(run for share in shares for run in share)

    monkeypatch.setattr("wheretolearn.reproduce.run.train_in_workers", look)
    monkeypatch.setattr("wheretolearn.cli.common.check_installed", lambda: None)
    for folder, options in (("with", ["--tensorboard"]), ("without", [])):
        call(tmp_path, monkeypatch, *SMALL, "--seeds", "1", "--runs", folder, *options)
    assert [(run.path.parent.name, run.tensorboard) for run in started] == [
        *[("with", True)] * 2,
        *[("without", False)] * 2,
    ]


def test_its_runs_remember_their_threads(straight: tuple[Path, Any]) -> None:
    runs = [RunFolder.open(file.parent) for file in straight[0].glob("runs/reproduce/quick/*/run.json")]
    assert [run.threads for run in runs] == [1] * 4


def test_the_list_shows_every_cell_with_its_state(straight: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    done = call(straight[0], monkeypatch, "table5", "--scale", "quick", "--list")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert sum(line.endswith("recorded") for line in lines) == 3
    assert sum(line.endswith("not run") for line in lines) == len(cells_named(["table5"], scale="quick")) - 3


def test_the_list_of_the_paper_has_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = call(tmp_path, monkeypatch, "--list")
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert sum(line.endswith("not run") for line in lines) == len(all_cells())
    assert any(re.fullmatch(r"gem\.many +BTI +-23\.52 ± 0\.87 +not run", line) for line in lines)


def test_a_narrow_terminal_cuts_no_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")
    done = CliRunner().invoke(app, ["reproduce", "--list", "--rows", "gem.many"])
    assert re.search(r"gem\.many +BTI +-23\.52 ± 0\.87 +not run", done.stdout)


def test_a_note_is_told_once_on_a_terminal_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    cells = cells_named(["table5.sgd.many"], scale="quick")
    plan = make_plan(cells, (), lambda _: 1, "quick", tmp_path)
    with _watching(plan) as watch:
        watch.note("waiting")
        watch.note("waiting")
    assert capsys.readouterr().err.count("note: waiting") == 1


def test_what_another_process_works_on_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs" / "reproduce" / "quick"
    claim = RunFolder(runs / AT_WORK / "table5.er.rotations")
    claim.path.mkdir(parents=True)
    with claim:
        claim.lock()
        done = call(tmp_path, monkeypatch, *SMALL, "--seeds", "1")
    assert re.search("table5.er.rotations cannot be trained, as .* is in use: process [0-9]+", str(done.exception))
    assert [path.name for path in runs.iterdir()] == [AT_WORK]


def test_mistakes_start_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, complaint in (
        ([], "name a table or figure, such as table5"),
        (["table7"], "no table, figure or row is called 'table7'; the nearest: table"),
        (["table5", "--scale", "tiny"], "there is no scale 'tiny'"),
        (["table4", "--rows", "boil.shot1.cub"], "cub is needed for every row: `wheretolearn data get cub`"),
        (["--rows", "sgd"], "name a table or figure, such as table5"),
        ([*SMALL, "--precision", "float8"], "must be one of float32, tf32, bfloat16, float16, not 'float8'"),
        ([*SMALL, "--precision", "float16", "--device", "cpu"], "--precision float16 is for a GPU"),
        (["--rows", "nothing", "--list"], "no row of any table is called 'nothing'"),
        (["--rows", "sgd", "--markdown", "page.md"], "--markdown writes the page of all cells"),
        (["table5", "--markdown", "page.md"], "--markdown writes the page of all cells"),
    ):
        done = call(tmp_path, monkeypatch, *arguments)
        assert isinstance(done.exception, UserError)
        assert complaint in str(done.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        (
            ["sgd.rotations", "er.rotations"],
            [],
            10 * 2 + 2 * 3 + 2 + 32,
        ),  # two runs' files, three a worker, a lock each
        (["sgd.rotations", "er.rotations"], ["--tensorboard"], 10 * 3 + 2 * 3 + 2 + 32),
        (["sgd.rotations"], ["--workers", "9"], 5 * 2 + 5 * 3 + 1 + 32),
    ],
)
def test_as_many_files_may_be_open_as_the_plan_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Sequence[str], options: Sequence[str], expected: int
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (48, 5000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    monkeypatch.setattr("wheretolearn.cli.reproduce.carry_out", lambda *_, **__: None)
    monkeypatch.setattr("wheretolearn.cli.common.check_installed", lambda: None)
    named = [f"table5.{row}" for row in rows]
    done = call(tmp_path, monkeypatch, *named, *QUICK[1:], "--seeds", "5", *options)
    assert done.exit_code == 0, done.output
    assert raised == [(expected, 5000)]


def test_runs_of_several_batches_are_not_open_at_once(tmp_path: Path) -> None:
    """On a GPU few-shot learning goes through six runs at a time; on a CPU all runs of a protocol are held."""
    plan = make_plan(cells_named(["table1"], scale="quick"), (), lambda _: 2, "quick", tmp_path)
    assert len(plan.trainings) > 3
    assert runs_at_once(plan, "cuda") <= 6
    first = [own for own in plan.trainings if own.start is None]
    assert runs_at_once(plan, "cpu") == 2 * max(len(first), len(plan.trainings) - len(first))


def test_more_runs_than_files_can_be_open_leave_none_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (48, 48))
    done = call(tmp_path, monkeypatch, *SMALL, "--seeds", "5")
    assert isinstance(done.exception, UserError)
    assert "10 runs keep up to 60 files open at once, and this machine allows 48" in str(done.exception)
    assert not (tmp_path / "runs").exists()


def test_begun_runs_with_event_files_count_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own,) = make_plan(
        cells_named(["table5.sgd.rotations"], scale="quick"), (), lambda _: 1, "quick", tmp_path / "runs"
    ).trainings
    with RunFolder.create(own.place(0), to_dict(own.config(0)), 0, "continual", tensorboard=True):
        pass
    monkeypatch.setattr(resource, "getrlimit", lambda _: (30, 30))
    arguments = [own.preset.name, *QUICK[1:], "--seeds", "1", "--runs", "runs"]
    assert "1 runs keep up to 36 files open" in str(call(tmp_path, monkeypatch, *arguments).exception)


def test_another_run_in_the_way_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "runs" / "reproduce" / "quick" / "table5.sgd.rotations-seed0"
    with RunFolder.create(place, {"lr": 0.5}, 0, "continual"):
        pass
    done = call(tmp_path, monkeypatch, *SMALL, "--seeds", "1")
    assert "table5.sgd.rotations-seed0 holds a run with other settings: " in str(done.exception)
    assert sorted(path.name for path in place.parent.iterdir()) == [place.name]


def wait_for_line(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if text in line:
            return
    pytest.fail("".join(said))


def kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended by itself before it was killed"


def test_killed_twice_it_ends_with_the_records_of_a_straight_run(
    straight: tuple[Path, Any], tmp_path: Path, hold_at: Callable[..., dict[str, str]]
) -> None:
    command = [*SMALL, "--seeds", "2"]
    process = start(tmp_path, *command, environ=hold_at(10))
    wait_for_line(process, ": begun")
    kill(process)  # where nothing is finished

    process = start(tmp_path, *command, environ=hold_at(10, runs="table5.er"))
    runs = tmp_path / "runs" / "reproduce" / "quick"
    while not all((runs / f"table5.sgd.rotations-seed{seed}" / "result.json").exists() for seed in (0, 1)):
        assert process.poll() is None
        time.sleep(0.02)
    kill(process)  # where one is finished and the other is not
    assert not list(runs.glob("table5.er.rotations-seed?/result.json"))
    records = tmp_path / "results" / "quick" / "continual"
    records.mkdir(parents=True, exist_ok=True)
    name = next(name for name in contents(straight[0]) if name.startswith("table5.er."))
    (records / f".{name}.0123456789abcdef.tmp").touch()  # as if it had been recording

    done = run(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert "0 runs to do, 2 to resume, 2 finished" in done.stderr
    assert not list(tmp_path.rglob("*.tmp"))
    assert contents(tmp_path) == contents(straight[0])


@pytest.mark.slow
def test_killed_ten_times_at_random_points_it_ends_with_the_records_of_a_straight_run(tmp_path: Path) -> None:
    command = [*QUICK, "--seeds", "3"]
    for row in ("sgd", "er", "sparse-la-maml", "la-maml"):
        command += ["--rows", row]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir()
    killed.mkdir()
    done = run(straight, *command)
    assert done.returncode == 0, done.stderr
    random_points = random.Random(0)
    interrupted = 0
    for number in range(10):
        process = start(killed, *command)
        if number % 3 and interrupted == number:  # else it may be killed before it has begun, or have nothing to do
            wait_for_line(process, ": begun")
        time.sleep(random_points.uniform(0, 2))
        interrupted += process.poll() is None
        process.kill()
        process.communicate()
    assert interrupted >= 5, "the command ended by itself before most kills: give it more to do"
    done = run(killed, *command)
    assert done.returncode == 0, done.stderr
    assert not list(killed.rglob("*.tmp"))
    assert contents(killed) == contents(straight)


def test_ctrl_c_saves_and_says_that_the_same_command_goes_on(
    straight: tuple[Path, Any], tmp_path: Path, hold_at: Callable[..., dict[str, str]]
) -> None:
    process = start(tmp_path, *SMALL, "--seeds", "2", environ=hold_at(10))
    wait_for_line(process, ": begun")
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate()
    assert process.returncode == Stopped.exit_code
    assert "error: stopped and saved; the same command goes on" in rest
    done = run(tmp_path, *SMALL, "--seeds", "2")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path) == contents(straight[0])
