"""Time per task-step of first-order sparse-MAML: the plain loop that public code runs, against this package's engines.

    python benchmarks/inner_loop.py --device cuda --out results/benchmarks/inner-loop-h200.json

A task-step is one inner step of one task: Conv4-64, 84x84x3, 5-way 5-shot (25 images), forward, backward and masked
update; the query pass of 75 images counts as three. Whole outer steps are timed, optimizer included, and all ratios
come from one run of this script.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from wheretolearn import batch_norm, masks, models
from wheretolearn.engine.choose import make_engine
from wheretolearn.engine.task import InnerLoop, Task
from wheretolearn.runs import environment
from wheretolearn.storage import write_json

STEPS, INNER_LR = 35, 0.25
TASK_STEPS = STEPS + 3


def random_tasks(count: int, device: str, channels_last: bool) -> list[Task]:
    generator = torch.Generator().manual_seed(0)

    def images(number: int) -> Tensor:
        x = torch.randn(number, 3, 84, 84, generator=generator).to(device)
        return x.contiguous(memory_format=torch.channels_last) if channels_last else x

    support, query = (torch.arange(n, device=device) % 5 for n in (25, 75))
    return [Task(images(25), support, images(75), query) for _ in range(count)]


def plain_loop(tasks: Sequence[Task], device: str) -> Callable[[], None]:
    """As public code does it: a Python loop over tasks and steps, NCHW, a new tensor per parameter per step."""
    model = models.build("conv4", width=64, seed=0).to(device)
    batch_norm.fix_mode(model, "batch")
    mask = masks.binary(model)
    optimizer = torch.optim.Adam([*model.parameters(), *mask.parameters()], lr=1e-3)

    def outer_step() -> None:
        optimizer.zero_grad()
        multipliers = mask.multipliers()
        theta = dict(model.named_parameters())
        for task in tasks:
            phi = {name: p.detach().clone().requires_grad_() for name, p in theta.items()}
            sums = {name: torch.zeros_like(p) for name, p in phi.items()}
            for _ in range(STEPS):
                loss = F.cross_entropy(functional_call(model, phi, (task.support_inputs,)), task.support_labels)
                gradients = torch.autograd.grad(loss, list(phi.values()))
                for (name, p), gradient in zip(list(phi.items()), gradients, strict=True):
                    phi[name] = (p - INNER_LR * multipliers[name] * gradient).detach().requires_grad_()
                    sums[name] += gradient
            loss = F.cross_entropy(functional_call(model, phi, (task.query_inputs,)), task.query_labels)
            for name, gradient in zip(phi, torch.autograd.grad(loss, list(phi.values())), strict=True):
                to_mask = -INNER_LR * gradient * sums[name]
                for tensor, value in ((theta[name], gradient), (mask.raw[name], to_mask)):
                    tensor.grad = value if tensor.grad is None else tensor.grad + value
        optimizer.step()

    return outer_step


def engine_loop(kind: str, tasks: Sequence[Task], device: str, precision: str) -> Callable[[], None]:
    model = models.build("conv4", width=64, seed=0).to(device).to(memory_format=torch.channels_last)
    mask = masks.binary(model)
    optimizer = torch.optim.Adam([*model.parameters(), *mask.parameters()], lr=1e-3, capturable=device == "cuda")
    engine = make_engine(
        model, mask, optimizer, lambda step: tasks, InnerLoop(STEPS, INNER_LR), kind=kind, precision=precision
    )
    return lambda: engine.outer_step(0)


def microseconds(outer_step: Callable[[], None], tasks: int, device: str, repeats: int) -> float:
    """Median over repeats, after two that do not count."""

    def finished() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    times = []
    for number in range(repeats + 2):
        started = finished()
        outer_step()
        if number >= 2:
            times.append(finished() - started)
    return statistics.median(times) / (tasks * TASK_STEPS) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = arguments.device
    rows = []
    for count in arguments.tasks:
        base = microseconds(plain_loop(random_tasks(count, device, False), device), count, device, arguments.repeats)
        rows.append({"what": "plain eager loop, NCHW", "tasks": count, "microseconds": base, "times_faster": 1.0})
        engines = [("eager", "float32")]
        if device == "cuda":
            engines += [("graphed", precision) for precision in ("float32", "tf32", "bfloat16")]
        for kind, precision in engines:
            loop = engine_loop(kind, random_tasks(count, device, True), device, precision)
            took = microseconds(loop, count, device, arguments.repeats)
            rows.append(
                {
                    "what": f"{kind} engine, channels-last, {precision}",
                    "tasks": count,
                    "microseconds": took,
                    "times_faster": base / took,
                }
            )
        for row in rows[-1 - len(engines) :]:
            print(
                f"{row['tasks']} tasks  {row['what']:45}  {row['microseconds']:9.1f} us  {row['times_faster']:5.2f} x",
                flush=True,
            )
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {
            "hardware": environment.hardware(),
            "versions": environment.versions(),
            "commit": environment.git_commit(),
        }
        write_json(arguments.out, {"rows": rows, **facts})


if __name__ == "__main__":
    main()
