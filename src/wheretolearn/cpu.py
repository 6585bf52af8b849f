"""Settings of a process that make training on a CPU faster; the command line applies them at its start."""

import ctypes
import ctypes.util
import os
import sys

# From glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for the next allocation; False where the C library is another.

    By default it hands large blocks (activations) back to the system at once, and every step then faults them in
    again page by page. The price: the process keeps its peak memory until it ends.
    """
    if not sys.platform.startswith("linux") or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    try:
        library = ctypes.CDLL(ctypes.util.find_library("c"))
        return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST) and library.mallopt(_TRIM_THRESHOLD, _LARGEST))
    except (OSError, AttributeError):  # another C library
        return False
