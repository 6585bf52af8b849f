"""The documentation builds without a warning, and what it names, shows and quotes is there."""

import csv
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from wheretolearn.cli import app
from wheretolearn.cli.common import COMMANDS
from wheretolearn.cli.presets import SETTINGS
from wheretolearn.config import from_dict, merge, parse_overrides
from wheretolearn.presets import list_presets, load_preset
from wheretolearn.report.lines import save

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [*PAGES, *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def name_of(value: object) -> str:
    return str(value.relative_to(REPOSITORY)) if isinstance(value, Path) else " ".join(value)


def commands(text: str) -> list[list[str]]:
    """Every `wheretolearn ...` of the shell blocks, as its arguments; comments are left out."""
    blocks = [block.replace("\\\n", " ") for language, block in FENCED.findall(text) if language == "sh"]
    lines = [line for block in blocks for line in block.splitlines()]
    split = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in split if words[:1] == ["wheretolearn"]]


ALL_COMMANDS = [command for path in TEXTS for command in commands(path.read_text())]


one_build = pytest.mark.xdist_group("docs")  # of all pages, by whichever process runs these


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """All pages, built with every warning an error: links between pages, anchors, files, figures."""
    folder = tmp_path_factory.mktemp("site")
    build = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-n",
        "-E",
        "-q",
        "-b",
        "html",
        DOCS,
        folder / "html",
    ]
    done = subprocess.run([*build, "-d", folder / "doctrees"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@one_build
def test_every_page_is_built_and_found_from_the_first(site):
    first = (site / "index.html").read_text()
    for page in PAGES:
        assert (site / f"{page.stem}.html").exists()
        assert f'href="{page.stem}.html"' in first or page.stem == "index"


@one_build
def test_pages_need_no_network(site):
    for page in site.glob("*.html"):
        loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="([^"]+)"', page.read_text())
        assert loaded
        assert [address for address in loaded if re.match(r"(?:https?:)?//", address)] == []


@one_build
def test_equations_are_drawn_by_the_browser_itself(site):
    method = (site / "method.html").read_text()
    assert method.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') == 5
    assert "\\nabla" not in re.sub(r"<annotation.*?</annotation>", "", method)


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_files_that_a_text_links_to_or_names_exist(path):
    text = FENCED.sub("", path.read_text())
    linked = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https?:|#", link)]
    for link in linked:
        file, _, anchor = link.partition("#")
        assert (path.parent / file).exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (path.parent / file).read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], link
    named = re.findall(r"`((?:src|tests|docs|results|examples|benchmarks)/[\w./-]+)`", text)
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_objects_are_in_the_files_that_the_pages_name():
    found = []
    for page in PAGES:
        for names, file in re.findall(
            r"((?:`[\w.]+`(?: and )?)+) in\s+\[[^\]]+\]\(\.\./src/([^)]+)\.py\)", page.read_text()
        ):
            module = importlib.import_module(file.replace("/", ".").removesuffix(".__init__"))
            for name in re.findall(r"`([\w.]+)`", names):
                found.append(name)
                owner = module
                for part in name.split("."):
                    assert hasattr(owner, part), f"{page.name}: {file} has no {name}"
                    owner = getattr(owner, part)
    assert {"adapt", "accumulate", "GradientMask.updates", "RULES", "LaMAML", "CMAML"} <= set(found)
    links = sum(len(re.findall(r"\]\(\.\./src/", page.read_text())) for page in PAGES)
    assert len(found) >= links  # no file is linked without saying what to look for


def test_masks_and_slopes_in_the_table_of_the_method_are_those_of_the_code():
    from wheretolearn import masks

    rows = re.findall(r"^\| `masks\.(\w+)", (DOCS / "method.md").read_text(), re.MULTILINE)
    assert set(rows) <= masks.MAKERS.keys()
    assert {"binary", "relu", "exp", "linear", "fixed", "generated"} <= set(rows)


