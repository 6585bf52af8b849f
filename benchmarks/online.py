"""Steps per second of sparse-C-MAML on an OSAKA stream: a plain loop as public code has it, against this package.

    python benchmarks/online.py --out results/benchmarks/online-cpu.json
    python benchmarks/online.py --device cuda --steps 1000 --out results/benchmarks/online-h200.json

The plain loop is eager PyTorch as public code runs it: new tensors for every weight at every inner step, autograd,
batches kept in a list, one support/query pair after another. This package runs one lane, then five: on a CPU in
processes of one thread, on a GPU as lanes that share CUDA graphs. All see the same streams at Table 6's settings
(p = 0.98, Conv4-64, 50 images, 16 inner steps), from the same weights and mask; the first steps, in which kernels are
chosen and graphs recorded, are not timed. Equal results: accuracy and detected switches stand beside each row. All
numbers come from one run of this script.
"""

import argparse
import multiprocessing
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from wheretolearn import batch_norm, models
from wheretolearn.config import from_dict
from wheretolearn.cpu import keep_freed_memory
from wheretolearn.engine.fused import FusedConv4
from wheretolearn.engine.graphed import Precision
from wheretolearn.online.c_maml_lanes import CMAMLLanes
from wheretolearn.online.config import GLYPHS, OnlineConfig
from wheretolearn.online.learners.c_maml import CMAML
from wheretolearn.online.learners.make import make_learner
from wheretolearn.online.problem import Problem, SourceImages, batches
from wheretolearn.presets import load_preset
from wheretolearn.runs import environment
from wheretolearn.storage import write_json

LANES = 5


@dataclass(frozen=True)
class Outcome:
    seconds: float
    accuracy: float
    detected: tuple[int, ...]  # steps


def settings(steps: int, glyphs: bool) -> OnlineConfig:
    config = from_dict(OnlineConfig, load_preset("table6.sparse-c-maml.p98").settings, where="table6.sparse-c-maml.p98")
    return replace(config, steps=steps, **({"sources": GLYPHS} if glyphs else {}))


