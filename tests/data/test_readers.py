import bz2
import errno
import gzip
import io
import lzma
import os
import pickle
import struct
import tarfile
import threading
import tracemalloc
import unicodedata
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wheretolearn.data.archives import Workspace
from wheretolearn.data.image_set import SplitStream
from wheretolearn.data.readers import (
    CIFAR10_CLASSES,
    LayoutError,
    Picture,
    area_weights,
    decode,
    decode_ink,
    file_picture,
    parse_cifar_binary,
    parse_cifar_pickle,
    parse_idx,
    read_cifar10,
    read_class_folders,
    read_idx,
    read_mini_imagenet,
    read_omniglot,
    read_sorted_classes,
    stream_pictures,
)
from wheretolearn.data.sources import SOURCES, cub_split
from wheretolearn.errors import DataError

DIGITS = [str(digit) for digit in range(10)]
SHAPE = (8, 8, 3)


@pytest.fixture
def workspace(tmp_path):
    with Workspace(tmp_path / "scratch") as opened:
        yield opened


def pixels(stream: SplitStream) -> np.ndarray:
    return np.concatenate(list(stream.batches))


def save_image(file: Path, value=0, size=(8, 8), mode="RGB", **options) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(file, **options)
    return file


def png_bytes(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(folder: Path, prefix: str, labels: list[int]) -> np.ndarray:
    folder.mkdir(exist_ok=True)
    images = np.random.default_rng(len(labels)).integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
    (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(images)))
    content = idx_bytes(np.array(labels, dtype=np.uint8))
    (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(content))
    return images


def test_idx_images_are_sorted_by_class_and_keep_their_order_within(tmp_path, workspace):
    images = write_idx(tmp_path, "train", [3, 1, 3, 0])
    write_idx(tmp_path, "t10k", [0, 1])
    splits = read_idx(tmp_path, workspace, DIGITS)
    assert list(splits) == ["train", "test"]
    assert splits["train"].classes == ("0", "1", "3")
    assert splits["train"].class_offsets.tolist() == [0, 1, 2, 4]
    np.testing.assert_array_equal(pixels(splits["train"])[..., 0], images[[3, 1, 0, 2]])


def test_unpacked_idx_files_are_read_too(tmp_path, workspace):
    write_idx(tmp_path, "train", [3, 1])
    for file in tmp_path.glob("*.gz"):
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
    assert read_idx(tmp_path, workspace, DIGITS)["train"].classes == ("1", "3")


def test_truncated_gz_is_named(tmp_path, workspace):
    write_idx(tmp_path, "train", list(range(10)))
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: it is cut short or damaged"):
        read_idx(tmp_path, workspace, DIGITS)


def test_html_page_instead_of_an_archive_is_recognised_in_a_gz(tmp_path, workspace):
    write_idx(tmp_path, "train", [1])
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"<!doctype html><p>moved</p>")
    with pytest.raises(DataError, match="it is a web page, not an archive"):
        read_idx(tmp_path, workspace, DIGITS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0", "cut short"),
        (b"\0\0\x0d\x03" + bytes(12), "not an idx file of 3 dimensions: it starts with 00000d03"),
        (idx_bytes(np.zeros((2, 3, 3), dtype=np.uint8))[:-1], "asks for 18 bytes, it holds 17"),
        (idx_bytes(np.zeros((2, 3, 3), dtype=np.uint8)) + b"x", "asks for 18 bytes, it holds more"),
    ],
)
def test_idx_header_and_length_are_checked(tmp_path, content, message):
    file = tmp_path / "x-idx3-ubyte"
    file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        parse_idx(file, 3)


