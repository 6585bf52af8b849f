"""``wheretolearn train``, ``resume`` and ``evaluate``: few-shot meta-learning."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from wheretolearn import cpu
from wheretolearn.cli import continual, online, streams
from wheretolearn.cli.common import (
    Device,
    TensorBoard,
    Threads,
    Workers,
    check_open_files,
    check_protocol,
    chosen_device,
    free_places,
    labels_of,
    runs_in,
    seed_range,
    threads_for,
)
from wheretolearn.cli.progress import TrainingBars, announce_stop, progress_bar
from wheretolearn.config import MAX_INT, from_dict, merge, parse_overrides, to_dict, toml_text
from wheretolearn.continual.records import CONTINUAL
from wheretolearn.data.load import load_set
from wheretolearn.engine.choose import choose
from wheretolearn.errors import ConfigError, UserError
from wheretolearn.fewshot.config import INCIDENTAL, FewShotConfig
from wheretolearn.fewshot.learner import load_start, new_learner
from wheretolearn.fewshot.records import default_splits, result_records, settings_of
from wheretolearn.fewshot.tasks import check_images, known_classes, split_of
from wheretolearn.fewshot.trained import Evaluation, evaluate_run, keep_evaluation, load_trained, planned
from wheretolearn.fewshot.training import finished, train_together
from wheretolearn.fewshot.worker import threads_each, train_in_processes
from wheretolearn.online.records import ONLINE
from wheretolearn.presets import Evaluate, Preset, Scale, load_preset, scale_named
from wheretolearn.runs import environment
from wheretolearn.runs.folder import MAX_SEED, RunFolder
from wheretolearn.runs.records import preset_of
from wheretolearn.runs.results import check_savable, check_seeds, save_records


def train(
    run: Annotated[
        Path, typer.Argument(help="Folder for the run, new or empty; for several runs: the folder that holds theirs.")
    ],
    presets: Annotated[
        list[str] | None,
        typer.Option("--preset", help="Start from this preset, or several; see `wheretolearn presets`."),
    ] = None,
    scale: Annotated[str, typer.Option(help="paper, or quick: a small version of the preset for a laptop.")] = "paper",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting: KEY=VALUE, as often as needed; see `wheretolearn settings`."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random, or the first one.", min=0, max=MAX_SEED)] = 0,
    seeds: Annotated[int, typer.Option(help="Train this many runs of each preset, with seeds in a row.", min=1)] = 1,
    device: Device = "auto",
    workers: Workers = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of each process; small networks are fastest with 1.", min=1)
    ] = None,
    tensorboard: TensorBoard = False,
) -> None:
    """Meta-train a model and its gradient mask. Stop it with Ctrl-C at any time; `resume` goes on exactly.

    With several presets or seeds the runs train together, in folders named by preset and seed: on a GPU as one
    program, on a CPU in processes of their own.
    """
    chosen_scale = scale_named(scale)
    numbers = seed_range(seed, seeds)
    device = chosen_device(device)
    names: list[str | None] = [*dict.fromkeys(presets or [])] or [None]
    configs = {name: _config(name, chosen_scale, overrides or []) for name in names}
    _check_effects(overrides or [], list(configs.values()))
    check_open_files(len(names) * len(numbers), device, workers, tensorboard)
    places = free_places(run, names, numbers)
    for config in configs.values():
        _check(config, seed, device)
    if device == "cpu":
        threads = threads or threads_each(len(places), workers)
    with ExitStack() as folders:
        runs = [
            folders.enter_context(
                RunFolder.create(
                    place,
                    to_dict(configs[name]),
                    number,
                    "fewshot",
                    name,
                    scale if name else None,
                    tensorboard,
                    threads=threads,
                )
            )
            for (name, number), place in places.items()
        ]
        _continue(runs, device, workers)


def resume(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folder of a run that was stopped or killed, or a folder of such runs."),
    ],
    device: Device = "auto",
    workers: Workers = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of each process; default: as many as they were begun with.", min=1)
    ] = None,
) -> None:
    """Continue runs from their last checkpoints, as if they had never stopped.

    On a CPU they have as many threads as before and end the same, bit for bit; on a GPU up to rounding.
    """
    device = chosen_device(device)
    with ExitStack() as folders:
        runs = [folders.enter_context(run) for run in runs_in(paths, wanted="unfinished")]
        check_open_files(len(runs), device, workers, any(run.tensorboard for run in runs))
        if device == "cpu":
            _tell_of_threads(runs, threads)
        for run in runs:
            run.threads = threads or run.threads
        if fewshot := [run for run in runs if run.protocol == "fewshot"]:
            _continue(fewshot, device, workers)
        if others := [run for run in runs if run.protocol == "continual"]:
            continual.take_to_the_end(others, device, workers)
        if others := [run for run in runs if run.protocol == "online"]:
            online.take_to_the_end(others, device, workers)


def evaluate(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folder of a finished run, or a folder of such runs.")
    ],
    splits: Annotated[
        list[str] | None,
        typer.Option(
            "--split",
            help="Split whose classes make the tasks, as often as needed; "
            "default: the preset's, or all but those of training.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Image set (another: cross-domain), as often as needed; default: the preset's or the run's."),
    ] = None,
    tasks: Annotated[int | None, typer.Option(help="Number of tasks; default: 300.", min=2, max=MAX_INT)] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Inner steps; default: the preset's, or the run's test_inner_steps.", min=0, max=MAX_INT),
    ] = None,
    ensemble: Annotated[
        bool, typer.Option("--ensemble", help="Measure the mean prediction of each run's best models as well.")
    ] = False,
    record: Annotated[Path | None, typer.Option(help="Write result records to this folder.")] = None,
    preset_name: Annotated[
        str | None,
        typer.Option(help="Preset whose cell is measured and recorded; default: the one the run was trained with."),
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Measure trained models on new tasks: mean accuracy with its 95 % interval over tasks, and sparsity.

    Runs that differ only in their seed are summed up by mean and standard deviation over seeds.
    """
    device = chosen_device(device)
    chosen = None if preset_name is None else load_preset(preset_name)
    with ExitStack() as folders:
        runs = [folders.enter_context(run) for run in runs_in(paths, wanted="finished")]
        for run in runs:
            if chosen is not None and chosen.protocol != run.protocol:
                raise ConfigError(
                    f"{chosen.name} is a preset of the protocol {chosen.protocol}, but {run.path} is {run.protocol}"
                )
        protocols = {run.protocol for run in runs}
        if protocols == {"continual"} or protocols == {"online"}:
            given = {
                "--split": splits, "--data": data, "--tasks": tasks, "--steps": steps is not None,
                "--ensemble": ensemble,
            }  # fmt: skip
            refused = [option for option in given if given[option]]
            protocol = CONTINUAL if protocols == {"continual"} else ONLINE
            streams.evaluate(protocol, runs, refused, preset_name, record)
            return
        for run in runs:
            if run.protocol != "fewshot":
                raise UserError(
                    f"{run.path} is a run of the protocol {run.protocol}: evaluate it apart from the others"
                )
        for _, alike in _by_settings(runs):
            check_seeds(alike)
        plan = {run: _plan(run, _preset(run, preset_name), data, splits, steps, ensemble) for run in runs}
        if record is not None:  # what cannot be recorded fails before it takes time
            check_savable(result_records(plan, preset_name), record, INCIDENTAL, FewShotConfig)
        evaluations: dict[RunFolder, list[Evaluation]] = {}
        all_kept = True  # a full disk takes away no measurement
        labels = labels_of(runs)
        for note in _notes(plan):
            typer.echo(f"note: {note}", err=True)
        for run in runs:
            before = f"{labels[run]}: " if len(runs) > 1 else ""
            evaluations[run] = []
            for wanted in plan[run]:
                with cpu.threads(threads_for(run, threads)), progress_bar(f"evaluating {before}{wanted.what}") as tick:
                    result = evaluate_run(
                        run,
                        wanted.split,
                        data=wanted.data,
                        tasks=tasks or 300,
                        steps=wanted.steps,
                        ensemble=wanted.models > 1,
                        device=device,
                        progress=tick,
                        notify=lambda note: typer.echo(note, err=True),
                        keep=False,
                    )
                evaluations[run].append(result)
                typer.echo(before + result.sentence())
                try:
                    keep_evaluation(run, result)
                except UserError as error:
                    all_kept = False
                    typer.echo(f"error: {error}", err=True)
            if _adapts_by_gradient(run):
                typer.echo(before + _sparsity(run))
        _print_over_seeds(evaluations)
        if record is not None:
            for path in save_records(result_records(evaluations, preset_name), record, INCIDENTAL, FewShotConfig):
                typer.echo(f"recorded {path}")
        if not all_kept:
            raise typer.Exit(UserError.exit_code)


