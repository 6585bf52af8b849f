"""Self-contained HTML pages: small pure functions that turn text and figures into well-set, escaped HTML.

Plain strings are escaped wherever they go; only ``Html``, which these functions return, is taken as it is.
"""

import base64
import hashlib
import html
import io
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Figures are drawn in the first colour of each pair; inside a page, dark mode turns it into the second.
THEME = {
    "ground": ("#f7f6f3", "#12151b"),
    "card": ("#ffffff", "#1b1f28"),
    "ink": ("#1c2330", "#e9eaee"),
    "muted": ("#5d6675", "#a0a8b6"),
    "line": ("#e3e1db", "#333a47"),
    # Told apart with every kind of colour vision, and by their lightness alone in print.
    "accent1": ("#126148", "#85ebbd"),
    "accent2": ("#e37611", "#d6440e"),
    "accent3": ("#572f96", "#bebfef"),
    "accent4": ("#b64c95", "#c86b96"),
    "accent5": ("#7e5f24", "#c4ae69"),
    "accent6": ("#2f7ff9", "#7a97fd"),
}
ACCENTS = tuple(light for name, (light, _) in THEME.items() if name.startswith("accent"))
# Pictures of pixels cannot follow the theme: a colour that stands out from a light and from a dark card alike.
PICTURE_INK = "#168d7e"


class Html(str):
    """Markup that needs no escaping."""


@dataclass(frozen=True)
class Tile:
    """A key number: what it is, its value, a remark, and the colour of the method it belongs to."""

    label: str
    value: str
    note: str = ""
    accent: str = THEME["muted"][0]


def escaped(text: str) -> Html:
    return text if isinstance(text, Html) else Html(html.escape(text))


def join(parts: Iterable[str], between: str = "\n") -> Html:
    return Html(escaped(between).join(escaped(part) for part in parts))


def element(tag: str, content: str = "", **attributes: str) -> Html:
    """``element("p", "text", class_="lead")``; underscores in attribute names stand for hyphens."""
    written = "".join(f' {k.rstrip("_").replace("_", "-")}="{html.escape(v)}"' for k, v in attributes.items())
    return Html(f"<{tag}{written}>{escaped(content)}</{tag}>")


def page(title: str, body: str, about: str = "", footer: str = "", scripted: bool = False) -> str:
    """A whole document: light and dark, any width, and a policy that forbids every request.

    A ``scripted`` one sorts its tables and saves its figures; without JavaScript it shows the same.
    """
    script = files(__package__).joinpath("page.js").read_text(encoding="utf-8") if scripted else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    policy += f"; script-src 'sha256-{digest}'" if script else ""
    header = join([element("h1", title), *([element("p", about, class_="lead")] if about else [])])
    parts = [element("header", header), element("main", body)]
    if footer:
        parts.append(element("footer", footer))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{escaped(title)}</title>
<style>{_css()}</style>
</head>
<body>
{join(parts)}
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


def card(heading: str, *parts: str, anchor: str = "") -> Html:
    """A titled section on a ground of its own, which links can name by its anchor."""
    place = {"id": anchor} if anchor else {}
    return element("section", join([element("h2", heading), *parts]), class_="card", **place)


def contents(sections: Iterable[tuple[str, str]]) -> Html:
    """Links to the cards of a page, by anchor and heading."""
    links = join(element("a", heading, href=f"#{anchor}") for anchor, heading in sections)
    return element("nav", links, class_="contents", aria_label="Contents")


def tiles(items: Sequence[Tile]) -> Html:
    """Key numbers in large type, in rows of at most four (two on a phone)."""
    columns = len(items) if len(items) <= 4 else 3 if len(items) % 3 == 0 else 4
    return element("div", join(_tile(item) for item in items), class_="tiles", style=f"--columns: {columns}")


def _tile(item: Tile) -> Html:
    lines = [element("p", item.label, class_="label"), element("p", item.value, class_="value")]
    if item.note:
        lines.append(element("p", item.note, class_="note"))
    return element("div", join(lines), class_="tile", style=f"--accent: {themed(item.accent)}")


def breakable(name: str) -> Html:
    """A dotted name that may go on in another line after each dot."""
    return Html(html.escape(name).replace(".", ".<wbr>"))


def value(text: str, key: float | str) -> Html:
    """A table's cell that is sorted by something else than its text."""
    return element("data", text, value=f"{key:.9g}" if isinstance(key, float) else str(key))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", sortable: bool = False) -> Html:
    """The first cell of each row is its header. A wide table scrolls by itself, not the page."""
    columns = join(element("th", name, scope="col") for name in header)
    lines = [
        element("tr", join([element("th", first, scope="row"), *(element("td", cell) for cell in cells)]))
        for first, *cells in rows
    ]
    parts = [element("caption", caption)] if caption and not sortable else []
    if any(header):
        parts.append(element("thead", element("tr", columns)))
    kind = {"class": "sortable"} if sortable else {}
    whole = element("table", join([*parts, element("tbody", join(lines))]), **kind)
    # Whoever has no mouse scrolls with the arrow keys, which takes focus.
    box = element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption or "Table")
    # Wide tables scroll, and their captions should not.
    return join([element("p", caption, class_="caption"), box]) if caption and sortable else box