@pytest.mark.parametrize("header", [b"bomb", idx_bytes(np.zeros((2, 3, 3), dtype=np.uint8))])
def test_a_gz_that_holds_far_too_much_is_not_read_whole(tmp_path, header):
    file = tmp_path / "x-idx3-ubyte.gz"
    with gzip.open(file, "wb", 1) as out:
        out.write(header)
        for _ in range(64):
            out.write(bytes(1 << 20))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"not an idx file|it holds more"):
        parse_idx(file, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_an_idx_header_of_absurd_size_is_damage(tmp_path):
    file = tmp_path / "x-idx3-ubyte"
    file.write_bytes(bytes((0, 0, 8, 3)) + b"\xff" * 12 + b"few")
    with pytest.raises(DataError, match=r"asks for 792281624\d+ bytes, it holds 3$"):
        parse_idx(file, 3)


def test_idx_labels_must_match_images_and_classes(tmp_path, workspace):
    write_idx(tmp_path, "train", [1, 2])
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx_bytes(np.array([1], dtype=np.uint8))))
    with pytest.raises(DataError, match=r"2 images, .* 1 labels"):
        read_idx(tmp_path, workspace, DIGITS)
    labels.write_bytes(gzip.compress(idx_bytes(np.array([1, 10], dtype=np.uint8))))
    with pytest.raises(DataError, match="labels from 1 to 10, expected 0 to 9"):
        read_idx(tmp_path, workspace, DIGITS)
    labels.unlink()
    with pytest.raises(DataError, match="not the file of labels"):
        read_idx(tmp_path, workspace, DIGITS)


def test_area_weights_keep_the_mean_and_count_fractions():
    np.testing.assert_allclose(area_weights(5, 2), [[0.4, 0.4, 0.2, 0, 0], [0, 0, 0.2, 0.4, 0.4]], atol=1e-6)
    np.testing.assert_allclose(area_weights(105, 28).sum(axis=1), 1.0, atol=1e-6)


def test_omniglot_ink_becomes_bright_and_keeps_its_amount():
    paper = np.full((105, 105), 255, dtype=np.uint8)
    paper[30:60, 45:60] = 0
    drawn = decode_ink(Picture("x", lambda: png_bytes(paper)), 28)
    assert drawn.shape == (28, 28, 1)
    assert drawn[12, 14, 0] == 255
    assert drawn[0, 0, 0] == 0
    assert drawn.mean() == pytest.approx((255 - paper.astype(float)).mean(), rel=0.02)


def write_omniglot(file: Path, root: str, extra: dict[str, bytes] | None = None) -> None:
    drawing = np.full((105, 105), 255, dtype=np.uint8)
    with zipfile.ZipFile(file, "w") as archive:
        for alphabet, character in (
            ("Greek", "character02"),
            ("Greek", "character01"),
            ("Angelic", "character01"),
        ):
            for number in (2, 1):
                drawing[:, :50] = 100 * number
                archive.writestr(f"{root}/{alphabet}/{character}/0001_{number:02d}.png", png_bytes(drawing))
        for name, content in (extra or {}).items():
            archive.writestr(name, content)


def test_omniglot_zip_gives_characters_grouped_by_alphabet(tmp_path, workspace):
    litter = {"__MACOSX/images_background/._x.png": b"", "images_background/.DS_Store": b""}
    write_omniglot(tmp_path / "images_background.zip", "images_background", litter)
    split = read_omniglot(tmp_path, workspace, 28)["background"]
    assert split.classes == ("Angelic/character01", "Greek/character01", "Greek/character02")
    assert split.groups == ("Angelic", "Greek", "Greek")
    assert split.class_offsets.tolist() == [0, 2, 4, 6]
    assert pixels(split)[:2, 5, 5, 0].tolist() == [155, 55]


def test_unpacked_omniglot_reads_like_its_zip(tmp_path, workspace):
    write_omniglot(tmp_path / "images_evaluation.zip", "images_evaluation")
    from_zip = read_omniglot(tmp_path, workspace, 28)["evaluation"]
    with zipfile.ZipFile(tmp_path / "images_evaluation.zip") as archive:
        archive.extractall(tmp_path / "unpacked")
    from_folder = read_omniglot(tmp_path / "unpacked", workspace, 28)["evaluation"]
    assert from_zip.classes == from_folder.classes
    np.testing.assert_array_equal(pixels(from_zip), pixels(from_folder))


