"""Sparse deltas: an adapted network stored as only those weights that changed.

delta = SparseDelta.of(adapted)
delta.save("task.safetensors")                       # a few kilobytes where the mask is sparse
network = SparseDelta.load("task.safetensors").apply(model)
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor, nn

from wheretolearn import batch_norm
from wheretolearn.batch_norm import BatchNormMode
from wheretolearn.errors import MismatchError
from wheretolearn.inner_loop import Adapted, network_with
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
        theta = dict(adapted.model.named_parameters())
        positions, values = {}, {}
        for name, phi in adapted.parameters.items():
            changed = (phi != theta[name]).flatten().nonzero().flatten()
            if changed.numel():
                positions[name] = changed
                values[name] = phi.flatten()[changed]
        # Statistics that the mode never reads are not part of the adapted network.
        unread = _statistics(adapted.model) if adapted.batch_norm == "batch" else set()
        buffers = {
            name: adapted.buffers[name].clone()
            for name, buffer in adapted.model.named_buffers()
            if name not in unread and not torch.equal(buffer, adapted.buffers[name])
        }
        shapes = {name: list(phi.shape) for name, phi in adapted.parameters.items()}
        return cls(positions, values, buffers, shapes, fingerprint(adapted.model), adapted.batch_norm)

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
        if fingerprint(model) != self.base:
            raise MismatchError(
                "the sparse delta was taken from other weights than this model holds: "
                "load the weights that it was adapted from first"
            )
        theta = dict(model.named_parameters())
        parameters = {}
        for name, positions in self.positions.items():
            changed = theta[name].detach().clone()
            changed.view(-1)[positions.to(changed.device)] = self.values[name].to(changed)
            parameters[name] = changed
        return network_with(model, parameters, self.buffers, self.batch_norm)

    def save(self, path: Path | str) -> None:
        tensors = {f"position/{name}": t for name, t in self.positions.items()}
        tensors |= {f"value/{name}": t for name, t in self.values.items()}
        tensors |= {f"buffer/{name}": t for name, t in self.buffers.items()}
        metadata = {"shapes": json.dumps(self.shapes), "base": self.base, "batch_norm": self.batch_norm}
        save_weights(Path(path), tensors, {"kind": "sparse-delta", **metadata})

    @classmethod
    def load(cls, path: Path | str) -> Self:
        tensors, metadata = load_weights(Path(path))
        if metadata.get("kind") != "sparse-delta":
            raise MismatchError(f"{path} holds no sparse delta: give a file written by SparseDelta.save")
        parts: dict[str, dict[str, Tensor]] = {"position": {}, "value": {}, "buffer": {}}
        for key, tensor in tensors.items():
            part, _, name = key.partition("/")
            parts[part][name] = tensor
        return cls(
            parts["position"],
            parts["value"],
            parts["buffer"],
            json.loads(metadata["shapes"]),
            metadata["base"],
            cast(BatchNormMode, metadata["batch_norm"]),
        )


def fingerprint(model: nn.Module) -> str:
    """sha256 of all parameters, names and values."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _statistics(model: nn.Module) -> set[str]:
    found = set(map(id, batch_norm.layers(model)))
    return {
        f"{layer_name}.{name}".lstrip(".")
        for layer_name, layer in model.named_modules()
        if id(layer) in found
        for name, _ in layer.named_buffers(recurse=False)
    }
