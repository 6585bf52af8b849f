"""Sparse deltas: an adapted network stored as only those weights that changed.

delta = SparseDelta.of(adapted)
delta.save("task.safetensors")                       # a few kilobytes where the mask is sparse
network = SparseDelta.load("task.safetensors").apply(model)
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast, get_args

import torch
from torch import Tensor, nn

from wheretolearn import batch_norm
from wheretolearn.batch_norm import BatchNormMode
from wheretolearn.errors import MismatchError
from wheretolearn.inner_loop import Adapted, network_with, version
from wheretolearn.storage import check_shapes, load_weights, save_weights


@dataclass(frozen=True)
class SparseDelta:
    """The changed entries of each parameter: their flat positions and new values, and the changed buffers whole."""

    positions: dict[str, Tensor]
    values: dict[str, Tensor]
    buffers: dict[str, Tensor]
    shapes: dict[str, list[int]]  # of every trainable parameter of the base model
    base: str  # fingerprint of the base model's parameters
    batch_norm: BatchNormMode

    @classmethod
    def of(cls, adapted: Adapted) -> Self:
        if version(adapted.model.parameters()) != adapted.theta_version:
            raise MismatchError(
                "the model's weights have changed since it was adapted: take the delta before the optimizer's step"
            )
        theta = dict(adapted.model.named_parameters())
        positions, values = {}, {}
        for name, phi in adapted.parameters.items():
            changed = (phi != theta[name]).flatten().nonzero().flatten()
            if changed.numel():
                positions[name] = changed
                values[name] = phi.flatten()[changed]
        buffers = {
            name: adapted.buffers[name].clone()
            for name, buffer in _buffers_in_use(adapted.model, adapted.batch_norm)
            if not torch.equal(buffer, adapted.buffers[name])
        }
        shapes = {name: list(phi.shape) for name, phi in adapted.parameters.items()}
        base = fingerprint(adapted.model, adapted.batch_norm)
        return cls(positions, values, buffers, shapes, base, adapted.batch_norm)

    @property
    def changed(self) -> int:
        """How many weights changed."""
        return sum(p.numel() for p in self.positions.values())

    @property
    def total(self) -> int:
        """How many trainable weights the network has."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def apply(self, model: nn.Module) -> nn.Module:
        """The adapted network, from the base model that the delta was taken from; that model is not changed."""
        own = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        check_shapes(self.shapes, own, "the sparse delta")
        if fingerprint(model, self.batch_norm) != self.base:
            raise MismatchError(
                "the sparse delta was taken from other weights than this model holds: "
                "load the weights that it was adapted from first"
            )
        known = {name for name, _ in _buffers_in_use(model, self.batch_norm)}
        for name in self.buffers:  # their shapes may differ: a pass can assign a buffer anew
            if name not in known:
                raise MismatchError(f"the sparse delta has a buffer {name} that this model does not have")
        theta = dict(model.named_parameters())
        parameters = {}
        for name, positions in self.positions.items():
            changed = theta[name].detach().flatten().clone()
            changed[positions.to(changed.device)] = self.values[name].to(changed)
            parameters[name] = changed.view(theta[name].shape)
        return network_with(model, parameters, self.buffers, self.batch_norm)

    def save(self, path: Path | str) -> None:
        tensors = {f"position/{name}": _packed(t, self.shapes[name]) for name, t in self.positions.items()}
        tensors |= {f"value/{name}": t for name, t in self.values.items()}
        tensors |= {f"buffer/{name}": t for name, t in self.buffers.items()}
        metadata = {"shapes": json.dumps(self.shapes), "base": self.base, "batch_norm": self.batch_norm}
        save_weights(Path(path), tensors, {"kind": "sparse-delta", **metadata})

    @classmethod
    def load(cls, path: Path | str) -> Self:
        tensors, metadata = load_weights(Path(path))
        try:
            shapes = {str(name): [int(n) for n in shape] for name, shape in json.loads(metadata["shapes"]).items()}
            base, mode = metadata["base"], metadata["batch_norm"]
        except (KeyError, ValueError, TypeError, AttributeError):
            shapes, base, mode = {}, "", ""
        parts: dict[str, dict[str, Tensor]] = {"position": {}, "value": {}, "buffer": {}}
        for key, tensor in tensors.items():
            part, _, name = key.partition("/")
            parts.setdefault(part, {})[name] = tensor
        values = parts["value"]
        positions = {name: _unpacked(t) for name, t in parts["position"].items()}
        sound = (
            metadata.get("kind") == "sparse-delta"
            and mode in get_args(BatchNormMode)
            and len(parts) == 3
            and positions.keys() == values.keys() <= shapes.keys()
            and all(_fits(positions[name], values[name], shapes[name]) for name in positions)
        )
        if not sound:
            raise MismatchError(f"{path} holds no sparse delta: give a file written by SparseDelta.save")
        return cls(positions, values, parts["buffer"], shapes, base, cast(BatchNormMode, mode))


def _packed(positions: Tensor, shape: list[int]) -> Tensor:
    """Positions as they are stored: one bit per weight, or a number per change where that is smaller."""
    size = torch.Size(shape).numel()
    if size < 2**31 and len(positions) * 32 < size:
        return positions.to(torch.int32)
    marks = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8)
    marks[positions.cpu()] = 1
    return (marks.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def _unpacked(stored: Tensor) -> Tensor:
    if stored.dtype != torch.uint8 or stored.dim() != 1:
        return stored.to(torch.int64) if stored.dtype == torch.int32 else stored
    return ((stored[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().nonzero().flatten()


def _fits(positions: Tensor, values: Tensor, shape: list[int]) -> bool:
    size = torch.Size(shape).numel()
    return (
        positions.dtype == torch.int64
        and positions.dim() == 1
        and positions.shape == values.shape
        and (len(positions) == 0 or (int(positions.min()) >= 0 and int(positions.max()) < size))
    )


def fingerprint(model: nn.Module, mode: BatchNormMode) -> str:
    """sha256 of all that the adapted network takes over: parameters, and the buffers that the mode reads."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *_buffers_in_use(model, mode)):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _buffers_in_use(model: nn.Module, mode: BatchNormMode) -> list[tuple[str, Tensor]]:
    """All buffers but the batch-norm statistics that the mode ``batch`` never reads."""
    unread = {id(b) for layer in batch_norm.layers(model) for b in layer.buffers()} if mode == "batch" else set()
    return [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in unread]
