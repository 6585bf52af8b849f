"""Meta-training: outer steps, validation, checkpoints."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wheretolearn.config import from_dict
from wheretolearn.data.load import load_set
from wheretolearn.engine.choose import make_engine, make_evaluator
from wheretolearn.errors import Stopped
from wheretolearn.fewshot.config import FewShotConfig
from wheretolearn.fewshot.tasks import TaskSource, split_of
from wheretolearn.masks import GradientMask
from wheretolearn.runs import checkpoint
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.signals import StopRequest
from wheretolearn.storage import check_shapes, save_weights

Report = Callable[[int, Mapping[str, Any]], None]  # (outer step, latest values)


@dataclass
class Learner:
    """All that meta-training changes."""

    model: nn.Module
    mask: GradientMask
    optimizer: torch.optim.Optimizer
    step: int = 0
    best_accuracy: float = -1.0
    best_step: int = 0
    best: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    seconds: float = 0.0  # spent in training, over all sittings
    notes: tuple[str, ...] = ()  # what the user should know about how training resumed

    def state(self) -> dict[str, Any]:
        return {
            "signature": checkpoint.model_signature(self.model),
            "model": self.model.state_dict(),
            "mask": self.mask.tensors(),
            "optimizer": self.optimizer.state_dict(),
            "best_accuracy": self.best_accuracy,
            "best_step": self.best_step,
            "best": self.best,
            "seconds": self.seconds,
            "random": checkpoint.random_state(),
        }

    def restore(self, step: int, state: Mapping[str, Any], path: str) -> None:
        check_shapes(state["signature"], checkpoint.model_signature(self.model), path)
        self.model.load_state_dict(state["model"])
        self.mask.load_tensors(state["mask"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best_accuracy, self.best_step, self.best = state["best_accuracy"], state["best_step"], state["best"]
        self.seconds = state["seconds"]
        checkpoint.restore_random_state(state["random"])
        self.step = step

    def remember_best(self, accuracy: float) -> None:
        if accuracy > self.best_accuracy:
            self.best_accuracy, self.best_step = accuracy, self.step
            tensors = {"model": self.model.state_dict(), "mask": self.mask.tensors()}
            self.best = {part: {n: t.detach().clone() for n, t in ts.items()} for part, ts in tensors.items()}


def train(
    run: RunFolder,
    report: Report | None = None,
    device: str = "cpu",
    on_stop: Callable[[], None] | None = None,
) -> Learner:
    """Carry the run in this folder to its end, from its last checkpoint if it has one.

    ``on_stop`` is called when a signal asks for a stop; the run then ends with ``Stopped`` after the current step.
    The best model by validation is left in ``model.safetensors`` and ``mask.safetensors``.
    """
    config = from_dict(FewShotConfig, run.config, where=str(run.path))
    run.lock()
    images = load_set(config.data)
    training = TaskSource(split_of(images, config.train_split), config.episode, run.seed, "train", device)
    validation = TaskSource(split_of(images, config.validation_split), config.episode, run.seed, "validation", device)
    learner = new_learner(config, split_of(images, config.train_split).images.shape[1:], run.seed, device)
    saved = checkpoint.load_latest(run)
    if saved is not None:
        learner.restore(saved.step, saved.state, str(run.path))
        learner.notes = saved.notes
    run.rewind(learner.step)
    engine = make_engine(
        learner.model,
        learner.mask,
        learner.optimizer,
        lambda step: list(training.tasks(step, config.tasks_per_step)),
        config.inner,
        run.seed,
        kind=config.engine,
        precision=config.precision,
    )
    evaluate = make_evaluator(learner.model, learner.mask, config.inner, kind=config.engine, precision=config.precision)
    with StopRequest(on_request=on_stop) as stop:
        while learner.step < config.outer_steps:
            started = time.perf_counter()
            engine.outer_step(learner.step)
            learner.step += 1
            step = learner.step
            last = step == config.outer_steps
            validating = step % config.validate_every == 0 or last
            logging = step % config.log_every == 0 or step == 1 or validating
            values: dict[str, Any] = {"loss": engine.last_loss()} if logging else {}
            if validating:
                tasks = validation.tasks(0, config.validation_tasks)
                values["validation_accuracy"] = evaluate(tasks, config.test_inner_steps).mean().item()
                learner.remember_best(values["validation_accuracy"])
            learner.seconds += time.perf_counter() - started
            values["elapsed_seconds"] = learner.seconds
            if logging:
                sparsity = learner.mask.sparsity()
                values |= {"sparsity": sparsity.overall, "sparsity_by_layer": sparsity.by_layer}
                run.log(step, **values)
            if report is not None:
                report(step, values)
            stopping = stop.requested and not last
            if step % config.checkpoint_every == 0 or last or stopping:
                engine.last_loss()  # raises rather than let a bad state be saved
                checkpoint.save(run, learner.state(), step)
            if stopping:
                raise Stopped(
                    f"stopped after step {step} of {config.outer_steps} and saved; "
                    f"go on with `wheretolearn resume {run.path}`"
                )
    learner.model.load_state_dict(learner.best["model"])
    learner.mask.load_tensors(learner.best["mask"])
    save_weights(run.path / "model.safetensors", learner.best["model"], {"step": str(learner.best_step)})
    learner.mask.save(run.path / "mask.safetensors")
    return learner


def new_learner(config: FewShotConfig, image_shape: tuple[int, ...], seed: int, device: str = "cpu") -> Learner:
    height, _, channels = image_shape
    model = config.build_model(height, channels, seed).to(device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # absent from torch's stubs
    mask = config.build_mask(model, seed)
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "lr": config.theta_lr}]
    if mask.raw:
        groups.append({"params": list(mask.parameters()), "lr": config.mask_lr})
    if config.optimizer == "adam":
        # On a GPU the step count lives there too, so that a recorded graph can advance it.
        return Learner(model, mask, torch.optim.Adam(groups, capturable=device.startswith("cuda")))
    return Learner(model, mask, torch.optim.SGD(groups, lr=config.theta_lr, momentum=0.9, nesterov=True))
