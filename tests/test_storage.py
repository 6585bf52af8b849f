import errno
import fcntl
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from wheretolearn.errors import UserError
from wheretolearn.storage import (
    _remove_abandoned,
    atomic_write,
    from_json,
    load_weights,
    read_json,
    save_weights,
    to_json,
    write_json,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_atomic_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_write(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["file"]


def test_an_error_while_writing_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write_half() -> None:
        with atomic_write(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_what_a_killed_writer_left_goes_with_the_next_write_of_that_file(tmp_path: Path) -> None:
    path = tmp_path / "record[1].json"
    script = (
        "import os, sys; from wheretolearn.storage import atomic_write\n"
        "with atomic_write(sys.argv[1]) as file: file.write(b'half'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    (left,) = names(tmp_path)
    with atomic_write(tmp_path / "record1.json"), atomic_write(path.with_suffix(".jso")):
        pass
    assert left in names(tmp_path), "of another file"
    with atomic_write(path) as file:
        file.write(b"whole")
    assert names(tmp_path) == ["record1.json", "record[1].jso", "record[1].json"]


def test_what_others_are_writing_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    (tmp_path / ".file.mine.tmp").touch()
    with atomic_write(path) as slow:
        write_json(path, 1)
        slow.write(b"2\n")
    assert names(tmp_path) == [".file.mine.tmp", "file"]
    assert read_json(path) == 2


def test_a_file_stays_locked_until_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, tried = os.replace, []

    def watched(source: Path, target: Path) -> None:
        with source.open("r+b") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        tried.append(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    write_json(tmp_path / "file", 1)
    assert len(tried) == 1


def test_a_new_file_that_somebody_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, removed = fcntl.flock, []

    def late(file: Any, operation: int) -> None:
        if not removed:
            removed.append(file.name)
            Path(file.name).unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    write_json(tmp_path / "file", 1)
    assert len(removed) == 1
    assert read_json(tmp_path / "file") == 1
    assert names(tmp_path) == ["file"]


def test_a_late_remover_meets_no_later_file_of_the_same_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opened a file that has its name by the time it can be locked; the writer is at its next."""
    path = tmp_path / "file"
    flock = fcntl.flock
    first, second = atomic_write(path), atomic_write(path)
    first.__enter__()

    def late(file: Any, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.__exit__(None, None, None)
        second.__enter__().write(b"2\n")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    _remove_abandoned(path)
    second.__exit__(None, None, None)
    assert read_json(path) == 2


def test_a_file_system_without_locks_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: Any, operation: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / ".file.0123456789abcdef.tmp").touch()
    write_json(tmp_path / "file", 1)
    assert names(tmp_path) == [".file.0123456789abcdef.tmp", "file"]


def test_content_reaches_the_disk_before_the_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("fsync"), fsync(descriptor))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("rename"), replace(a, b))[1])
    with atomic_write(tmp_path / "file") as file:
        file.write(b"x")
    assert events == ["fsync", "rename", "fsync"]


@pytest.mark.parametrize("parent", ["missing", "file", "x" * 300])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / parent / "x"
    with pytest.raises(UserError, match=f"cannot write {path}: "), atomic_write(path):
        pass


def test_json_survives_numbers_that_json_lacks() -> None:
    value = {"a": math.inf, "b": [-math.inf, 1.5], "c": np.float32(0.5), "d": torch.tensor(3), "e": None}
    text = to_json(value | {"f": math.nan})
    strict = json.loads(text, parse_constant=lambda name: pytest.fail(f"invalid JSON: {name}"))
    assert strict["f"] == {"$float": "nan"}
    back = from_json(text)
    assert math.isnan(back.pop("f"))
    assert back == {"a": math.inf, "b": [-math.inf, 1.5], "c": 0.5, "d": 3, "e": None}


@pytest.mark.parametrize("word", ["nan", "inf", "-inf"])
def test_words_that_look_like_numbers_stay_words(word: str) -> None:
    assert from_json(to_json({"data": word, word: [word]})) == {"data": word, word: [word]}


def test_the_mark_of_a_number_cannot_be_anything_else(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is taken"):
        to_json({"a": {"$float": "x"}})
    path = tmp_path / "x.json"
    path.write_text('{"a": {"$float": []}}')
    with pytest.raises(UserError, match=f"{path} is damaged"):
        read_json(path)


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}


def test_damaged_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": ')
    with pytest.raises(UserError, match=f"{path} is damaged or not JSON"):
        read_json(path)


def weights() -> dict[str, torch.Tensor]:
    base = torch.arange(6.0)
    return {
        "weight": base.view(2, 3).t(),  # not contiguous
        "alias": base[:2],  # shares memory
        "scalar": torch.tensor(3, dtype=torch.int64),
        "mask": torch.tensor([True, False]),
        "half": torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
        "empty": torch.zeros(0, 4),
    }


def test_weights_come_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(path, weights(), {"kind": "binary", "note": "ä"})
    tensors, metadata = load_weights(path)
    assert metadata == {"kind": "binary", "note": "ä"}
    assert tensors.keys() == weights().keys()
    for name, tensor in weights().items():
        torch.testing.assert_close(tensors[name], tensor.detach(), rtol=0, atol=0)


def test_every_flipped_byte_of_a_weights_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(path, {"a": torch.tensor([1.0, 2.0])}, {"kind": "binary"})
    content = path.read_bytes()
    unnoticed = []
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        try:
            _, metadata = load_weights(path)
        except UserError:
            continue
        unnoticed.append(metadata)
    # A flip inside the name of the checksum makes the file look like one from another program.
    assert len(unnoticed) <= len("sha256")
    assert all(metadata["kind"] == "binary" and len(metadata) == 2 for metadata in unnoticed)


def test_truncated_weights_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(path, weights())
    content = path.read_bytes()
    for size in (0, 4, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match=f"{path} is damaged or not a safetensors file"):
            load_weights(path)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"cannot read {tmp_path}/none.safetensors"):
        load_weights(tmp_path / "none.safetensors")


def test_weights_of_another_program_have_no_checksum_and_load(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "w.safetensors")
    tensors, metadata = load_weights(tmp_path / "w.safetensors")
    assert tensors["a"].tolist() == [1.0, 1.0]
    assert metadata == {}