def test_a_drawing_that_is_in_the_zip_twice_counts_once(tmp_path, workspace):
    name = "images_background/Greek/character01/0001_01.png"
    blank = png_bytes(np.full((105, 105), 255, dtype=np.uint8))
    with pytest.warns(UserWarning, match="Duplicate name"):
        write_omniglot(tmp_path / "images_background.zip", "images_background", {name: blank})
    assert read_omniglot(tmp_path, workspace, 28)["background"].class_offsets.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("name", ["../outside.png", "/etc/outside.png", "a/../../b.png", "C:\\outside.png"])
def test_zip_with_paths_that_lead_outside_is_refused(tmp_path, workspace, name):
    write_omniglot(tmp_path / "images_background.zip", "images_background", {name: b"x"})
    with pytest.raises(DataError, match=r"refused to unpack .*images_background\.zip"):
        read_omniglot(tmp_path, workspace, 28)
    with pytest.raises(DataError, match="refused to unpack"):
        workspace.unpack(tmp_path / "images_background.zip")


def test_zip_with_a_link_is_refused(tmp_path, workspace):
    link = zipfile.ZipInfo("a/link.png")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(DataError, match=r"member 'a/link\.png' is a link"):
        workspace.unpack(tmp_path / "x.zip")


def test_damaged_zip_is_named(tmp_path, workspace):
    (tmp_path / "images_background.zip").write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(DataError, match=r"images_background\.zip: it is cut short or damaged"):
        read_omniglot(tmp_path, workspace, 28)


def test_html_page_instead_of_an_archive_is_recognised_in_a_zip(tmp_path, workspace):
    (tmp_path / "images_background.zip").write_bytes(b"<html><head><title>404</title>")
    with pytest.raises(DataError, match="it is a web page, not an archive"):
        read_omniglot(tmp_path, workspace, 28)


def tar_with(file: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(file, "w:gz") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return file


def member(name: str, **fields) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (member("../up.jpg", size=1), "leads out of the archive"),
        (member("/abs.jpg", size=1), "absolute path"),
        (member("a/link.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "is a link or a device"),
        (member("a/hard.jpg", type=tarfile.LNKTYPE, linkname="good"), "is a link or a device"),
        (member("a/fifo", type=tarfile.FIFOTYPE), "is a link or a device"),
    ],
)
def test_tar_members_that_could_do_harm_are_refused(tmp_path, workspace, bad, message):
    with pytest.raises(DataError, match=message):
        workspace.unpack(tar_with(tmp_path / "x.tgz", member("good", size=1), bad))
    assert not (tmp_path / "scratch" / "up.jpg").exists()


def test_truncated_tar_is_named(tmp_path, workspace):
    file = tar_with(tmp_path / "x.tgz", member("a", size=5_000_000))
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(DataError, match=r"x\.tgz: it is cut short or damaged"):
        workspace.unpack(file)


def tar_of_images(file: Path, size: int = 3000) -> bytes:
    """A plain tar of three members whose content does not compress."""
    content = np.random.default_rng(0).bytes(size)
    with tarfile.open(file, "w") as archive:
        for name in ("a/1", "a/2", "a/3"):
            archive.addfile(member(name, size=len(content)), io.BytesIO(content))
    return file.read_bytes()


MEMBER_BYTES = 512 + 3072


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("harm", ["cut", "bad header", "zeroed header"])
def test_a_tar_that_lost_members_is_refused(tmp_path, workspace, harm, packed):
    content = bytearray(tar_of_images(tmp_path / "x.tar"))
    if harm == "cut":
        del content[2 * MEMBER_BYTES :]
    elif harm == "bad header":
        content[MEMBER_BYTES] ^= 1
    else:
        content[MEMBER_BYTES : MEMBER_BYTES + 512] = bytes(512)
    file = tmp_path / ("x.tar.gz" if packed else "x.tar")
    file.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match=r"x\.tar.*: it is cut short or damaged \((its end|a member's header) is"):
        workspace.unpack(file)


