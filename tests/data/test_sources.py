import errno
import gzip
import os
import re
import zipfile
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from wheretolearn.data import image_set, install
from wheretolearn.data.archives import Workspace
from wheretolearn.data.sources import SOURCES, cars_split, cars_test_classes, cub_split, find
from wheretolearn.errors import DataError

MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_source_can_be_fetched_or_says_how_to_obtain_it(source):
    assert bool(source.files) != bool(source.obtain)
    assert source.licence
    assert source.layout
    for file in source.files:
        assert file.size
        assert re.fullmatch("[0-9a-f]{64}", file.sha256 or "")
        assert all(re.match("https?://.*/" + re.escape(file.name) + "$", url) for url in file.urls)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_split_classes_add_up(source):
    classes = list(source.split_classes.values())
    assert sum(classes) == source.classes or set(classes) == {source.classes}


def test_an_unknown_name_gets_the_nearest_known_one():
    with pytest.raises(DataError, match="did you mean mini-imagenet"):
        find("miniimagenet")


def test_cub_rule_gives_100_50_50_classes():
    splits = Counter(cub_split(f"{number:03d}.Bird") for number in range(1, 201))
    assert splits == {"train": 100, "validation": 50, "test": 50}
    assert [cub_split(f"{number:03d}.x") for number in (1, 2, 3, 4)] == [
        "train",
        "validation",
        "train",
        "test",
    ]


def test_cars_has_49_test_classes():
    assert len(cars_test_classes()) == 49
    assert cars_split("Acura TL Type-S 2008") == "test"
    assert cars_split("AM General Hummer SUV 2000") == "train"


def test_cars_test_classes_are_known_in_other_spellings():
    assert cars_split("acura_tl_type-s_2008") == "test"
    assert cars_split("acura_tl_type-s_2009") == "train"


@pytest.mark.parametrize("names", [("a", "b"), tuple(f"Car {number}" for number in range(148))])
def test_cars_whose_test_classes_cannot_be_told_are_refused(tmp_path, names):
    test = sorted(cars_test_classes())[:20] if len(names) > 2 else []
    for name in (*names, *test):
        (tmp_path / "cars" / name.replace("/", "-")).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "cars" / name.replace("/", "-") / "1.png")
    with pytest.raises(DataError, match=rf"only {len(test)} of the 49 test classes of Cars"):
        install.add("cars", tmp_path / "cars", root=tmp_path / "cache")


def write_cars(folder):
    for name, shade in (("Acura TL Type-S 2008", 30), ("AM General Hummer SUV 2000", 200)):
        (folder / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (40, 20), (shade, 0, 0)).save(folder / name / f"{number}.png")


def test_a_subset_says_how_much_of_the_set_it_is(tmp_path):
    write_cars(tmp_path / "cars")
    added = install.add("cars", tmp_path / "cars", root=tmp_path / "cache")
    assert added.info["complete"] is False
    assert added.info["classes"] == "train 1 of 147; test 1 of 49"
    assert added.info["images"] == "4 of 16185"
    assert added.splits["test"].images[0, 0, 0].tolist() == [30, 0, 0]
    assert "all others `train`" in added.info["note"]


def test_a_set_of_ones_own_has_the_size_and_channels_asked_for(tmp_path):
    write_cars(tmp_path / "mine")
    added = install.add("mine", tmp_path / "mine", root=tmp_path / "cache", size=12, channels=1)
    assert added.splits["all"].images.shape == (4, 12, 12, 1)


def test_a_known_set_has_one_size_only(tmp_path):
    with pytest.raises(DataError, match="cars is always 84 x 84 x 3"):
        install.add("cars", tmp_path / "cars", root=tmp_path / "cache", size=32)


def test_a_known_name_with_a_strange_layout_is_told_the_expected_one(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"(?s)does not hold.*omniglot expects a folder with images_background"):
        install.add("omniglot", tmp_path / "empty", root=tmp_path / "cache")


def test_adding_a_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match="neither a folder nor an archive"):
        install.add("mine", tmp_path / "notes.txt", root=tmp_path / "cache")


