"""One page that compares methods: what each may change, how well it learns, and what its mask looks like."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from wheretolearn.errors import ConfigError
from wheretolearn.masks import RULES, Sparsity
from wheretolearn.report import figures
from wheretolearn.report.figures import Bar, Curve
from wheretolearn.report.page import (
    ACCENTS,
    Html,
    Tile,
    card,
    details,
    duration,
    element,
    figure,
    figure_svg,
    interval,
    join,
    method_name,
    page,
    percent,
    table,
    tiles,
)
from wheretolearn.version import __version__

NORM_STRENGTH = 0.6  # opacity of batch norm, which has few weights


@dataclass(frozen=True)
class MethodResult:
    """What one method's run left behind, and how it did."""

    name: str
    about: str  # one line: what may change in the inner loop
    metrics: Sequence[Mapping[str, Any]]  # the run's records, oldest first
    accuracy: Mapping[str, tuple[float, float]]  # evaluation set -> mean and half width of its 95 % interval
    sparsity: Sparsity
    multipliers: Mapping[str, Tensor]
    seconds: float  # wall time of training
    config: Mapping[str, Any]
    seed: int

    @property
    def learned(self) -> bool:
        """Whether training changes the mask."""
        return self.config.get("mask") != "fixed"


def comparison_page(title: str, about: str, results: Sequence[MethodResult], facts: Mapping[str, str]) -> str:
    """The whole page as HTML text; ``facts`` says how it was made: hardware, versions, commit, command, date."""
    if not results:
        raise ConfigError("a comparison needs the result of at least one method")
    learned = [(r, accent) for r, accent in _with_accents(results) if r.learned]
    sections = [
        _tiles(results),
        _accuracy(results),
        _training(results),
        *([_pattern(learned)] if any(_drawable(r) for r, _ in learned) else []),
        _sparsity(results, learned),
        _making(results, facts),
    ]
    return page(title, join(sections), about, f"Made with wheretolearn {__version__}.")


def _with_accents(results: Sequence[MethodResult]) -> list[tuple[MethodResult, str]]:
    return [(result, ACCENTS[i % len(ACCENTS)]) for i, result in enumerate(results)]


def _tiles(results: Sequence[MethodResult]) -> Html:
    items = []
    for result, accent in _with_accents(results):
        for place, (mean, half_width) in list(result.accuracy.items())[:1]:
            width = f" (±\u00a0{percent(half_width)})" if math.isfinite(half_width) else ""
            items.append(Tile(result.name, percent(mean), f"accuracy on {place}{width}", accent))
    for result, accent in _with_accents(results):
        note = "of its weights are closed to the inner loop"
        items.append(Tile(result.name, percent(result.sparsity.overall), note, accent))
    return tiles(items)


def _accuracy(results: Sequence[MethodResult]) -> Html:
    places = list(dict.fromkeys(place for result in results for place in result.accuracy))
    rows = [
        [
            method_name(result.name, accent, result.about),
            *(_cell(interval(*result.accuracy[p]) if p in result.accuracy else "-") for p in places),
            _cell(percent(result.sparsity.overall)),
        ]
        for result, accent in _with_accents(results)
    ]
    parts = [table(["Method", *places, "closed weights"], rows, "Mean accuracy and its 95 % interval over tasks")]
    drawings = []
    for place in places:
        bars = [
            Bar(r.name, r.accuracy[place][0], accent, r.accuracy[place][1])
            for r, accent in _with_accents(results)
            if place in r.accuracy
        ]
        label = f"Accuracy on {place}: " + ", ".join(f"{b.name} {interval(b.value, b.half_width)}" for b in bars)
        drawings.append(figure_svg(figures.accuracy_bars(_sentence(place), bars, _chance(results)), label))
    if drawings:
        parts.append(figure(drawings, _accuracy_caption(results, places[0])))
    return card("Accuracy on new tasks", *parts)


