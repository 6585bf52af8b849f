"""What a parent makes of workers that tell it about several runs each."""

import signal
from contextlib import ExitStack

import pytest

from wheretolearn.errors import NonFiniteError, Stopped, UserError
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.workers import failure_of, train_in_workers

# What a run does is its name. A process tells of failures, and ends as the last of its runs says.
WORKER = """
import os, signal, sys, time
from pathlib import Path
from wheretolearn.errors import NonFiniteError, Stopped, UserError
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.workers import work


def job(teller):
    runs = {path.name: RunFolder.open(path) for path in map(Path, sys.argv[1:])}
    failing = [run for name, run in runs.items() if name.startswith("diverges")]
    if failing:
        teller.tell_failure(failing, NonFiniteError(f"{failing[0].path}: not finite"))
    for name, run in runs.items():
        if name.startswith("ends"):
            (run.path / "result.json").touch()
    if "killed" in runs:
        os.kill(os.getpid(), signal.SIGKILL)
    if "waits" in runs:
        stopping = []
        signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
        teller.tell_step(1, {"loss": 1.0})
        while not stopping:
            time.sleep(0.01)
        raise Stopped("saved")
    if "trips" in runs:
        raise UserError("tripped")
    if failing:
        raise NonFiniteError("1 of many runs failed")


work(job)
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains shares of runs, by name; gives the error, the notes and the paths as they stand in these."""
    (tmp_path / "a_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    notes = []

    def run(*shares, report=lambda *_: None):
        with ExitStack() as folders:
            runs = [[folders.enter_context(RunFolder.create(name, {}, 0, "online")) for name in own] for own in shares]
            with pytest.raises(UserError) as caught:
                train_in_workers(
                    "a_worker",
                    runs,
                    report,
                    finished=lambda run: (run.path / "result.json").exists(),
                    at_once=len(shares),
                    threads=1,
                    notify=notes.append,
                )
        return caught.value, sorted(notes)

    return run


def test_what_a_process_tells_of_its_runs_is_told_once(train):
    error, notes = train(["diverges", "ends"])
    assert isinstance(error, NonFiniteError)
    assert str(error) == "1 of 2 runs failed:\ndiverges: not finite"
    assert notes == ["diverges failed: not finite"]


def test_runs_that_share_an_error_are_named_together(train):
    error, notes = train(["diverges1", "diverges2", "ends"])
    assert str(error) == "2 of 3 runs failed:\ndiverges1, diverges2: diverges1: not finite"
    assert notes == ["diverges1, diverges2 failed: diverges1: not finite"]


def test_the_end_of_a_process_is_told_of_the_runs_that_it_left(train):
    error, notes = train(["diverges", "ends", "killed"], ["ends2", "trips"])
    assert sorted(str(error).splitlines()) == [
        "3 of 5 runs failed:",
        "diverges: not finite",
        "killed: its process was ended by SIGKILL",
        "trips: tripped",
    ]
    assert notes == [
        "diverges failed: not finite",
        "killed failed: its process was ended by SIGKILL",
        "trips failed: tripped",
    ]


def test_a_run_that_failed_before_a_stop_is_not_among_those_to_resume(train):
    def stop(run, step, values):
        if run.path.name == "waits":  # once: what a process tells of no run is of all that it has
            signal.raise_signal(signal.SIGTERM)

    error, _ = train(["diverges", "waits"], report=stop)
    assert isinstance(error, Stopped)
    assert str(error) == (
        "stopped 1 runs and saved them; go on with `wheretolearn resume waits`\ndiverges failed: not finite"
    )


def test_a_path_that_begins_an_error_is_not_said_twice(tmp_path):
    with RunFolder.create(tmp_path / "run", {}, 0, "online") as run:
        for words in (f"{run.path}: too large", "too large"):
            assert failure_of([run], UserError(words), " failed") == f"{run.path} failed: too large"
