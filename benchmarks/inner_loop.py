"""Time per task-step of first-order sparse-MAML: the plain loop that public code runs, against this package's engines.

    python benchmarks/inner_loop.py --device cuda --out results/benchmarks/inner-loop-h200.json
    python benchmarks/inner_loop.py --device cpu --tasks 2 --steps 5 --out results/benchmarks/inner-loop-cpu.json

A task-step is one inner step of one task: Conv4-64, 84x84x3, 5-way 5-shot (25 images), forward, backward and masked
update; the query pass of 75 images counts as three. Whole outer steps are timed, optimizer included, and all ratios
come from one run of this script. On a GPU it also states how far the meta-gradients of each engine and precision
lie from those of the eager engine in float32. On a CPU it takes the causes of the difference one by one.
"""

import argparse
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from wheretolearn import batch_norm, masks, models
from wheretolearn.cpu import keep_freed_memory
from wheretolearn.engine.choose import make_engine
from wheretolearn.engine.task import InnerLoop, Lane, Task
from wheretolearn.runs import environment
from wheretolearn.storage import write_json

INNER_LR = 0.25
ENGINES = [
    ("eager", "float32"),
    *(("graphed", precision) for precision in ("float32", "tf32", "bfloat16")),
    *(("fused", precision) for precision in ("float32", "tf32", "bfloat16", "float16")),
]
QUERY_SHARE = 3  # a query pass counts as three task-steps


def random_tasks(count: int, device: str, channels_last: bool) -> list[Task]:
    generator = torch.Generator().manual_seed(0)

    def images(number: int) -> Tensor:
        x = torch.randn(number, 3, 84, 84, generator=generator).to(device)
        return x.contiguous(memory_format=torch.channels_last) if channels_last else x

    support, query = (torch.arange(n, device=device) % 5 for n in (25, 75))
    return [Task(images(25), support, images(75), query) for _ in range(count)]


