"""Telling the user that memory ran out, in one line, whoever noticed it."""

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
def memory_errors_told() -> Iterator[None]:
    """What takes more memory than there is ends in a UserError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        told = any(sign in text for sign in _SIGNS)
        if not told and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise
        size = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
        asked = f" ({size[1]} were asked for)" if size else ""
        raise UserError(
            f"not enough memory{asked}: make smaller what takes it, such as width, tasks_per_step, validation_tasks, "
            "samples, memory or --tasks"
        ) from error