def _notes(plan: Mapping[RunFolder, Sequence[Evaluation]]) -> Iterable[str]:
    """What is to be known of the tasks that are to be measured, each once."""
    notes = [
        known_classes(settings_of(run), load_set(wanted.data), wanted.split)
        for run, evaluations in plan.items()
        for wanted in evaluations
    ]
    return dict.fromkeys(note for note in notes if note is not None)


def _preset(run: RunFolder, name: str | None) -> Preset | None:
    """The preset whose cell is measured; a run whose preset this version does not know can still be measured."""
    if name is not None:
        return preset_of(run, name)
    with suppress(ConfigError):
        return preset_of(run)
    return None


def _plan(
    run: RunFolder,
    preset: Preset | None,
    data: Sequence[str] | None,
    splits: Sequence[str] | None,
    steps: int | None,
    ensemble: bool,
) -> list[Evaluation]:
    """What to measure: as the options say, then the preset's cell, then the run itself."""
    cell = Evaluate() if preset is None else preset.evaluate
    return [
        planned(run, where, split, cell.steps if steps is None else steps, together)
        for where in dict.fromkeys(data or [cell.data or settings_of(run).data])
        for split in dict.fromkeys(splits or default_splits(run, where, preset))
        for together in (False, True)[: 1 + ensemble]
    ]


