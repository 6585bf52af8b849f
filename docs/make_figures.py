"""Draw the figures of these pages, each as SVG with its data as CSV beside it, from real results alone.

    python docs/make_figures.py                                                   # from records and the kept data
    python docs/make_figures.py --few-shot RUN... --online RUN...                 # data of these run folders anew

Continual learning is drawn from `results/continual`. Run folders of the paper's scale are too large for the repository:
of these the CSV files keep the numbers that are drawn.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context

from wheretolearn.errors import UserError
from wheretolearn.report.figures import INK, MUTED, STYLE, percent_axis
from wheretolearn.report.lines import Drawing, Line, line_of, new_figure, plot_labelled, save, share_axis
from wheretolearn.report.page import ACCENTS
from wheretolearn.runs.folder import RunFolder
from wheretolearn.runs.results import ResultRecord, load_all
from wheretolearn.storage import read_json

DOCS = Path(__file__).parent
FIGURES = DOCS / "figures"
RESULTS = DOCS.parent / "results"
LAYERS = ("block1.conv", "block2.conv", "block3.conv", "block4.conv", "head")
METHODS = {
    "sparse-la-maml": "sparse-La-MAML", "la-maml": "La-MAML", "mer": "MER", "gem": "GEM",
    "er": "experience replay", "sgd": "SGD",
}  # fmt: skip
PROBLEMS = {"rotations": "rotations", "permutations": "permutations", "many": "many permutations"}
ONLINE_METHODS = {
    "sparse-c-maml": "sparse-C-MAML", "c-maml": "C-MAML", "bgd": "BGD", "metacog": "MetaCOG",
    "online-adam": "online Adam",
}  # fmt: skip

FEW_SHOT_METHODS = {
    "table1.sparse-maml.shot5": "sparse-MAML", "table1.fomaml.shot5": "first-order MAML",
    "table1.sparse-maml-averaged.shot5": "sparse-MAML, running mean", "table1.sparse-maml-plus.shot5": "sparse-MAML+",
}  # fmt: skip

Row = tuple[str, int, float]  # name of a line, x, y


def few_shot_data(paths: Sequence[Path], rows: Sequence[Row]) -> list[Row]:
    """Rows with those of these runs in the place of older ones of the same methods."""
    for path in paths:
        run = RunFolder.open(path)
        if run.preset not in FEW_SHOT_METHODS or run.scale != "paper":
            raise SystemExit(f"{path}: these figures show {', '.join(FEW_SHOT_METHODS)}, at the paper's scale")
        method, records = FEW_SHOT_METHODS[run.preset], run.metrics()
        method += f", seed {run.seed}" if run.seed else ""
        found = [(method, r["step"], r["validation_accuracy"]) for r in records if "validation_accuracy" in r]
        if method == "sparse-MAML":
            for record in (r for r in records if r["step"] % 1000 == 0):
                found += [(layer, record["step"], record["sparsity_by_layer"][layer]) for layer in LAYERS]
        anew = {name for name, _, _ in found}
        rows = [row for row in rows if row[0] not in anew] + found
    order = [*FEW_SHOT_METHODS.values(), *LAYERS]
    return sorted(rows, key=lambda row: order.index(row[0].partition(", seed")[0]))


def online_data(paths: Sequence[Path]) -> list[Row]:
    """Accuracy in the first steps of a new task; the name of a line tells the seed."""
    rows: list[Row] = []
    for path in paths:
        run = RunFolder.open(path)
        name = f"{ONLINE_METHODS[run.config['learner']]} (seed {run.seed})"
        recovery = read_json(path / "result.json")["recovery"]
        rows += [(name, step, accuracy) for step, accuracy in enumerate(recovery, start=1)]
    return rows


def lines_of(rows: Sequence[Row], names: Sequence[str]) -> list[Line]:
    colours = [*ACCENTS, INK]
    return [
        line_of(name, [{x: y for other, x, y in rows if other == name}], colours[number])
        for number, name in enumerate(names)
    ]


@rc_context(STYLE)
def few_shot(rows: Sequence[Row]) -> list[Drawing]:
    methods = list(dict.fromkeys(name for name, _, _ in rows if name not in LAYERS))
    title, caption = (
        "Validation accuracy",
        "5-way 5-shot miniImageNet, Conv4-64; 300 validation tasks; seed 0 but for one line; one H200",
    )
    figure, axes = new_figure(title, caption, 6.0, 2.9)
    plot_labelled(axes, lines_of(rows, methods))
    share_axis(axes, 0.2)
    axes.set_xlabel("outer steps")
    first = Drawing("few-shot-accuracy", figure, title, caption, COLUMNS, [r for r in rows if r[0] in methods])
    title = "Weights that never change, by layer"
    caption = "sparse-MAML, 5-way 5-shot miniImageNet, Conv4-64; seed 0; one H200"
    figure, axes = new_figure(title, caption, 6.0, 2.9)
    percent_axis(axes, "y")
    plot_labelled(axes, lines_of(rows, LAYERS))
    axes.set_xlabel("outer steps")
    second = Drawing("few-shot-sparsity", figure, title, caption, COLUMNS, [r for r in rows if r[0] in LAYERS])
    return [first, second]


@rc_context(STYLE)
def online(rows: Sequence[Row]) -> list[Drawing]:
    names = sorted(
        dict.fromkeys(name for name, _, _ in rows), key=lambda name: -sum(y for n, _, y in rows if n == name)
    )
    title = "Recovery after the task changes"
    caption = (
        "Mean accuracy in the first, second ... step of a new task, before that step is learned from; OSAKA stream of "
        "10,000 steps, p = 0.98; one H200"
    )
    figure, axes = new_figure(title, caption, 6.4, 3.0)
    percent_axis(axes, "y")
    plot_labelled(axes, lines_of(rows, names))
    axes.set_xlabel("steps since the task changed")
    axes.set_xticks([1, 5, 10, 15, 20])
    return [Drawing("online-recovery", figure, title, caption, COLUMNS, rows)]


@rc_context(STYLE)
def continual(records: Sequence[ResultRecord]) -> list[Drawing]:
    """Retained accuracy of every method and problem on record, the paper's beside it."""
    found = {record.name: record for record in records if record.metric == "RA"}
    methods = [method for method in METHODS if any(f"table5.{method}.{problem}" in found for problem in PROBLEMS)]
    title = "Retained accuracy on MNIST streams"
    caption = "Dots: mean over five seeds, bars two standard deviations to each side; rings: the paper. Two CPU cores"
    figure, _ = new_figure(title, caption, 6.6, 2.4)
    figure.axes[0].remove()
    rows = []
    for axes, (problem, heading) in zip(figure.subplots(1, len(PROBLEMS), sharey=True), PROBLEMS.items(), strict=True):
        for place, method in enumerate(methods):
            record = found.get(f"table5.{method}.{problem}")
            if record is None or record.mean is None:
                continue
            std = record.std or 0.0
            axes.errorbar(record.mean, place, xerr=2 * std, fmt="o", markersize=4.5, color=ACCENTS[0], linewidth=1.4)
            if record.paper_value is not None:
                axes.plot(record.paper_value, place, "o", markersize=9, fillstyle="none", color=ACCENTS[1])
            rows.append((problem, method, record.mean, std, len(record.seeds), record.paper_value, record.paper_std))
        axes.set_title(heading, fontsize=8.5, color=MUTED, loc="left")
        axes.set_yticks(range(len(methods)), [METHODS[method] for method in methods])
        axes.set_ylim(len(methods) - 0.5, -0.5)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
        axes.grid(visible=False, axis="y")
    columns = ("problem", "method", "mean", "std", "seeds", "paper", "paper_std")
    return [Drawing("continual-retained", figure, title, caption, columns, rows)]


COLUMNS = ("line", "x", "y")


def kept(*stems: str) -> list[Row]:
    rows: list[Row] = []
    for stem in stems:
        with (FIGURES / f"{stem}.csv").open() as file:
            rows += [(row["line"], int(row["x"]), float(row["y"])) for row in csv.DictReader(file)]
    return rows


def draw(few_shot_rows: Sequence[Row], online_rows: Sequence[Row]) -> list[Drawing]:
    return [*few_shot(few_shot_rows), *continual(load_all(RESULTS / "continual")), *online(online_rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few-shot", nargs="+", type=Path, metavar="RUN", default=[])
    parser.add_argument("--online", nargs="+", type=Path, metavar="RUN")
    given = parser.parse_args()
    try:
        few_shot_rows = few_shot_data(given.few_shot, kept("few-shot-accuracy", "few-shot-sparsity"))
        online_rows = online_data(given.online) if given.online else kept("online-recovery")
    except UserError as error:
        parser.error(str(error))
    drawings = draw(few_shot_rows, online_rows)
    for drawing in drawings:
        save(drawing, FIGURES)


if __name__ == "__main__":
    main()
