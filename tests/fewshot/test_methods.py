"""Every method, at the quick scale cut shorter still, learns to learn: far above chance on classes it never saw."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from wheretolearn.config import from_dict, merge, to_dict
from wheretolearn.data.load import load_set
from wheretolearn.engine.choose import make_evaluator
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.fewshot.learner import new_learner
from wheretolearn.fewshot.tasks import TaskSource
from wheretolearn.fewshot.trained import evaluate_run, load_trained
from wheretolearn.fewshot.training import train
from wheretolearn.presets import list_presets, load_preset
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import confidence_interval

CHANCE = 0.2  # 5 classes
TASKS = 40

SHORT: dict[str, Any] = {
    "width": 16,
    "outer_steps": 50,
    "tasks_per_step": 2,
    "validate_every": 50,
    "validation_tasks": 5,
    "log_every": 25,
    "checkpoint_every": 50,
}
# A step of ResNet-12 takes a second, so it gets a few: enough to run every part, too few for most to learn.
QUICK_LEARNERS = ("table2.metaoptnet.shot1", "table2.sparse-maml.shot1")
SHORT_RESNET: dict[str, Any] = {
    "resnet_size": "small",
    "shots": 1,
    "queries": 2,
    "outer_steps": 4,
    "tasks_per_step": 1,
    "validate_every": 4,
    "validation_tasks": 1,
    "log_every": 1,
}


def methods(table: str) -> list[str]:
    """One preset for each method of a table: 1-shot where there is one."""
    names = sorted((p.name for p in list_presets() if p.name.startswith(f"{table}.")), reverse=True)
    return sorted({name.rpartition(".")[0]: name for name in names}.values())


def short_run(name: str, folder: Path, **settings: Any) -> tuple[RunFolder, FewShotConfig]:
    preset = load_preset(name, scale="quick")
    config = from_dict(FewShotConfig, merge(preset.settings, settings), where=name)
    run = RunFolder.create(folder, to_dict(config), 0, preset.protocol)
    train(run)
    return run, config


@pytest.mark.parametrize("name", methods("table1"))
def test_a_conv4_method_learns_from_its_quick_preset(name: str, tmp_path: Path) -> None:
    run, config = short_run(name, tmp_path / "run", **SHORT)
    with run:
        result = evaluate_run(run, "characters", tasks=TASKS)
        assert result.half_width < 0.07
        assert result.accuracy - result.half_width > CHANCE + 0.15
        gains = [after - before for after, before in zip(result.task_accuracies, untrained(config), strict=True)]
        gain, half_width = confidence_interval(gains)
        assert gain - half_width > 0, (result.accuracy, gain, half_width)
        check_sparsity(run, config)


@pytest.mark.parametrize("name", methods("table2"))
def test_a_resnet_method_runs_its_quick_preset(name: str, tmp_path: Path) -> None:
    run, config = short_run(name, tmp_path / "run", **SHORT_RESNET)
    with run:
        assert all(math.isfinite(record["loss"]) for record in run.metrics())
        _, model, _ = load_trained(run)
        start = config.build_model(28, 1, seed=0).state_dict()
        moved = [n for n, p in model.named_parameters() if not torch.equal(p, start[n])]
        assert len(moved) > 20
        result = evaluate_run(run, "characters", tasks=10 if name in QUICK_LEARNERS else 2)
        assert result.accuracy - result.half_width > CHANCE or name not in QUICK_LEARNERS, result.sentence()
        check_sparsity(run, config)


def untrained(config: FewShotConfig) -> list[float]:
    """Accuracies on the same tasks of the network as it starts: even random features tell some characters apart."""
    split = load_set(config.data).splits["characters"]
    learner = new_learner(config, split.images.shape[1:], seed=0)
    evaluator = make_evaluator(learner.model, learner.mask, config.inner)
    tasks = TaskSource(split, config.episode, 0, "test").tasks(0, TASKS)
    accuracies: list[float] = evaluator.accuracies(tasks, config.test_inner_steps).tolist()
    return accuracies


def check_sparsity(run: RunFolder, config: FewShotConfig) -> None:
    """Masks that can close weights have some closed and some open; what is fixed stays as it was."""
    sparsity = run.metrics()[-1]["sparsity"]
    by_layer = run.metrics()[-1]["sparsity_by_layer"]
    if config.head == "ridge":
        assert sparsity == 1  # nothing is left to gradient steps
    elif config.mask in ("binary", "generated", "relu", "rows"):
        assert 0 < sparsity < 1
    elif config.adapt == "head":
        assert by_layer["head"] == 0 < sparsity < 1
    elif config.adapt == "body":
        assert by_layer["head"] == 1 > sparsity > 0
    else:
        assert 0 <= sparsity < 1