def _config(preset: str | None, scale: Scale, overrides: Sequence[str]) -> FewShotConfig:
    own = parse_overrides(overrides)
    if preset is None:
        config = from_dict(FewShotConfig, own, where="settings")
    else:
        loaded = load_preset(preset, scale=scale)
        check_protocol(preset, loaded.protocol, "fewshot")
        if loaded.after is not None and "start_from" not in own:
            raise ConfigError(
                f"{preset} starts from a finished run of {loaded.after}: train that first, "
                "then give its folder with --set start_from=FOLDER"
            )
        config = from_dict(FewShotConfig, merge(loaded.settings, own), where=f"preset {preset} with --set")
    if config.start_from is not None:
        config = replace(config, start_from=str(Path(config.start_from).resolve()))
    return config


def _check_effects(overrides: Sequence[str], configs: Sequence[FewShotConfig]) -> None:
    """What a user sets must not be ignored in silence by all of the runs; what a preset holds may be."""
    idle = [config.without_effect() for config in configs]
    for name in parse_overrides(overrides):
        if all(name in own for own in idle):
            value = toml_text(getattr(configs[0], name))
            raise ConfigError(f"{name}={value} is for {idle[0][name]} and would do nothing here: leave it out")


def _check(config: FewShotConfig, seed: int, device: str) -> None:
    """Whatever cannot be built must fail before a folder holds a run that can never start."""
    with progress_bar(f"preparing {config.data}") as tick:
        images = load_set(config.data, tick)
    check_images(config, images)
    if note := known_classes(config, images, config.validation_split):
        typer.echo(f"note: {note}", err=True)
    learner = new_learner(config, split_of(images, config.train_split).images.shape[1:], seed, device)
    choose(learner.model, learner.mask, config.inner, config.engine, config.precision)
    load_start(config, learner.model)