def test_a_flipped_bit_in_a_compressed_tar_is_noticed(tmp_path, workspace):
    content = bytearray(tar_of_images(tmp_path / "x.tar"))
    packed = bytearray(gzip.compress(content, compresslevel=0))
    packed[1500] ^= 1  # inside the stored bytes of the first member
    (tmp_path / "x.tar.gz").write_bytes(packed)
    with pytest.raises(DataError, match=r"x\.tar\.gz: it is cut short or damaged \(CRC check failed"):
        workspace.unpack(tmp_path / "x.tar.gz")


def test_a_damaged_bz2_is_not_taken_for_a_full_disk(tmp_path, workspace):
    packed = bytearray(bz2.compress(tar_of_images(tmp_path / "x.tar", 500_000), 1))
    packed[len(packed) // 2] ^= 1  # past the blocks that are read when the file is opened
    (tmp_path / "x.tar.bz2").write_bytes(packed)
    with pytest.raises(DataError, match=r"x\.tar\.bz2: it is cut short or damaged"):
        workspace.unpack(tmp_path / "x.tar.bz2")


@pytest.mark.parametrize("name", ["x.tar", "x.tgz", "x.tar.bz2", "x.tar.xz"])
def test_good_tars_of_every_kind_are_unpacked(tmp_path, workspace, name):
    pack = {".tar": bytes, ".tgz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[Path(name).suffix]
    (tmp_path / name).write_bytes(pack(tar_of_images(tmp_path / "plain.tar")))
    assert sorted(file.name for file in (workspace.unpack(tmp_path / name) / "a").iterdir()) == ["1", "2", "3"]


def test_a_zip_with_a_capital_suffix_is_a_zip(tmp_path, workspace):
    with zipfile.ZipFile(tmp_path / "X.ZIP", "w") as archive:
        archive.writestr("a/1", "x")
    assert (workspace.unpack(tmp_path / "X.ZIP") / "a" / "1").read_text() == "x"


def test_a_file_that_is_no_tar_gets_a_short_message(tmp_path, workspace):
    (tmp_path / "x.tar").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(DataError) as caught:
        workspace.unpack(tmp_path / "x.tar")
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), ("n" * 300,)])
def test_members_that_cannot_be_stored_are_named(tmp_path, workspace, names):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    with pytest.raises(DataError, match=rf"member '{names[-1]}' cannot be stored"):
        workspace.unpack(tmp_path / "x.zip")


def test_an_unreadable_gz_is_not_called_damaged(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(gzip, "open", refuse)
    with pytest.raises(DataError, match=r"^cannot read .*x\.gz: Permission denied$"):
        parse_idx(tmp_path / "x.gz", 3)


def test_unpacked_files_are_gone_when_the_workspace_closes(tmp_path):
    file = tar_with(tmp_path / "x.tgz", member("folder/a", size=3))
    with Workspace(tmp_path / "scratch") as workspace:
        folder = workspace.unpack(file)
        assert (folder / "folder" / "a").read_bytes() == b"xxx"
    assert list((tmp_path / "scratch").iterdir()) == []


def cifar_rows(labels: list[int]) -> tuple[np.ndarray, np.ndarray]:
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 32, 32, 3), dtype=np.uint8)
    return images, images.transpose(0, 3, 1, 2).reshape(len(labels), 3072)


def write_cifar(folder: Path, labels: list[int]) -> np.ndarray:
    folder.mkdir(parents=True)
    images, rows = cifar_rows(labels)
    column = np.array(labels, dtype=np.uint8)[:, None]
    (folder / "data_batch_1.bin").write_bytes(np.concatenate([column, rows], axis=1).tobytes())
    return images