def figure(drawings: Sequence[str], caption: str, wide: bool = False, legend: str = "") -> Html:
    """Drawings side by side (one below the other where narrow) over one caption; a wide one scrolls on a phone."""
    holder = element("div", join(drawings), class_="scroll wide" if wide else "drawings")
    above = [element("p", legend, class_="legend")] if legend else []
    return element("figure", join([*above, holder, element("figcaption", caption)]))


def method_name(name: str, accent: str, about: str = "") -> Html:
    """A method's name beside a spot of its colour, and one line about it."""
    spot = element("span", class_="spot", style=f"--accent: {themed(accent)}", aria_hidden="true")
    return join([spot, name, *([element("span", about, class_="about")] if about else [])])


def details(summary: str, content: str) -> Html:
    """Content that opens on demand."""
    return element("details", join([element("summary", summary), content]))


def download(name: str, content: str, kind: str, text: str) -> Html:
    """A link that saves a file which the page itself carries."""
    held = f"data:{kind};base64,{base64.b64encode(content.encode()).decode()}"
    return element("a", text, href=held, download=name)


def save_button(name: str) -> Html:
    """Saves the drawing of the figure it stands in; without JavaScript it does not show."""
    return element("button", "Save drawing", class_="save", type="button", hidden="", data_name=name)


def themed(text: str) -> str:
    """Text in which the theme's light colours follow the reader's theme."""
    for name, (light, _) in THEME.items():
        text = text.replace(light, f"var(--{name})")
    return text


