"""Sections about runs of any protocol: what they measured over time, their masks, and how they were made."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from wheretolearn.config import differences, from_dict
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.fewshot.records import settings_of as fewshot_settings
from wheretolearn.fewshot.trained import Evaluation
from wheretolearn.online.training import result as online_result
from wheretolearn.presets import load_preset, scale_named
from wheretolearn.report import continual, fewshot, online
from wheretolearn.report.lines import Drawing
from wheretolearn.report.open_weights import OpenWeights, mask_map, open_weights, seed_overlap
from wheretolearn.report.page import Html, breakable, duration, element, percent, table, value
from wheretolearn.report.sections import Section, gallery
from wheretolearn.reproduce.protocols import PROTOCOLS, config_of
from wheretolearn.runs.folder import RunFolder
from wheretolearn.storage import read_json
from wheretolearn.wording import some

Notify = Callable[[str], None]
PLAIN = ("delay, steps",)  # measures that are no shares


@dataclass(frozen=True)
class _Kind:
    """What a protocol's runs are to a page."""

    module: Any  # with read_run, group_runs and draw
    begun: Callable[[Any], bool]
    stream: Callable[[Any], str]  # what a config learns from: runs of one stream share figures
    measures: Callable[[Any], dict[str, float]]
    end: Callable[[Any], int | None]  # the last step, where the settings tell


def run_sections(runs: Sequence[RunFolder], notify: Notify) -> list[Section]:
    """One section for each stream that runs learn from, and one about the runs themselves."""
    sections, shown, empty = [], [], []
    for protocol, kind in KINDS.items():
        read = [kind.module.read_run(run) for run in runs if run.protocol == protocol]
        own = [run for run in read if kind.begun(run)]
        empty += [run.folder.path for run in read if not kind.begun(run)]
        shown += [run.folder for run in own]
        streams: dict[str, list[Any]] = {}
        for run in own:
            streams.setdefault(kind.stream(run.config), []).append(run)
        sections += [_stream_section(kind, stream, found, notify) for stream, found in streams.items()]
    if empty:
        what = "has measured nothing yet and is" if len(empty) == 1 else "have measured nothing yet and are"
        notify(f"{some(empty)} {what} left out")
    if not shown:
        raise UserError("nothing to report yet: none of these runs has measured anything")
    return [*sections, Section("The runs", [_details(shown)])]


def _stream_section(kind: _Kind, stream: str, runs: Sequence[Any], notify: Notify) -> Section:
    groups = _named_by_preset(kind.module.group_runs(runs))
    drawings: list[Drawing] = kind.module.draw(groups)
    if kind.module is continual and len(groups) > 1:
        with suppress(ConfigError):  # they differ in more than one setting, or too few are finished
            drawings.append(continual.sweep(groups))
    parts = [_measures(kind, groups), gallery(drawings, Section(stream, ()).anchor)]
    masks = sorted(
        (drawing for group in groups for drawing in _mask_drawings(group, notify)),
        key=lambda drawing: "overlap" in drawing.stem,  # maps first: overlaps fit side by side
    )
    if masks:
        parts += [element("h3", "Masks"), gallery(masks, Section(stream, ()).anchor)]
    return Section(stream, parts)


def _named_by_preset(groups: Sequence[Any]) -> list[Any]:
    """Groups of one preset each are called by what sets those presets apart; others keep their settings as names."""
    presets = [{(run.folder.preset, run.folder.scale) for run in group.runs} for group in groups]
    names = [next(iter(own))[0] if len(own) == 1 else None for own in presets]
    if None in names or len(set(names)) < len(names):
        return list(groups)
    parts = [str(name).split(".") for name in names]
    common = set.intersection(*(set(own) for own in parts)) if len(parts) > 1 else {parts[0][0]}
    return [
        replace(group, label=" ".join(p for p in own if p not in common), slug="-".join(own))
        for group, own in zip(groups, parts, strict=True)
    ]


def _mask_drawings(group: Any, notify: Notify) -> Iterator[Drawing]:
    """The map of one seed, and how far it agrees with others."""
    found: dict[int, OpenWeights] = {}
    for run in group.runs:
        try:
            mask = open_weights(run.folder)
        except UserError as error:
            notify(f"no mask is drawn of {run.folder.path}: {error}")
            continue
        if mask is not None:
            found[run.folder.seed] = mask
    if found:
        seed = min(found)
        drawn = mask_map(found[seed], group.label, group.slug, seed)
        both = seed_overlap(found, group.label, group.slug)
        yield from (drawing for drawing in (drawn, both) if drawing is not None)


def _measures(kind: _Kind, groups: Sequence[Any]) -> Html:
    """A row for each group: what its runs measured, mean and standard deviation over seeds."""
    found = [[kind.measures(run) for run in group.runs] for group in groups]
    names = list(dict.fromkeys(name for group in found for own in group for name in own))
    rows = []
    for group, own in zip(groups, found, strict=True):
        cells = [_mean(name, [measures[name] for measures in own if name in measures]) for name in names]
        rows.append([group.name, *cells, value(str(len(group.runs)), float(len(group.runs)))])
    caption = "Mean over seeds ± standard deviation; %, but for delays"
    return table(["Runs", *names, "seeds"], rows, caption, sortable=True)