@pytest.mark.parametrize("arguments", ALL_COMMANDS, ids=name_of)
def test_commands_are_ones_that_the_program_takes(arguments):
    command, words = typer.main.get_command(app), list(arguments)
    while hasattr(command, "commands"):
        assert words[0] in command.commands
        command = command.commands[words.pop(0)]
    context = command.make_context(arguments[0], words)  # as when it is run: unknown options and bad values fail
    given = context.params
    presets = given.get("presets") or []
    known = [preset.name for preset in list_presets()]
    for name in presets:
        assert name in known or any(other.startswith(f"{name}.") for other in known), name
    if given.get("overrides"):
        protocol = next(p for p, c in COMMANDS.items() if c == arguments[0])
        scale = given.get("scale", "paper")
        for base in [load_preset(name, scale=scale).settings for name in presets if name in known] or [{}]:
            from_dict(SETTINGS[protocol], merge(base, parse_overrides(given["overrides"])), where="the page")


@pytest.mark.xdist_group("glyphs")  # drawn once, by whichever process runs these
def test_the_first_commands_of_a_guide_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    """Of the quickest guide; tests of the command line run those of the others."""
    monkeypatch.chdir(tmp_path)
    first = (DOCS / "continual.md").read_text().partition("## From install to a result")[2]
    learn, draw = commands(FENCED.search(first)[0])
    app([*learn, "--set", "tasks=2", "--seeds", "1"], standalone_mode=False)
    assert "table5.la-maml.rotations at quick scale" in capsys.readouterr().out
    app(draw, standalone_mode=False)
    assert len(list((tmp_path / "runs" / "quick-continual" / "figures").glob("*.svg"))) >= 3


def test_figures_are_those_of_the_data_beside_them(tmp_path):
    """Texts are compared: other versions of matplotlib place the same things a hair's breadth elsewhere."""
    spec = importlib.util.spec_from_file_location("make_figures", DOCS / "make_figures.py")
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    drawings = figures.draw(figures.kept("few-shot-accuracy", "few-shot-sparsity"), figures.kept("online-recovery"))
    for drawing in drawings:
        svg, data = save(drawing, tmp_path)
        kept = DOCS / "figures" / svg.name
        assert re.findall(r"<text.*?>(.*?)</text>", svg.read_text()) == re.findall(
            r"<text.*?>(.*?)</text>", kept.read_text()
        )
        assert data.read_text() == kept.with_suffix(".csv").read_text()
        assert kept.stat().st_size < 100_000
        assert any(f"figures/{svg.name}" in page.read_text() for page in PAGES)
    assert {path.stem for path in (DOCS / "figures").glob("*.svg")} == {drawing.stem for drawing in drawings}


def test_the_curves_of_the_few_shot_page_belong_to_the_results_on_record():
    record = json.loads((REPOSITORY / "results/fewshot/table1.sparse-maml.shot5.accuracy.json").read_text())
    with (DOCS / "figures/few-shot-sparsity.csv").open() as file:
        steps = [int(row["x"]) for row in csv.DictReader(file)]
    assert max(steps) == record["config"]["outer_steps"]
    quoted = re.search(r"these two runs: ([\d.]+) % and ([\d.]+) %", (DOCS / "few-shot.md").read_text())
    plain = json.loads((REPOSITORY / "results/fewshot/table1.fomaml.shot5.accuracy.json").read_text())
    assert [f"{own['mean']:.1f}" for own in (record, plain)] == list(quoted.groups())


def test_the_costs_of_batch_norm_are_those_measured():
    measured = json.loads((REPOSITORY / "results/benchmarks/batch-norm-cpu.json").read_text())
    page = (DOCS / "batch-norm.md").read_text()
    for mode, row in measured["accuracy"].items():
        found = (f"{row[how]['mean']:.1f} ± {row[how]['std']:.1f}" for how in ("together", "by_class", "one_by_one"))
        times = (f"{measured['microseconds_per_task'][mode][what] / 1000:.0f}" for what in ("training", "use"))
        assert f"| {' | '.join((f'`{mode}`', *found, *times))} |" in page
    assert f"{measured['tasks']} tasks" in page


def test_the_papers_ablation_is_quoted_from_the_presets():
    page = (DOCS / "batch-norm.md").read_text()
    for name in ("tableS3.sparse-maml", "tableS3.sparse-maml-non-transductive", "tableS3.fomaml-non-transductive"):
        paper = load_preset(name).paper
        assert f"{paper.value:.2f} ± {paper.std:.2f}" in page
