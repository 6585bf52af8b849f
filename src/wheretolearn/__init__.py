"""Learned gradient masks for PyTorch: the outer loop decides which weights the inner loop may change."""

from wheretolearn import masks
from wheretolearn.delta import SparseDelta
from wheretolearn.inner_loop import Adapted, accumulate, adapt, meta_gradient, second_order_meta_gradient
from wheretolearn.masks import GradientMask, Sparsity
from wheretolearn.version import __version__

__all__ = [
    "Adapted",
    "GradientMask",
    "SparseDelta",
    "Sparsity",
    "__version__",
    "accumulate",
    "adapt",
    "masks",
    "meta_gradient",
    "second_order_meta_gradient",
]
