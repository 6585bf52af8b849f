import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from wheretolearn.config import to_dict
from wheretolearn.data.load import load_set
from wheretolearn.online.config import OnlineConfig
from wheretolearn.runs.folder import RunFolder

TINY: dict[str, Any] = {"width": 4, "steps": 24, "p": 0.8, "inner_steps": 1, "log_every": 6, "checkpoint_every": 8}

MakeRun = Callable[..., RunFolder]
Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Fills a folder once for all test processes: the others wait for the one that does."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base

    def make(name: str, fill: Callable[[Path], object]) -> Path:
        folder = shared / name
        with (shared / f"{name}.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not folder.exists():
                unfinished = shared / f"{name}.unfinished-{os.getpid()}"
                unfinished.mkdir()
                fill(unfinished)
                unfinished.rename(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def glyphs(once: Once) -> None:
    """Drawing them takes a while."""
    once("online-glyphs", lambda _: load_set("glyphs"))


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    """Create a run of a tiny stream of glyphs; settings change it."""
    with ExitStack() as runs:

        def make(name: str = "run", seed: int = 0, **settings: Any) -> RunFolder:
            config = OnlineConfig(**{**TINY, **settings})
            return runs.enter_context(RunFolder.create(tmp_path / name, to_dict(config), seed, "online"))

        yield make
