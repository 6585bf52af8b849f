import errno
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from wheretolearn.data import image_set
from wheretolearn.data.image_set import ImageSplit, SplitStream, check, data_root, load, write
from wheretolearn.errors import DataError


def make_split(seed: int = 0, counts: tuple[int, ...] = (3, 1, 4)) -> ImageSplit:
    images = np.random.default_rng(seed).integers(0, 256, (sum(counts), 5, 6, 3), dtype=np.uint8)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    names = tuple(f"class {index}" for index in range(len(counts)))
    return ImageSplit("made/train", images, offsets, names, ("a",) * len(counts))


def make_stream(batches) -> SplitStream:
    return SplitStream((2, 2, 1), np.array([0, 4], dtype=np.int64), ("only",), ("",), batches)


def visible_and_hidden(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def test_labels_and_counts_follow_the_offsets():
    split = make_split()
    assert split.labels.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert split.labels.dtype == np.int64
    assert split.counts.tolist() == [3, 1, 4]


def test_a_written_set_loads_with_the_same_content(tmp_path):
    train, test = make_split(1), make_split(2, (2, 2))
    write("made", {"train": train, "test": test}, {"source": "here"}, tmp_path)
    loaded = load("made", tmp_path)
    assert list(loaded.splits) == ["train", "test"]
    np.testing.assert_array_equal(loaded.splits["train"].images, train.images)
    np.testing.assert_array_equal(loaded.splits["test"].class_offsets, test.class_offsets)
    assert loaded.splits["test"].name == "made/test"
    assert loaded.splits["train"].classes == train.classes
    assert loaded.splits["train"].groups == train.groups
    assert loaded.info["source"] == "here"
    assert loaded.info["written_by"].startswith("wheretolearn ")


def test_loaded_images_are_memory_mapped(tmp_path):
    loaded = write("made", {"train": make_split()}, {}, tmp_path)
    assert isinstance(loaded.splits["train"].images, np.memmap)
    assert not loaded.splits["train"].images.flags.writeable


def test_a_stream_is_stored_as_it_arrives_and_reports_progress(tmp_path):
    images = np.arange(16, dtype=np.uint8).reshape(4, 2, 2, 1)
    reports = []
    stream = make_stream(iter([images[:3], images[3:]]))
    loaded = write("made", {"all": stream}, {}, tmp_path, lambda *report: reports.append(report))
    np.testing.assert_array_equal(loaded.splits["all"].images, images)
    assert reports == [(3, 4), (4, 4)]


def test_the_stored_checksum_is_that_of_the_file(tmp_path):
    write("made", {"train": make_split()}, {}, tmp_path)
    meta = json.loads((tmp_path / "made" / "meta.json").read_text())
    digest = hashlib.sha256((tmp_path / "made" / "train.npy").read_bytes()).hexdigest()
    assert meta["splits"]["train"]["sha256"] == digest


def test_writing_replaces_an_older_set(tmp_path):
    write("made", {"train": make_split(1), "test": make_split(2)}, {}, tmp_path)
    write("made", {"train": make_split(3)}, {}, tmp_path)
    loaded = load("made", tmp_path)
    assert list(loaded.splits) == ["train"]
    np.testing.assert_array_equal(loaded.splits["train"].images, make_split(3).images)
    assert visible_and_hidden(tmp_path) == ["made"]


def failing_batches(error: BaseException):
    yield np.zeros((2, 2, 2, 1), dtype=np.uint8)
    raise error


@pytest.mark.parametrize("error", [DataError("bad image"), KeyboardInterrupt(), ValueError("bug")])
def test_a_failed_write_leaves_the_older_set_and_nothing_else(tmp_path, error):
    write("made", {"train": make_split(1)}, {}, tmp_path)
    with pytest.raises(type(error)):
        write("made", {"all": make_stream(failing_batches(error))}, {}, tmp_path)
    assert visible_and_hidden(tmp_path) == ["made"]
    np.testing.assert_array_equal(check("made", tmp_path).splits["train"].images, make_split(1).images)


def test_disk_full_while_converting_names_folder_and_space_and_leaves_nothing(tmp_path, monkeypatch):
    write("made", {"train": make_split(1)}, {}, tmp_path)
    written = 0
    plain_open = Path.open

    class FullDisk:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, block):
            nonlocal written
            written += len(block)
            if written > 500:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(block)

        def __getattr__(self, name):
            return getattr(self.file, name)

    def open_on_full_disk(path, mode="r", **options):
        file = plain_open(path, mode, **options)
        return FullDisk(file) if mode == "wb" else file

    monkeypatch.setattr(Path, "open", open_on_full_disk)
    split = make_split(2, (3000,))
    with pytest.raises(DataError, match=r"full; it needs about 270 kB free") as caught:
        write("made", {"train": split}, {}, tmp_path)
    monkeypatch.undo()
    assert str(tmp_path) in str(caught.value)
    assert written > 500
    assert visible_and_hidden(tmp_path) == ["made"]
    np.testing.assert_array_equal(check("made", tmp_path).splits["train"].images, make_split(1).images)


