import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real image files, for tests that read them."""
    chosen = os.environ.get("WHERETOLEARN_TEST_DATA")
    folder = Path(chosen) if chosen else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no real image data: set WHERETOLEARN_TEST_DATA to the folder that holds it")
    return folder
