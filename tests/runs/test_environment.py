import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from wheretolearn.runs.environment import git_commit, hardware, versions
from wheretolearn.version import __version__


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a package in it, and its commit."""
    monkeypatch.delenv("WHERETOLEARN_COMMIT", raising=False)
    package = tmp_path / "src"
    package.mkdir()
    (package / "code.py").write_text("a = 1\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def test_versions_are_those_in_use() -> None:
    found = versions()
    assert found["torch"] == torch.__version__
    assert found["numpy"] == np.__version__
    assert found["wheretolearn"] == __version__


def test_hardware_names_the_cores_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    assert f", {len(allowed)} core" in hardware()
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert hardware().endswith(", 1 core")
    finally:
        os.sched_setaffinity(0, allowed)


def test_hardware_names_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Fast GPU")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert hardware().startswith("Fast GPU; ")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert hardware().startswith("2 x Fast GPU; ")


def test_commit_of_a_clean_checkout(checkout: Path) -> None:
    assert git_commit(checkout / "src") == git(checkout, "rev-parse", "HEAD")


@pytest.mark.parametrize("name", ["code.py", "new.py"])
def test_changed_or_new_code_is_marked(checkout: Path, name: str) -> None:
    (checkout / "src" / name).write_text("a = 2\n")
    assert git_commit(checkout / "src") == git(checkout, "rev-parse", "HEAD") + "+changes"


def test_changes_outside_the_code_are_not_marked(checkout: Path) -> None:
    (checkout / "results.json").write_text("{}")
    assert git_commit(checkout / "src") == git(checkout, "rev-parse", "HEAD")


def test_a_package_installed_inside_another_checkout_has_no_commit(checkout: Path) -> None:
    installed = checkout / "venv"
    installed.mkdir()
    (installed / "code.py").write_text("")
    assert git_commit(installed) is None


def test_outside_a_checkout_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHERETOLEARN_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit(tmp_path) is None


def test_without_git_there_is_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_commit(checkout / "src") is None


def test_the_commit_can_be_given(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERETOLEARN_COMMIT", "abc123")
    assert git_commit(checkout / "src") == "abc123"