def test_too_little_free_space_is_refused_before_any_work(tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 100})
    monkeypatch.setattr(image_set.shutil, "disk_usage", lambda _: usage)
    untouched = iter([np.zeros((4, 20, 20, 1), dtype=np.uint8)])
    big = SplitStream((20, 20, 1), np.array([0, 4], dtype=np.int64), ("only",), ("",), untouched)
    with pytest.raises(DataError, match=r"is full; it needs about 1\.6 kB"):
        write("made", {"all": big}, {}, tmp_path)
    assert len(list(untouched)) == 1


def test_unwritable_data_folder_is_named(tmp_path):
    (tmp_path / "data").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"(?s)cannot store made in .*data.*WHERETOLEARN_DATA") as caught:
        write("made", {"train": make_split()}, {}, tmp_path / "data")
    assert "File exists" in str(caught.value)


def test_permission_denied_on_the_data_folder_is_a_message(tmp_path, monkeypatch):
    def refuse(**options):
        raise PermissionError(errno.EACCES, "Permission denied", str(options["dir"]))

    monkeypatch.setattr(image_set.tempfile, "mkdtemp", refuse)
    with pytest.raises(DataError, match="Permission denied"):
        write("made", {"train": make_split()}, {}, tmp_path)


def test_a_failed_rename_brings_the_older_set_back(tmp_path, monkeypatch):
    write("made", {"train": make_split(1)}, {}, tmp_path)
    plain_rename = Path.rename

    def rename(path, target):
        if ".tmp-" in path.name:
            raise OSError(errno.EIO, "Input/output error")
        return plain_rename(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(DataError, match="Input/output error"):
        write("made", {"train": make_split(2)}, {}, tmp_path)
    assert visible_and_hidden(tmp_path) == ["made"]
    np.testing.assert_array_equal(load("made", tmp_path).splits["train"].images, make_split(1).images)


def test_a_set_that_stepped_aside_for_a_writer_that_died_is_found_again(tmp_path):
    write("made", {"train": make_split(1)}, {}, tmp_path)
    (tmp_path / "made").rename(tmp_path / ".made.old")
    assert image_set.exists("made", tmp_path)
    assert load("made", tmp_path).splits["train"].classes == make_split(1).classes


def test_a_reader_between_a_writers_two_renames_does_not_undo_them(tmp_path, monkeypatch):
    write("made", {"train": make_split(1)}, {}, tmp_path)
    plain_rename, read = Path.rename, []

    def rename(path, target):
        if ".tmp-" in path.name and not read:
            read.append(image_set.exists("made", tmp_path))  # finds no set, and the old one aside
        return plain_rename(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    write("made", {"train": make_split(2)}, {}, tmp_path)
    assert read == [True]
    assert visible_and_hidden(tmp_path) == ["made"]
    np.testing.assert_array_equal(load("made", tmp_path).splits["train"].images, make_split(2).images)


@pytest.mark.parametrize("label", ["other", "unpack"])
def test_the_next_write_of_any_set_removes_what_a_killed_process_left(tmp_path, label):
    script = (
        "import os, sys; from pathlib import Path; from wheretolearn.data.image_set import temporary_folder\n"
        "with temporary_folder(Path(sys.argv[1]), sys.argv[2]): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path), label], check=False)
    assert len(visible_and_hidden(tmp_path)) == 1
    write("made", {"train": make_split()}, {}, tmp_path)
    assert visible_and_hidden(tmp_path) == ["made"]


def test_temporary_folders_of_living_processes_and_strangers_stay(tmp_path):
    (tmp_path / ".mine.tmp-of-the-user").mkdir()
    with image_set.temporary_folder(tmp_path, "unpack") as living:
        write("made", {"train": make_split()}, {}, tmp_path)
        assert visible_and_hidden(tmp_path) == sorted([".mine.tmp-of-the-user", living.name, "made"])


def test_temporary_folders_of_other_machines_go_once_they_are_old(tmp_path, monkeypatch):
    (tmp_path / ".made.tmp-1@another-machine-x1").mkdir()
    write("made", {"train": make_split()}, {}, tmp_path)
    assert len(visible_and_hidden(tmp_path)) == 2
    monkeypatch.setattr(image_set, "STALE_SECONDS", -1)
    write("made", {"train": make_split()}, {}, tmp_path)
    assert visible_and_hidden(tmp_path) == ["made"]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["ant/1.png"], "it holds ant"),
        (["x.npy"], "it has no meta.json"),
        (["meta.json", "train.npy", "1.png"], "it holds 1.png"),
    ],
)
def test_a_folder_that_is_no_set_is_never_replaced(tmp_path, names, found):
    for name in names:
        file = tmp_path / "made" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"precious")
    untouched = iter([np.zeros((4, 2, 2, 1), dtype=np.uint8)])
    with pytest.raises(DataError, match=rf"made is in the way .*{found}"):
        write("made", {"all": make_stream(untouched)}, {}, tmp_path)
    assert all((tmp_path / "made" / name).read_bytes() == b"precious" for name in names)
    assert len(list(untouched)) == 1


