"""Parts that the pages of runs and of records share."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from wheretolearn.report.lines import Drawing, data_csv, without_words
from wheretolearn.report.page import (
    Html,
    card,
    contents,
    download,
    element,
    figure_svg,
    join,
    page,
    save_button,
)
from wheretolearn.version import __version__

SMALLEST = 0.95  # pixels per point of a drawing: with less, a phone's reader could not read its labels
LARGEST = 1.45
WIDE = 460  # points; wider drawings have a row of their own


@dataclass(frozen=True)
class Section:
    """One card of a page."""

    heading: str
    parts: Sequence[str]
    short: str = ""  # for the list at the top; default: the heading

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.heading.lower()).strip("-")


def report_page(title: str, about: str, sections: Sequence[Section], before: Sequence[str] = ()) -> str:
    """The whole page as HTML text, its sections listed at the top."""
    links = (
        [contents((section.anchor, section.short or section.heading) for section in sections)]
        if len(sections) > 1
        else []
    )
    cards = [card(section.heading, *section.parts, anchor=section.anchor) for section in sections]
    return page(title, join([*before, *links, *cards]), about, f"Made with wheretolearn {__version__}.", scripted=True)


def shown(drawing: Drawing, place: str) -> Html:
    """A drawing with its title and caption as text; it can be saved, and so can its data. ``place`` tells files apart.

    The drawing's own figure is changed.
    """
    figure = without_words(drawing)
    width = 72 * figure.get_size_inches()[0]
    name = f"{place}-{drawing.stem}"
    least, most = round(SMALLEST * width), round(LARGEST * width)
    svg = figure_svg(figure, f"{drawing.title}. {drawing.caption}", salt=name)
    box = element("div", svg, class_="scroll drawing", style=f"--least: {least}px; --most: {most}px", tabindex="0")
    data = download(f"{name}.csv", data_csv(drawing), "text/csv;charset=utf-8", "Save data")
    parts = [
        element("h3", drawing.title),
        box,
        element("figcaption", drawing.caption),
        element("div", join([save_button(f"{name}.svg"), data]), class_="tools"),
    ]
    return element("figure", join(parts), class_="shown wide" if width > WIDE else "shown")


def gallery(drawings: Sequence[Drawing], place: str) -> Html:
    """Drawings side by side where there is room."""
    return element("div", join(shown(drawing, place) for drawing in drawings), class_="gallery")
