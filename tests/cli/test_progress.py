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


LONG = [f"table1.sparse-maml.shot5-seed{seed}" for seed in (11, 12)]


@pytest.mark.parametrize("width", [80, 120])
def test_long_names_keep_the_end_that_tells_them_apart(monkeypatch, width):
    file = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", lambda **_: Console(file=file, width=width, force_terminal=True, color_system=None)
    )
    with progress.TrainingBars(dict.fromkeys(LONG, 2500)) as bars:
        for name in LONG:
            bars.update(name, 190, VALUES)
    assert "shot5-seed11" in file.getvalue()
    assert "shot5-seed12" in file.getvalue()
    assert "190/2500" in file.getvalue()


def test_a_note_is_shown_once(capsys):
    with progress.TrainingBars({"run": 10}) as bars:
        bars.note("[slow] engine")
        bars.note("[slow] engine")
    assert capsys.readouterr().err == "note: [slow] engine\n"


def test_off_a_terminal_each_run_has_a_line_per_validation(capsys):
    with progress.TrainingBars({"one": 10, "two": 20}) as bars:
        bars.update("one", 1, {"loss": 2.0})
        bars.update("two", 5, {"validation_accuracy": 0.5})
    assert re.fullmatch(r"two: step 5 of 20  validation 50\.0%  \(\d+ s\)\n", capsys.readouterr().err)


def test_off_a_terminal_a_run_that_is_not_validated_is_heard_of_too(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.TrainingBars({"one": 10}) as bars:
        for step in range(1, 10):
            now += 0.3 * progress.SILENCE
            bars.update("one", step, {"loss": 2.0})
    assert re.findall(r"step (\d+) of 10  loss 2\.000", capsys.readouterr().err) == ["4", "8"]


def test_the_rate_of_a_resumed_run_does_not_count_the_steps_before(monkeypatch):
    monkeypatch.setattr(
        progress, "Console", lambda **_: Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    )
    with progress.TrainingBars({"run": 2000}) as bars:
        bars.update("run", 1000, {})
        bars.update("run", 1001, {})
        task = bars._bar.tasks[0]
        assert task.completed == 1001
        assert sum(sample.completed for sample in task._progress) == 1
