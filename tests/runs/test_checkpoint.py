import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from wheretolearn.errors import MismatchError, UserError
from wheretolearn.runs import checkpoint
from wheretolearn.runs.checkpoint import (
    load_latest,
    model_signature,
    random_state,
    restore_random_state,
    save,
)
from wheretolearn.runs.folder import RunFolder
from wheretolearn.storage import check_shapes


def state(value: int) -> dict[str, Any]:
    return {"weights": {"a": torch.full((100,), float(value))}, "history": [value, None, "text", (1.5, True)]}


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.split(".")[0].removeprefix("step-")) for path in run.glob("checkpoints/*"))


def latest(run: Path) -> checkpoint.Checkpoint:
    found = load_latest(run)
    assert found is not None
    assert found.state["weights"]["a"].tolist() == [float(found.step)] * 100
    assert found.state["history"] == state(found.step)["history"]
    return found


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The kernel refuses to let files grow beyond `size`, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_nothing_saved_is_none(tmp_path: Path) -> None:
    assert load_latest(tmp_path) is None


def test_the_newest_of_the_last_two_is_loaded(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        save(tmp_path, state(step), step)
    assert steps(tmp_path) == [10, 11]
    found = latest(tmp_path)
    assert found.step == 11
    assert found.notes == ()


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    save(tmp_path, state(5), 5)
    save(tmp_path, state(2_000_000_000), 2_000_000_000)
    assert latest(tmp_path).step == 2_000_000_000


def test_a_run_folder_is_locked_by_saving(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", {}, 0, "fewshot").close()
    with RunFolder.open(tmp_path / "run") as first, RunFolder.open(tmp_path / "run") as second:
        save(first, state(1), 1)
        with pytest.raises(UserError, match="in use"):
            save(second, state(2), 2)
        assert latest(first.path).step == 1


def test_the_file_is_an_ordinary_weights_only_file(tmp_path: Path) -> None:
    path = save(tmp_path, state(3), 3)
    assert torch.load(path, weights_only=True)["history"] == state(3)["history"]


def test_model_optimizer_and_random_state_can_be_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": random_state()}
    save(tmp_path, whole, 1)
    found = load_latest(tmp_path)
    assert found is not None
    torch.testing.assert_close(found.state["model"]["0.weight"], model[0].weight.detach(), rtol=0, atol=0)
    other = torch.optim.Adam(model.parameters())
    other.load_state_dict(found.state["optimizer"])
    assert other.state[model[0].weight]["step"] == 1


@pytest.mark.parametrize(
    ("value", "name"),
    [(np.float64(1.0), "float64"), (np.zeros(2), "ndarray"), ({1, 2}, "set"), (Path("x"), "PosixPath")],
)
def test_what_could_not_be_loaded_is_refused_at_saving(tmp_path: Path, value: object, name: str) -> None:
    with pytest.raises(TypeError, match=rf"state\['a'\]\[1\] is a {name}"):
        save(tmp_path, {"a": [1, value]}, 1)
    assert load_latest(tmp_path) is None


@pytest.mark.parametrize("position", [0, 500, -1])
def test_a_flipped_byte_in_the_newest_falls_back_and_says_so(tmp_path: Path, position: int) -> None:
    save(tmp_path, state(1), 1)
    path = save(tmp_path, state(2), 2)
    flip(path, position)
    found = latest(tmp_path)
    assert found.step == 1
    assert found.notes == (f"the checkpoint {path} is damaged (its content does not match its checksum); using step 1",)


@pytest.mark.parametrize("size", [0, 1, 600])
def test_a_truncated_newest_falls_back(tmp_path: Path, size: int) -> None:
    save(tmp_path, state(1), 1)
    path = save(tmp_path, state(2), 2)
    os.truncate(path, size)
    assert latest(tmp_path).step == 1


def test_all_damaged_is_an_error_that_names_the_files(tmp_path: Path) -> None:
    paths = [save(tmp_path, state(step), step) for step in (1, 2)]
    for path in paths:
        flip(path, 100)
    with pytest.raises(UserError) as caught:
        load_latest(tmp_path)
    assert all(str(path) in str(caught.value) for path in paths)
    assert "No other is left: start again" in str(caught.value)


def test_a_damaged_early_one_is_no_reason_to_start_again(tmp_path: Path) -> None:
    flip(save(tmp_path, state(1), 1), 100)
    save(tmp_path, state(2), 2)
    with pytest.raises(UserError, match=r"No other is of step 1 or before\.$"):
        load_latest(tmp_path, at_most=1)
    assert latest(tmp_path).step == 2


def test_a_damaged_checkpoint_is_not_kept_over_a_good_one(tmp_path: Path) -> None:
    save(tmp_path, state(10), 10)
    flip(save(tmp_path, state(20), 20), 100)
    assert latest(tmp_path).step == 10
    save(tmp_path, state(15), 15)
    assert steps(tmp_path) == [10, 15]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, state(10), 10)
    save(tmp_path, {"other": 1}, 20)
    save(tmp_path, state(20), 20)
    assert steps(tmp_path) == [10, 20]
    assert latest(tmp_path).step == 20


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_crash_in_the_middle_of_saving_keeps_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    save(tmp_path, state(1), 1)
    save(tmp_path, state(2), 2)
    before = steps(tmp_path)

    def crash(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, function, crash)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, state(3), 3)
    assert steps(tmp_path) == before
    assert latest(tmp_path).step == 2


