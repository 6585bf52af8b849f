"""All that meta-training changes: weights, mask, outer optimizer, and the best of them so far."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wheretolearn.errors import MismatchError, UserError
from wheretolearn.fewshot.config import FewShotConfig, OptimizerKind
from wheretolearn.fewshot.running_mean import RunningMean
from wheretolearn.masks import GradientMask
from wheretolearn.runs import checkpoint
from wheretolearn.storage import check_shapes, load_weights


@dataclass(frozen=True)
class Snapshot:
    """Weights and mask as they stood at a validation."""

    accuracy: float
    step: int
    model: dict[str, Tensor]
    mask: dict[str, Tensor]


@dataclass
class Learner:
    model: nn.Module
    mask: GradientMask
    optimizer: torch.optim.Optimizer
    keep_best: int = 1
    mean: RunningMean | None = None  # what is validated and kept, if not the last weights and mask
    step: int = 0
    best: list[Snapshot] = field(default_factory=list)  # by validation accuracy, the best first
    seconds: float = 0.0  # spent in training, over all sittings
    notes: tuple[str, ...] = ()  # what the user should know about how training resumed

    @property
    def best_accuracy(self) -> float:
        return self.best[0].accuracy if self.best else -1.0

    @property
    def best_step(self) -> int:
        return self.best[0].step if self.best else 0

    def state(self) -> dict[str, Any]:
        return {
            "signature": checkpoint.model_signature(self.model),
            "model": self.model.state_dict(),
            "mask": self.mask.tensors(),
            "optimizer": self.optimizer.state_dict(),
            "best": [vars(snapshot) for snapshot in self.best],
            "seconds": self.seconds,
            "random": checkpoint.random_state(),
        }

    def restore(self, step: int, state: Mapping[str, Any], path: str) -> None:
        check_shapes(state["signature"], checkpoint.model_signature(self.model), path)
        self.model.load_state_dict(state["model"])
        self.mask.load_tensors(state["mask"])
        capturable = [group.get("capturable") for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(self.optimizer.param_groups, capturable, strict=True):
            if own is not None:  # as this device needs it, which may not be the one that wrote the state
                group["capturable"] = own
                for parameter in group["params"]:
                    steps = self.optimizer.state.get(parameter, {})
                    if "step" in steps:
                        steps["step"] = steps["step"].to(parameter.device if own else "cpu")
        best = state["best"]
        if "best_accuracy" in state:  # early versions kept one
            best = [{"accuracy": state["best_accuracy"], "step": state["best_step"], **best}] if best else []
        self.best = [Snapshot(**snapshot) for snapshot in best][: self.keep_best]
        self.seconds = state["seconds"]
        checkpoint.restore_random_state(state["random"])
        self.step = step

    def as_validated(self) -> AbstractContextManager[None]:
        """Meanwhile weights and mask are those to validate and keep."""
        return nullcontext() if self.mean is None else self.mean.in_place()

    def remember(self, accuracy: float) -> None:
        """Keep the present weights and mask if they are among the best; of equals the earlier is better."""
        place = sum(snapshot.accuracy >= accuracy for snapshot in self.best)
        if place < self.keep_best:
            self.best.insert(
                place, Snapshot(accuracy, self.step, _copies(self.model.state_dict()), _copies(self.mask.tensors()))
            )
            del self.best[self.keep_best :]

    def take(self, snapshot: Snapshot) -> None:
        self.model.load_state_dict(snapshot.model)
        self.mask.load_tensors(snapshot.mask)


class MixedOptimizer(torch.optim.Optimizer):
    """Several optimizers that look and are stored like one."""

    def __init__(self, *parts: torch.optim.Optimizer):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # there is no loss to return
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Let the parts work on this optimizer's own groups and state."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state


def new_learner(config: FewShotConfig, image_shape: tuple[int, ...], seed: int, device: str = "cpu") -> Learner:
    height, _, channels = image_shape
    model = placed(config.build_model(height, channels, seed), device)
    mask = config.build_mask(model, seed)
    optimizer = _optimizer(config, model, mask, device)
    mean = None if config.average_decay is None else RunningMean(optimizer, config.average_decay)
    return Learner(model, mask, optimizer, config.keep_best, mean)


def placed(model: nn.Module, device: str) -> nn.Module:
    """A model on its device, laid out in memory as is best there."""
    model = model.to(device)
    if torch.device(device).type != "cpu":  # where PyTorch's batch norm would be a thousand times less exact
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # absent from torch's stubs
    return model


def load_start(config: FewShotConfig, model: nn.Module) -> None:
    """Give a model the weights of the run that `start_from` names, if it names one."""
    if config.start_from is None:
        return
    path = Path(config.start_from) / "model.safetensors"
    if not path.is_file():
        raise UserError(f"start_from: {config.start_from} is not a finished run: it has no {path.name}")
    tensors, _ = load_weights(path)
    own = model.state_dict()
    try:
        check_shapes({n: t.shape for n, t in tensors.items()}, {n: t.shape for n, t in own.items()}, path)
    except MismatchError as error:
        raise MismatchError(f"start_from: {error}") from None
    model.load_state_dict(tensors)


def _optimizer(config: FewShotConfig, model: nn.Module, mask: GradientMask, device: str) -> torch.optim.Optimizer:
    groups: list[tuple[OptimizerKind, dict[str, Any]]] = []
    if config.learn_theta:
        groups.append((config.optimizer, {"params": list(model.parameters()), "lr": config.theta_lr}))
    if mask.raw:
        kind = config.mask_optimizer or config.optimizer
        groups.append((kind, {"params": list(mask.parameters()), "lr": config.mask_lr}))

    def make(kind: OptimizerKind) -> torch.optim.Optimizer:
        own = [group for of, group in groups if of == kind]
        if kind == "adam":
            # On a GPU the step count lives there too, so that a recorded graph can advance it.
            return torch.optim.Adam(own, capturable=device.startswith("cuda"))
        return torch.optim.SGD(own, momentum=0.9, nesterov=True)

    kinds = list(dict.fromkeys(kind for kind, _ in groups))
    return make(kinds[0]) if len(kinds) == 1 else MixedOptimizer(*map(make, kinds))


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
