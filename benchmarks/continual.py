"""Seconds per seed of sparse-La-MAML on MNIST rotations: a plain loop as public code has it, against this package.

    python benchmarks/continual.py --out results/benchmarks/continual-cpu.json
    python benchmarks/continual.py --device cuda --lanes 64 --plain-tasks 2 --out results/benchmarks/continual-h200.json

The plain loop is Python over examples, autograd for every gradient, a list as replay memory, one seed at a time with
one thread. This package runs several seeds at once: on a CPU in as many processes as there are cores, so that part of
the gain is the second core (the row of one seed has none of it); on a GPU as lanes of one CUDA graph. Both learn from
the same batches and draw the same examples from memory, and both are tested alike: after each task on a sample of
every task's images, on all images of the task just learned, and at the end on all images of all tasks. All numbers of
a table come from one run of this script. Equal results: the retained accuracy of seed 0 stands beside each row. With
``--plain-tasks`` the plain loop learns, and is tested on, fewer tasks: its time is scaled up, its accuracy another.
"""

import argparse
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wheretolearn.continual import metrics
from wheretolearn.continual.buffer import ReplayBuffer
from wheretolearn.continual.config import ContinualConfig
from wheretolearn.continual.learners.make import make_learner
from wheretolearn.continual.problem import Problem
from wheretolearn.continual.recorded import Recorded
from wheretolearn.data.load import load_set
from wheretolearn.data.random_bits import random_bits_by_lane
from wheretolearn.runs import environment
from wheretolearn.storage import write_json

RA = float


def settings(tasks: int) -> ContinualConfig:
    return ContinualConfig(
        data="mnist",
        problem="rotations",
        tasks=tasks,
        examples=1000,
        learner="sparse-la-maml",
        lr=0.15,
        mask_lr=1.7,
        glances=5,
    )


def plain_accuracy(layers: list[Tensor], problem: Problem, task: int, limit: int | None = None) -> float:
    inputs, labels = next(problem.test_sets(task, limit, chunk=len(problem.test.labels)))
    return (forward(layers, inputs[0]).argmax(1) == labels[0]).float().mean().item()


def forward(layers: list[Tensor], x: Tensor) -> Tensor:
    for weight, bias in zip(layers[:-2:2], layers[1:-2:2], strict=True):
        x = F.relu(F.linear(x, weight, bias))
    return F.linear(x, layers[-2], layers[-1])


def plain(config: ContinualConfig, seed: int, device: str) -> RA:
    """As public code does it; only the random draws are this package's, so that both see the same examples."""
    problem = Problem(config, [seed], device)
    model = config.build_model(problem.image_shape, problem.classes, seed).to(device)
    theta = [p.detach().clone().requires_grad_() for p in model.parameters()]
    mask = [torch.full_like(p, config.lr).requires_grad_() for p in theta]
    seeds = torch.tensor([seed], device=device)
    # The list holds the examples; which place a new one takes is asked of a memory of their numbers.
    places, memory, seen = ReplayBuffer(seeds, config.memory, (1,), torch.float64), [], 0
    everything: list[tuple[Tensor, Tensor]] = []
    looks = torch.zeros((), dtype=torch.int64, device=device)

    def step(p: Tensor, m: Tensor, gradient: Tensor) -> Tensor:
        hard = (m >= 0).to(m.dtype)
        soft = config.straight_through_scale * m
        return p - config.lr * (hard + soft - soft.detach()) * gradient

    for number in range(problem.batches):
        batch = problem.batch(number)
        inputs, labels = batch.inputs[0], batch.labels[0]
        for glance in range(config.glances):
            order = random_bits_by_lane((config.batch,), seeds, "glance", looks).argsort(1)[0]
            x, y = inputs[order], labels[order]
            drawn = places.sample(config.replay_batch, looks)
            memory = [everything[int(n)] for n in drawn.inputs[0, drawn.valid[0], 0].tolist()]
            both_x = torch.stack([*x, *(old for old, _ in memory)])
            both_y = torch.stack([*y, *(label for _, label in memory)])
            if glance == 0:
                numbers = torch.arange(seen, seen + config.batch, dtype=torch.float64, device=device)
                places.add(numbers.view(1, -1, 1), y.unsqueeze(0))
                everything += list(zip(x, y, strict=True))
                seen += config.batch
            phi, losses = list(theta), []
            for k in range(config.batch):
                loss = F.cross_entropy(forward(phi, x[k : k + 1]), y[k : k + 1])
                gradients = torch.autograd.grad(loss, phi, retain_graph=True)
                phi = [step(p, m, g.detach()) for p, m, g in zip(phi, mask, gradients, strict=True)]
                losses.append(F.cross_entropy(forward(phi, both_x), both_y))
            (sum(losses[1:], losses[0]) / len(losses)).backward()
            torch.nn.utils.clip_grad_norm_(mask, config.clip_norm)
            torch.nn.utils.clip_grad_norm_(theta, config.clip_norm)
            with torch.no_grad():
                for p, m in zip(theta, mask, strict=True):
                    m -= config.mask_lr * m.grad
                    p -= config.lr * (m >= 0) * p.grad
                    p.grad = m.grad = None
            looks += 1
        if batch.ends_task:
            with torch.no_grad():
                for task in range(problem.tasks):
                    limit = None if task == batch.task else config.matrix_images
                    plain_accuracy(theta, problem, task, limit)
    with torch.no_grad():
        return statistics.fmean(plain_accuracy(theta, problem, task) for task in range(problem.tasks))


