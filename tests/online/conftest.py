from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from wheretolearn.config import to_dict
from wheretolearn.online.config import OnlineConfig
from wheretolearn.runs.folder import RunFolder

TINY: dict[str, Any] = {"width": 4, "steps": 24, "p": 0.8, "inner_steps": 1, "log_every": 6, "checkpoint_every": 8}

MakeRun = Callable[..., RunFolder]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    """Create a run of a tiny stream of glyphs; settings change it."""
    with ExitStack() as runs:

        def make(name: str = "run", seed: int = 0, **settings: Any) -> RunFolder:
            config = OnlineConfig(**{**TINY, **settings})
            return runs.enter_context(RunFolder.create(tmp_path / name, to_dict(config), seed, "online"))

        yield make
