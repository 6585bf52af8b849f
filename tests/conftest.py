import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
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

# Loading the command takes longer than most commands take, so it is loaded once, and each command is a fork of that.
COMMANDS = """
import gc, json, os, runpy, sys
import numpy
import wheretolearn.cli  # all that `python -m wheretolearn` has loaded when it begins

gc.freeze()  # a fork shall not look through, and so copy, all that is loaded

for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for number, path in enumerate([os.devnull, order["stdout"], order["stderr"]]):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["environ"])
        numpy.random.seed()  # else all commands would draw alike
        sys.argv[1:] = order["arguments"]
        sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
runpy.run_module("wheretolearn", run_name="__main__", alter_sys=True)
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


@pytest.fixture(scope="session")
def run_command(one_thread_and_own_data_folder: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunCommand]:
    """The real command in a real process, except that Python has started before: what it reads then must not matter."""

    def run(*arguments: object, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp("command")  # of its own: what another command left running writes elsewhere
        out, err = folder / "stdout", folder / "stderr"
        order = {
            "arguments": list(map(str, arguments)),
            "cwd": str(cwd or Path.cwd()),
            # A width that wraps no message, and no colours.
            "environ": {**os.environ, "COLUMNS": "250", "NO_COLOR": "1", **environ},
            "stdout": str(out),
            "stderr": str(err),
        }
        commands.stdin.write(json.dumps(order) + "\n")
        commands.stdin.flush()
        return subprocess.CompletedProcess(
            order["arguments"], int(commands.stdout.readline()), out.read_text(), err.read_text()
        )

    with subprocess.Popen(
        [sys.executable, "-c", COMMANDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as commands:
        yield run


@pytest.fixture(scope="session")
def likeness() -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], float]:
    """How alike two lists of tensors are: the largest correlation of their entries in a row, at any shift."""

    def spectrum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        row = torch.cat([((t - t.mean()) / t.std()).flatten().double() for t in tensors])
        return torch.fft.rfft(row / row.norm())

    def measure(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> float:
        with torch.no_grad():
            return float(torch.fft.irfft(spectrum(these) * spectrum(those).conj()).abs().max())

    return measure


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