def test_cifar_binary_is_channels_last_and_sorted(tmp_path, workspace):
    images = write_cifar(tmp_path / "cifar-10-batches-bin", [9, 2, 9])
    split = read_cifar10(tmp_path, workspace)["train"]
    assert split.classes == (CIFAR10_CLASSES[2], CIFAR10_CLASSES[9])
    np.testing.assert_array_equal(pixels(split), images[[1, 0, 2]])


def test_cifar_is_read_from_its_tar(tmp_path, workspace):
    images = write_cifar(tmp_path / "cifar-10-batches-bin", [0, 1])
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "cifar-10-batches-bin", "cifar-10-batches-bin")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin").unlink()
    np.testing.assert_array_equal(pixels(read_cifar10(tmp_path, workspace)["train"]), images)


def test_cifar_binary_of_odd_length_is_damaged(tmp_path):
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(3072))
    with pytest.raises(DataError, match="not a whole number of 3073-byte rows"):
        parse_cifar_binary(tmp_path / "data_batch_1.bin")


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_cifar_pickles_are_read(tmp_path, workspace, protocol):
    images, rows = cifar_rows([4, 0])
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    batch = {b"data": rows, b"labels": [4, 0], b"batch_label": b"training batch 1 of 5"}
    (folder / "data_batch_1").write_bytes(pickle.dumps(batch, protocol))
    split = read_cifar10(tmp_path, workspace)["train"]
    assert split.classes == (CIFAR10_CLASSES[0], CIFAR10_CLASSES[4])
    np.testing.assert_array_equal(pixels(split), images[::-1])


class Harmful:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def test_a_pickle_that_would_run_something_is_refused(tmp_path):
    proof = tmp_path / "it-ran"
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Harmful(proof), b"labels": []}))
    with pytest.raises(DataError, match=r"data_batch_1: refused: the pickle asks for (posix|nt)\.mkdir"):
        parse_cifar_pickle(tmp_path / "data_batch_1")
    assert not proof.exists()


def test_a_pickle_of_something_else_is_named(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(DataError, match=r"data_batch_1 is not a batch of CIFAR-10"):
        parse_cifar_pickle(tmp_path / "data_batch_1")


def write_mini_imagenet(folder: Path) -> None:
    for name, value in (("b1.jpg", 10), ("a1.jpg", 100), ("a2.jpg", 200), ("c1.jpg", 50)):
        save_image(folder / "images" / name, (value,) * 3, (84, 84))
    (folder / "train.csv").write_text("filename,label\nb1.jpg,n2\na1.jpg,n1\na2.jpg,n1\n")
    (folder / "val.csv").write_text("filename,label\nc1.jpg,n3\n")


def test_mini_imagenet_follows_its_csv_files(tmp_path, workspace):
    write_mini_imagenet(tmp_path)
    splits = read_mini_imagenet(tmp_path, workspace, 84)
    assert list(splits) == ["train", "validation"]
    assert splits["train"].classes == ("n1", "n2")
    assert splits["train"].class_offsets.tolist() == [0, 2, 3]
    np.testing.assert_allclose(pixels(splits["train"])[:, 40, 40, 0], [100, 200, 10], atol=2)


def test_csv_naming_a_missing_image_gives_line_and_name(tmp_path, workspace):
    write_mini_imagenet(tmp_path)
    (tmp_path / "images" / "a1.jpg").unlink()
    with pytest.raises(DataError, match=r"train\.csv, line 3 names a1\.jpg, which is not in .*images"):
        read_mini_imagenet(tmp_path, workspace, 84)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,class\nb1.jpg,n2\n", "must name the columns filename,label"),
        ("filename,label\nb1.jpg\n", "line 2: expected filename,label"),
        ("filename,label\n", "lists no image"),
        ("filename,label\n../secret.jpg,n2\n", r"names \.\./secret\.jpg, which is not in"),
        ("filename,label\nb1.jpg,n3\n", "class n3 is also in split train"),
        ("filename,label\nb1.jpg,n1\nb1.jpg,n2\n", r"line 3 lists b1\.jpg, which was listed before in class n1"),
        (f"filename,label\nb1.jpg,{'n' * 200_000}\n", "not a csv file in UTF-8: field larger"),
    ],
)
def test_csv_mistakes_are_named(tmp_path, workspace, text, message):
    write_mini_imagenet(tmp_path)
    name = "val.csv" if "also" in message else "train.csv"
    (tmp_path / name).write_text(text)
    if "also" in message:
        (tmp_path / "train.csv").write_text("filename,label\nc1.jpg,n3\n")
    with pytest.raises(DataError, match=message):
        read_mini_imagenet(tmp_path, workspace, 84)


