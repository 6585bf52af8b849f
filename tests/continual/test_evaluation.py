"""Which test images each number of the accuracy matrix comes from."""

import pytest
import torch

from wheretolearn.config import to_dict
from wheretolearn.continual import training
from wheretolearn.continual.config import ContinualConfig
from wheretolearn.continual.mlp_lanes import MLPLanes
from wheretolearn.continual.problem import Problem
from wheretolearn.runs import checkpoint
from wheretolearn.runs.folder import RunFolder

pytestmark = pytest.mark.xdist_group("glyphs")

TASKS, BATCHES, FEW = 3, 6, 3  # batches of each task
SEEDS = (2, 7)
CONFIG = ContinualConfig(
    problem="rotations", tasks=TASKS, examples=60, classes=5, batch=10, width=12, learner="sgd", lr=0.1,
    glances=5, matrix_images=FEW, checkpoint_every=BATCHES,
)  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """By seed: what the run stored, and its accuracies recomputed, on all test images and on the first few."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [RunFolder.create(folder / str(seed), to_dict(CONFIG), seed, "continual") for seed in SEEDS]
    weights = {seed: [] for seed in SEEDS}

    def keep(run, batch, values):
        if batch > 1 and (batch - 1) % BATCHES == 0:  # the checkpoint was saved after the batch before
            weights[run.seed].append(checkpoint.load_latest(run).state["learner"]["weights"])

    whole = Problem.test_sets
    with pytest.MonkeyPatch.context() as patch:  # chunks of unequal length
        patch.setattr(Problem, "test_sets", lambda self, task, limit=None: whole(self, task, limit, chunk=7))
        training.train_together(runs, keep)
    problem = Problem(CONFIG, SEEDS)
    outcomes = {}
    for lane, run in enumerate(runs):
        run.close()
        weights[run.seed].append(checkpoint.load_latest(run).state["learner"]["weights"])
        model = CONFIG.build_model(problem.image_shape, problem.classes, run.seed)
        lanes = MLPLanes([model])
        networks = [
            {name: view[0] for name, view in lanes.views(own).items()}
            for own in (lanes.weights, *(flat.unsqueeze(0) for flat in weights[run.seed]))
        ]
        tests = [(x[lane], y[lane]) for x, y in (next(problem.test_sets(task)) for task in range(TASKS))]
        assert all(len(labels) > 4 * FEW for _, labels in tests)
        right = [
            [(torch.func.functional_call(model, own, (x,)).argmax(1) == y).double() for x, y in tests]
            for own in networks
        ]
        every, few = (
            torch.tensor([[found[:limit].mean() for found in row] for row in right], dtype=torch.float64)
            for limit in (None, FEW)
        )
        outcomes[run.seed] = training.result(run), every, few  # row 0: the untrained network
    return outcomes


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_result_depends_on_is_measured_on_all_images(measured, seed):
    found, every, few = measured[seed]
    matrix = torch.tensor(found["accuracy_matrix"], dtype=torch.float64)
    assert matrix.diagonal().tolist() == pytest.approx(every[1:].diagonal().tolist(), abs=1e-6)
    assert matrix[-1].tolist() == pytest.approx(every[-1].tolist(), abs=1e-6)
    assert matrix.diagonal().tolist() != pytest.approx(few[1:].diagonal().tolist(), abs=1e-3)
    assert matrix[-1].tolist() != pytest.approx(few[-1].tolist(), abs=1e-3)
    assert found["ra"] == pytest.approx(every[-1].mean().item(), abs=1e-6)
    assert found["bti"] == pytest.approx((every[-1] - every[1:].diagonal()).mean().item(), abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_rest_of_the_matrix_is_measured_on_the_first_few(measured, seed):
    found, every, few = measured[seed]
    assert found["untrained"] == pytest.approx(few[0].tolist(), abs=1e-6)
    places = [(row, task) for row in range(TASKS - 1) for task in range(TASKS) if row != task]
    stored = [found["accuracy_matrix"][row][task] for row, task in places]
    assert stored == pytest.approx([few[row + 1, task].item() for row, task in places], abs=1e-6)
    assert stored != pytest.approx([every[row + 1, task].item() for row, task in places], abs=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_forward_transfer_follows_from_what_is_stored(measured, seed):
    found, _, few = measured[seed]
    gains = [found["accuracy_matrix"][task - 1][task] - found["untrained"][task] for task in range(1, TASKS)]
    assert found["forward_transfer"] == pytest.approx(sum(gains) / len(gains), abs=1e-6)
    assert found["forward_transfer"] != pytest.approx(found["accuracy_matrix"][0][1] - found["untrained"][1], abs=1e-3)
    expected = [few[task, task].item() - few[0, task].item() for task in range(1, TASKS)]  # row 0 is before all tasks
    assert gains == pytest.approx(expected, abs=1e-6)
