import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from wheretolearn.errors import ConfigError
from wheretolearn.report.figures import (
    MOST_POINTS,
    Bar,
    Curve,
    accuracy_bars,
    accuracy_curves,
    loss_curves,
    pattern_panels,
    running_mean,
    save_pattern,
    sparsity_bars,
    sparsity_curves,
    sparsity_pattern,
    spread,
)

MULTIPLIERS = {
    "block1.conv.weight": (torch.arange(8 * 9).reshape(8, 1, 3, 3) % 3 == 0).float(),
    "block1.conv.bias": torch.ones(8),
    "block2.conv.weight": (torch.arange(64 * 9).reshape(8, 8, 3, 3) % 5 < 2).float(),
    "head.weight": torch.eye(5, 8),
}
CURVES = [
    Curve("first", [0, 100, 200], [0.9, 0.5, 0.2], "#ff0000"),
    Curve("second", [0, 100, 200], [0.8, 0.6, 0.4], "#0000ff"),
]


def long_lines(figure: Figure) -> list[np.ndarray]:
    """The data of every line of more than one point, leaving out end markers."""
    return [np.asarray(line.get_ydata()) for line in figure.axes[0].lines if len(line.get_ydata()) > 1]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in (*figure.axes[0].texts, *figure.texts)]


def open_pixels(bitmap: np.ndarray) -> int:
    return int((bitmap[..., 3] == 255).sum())


def test_loss_curves_hold_each_method_as_logged_and_smoothed() -> None:
    figure = loss_curves(CURVES)
    assert len(figure.axes) == 1
    assert len(long_lines(figure)) == 4
    assert {"first", "second"} <= set(texts(figure))


def test_accuracy_curves_show_the_chance_level() -> None:
    figure = accuracy_curves(CURVES, chance=0.2)
    lines = long_lines(figure)
    assert len(lines) == 3
    assert any(set(line) == {0.2} for line in lines)
    assert "chance 20.0\u00a0%" in texts(figure)


def test_accuracy_curves_without_validation_say_so() -> None:
    figure = accuracy_curves([Curve("first", [], [], "#ff0000")])
    assert not long_lines(figure)
    assert "no validation yet" in texts(figure)


def test_sparsity_curves_have_one_line_per_layer() -> None:
    figure = sparsity_curves("mask", CURVES)
    assert len(long_lines(figure)) == 2
    assert figure.axes[0].get_ylim() == (0, 1)


def test_a_long_curve_is_thinned_and_keeps_its_last_point() -> None:
    values = [float(i % 7) for i in range(10_001)]
    figure = sparsity_curves("mask", [Curve("layer", list(range(10_001)), values, "#ff0000")])
    line = max(figure.axes[0].lines, key=lambda line: len(line.get_xdata()))
    assert len(line.get_xdata()) <= MOST_POINTS
    assert max(line.get_xdata()) == 10_000


def test_accuracy_bars_have_the_length_of_their_value_and_their_interval() -> None:
    figure = accuracy_bars("set", [Bar("a", 0.9, "#ff0000", 0.02), Bar("b", 0.8, "#0000ff", math.inf)])
    axes = figure.axes[0]
    assert [patch.get_width() for patch in axes.patches if isinstance(patch, Rectangle)] == [0.9, 0.8]
    assert [list(line.get_xdata()) for line in axes.lines] == [pytest.approx([0.88, 0.92])]
    assert "90.0 ± 2.0\u00a0%" in texts(figure)
    assert "80.0\u00a0%" in texts(figure)


def test_sparsity_bars_show_an_open_layer_as_zero() -> None:
    layers = {name: [Bar("MAML", 0.0, "#ff0000"), Bar("sparse", 0.4, "#0000ff")] for name in ("conv", "head")}
    figure = sparsity_bars("Weights", layers)
    assert len(figure.axes[0].patches) == 4
    assert texts(figure).count("0.0\u00a0%") == 2
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["conv", "head"]


def test_running_mean_keeps_a_constant_and_the_length() -> None:
    assert running_mean([2.0] * 50) == pytest.approx([2.0] * 50)
    assert running_mean([0.0, 3.0, 6.0]) == pytest.approx([1.5, 3.0, 4.5])
    assert running_mean([]) == []


def test_labels_are_moved_apart_and_stay_in_order() -> None:
    placed = spread([0.5, 0.98, 0.97, 0.51], 0.1, 0.0, 1.0)
    assert placed[1] > placed[2] > placed[3] > placed[0]
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(sorted(placed)))
    assert max(placed) <= 1.0


def test_labels_with_room_stay_where_they_are() -> None:
    assert spread([0.2, 0.8], 0.1, 0.0, 1.0) == [0.2, 0.8]


def test_a_pattern_draws_every_matrix_and_filter() -> None:
    figure = sparsity_pattern(MULTIPLIERS)
    assert [axes.get_label() for axes in figure.axes] == ["block1.conv", "block2.conv", "head"]