def _accuracy_caption(results: Sequence[MethodResult], place: str) -> str:
    chance = _chance(results)
    guessing = f"; the dashed line is what guessing gives ({percent(chance)})" if chance is not None else ""
    ranked = sorted((r for r in results if place in r.accuracy), key=lambda r: -r.accuracy[place][0])
    if len(ranked) < 2:
        return f"Accuracy on tasks that training never saw, with the 95 % interval as a whisker{guessing}."
    (best, best_width), (second, second_width) = (r.accuracy[place] for r in ranked[:2])
    lead, width = best - second, math.hypot(best_width, second_width)  # of a difference of independent means
    by = f"{100 * lead:.1f} ± {100 * width:.1f} points" if math.isfinite(width) else f"{100 * lead:.1f} points"
    doubt = "" if lead > width else ", which chance alone could explain"
    return f"On {place}, {ranked[0].name} is ahead of {ranked[1].name} by {by}{doubt}{guessing}."


def _training(results: Sequence[MethodResult]) -> Html:
    losses = [_curve(r.name, r.metrics, "loss", accent) for r, accent in _with_accents(results)]
    accuracies = [_curve(r.name, r.metrics, "validation_accuracy", accent) for r, accent in _with_accents(results)]
    names = ", ".join(result.name for result in results)
    drawings = [
        figure_svg(figures.loss_curves(losses), f"Outer loss over training of {names}"),
        figure_svg(figures.accuracy_curves(accuracies, _chance(results)), f"Validation accuracy of {names}"),
    ]
    ends = [f"{c.name} ends at {percent(c.values[-1])}" for c in accuracies if c.values]
    progress = f"In validation, {_listed(ends)}." if ends else "No validation has been recorded yet."
    return card("Training", figure(drawings, f"Loss on the queries of training tasks, smoothed. {progress}"))


def _pattern(learned: Sequence[tuple[MethodResult, str]]) -> Html:
    drawings = []
    for result, _ in learned:
        if not _drawable(result):
            continue
        rule = RULES.get(str(result.config.get("mask")))
        drawing = figures.sparsity_pattern(result.multipliers, closed_below=rule.closed_below if rule else 0.0)
        shares = {
            name.removesuffix(".weight"): result.sparsity.by_tensor[name]
            for name, tensor in result.multipliers.items()
            if tensor.dim() >= 2
        }
        label = f"Mask of {result.name}: " + ", ".join(f"{k} {percent(v)} closed" for k, v in shares.items())
        most, least = max(shares, key=lambda k: shares[k]), min(shares, key=lambda k: shares[k])
        caption = f"{result.name} closes most in {most} ({percent(shares[most])})"
        caption += f" and least in {least} ({percent(shares[least])})." if most != least else "."
        drawings.append(figure([figure_svg(drawing, label)], caption, wide=True))
    about = (
        "Each small square is one weight, each group of them one filter. Rows are output channels and columns input "
        "channels; a linear layer has its inputs as rows. Biases and batch norm are not drawn."
    )
    return card("Where it learns", element("p", about), *drawings)


def _sparsity(results: Sequence[MethodResult], learned: Sequence[tuple[MethodResult, str]]) -> Html:
    layers = list(dict.fromkeys(layer for result in results for layer in _shares(result)))
    drawings = []
    for title, chosen, strength in (
        ("Weights", [layer for layer in layers if not _is_norm(layer)], 1.0),
        ("Batch norm", [layer for layer in layers if _is_norm(layer)], NORM_STRENGTH),
    ):
        bars = {
            layer: [Bar(r.name, _shares(r)[layer], a) for r, a in _with_accents(results) if layer in _shares(r)]
            for layer in chosen
        }
        if bars:
            label = f"{title} closed at the end, by layer: " + "; ".join(
                f"{layer} " + ", ".join(f"{bar.name} {percent(bar.value)}" for bar in group)
                for layer, group in bars.items()
            )
            drawings.append(figure_svg(figures.sparsity_bars(title, bars, strength), label))
    fixed = [r.name for r in results if not r.learned]
    remark = f" The mask of {_listed(fixed)} is fixed by hand, not learned." if fixed else ""
    caption = f"Share of each layer's weights that the inner loop leaves alone, from input (top) to output.{remark}"
    legend = join(element("span", method_name(r.name, accent)) for r, accent in _with_accents(results))
    parts = [element("h3", "At the end"), figure(drawings, caption, legend=legend if len(results) > 1 else "")]
    over_time = [
        figure_svg(
            figures.sparsity_curves(f"{_sentence(what)} of {r.name}", curves),
            f"Closed {what} of {r.name} over training",
        )
        for r, accent in learned
        for what, curves in _layer_curves(r, accent).items()
        if curves
    ]
    if over_time:
        caption = (
            "The same share while the mask learns, biases included; the stronger a line, the nearer its layer is "
            "to the output."
        )
        parts += [element("h3", "Over training"), figure(over_time, caption)]
    return card("Sparsity by layer", *parts)


