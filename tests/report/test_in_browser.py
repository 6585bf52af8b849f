"""Pages as a reader sees them: in Chromium, on a phone and on a desk, light and dark."""

from pathlib import Path
from typing import Any

import pytest

from wheretolearn.report.records import record_page
from wheretolearn.report.runs import run_sections
from wheretolearn.report.sections import report_page
from wheretolearn.runs.folder import RunFolder

RECORDS = Path(__file__).resolve().parents[2] / "results"
WIDTHS = (390, 1440)
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def run_page(runs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = [RunFolder.open(path) for path in sorted(runs_folder.iterdir())]
    path = tmp_path_factory.mktemp("pages") / "runs.html"
    path.write_text(report_page("Runs", "", run_sections(runs, lambda _: None)))
    return path


@pytest.fixture(scope="module")
def all_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of everything that this repository has on record."""
    path = tmp_path_factory.mktemp("pages") / "records.html"
    path.write_text(record_page(RECORDS))
    return path


@pytest.fixture(params=["run_page", "all_records"])
def page(request: pytest.FixtureRequest) -> Path:
    return Path(request.getfixturevalue(request.param))


def test_a_page_asks_for_nothing_and_complains_of_nothing(browser: Any, page: Path) -> None:
    browser.open(page)
    outside = [url for url in browser.requests if not url.startswith("data:")]
    assert outside == [page.resolve().as_uri()]
    assert browser.complaints == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_page_fits_its_screen_and_every_figure_is_seen(browser: Any, page: Path, width: int, scheme: str) -> None:
    browser.open(page)
    browser.show(width, scheme)
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    # What is too wide for its card scrolls in a box of its own.
    beyond = """[...document.querySelectorAll("body *")].filter((part) => !part.closest(".scroll, svg")
        && part.getBoundingClientRect().right > innerWidth + 0.5).map((part) => part.outerHTML.slice(0, 200))"""
    assert browser.evaluate(beyond) == []
    figures = browser.evaluate("""[...document.querySelectorAll("figure")].map((figure) => {
        const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
        const drawn = [...svg.querySelectorAll("path, image, use")].filter((part) => {
            const own = part.getBoundingClientRect();
            return own.width + own.height > 0;
        });
        const texts = [...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect().height);
        return {width: box.width, height: box.height, drawn: drawn.length, smallest: Math.min(...texts)};
    })""")
    assert len(figures) >= 8
    for figure in figures:
        assert figure["width"] > 250
        assert figure["height"] > 60
        assert figure["drawn"] > 3
        assert figure["smallest"] > 7  # pixels of a line of text
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in ground[4:-1].split(",")) < 300) == (scheme == "dark")


def column(browser: Any, number: int) -> list[str]:
    script = f"[...document.querySelector('table.sortable').tBodies[0].rows].map((r) => r.cells[{number}].textContent)"
    return [text.strip() for text in browser.evaluate(script)]


def click(browser: Any, number: int) -> str:
    browser.evaluate(f"document.querySelectorAll('table.sortable thead th button')[{number}].click()")
    return str(
        browser.evaluate(f"document.querySelectorAll('table.sortable thead th')[{number}].getAttribute('aria-sort')")
    )


def test_tables_sort_by_number_both_ways_and_keep_empty_cells_last(browser: Any, all_records: Path) -> None:
    browser.open(all_records)
    before = column(browser, 2)

    def number(text: str) -> float:
        return float(text.partition(" ")[0])

    there = [text for text in before if text]
    assert click(browser, 2) == "ascending"
    up = column(browser, 2)
    assert up != before
    assert [number(text) for text in up[: len(there)]] == sorted(map(number, there))
    assert not any(up[len(there) :])
    assert click(browser, 2) == "descending"
    down = column(browser, 2)
    assert [number(text) for text in down[: len(there)]] == sorted(map(number, there), reverse=True)
    assert not any(down[len(there) :])


def test_tables_sort_by_text(browser: Any, all_records: Path) -> None:
    browser.open(all_records)
    click(browser, 0)
    names = column(browser, 0)
    assert names == sorted(names)


def test_a_saved_drawing_stands_alone(browser: Any, run_page: Path) -> None:
    """In the colours that the reader sees, with nothing that only the page knows."""
    browser.open(run_page)
    browser.show(1440, "dark")
    text = browser.evaluate("""new Promise((resolve) => {
        URL.createObjectURL = (blob) => { blob.text().then(resolve); return "data:,"; };
        document.querySelector("button.save").click();
    })""")
    assert "var(" not in text
    assert 'xmlns="http://www.w3.org/2000/svg"' in text
    assert "#1b1f28" in text  # the dark card
    parse = f"new DOMParser().parseFromString({text!r}, 'image/svg+xml').querySelector('parsererror')"
    assert browser.evaluate(parse) is None


def test_a_page_without_scripts_shows_the_same_but_for_buttons(browser: Any, run_page: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(run_page)
        assert browser.evaluate("document.querySelectorAll('figure svg').length") >= 8
        assert browser.evaluate("getComputedStyle(document.querySelector('button.save')).display") == "none"
        assert browser.evaluate("document.querySelectorAll('a[download]').length") >= 8
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
