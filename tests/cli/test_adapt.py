"""`wheretolearn adapt` as real processes, on drawings and on photographs of birds."""

import json
import shutil
import sys
from io import BytesIO, TextIOWrapper

import numpy as np
import pytest
import torch
from PIL import Image

from wheretolearn import SparseDelta, cli
from wheretolearn.data.load import load_set
from wheretolearn.fewshot.own_images import FILES, load_adapted, predict_folder
from wheretolearn.fewshot.trained import load_trained
from wheretolearn.runs.folder import RunFolder

pytestmark = pytest.mark.xdist_group("glyphs")  # drawn once, by whichever process runs these


def train(run_command, path, *settings, **environ):
    options = [f"--set={setting}" for setting in settings]
    run_command("train", path, "--threads", 1, *options, **environ).check_returncode()
    return path


@pytest.fixture(scope="module")
def drawings_run(tmp_path_factory, run_command):
    return train(
        run_command,
        tmp_path_factory.mktemp("runs") / "drawings",
        *("data=glyphs", "width=16", "outer_steps=60", "tasks_per_step=2", "inner_lr=0.2", "theta_lr=0.01"),
        *("mask_lr=0.01", "validate_every=60", "validation_tasks=10", "inner_steps=3", "test_inner_steps=6"),
    )