def _layer_curves(result: MethodResult, accent: str) -> dict[str, list[Curve]]:
    """How each layer closes: layers of weights, and batch norm apart."""
    records = [{"step": r["step"], **r["sparsity_by_layer"]} for r in result.metrics if r.get("sparsity_by_layer")]
    layers = [layer for layer in records[-1] if layer != "step"] if records else []
    curves: dict[str, list[Curve]] = {}
    for what, strongest in (("weights", 1.0), ("batch norm", NORM_STRENGTH)):
        chosen = [layer for layer in layers if _is_norm(layer) == (what == "batch norm")]
        strengths = np.linspace(0.35 * strongest, strongest, len(chosen)) if len(chosen) > 1 else [strongest]
        curves[what] = [
            replace(_curve(layer, records, layer, accent), strength=float(strength))
            for layer, strength in zip(chosen, strengths, strict=False)
        ]
    return curves


def _making(results: Sequence[MethodResult], facts: Mapping[str, str]) -> Html:
    names = [method_name(result.name, accent) for result, accent in _with_accents(results)]
    keys = list(dict.fromkeys(key for result in results for key in result.config))
    differing = [key for key in keys if len({repr(r.config.get(key)) for r in results}) > 1]
    shared = [key for key in keys if key not in differing]
    rows = [[_words(key), *(_setting(r.config.get(key)) for r in results)] for key in differing]
    rows.append(["seed", *(str(r.seed) for r in results)])
    rows.append(["training time", *(duration(r.seconds) for r in results)])
    parts = [table(["Setting", *names], rows, "Settings that differ between the methods, seeds and wall time")]
    if facts:
        coded = ("command", "commit")
        facts_rows = [[name, element("code", text) if name.lower() in coded else text] for name, text in facts.items()]
        parts.append(table(["", ""], facts_rows, "Where and with what"))
    if shared:
        shared_rows = [[_words(key), _setting(results[0].config.get(key))] for key in shared]
        summary = "All settings" if len(results) == 1 else "Settings that all methods share"
        parts.append(details(summary, table(["", ""], shared_rows)))
    return card("How this was made", *parts)


def _curve(name: str, records: Sequence[Mapping[str, Any]], key: str, colour: str) -> Curve:
    """The finite values that the records hold under ``key``."""
    points = [(record["step"], record[key]) for record in records if key in record and math.isfinite(record[key])]
    return Curve(name, [step for step, _ in points], [value for _, value in points], colour)


def _chance(results: Sequence[MethodResult]) -> float | None:
    """What guessing gives, where all methods face equally many classes."""
    ways = {result.config.get("ways") for result in results}
    only = ways.pop() if len(ways) == 1 else None
    return 1 / only if isinstance(only, int) and only > 0 else None


def _shares(result: MethodResult) -> dict[str, float]:
    """Share of closed entries of each layer's weight tensor; biases are left to the overall number."""
    return {
        name.removesuffix(".weight"): share
        for name, share in result.sparsity.by_tensor.items()
        if not name.rpartition(".")[2].startswith("bias")
    }


def _is_norm(layer: str) -> bool:
    return re.search(r"norm|bn", layer.rpartition(".")[2].lower()) is not None


def _drawable(result: MethodResult) -> bool:
    return any(tensor.dim() >= 2 for tensor in result.multipliers.values())


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _words(key: str) -> str:
    return key.replace("_", " ")


def _setting(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _cell(text: str) -> Html:
    return element("span", text, class_="nowrap")


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
