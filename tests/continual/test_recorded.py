import pytest
import torch

from wheretolearn.continual.cifar_lanes import CifarLanes
from wheretolearn.continual.lanes import ModuleLanes
from wheretolearn.continual.learners.er import ExperienceReplay
from wheretolearn.continual.learners.la_maml import LaMAML
from wheretolearn.continual.learners.mer import MER
from wheretolearn.continual.mlp_lanes import MLPLanes
from wheretolearn.continual.recorded import Recorded
from wheretolearn.models import build

SIDE = 9
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def learner(kind, device):
    if kind.endswith("convolutional"):
        models = [build("cifar_net", ways=4, width=5, hidden=6, size=SIDE, seed=seed) for seed in (0, 1)]
    else:
        models = [build("mlp", sizes=(3 * SIDE**2, 6, 4), seed=seed) for seed in (0, 1)]
    lanes = {"convolutional": CifarLanes, "modules": ModuleLanes}.get(kind.split()[-1], MLPLanes)
    network = lanes([model.double().to(device) for model in models])
    seeds = torch.tensor([3, 4], device=device)
    if kind.startswith("la-maml"):
        return LaMAML(network, seeds, rule="binary", alpha=0.1, mask_lr=0.5, memory=6, replay_batch=3, glances=2)
    if kind == "mer":
        return MER(network, seeds, lr=0.1, memory=6, replay_batch=3)
    return ExperienceReplay(network, seeds, lr=0.1, memory=6, replay_batch=3, glances=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind", ["la-maml", "er", "mer", "la-maml of modules", "er of modules", "la-maml convolutional", "er convolutional"]
)
def test_a_recorded_step_learns_what_the_plain_one_learns(kind, device):
    plain, fast = learner(kind, device), learner(kind, device)
    recorded = Recorded(fast)
    generator = torch.Generator().manual_seed(0)
    for number in range(8):
        x = torch.rand(2, 5, 3, SIDE, SIDE, dtype=torch.float64, generator=generator).to(device)
        y = torch.randint(0, 4, (2, 5), generator=generator).to(device)
        plain.observe(x, y, fresh=number < 6)
        recorded.observe(x, y, task=0, fresh=number < 6)
    assert fast.looks == plain.looks
    for name, tensor in plain.state().items():
        torch.testing.assert_close(fast.state()[name], tensor, rtol=1e-9, atol=1e-11)
