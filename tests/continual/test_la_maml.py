"""La-MAML's iterations against straightforward transcriptions in float64, with autograd."""

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from wheretolearn.continual.lanes import ModuleLanes
from wheretolearn.continual.learners.la_maml import LaMAML
from wheretolearn.continual.mlp_lanes import MLPLanes
from wheretolearn.models import build

SIZES, BATCH, REPLAY = (12, 6, 5, 4), 5, 3
ALPHA, MASK_LR = 0.4, 0.9


class StraightThroughStep(torch.autograd.Function):
    """1[m >= 0], whose gradient is passed on as if it were ``scale * m``."""

    @staticmethod
    def forward(context, m, scale):
        context.scale = scale
        return (m >= 0).to(m.dtype)

    @staticmethod
    def backward(context, gradient):
        return gradient * context.scale, None


class StraightThroughRelu(torch.autograd.Function):
    @staticmethod
    def forward(context, m):
        return m.clamp(min=0)

    @staticmethod
    def backward(context, gradient):
        return gradient


RATES = {
    "dying-relu": torch.relu,
    "relu": StraightThroughRelu.apply,
    "binary": lambda m: ALPHA * StraightThroughStep.apply(m, 0.5),
}


def transcription(model, theta, raw, rule, x, y, batch, meta_loss, clip):
    """One iteration on one network: inner steps, meta-loss, step of the mask, step of the weights."""
    theta = {name: t.clone().requires_grad_() for name, t in theta.items()}
    raw = {name: t.clone().requires_grad_() for name, t in raw.items()}
    phi, losses = dict(theta), []
    for k in range(batch):
        loss = F.cross_entropy(functional_call(model, phi, (x[k : k + 1],)), y[k : k + 1])
        gradients = torch.autograd.grad(loss, list(phi.values()), retain_graph=True)
        phi = {
            name: p - RATES[rule](raw[name]) * g.detach() for (name, p), g in zip(phi.items(), gradients, strict=True)
        }
        losses.append(F.cross_entropy(functional_call(model, phi, (x,)), y))
    meta = torch.stack(losses).mean() if meta_loss == "every-step" else losses[-1]
    gradients = torch.autograd.grad(meta, [*theta.values(), *raw.values()])
    to_theta, to_raw = gradients[: len(theta)], gradients[len(theta) :]

    def shortened(parts):
        norm = torch.cat([p.flatten() for p in parts]).norm()
        return [p * min(1.0, clip / (norm.item() + 1e-6)) for p in parts]

    new_raw = {name: m.detach() - MASK_LR * g for (name, m), g in zip(raw.items(), shortened(to_raw), strict=True)}
    new_theta = {
        name: t.detach() - RATES[rule](new_raw[name]) * g
        for (name, t), g in zip(theta.items(), shortened(to_theta), strict=True)
    }
    return new_theta, new_raw


class Recording(LaMAML):
    """Keeps what each iteration saw."""

    def learn(self, seen, task):
        self.seen.append(
            (
                seen,
                {name: v.clone() for name, v in self.network.views(self.weights).items()},
                {name: v.clone() for name, v in self.network.views(self.raw).items()},
            )
        )
        super().learn(seen, task)


