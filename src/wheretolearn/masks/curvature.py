"""Meta-curvature: learned matrices that turn a gradient before it is used (Park and Oliva, 2019)."""

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from wheretolearn.masks.base import GradientMask
from wheretolearn.masks.initial import raw_dtype
from wheretolearn.masks.selection import Select, selected_names, trainable_shapes
from wheretolearn.storage import check_shapes

MODES = ("out", "in", "kernel")


class CurvatureMask(GradientMask):
    """Each gradient tensor is multiplied by a matrix in each of its modes: G x_out M_out x_in M_in x_kernel M_kernel.

    Filters have three modes (kernel positions make one), matrices two, vectors one. Raw names: ``NAME.out``,
    ``NAME.in``, ``NAME.kernel``.
    """

    kind = "curvature"
    elementwise = False

    def __init__(self, shapes: Mapping[str, torch.Size], names: Sequence[str], raw: dict[str, Tensor]):
        super().__init__(shapes, names, raw)
        self.closed_below = 1e-3
        expected = {key: (size, size) for name in names for key, size in matrix_sizes(name, shapes[name]).items()}
        check_shapes({key: matrix.shape for key, matrix in raw.items()}, expected, "the curvature mask")

    def multipliers(self) -> dict[str, Tensor]:
        return {key: matrix.clone() for key, matrix in self.raw.items()}

    def pull_back(self, multiplier_gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(multiplier_gradients)

    def updates(
        self, multipliers: Mapping[str, Tensor], gradients: Mapping[str, Tensor], moved: Mapping[str, Tensor], lr: float
    ) -> dict[str, Tensor]:
        result = {}
        for name, gradient in gradients.items():
            sizes = matrix_sizes(name, gradient.shape)
            turned = gradient.reshape(tuple(sizes.values()))
            for mode, key in enumerate(sizes):
                matrix = multipliers[key]
                turned = torch.tensordot(matrix, turned.to(matrix.dtype), dims=([1], [mode])).movedim(0, mode)
            result[name] = turned.reshape(gradient.shape)
        return result

    def openness(self) -> dict[str, Tensor]:
        """Norm of a weight's row in the whole (Kronecker) matrix: the product of its rows' norms in each mode."""
        result = {}
        for name in self.names:
            rows = [self.raw[key].norm(dim=1) for key in matrix_sizes(name, self.shapes[name])]
            result[name] = reduce(lambda product, norms: product.unsqueeze(-1) * norms, rows).reshape(self.shapes[name])
        return result

    def settings(self) -> dict[str, float]:
        return {}


def matrix_sizes(name: str, shape: torch.Size) -> dict[str, int]:
    """Size of the square matrix of each mode of a parameter, by raw name."""
    modes = (*shape[:2], shape[2:].numel()) if len(shape) > 2 else (tuple(shape) or (1,))
    return {f"{name}.{mode}": size for mode, size in zip(MODES, modes, strict=False)}


def curvature(model: nn.Module, select: Select = "all") -> CurvatureMask:
    """Meta-curvature, from identity matrices: the first inner steps are those of MAML. Usual with second order."""
    names = selected_names(model, select)
    raw = {}
    for name in names:
        like = model.get_parameter(name)
        for key, size in matrix_sizes(name, like.shape).items():
            raw[key] = torch.eye(size, dtype=raw_dtype(like), device=like.device)
    return CurvatureMask(trainable_shapes(model), names, raw)
