"""No class twice, judged by the drawings themselves rather than by clean renderings."""

import numpy as np
import pytest
from PIL import Image

from wheretolearn.data.load import load_set

pytestmark = pytest.mark.xdist_group("glyphs")  # drawn once, by whichever process runs these


def standardised(image):
    """Without place and size: cut out, centred on a square, 20 x 20."""
    rows, columns = np.nonzero(image > 100)
    cut = image[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    side = max(cut.shape)
    square = np.zeros((side, side), np.uint8)
    top, left = (side - cut.shape[0]) // 2, (side - cut.shape[1]) // 2
    square[top : top + cut.shape[0], left : left + cut.shape[1]] = cut
    return np.asarray(Image.fromarray(square).resize((20, 20)), np.float32).ravel()


def test_mean_drawings_of_different_classes_differ():
    names, means = [], []
    for split in load_set("glyphs").splits.values():
        for label, name in enumerate(split.classes):
            drawings = split.images[split.class_offsets[label] : split.class_offsets[label + 1], :, :, 0]
            names.append(name)
            means.append(np.mean([standardised(drawing) for drawing in drawings], axis=0))
    centred = np.stack(means) - np.mean(means, axis=1, keepdims=True)
    centred /= np.linalg.norm(centred, axis=1, keepdims=True)
    alike = np.triu(centred @ centred.T, 1)
    first, second = np.unravel_index(alike.argmax(), alike.shape)
    # For scale: the means of two halves of one class correlate at 0.91 (median).
    assert alike.max() < 0.945, (names[first], names[second])
    assert len(set(names)) == len(names) == 994