@pytest.mark.parametrize("kind", [ModuleLanes, MLPLanes])
@pytest.mark.parametrize("meta_loss", ["every-step", "final"])
@pytest.mark.parametrize("rule", RATES)
def test_iterations_equal_the_transcription(rule, meta_loss, kind):
    models = [build("mlp", sizes=SIZES, seed=seed).double() for seed in (0, 1)]
    learner = Recording(
        kind(models), torch.tensor([7, 8]), rule=rule, alpha=ALPHA, mask_lr=MASK_LR, memory=6, replay_batch=REPLAY,
        glances=2, meta_loss=meta_loss, clip_norm=0.5, straight_through_scale=0.5 if rule == "binary" else 1.0,
    )  # fmt: skip
    learner.seen = []
    generator = torch.Generator().manual_seed(0)
    learner.raw += (
        torch.rand(learner.raw.shape, dtype=torch.float64, generator=generator) - 0.6
    )  # some closed, some open
    for _ in range(3):
        x = torch.rand(2, BATCH, SIZES[0], dtype=torch.float64, generator=generator)
        learner.observe(x, torch.randint(0, SIZES[-1], (2, BATCH), generator=generator))
    learner.seen.append((None, learner.network.views(learner.weights), learner.network.views(learner.raw)))
    assert len(learner.seen) == 7
    for (seen, theta, raw), (_, theta_after, raw_after) in zip(learner.seen, learner.seen[1:], strict=False):
        for lane in range(2):
            present = seen.shares[lane] > 0
            expected_theta, expected_raw = transcription(
                models[0], {n: t[lane] for n, t in theta.items()}, {n: t[lane] for n, t in raw.items()}, rule,
                seen.inputs[lane, present], seen.labels[lane, present], BATCH, meta_loss, clip=0.5,
            )  # fmt: skip
            for name, value in expected_theta.items():
                torch.testing.assert_close(theta_after[name][lane], value, rtol=1e-9, atol=1e-11)
                torch.testing.assert_close(raw_after[name][lane], expected_raw[name], rtol=1e-9, atol=1e-11)
    closed = torch.stack(list(learner.closed().values()))
    assert 0 < closed.mean() < 1


def test_the_first_batch_has_no_past_and_later_glances_replay_it():
    model = build("mlp", sizes=SIZES, seed=0).double()
    learner = Recording(
        MLPLanes([model]), torch.tensor([0]), rule="binary", alpha=0.1, mask_lr=0.1, memory=4, replay_batch=3, glances=2
    )
    learner.seen = []
    x = torch.rand(1, BATCH, SIZES[0], dtype=torch.float64)
    learner.observe(x, torch.zeros(1, BATCH, dtype=torch.int64))
    first, second = (seen for seen, _, _ in learner.seen)
    assert (first.shares[0] > 0).sum() == BATCH
    assert first.shares[0, :BATCH].tolist() == pytest.approx([1 / BATCH] * BATCH)
    assert second.shares[0].tolist() == pytest.approx([1 / 8] * 8)
    replayed = second.inputs[0, BATCH:]
    assert ((replayed.unsqueeze(1) == x[0]).all(-1).any(1)).all()
    assert not torch.equal(first.new_inputs, second.new_inputs)  # another order
    assert torch.equal(first.new_inputs.sort(1).values, second.new_inputs.sort(1).values)


def test_rates_differ_by_lane_where_asked():
    models = [build("mlp", sizes=SIZES, seed=0).double() for _ in range(2)]
    learner = LaMAML(
        MLPLanes(models), torch.tensor([3, 3]), rule="binary", alpha=torch.tensor([0.1, 0.2]),
        mask_lr=torch.tensor([0.5, 0.5]), memory=10,
    )  # fmt: skip
    x, y = torch.rand(1, 5, SIZES[0], dtype=torch.float64).expand(2, -1, -1), torch.arange(5).expand(2, -1) % 4
    learner.observe(x, y)
    alone = LaMAML(MLPLanes(models[:1]), torch.tensor([3]), rule="binary", alpha=0.2, mask_lr=0.5, memory=10)
    alone.observe(x[:1], y[:1])
    torch.testing.assert_close(learner.weights[1:], alone.weights)
    assert not torch.allclose(learner.weights[0], learner.weights[1])


@pytest.mark.parametrize("rule", ["dying-relu", "relu"])
def test_only_straight_through_opens_closed_rates_again(rule):
    model = build("mlp", sizes=SIZES, seed=0).double()
    learner = LaMAML(MLPLanes([model]), torch.tensor([0]), rule=rule, alpha=0.5, mask_lr=3.0, memory=10, glances=3)
    generator = torch.Generator().manual_seed(1)
    ever_closed, opened = torch.zeros_like(learner.raw, dtype=torch.bool), 0
    for _ in range(6):
        x = torch.rand(1, BATCH, SIZES[0], dtype=torch.float64, generator=generator)
        learner.observe(x, torch.randint(0, 4, (1, BATCH), generator=generator))
        is_open = learner.raw > 0
        opened += int((ever_closed & is_open).sum())
        ever_closed |= ~is_open
    assert ever_closed.any()
    assert (opened > 0) == (rule == "relu")