def _mean(name: str, values: Sequence[float]) -> Html | str:
    if not values:
        return ""
    factor = 1 if name in PLAIN else 100
    mean = factor * statistics.fmean(values)
    std = f" ± {factor * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return value(f"{mean:.2f}{std}", mean)


def _fewshot_measures(run: fewshot.FewShotRun) -> dict[str, float]:
    found = {}
    if run.accuracy:
        found["best in validation"] = max(run.accuracy.values())
    for path in sorted((run.folder.path / "evaluations").glob("*.json")):
        measured = from_dict(Evaluation, read_json(path), where=str(path))
        found[f"{measured.what}, {measured.steps} steps"] = measured.accuracy
    if run.learns_mask:
        found["closed weights"] = run.sparsity[max(run.sparsity)][fewshot.OVERALL]
    return found


def _continual_measures(run: continual.ContinualRun) -> dict[str, float]:
    if run.result is None:
        return {}
    names = {"ra": "RA", "bti": "BTI", "forward_transfer": "forward transfer", "sparsity": "closed weights"}
    return {name: run.result[key] for key, name in names.items() if run.result.get(key) is not None}


def _online_measures(run: online.OnlineRun) -> dict[str, float]:
    means = run.accuracy[max(run.accuracy)]
    found = {"accuracy": means[online.TOTAL]}
    found |= {f"on {source}": mean for source, mean in means.items() if source != online.TOTAL}
    if not run.finished:
        return found
    result = online_result(run.folder)
    if result.get("sparsity") is not None:
        found["closed weights"] = result["sparsity"]
    names = {"recall": "changes noticed", "precision": "alarms that are right", "delay": "delay, steps"}
    detection: Mapping[str, float | None] = result.get("detection", {})
    return found | {name: share for key, name in names.items() if (share := detection.get(key)) is not None}


def _details(runs: Sequence[RunFolder]) -> Html:
    """How each run was made: enough to judge it and to make it again."""
    rows = []
    for run in runs:
        last = max(run.metrics(), key=lambda record: int(record["step"]), default={"step": 0})
        seconds = float(last.get("elapsed_seconds", math.nan))
        time = value(duration(seconds), seconds) if math.isfinite(seconds) else ""
        commit = str(run.info.get("commit") or "").partition("+")
        rows.append(
            [
                breakable(run.path.name),
                element("span", run.preset or "", class_="nowrap"),
                value(str(run.seed), float(run.seed)),
                element("code", _changed_settings(run)),
                _progress(run, int(last["step"])),
                time,
                element("span", str(run.info.get("hardware", "")), class_="nowrap"),
                element("code", commit[0][:10] + commit[1] + commit[2]),
                element("span", str(run.info.get("started", ""))[:16].replace("T", " "), class_="nowrap"),
            ]
        )
    header = ["Run", "preset", "seed", "other than the preset", "state", "time", "hardware", "commit", "started (UTC)"]
    return table(header, rows, f"{len(runs)} runs", sortable=True)


def _progress(run: RunFolder, step: int) -> Html:
    if PROTOCOLS[run.protocol].finished(run):
        return value("finished", 1.0)
    end = KINDS[run.protocol].end(run.config)
    share = f"{percent(step / end)} done" if end else f"{step:,} steps done"
    return value(share, step / end if end else 0.0)


def _changed_settings(run: RunFolder) -> str:
    try:
        return " ".join(changed_settings(run).values())
    except ConfigError:
        return "its preset is gone"


def changed_settings(run: RunFolder) -> dict[str, str]:
    """The settings in which a run differs from its preset; all that matter where it has none."""
    kind = PROTOCOLS[run.protocol]
    found = fewshot_settings(run) if run.protocol == "fewshot" else from_dict(kind.settings, run.config, str(run.path))
    return differences(kind.settings() if run.preset is None else _wanted(run), found)


def _wanted(run: RunFolder) -> Any:
    config = config_of(load_preset(str(run.preset), scale=scale_named(run.scale or "paper")))
    return replace(config, start_from=None) if run.protocol == "fewshot" else config


def _continual_stream(config: Any) -> str:
    if config.problem == "split":
        return f"Continual: split {config.data}, memory {config.memory}"
    return f"Continual: {config.tasks} {config.problem} of {config.data}"


KINDS = {
    "fewshot": _Kind(
        fewshot,
        lambda run: run.begun,
        lambda config: f"Few-shot: {config.ways}-way {config.shots}-shot {config.data}",
        _fewshot_measures,
        lambda config: config.get("outer_steps"),
    ),
    "continual": _Kind(
        continual,
        lambda run: bool(run.tasks_learned or run.sparsity),
        _continual_stream,
        _continual_measures,
        lambda config: None,
    ),
    "online": _Kind(
        online,
        lambda run: bool(run.accuracies),
        lambda config: f"Online: {' + '.join(s.label for s in config.sources)}, p = {config.p:g}",
        _online_measures,
        lambda config: config.get("steps"),
    ),
}
