import shutil
import signal
import subprocess
import sys
import time

import pytest

from wheretolearn import demo
from wheretolearn.data.load import load_set
from wheretolearn.errors import NonFiniteError, Stopped, UserError
from wheretolearn.report.comparison import comparison_page
from wheretolearn.runs import checkpoint, environment
from wheretolearn.runs.workers import Teller

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
    assert {run.threads for run in runs.values()} == {max(1, environment.cores() // 2)}


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


def test_another_seed_is_refused_and_told_what_to_do(finished):
    with pytest.raises(UserError, match=r"seed 0, not 3: .*--fresh"):
        demo.open_runs(finished[0], seed=3, settings=TINY)


def test_forgetting_a_demo_deletes_its_runs_and_nothing_else(tmp_path):
    demo.open_runs(tmp_path, settings=TINY)
    (tmp_path / "notes.txt").write_text("mine")
    demo.forget(tmp_path, settings=TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    demo.forget(tmp_path, settings=TINY)  # nothing left to forget


def test_forgetting_a_demo_spares_what_is_not_its_own(tmp_path):
    demo.open_runs(tmp_path, settings=TINY)
    shutil.rmtree(tmp_path / "maml")
    (tmp_path / "maml").mkdir()
    (tmp_path / "maml" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"maml is not a run of this demo"):
        demo.forget(tmp_path, settings=TINY)
    assert (tmp_path / "maml" / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "sparse-maml" / "run.json").exists()


def test_forgetting_a_demo_spares_other_runs(tmp_path):
    demo.open_runs(tmp_path, settings={**TINY, "width": 5})
    with pytest.raises(UserError, match="is not a run of this demo"):
        demo.forget(tmp_path, settings=TINY)
    assert (tmp_path / "maml" / "run.json").exists()


def test_a_demo_that_is_training_is_not_forgotten(tmp_path):
    runs = demo.open_runs(tmp_path, settings=TINY)
    with runs["sparse-MAML"] as run:
        run.lock()
        with pytest.raises(UserError, match="is in use"):
            demo.forget(tmp_path, settings=TINY)
    assert (tmp_path / "sparse-maml" / "run.json").exists()


def test_a_failing_method_stops_the_demo_with_its_message(tmp_path):
    runs = demo.open_runs(tmp_path, settings={**TINY, "inner_lr": 1e30})
    with pytest.raises(NonFiniteError, match=r"training (sparse-)?MAML failed: the loss is not finite"):
        demo.train_side_by_side(runs, lambda *update: None)


def start(folder, settings, step=1, test_tasks=demo.TEST_TASKS, environ=None):
    """A demo in a process of its own, once both methods have reached a step."""
    script = (
        "import sys; from pathlib import Path; from wheretolearn import demo\n"
        f"runs = demo.open_runs(Path(sys.argv[1]), settings={settings!r})\n"
        "demo.train_side_by_side(runs, lambda method, step, values: print(method, step, flush=True),"
        f" test_tasks={test_tasks}, on_stop=lambda: sys.stderr.write('on_stop was called'))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen = set()
    while len(seen) < 2:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        method, reached = line.split()
        if int(reached) >= step:
            seen.add(method)
    return process


def wait_for_lock(run):
    """Until the worker that writes to a run has ended."""
    deadline = time.monotonic() + 300
    while True:
        try:
            return run.lock()
        except UserError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_signal_while_testing_is_no_failure(tmp_path):
    process = start(tmp_path, TINY, step=4, test_tasks=10**5)  # it would test for minutes
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert "Stopped: stopped and saved; go on with" in errors


def test_a_signal_with_the_last_step_keeps_it_from_testing(tmp_path):
    class SignalAtLastStep(Teller):
        def tell_step(self, step, values):
            if step == TINY["outer_steps"]:
                signal.raise_signal(signal.SIGTERM)

    run = demo.open_runs(tmp_path, settings=TINY)["MAML"]
    with pytest.raises(Stopped, match="stopped before testing"):
        demo.work(run.path, 2, SignalAtLastStep())
    assert checkpoint.load_latest(run).step == TINY["outer_steps"]
    assert not demo.is_finished(run)
    demo.work(run.path, 2, Teller())
    assert demo.is_finished(run)


def test_a_killed_demo_takes_its_workers_along(tmp_path):
    # It would train for hours, and one method may be far ahead of the other.
    settings = dict(TINY, outer_steps=10**6, validate_every=10**6, checkpoint_every=10**6)
    process = start(tmp_path, settings)
    process.kill()
    process.communicate()
    for run in demo.open_runs(tmp_path, settings=settings).values():
        with run:
            wait_for_lock(run)
            assert 0 < checkpoint.load_latest(run).step < 10**6


def test_a_signal_stops_both_and_the_same_command_goes_on(tmp_path, hold_at):
    process = start(tmp_path, TINY, environ=hold_at(2))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert "Stopped" in errors
    assert f"go on with `wheretolearn demo --folder {tmp_path} --seed 0`" in errors
    assert "on_stop was called" in errors
    runs = demo.open_runs(tmp_path, settings=TINY)
    for run in runs.values():
        assert checkpoint.load_latest(run).step == run.metrics()[-1]["step"] in (1, 2)
    updates = []
    demo.train_side_by_side(runs, lambda method, step, values: updates.append((method, step)), test_tasks=2)
    for method in runs:
        assert (method, 4) in updates
