import signal
import subprocess
import sys
import time

import pytest

from wheretolearn import demo
from wheretolearn.data.load import load_set
from wheretolearn.errors import UserError
from wheretolearn.report.comparison import comparison_page

pytestmark = pytest.mark.xdist_group("glyphs")

TINY = {"outer_steps": 4, "width": 4, "validate_every": 2, "validation_tasks": 2, "log_every": 1, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    load_set("glyphs")
    runs = demo.open_runs(folder, settings=TINY)
    updates = []
    demo.train_side_by_side(runs, lambda method, step, values: updates.append((method, step)), test_tasks=20)
    return folder, runs, updates


def test_both_methods_are_trained_on_the_same_seed_and_followed(finished):
    _, runs, updates = finished
    assert set(updates) >= {(method, step) for method in demo.METHODS for step in (1, 2, 3, 4)}
    configs = [run.config for run in runs.values()]
    differing = {key for key in configs[0] if configs[0][key] != configs[1][key]}
    assert differing == {"mask"}
    assert len({run.seed for run in runs.values()}) == 1


def test_results_hold_accuracy_on_characters_and_scripts(finished):
    _, runs, _ = finished
    sparse, dense = demo.results(runs)
    assert set(sparse.accuracy) == {"held-out characters", "held-out scripts"}
    assert 0 < sparse.sparsity.overall < 1
    assert dense.sparsity.overall == 0
    for mean, half_width in sparse.accuracy.values():
        assert 0 < mean < 1
        assert half_width > 0


def test_the_page_shows_both(finished):
    _, runs, _ = finished
    page = comparison_page("Title", "About", demo.results(runs), demo.facts(runs))
    assert "sparse-MAML" in page
    assert "held-out scripts" in page


def test_a_finished_demo_does_not_train_again(finished):
    folder, _, _ = finished
    runs = demo.open_runs(folder, settings=TINY)
    updates = []
    demo.train_side_by_side(runs, lambda *update: updates.append(update))
    assert updates == []


def test_a_folder_with_other_settings_is_refused(finished):
    with pytest.raises(UserError, match="other settings"):
        demo.open_runs(finished[0], settings={**TINY, "width": 5})


def test_a_failing_method_stops_the_demo_with_its_message(tmp_path):
    runs = demo.open_runs(tmp_path, settings={**TINY, "inner_lr": 1e30})
    with pytest.raises(UserError, match=r"failed \(exit code 3\).*not finite"):
        demo.train_side_by_side(runs, lambda *update: None)


def test_a_signal_stops_both_and_the_same_command_goes_on(tmp_path):
    script = (
        "import sys; from pathlib import Path; from wheretolearn import demo\n"
        f"runs = demo.open_runs(Path(sys.argv[1]), settings={dict(TINY, outer_steps=60, checkpoint_every=50)!r})\n"
        "demo.train_side_by_side(runs, lambda method, step, values: print(method, step, flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    seen = set()
    while len(seen) < 2:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        seen.add(line.split()[0])
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert "Stopped" in errors
    runs = demo.open_runs(tmp_path, settings=dict(TINY, outer_steps=60, checkpoint_every=50))
    deadline = time.monotonic() + 60
    while any(not list((run.path / "checkpoints").glob("*.pt")) for run in runs.values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    last = {method: run.metrics()[-1]["step"] for method, run in runs.items()}
    assert all(0 < step < 60 for step in last.values())
    updates = []
    demo.train_side_by_side(runs, lambda method, step, values: updates.append((method, step)), test_tasks=2)
    for method in runs:
        assert (method, 60) in updates
