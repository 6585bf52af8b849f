"""Telling the user that memory, or files to open, ran out, in one line, whoever noticed it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from wheretolearn.errors import UserError

# PyTorch has a class of its own for some of a GPU's memory only. The last is for sizes that no number can hold.
_SIGNS = (
    *("can't allocate memory", "Cannot allocate memory", "DefaultCPUAllocator: not enough memory"),
    *("CUDA error: out of memory", "Storage size calculation overflowed"),
)


@contextmanager
def shortages_told() -> Iterator[None]:
    """What takes more memory or open files than there are ends in a UserError."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        text = str(error)
        if "Too many open files" in text:
            raise UserError(
                "too many files are open at once: start or resume fewer runs or workers at a time, or have the limit "
                "raised (`ulimit -n`)"
            ) from error
        told = any(sign in text for sign in _SIGNS)
        if not told and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise
        size = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
        asked = f" ({size[1]} were asked for)" if size else ""
        raise UserError(
            f"not enough memory{asked}: make smaller what takes it, such as --tasks, or, in a new run, width, "
            "tasks_per_step, validation_tasks, samples or memory"
        ) from error
