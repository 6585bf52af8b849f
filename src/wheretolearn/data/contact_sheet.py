"""A contact sheet: some images of some classes of every split, to see what a set looks like."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from wheretolearn.data.image_set import ImageSet, ImageSplit

MARGIN = 8
GAP = 2
LABEL_WIDTH = 190
LABEL_LENGTH = 32
HEADING = 22


def draw_contact_sheet(images: ImageSet, classes: int = 8, per_class: int = 12, cell: int = 56) -> Image.Image:
    """One row per class, evenly spread over each split; ``cell`` is the side of a drawing in pixels."""
    blocks = [_draw_split(split, classes, per_class, cell) for split in images.splits.values()]
    width = max(block.width for block in blocks)
    sheet = Image.new("RGB", (width, sum(block.height for block in blocks)), "white")
    top = 0
    for block in blocks:
        sheet.paste(block, (0, top))
        top += block.height
    return sheet


def _draw_split(split: ImageSplit, classes: int, per_class: int, cell: int) -> Image.Image:
    chosen = _spread(len(split.classes), classes)
    width = 2 * MARGIN + LABEL_WIDTH + per_class * (cell + GAP)
    height = HEADING + MARGIN + len(chosen) * (cell + GAP)
    block = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(block)
    font = ImageFont.load_default()
    shape = " x ".join(map(str, split.images.shape[1:]))
    heading = f"{split.name}: {len(split.classes)} classes, {len(split.images)} images, {shape}"
    pen.text((MARGIN, 5), heading, "black", font)
    for row, index in enumerate(chosen):
        top = HEADING + row * (cell + GAP)
        pen.text((MARGIN, top + cell // 2 - 6), _drawable(split.classes[index]), "black", font)
        first, count = int(split.class_offsets[index]), int(split.counts[index])
        for column, offset in enumerate(_spread(count, per_class)):
            left = MARGIN + LABEL_WIDTH + column * (cell + GAP)
            block.paste(_thumbnail(split.images[first + offset], cell), (left, top))
    return block


def _thumbnail(pixels: np.ndarray, cell: int) -> Image.Image:
    image = Image.fromarray(np.squeeze(pixels, axis=2) if pixels.shape[2] == 1 else np.asarray(pixels))
    return image.convert("RGB").resize((cell, cell), Image.Resampling.BICUBIC)


def _spread(count: int, wanted: int) -> list[int]:
    """Up to ``wanted`` indices, evenly spread over ``range(count)``."""
    wanted = min(count, wanted)
    return [index * count // wanted for index in range(wanted)]


def _drawable(text: str) -> str:
    """The end of ``text``, which tells classes apart, in what Pillow's fallback font can encode."""
    short = text if len(text) <= LABEL_LENGTH else f"..{text[2 - LABEL_LENGTH :]}"
    return short.encode("latin1", "replace").decode("latin1")
