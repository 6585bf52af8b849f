"""The embedded image set: characters of many scripts, drawn from the fonts that matplotlib ships.

A class is a character, its group is its script, and each class has 20 drawings of 28x28, ink 255 on 0. The
drawings of a class differ in font and style, stroke, slant, rotation, size, place and a light warp. No class
occurs in two splits:

- ``train``: most characters of the training scripts
- ``characters``: every sixth character of those same scripts, held out
- ``validation`` and ``scripts``: whole scripts held out; those of ``scripts`` look least like training

A drawing depends on the seed, its character and its number alone, so the set is the same in whatever order it
is made. Orientation matters (syllabics and arrows differ by it): do not make new classes by turning images.
"""

import functools
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter, ImageFont, ImageOps, features

from wheretolearn.data import image_set
from wheretolearn.data.glyph_scripts import CODE_POINTS, characters
from wheretolearn.data.image_set import Images, ImageSet, ImageSplit
from wheretolearn.errors import ConfigError, DataError

NAME = "glyphs"
GENERATOR = 2  # raise it whenever a drawing changes, so that cached copies are made anew
SEED = 0
DRAWINGS = 20
SIDE = 28

HELD_OUT_SCRIPTS = {
    "validation": ("hebrew", "lao", "nko", "old-italic"),
    "scripts": ("arabic", "georgian", "asomtavruli", "nuskhuri", "tifinagh"),
}
HOLD_OUT_EVERY = 6  # one character in six of a training script goes to the split "characters"

FONT_FILES = (
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSans-Oblique.ttf",
    "DejaVuSans-BoldOblique.ttf",
    "DejaVuSansMono.ttf",
    "DejaVuSansMono-Bold.ttf",
    "DejaVuSansMono-Oblique.ttf",
    "DejaVuSansMono-BoldOblique.ttf",
    "DejaVuSerif.ttf",
    "DejaVuSerif-Bold.ttf",
    "DejaVuSerif-Italic.ttf",
    "DejaVuSerif-BoldItalic.ttf",
    "STIXGeneral.ttf",
    "STIXGeneralBol.ttf",
    "STIXGeneralItalic.ttf",
    "STIXGeneralBolIta.ttf",
)
EM = 64  # pixels; glyphs are rendered large, then warped down to SIDE
OVERSAMPLING = 2

# Ranges of the random variation, uniform unless said otherwise.
LONG_SIDE = (15.0, 23.0)  # of the glyph's box, pixels of the final image
LOG_ASPECT = 0.25
ROTATION = 0.24  # radians, about 14 degrees
SHEAR = 0.25
PERSPECTIVE = 0.12
WARP = 1.1  # standard deviation of the displacement at each knot, pixels
SHIFT = 3.0  # pixels, less where the glyph fills the image
MARGIN = 1.5  # pixels around the glyph before it is bent
THICKER = 2  # pixels of EM on each side of a stroke, at most
CLOTTED = 0.5  # share of ink in the glyph's box beyond which thicker strokes would close its holes
KNOTS = 4
GAIN = (1.2, 1.8)  # keeps thin strokes dark after reduction

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Face:
    """One font file at the size it is rendered in, and the code points it really has."""

    file: str
    font: ImageFont.FreeTypeFont
    code_points: frozenset[int]

    @property
    def bold(self) -> bool:
        return "Bol" in self.file

    @property
    def italic(self) -> bool:
        """A true italic, whose letters may have another form; an oblique is only slanted."""
        return "Ita" in self.file


def load(root: Path | None = None, progress: Callable[[int, int], None] | None = None) -> ImageSet:
    """The set from the cache, made and cached first where this version's copy is not there."""
    root = image_set.data_root() if root is None else root
    cached = _cached(root)
    if cached is not None:
        return cached
    splits = draw(SEED, DRAWINGS, progress)
    # Another process may have made the same set meanwhile: use its copy rather than swap it under its feet.
    cached = _cached(root)
    if cached is not None:
        return cached
    try:
        return image_set.write(NAME, splits, _info(), root)
    except DataError:
        cached = _cached(root)
        if cached is None:
            raise
        return cached


def make(root: Path | None = None, progress: Callable[[int, int], None] | None = None) -> ImageSet:
    """Draw the set and cache it, whether or not a copy is there."""
    return image_set.write(NAME, draw(SEED, DRAWINGS, progress), _info(), root)


