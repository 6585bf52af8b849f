"""The presets of continual learning: settings of the paper, and small versions that run anywhere."""

from functools import cache

import pytest

from wheretolearn.config import from_dict
from wheretolearn.continual.config import ContinualConfig
from wheretolearn.continual.records import measures
from wheretolearn.continual.training import train_together
from wheretolearn.presets import list_presets, load_preset
from wheretolearn.runs.folder import RunFolder

PROBLEMS = ("rotations", "permutations", "many")


@cache
def configs(scale):
    return {
        preset.name: from_dict(ContinualConfig, preset.settings, where=preset.name)
        for preset in list_presets(scale=scale)
        if preset.protocol == "continual"
    }


def test_every_method_has_a_preset_for_every_problem():
    methods = ("sgd", "er", "mer", "gem", "la-maml", "sparse-la-maml", "sparse-relu-la-maml")
    cells = {f"table5.{method}.{problem}": method for method in methods for problem in PROBLEMS}
    cells |= {
        f"tableS7.{method}.memory{size}": method
        for method in ("er", "mer", "gem", "la-maml", "sparse-la-maml")
        for size in (200, 1000)
    }
    found = {
        name: config.learner for name, config in configs("paper").items() if name.startswith(("table5", "tableS7"))
    }
    assert found == cells


@pytest.mark.parametrize(
    ("method", "problem", "alpha", "gamma", "glances"),
    [
        ("la-maml", "rotations", 0.15, 0.3, 5),
        ("la-maml", "permutations", 0.15, 0.3, 5),
        ("la-maml", "many", 0.1, 0.1, 10),
        ("sparse-la-maml", "rotations", 0.15, 1.7, 5),
        ("sparse-la-maml", "permutations", 0.1, 1.7, 10),
        ("sparse-la-maml", "many", 0.05, 0.75, 10),
    ],
)
def test_la_maml_has_the_settings_of_the_papers_scan(method, problem, alpha, gamma, glances):
    config = configs("paper")[f"table5.{method}.{problem}"]
    assert (config.lr, config.mask_lr, config.glances) == (alpha, gamma, glances)
    assert (config.meta_loss, config.clip_norm, config.straight_through_scale) == ("every-step", 2.0, 0.5)


@pytest.mark.parametrize("method", ["sgd", "er", "mer", "gem", "la-maml", "sparse-la-maml", "sparse-relu-la-maml"])
def test_all_methods_face_the_same_problems(method):
    for problem, tasks, examples, memory in zip(
        PROBLEMS, (20, 20, 100), (1000, 1000, 200), (200, 200, 500), strict=True
    ):
        config = configs("paper")[f"table5.{method}.{problem}"]
        assert (config.data, config.tasks, config.examples, config.memory) == ("mnist", tasks, examples, memory)
        assert config.problem == ("rotations" if problem == "rotations" else "permutations")
        assert (config.width, config.epochs) == (100, 1)
        if method in ("er", "la-maml", "sparse-la-maml", "sparse-relu-la-maml"):
            assert (config.batch, config.replay_batch) == (10, 10)


@pytest.mark.parametrize(
    ("problem", "sgd", "gem", "mer"),
    [
        ("rotations", 0.0003, (0.01, 0.0), (0.1, 0.01, 5, 11)),
        ("permutations", 0.003, (0.01, 0.0), (0.03, 0.03, 10, 11)),
        ("many", 0.003, (0.003, 0.1), (0.03, 0.03, 10, 6)),
    ],
)
def test_sgd_gem_and_mer_have_the_settings_of_mers_code(problem, sgd, gem, mer):
    found = {method: configs("paper")[f"table5.{method}.{problem}"] for method in ("sgd", "gem", "mer")}
    assert (found["sgd"].lr, found["sgd"].batch) == (sgd, 1)
    assert (found["gem"].lr, found["gem"].memory_strength, found["gem"].batch) == (*gem, 1)
    own = found["mer"]
    assert (own.lr, own.mer_beta, own.mer_steps, own.replay_batch) == mer
    assert own.mer_gamma == 1.0
    assert {config.glances for config in found.values()} == {1}


def test_split_cifar_has_the_settings_that_the_paper_lists():
    shared = {(c.data, c.problem, c.model, c.width) for n, c in configs("paper").items() if n.startswith("tableS7")}
    assert shared == {("cifar10", "split", "cifar_net", 160)}

    def settings(method, *names):
        return [[getattr(configs("paper")[f"tableS7.{method}.memory{m}"], name) for name in names] for m in (200, 1000)]

    for method in ("la-maml", "sparse-la-maml"):
        assert settings(method, "lr", "mask_lr", "batch", "replay_batch", "glances", "memory") == [
            [0.005, 0.1, 10, 10, 2, 200],
            [0.01, 0.01, 10, 10, 2, 1000],
        ]
    assert settings("er", "lr", "glances", "replay_batch", "batch") == [[0.001, 2, 20, 10], [0.01, 4, 10, 10]]
    assert settings("gem", "batch", "glances", "memory_strength", "memory") == [[20, 2, 0.5, 200], [5, 2, 0.5, 1000]]
    assert settings("mer", "mer_beta", "mer_gamma", "batch", "replay_batch") == [
        [0.1, 0.05, 10, 11],  # with the incoming example
        [0.1, 0.08, 10, 11],
    ]


@pytest.mark.parametrize("scale", ["paper", "quick"])
def test_tables_and_figures_of_one_training_share_its_settings(scale):
    found = configs(scale)
    for method in ("la-maml", "sparse-la-maml"):
        for problem in PROBLEMS:
            training = found[f"table5.{method}.{problem}"]
            figure = f"figure3.{method}" if problem == "rotations" else f"figureS3.{problem}.{method}"
            assert found[f"tableS5.{method}.{problem}"] == found[figure] == training
    if scale == "paper":
        assert found["figure3.width.100"] == found["table5.sparse-la-maml.rotations"]
        assert found["figureS4.alpha.0.1"] == found["table5.sparse-la-maml.permutations"]
        assert found["figure4.la-maml"].epochs == 10


def test_presets_measure_what_their_table_shows():
    for preset in list_presets():
        if preset.protocol == "continual":
            assert preset.measure == ("RA" if preset.name.startswith(("table5", "tableS7")) else "sparsity"), (
                preset.name
            )
    assert "not in the paper" in load_preset("table5.er.many").about


def test_quick_presets_need_no_download_and_little_time():
    for name, config in configs("quick").items():
        assert (config.data, config.classes) == ("glyphs", 10), name
        if config.problem != "split":
            batches = config.tasks * config.epochs * (config.examples // config.batch)
            assert batches * config.glances <= 1000, name
            assert config.width * config.glances <= 1000, name


@pytest.mark.xdist_group("glyphs")
@pytest.mark.parametrize("name", ["table5.la-maml.rotations", "table5.gem.permutations", "tableS7.er.memory200"])
def test_a_quick_preset_learns(name, tmp_path):
    """Better than guessing among the ten glyphs, all tasks considered."""
    settings = {**load_preset(name, scale="quick").settings, "log_every": 1000, "checkpoint_every": 1000}
    if name.startswith("table5"):
        settings["tasks"] = 2
    with RunFolder.create(tmp_path / "run", settings, 0, "continual", name, "quick") as run:
        train_together([run])
        assert measures(run)["RA"] > 20