def test_an_image_listed_in_two_splits_is_refused(tmp_path, workspace):
    write_mini_imagenet(tmp_path)
    (tmp_path / "val.csv").write_text("filename,label\na1.jpg,n3\n")
    with pytest.raises(DataError, match=r"val\.csv, line 2 lists a1\.jpg, which was listed before in class n1"):
        read_mini_imagenet(tmp_path, workspace, 84)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_csv_in_another_encoding_is_named(tmp_path, workspace, encoding):
    write_mini_imagenet(tmp_path)
    (tmp_path / "train.csv").write_text("filename,label\nb1.jpg,grün\n", encoding=encoding)
    with pytest.raises(DataError, match=r"train\.csv is not a csv file in UTF-8"):
        read_mini_imagenet(tmp_path, workspace, 84)


def test_csv_may_have_a_byte_order_mark_and_spaces(tmp_path, workspace):
    write_mini_imagenet(tmp_path)
    (tmp_path / "train.csv").write_text("filename, label\nb1.jpg, n2\n", encoding="utf-8-sig")
    assert read_mini_imagenet(tmp_path, workspace, 84)["train"].classes == ("n2",)


def test_cub_archive_is_unpacked_and_split_by_class_number(tmp_path, workspace):
    for number, name in ((1, "Albatross"), (2, "Ani"), (3, "Auk"), (4, "Auklet")):
        save_image(tmp_path / "images" / f"{number:03d}.{name}" / "1.jpg", (50 * number, 0, 0), (30, 20))
    with tarfile.open(tmp_path / "CUB_200_2011.tgz", "w:gz") as archive:
        archive.add(tmp_path / "images", "CUB_200_2011/images")
    splits = SOURCES["cub"].read(tmp_path, workspace)
    assert {split: stream.classes for split, stream in splits.items()} == {
        "train": ("001.Albatross", "003.Auk"),
        "validation": ("002.Ani",),
        "test": ("004.Auklet",),
    }
    assert pixels(splits["test"]).shape == (1, 84, 84, 3)


def test_train_and_test_images_of_one_class_are_joined(tmp_path, workspace):
    save_image(tmp_path / "train" / "Car A" / "1.jpg")
    save_image(tmp_path / "test" / "Car A" / "1.jpg")
    splits = read_sorted_classes(tmp_path, workspace, 8, (), lambda _: "train")
    assert splits["train"].class_offsets.tolist() == [0, 2]


def test_cub_folder_with_foreign_classes_is_refused(tmp_path, workspace):
    save_image(tmp_path / "birds" / "1.jpg")
    with pytest.raises(DataError, match="'birds' is not a class folder of CUB"):
        read_sorted_classes(tmp_path, workspace, 8, (), cub_split)


def test_class_folders_make_one_split_in_name_order(tmp_path, workspace):
    save_image(tmp_path / "own" / "zebra" / "1.png", (9, 8, 7))
    save_image(tmp_path / "own" / "ant" / "2.bmp", (1, 2, 3))
    save_image(tmp_path / "own" / "ant" / "1.GIF", 0, mode="L")
    for other in ("notes.txt", "film.mpg", "data.h5", "page.eps", "page.pdf", "ride.fit", "folder.ico", "work.psd"):
        (tmp_path / "own" / "ant" / other).write_text("not an image")
    (tmp_path / "own" / "ant" / "._1.png").write_text("litter")
    splits = read_class_folders(tmp_path / "own", workspace, SHAPE)
    assert list(splits) == ["all"]
    assert splits["all"].classes == ("ant", "zebra")
    assert pixels(splits["all"])[:, 0, 0].tolist() == [[0, 0, 0], [1, 2, 3], [9, 8, 7]]