def test_a_full_disk_is_reported_and_harms_nothing(tmp_path: Path) -> None:
    save(tmp_path, state(1), 1)
    big = {"weights": torch.zeros(1_000_000)}
    with file_size_limit(100_000), pytest.raises(UserError, match=r"cannot write .*step-000000002"):
        save(tmp_path, big, 2)
    assert steps(tmp_path) == [1]
    assert latest(tmp_path).step == 1
    save(tmp_path, state(3), 3)
    assert latest(tmp_path).step == 3


def test_no_space_at_sync_is_reported_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        save(tmp_path, state(1), 1)
    assert steps(tmp_path) == []


SAVE_FOREVER = """
import itertools, sys, torch
from wheretolearn.runs.checkpoint import load_latest, save

found = load_latest(sys.argv[1])
for step in itertools.count(found.step + 1 if found else 1):
    save(sys.argv[1], {"a": torch.full((50_000,), float(step)), "step": step}, step)
    print(step, flush=True)
"""


def test_killed_while_saving_the_last_reported_checkpoint_loads(tmp_path: Path) -> None:
    reached = 0
    for round_number in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(3 + round_number):
                reached = int(process.stdout.readline())
            time.sleep(0.002 * round_number)  # lands the kill at different points of a save
            process.send_signal(signal.SIGKILL)
            reached = max([reached, *map(int, process.stdout.read().split())])
        found = load_latest(tmp_path)
        assert found is not None
        assert found.notes == ()
        assert found.step in (reached, reached + 1)
        assert found.state["step"] == found.step
        assert bool((found.state["a"] == found.step).all())
    # A file left half written by a kill goes with the next save.
    (tmp_path / "checkpoints" / ".step.1.tmp").write_bytes(b"half")
    save(tmp_path, {"a": 1}, found.step + 1)
    assert not list((tmp_path / "checkpoints").glob(".*"))


def draws() -> list[float]:
    return [
        random.random(),
        random.gauss(),
        float(np.random.normal()),
        float(np.random.random()),
        float(torch.randn(())),
    ]


def test_restored_random_state_repeats_the_draws(tmp_path: Path) -> None:
    draws()  # an odd number of normals: each generator now holds a spare one
    save(tmp_path, random_state(), 1)
    expected = [draws(), draws()]
    found = load_latest(tmp_path)
    assert found is not None
    restore_random_state(found.state)
    assert [draws(), draws()] == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_restored_random_state_repeats_the_draws_on_cuda() -> None:
    torch.randn((), device="cuda")
    stored = random_state()
    expected = torch.randn(3, device="cuda").tolist()
    restore_random_state(stored)
    assert torch.randn(3, device="cuda").tolist() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_random_state_from_a_cuda_machine_restores_the_rest_here() -> None:
    stored = random_state() | {"cuda": [torch.zeros(16, dtype=torch.uint8)]}
    expected = draws()
    restore_random_state(stored)
    assert draws() == expected


def test_signature_of_the_same_model_passes() -> None:
    model = nn.Linear(2, 3)
    assert model_signature(model) == {"weight": [3, 2], "bias": [3]}
    check_shapes(model_signature(model), model_signature(nn.Linear(2, 3)), "run")


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"weight": [4, 2], "bias": [4]}, "weight is [4, 2] in it but [3, 2] in the model"),
        ({"weight": [3, 2]}, "bias [3] of the model is missing in it"),
        ({"weight": [3, 2], "bias": [3], "scale": [1]}, "its scale [1] is not in the model"),
    ],
)
def test_checkpoint_of_another_model_names_the_first_difference(stored: dict[str, list[int]], expected: str) -> None:
    with pytest.raises(MismatchError) as caught:
        check_shapes(stored, model_signature(nn.Linear(2, 3)), Path("run/step-1.pt"))
    assert str(caught.value).startswith(f"run/step-1.pt belongs to another model: {expected}.")