def test_a_pattern_has_as_much_ink_as_open_weights() -> None:
    for panel in pattern_panels(MULTIPLIERS, None, ink="#123456", closed_below=0.0):
        weights = MULTIPLIERS[f"{panel.layer}.weight"]
        assert open_pixels(panel.bitmap) == panel.tap**2 * int(weights.sum())
        assert panel.closed == pytest.approx(1 - weights.mean().item())


def test_the_picture_holds_the_drawn_pixels() -> None:
    panels = pattern_panels(MULTIPLIERS, None, ink="#123456", closed_below=0.0)
    for axes, panel in zip(sparsity_pattern(MULTIPLIERS, ink="#123456").axes, panels, strict=True):
        assert np.array_equal(np.asarray(axes.images[0].get_array()), panel.bitmap)


def test_the_place_of_a_tap_is_its_place_in_the_filter() -> None:
    weights = torch.zeros(8, 8, 3, 3)
    weights[1, 2, 0, 1] = 1
    (panel,) = pattern_panels({"conv.weight": weights}, None, ink="#123456", closed_below=0.0)
    rows, columns = np.nonzero(panel.bitmap[..., 3] == 255)
    cell = (panel.bitmap.shape[0] + 1) / 8  # filters and the gaps between them, about
    assert rows.min() == pytest.approx(1 * cell, abs=panel.tap)
    assert columns.min() == pytest.approx(2 * cell + panel.tap, abs=panel.tap)


def test_the_rows_of_a_head_are_its_inputs() -> None:
    weights = torch.zeros(5, 32)
    weights[4, 0] = 1
    multipliers = {"conv.weight": torch.zeros(32, 32, 3, 3), "head.weight": weights}
    head = pattern_panels(multipliers, None, ink="#123456", closed_below=0.0)[1]
    rows, columns = np.nonzero(head.bitmap[..., 3] == 255)
    assert rows.max() < head.tap
    assert columns.max() == head.bitmap.shape[1] - 1


@pytest.mark.parametrize(
    "shapes",
    [
        {"layer1.weight": (100, 784), "head.weight": (10, 100)},
        {"conv.weight": (64, 64, 3, 3), "head.weight": (5, 1600)},
        {"conv.weight": (61, 3, 3, 3), "wide.weight": (512, 7)},
        {"conv.weight": (12, 5, 7), "volume.weight": (4, 4, 3, 3, 3)},
        {"bilinear": (6, 5)},
    ],
)
def test_layers_of_any_shape_keep_every_weight(shapes: dict[str, tuple[int, ...]]) -> None:
    multipliers = {name: torch.ones(shape) for name, shape in shapes.items()}
    panels = pattern_panels(multipliers, None, ink="#123456", closed_below=0.0)
    counts = [open_pixels(panel.bitmap) / panel.tap**2 for panel in panels]
    assert counts == [math.prod(shape) for shape in shapes.values()]
    assert all(0.05 < panel.aspect < 4 for panel in panels)


def test_a_large_layer_shows_part_of_itself_and_says_so() -> None:
    (panel,) = pattern_panels({"conv.weight": torch.ones(200, 300, 3, 3)}, None, ink="#123456", closed_below=0.0)
    assert panel.note == "first 96 x 96 of 200 x 300"
    assert open_pixels(panel.bitmap) == panel.tap**2 * 96 * 96 * 9


def test_small_rates_count_as_closed() -> None:
    rates = torch.tensor([[1e-4, 0.1], [-0.2, 0.0]])
    (panel,) = pattern_panels({"head.weight": rates}, None, ink="#123456", closed_below=1e-3)
    assert panel.closed == 0.5


def test_layers_can_be_chosen() -> None:
    assert [axes.get_label() for axes in sparsity_pattern(MULTIPLIERS, ["head"]).axes] == ["head"]


def test_an_unknown_layer_is_named_with_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"no layer 'block2\.cnv' to draw; did you mean 'block2\.conv'"):
        sparsity_pattern(MULTIPLIERS, ["block2.cnv"])


def test_a_mask_of_vectors_has_no_pattern() -> None:
    with pytest.raises(ConfigError, match="no matrix or filter"):
        sparsity_pattern({"norm.weight": torch.ones(8)})


def test_expanded_views_can_be_drawn() -> None:
    one = torch.ones(()).expand(8, 8, 3, 3)
    (panel,) = pattern_panels({"conv.weight": one}, None, ink="#123456", closed_below=0.0)
    assert open_pixels(panel.bitmap) == panel.tap**2 * 576


def test_a_saved_pattern_is_a_light_card_with_clear_corners(tmp_path: Path) -> None:
    save_pattern(tmp_path / "pattern.png", MULTIPLIERS)
    with Image.open(tmp_path / "pattern.png") as file:
        image = np.asarray(file.convert("RGBA"))
    assert image.shape[1] == 1760
    assert image[0, 0, 3] < 30
    paper = image[image.shape[0] // 2, 20]
    assert paper[3] > 250
    assert paper[:3].min() > 235
