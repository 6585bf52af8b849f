"""Real handwriting: the quick presets of MAML and sparse-MAML on Omniglot, tested on alphabets they never saw."""

from pathlib import Path

import numpy as np
import pytest

from wheretolearn.config import from_dict, merge, to_dict
from wheretolearn.data import image_set
from wheretolearn.data.image_set import ImageSplit
from wheretolearn.data.readers import area_weights
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.fewshot.trained import Evaluation, evaluate_run
from wheretolearn.fewshot.training import train
from wheretolearn.presets import load_preset
from wheretolearn.runs.folder import RunFolder

NAME = "omniglot-by-alphabet"
SHORT = {"data": NAME, "outer_steps": 100, "tasks_per_step": 2, "validate_every": 50, "validation_tasks": 10}


@pytest.fixture(scope="module")
def omniglot(real_data: Path) -> str:
    """Omniglot at 28x28: six of the thirty background alphabets for validation, all evaluation alphabets to test."""
    packed = real_data / "packed" / "omniglot105.npz"
    if not packed.is_file():
        pytest.skip("no packed Omniglot drawings")
    with np.load(packed) as arrays:
        ink = np.unpackbits(arrays["packed"], axis=-1, count=105 * 105).reshape(-1, 20, 105, 105)
        alphabets, characters, subsets = arrays["alphabet"], arrays["character"], arrays["subset"]
    weights = area_weights(105, 28)
    held_out = sorted(set(alphabets[subsets == "background"]))[-6:]
    evaluation = subsets == "evaluation"
    validation = ~evaluation & np.isin(alphabets, held_out)
    splits = {}
    for split, members in {"train": ~evaluation & ~validation, "validation": validation, "test": evaluation}.items():
        images = np.concatenate([weights @ drawings.astype(np.float32) @ weights.T for drawings in ink[members]])
        splits[split] = ImageSplit(
            name=f"{NAME}/{split}",
            images=np.rint(images * 255).astype(np.uint8)[..., None],
            class_offsets=np.arange(0, len(images) + 1, 20),
            classes=tuple(f"{a}/{c}" for a, c in zip(alphabets[members], characters[members], strict=True)),
            groups=tuple(map(str, alphabets[members])),
        )
    return image_set.write(NAME, splits, {"source": "Omniglot"}).name


def measured(preset: str, folder: Path) -> tuple[Evaluation, float]:
    """Accuracy on the evaluation alphabets, and the sparsity of the mask."""
    config = from_dict(FewShotConfig, merge(load_preset(preset, scale="quick").settings, SHORT), where=preset)
    with RunFolder.create(folder, to_dict(config), 0, "fewshot") as run:
        train(run)
        return evaluate_run(run, "test", tasks=100), run.metrics()[-1]["sparsity"]


def test_sparse_maml_is_as_good_as_maml_on_new_alphabets(omniglot: str, tmp_path: Path) -> None:
    assert omniglot == NAME
    sparse, sparsity = measured("table1.sparse-maml.shot1", tmp_path / "sparse-maml")
    dense, open_share = measured("table1.fomaml.shot1", tmp_path / "maml")
    for result in (sparse, dense):
        assert result.half_width < 0.03
        assert result.accuracy > 0.7  # chance is 0.2
    assert sparse.accuracy > dense.accuracy - sparse.half_width - dense.half_width
    assert 0.2 < sparsity < 0.9
    assert open_share == 0