def _continue(runs: Sequence[RunFolder], device: str, workers: int | None) -> None:
    totals = {run: from_dict(FewShotConfig, run.config, where=str(run.path)).outer_steps for run in runs}
    labels = labels_of(runs)
    try:
        with TrainingBars({labels[run]: total for run, total in totals.items()}) as bars:

            def report(run: RunFolder, step: int, values: Mapping[str, object]) -> None:
                bars.update(labels[run], step, values)

            if len(runs) > 1 and device == "cpu":
                train_in_processes(runs, report, workers=workers, on_stop=announce_stop, notify=bars.note)
            else:
                with cpu.threads(runs[0].threads):
                    train_together(runs, report, device, announce_stop, bars.note)
    finally:  # also where others failed or were stopped
        for run in runs:
            if finished(run):
                typer.echo(_summary(run))


def _tell_of_threads(runs: Sequence[RunFolder], threads: int | None) -> None:
    """Say where a resumed run ends with other digits, or is slow for the sake of the same ones."""
    others = [str(run.path) for run in runs if run.threads not in (None, threads)]
    most, cores = max(run.threads or 1 for run in runs), environment.cores()
    if threads is not None and others:
        typer.echo(
            f"{', '.join(others)}: begun with another number of threads, so the end may differ in the last digits",
            err=True,
        )
    elif threads is None and most > cores:
        typer.echo(
            f"begun with {most} threads, more than the {cores} cores here: fewer are faster (--threads), but the end "
            "may differ in the last digits",
            err=True,
        )


def _summary(run: RunFolder) -> str:
    validated = [record for record in run.metrics() if "validation_accuracy" in record]
    if not validated:
        return f"{run.path}: finished"
    best = max(validated, key=lambda record: record["validation_accuracy"])  # of equals the first, as in training
    summary = f"{run.path}: best validation accuracy {best['validation_accuracy']:.1%} at step {best['step']}"
    return summary + (f", sparsity {best['sparsity']:.1%}" if _adapts_by_gradient(run) else "")


def _adapts_by_gradient(run: RunFolder) -> bool:
    return settings_of(run).head != "ridge"


def _sparsity(run: RunFolder) -> str:
    sparsity = load_trained(run)[2].sparsity()
    layers = ", ".join(f"{layer} {share:.1%}" for layer, share in sparsity.by_layer.items())
    return f"sparsity: {sparsity.overall:.1%} ({layers})"


def _print_over_seeds(evaluations: Mapping[RunFolder, Sequence[Evaluation]]) -> None:
    for name, runs in _by_settings(list(evaluations)):
        if len(runs) > 1:
            for results in zip(*(evaluations[run] for run in runs), strict=True):
                values = [result.accuracy for result in results]
                typer.echo(
                    f"{name}, {len(runs)} seeds: {results[0].what}: "
                    f"{statistics.fmean(values):.2%}, std over seeds {statistics.stdev(values):.2%}"
                )
            if not _adapts_by_gradient(runs[0]):
                continue
            shares = [load_trained(run)[2].sparsity().overall for run in runs]
            typer.echo(
                f"{name}, {len(runs)} seeds: sparsity: "
                f"{statistics.fmean(shares):.1%}, std over seeds {statistics.stdev(shares):.1%}"
            )


def _by_settings(runs: Sequence[RunFolder]) -> Iterator[tuple[str, list[RunFolder]]]:
    left = list(runs)
    while left:
        first = left[0]
        alike = [run for run in left if _kind(run) == _kind(first)]
        left = [run for run in left if run not in alike]
        yield first.preset or "the same settings", alike


def _kind(run: RunFolder) -> tuple[object, ...]:
    return run.preset, run.scale, settings_of(run)