def test_a_corrupt_image_leaves_no_trace_of_the_set(tmp_path):
    write_cars(tmp_path / "mine")
    (tmp_path / "mine" / "Acura TL Type-S 2008" / "1.png").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"1\.png"):
        install.add("mine", tmp_path / "mine", root=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_embedded_name_is_reserved(tmp_path):
    with pytest.raises(DataError, match="embedded set"):
        install.add("glyphs", tmp_path, root=tmp_path)


def test_an_image_in_an_archive_is_named_by_archive_and_member(tmp_path):
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
        archive.writestr("ant/1.png", b"junk")
    with pytest.raises(DataError, match=r"cannot read the image .*mine\.zip:ant/1\.png: "):
        install.add("mine", tmp_path / "mine.zip", root=tmp_path / "cache")


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    write_cars(tmp_path / "mine")

    def refuse(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"^cannot read .*mine.*: Permission denied$"):
        install.add("mine", tmp_path / "mine", root=tmp_path / "cache")


@pytest.mark.parametrize("name", ["mini-imagenet", "tiered-imagenet", "cars"])
def test_get_explains_in_two_lines_how_to_obtain_what_cannot_be_downloaded(tmp_path, name):
    with pytest.raises(DataError, match=f"(?s)cannot be downloaded freely.*data add {name} FOLDER") as caught:
        install.get(name, root=tmp_path)
    assert len(str(caught.value).splitlines()) == 2


def test_get_downloads_converts_and_cleans_up(tmp_path, monkeypatch):
    images = bytes((0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 28, 0, 0, 0, 28)) + bytes(2 * 784)
    labels = bytes((0, 0, 8, 1, 0, 0, 0, 2, 7, 3))
    files = SOURCES["mnist"].files
    contents = {file.name: gzip.compress(images if "images" in file.name else labels) for file in files}
    calls = []

    def pretend(file, folder, progress):
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / file.name
        target.write_bytes(contents[file.name])
        progress(target.stat().st_size, target.stat().st_size)
        return target

    monkeypatch.setattr(install, "download", pretend)
    got = install.get("mnist", root=tmp_path, downloading=lambda *report: calls.append(report))
    assert got.splits["train"].classes == ("3", "7")
    assert [done for done, _ in calls] == np.cumsum([len(contents[f.name]) for f in SOURCES["mnist"].files]).tolist()
    assert calls[0][1] == sum(file.size for file in files)
    assert sorted(entry.name for entry in (tmp_path / "_downloads").iterdir()) == []


def test_real_mnist_has_its_published_class_counts(real_data, tmp_path):
    added = install.add("mnist", real_data / "mnist", root=tmp_path)
    assert added.info["complete"] is True
    assert added.splits["train"].images.shape == (60_000, 28, 28, 1)
    assert added.splits["train"].counts.tolist() == MNIST_TRAIN
    assert added.splits["test"].counts.tolist() == MNIST_TEST
    # Ink is bright: the border of a digit is empty.
    assert added.splits["train"].images[:, 0].max() < 255
    assert added.splits["train"].images.max() == 255
    image_set.check("mnist", tmp_path)


def test_real_cub_lays_out_by_its_class_numbers(real_data, tmp_path):
    packed = real_data / "packed" / "cub_test84.npz"
    if not packed.is_file():
        pytest.skip("no packed CUB images")
    with np.load(packed) as arrays:
        blob, offsets, labels = arrays["data"].tobytes(), arrays["offsets"], arrays["labels"]
        classes, names = arrays["classes"], arrays["filenames"]
    wanted = [index for index, label in enumerate(labels) if label < 5]
    for index in wanted:
        folder = tmp_path / "cub" / "CUB_200_2011" / "images" / str(classes[labels[index]])
        folder.mkdir(parents=True, exist_ok=True)
        name = str(names[index]).rpartition("/")[2]
        (folder / name).write_bytes(blob[offsets[index] : offsets[index + 1]])
    with Workspace(tmp_path) as workspace:
        splits = SOURCES["cub"].read(tmp_path / "cub", workspace)
        assert list(splits) == ["test"]
        assert splits["test"].classes == tuple(sorted(map(str, classes[:5])))
        images = np.concatenate(list(splits["test"].batches))
    assert images.shape == (len(wanted), 84, 84, 3)
    assert 40 < images.mean() < 200
