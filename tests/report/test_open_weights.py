"""Masks of runs: what is drawn is what the run learned."""

import math
from pathlib import Path

import numpy as np
import pytest

from wheretolearn.report.open_weights import mask_map, open_weights, overlap, seed_overlap
from wheretolearn.runs.folder import RunFolder


@pytest.mark.parametrize("name", ["continual-sparse-la-maml-seed0", "online-sparse-c-maml-seed1"])
def test_open_weights_are_as_sparse_as_the_run_says(runs_folder: Path, name: str) -> None:
    run = RunFolder.open(runs_folder / name)
    found = open_weights(run)
    assert found is not None
    recorded = run.metrics()[-1]["sparsity_by_tensor"]
    assert {tensor: 1 - part.mean() for tensor, part in found.items()} == pytest.approx(recorded, abs=1e-6)
    assert any(0 < share < 1 for share in recorded.values())


def test_a_finished_few_shot_run_shows_its_best_mask(runs_folder: Path) -> None:
    run = RunFolder.open(runs_folder / "fewshot-binary-seed0")
    found = open_weights(run)
    assert found is not None
    closed = sum(int((~part).sum()) for part in found.values()) / sum(part.size for part in found.values())
    validated = [record["sparsity"] for record in run.metrics() if "validation_accuracy" in record]
    assert any(closed == pytest.approx(share) for share in validated)


def test_a_run_that_was_cut_short_shows_its_last_checkpoint(runs_folder: Path) -> None:
    run = RunFolder.open(runs_folder / "fewshot-cut-seed0")
    found = open_weights(run)
    assert found is not None
    closed = sum(int((~part).sum()) for part in found.values()) / sum(part.size for part in found.values())
    (at_checkpoint,) = (record["sparsity"] for record in run.metrics() if record["step"] == 2)
    assert closed == pytest.approx(at_checkpoint)


@pytest.mark.parametrize("name", ["fewshot-fixed-seed0", "continual-sgd-seed0", "online-online-adam-seed0"])
def test_what_learns_no_mask_has_none(runs_folder: Path, name: str) -> None:
    assert open_weights(RunFolder.open(runs_folder / name)) is None


def test_overlap_counts_shared_open_weights_and_knows_chance() -> None:
    first, second = np.array([1, 1, 1, 0], bool), np.array([1, 0, 1, 0], bool)
    found = overlap(first, second)
    assert found.shared == pytest.approx(2 / 3)
    assert found.agreement == pytest.approx(3 / 4)
    assert found.chance == pytest.approx((3 / 8) / (3 / 4 + 1 / 2 - 3 / 8))


def test_random_masks_overlap_by_chance_and_equal_ones_entirely() -> None:
    generator = np.random.default_rng(0)
    first, second = (generator.random(200_000) < share for share in (0.3, 0.6))
    by_chance = overlap(first, second)
    assert by_chance.shared == pytest.approx(by_chance.chance, abs=0.005)
    assert overlap(first, first).shared == 1
    nothing = np.zeros(4, bool)
    assert math.isnan(overlap(nothing, nothing).shared)


def test_the_map_and_the_overlap_hold_their_data() -> None:
    masks = {
        seed: {"conv.weight": np.arange(24).reshape(2, 3, 2, 2) % (seed + 2) == 0, "conv.bias": np.array([True, False])}
        for seed in (3, 5)
    }
    drawn = mask_map(masks[3], "", "", 3)
    assert drawn is not None
    rows = [dict(zip(drawn.columns, row, strict=True)) for row in drawn.rows]
    assert [row["open_by_input"] for row in rows if row["tensor"] == "conv.bias"] == ["1", "0"]
    assert sum(row["open"] for row in rows if row["tensor"] == "conv.weight") == masks[3]["conv.weight"].sum()
    both = seed_overlap(masks, "", "")
    assert both is not None
    assert [(row[0], row[1], row[2]) for row in both.rows] == [("conv.weight", 3, 5), ("conv.bias", 3, 5)]
    assert both.rows[1][3] == 1.0
    assert seed_overlap({3: masks[3]}, "", "") is None
