"""The paper's stream on real images, for a few steps; skipped where an image set is absent."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from wheretolearn.config import from_dict, merge, to_dict
from wheretolearn.data import image_set, install
from wheretolearn.data.image_set import ImageSplit
from wheretolearn.data.readers import area_weights
from wheretolearn.online.config import OnlineConfig
from wheretolearn.online.problem import Problem, SourceImages
from wheretolearn.online.training import result, train
from wheretolearn.presets import load_preset
from wheretolearn.runs.folder import RunFolder

FASHION = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist
SHORT = {"steps": 30, "p": 0.7, "width": 8, "inner_steps": 2, "log_every": 30}


@pytest.fixture(scope="module")
def omniglot_and_mnist(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In a data folder of their own: other tests rely on their absence."""
    packed = real_data / "packed" / "omniglot105.npz"
    if not packed.is_file() or not (real_data / "mnist").is_dir():
        pytest.skip("no packed Omniglot drawings, or no MNIST")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHERETOLEARN_DATA", str(tmp_path_factory.mktemp("data")))
        image_set.write("omniglot", omniglot(packed), {"source": "Omniglot"})
        install.add("mnist", real_data / "mnist")
        yield


def omniglot(packed: Path) -> dict[str, ImageSplit]:
    """The background set and the first characters of the evaluation set, at 28x28."""
    with np.load(packed) as arrays:
        ink = np.unpackbits(arrays["packed"], axis=-1, count=105 * 105).reshape(-1, 20, 105, 105)
        alphabets, characters, subsets = arrays["alphabet"], arrays["character"], arrays["subset"]
    weights = area_weights(105, 28)
    splits = {}
    for split, count in (("background", 964), ("evaluation", 50)):
        members = np.flatnonzero(subsets == split)[:count]
        images = np.concatenate([weights @ drawings.astype(np.float32) @ weights.T for drawings in ink[members]])
        splits[split] = ImageSplit(
            name=f"omniglot/{split}",
            images=np.rint(images * 255).astype(np.uint8)[..., None],
            class_offsets=np.arange(0, len(images) + 1, 20),
            classes=tuple(f"{a}/{c}" for a, c in zip(alphabets[members], characters[members], strict=True)),
            groups=tuple(map(str, alphabets[members])),
        )
    return splits


def config_of(preset: str, **changes: object) -> OnlineConfig:
    return from_dict(OnlineConfig, merge(load_preset(preset).settings, {**SHORT, **changes}), where=preset)


def check(config: OnlineConfig, folder: Path) -> None:
    """All sources in one scale; a run over a few tasks, better than chance."""
    images = SourceImages(config.sources)
    assert images.shape == (28, 28, 1)
    assert len(images.splits[0].classes) == 1000
    assert [len(split.classes) for split in images.splits[1:]] == [10] * (len(images.splits) - 1)
    assert [len(split.images) for split in images.splits[1:]] == [60_000] * (len(images.splits) - 1)
    problem = Problem(config, 1, images)
    for source in range(len(config.sources)):
        step = int((problem.source == source).nonzero()[0])
        inputs = problem.batch(step).inputs
        assert inputs.min() == 0
        assert 0.9 < inputs.max() <= 1
        assert 0.02 < inputs.mean() < 0.5  # more paper than ink
    with RunFolder.create(folder, to_dict(config), 1, "online") as run:
        train(run)
        found = result(run)
    assert found["accuracy_by_source"].keys() == {source.label for source in config.sources}
    assert found["accuracy"] > 0.12


def test_omniglot_and_mnist(omniglot_and_mnist: None, tmp_path: Path) -> None:
    sources = [{"data": "omniglot", "classes": 1000, "probability": 0.5}, {"data": "mnist", "probability": 0.5}]
    check(config_of("table6.sparse-c-maml.p98", sources=sources), tmp_path / "run")


def test_the_stream_of_the_paper(omniglot_and_mnist: None, real_data: Path, tmp_path: Path) -> None:
    found = next((folder for folder in (real_data / "fashion-mnist", FASHION) if folder.is_dir()), None)
    if found is None:
        pytest.skip("no FashionMNIST: install Debian's package dataset-fashion-mnist")
    install.add("fashion-mnist", found)
    check(config_of("table6.sparse-c-maml.p98"), tmp_path / "run")
