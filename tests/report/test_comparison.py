import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

from wheretolearn import masks
from wheretolearn.errors import ConfigError
from wheretolearn.masks import GradientMask
from wheretolearn.models.conv4 import Conv4
from wheretolearn.report.comparison import MethodResult, comparison_page

VOID = {"meta", "link", "br", "img", "hr", "input"}
FACTS = {"hardware": "2 cores", "commit": "abc123", "command": "wheretolearn demo"}
HOSTILE = '<script>alert(1)</script> & "$x^{" \u4e2d'


class Reader(HTMLParser):
    """Checks that tags nest, and keeps what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def words(page: str) -> str:
    return " ".join(" ".join(read(page).text).split())


def records(mask: GradientMask, validation: bool) -> list[Mapping[str, Any]]:
    sparsity = mask.sparsity()
    return [
        {"step": step, "loss": 1 / step, "sparsity": sparsity.overall, "sparsity_by_layer": sparsity.by_layer}
        | ({"validation_accuracy": 0.5 + step / 1000} if validation and step % 20 == 0 else {})
        for step in range(1, 101)
    ]


def result(
    name: str = "sparse-MAML", kind: str = "binary", validation: bool = True, model: nn.Module | None = None
) -> MethodResult:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(8, 5)) if model is None else model
    mask = masks.fixed(model) if kind == "fixed" else masks.binary(model, generator=torch.Generator().manual_seed(0))
    return MethodResult(
        name=name,
        about=f"what {name} may change",
        metrics=records(mask, validation),
        accuracy={"held-out characters": (0.9123, 0.0142)},
        sparsity=mask.sparsity(),
        multipliers=mask.multipliers(),
        seconds=75.0,
        config={"ways": 5, "mask": kind, "inner_lr": 0.1, "bias": True, "outer_steps": 40000},
        seed=7,
    )


def two() -> list[MethodResult]:
    model = Conv4(ways=5, channels=1, size=28, width=8)
    sparse, maml = result(model=model), result("MAML", "fixed", model=model)
    return [
        replace(sparse, accuracy={**sparse.accuracy, "held-out scripts": (0.8567, 0.0213)}),
        replace(maml, accuracy={"held-out characters": (0.8011, 0.02)}),
    ]


@pytest.fixture(scope="module")
def page() -> str:
    return comparison_page("Title", "About", two(), FACTS)


def test_a_page_is_well_formed(page: str) -> None:
    reader = read(page)
    tags = Counter(tag for tag, _ in reader.tags)
    assert tags["h1"] == 1
    assert tags["svg"] == 9  # two evaluation sets, two of training, one pattern, two of the end, two over training
    assert tags["script"] == 0


def test_a_page_needs_nothing_from_elsewhere(page: str) -> None:
    for _, attributes in read(page).tags:
        for name in ("src", "href", "xlink:href", "srcset", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))
    assert "@import" not in page


def test_a_page_is_small_and_its_ids_are_unique(page: str) -> None:
    assert len(page.encode()) < 1_000_000
    ids = Counter(attributes["id"] for _, attributes in read(page).tags if "id" in attributes)
    assert max(ids.values()) == 1


def test_the_same_results_make_the_same_page(page: str) -> None:
    assert comparison_page("Title", "About", two(), FACTS) == page


def test_a_page_shows_the_numbers_of_each_method(page: str) -> None:
    text = words(page)
    for number in ("91.2 ± 1.4", "85.7 ± 2.1", "80.1 ± 2.0", f"{100 * two()[0].sparsity.overall:.1f}", "0.0"):
        assert f"{number} %" in text
    assert "1 min 15 s" in text
    assert "what sparse-MAML may change" in text


def test_a_page_says_how_it_was_made_with_differing_settings_first(page: str) -> None:
    text = words(page).split("How this was made", 1)[1]
    assert text.index("mask binary fixed") < text.index("seed 7 7") < text.index("hardware 2 cores")
    assert text.index("command wheretolearn demo") < text.index("outer steps 40,000")


def test_every_picture_is_described(page: str) -> None:
    pictures = [attributes for tag, attributes in read(page).tags if tag == "svg"]
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in pictures)


def test_a_hostile_name_stays_text() -> None:
    page = comparison_page(HOSTILE, HOSTILE, [result(HOSTILE)], {HOSTILE: HOSTILE})
    assert not any(tag == "script" for tag, _ in read(page).tags)
    assert HOSTILE in words(page)


def test_one_method_makes_a_page() -> None:
    text = words(comparison_page("Title", "About", [result()], FACTS))
    assert "All settings" in text
    assert "is ahead of" not in text


def test_three_methods_make_a_page() -> None:
    results = [result(), result("MAML", "fixed"), result("sparse-MAML+")]
    reader = read(comparison_page("Title", "About", results, FACTS))
    tiles = [attributes for tag, attributes in reader.tags if attributes.get("class") == "tile"]
    assert len(tiles) == 6
    assert len({attributes["style"] for attributes in tiles}) == 3


def test_a_page_without_validation_says_so() -> None:
    text = words(comparison_page("Title", "About", [result(validation=False)], FACTS))
    assert "No validation has been recorded yet." in text


def test_a_run_that_has_just_begun_makes_a_page() -> None:
    page = comparison_page("Title", "About", [replace(result(), metrics=[], accuracy={})], {})
    assert "sparse-MAML" in words(page)


def test_fixed_masks_have_no_pattern_and_no_curves() -> None:
    text = words(comparison_page("Title", "About", [result("MAML", "fixed")], FACTS))
    assert "Where it learns" not in text
    assert "Over training" not in text
    assert "The mask of MAML is fixed by hand" in text


def test_an_infinite_loss_is_left_out() -> None:
    broken = replace(result(), metrics=[*result().metrics, {"step": 101, "loss": float("nan")}])
    assert "Training" in words(comparison_page("Title", "About", [broken], FACTS))


def test_a_lead_within_its_interval_is_called_doubtful() -> None:
    rival = replace(result("rival"), accuracy={"held-out characters": (0.9, 0.02)})
    text = words(comparison_page("Title", "About", [result(), rival], FACTS))
    assert "sparse-MAML is ahead of rival by 1.2 ± 2.5 points, which chance alone could explain" in text


def test_the_chance_level_is_left_out_where_methods_face_different_tasks(page: str) -> None:
    other = replace(result("other"), config={"ways": 20, "mask": "binary"})
    assert "what guessing gives" in words(page)
    assert "what guessing gives" not in words(comparison_page("Title", "About", [result(), other], FACTS))


def test_no_results_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one method"):
        comparison_page("Title", "About", [], FACTS)
