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
