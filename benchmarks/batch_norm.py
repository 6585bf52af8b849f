"""What the three batch-norm modes cost: accuracy, and time per task, on the built-in glyphs.

    python benchmarks/batch_norm.py --out results/benchmarks/batch-norm-cpu.json
    python benchmarks/batch_norm.py --only times --out results/benchmarks/batch-norm-cpu.json    # the rest stays

For each mode and seed the preset is trained at quick scale with that mode, and measured on tasks of held-out classes:
with all queries of a task in one pass, with those of one class at a time, and one by one. What a mode takes from the
other queries is what is lost between the first and the last. Times are processor time of one thread, the median over
repeats with the modes in turn: waiting for a busy machine does not count.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from wheretolearn.batch_norm import BatchNormMode
from wheretolearn.config import from_dict, to_dict
from wheretolearn.cpu import keep_freed_memory
from wheretolearn.data.load import load_set
from wheretolearn.engine.task import Task
from wheretolearn.errors import NonFiniteError
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.fewshot.learner import new_learner
from wheretolearn.fewshot.tasks import TaskSource, split_of
from wheretolearn.fewshot.trained import load_trained
from wheretolearn.fewshot.training import train
from wheretolearn.inner_loop import Adapted, accumulate, adapt
from wheretolearn.presets import load_preset
from wheretolearn.runs import environment
from wheretolearn.runs.folder import RunFolder
from wheretolearn.storage import read_json, to_json, write_json

MODES: tuple[BatchNormMode, ...] = get_args(BatchNormMode)
PRESET = "table1.sparse-maml.shot5"
SPLIT = "characters"


def config_of(mode: BatchNormMode, steps: int | None) -> FewShotConfig:
    settings = load_preset(PRESET, scale="quick").settings | {"batch_norm": mode}
    return from_dict(FewShotConfig, settings | ({} if steps is None else {"outer_steps": steps}), where=PRESET)


def test_tasks(config: FewShotConfig, seed: int, count: int) -> Iterator[Task]:
    return TaskSource(split_of(load_set(config.data), SPLIT), config.episode, seed, "test").tasks(0, count)


def groupings(labels: Tensor) -> dict[str, list[Tensor]]:
    """Which queries are shown to the network in one pass."""
    everything = torch.arange(len(labels))
    return {
        "together": [everything],
        "by_class": [everything[labels == label] for label in labels.unique()],
        "one_by_one": list(everything.split(1)),
    }


def correct(adapted: Adapted, task: Task, parts: Sequence[Tensor]) -> float:
    right = 0
    for part in parts:
        predicted = adapted.evaluate(lambda network, part=part: network(task.query_inputs[part])).argmax(1)
        right += int((predicted == task.query_labels[part]).sum())
    return 100 * right / len(task.query_labels)


def inner(config: FewShotConfig, steps: int) -> dict[str, object]:
    return {"steps": steps, "inner_lr": config.inner_lr, "batch_norm_mode": config.batch_norm}


def measure(run: RunFolder, tasks: int) -> dict[str, float]:
    """Accuracy in % by grouping of the queries, and the share of closed weights."""
    config, model, mask = load_trained(run)
    accuracies: dict[str, list[float]] = {}
    for task in test_tasks(config, run.seed, tasks):
        adapted = adapt(model, mask, task.support_loss, **inner(config, config.test_inner_steps))
        for name, parts in groupings(task.query_labels).items():
            accuracies.setdefault(name, []).append(correct(adapted, task, parts))
    return {name: statistics.fmean(values) for name, values in accuracies.items()} | {
        "sparsity": 100 * mask.sparsity().overall
    }


def timed(config: FewShotConfig) -> dict[str, Callable[[], object]]:
    """One task in training (inner loop and meta-gradient) and in use (inner loop and predictions)."""
    shape = split_of(load_set(config.data), config.train_split).images.shape[1:]
    learner = new_learner(config, shape, 0, "cpu")
    model, mask = learner.model, learner.mask
    task = next(test_tasks(config, 0, 1))

    def training() -> None:
        accumulate(adapt(model, mask, task.support_loss, **inner(config, config.inner_steps)), task.query_loss)

    def use() -> None:
        adapted = adapt(model, mask, task.support_loss, **inner(config, config.test_inner_steps))
        adapted.evaluate(task.query_probabilities)

    return {"training": training, "use": use}


def times(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Microseconds per task."""
    work = {mode: timed(config_of(mode, given.outer_steps)) for mode in MODES}
    took: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in work[mode]} for mode in MODES}
    for repeat in range(given.repeats + 5):
        for mode, calls in work.items():
            for name, call in calls.items():
                started = time.process_time()
                call()
                if repeat >= 5:  # the first ones warm up
                    took[mode][name].append(1e6 * (time.process_time() - started))
    return {mode: {name: statistics.median(own) for name, own in calls.items()} for mode, calls in took.items()}


def accuracy(given: argparse.Namespace) -> dict[str, dict[str, object]]:
    """In %, by grouping of the queries, and the share of closed weights; over seeds that did not diverge."""
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    diverged: dict[str, list[int]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            for mode in MODES:
                config = to_dict(config_of(mode, given.outer_steps))
                with RunFolder.create(Path(folder) / f"{mode}-{seed}", config, seed, "fewshot", PRESET, "quick") as run:
                    try:
                        train(run)
                    except NonFiniteError as error:
                        print(f"{mode}, seed {seed}: {error}")
                        diverged[mode].append(seed)
                        continue
                    found[mode].append(measure(run, given.tasks))
    return {
        mode: {"diverged_seeds": diverged[mode]}
        | ({name: spread([own[name] for own in runs]) for name in runs[0]} if runs else {})
        for mode, runs in found.items()
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=100, help="test tasks of each run")
    parser.add_argument("--repeats", type=int, default=100, help="of the timings")
    parser.add_argument("--outer-steps", type=int, help="default: those of the preset")
    parser.add_argument("--only", choices=("accuracy", "times"), help="measure this part, and keep the other of --out")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    config = config_of("batch", given.outer_steps)
    report = read_json(given.out) if given.only and given.out is not None else {}
    report |= {
        "preset": f"{PRESET} at quick scale, with each mode as batch_norm",
        "split": f"{config.data}/{SPLIT}",
        "inner_steps": {"training": config.inner_steps, "use": config.test_inner_steps},
        "config": to_dict(config),
        "threads": 1,
        "hardware": environment.hardware(),
        "versions": environment.versions(),
        "commit": environment.git_commit(),
    }
    if given.only != "times":
        report |= {"accuracy": accuracy(given), "seeds": list(range(given.seeds)), "tasks": given.tasks}
    if given.only != "accuracy":
        report |= {"microseconds_per_task": times(given), "repeats": given.repeats}
    print(to_json(report, indent=2))
    if given.out is not None:
        write_json(given.out, report)


if __name__ == "__main__":
    main()