def figure_svg(drawing: "Figure", label: str, salt: str = "") -> Html:
    """A matplotlib figure as inline SVG: the page's fonts and colours, text as text, ``label`` for screen readers.

    Figures of one page that share a label need a ``salt`` of their own, to keep their parts apart.
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt + label}), warnings.catch_warnings():
        # The browser sets the text, so it matters little if matplotlib's font lacks a letter.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        drawing.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return Html(_adapt_svg(text.getvalue(), label))


def _adapt_svg(svg: str, label: str) -> str:
    """Make matplotlib's file part of a page: nothing that points outside it, no id twice, colours that follow it."""
    view = re.search(r'viewBox="[^"]*"', svg)
    assert view is not None
    svg = svg[svg.index(">", view.start()) + 1 :]  # without the prologue and the <svg> tag itself
    svg = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace("xlink:href", "href").replace("base64,\n", "base64,")
    svg = re.sub(r"'DejaVu Sans'[^;\"]*sans-serif", "var(--font)", svg)
    svg = re.sub(r' style="image-rendering:[^"]*"', "", svg)  # bitmaps are drawn large and scale down smoothly
    referred = set(re.findall(r'(?:href="|url\()#([\w.-]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in referred else "", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    return f'<svg {view[0]} role="img" aria-label="{html.escape(label)}">{themed(svg.strip())}'


def percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"  # the space must not break


def interval(mean: float, half_width: float) -> str:
    """Mean and half width of its interval; the latter only where it is known (one value has none)."""
    return f"{100 * mean:.1f} ± {percent(half_width)}" if math.isfinite(half_width) else percent(mean)


def duration(seconds: float) -> str:
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _css() -> str:
    light, dark = ("; ".join(f"--{name}: {pair[i]}" for name, pair in THEME.items()) for i in (0, 1))
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{_RULES}"


_RULES = """
:root { color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif;
  --mono: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace }
* { box-sizing: border-box }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.55 var(--font);
  overflow-wrap: break-word; -webkit-text-size-adjust: 100% }
header, main, footer { max-width: 1000px; margin: 0 auto; padding: 0 20px }
header { padding-top: 56px; padding-bottom: 12px }
h1 { font-size: clamp(28px, 5vw, 40px); line-height: 1.15; letter-spacing: -.02em; margin: 0 0 12px;
  font-weight: 680; text-wrap: balance; overflow-wrap: anywhere }
h2 { font-size: 20px; line-height: 1.3; letter-spacing: -.01em; margin: 0 0 6px; font-weight: 640 }
h3 { font-size: 16px; margin: 32px 0 0; font-weight: 640 }
p { margin: 0 0 12px; max-width: 70ch }
.lead { font-size: 18px; color: var(--muted) }
.card, .tile { background: var(--card); border: 1px solid var(--line); border-radius: 14px }
.card { padding: 28px; margin: 24px 0 }
.card > p { color: var(--muted); font-size: 15px }
.contents { display: flex; flex-wrap: wrap; gap: 6px 18px; font-size: 15px; margin: 20px 0 }
a { color: inherit; text-decoration-color: var(--muted); text-underline-offset: 3px }
.legend { min-width: 0; display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 14px; font-weight: 600 }
.legend > * { min-width: 0 }
.tiles { display: grid; grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); gap: 16px; margin: 24px 0 }
.tile { padding: 18px 20px 16px; border-top: 4px solid var(--accent); min-width: 0 }
.tile p { margin: 0; overflow-wrap: anywhere }
.tile .label { font-size: 14px; font-weight: 600 }
.tile .value { font-size: 38px; line-height: 1.2; font-weight: 680; letter-spacing: -.03em;
  font-variant-numeric: tabular-nums }
.tile .note { font-size: 14px; line-height: 1.4; color: var(--muted) }
/* A shade at the edge beyond which a box scrolls. */
.scroll { overflow-x: auto; background: linear-gradient(to right, var(--card) 30%, transparent) local,
  linear-gradient(to left, var(--card) 30%, transparent) 100% 0 local,
  linear-gradient(to right, rgb(128 128 128 / .35), transparent) scroll,
  linear-gradient(to left, rgb(128 128 128 / .35), transparent) 100% 0 scroll;
  background-repeat: no-repeat; background-size: 40px 100%, 40px 100%, 10px 100%, 10px 100% }
table { border-collapse: collapse; width: 100%; font-size: 15px; margin: 16px 0 4px;
  font-variant-numeric: tabular-nums }
caption, .card > .caption { text-align: left; color: var(--muted); font-size: 14px; padding-bottom: 6px }
th, td { text-align: left; vertical-align: top; padding: 9px 20px 9px 0; border-bottom: 1px solid var(--line) }
th:last-child, td:last-child { padding-right: 0 }
tbody tr:last-child > * { border-bottom: 0 }
thead th { font-size: 13px; font-weight: 600; color: var(--muted); white-space: nowrap }
tbody th { font-weight: 600; max-width: 30em }
th:has(.about) { min-width: 11em }
.sortable button { all: unset; cursor: pointer; padding: 6px 0; margin: -6px 0 }
.sortable button::after { content: "\\2195"; opacity: .55; padding-left: 5px }
.sortable [aria-sort=ascending] button::after { content: "\\2191"; opacity: 1 }
.sortable [aria-sort=descending] button::after { content: "\\2193"; opacity: 1 }
button:focus-visible, a:focus-visible, summary:focus-visible, .scroll:focus-visible {
  outline: 2px solid var(--accent6); outline-offset: 2px }
.tools { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14px; margin: 8px 0 0 }
.tools button { all: unset; cursor: pointer; text-decoration: underline; text-underline-offset: 3px;
  text-decoration-color: var(--muted) }
.tools button[hidden] { display: none }
.nowrap, data { white-space: nowrap }
.card > .caption { margin: 16px 0 -12px }
.sortable tbody th { position: sticky; left: 0; background: var(--card); padding-right: 14px; white-space: nowrap }
.sortable wbr { display: none }
.sortable td:has(code) { min-width: 12em }
.sortable td code { white-space: pre-wrap }
.outcome { font-weight: 600; white-space: nowrap }
.outcome::before { content: "\\2013"; display: inline-block; width: 1.2em; font-weight: 700 }
.outcome.matches::before { content: "\\2713"; color: var(--accent1) }
.outcome.better::before { content: "\\2191"; color: var(--accent6) }
.outcome.misses::before { content: "\\2717"; color: var(--accent2) }
.outcome.not-run, .outcome.measured { font-weight: 400; color: var(--muted) }
.card > .missing { font-size: 14px; margin: 10px 0 0 }
.card ul { padding-left: 1.2em; max-width: 80ch }
.card li { margin-bottom: 8px }
.spot { display: inline-block; width: 11px; height: 11px; border-radius: 50%; background: var(--accent);
  margin-right: 4px }
.about { display: block; font-weight: 400; font-size: 14px; color: var(--muted); padding-left: 19px }
code { font: 13.5px/1.5 var(--mono); overflow-wrap: anywhere }
figure { margin: 20px 0 0 }
figure + figure { margin-top: 36px }
figcaption { color: var(--muted); font-size: 14.5px; margin-top: 12px; max-width: 80ch }
.drawings { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 28px;
  align-items: start }
svg { display: block; width: 100%; height: auto; overflow: visible }
.drawings svg:only-child { max-width: 520px }
.wide svg { min-width: 680px }
svg * { stroke-linejoin: round; stroke-linecap: butt }
.gallery { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 36px 32px;
  align-items: start; margin-top: 24px }
.shown, .shown + .shown { margin: 0; min-width: 0 }
.shown.wide { grid-column: 1 / -1 }
.shown h3 { margin: 0 0 10px; font-size: 15px }
.drawing svg { min-width: var(--least); max-width: var(--most) }
details { margin-top: 20px }
summary { cursor: pointer; font-weight: 600; font-size: 15px }
footer { color: var(--muted); font-size: 14px; padding-top: 8px; padding-bottom: 56px }
@media (max-width: 640px) {
  header, main, footer { padding-left: 12px; padding-right: 12px }
  header { padding-top: 32px }
  .card { padding: 20px 14px; margin: 16px 0 }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; margin: 16px 0 }
  .tile { padding: 12px 14px }
  .tile .value { font-size: 28px }
  .sortable wbr { display: inline }
  .sortable tbody th { max-width: 42vw; white-space: normal; overflow-wrap: break-word }
}
@media print { body { background: none } .tile, figure, tr { break-inside: avoid } .tools, .contents { display: none } }
"""
