import re

from matplotlib.figure import Figure

from wheretolearn.report.page import (
    ACCENTS,
    THEME,
    Html,
    Tile,
    card,
    duration,
    element,
    figure_svg,
    interval,
    page,
    percent,
    table,
    tiles,
)


def drawing(colour: str = ACCENTS[0]) -> Figure:
    figure = Figure(figsize=(2, 1))
    axes = figure.subplots()
    axes.plot([1, 2], [3, 4], "o-", color=colour)
    return figure


def test_text_is_escaped_and_markup_is_kept() -> None:
    text = card("a < b", element("p", "x & y"))
    assert "<h2>a &lt; b</h2>" in text
    assert "<p>x &amp; y</p>" in text


def test_attributes_are_escaped() -> None:
    assert element("p", "", title='"><script>') == '<p title="&quot;&gt;&lt;script&gt;"></p>'


def test_a_page_has_language_viewport_title_and_a_policy_against_requests() -> None:
    text = page("Title & more", Html("<p>body</p>"), about="lead")
    assert '<html lang="en">' in text
    assert '<meta name="viewport"' in text
    assert "<title>Title &amp; more</title>" in text
    assert "default-src 'none'" in text
    assert "<p>body</p>" in text


def test_a_page_is_dark_where_the_reader_is() -> None:
    dark = page("t", "").split("prefers-color-scheme: dark", 1)[1]
    assert f"--ink: {THEME['ink'][1]}" in dark


def test_a_table_has_headers_for_its_columns_and_rows() -> None:
    text = table(["name", "value"], [["a", "1"], ["b", "<2>"]], "caption")
    assert text.count('scope="col"') == 2
    assert text.count('scope="row"') == 2
    assert "<td>&lt;2&gt;</td>" in text
    assert "<caption>caption</caption>" in text


def test_six_tiles_stand_in_two_rows_of_three() -> None:
    text = tiles([Tile(f"label {i}", f"{i}") for i in range(6)])
    assert "--columns: 3" in text
    assert text.count('class="tile"') == 6


def test_svg_says_what_it_shows_and_refers_to_nothing_outside() -> None:
    svg = figure_svg(drawing(), 'a "curve"')
    assert svg.startswith("<svg viewBox=")
    assert 'role="img" aria-label="a &quot;curve&quot;"' in svg
    assert "http" not in svg
    assert "<style" not in svg


def test_svg_takes_its_colours_from_the_page() -> None:
    svg = figure_svg(drawing(THEME["ink"][0]), "curve")
    assert "var(--ink)" in svg
    assert THEME["ink"][0] not in svg


def test_every_id_of_an_svg_is_used() -> None:
    svg = figure_svg(drawing(), "curve")
    ids = re.findall(r' id="([^"]+)"', svg)
    assert ids
    assert all(f"#{name}" in svg for name in ids)


def test_two_figures_share_no_id() -> None:
    first, second = (set(re.findall(r' id="([^"]+)"', figure_svg(drawing(), label))) for label in ("one", "two"))
    assert not first & second


def test_numbers_are_written_with_one_decimal() -> None:
    assert percent(0.9149) == "91.5\u00a0%"
    assert interval(0.9149, 0.012) == "91.5 ± 1.2\u00a0%"
    assert interval(0.9149, float("inf")) == "91.5\u00a0%"


def test_durations_change_unit_with_their_length() -> None:
    assert [duration(s) for s in (0.04, 59.94, 59.96, 61, 3599.6, 7500)] == [
        "0.0 s",
        "59.9 s",
        "1 min 00 s",
        "1 min 01 s",
        "1 h 00 min",
        "2 h 05 min",
    ]
