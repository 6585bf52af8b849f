"""Settings of a process for training on a CPU: memory, which the command line sets at its start, and threads."""

import ctypes
import ctypes.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # from glibc's malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for the next allocation; False where the C library is another.

    By default it maps each large block (an activation) anew and hands it back when freed, so that every step has the
    system clear it again page by page. A threshold cannot stop this beyond 32 MB; forbidding such maps can. The price:
    the process keeps up to 2 GB of freed memory until it ends.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        library = ctypes.CDLL(ctypes.util.find_library("c"))
        return bool(library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, _LARGEST))
    except (OSError, AttributeError):  # another C library
        return False


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Have PyTorch use so many threads, on which the last digits of its sums depend; None: as many as it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
