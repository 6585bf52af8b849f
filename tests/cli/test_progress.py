import io
import os
import re

import pytest
from rich.console import Console

from wheretolearn.cli import progress

VALUES = {"loss": 1.234, "validation_accuracy": 0.555, "sparsity": 0.333}


def screen(monkeypatch, width):
    """The lines that two bars show on a terminal of this width."""
    file = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", lambda **_: Console(file=file, width=width, force_terminal=True, color_system=None)
    )
    with progress.TrainingBars({"sparse-MAML": 2500, "MAML": 2500}) as bars:
        for name in ("sparse-MAML", "MAML"):
            bars.update(name, 190, VALUES)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    return [line.strip() for line in re.split(r"[\r\n]+", plain) if "MAML" in line][-2:]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_count_and_time_are_whole_on_any_terminal(monkeypatch, width):
    for line in screen(monkeypatch, width):
        assert re.search(r"190/2500 +.*(-|\d):(--|\d\d):(--|\d\d) ", line), line
        assert len(line) <= width


def test_accuracy_and_sparsity_fit_into_80_columns(monkeypatch):
    for line in screen(monkeypatch, 80):
        assert "validation 55.5%  sparsity 33.3%" in line


def test_a_stop_is_announced_on_standard_error(capfd):
    progress.announce_stop()
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "press Ctrl-C again to stop at once" in captured.err


def test_a_stop_is_announced_even_where_standard_error_is_closed(monkeypatch):
    def closed(*_):
        raise OSError

    monkeypatch.setattr(os, "write", closed)
    progress.announce_stop()
