"""The demo: sparse-MAML against MAML on characters, trained side by side, and a page that compares them.

Each method trains in a process of its own with its share of the cores: networks this small gain nothing from more
threads. The processes write to run folders, so the demo is stopped, killed and resumed like any other run.
"""

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wheretolearn.config import from_dict, to_dict
from wheretolearn.errors import Stopped, UserError
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.fewshot.trained import Evaluation, evaluate_run, load_trained
from wheretolearn.fewshot.training import train
from wheretolearn.fewshot.worker import threads_each
from wheretolearn.presets import load_preset
from wheretolearn.report.comparison import MethodResult
from wheretolearn.runs import environment
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.workers import Teller, run_workers
from wheretolearn.runs.workers import work as work_for_parent
from wheretolearn.storage import read_json, write_json

METHODS = {"sparse-MAML": "demo.sparse-maml", "MAML": "demo.maml"}
ABOUT = {
    "sparse-MAML": "learns which weights the inner loop may change",
    "MAML": "changes every weight in the inner loop",
}
EVALUATED = {"held-out characters": "characters", "held-out scripts": "scripts"}
TEST_TASKS = 300

Update = Callable[[str, int, Mapping[str, Any]], None]  # (method, outer step, latest values)


def open_runs(folder: Path, seed: int = 0, settings: Mapping[str, Any] | None = None) -> dict[str, RunFolder]:
    """The run of each method, made where it is not there yet."""
    runs = {}
    threads = threads_each(len(METHODS))
    for method in METHODS:
        path, config = _path(folder, method), _config(method, settings)
        if (path / "run.json").exists():
            run = RunFolder.open(path)
        else:
            run = RunFolder.create(path, to_dict(config), seed, "fewshot", METHODS[method], "paper", threads=threads)
        if not _has(run, config):
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
        if not (path / "run.json").exists() or not _has(RunFolder.open(path), _config(method, settings)):
            raise UserError(f"{path} is not a run of this demo and is not deleted: choose another folder, or remove it")
        earlier.append(path)
    for path in earlier:
        with RunFolder.open(path) as run:
            run.lock()  # refuses while another demo is training there
            shutil.rmtree(path)


def _path(folder: Path, method: str) -> Path:
    return folder / METHODS[method].partition(".")[2]


def _config(method: str, settings: Mapping[str, Any] | None) -> FewShotConfig:
    preset = METHODS[method]
    return from_dict(FewShotConfig, {**load_preset(preset).settings, **(settings or {})}, where=preset)


def _has(run: RunFolder, config: FewShotConfig) -> bool:
    """Whether a run has these settings; one of an early version lacks some, which have their defaults."""
    return from_dict(FewShotConfig, run.config, where=str(run.path)) == config


def train_side_by_side(
    runs: Mapping[str, RunFolder],
    update: Update,
    test_tasks: int = TEST_TASKS,
    on_stop: Callable[[], None] | None = None,
) -> None:
    """Train and evaluate every run in its own process, following their metrics; resumes what is half done.

    ``on_stop`` is called when a signal asks to stop, before the processes have ended.
    """
    waiting = {method: run for method, run in runs.items() if not is_finished(run)}

    def show(method: str, step: int, values: Mapping[str, Any]) -> None:
        done = step == runs[method].config["outer_steps"]
        update(method, step, {**values, "stage": "testing"} if done else values)

    outcome = run_workers(
        {method: ["wheretolearn.demo", str(run.path), str(test_tasks)] for method, run in waiting.items()},
        at_once=max(1, len(waiting)),
        threads={method: run.threads or threads_each(len(runs)) for method, run in waiting.items()},
        update=show,
        on_stop=on_stop,
        stop_on_failure=True,
    )
    for method, error in outcome.failed.items():
        raise type(error)(f"training {method} failed: {error}")
    if outcome.stopped:
        run = next(iter(runs.values()))
        command = shlex.join(["wheretolearn", "demo", "--folder", str(run.path.parent), "--seed", str(run.seed)])
        raise Stopped(f"stopped and saved; go on with `{command}`")


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


def work(path: Path, test_tasks: int, teller: Teller) -> None:
    """What one process does: train a run to its end and evaluate it."""
    asked_to_stop: list[bool] = []
    with RunFolder.open(path) as run:
        train(run, teller.tell_step, on_stop=lambda: asked_to_stop.append(True), at_once=len(METHODS))
        if asked_to_stop:  # with the last step: training ends by itself, but testing would go on
            raise Stopped("stopped before testing")
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


if __name__ == "__main__":
    work_for_parent(lambda teller: work(Path(sys.argv[1]), int(sys.argv[2]), teller))