def draw(
    seed: int = SEED, drawings: int = DRAWINGS, progress: Callable[[int, int], None] | None = None
) -> dict[str, ImageSplit]:
    """Draw the whole set. ``progress`` counts images."""
    members = split_members()
    total = drawings * sum(len(pairs) for pairs in members.values())
    done = 0
    splits = {}
    for split, pairs in members.items():
        images = np.empty((len(pairs) * drawings, SIDE, SIDE, 1), np.uint8)
        for index, (script, character) in enumerate(pairs):
            images[index * drawings : (index + 1) * drawings] = draw_character(character, script, seed, drawings)
            done += drawings
            if progress is not None:
                progress(done, total)
        splits[split] = ImageSplit(
            name=f"{NAME}/{split}",
            images=images,
            class_offsets=np.arange(len(pairs) + 1, dtype=np.int64) * drawings,
            classes=tuple(unicodedata.name(character) for _, character in pairs),
            groups=tuple(script for script, _ in pairs),
        )
    return splits


def split_members() -> dict[str, list[tuple[str, str]]]:
    """(script, character) of every class, by split."""
    members: dict[str, list[tuple[str, str]]] = {
        "train": [],
        "validation": [],
        "characters": [],
        "scripts": [],
    }
    home = {script: split for split, scripts in HELD_OUT_SCRIPTS.items() for script in scripts}
    for script in CODE_POINTS:
        for index, character in enumerate(characters(script)):
            held_out = index % HOLD_OUT_EVERY == HOLD_OUT_EVERY // 2
            split = home.get(script, "characters" if held_out else "train")
            members[split].append((script, character))
    return members


def draw_character(character: str, script: str, seed: int = SEED, drawings: int = DRAWINGS) -> Images:
    """Drawings of one character, uint8 [drawings, SIDE, SIDE, 1]; its fonts take turns in a random order."""
    if seed < 0 or drawings < 1:
        raise ConfigError(f"glyphs: seed {seed} and drawings {drawings} must be at least 0 and 1")
    faces = faces_of(character, script)
    turns = np.random.default_rng((seed, ord(character))).permutation(len(faces))
    images = np.empty((drawings, SIDE, SIDE, 1), np.uint8)
    for number in range(drawings):
        random = np.random.default_rng((seed, ord(character), number))
        face = faces[turns[number % len(faces)]]
        images[number, :, :, 0] = _warp(_render(character, face, random), random)
    return images


def faces_of(character: str, script: str) -> tuple[Face, ...]:
    """The fonts that have this character. Cyrillic italics are left out: they are other letters' shapes."""
    faces = tuple(
        face
        for face in all_faces()
        if ord(character) in face.code_points and not (script == "cyrillic" and face.italic)
    )
    if not faces:
        raise DataError(
            f"no font of matplotlib has {unicodedata.name(character)!r}; "
            "its font files seem changed: reinstall matplotlib"
        )
    return faces


@functools.cache
def all_faces() -> tuple[Face, ...]:
    """The fonts the set is drawn from, opened once."""
    if not features.check("freetype2"):
        raise DataError("Pillow was built without FreeType, so it cannot draw the set 'glyphs'; reinstall Pillow")
    # Slow to import and needed only when the set is made.
    import matplotlib
    from matplotlib.ft2font import FT2Font

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    faces = []
    for file in FONT_FILES:
        path = folder / file
        if not path.is_file():
            raise DataError(f"{path} is missing; the set 'glyphs' is drawn from it: reinstall matplotlib")
        code_points = frozenset(FT2Font(str(path)).get_charmap())
        # The basic layout engine is part of every Pillow; the other one is not.
        font = ImageFont.truetype(str(path), EM, layout_engine=ImageFont.Layout.BASIC)
        faces.append(Face(file, font, code_points))
    return tuple(faces)


def _render(character: str, face: Face, random: np.random.Generator) -> Image.Image:
    """The glyph, large, cropped to its ink, its stroke made thicker by a random amount."""
    mask = face.font.getmask(character, mode="L")
    glyph = ImageOps.expand(Image.frombytes("L", mask.size, bytes(mask)), THICKER)
    growth = int(random.integers(0, THICKER if face.bold else THICKER + 1))
    thicker = glyph.filter(ImageFilter.MaxFilter(2 * growth + 1))
    thicker = thicker.crop(thicker.getbbox())
    return thicker if _ink(thicker) <= CLOTTED else glyph.crop(glyph.getbbox())


