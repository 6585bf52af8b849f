"""Which weights the mask of a run leaves open, as a map, and how far the masks of several seeds agree."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from matplotlib import rc_context
from torch import Tensor

from wheretolearn.continual.learners.la_maml import LaMAML
from wheretolearn.continual.learners.make import RULES as LOOK_AHEAD_RULES
from wheretolearn.continual.learners.make import make_learner
from wheretolearn.continual.training import settings_of as continual_settings
from wheretolearn.errors import UserError
from wheretolearn.fewshot.trained import load_trained
from wheretolearn.fewshot.training import finished as fewshot_finished
from wheretolearn.masks import RULES, layer_of
from wheretolearn.report.figures import INK, MUTED, STYLE, percent_axis, sparsity_pattern
from wheretolearn.report.lines import Drawing, new_figure, stem_of, title_of
from wheretolearn.report.page import ACCENTS, percent
from wheretolearn.runs import checkpoint
from wheretolearn.runs.folder import RunFolder

ONLINE_RULES = {"sparse-c-maml": "binary", "sparse-relu-c-maml": "relu"}
MOST_SPELLED = 100_000  # weights of a tensor whose data spells out each of them

OpenWeights = dict[str, np.ndarray]  # parameter -> where the inner loop may change it


def open_weights(run: RunFolder) -> OpenWeights | None:
    """As the run last saved them; None where nothing learns a mask, or none has been kept."""
    if run.protocol == "fewshot":
        return _fewshot(run)
    saved = checkpoint.load_latest(run)
    if saved is None:
        return None
    try:
        if run.protocol == "online":
            return _by_rule(ONLINE_RULES.get(str(run.config.get("learner"))), _under("mask.", saved.state["learner"]))
        return _continual(run, saved.state["learner"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise UserError(f"its checkpoint holds no mask that can be read ({error!r})") from None


def _fewshot(run: RunFolder) -> OpenWeights | None:
    kind = str(run.config.get("mask"))
    if kind == "fixed":
        return None
    if fewshot_finished(run):
        _, _, mask = load_trained(run)
        return {name: (t > mask.closed_below).numpy() for name, t in mask.openness().items()}
    saved = checkpoint.load_latest(run)
    return None if saved is None else _by_rule(kind, saved.state["mask"])


def _by_rule(kind: str | None, raw: Mapping[str, Tensor]) -> OpenWeights | None:
    if kind not in RULES or not raw:
        return None
    rule = RULES[kind]
    return {name: (rule.multiplier(t).abs() > rule.closed_below).numpy() for name, t in raw.items()}


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _continual(run: RunFolder, state: Mapping[str, Tensor]) -> OpenWeights | None:
    """As a learner sees it that takes over the run's state; how the inputs look is told by those it remembers."""
    config = continual_settings(run)
    if config.learner not in LOOK_AHEAD_RULES:
        return None
    *channels, height, width = (1, 1, *state["buffer.inputs"].shape[1:])
    shape = (height, width, channels[-1])
    learner = make_learner([config], [run.seed], shape, config.classes, config.tasks)
    assert isinstance(learner, LaMAML)
    learner.restore({name: tensor if tensor.ndim == 0 else tensor.unsqueeze(0) for name, tensor in state.items()})
    return {name: (rates[0] > 0).numpy() for name, rates in learner.network.views(learner.rates()).items()}


def mask_map(found: OpenWeights, label: str, slug: str, seed: int) -> Drawing | None:
    """Every matrix and filter, in ink where it is plastic; the data counts open weights by output."""
    pictured = {name: torch.from_numpy(part) for name, part in found.items() if part.ndim >= 2}
    if not pictured:
        return None
    figure = sparsity_pattern({name: part.float() for name, part in pictured.items()})
    shares = {layer_of(name): 1 - float(part.float().mean()) for name, part in pictured.items()}
    most, least = max(shares, key=lambda k: shares[k]), min(shares, key=lambda k: shares[k])
    caption = (
        f"Each small square is one weight, each group of them one filter; those in colour may change (seed {seed}). "
        "Rows are output channels and columns input channels; a linear layer has its inputs as rows. "
        f"Most is closed in {most} ({percent(shares[most])}), least in {least} ({percent(shares[least])})."
    )
    rows: list[Sequence[object]] = []
    for name, part in found.items():
        for number, row in enumerate(part.reshape(len(part), -1) if part.ndim else part.reshape(1, 1)):
            spelled = "".join("01"[int(bit)] for bit in row) if part.size <= MOST_SPELLED else ""
            rows.append((name, number, int(row.sum()), row.size, spelled))
    columns = ("tensor", "output", "open", "weights", "open_by_input")
    return Drawing(stem_of("mask", slug), figure, title_of("Which weights are plastic", label), caption, columns, rows)


@dataclass(frozen=True)
class Overlap:
    """Of the open weights of two masks: shared ones among all that either opens (Jaccard), and what chance gives.

    NaN where neither opens any.
    """

    shared: float
    chance: float
    agreement: float  # share of weights that are open in both or closed in both


def overlap(first: np.ndarray, second: np.ndarray) -> Overlap:
    either, both = (first | second).sum(), (first & second).sum()
    p, q = first.mean(), second.mean()
    by_chance = p * q  # of weights open in both, if each mask had opened its share anywhere
    return Overlap(
        float(both / either) if either else math.nan,
        float(by_chance / (p + q - by_chance)) if either else math.nan,
        float((first == second).mean()),
    )


@rc_context(STYLE)
def seed_overlap(found: Mapping[int, OpenWeights], label: str, slug: str) -> Drawing | None:
    """How far seeds open the same weights, tensor by tensor, beside what chance gives. Needs two seeds."""
    pairs = list(combinations(found, 2))
    if not pairs:
        return None
    tensors = list(next(iter(found.values())))
    measured = {name: [overlap(found[a][name], found[b][name]) for a, b in pairs] for name in tensors}
    title = title_of("Do seeds open the same weights?", label)
    caption = (
        "Of the weights that either of two seeds opens, the share that both open: mean over all pairs of "
        f"{len(found)} seeds, from least to most. Upright ticks: what chance gives masks of the same sizes. Hidden "
        "units come in another order with every seed, so only the input, the output and whole layers can agree. "
        "A tensor that is closed everywhere has no dot."
    )
    figure, axes = new_figure(title, caption, width=4.6, height=0.7 + 0.22 * len(tensors))
    for place, name in enumerate(tensors):
        shared = [one.shared for one in measured[name]]
        axes.plot([min(shared), max(shared)], [place, place], color=ACCENTS[0], linewidth=1.4)
        axes.plot(np.mean(shared), place, "o", color=ACCENTS[0], markersize=5)
        axes.plot(np.mean([one.chance for one in measured[name]]), place, "|", color=INK, markersize=9)
    axes.set_yticks(range(len(tensors)), tensors)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(tensors) - 0.5, -0.5)
    percent_axis(axes, "x")
    axes.set_xlim(-0.02, 1.02)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("open in both, of open in either", color=MUTED)
    rows = [
        (name, a, b, *("" if math.isnan(part) else part for part in (one.shared, one.chance)), one.agreement)
        for name in tensors
        for (a, b), one in zip(pairs, measured[name], strict=True)
    ]
    columns = ("tensor", "seed", "other_seed", "shared_of_either", "shared_by_chance", "agreement")
    return Drawing(stem_of("mask-overlap", slug), figure, title, caption, columns, rows)