def test_an_empty_folder_is_not_in_the_way(tmp_path):
    (tmp_path / "made").mkdir()
    write("made", {"train": make_split()}, {}, tmp_path)
    assert image_set.exists("made", tmp_path)


def test_an_absent_set_says_how_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"data get made`.*`data add made PATH`"):
        load("made", tmp_path)


def test_check_names_the_file_with_a_flipped_bit(tmp_path):
    write("made", {"train": make_split(1), "test": make_split(2)}, {}, tmp_path)
    file = tmp_path / "made" / "test.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    load("made", tmp_path)
    with pytest.raises(DataError, match=r"test\.npy is damaged: its SHA-256"):
        check("made", tmp_path)


def test_loading_names_a_truncated_array(tmp_path):
    write("made", {"train": make_split()}, {}, tmp_path)
    file = tmp_path / "made" / "train.npy"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"train\.npy is damaged"):
        load("made", tmp_path)


def test_an_unreadable_array_is_not_called_damaged(tmp_path, monkeypatch):
    write("made", {"train": make_split()}, {}, tmp_path)

    def refuse(file, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(np, "load", refuse)
    with pytest.raises(DataError, match=r"^cannot read .*train\.npy: Permission denied$"):
        load("made", tmp_path)


def test_loading_names_a_missing_array(tmp_path):
    write("made", {"train": make_split()}, {}, tmp_path)
    (tmp_path / "made" / "train.npy").unlink()
    with pytest.raises(DataError, match=r"train\.npy is damaged: .*No such file"):
        load("made", tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"format": 1', '"format": 99', "it has format 99"),
        ("{", "", "not valid JSON"),
        ('"class 1"', '"class 0"', "the same name"),
        ('"class_offsets"', '"offsets"', "incomplete"),
        ('"sha256"', '"sha"', "incomplete"),
        ('"class 1"', "1", "wrong type"),
        ('"classes"', '"classes": 3, "was"', "incomplete"),
        ('"info": {', '"info": [], "was": {', "does not describe"),
        ('"splits": {', '"splits": {}, "was": {', "lists no split"),
        ('"splits": {', '"splits": [], "was": {', "does not describe"),
        ('"class_offsets": [', f'"class_offsets": [{10**30},', "incomplete"),
        ('"class_offsets": [', '"class_offsets": [[0], [1]], "was": [', "incomplete"),
    ],
)
def test_loading_names_damaged_meta_data(tmp_path, old, new, message):
    write("made", {"train": make_split()}, {}, tmp_path)
    file = tmp_path / "made" / "meta.json"
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(DataError, match=rf"meta\.json is damaged: .*{message}"):
        load("made", tmp_path)


