"""Colours of lines: told apart with every kind of colour vision, in grey, and on light and dark cards."""

from itertools import combinations

import numpy as np
import pytest

from wheretolearn.report.page import THEME

# What is left of linear RGB where a kind of cone is missing (Machado, Oliveira and Fernandes 2009, severity 1).
VISION = {
    "all cones": np.eye(3),
    "no long": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no middle": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no short": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.119192, 0.9503041]]
)


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(colour: str, vision: object) -> np.ndarray:
    """Lightness from 0 to 100, and two axes of colour; distances of 20 are plain to see."""
    xyz = TO_XYZ @ np.clip(np.asarray(vision) @ linear(colour), 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def accents(theme: int) -> list[str]:
    return [pair[theme] for name, pair in THEME.items() if name.startswith("accent")]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
def test_lines_differ_for_every_kind_of_eye(theme: int, vision: str) -> None:
    for one, other in combinations(accents(theme), 2):
        assert np.linalg.norm(lab(one, VISION[vision]) - lab(other, VISION[vision])) > 20, (one, other)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_lines_differ_in_grey(theme: int) -> None:
    lightness = sorted(lab(colour, VISION["all cones"])[0] for colour in accents(theme))
    assert min(np.diff(lightness)) > 5


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_lines_and_words_stand_out_from_their_card(theme: int) -> None:
    def luminance(colour: str) -> float:
        return float(TO_XYZ[1] @ linear(colour))

    def contrast(one: str, other: str) -> float:
        low, high = sorted([luminance(one), luminance(other)])
        return (high + 0.05) / (low + 0.05)

    card = THEME["card"][theme]
    assert min(contrast(colour, card) for colour in accents(theme)) > 3  # WCAG: graphical objects
    assert min(contrast(THEME[name][theme], card) for name in ("ink", "muted")) > 4.5  # text