def package(config: ContinualConfig, seeds: list[int], device: str) -> list[RA]:
    problem = Problem(config, seeds, device)
    learner = make_learner([config] * len(seeds), seeds, problem.image_shape, problem.classes, problem.tasks, device)
    recorded = Recorded(learner)

    def test(task: int, limit: int | None = None) -> list[float]:
        return metrics.accuracies(learner, problem.test_sets(task, limit))

    for number in range(problem.batches):
        batch = problem.batch(number)
        recorded.observe(batch.inputs, batch.labels, task=batch.task, fresh=batch.fresh)
        if batch.ends_task:
            for task in range(problem.tasks):
                test(task, None if task == batch.task else config.matrix_images)
    return [statistics.fmean(lane) for lane in zip(*map(test, range(problem.tasks)), strict=True)]


def in_a_process(config: ContinualConfig, seeds: list[int]) -> list[RA]:
    torch.set_num_threads(1)
    return package(config, seeds, "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", type=int, default=20, help="of the package's stream")
    parser.add_argument("--plain-tasks", type=int, help="of the plain loop's stream, whose time is scaled up")
    parser.add_argument("--lanes", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, tasks, lanes = arguments.device, arguments.tasks, arguments.lanes
    plain_tasks = arguments.plain_tasks or tasks
    torch.set_num_threads(1)
    seeds = list(range(lanes))
    rows: list[dict[str, Any]] = []
    load_set("mnist")  # and start the device: neither is part of learning
    torch.zeros(1, device=device)

    def note(what: str, seconds: float, accuracies: list[RA]) -> None:
        per_seed = seconds / len(accuracies)
        times_faster = rows[0]["seconds_per_seed"] / per_seed if rows else 1.0
        percent = [100 * accuracy for accuracy in accuracies]
        rows.append(
            {
                "what": what,
                "seconds_per_seed": per_seed,
                "times_faster": times_faster,
                "retained_accuracy_by_seed": percent,
            }
        )
        shown = f"RA of seed 0: {percent[0]:.2f}, mean {statistics.fmean(percent):.2f}"
        print(f"{what:58} {per_seed:8.2f} s a seed  {times_faster:6.1f} x  {shown}", flush=True)

    started = time.perf_counter()
    found = plain(settings(plain_tasks), 0, device)
    seconds = (time.perf_counter() - started) * tasks / plain_tasks
    scaled = "" if plain_tasks == tasks else f", {plain_tasks} tasks scaled to {tasks}"
    note(f"plain loop, one seed, one thread{scaled}", seconds, [found])
    started = time.perf_counter()
    if device == "cpu":
        alone = package(settings(tasks), [0], device)
        note("this package, one seed, one thread", time.perf_counter() - started, alone)
        workers = min(lanes, environment.cores())
        shares = [seeds[number::workers] for number in range(workers)]  # seed 0 comes first again below
        started = time.perf_counter()
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            parts = pool.starmap(in_a_process, [(settings(tasks), share) for share in shares])
        seconds = time.perf_counter() - started
        note(
            f"this package, {lanes} seeds at once, {workers} processes", seconds, [ra for part in parts for ra in part]
        )
    else:
        accuracies = package(settings(tasks), seeds, device)
        note(f"this package, {lanes} seeds at once", time.perf_counter() - started, accuracies)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {
            "command": f"python benchmarks/continual.py --device {device} --tasks {tasks} --lanes {lanes}"
            + (f" --plain-tasks {plain_tasks}" if plain_tasks != tasks else ""),
            "hardware": environment.hardware(),
            "versions": environment.versions(),
            "commit": environment.git_commit(),
        }
        write_json(arguments.out, {"rows": rows, **facts})


if __name__ == "__main__":
    main()