def test_array_of_another_shape_is_noticed(tmp_path):
    write("made", {"train": make_split()}, {}, tmp_path)
    np.save(tmp_path / "made" / "train.npy", np.zeros((8, 6, 5, 3), dtype=np.uint8))
    with pytest.raises(DataError, match=r"train\.npy is damaged: it holds uint8 \[8, 6, 5, 3\]"):
        load("made", tmp_path)


@pytest.mark.parametrize(
    ("offsets", "classes", "message"),
    [
        ([0, 8], ("a", "b"), "do not fit together"),
        ([0, 8, 8], ("a", "b"), "class 'b' has no image"),
        ([1, 3, 8], ("a", "b"), "start at 0"),
        ([0, 3, 8], ("a", "a"), "same name"),
        ([0, 3, 7], ("a", "b"), "offsets end at 7"),
        ([0, 3, 8], ("a", "b\udcff"), "is not UTF-8"),
    ],
)
def test_inconsistent_splits_are_refused(tmp_path, offsets, classes, message):
    images = np.zeros((8, 2, 2, 1), dtype=np.uint8)
    split = ImageSplit("x", images, np.array(offsets, dtype=np.int64), classes, ("",) * len(classes))
    with pytest.raises(DataError, match=message):
        write("made", {"train": split}, {}, tmp_path)
    assert visible_and_hidden(tmp_path) == []


def test_float_images_are_refused(tmp_path):
    images = np.zeros((1, 2, 2, 1), dtype=np.float32)
    split = ImageSplit("x", images, np.array([0, 1]), ("a",), ("",))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="must be uint8"):
        write("made", {"train": split}, {}, tmp_path)


def test_a_stream_with_fewer_images_than_announced_is_refused(tmp_path):
    with pytest.raises(DataError, match="3 images arrived, 4 were announced"):
        write("made", {"all": make_stream([np.zeros((3, 2, 2, 1), dtype=np.uint8)])}, {}, tmp_path)
    assert visible_and_hidden(tmp_path) == []


@pytest.mark.parametrize("name", ["../made", "Made", "a b", "", "-a", ".made", "a/b"])
def test_names_that_could_leave_the_cache_are_refused(tmp_path, name):
    with pytest.raises(DataError, match="cannot name an image set"):
        load(name, tmp_path)


def test_stored_names_lists_whole_sets_only(tmp_path):
    write("made", {"train": make_split()}, {}, tmp_path)
    (tmp_path / "empty").mkdir()
    assert image_set.stored_names(tmp_path) == ["made"]


def test_data_root_is_the_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERETOLEARN_DATA", str(tmp_path))
    assert data_root() == tmp_path


def test_a_data_root_in_the_home_of_nobody_is_a_message(monkeypatch):
    monkeypatch.setenv("WHERETOLEARN_DATA", "~no-such-user/x")
    with pytest.raises(DataError, match=r"WHERETOLEARN_DATA=~no-such-user/x names no folder"):
        data_root()


def test_data_root_needs_no_platformdirs_when_the_variable_is_set(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    monkeypatch.setenv("WHERETOLEARN_DATA", str(tmp_path))
    assert data_root() == tmp_path
    monkeypatch.delenv("WHERETOLEARN_DATA")
    with pytest.raises(DataError, match="set WHERETOLEARN_DATA"):
        data_root()


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 bytes"), (1500, "1.5 kB"), (123_456_789, "123 MB"), (2.5e12, "2500 GB")]
)
def test_byte_counts_for_people(count, text):
    assert image_set.human_bytes(count) == text
