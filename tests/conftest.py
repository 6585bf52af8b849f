import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in Python; read when they are first imported

REPOSITORY = Path(__file__).resolve().parent.parent

RunCommand = Callable[..., "subprocess.CompletedProcess[str]"]
HoldAt = Callable[..., dict[str, str]]

# Python runs a module of this name when it starts, in worker processes too.
SITECUSTOMIZE = """
import os, select, signal
from wheretolearn.runs.folder import RunFolder

heard, tell = os.pipe()  # readable once a signal came
os.set_blocking(tell, False)
signal.set_wakeup_fd(tell)
log = RunFolder.log


def log_and_wait(run, step, **values):
    log(run, step, **values)
    if step >= int(os.environ["HOLD_AT"]) and run.path.name.startswith(os.environ["HOLD_RUNS"]):
        select.select([heard], [], [])


RunFolder.log = log_and_wait
"""


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real image files, for tests that read them."""
    chosen = os.environ.get("WHERETOLEARN_TEST_DATA")
    folder = Path(chosen) if chosen else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no real image data: set WHERETOLEARN_TEST_DATA to the folder that holds it")
    return folder


@pytest.fixture(autouse=True, scope="session")
def one_thread_and_own_data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Small networks are fastest on one thread; and no test may touch the user's own image sets."""
    torch.set_num_threads(1)
    base = tmp_path_factory.getbasetemp()
    # Parallel test processes share one folder, so that the glyphs are drawn once.
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHERETOLEARN_DATA", str(shared / "image-sets"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture
def run_command() -> RunCommand:
    """The real command in a real process."""

    def run(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "wheretolearn", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            # A width that wraps no message, and no colours.
            env={**os.environ, "COLUMNS": "250", "NO_COLOR": "1", **environ},
        )

    return run


@pytest.fixture(scope="session")
def hold_at(tmp_path_factory: pytest.TempPathFactory) -> HoldAt:
    """An environment in which runs wait for a signal once they have logged a step.

    However slow or fast a machine is, the signal or kill of a test then finds them at that step: its record is
    written, its checkpoint is not. Without it a run may end before the test has seen that it began.
    """
    folder = tmp_path_factory.mktemp("hold")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)

    def environ(step: int, runs: str = "") -> dict[str, str]:
        """``runs``: how the names of those begin that wait; by default all do."""
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": path, "HOLD_AT": str(step), "HOLD_RUNS": runs}

    return environ