FORMATS = ("avif", "bmp", "gif", "jp2", "jpg", "mpo", "pcx", "png", "qoi", "tga", "tif", "webp")


@pytest.mark.parametrize("suffix", FORMATS)
def test_images_of_every_common_format_are_found_and_read(tmp_path, workspace, suffix):
    save_image(tmp_path / "own" / "ant" / f"1.{suffix}", (250, 250, 250), (64, 64))
    save_image(tmp_path / "own" / "zebra" / f"1.{suffix.upper()}", (5, 5, 5), (64, 64))
    found = pixels(read_class_folders(tmp_path / "own", workspace, SHAPE)["all"])
    np.testing.assert_allclose(found[:, 4, 4].astype(int), [[250] * 3, [5] * 3], atol=3)


def test_classes_have_one_order_however_their_names_are_spelled(tmp_path, workspace):
    for split, form in (("train", "NFC"), ("test", "NFD")):
        for name in ("f", "\u00e9"):
            save_image(tmp_path / split / unicodedata.normalize(form, name) / "0.png")
    splits = read_class_folders(tmp_path, workspace, SHAPE)
    assert splits["train"].classes == splits["test"].classes == ("f", "\u00e9")


def test_class_folders_below_split_folders(tmp_path, workspace):
    save_image(tmp_path / "test" / "a" / "1.png")
    save_image(tmp_path / "val" / "b" / "1.png")
    save_image(tmp_path / "Train" / "c" / "1.png")
    splits = read_class_folders(tmp_path, workspace, SHAPE)
    assert {split: stream.classes for split, stream in splits.items()} == {
        "train": ("c",),
        "validation": ("b",),
        "test": ("a",),
    }


def test_a_lone_split_folder_keeps_its_name(tmp_path, workspace):
    save_image(tmp_path / "top" / "test" / "a" / "1.png")
    assert list(read_class_folders(tmp_path, workspace, SHAPE)) == ["test"]


def test_split_folders_mixed_with_classes_are_refused(tmp_path, workspace):
    save_image(tmp_path / "train" / "a" / "1.png")
    save_image(tmp_path / "zebra" / "1.png")
    with pytest.raises(DataError, match=r"mixes split folders \(train\) with others \(zebra\)"):
        read_class_folders(tmp_path, workspace, SHAPE)


