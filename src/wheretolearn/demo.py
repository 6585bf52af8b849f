"""The demo: sparse-MAML against MAML on characters, trained side by side, and a page that compares them.

Each method trains in a process of its own with its share of the cores: networks this small gain nothing from more
threads. The processes write to run folders, so the demo is stopped, killed and resumed like any other run.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from wheretolearn.config import from_dict, to_dict
from wheretolearn.errors import Stopped, UserError
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.fewshot.trained import Evaluation, evaluate_run, load_trained
from wheretolearn.fewshot.training import train
from wheretolearn.presets import load_preset
from wheretolearn.report.comparison import MethodResult
from wheretolearn.runs import environment
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.signals import StopRequest
from wheretolearn.storage import read_json, write_json

METHODS = {"sparse-MAML": "demo.sparse-maml", "MAML": "demo.maml"}
ABOUT = {
    "sparse-MAML": "learns which weights the inner loop may change",
    "MAML": "changes every weight in the inner loop",
}
EVALUATED = {"held-out characters": "characters", "held-out scripts": "scripts"}
TEST_TASKS = 300
# Of a worker; the last is one that was told to stop while it was starting or testing, when nothing needs saving.
_GOOD_ENDS = (0, Stopped.exit_code, -signal.SIGTERM)

Update = Callable[[str, int, Mapping[str, Any]], None]  # (method, outer step, latest values)


def open_runs(folder: Path, seed: int = 0, settings: Mapping[str, Any] | None = None) -> dict[str, RunFolder]:
    """The run of each method, made where it is not there yet."""
    runs = {}
    for method in METHODS:
        path, config = _path(folder, method), _config(method, settings)
        run = RunFolder.open(path) if (path / "run.json").exists() else RunFolder.create(path, config, seed, "fewshot")
        if run.config != config:
            raise UserError(f"{path} holds a run with other settings: choose another folder, or remove it")
        if run.seed != seed:
            raise UserError(
                f"{path} was trained with seed {run.seed}, not {seed}: "
                "choose another --folder, or add --fresh to forget that demo"
            )
        run.close()  # the worker takes the lock
        runs[method] = run
    return runs


def forget(folder: Path, settings: Mapping[str, Any] | None = None) -> None:
    """Delete the runs of an earlier demo. Anything else that lies in their place is an error and stays."""
    earlier = []
    for method in METHODS:
        path = _path(folder, method)
        if not path.is_dir() or not any(path.iterdir()):
            continue
        if not (path / "run.json").exists() or RunFolder.open(path).config != _config(method, settings):
            raise UserError(f"{path} is not a run of this demo and is not deleted: choose another folder, or remove it")
        earlier.append(path)
    for path in earlier:
        with RunFolder.open(path) as run:
            run.lock()  # refuses while another demo is training there
            shutil.rmtree(path)


def _path(folder: Path, method: str) -> Path:
    return folder / METHODS[method].partition(".")[2]


def _config(method: str, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    preset = METHODS[method]
    return to_dict(from_dict(FewShotConfig, {**load_preset(preset).settings, **(settings or {})}, where=preset))


def train_side_by_side(
    runs: Mapping[str, RunFolder],
    update: Update,
    test_tasks: int = TEST_TASKS,
    on_stop: Callable[[], None] | None = None,
) -> None:
    """Train and evaluate every run in its own process, following their metrics; resumes what is half done.

    ``on_stop`` is called when a signal asks to stop, before the processes have ended.
    """
    threads = max(1, (os.cpu_count() or 1) // len(runs))
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    waiting = {
        method: subprocess.Popen(
            [sys.executable, "-m", "wheretolearn.demo", str(run.path), str(test_tasks)],
            env=environ,
            stdin=subprocess.PIPE,  # never written to: it closes when this process ends, however it ends
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on once
        )
        for method, run in runs.items()
        if not is_finished(run)
    }
    workers = dict(waiting)
    seen = dict.fromkeys(waiting, 0)
    told = False
    with StopRequest(on_stop) as stop:
        while waiting:
            time.sleep(0.2)
            for method in seen:
                for record in runs[method].metrics()[seen[method] :]:
                    done = record["step"] == runs[method].config["outer_steps"]
                    update(method, record["step"], {**record, "stage": "testing"} if done else record)
                    seen[method] += 1
            for method in [method for method, worker in waiting.items() if worker.poll() is not None]:
                del waiting[method]
                if workers[method].returncode not in _GOOD_ENDS:
                    _stop(waiting)
            if stop.requested and not told:
                told = True
                _stop(waiting)
    messages = {method: worker.communicate()[1] for method, worker in workers.items()}
    for method, worker in workers.items():
        if worker.returncode not in _GOOD_ENDS:
            raise UserError(f"training {method} failed (exit code {worker.returncode}): {messages[method].strip()}")
    if told or not all(map(is_finished, runs.values())):
        run = next(iter(runs.values()))
        command = shlex.join(["wheretolearn", "demo", "--folder", str(run.path.parent), "--seed", str(run.seed)])
        raise Stopped(f"stopped and saved; go on with `{command}`")


def _stop(workers: Mapping[str, "subprocess.Popen[str]"]) -> None:
    for worker in workers.values():
        worker.send_signal(signal.SIGTERM)


def is_finished(run: RunFolder) -> bool:
    return (run.path / "demo.json").exists()


def results(runs: Mapping[str, RunFolder]) -> list[MethodResult]:
    """What the page and the table show, read from finished runs."""
    found = []
    for method, run in runs.items():
        config, _, mask = load_trained(run)
        record = read_json(run.path / "demo.json")
        found.append(
            MethodResult(
                name=method,
                about=ABOUT[method],
                metrics=run.metrics(),
                accuracy={what: tuple(record["accuracy"][split]) for what, split in EVALUATED.items()},
                sparsity=mask.sparsity(),
                multipliers=mask.multipliers(),
                seconds=record["seconds"],
                config=to_dict(config),
                seed=run.seed,
            )
        )
    return found


def facts(runs: Mapping[str, RunFolder]) -> dict[str, str]:
    """How the numbers came about, for the page."""
    info = next(iter(runs.values())).info
    return {
        "hardware": environment.hardware(),
        "versions": ", ".join(f"{name} {version}" for name, version in info["versions"].items()),
        "commit": str(info["commit"]),
        "started": str(info["started"]),
        "command": "wheretolearn demo",
    }


def work(path: Path, test_tasks: int) -> None:
    """What one process does: train a run to its end and evaluate it."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with RunFolder.open(path) as run:
        train(run)
        evaluations: dict[str, Evaluation] = {
            split: evaluate_run(run, split, tasks=test_tasks) for split in EVALUATED.values()
        }
        write_json(
            run.path / "demo.json",
            {
                "accuracy": {split: [e.accuracy, e.half_width] for split, e in evaluations.items()},
                "seconds": run.metrics()[-1]["elapsed_seconds"],
            },
        )


def _stop_with_parent() -> None:
    """Ask this process to stop when the one that started it is gone, even if it was killed."""

    def wait() -> None:
        os.read(0, 1)  # returns at the end of standard input
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    _stop_with_parent()
    try:
        work(Path(sys.argv[1]), int(sys.argv[2]))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