def _ink(glyph: Image.Image) -> float:
    return float(np.asarray(glyph).mean()) / 255


def _warp(glyph: Image.Image, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """The glyph at a random place, size, slant and bend in a SIDE x SIDE image."""
    source = np.pad(np.asarray(glyph, np.float64), 1)
    height, width = glyph.height, glyph.width
    scale = random.uniform(*LONG_SIDE) / max(height, width)
    aspect = np.exp(random.uniform(-LOG_ASPECT, LOG_ASPECT) / 2)
    angle = random.uniform(-ROTATION, ROTATION)
    cosine, sine = np.cos(angle), np.sin(angle)
    forward = (
        np.array([[cosine, -sine], [sine, cosine]])
        @ np.array([[1.0, random.uniform(-SHEAR, SHEAR)], [0.0, 1.0]])
        @ np.diag([scale * aspect, scale / aspect])
    )
    reach = np.abs(forward) @ np.array([width, height]) / 2
    room = SIDE / 2 - MARGIN
    if reach.max() > room:
        forward *= room / reach.max()
        reach *= room / reach.max()
    shift = random.uniform(-1.0, 1.0, size=2) * np.minimum(SHIFT, room - reach)
    tilt = random.uniform(-PERSPECTIVE, PERSPECTIVE, size=2) * 2 / SIDE
    bend = random.normal(0.0, WARP, size=(2, KNOTS, KNOTS))

    x, y = _grid()
    weights = _knot_weights()
    from_x = x - shift[0] + weights @ bend[0] @ weights.T
    from_y = y - shift[1] + weights @ bend[1] @ weights.T
    depth = 1 + tilt[0] * from_x + tilt[1] * from_y
    inverse = np.linalg.inv(forward)
    column = (inverse[0, 0] * from_x + inverse[0, 1] * from_y) / depth + (width + 1) / 2
    row = (inverse[1, 0] * from_x + inverse[1, 1] * from_y) / depth + (height + 1) / 2
    fine = _sample(source, row, column)
    coarse = fine.reshape(SIDE, OVERSAMPLING, SIDE, OVERSAMPLING).mean(axis=(1, 3))
    inked: Floats = np.rint(coarse * random.uniform(*GAIN))
    return np.minimum(inked, 255).astype(np.uint8)


@functools.cache
def _grid() -> tuple[Floats, Floats]:
    """x and y of every fine pixel, in final pixels from the centre."""
    line = (np.arange(SIDE * OVERSAMPLING) + 0.5) / OVERSAMPLING - SIDE / 2
    return line[None, :], line[:, None]


@functools.cache
def _knot_weights() -> Floats:
    """Smooth weights [fine pixels, KNOTS] that spread a displacement from the knots to the pixels."""
    line = np.linspace(0, KNOTS - 1, SIDE * OVERSAMPLING)
    weights = np.exp(-((line[:, None] - np.arange(KNOTS)) ** 2))
    normalised: Floats = weights / weights.sum(axis=1, keepdims=True)
    return normalised


def _sample(image: Floats, row: Floats, column: Floats) -> Floats:
    """Bilinear samples; outside the image lies its border, which is blank."""
    row = np.clip(row, 0, image.shape[0] - 1.001)
    column = np.clip(column, 0, image.shape[1] - 1.001)
    top, left = row.astype(np.intp), column.astype(np.intp)
    down, right = row - top, column - left
    upper = image[top, left] * (1 - right) + image[top, left + 1] * right
    lower = image[top + 1, left] * (1 - right) + image[top + 1, left + 1] * right
    samples: Floats = upper * (1 - down) + lower * down
    return samples


def _info() -> dict[str, Any]:
    return {
        "source": "drawn from the DejaVu and STIX fonts that matplotlib ships",
        "generator": GENERATOR,
        "seed": SEED,
        "drawings": DRAWINGS,
        "convention": "ink 255 on 0",
        "freetype": features.version("freetype2"),
    }


def _cached(root: Path) -> ImageSet | None:
    """The cached copy if it is whole and this version's; one that is damaged or old is made anew."""
    if not image_set.exists(NAME, root):
        return None
    try:
        cached = image_set.load(NAME, root)
    except DataError:
        return None
    wanted = {"generator": GENERATOR, "seed": SEED, "drawings": DRAWINGS}
    return cached if {key: cached.info.get(key) for key in wanted} == wanted else None