def photograph(drawing, random):
    """A drawing as a camera sees it: large, grey paper, pale ink, noise."""
    large = np.asarray(Image.fromarray(drawing).resize((280, 300), Image.Resampling.BICUBIC), dtype=np.float64)
    pixels = 190 * (1 - 0.8 * large / 255) + random.normal(0, 4, large.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert("RGB")


@pytest.fixture(scope="module")
def drawings(tmp_path_factory):
    """Characters of scripts that training never saw, on paper: one of each to learn from, ten to judge."""
    folder = tmp_path_factory.mktemp("own")
    split = load_set("glyphs").splits["scripts"]
    random = np.random.default_rng(0)
    for number in range(4):
        first = split.class_offsets[number * 9]
        for count, top in ((1, "support"), (10, "query")):
            place = folder / top / f"character {number}"
            place.mkdir(parents=True)
            for offset in range(count):
                image = split.images[first + offset + (count > 1), :, :, 0]
                photograph(image, random).save(place / f"[red]{offset}.jpg")
    (folder / "flat").mkdir()
    for file in (folder / "query").rglob("*.jpg"):
        shutil.copy(file, folder / "flat" / f"{file.parent.name} {file.name}")
    return folder


def test_drawings_on_paper_with_their_classes(drawings_run, drawings, tmp_path, run_command):
    out = tmp_path / "out"
    folders = ("--support", drawings / "support", "--query", drawings / "query")
    # The images of training are not needed.
    result = run_command(
        "adapt", drawings_run, *folders, "--out", out, "--threads", 1, WHERETOLEARN_DATA=str(tmp_path / "none")
    )
    assert result.returncode == 0, result.stderr
    record = json.loads((out / "predictions.json").read_text())
    assert record["accuracy"] > 0.5  # chance: 0.25
    correct = sum(image["prediction"] == image["truth"] for image in record["images"])
    assert record["accuracy"] == correct / 40
    assert f"accuracy {correct / 40:.1%} ({correct} of 40 images)" in result.stdout
    assert "6 inner steps on the images of 4 classes: character 0 1, character 1 1," in result.stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    for row, image in zip(rows, record["images"], strict=True):
        verdict = "" if image["prediction"] == image["truth"] else "wrong"
        assert row == [image["file"], image["prediction"], f"{image['confidence']:.1%}", image["truth"], verdict]
    assert rows[0][0] == "character 0/[red]0.jpg"
    for said in ("transductive", "bright ink on black", "4 classes, of 5"):
        assert said in result.stderr
    assert f"{record['weights_changed']:,} of {record['weights']:,} weights changed" in result.stdout
    assert sorted(file.name for file in out.iterdir()) == sorted(FILES)

    network = load_adapted(out)
    again = predict_folder(network, drawings / "query")
    probabilities = [list(image["probabilities"].values()) for image in record["images"]]
    torch.testing.assert_close(
        torch.tensor([image.probabilities for image in again.images]), torch.tensor(probabilities), rtol=1e-6, atol=1e-9
    )
    assert [image.label for image in again.images] == [image["prediction"] for image in record["images"]]
    _, model, mask = load_trained(RunFolder.open(drawings_run))
    delta = SparseDelta.load(out / "delta.safetensors")
    assert delta.changed == record["weights_changed"] <= round((1 - mask.sparsity().overall) * delta.total)
    rebuilt, stored = delta.apply(model).state_dict(), network.network.state_dict()
    assert all(torch.equal(rebuilt[name], tensor) for name, tensor in stored.items())


def adapt(monkeypatch, capfd, *arguments):
    """The command in this process, for the many cases that need none of their own: exit code and output."""
    monkeypatch.setattr(sys, "argv", ["wheretolearn", "adapt", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "250")
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0, *capfd.readouterr()


def test_drawings_of_unknown_class(drawings_run, drawings, monkeypatch, capfd, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(drawings_run, run)
    folders = ("--support", drawings / "support", "--query", drawings / "flat")
    code, shown, _ = adapt(monkeypatch, capfd, run, *folders, "--steps", 2)
    assert code == 0
    assert "2 inner steps" in shown
    assert "accuracy" not in shown
    out = run / "adapted" / "support"
    record = json.loads((out / "predictions.json").read_text())
    assert record["accuracy"] is None
    assert {image["truth"] for image in record["images"]} == {None}
    assert (out / "predictions.csv").read_text().count("\n") == 41

    before = (out / "predictions.json").read_bytes()
    code, _, message = adapt(monkeypatch, capfd, run, *folders)
    assert code == 1
    assert "already holds model.safetensors: --force" in message
    assert (out / "predictions.json").read_bytes() == before
    (out / "thoughts.txt").write_text("mine")
    assert adapt(monkeypatch, capfd, run, *folders, "--steps", 3, "--force")[0] == 0
    assert json.loads((out / "predictions.json").read_text())["inner_steps"] == 3
    assert (out / "thoughts.txt").read_text() == "mine"


def test_a_long_table_is_cut_and_its_files_are_not(drawings_run, drawings, monkeypatch, capfd, tmp_path):
    for number in range(2):
        for file in (drawings / "flat").iterdir():
            (tmp_path / "many").mkdir(exist_ok=True)
            shutil.copy(file, tmp_path / "many" / f"{number} {file.name}")
    folders = ("--support", drawings / "support", "--query", tmp_path / "many", "--out", tmp_path / "out")
    _, shown, _ = adapt(monkeypatch, capfd, drawings_run, *folders)
    assert shown.count("[red]") == 50
    assert "and 30 more in predictions.csv" in shown
    assert (tmp_path / "out" / "predictions.csv").read_text().count("\n") == 81


def mistakes(run, drawings, tmp_path):
    """What was given, and words of the message."""
    own = {"--support": drawings / "support", "--query": drawings / "query", "--out": tmp_path / "out"}
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "six").mkdir()
    for number in range(6):
        shutil.copytree(drawings / "support" / "character 0", tmp_path / "six" / f"{number}")
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run, unfinished, ignore=shutil.ignore_patterns("*.safetensors"))
    return {
        "no run": (tmp_path, own, "not a run folder"),
        "an unfinished run": (unfinished, own, "wheretolearn resume"),
        "no support folder": (run, {**own, "--support": tmp_path / "gone"}, "gone does not exist"),
        "a file as query": (run, {**own, "--query": tmp_path / "file"}, "file is a file"),
        "too many classes": (run, {**own, "--support": tmp_path / "six"}, "6 classes, but the run tells only 5 apart"),
        "another device": (run, {**own, "--device": "tpu"}, "no device called 'tpu'"),
        "a run as the place to write": (run, {**own, "--out": run, "--force": True}, "is a run"),
        "nowhere to write": (run, {**own, "--out": tmp_path / "file" / "x"}, "choose another --out"),
        "where nobody can write": (run, {**own, "--out": "/proc/x"}, "/proc cannot be written to"),
        "too long a name": (run, {**own, "--query": tmp_path / ("n" * 300)}, "is too long: shorten its names"),
    }


@pytest.mark.parametrize(
    "case",
    [
        *("no run", "an unfinished run", "no support folder", "a file as query", "too many classes", "another device"),
        *("nowhere to write", "where nobody can write", "a run as the place to write", "too long a name"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(drawings_run, drawings, monkeypatch, capfd, tmp_path, case):
    run, options, words = mistakes(drawings_run, drawings, tmp_path)[case]
    given = [part for pair in options.items() for part in pair if part is not True]
    code, shown, message = adapt(monkeypatch, capfd, run, *given)
    assert code == 1
    assert shown == ""
    assert message.startswith("error: ")
    assert words in message
    assert len(message.splitlines()) <= 2
    assert not (tmp_path / "out").exists()
    assert not (run / "adapted").exists()


def test_results_stay_apart_from_the_images(drawings_run, drawings, monkeypatch, capfd, tmp_path):
    own = tmp_path / "own"
    for name in ("support", "query"):
        shutil.copytree(drawings / name, own / name)
    (tmp_path / "link").symlink_to(own / "query")
    before = sorted(own.rglob("*"))
    folders = ("--support", own / "support", "--query", own / "query")
    for out, words in (
        (own / "support", f"it is the support folder {own / 'support'}"),
        (own / "query", f"it is the query folder {own / 'query'}"),
        (own / "support" / "results" / "first", "it lies in the support folder"),
        (own / "query" / "character 0", "it lies in the query folder"),
        (tmp_path / "link" / "results", "it lies in the query folder"),
        (own, "it contains the support folder"),
    ):
        code, _, message = adapt(monkeypatch, capfd, drawings_run, *folders, "--out", out, "--force")
        assert code == 1
        assert message.startswith(f"error: cannot keep results in {out}: ")
        assert words in message
        assert "choose another --out" in message
        assert sorted(own.rglob("*")) == before
    beside = own / "support results"  # a name that only starts alike
    assert adapt(monkeypatch, capfd, drawings_run, *folders, "--out", beside)[0] == 0


def test_the_terminal_says_where_all_images_left_out_are_named(drawings_run, drawings, monkeypatch, capfd, tmp_path):
    query, out = tmp_path / "query", tmp_path / "out"
    shutil.copytree(drawings / "flat", query)
    for number in range(3):
        (query / f"{number}.png").write_bytes(b"not an image")
    folders = ("--support", drawings / "support", "--query", query, "--out", out)
    code, _, notes = adapt(monkeypatch, capfd, drawings_run, *folders)
    assert code == 0
    assert "predictions.json names all 3 images left out" in notes
    record = json.loads((out / "predictions.json").read_text())
    assert [image["file"] for image in record["left_out"]] == ["0.png", "1.png", "2.png"]


def test_a_class_that_the_terminal_cannot_show(drawings_run, drawings, monkeypatch, capfd, tmp_path):
    name = "\u65e5\u672c\u8a9e"
    for top in ("support", "query"):
        shutil.copytree(drawings / top, tmp_path / top)
        (tmp_path / top / "character 0").rename(tmp_path / top / name)
    terminal = TextIOWrapper(BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", terminal)
    folders = ("--support", tmp_path / "support", "--query", tmp_path / "query", "--out", tmp_path / "out")
    code, _, message = adapt(monkeypatch, capfd, drawings_run, *folders)
    terminal.flush()
    assert code == 0, message
    assert r"\u65e5\u672c\u8a9e" in terminal.buffer.getvalue().decode("latin-1")
    assert name in (tmp_path / "out" / "predictions.csv").read_text()


def test_a_mistake_in_a_real_process(drawings_run, drawings, run_command, tmp_path):
    result = run_command("adapt", drawings_run, "--support", tmp_path, "--query", drawings / "query")
    assert result.returncode == 1
    assert f"{tmp_path} holds no image" in result.stderr
    assert "Traceback" not in result.stderr
    missing = run_command("adapt", drawings_run, "--support", drawings / "support")
    assert missing.returncode == 2
    assert "--query" in missing.stderr


@pytest.fixture(scope="module")
def birds(real_data, tmp_path_factory):
    """Real photographs: 10 classes of CUB to train on, 3 others as a user's own."""
    packed = real_data / "packed" / "cub_test84.npz"
    if not packed.is_file():
        pytest.skip("no packed CUB images")
    folder = tmp_path_factory.mktemp("birds")
    with np.load(packed) as arrays:
        blob, offsets, labels = arrays["data"].tobytes(), arrays["offsets"], arrays["labels"]
        classes = arrays["classes"]
    for label in range(13):
        name = str(classes[label])
        for number, index in enumerate(np.flatnonzero(labels == label)[:40]):
            part = "known" if label < 10 else "own/support" if number < 15 else "own/query"
            place = folder / part / name
            place.mkdir(parents=True, exist_ok=True)
            content = blob[offsets[index] : offsets[index + 1]]
            if number % 3 == 0 and label >= 10:  # a user's photographs are large, of any shape
                picture = Image.open(BytesIO(content)).resize((400, 300), Image.Resampling.BICUBIC)
                picture.save(place / f"{number}.png")
            else:
                (place / f"{number}.jpg").write_bytes(content)
    return folder


def test_real_photographs_of_birds(birds, run_command, tmp_path):
    environ = {"WHERETOLEARN_DATA": str(tmp_path / "data")}
    added = run_command("data", "add", "birds", birds / "known", "--size", 84, "--channels", 3, **environ)
    assert added.returncode == 0, added.stderr
    run = train(
        run_command,
        tmp_path / "run",
        *("data=birds", "train_split=all", "validation_split=all", "width=16", "shots=5", "queries=5", "ways=3"),
        *("outer_steps=100", "tasks_per_step=1", "inner_steps=3", "test_inner_steps=10", "inner_lr=0.2"),
        *("theta_lr=0.005", "mask_lr=0.01", "validate_every=100", "validation_tasks=4"),
        **environ,
    )
    shutil.rmtree(tmp_path / "data")
    own = birds / "own"
    result = run_command(
        "adapt", run, "--support", own / "support", "--query", own / "query", "--threads", 1, **environ
    )
    assert result.returncode == 0, result.stderr
    out = run / "adapted" / "support"
    record = json.loads((out / "predictions.json").read_text())
    assert len(record["images"]) == 75
    assert record["accuracy"] > 0.45  # 75 guesses: 0.33 +- 0.05
    assert 0 < record["weights_changed"] < record["weights"]
    again = predict_folder(load_adapted(out), own / "query")
    assert again.accuracy == record["accuracy"]
    torch.testing.assert_close(
        torch.tensor([image.probabilities for image in again.images]),
        torch.tensor([list(image["probabilities"].values()) for image in record["images"]]),
        rtol=1e-6,
        atol=1e-9,
    )