def plain_loop(tasks: Sequence[Task], steps: int, device: str, channels_last: bool = False) -> Callable[[], None]:
    """As public code does it: a Python loop over tasks and steps, a new tensor per parameter per step."""
    model = in_the_usual_order(models.build("conv4", width=64, seed=0)).to(device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
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
            for _ in range(steps):
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


def in_the_usual_order(model: nn.Module) -> nn.Module:
    """ReLU before pooling, as public code has it; this package's Conv4 turns them round."""
    for name in ("block1", "block2", "block3", "block4"):
        block = model.get_submodule(name)
        layers = OrderedDict((layer, block.get_submodule(layer)) for layer in ("conv", "norm", "relu", "pool"))
        setattr(model, name, nn.Sequential(layers))
    return model


def lanes_of(tasks: Sequence[Task], steps: int, device: str, optimizer: type[torch.optim.Optimizer]) -> list[Lane]:
    """One learner on all tasks, laid out in memory as their images are."""
    images = tasks[0].support_inputs
    last = images.is_contiguous(memory_format=torch.channels_last)
    model = models.build("conv4", width=64, seed=0).to(device)
    model = model.to(memory_format=torch.channels_last if last else torch.contiguous_format)
    mask = masks.binary(model, generator=torch.Generator().manual_seed(0))
    settings = {"capturable": device == "cuda"} if optimizer is torch.optim.Adam else {}
    outer = optimizer([*model.parameters(), *mask.parameters()], lr=1e-3, **settings)
    return [Lane(model, mask, outer, lambda step: tasks, InnerLoop(steps, INNER_LR))]


def engine_loop(kind: str, tasks: Sequence[Task], steps: int, device: str, precision: str) -> Callable[[], None]:
    engine = make_engine(lanes_of(tasks, steps, device, torch.optim.Adam), kind=kind, precision=precision)
    return lambda: engine.outer_step([0])


def gradient(kind: str, tasks: Sequence[Task], precision: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The meta-gradient of theta after two gentle inner steps, from one outer step of plain SGD."""
    lane = lanes_of(tasks, 2, "cuda", torch.optim.SGD)[0]
    lane.model.to(dtype)
    lane.mask.to(dtype)
    parts = [Task(*(t.to(dtype) if t.is_floating_point() else t for t in vars(task).values())) for task in tasks]
    optimizer = torch.optim.SGD(lane.model.parameters(), lr=1.0)
    gentle = Lane(lane.model, lane.mask, optimizer, lambda step: parts, InnerLoop(2, 0.01))
    before = flat(lane.model)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        engine = make_engine([gentle], kind=kind, precision=precision)
        engine.outer_step([0])
        engine.last_losses()
    return before - flat(lane.model)


def flat(model: nn.Module) -> Tensor:
    # Biases before batch norm have no effect; their gradients are rounding noise.
    named = [(name, p) for name, p in model.named_parameters() if not name.endswith("conv.bias")]
    return torch.cat([p.detach().double().flatten() for _, p in named])


def microseconds(outer_step: Callable[[], None], task_steps: int, device: str, repeats: int) -> float:
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
    return statistics.median(times) / task_steps * 1e6


def measurements(device: str, count: int, steps: int) -> list[tuple[str, Callable[[], Callable[[], None]]]]:
    """What is timed, in order, and how to set it up."""
    nchw, last = (random_tasks(count, device, channels_last) for channels_last in (False, True))
    plain = ("plain eager loop, NCHW", lambda: plain_loop(nchw, steps, device))
    if device == "cpu":

        def tuned() -> Callable[[], None]:
            if not keep_freed_memory():
                raise SystemExit("this C library's allocator cannot be tuned: nothing to compare")
            return plain_loop(nchw, steps, device)

        return [
            (plain[0] + ", default allocator", plain[1]),
            ("the same, freed memory kept", tuned),
            ("the same, channels-last too", lambda: plain_loop(last, steps, device, channels_last=True)),
            (
                "eager engine: pooling before ReLU, in place",
                lambda: engine_loop("eager", last, steps, device, "float32"),
            ),
            (
                "engine of choice: Conv4 without autograd",
                lambda: engine_loop("auto", nchw, steps, device, "float32"),  # it lays its own tensors out
            ),
        ]
    return [plain] + [
        (f"{kind} engine, {precision}", lambda k=kind, p=precision: engine_loop(k, last, steps, device, p))
        for kind, precision in ENGINES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--steps", type=int, default=35, help="inner steps per task")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, steps = arguments.device, arguments.steps
    if device == "cpu" and len(arguments.tasks) > 1:
        parser.error("on a CPU give one number of tasks: the allocator can be tuned only once in a process")
    rows = []
    for count in arguments.tasks:
        base = before = 0.0
        for what, set_up in measurements(device, count, steps):
            took = microseconds(set_up(), count * (steps + QUERY_SHARE), device, arguments.repeats)
            base, before = base or took, before or took
            row = {"what": what, "tasks": count, "microseconds": took, "times_faster": base / took}
            rows.append(row | ({"times_faster_than_the_row_above": before / took} if device == "cpu" else {}))
            before = took
            gain = f"  ({rows[-1]['times_faster_than_the_row_above']:.2f} x the row above)" if device == "cpu" else ""
            print(f"{count} tasks  {what:42}  {took:9.1f} us  {base / took:5.2f} x{gain}", flush=True)
    deviations = {}
    if device == "cuda":
        tasks = random_tasks(2, device, True)
        exact = gradient("eager", tasks, "float32", torch.float64)
        for kind, precision in ENGINES:
            found = gradient(kind, tasks, precision)
            deviations[f"{kind}, {precision}"] = ((found - exact).norm() / exact.norm()).item()
            print(
                f"meta-gradient of {kind}, {precision}: {deviations[f'{kind}, {precision}']:.1e} from float64",
                flush=True,
            )
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {
            "command": f"python benchmarks/inner_loop.py --device {device} "
            f"--tasks {' '.join(map(str, arguments.tasks))} --steps {steps} --repeats {arguments.repeats}",
            "threads": torch.get_num_threads(),
            "hardware": environment.hardware(),
            "versions": environment.versions(),
            "commit": environment.git_commit(),
        }
        write_json(arguments.out, {"rows": rows, "deviation_of_meta_gradient": deviations, **facts})


if __name__ == "__main__":
    main()
