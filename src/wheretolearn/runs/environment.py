"""Where a run happened: versions, hardware, and the commit of the code."""

import os
import platform
import subprocess
from pathlib import Path

import numpy as np
import torch

from wheretolearn.version import __version__

_PACKAGE = Path(__file__).parents[1]


def versions() -> dict[str, str]:
    """Versions of everything that can change a number."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "wheretolearn": __version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def hardware() -> str:
    """One line, such as `2 x NVIDIA H200; AMD EPYC 9654, 16 cores`."""
    count = cores()
    parts = [f"{_cpu_model()}, {count} core{'s' if count > 1 else ''}"]
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        name = torch.cuda.get_device_name(0)
        parts.insert(0, f"{count} x {name}" if count > 1 else name)
    return "; ".join(parts)


def cores() -> int:
    """The cores this process may use, which a scheduler or container can make fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def git_commit(folder: Path = _PACKAGE) -> str | None:
    """The commit of the code in `folder`, with "+changes" when files there differ from it; None outside git.

    The variable WHERETOLEARN_COMMIT answers instead where the code was copied without its history.
    """
    if given := os.environ.get("WHERETOLEARN_COMMIT"):
        return given
    # An installed package can lie inside somebody else's checkout: only tracked files count as ours.
    if not _git(folder, "ls-files", "--", "."):
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return commit + ("+changes" if _git(folder, "status", "--porcelain", "--", ".") else "")


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown CPU"