def test_an_empty_class_folder_is_named(tmp_path, workspace):
    save_image(tmp_path / "a" / "1.png")
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match=r"class folder .*b holds no image"):
        read_class_folders(tmp_path, workspace, SHAPE)


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (partial(read_idx, classes=DIGITS), "train-images"),
        (partial(read_omniglot, size=28), "images_background.zip"),
        (read_cifar10, "cifar-10-batches-bin"),
        (partial(read_mini_imagenet, size=84), "folders named train"),
        (SOURCES["cub"].read, "a folder of images per class"),
        (partial(read_class_folders, image_shape=SHAPE), "a folder of images per class"),
    ],
)
def test_an_empty_folder_is_told_what_was_looked_for(tmp_path, workspace, reader, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(LayoutError, match=f"does not hold .*{message}"):
        reader(tmp_path / "empty", workspace)


def decoded(image: Image.Image, channels: int = 3, size: int = 2, kind: str = "PNG", **options) -> np.ndarray:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return decode(Picture("x", buffer.getvalue), size, size, channels)


# L 45.76 of 100, and a -26.2 and b 10.3 counted from 128: RGB 60, 120, 90.
LAB = Image.new("LAB", (4, 4), (117, 102, 138))


@pytest.mark.parametrize(
    ("image", "kind", "expected"),
    [
        (Image.new("RGBA", (4, 4), (255, 0, 0, 0)), "PNG", [255, 255, 255]),
        (Image.new("RGBA", (4, 4), (200, 0, 0, 255)), "PNG", [200, 0, 0]),
        (Image.new("LA", (4, 4), (0, 0)), "PNG", [255, 255, 255]),
        (Image.new("RGB", (4, 4), (10, 200, 30)).quantize(4), "PNG", [10, 200, 30]),
        (Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "TIFF", [255, 0, 0]),
        (Image.new("1", (4, 4), 1), "PNG", [255, 255, 255]),
        (Image.fromarray(np.full((4, 4), 257 * 100, dtype=np.uint16)), "PNG", [100, 100, 100]),
        (Image.fromarray(np.full((4, 4), 0.5, dtype=np.float32)), "TIFF", [128, 128, 128]),
        (LAB, "TIFF", [60, 120, 90]),
    ],
    ids=["transparent", "opaque", "grey-alpha", "palette", "cmyk", "bilevel", "16-bit", "float", "lab"],
)
def test_unusual_images_become_rgb(image, kind, expected):
    result = decoded(image, kind=kind)
    assert result.dtype == np.uint8
    np.testing.assert_allclose(result[0, 0], expected, atol=1)


def test_a_picture_with_pixels_that_are_no_numbers_is_an_error():
    with pytest.raises(DataError, match="cannot read the image x: some of its pixels are not finite numbers"):
        decoded(Image.fromarray(np.full((4, 4), np.nan, dtype=np.float32)), kind="TIFF")


def test_colour_becomes_grey_when_one_channel_is_asked_for():
    assert decoded(Image.new("RGB", (4, 4), (255, 255, 255)), channels=1).tolist() == [[[255], [255]]] * 2
    np.testing.assert_allclose(
        decoded(LAB, channels=1, kind="TIFF")[0, 0], 0.299 * 60 + 0.587 * 120 + 0.114 * 90, atol=1
    )


def test_exif_orientation_is_applied():
    image = Image.new("RGB", (8, 8))
    image.paste((255, 255, 255), (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn clockwise
    turned = decoded(image, size=8, kind="PNG", exif=exif)[..., 0]
    assert turned[:, -1].min() == 255
    assert turned[:, 0].max() == 0


def test_shrinking_averages_instead_of_picking_pixels():
    board = (np.indices((64, 64)).sum(axis=0) % 2 * 255).astype(np.uint8)
    result = decoded(Image.fromarray(board), channels=1, size=4)
    assert result.min() > 100
    assert result.max() < 155


def test_a_corrupt_image_is_named(tmp_path):
    file = save_image(tmp_path / "class" / "broken.jpg", (1, 2, 3), (64, 64))
    file.write_bytes(file.read_bytes()[:300])
    stream = stream_pictures({"class": [file_picture(file)]}, SHAPE)
    with pytest.raises(DataError, match=r"cannot read the image .*broken\.jpg"):
        list(stream.batches)


def test_a_file_that_is_no_image_is_named(tmp_path):
    file = tmp_path / "page.png"
    file.write_text("<html></html>")
    with pytest.raises(DataError, match=r"cannot read the image .*page\.png: its content is of no known kind$"):
        decode(file_picture(file), 8, 8, 3)


def test_many_pictures_keep_their_order_with_few_in_memory(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    seen, lock = 0, threading.Lock()

    def number(picture: Picture) -> np.ndarray:
        nonlocal seen
        with lock:
            seen += 1
        return np.full((1, 1, 1), int(picture.name) % 251, dtype=np.uint8)

    count = 5000
    pictures = [Picture(str(index), bytes) for index in range(count)]
    batches = iter(stream_pictures({"a": pictures}, (1, 1, 1), number).batches)
    first = next(batches)
    assert seen < count / 2
    everything = np.concatenate([first, *batches])[:, 0, 0, 0]
    np.testing.assert_array_equal(everything, np.arange(count) % 251)
