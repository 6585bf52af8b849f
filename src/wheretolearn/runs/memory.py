"""Telling the user that memory ran out, in one line, whoever noticed it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from wheretolearn.errors import UserError

# PyTorch has a class of its own for a GPU's memory only; the second is for sizes that no number of bytes can hold.
_ON_A_CPU = ("can't allocate memory", "Storage size calculation overflowed")


@contextmanager
def memory_errors_told() -> Iterator[None]:
    """What takes more memory than there is ends in a UserError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        told = any(sign in text for sign in _ON_A_CPU)
        if not told and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise
        size = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
        asked = f" ({size[1]} were asked for)" if size else ""
        raise UserError(
            f"not enough memory{asked}: make smaller what takes it, such as width, tasks_per_step, validation_tasks, "
            "samples, memory or --tasks"
        ) from error