def started(config: OnlineConfig, seed: int, device: str, images: SourceImages | None = None) -> tuple[Problem, CMAML]:
    images = images or SourceImages(config.sources, device)
    model = config.build_model(images.shape, seed).to(device)
    learner = make_learner(config, model, seed)
    assert isinstance(learner, CMAML)
    return Problem(config, seed, images), learner


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Plain:
    """The algorithm in plain eager code, from a learner's weights and mask."""

    def __init__(self, config: OnlineConfig, learner: CMAML, channels: int, size: int):
        model = models.build("conv4", ways=config.ways, channels=channels, size=size, width=config.width)
        self.config, self.names = config, learner.mask.names
        self.model = in_the_usual_order(model).to(next(iter(learner.theta.values())).device)
        batch_norm.fix_mode(self.model, "batch")
        self.theta = {name: tensor.clone().requires_grad_() for name, tensor in learner.theta.items()}
        self.mask = {name: m.clone().requires_grad_() for name, m in learner.mask.raw.items()}
        self.optimizer = torch.optim.Adam(
            [
                {"params": list(self.theta.values()), "lr": config.lr},
                {"params": list(self.mask.values()), "lr": config.mask_lr},
            ]
        )
        self.phi = {name: tensor.detach() for name, tensor in self.theta.items()}
        self.detected = False
        self.kept: list[tuple[Tensor, Tensor]] = []

    def logits(self, weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
        found: Tensor = functional_call(self.model, weights, (inputs,))
        return found

    def adapt(self, start: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        weights = dict(start)
        hard = {name: (m >= 0).to(m.dtype) + m - m.detach() for name, m in self.mask.items()}
        for _ in range(self.config.inner_steps):
            loss = F.cross_entropy(self.logits(weights, inputs), labels)
            gradients = torch.autograd.grad(loss, [weights[name] for name in self.names])
            for name, gradient in zip(self.names, gradients, strict=True):
                weights[name] = weights[name] - self.config.inner_lr * hard[name] * gradient
        return weights

    def step(self, inputs: Tensor, labels: Tensor) -> int:
        with torch.no_grad():
            logits = self.logits({**self.theta, **self.phi}, inputs)
            right = int((logits.argmax(1) == labels).sum())
            before = F.cross_entropy(logits, labels).item()
        self.go_on_from({**self.theta, **self.phi}, inputs, labels)
        with torch.no_grad():
            after = F.cross_entropy(self.logits({**self.theta, **self.phi}, inputs), labels).item()
        self.detected = after + self.config.switch_margin <= before
        if (self.detected and self.kept) or len(self.kept) > self.config.buffer:
            self.meta_update()
            self.kept = []
        else:
            self.kept.append((inputs, labels))
        if self.detected:
            self.go_on_from(self.theta, inputs, labels)
        return right

    def go_on_from(self, start: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> None:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in start.items()}
        phi = self.adapt(leaves, inputs, labels)
        self.phi = {name: phi[name].detach() for name in self.names}

    def meta_update(self) -> None:
        kept = self.kept * 2 if len(self.kept) == 1 else self.kept
        half = (len(kept) + 1) // 2
        losses = []
        for support, query in zip(kept[:half], kept[half:], strict=False):
            losses.append(F.cross_entropy(self.logits(self.adapt(self.theta, *support), query[0]), query[1]))
        loss = sum(losses[1:], losses[0]) / len(losses)
        self.optimizer.zero_grad()
        ((1 - torch.exp(-self.config.update_scale * loss.detach())) * loss).backward()
        self.optimizer.step()


def in_the_usual_order(model: nn.Module) -> nn.Module:
    """ReLU before pooling, as others write it; this package's network has the cheaper order."""
    for name, block in model.named_children():
        if isinstance(block, nn.Sequential):
            parts = OrderedDict(block.named_children())
            parts.move_to_end("pool")
            setattr(model, name, nn.Sequential(parts))
    return model


def plain(config: OnlineConfig, untimed: int, device: str) -> Outcome:
    problem, learner = started(config, 0, device)
    inputs = problem.batch(0).inputs
    loop = Plain(config, learner, inputs.shape[1], inputs.shape[2])
    right, detected, begun = 0, [], 0.0
    for step in range(config.steps):
        if step == untimed:
            wait(device)
            begun = time.perf_counter()
        batch = problem.batch(step)
        right += loop.step(batch.inputs, batch.labels)
        if loop.detected:
            detected.append(step)
    wait(device)
    count = config.steps * config.ways * config.shots
    return Outcome(time.perf_counter() - begun, right / count, tuple(detected))


def one_lane(config: OnlineConfig, untimed: int, seed: int) -> Outcome:
    """On a CPU."""
    problem, learner = started(config, seed, "cpu")
    right, detected, begun = 0, [], 0.0
    for step in range(config.steps):
        if step == untimed:
            begun = time.perf_counter()
        batch = problem.batch(step)
        right += int((learner.predict(batch.inputs).argmax(1) == batch.labels).sum())
        learner.observe(batch.inputs, batch.labels)
        if learner.detected:
            detected.append(step)
    count = config.steps * config.ways * config.shots
    return Outcome(time.perf_counter() - begun, right / count, tuple(detected))


def in_a_process(config: OnlineConfig, untimed: int, seeds: list[int]) -> list[Outcome]:
    torch.set_num_threads(1)
    keep_freed_memory()
    return [one_lane(config, untimed, seed) for seed in seeds]


def on_a_gpu(config: OnlineConfig, untimed: int, lanes: int, precision: Precision) -> Outcome:
    """The outcome of seed 0, in the time of all lanes."""
    images = SourceImages(config.sources, "cuda")
    both = [started(config, seed, "cuda", images) for seed in range(lanes)]
    shape = both[0][0].batch(0).inputs.shape
    model = models.build("conv4", ways=config.ways, channels=shape[1], size=shape[2], width=config.width).cuda()
    together = CMAMLLanes([learner for _, learner in both], FusedConv4(model, precision))
    right, detected, begun = torch.zeros(lanes, dtype=torch.int64, device="cuda"), [], 0.0
    for step in range(config.steps):
        if step == untimed:
            wait("cuda")
            begun = time.perf_counter()
        right += together.step(*batches([problem for problem, _ in both], [step] * lanes))
        if both[0][1].detected:
            detected.append(step)
    wait("cuda")
    count = config.steps * config.ways * config.shots
    return Outcome(time.perf_counter() - begun, right[0].item() / count, tuple(detected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plain-steps", type=int, help="of the plain loop; default: as many")
    parser.add_argument("--untimed", type=int, default=2, help="steps before the clock starts")
    parser.add_argument("--glyphs", action="store_true", help="a stream of the embedded set, which needs no data")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, untimed = arguments.device, arguments.untimed
    config = settings(arguments.steps, arguments.glyphs)
    rows: list[dict[str, Any]] = []

    def note(what: str, outcome: Outcome, steps: int, lanes: int = 1) -> None:
        rate = (steps - untimed) * lanes / outcome.seconds
        times_faster = rate / rows[0]["steps_per_second"] if rows else 1.0
        rows.append(
            {
                "what": what,
                "steps": steps,
                "steps_per_second": rate,
                "times_faster": times_faster,
                "accuracy_of_seed_0": outcome.accuracy,
                "detected_by_seed_0": outcome.detected,
            }
        )
        shown = f"accuracy {outcome.accuracy:.2%}, {len(outcome.detected)} switches detected"
        print(f"{what:52} {rate:8.2f} steps/s per device  {times_faster:5.1f} x  {shown}", flush=True)

    plain_steps = arguments.plain_steps or arguments.steps
    note("plain loop", plain(replace(config, steps=plain_steps), untimed, device), plain_steps)
    if device == "cpu":
        keep_freed_memory()
        note("this package, one lane", one_lane(config, untimed, 0), arguments.steps)
        workers = min(LANES, environment.cores())
        shares = [list(range(LANES))[number::workers] for number in range(workers)]
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            found = pool.starmap(in_a_process, [(config, untimed, share) for share in shares], chunksize=1)
        slowest = max(sum(outcome.seconds for outcome in share) for share in found)
        everything = replace(found[0][0], seconds=slowest)
        note(f"this package, {LANES} lanes in {workers} processes", everything, arguments.steps, LANES)
    else:
        precisions: list[Precision] = ["float32", "tf32", "float16"]
        for precision in precisions:
            for lanes in (1, LANES):
                outcome = on_a_gpu(config, untimed, lanes, precision)
                note(f"this package, lanes: {lanes}, {precision}", outcome, arguments.steps, lanes)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {
            "command": f"python benchmarks/online.py --device {device} --steps {arguments.steps} --untimed {untimed}"
            + (f" --plain-steps {plain_steps}" if plain_steps != arguments.steps else "")
            + (" --glyphs" if arguments.glyphs else ""),
            "threads": torch.get_num_threads(),
            "hardware": environment.hardware(),
            "versions": environment.versions(),
            "commit": environment.git_commit(),
        }
        write_json(arguments.out, {"rows": rows, **facts})


if __name__ == "__main__":
    main()
