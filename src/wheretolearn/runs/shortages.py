"""Telling the user in one line that memory, files to open or room for a name ran out, whoever noticed it."""

import errno
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
_TOO_MANY_FILES = "Too many open files"
_FEWER_FILES = (
    "too many files are open at once: start or resume fewer runs or workers at a time, or have the limit raised "
    "(`ulimit -n`)"
)


@contextmanager
def shortages_told() -> Iterator[None]:
    """What takes more memory or open files than there are, or too long a name, ends in a UserError."""
    try:
        yield
    except UserError as error:  # made of an error of the system, of which it has the name only
        if _TOO_MANY_FILES not in str(error) or _FEWER_FILES in str(error):
            raise
        raise type(error)(f"{error}\n{_FEWER_FILES}") from error
    except (MemoryError, RuntimeError, OSError) as error:
        text = str(error)
        if _TOO_MANY_FILES in text:
            raise UserError(_FEWER_FILES) from error
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            raise UserError(f"the path {error.filename} is too long: shorten its names") from error
        told = any(sign in text for sign in _SIGNS)
        if not told and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise
        size = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
        asked = f" ({size[1]} were asked for)" if size else ""
        raise UserError(
            f"not enough memory{asked}: make smaller what takes it, such as --tasks, or, in a new run, width, "
            "tasks_per_step, validation_tasks, samples or memory"
        ) from error
