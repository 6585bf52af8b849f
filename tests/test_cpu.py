"""The allocator's settings, in a process of their own: they cannot be undone."""

import subprocess
import sys

import pytest

from wheretolearn.cpu import keep_freed_memory

PROGRAM = """
import resource, sys, torch
from wheretolearn.cpu import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def step():  # as a network does: activations of several sizes, all freed at the end
    return sum(float(t[0]) for t in [torch.ones(2**24 // k) for k in (1, 1, 4, 4, 16, 16)])
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode):
    result = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    return int(result.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_freed_memory_is_kept_for_the_next_allocation():
    assert page_faults("keep") < 0.2 * page_faults("default")


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
