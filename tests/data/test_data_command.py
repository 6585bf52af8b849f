import os
import shutil
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from wheretolearn.cli import data as data_commands
from wheretolearn.cli.data import app
from wheretolearn.data import glyphs, image_set, install
from wheretolearn.errors import DataError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERETOLEARN_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "cache"


@pytest.fixture
def own_images(tmp_path):
    for name, shade in (("ant", 20), ("bee", 220)):
        folder = tmp_path / "images" / name
        folder.mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (20, 20), (shade, 0, 0)).save(folder / f"{number}.png")
    return tmp_path / "images"


def run(*arguments) -> str:
    """The output of a command that must succeed; a user's error is raised as it is."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def one_image() -> image_set.ImageSplit:
    images, offsets = np.zeros((1, 28, 28, 1), dtype=np.uint8), np.array([0, 1], dtype=np.int64)
    return image_set.ImageSplit("", images, offsets, ("0",), ("",))


def test_list_shows_known_and_own_sets_and_whether_they_are_here(cache, own_images):
    run("add", "insects", own_images)
    lines = run("list").splitlines()
    assert any("mini-imagenet" in line and "no (add it)" in line for line in lines)
    assert any("insects" in line and "84x84x3" in line and "your own" in line for line in lines)


def test_list_says_how_much_of_a_set_is_here(cache, tmp_path):
    folder = tmp_path / "mine" / "test" / "n01443537"
    folder.mkdir(parents=True)
    Image.new("RGB", (20, 20)).save(folder / "1.png")
    assert "a subset: train 0 of 351; validation 0 of 97; test 1 of 160" in run(
        "add", "tiered-imagenet", tmp_path / "mine"
    )
    assert any("tiered" in line and "1 of 608" in line for line in run("list").splitlines())


def listed_names() -> list[str]:
    return [line.split()[1] for line in run("list").splitlines() if line.startswith("│")]


def test_list_has_one_fixed_row_for_the_embedded_set(cache):
    before = listed_names()
    image_set.write("glyphs", {"train": one_image()}, {})
    assert listed_names() == before
    assert before[0] == "glyphs"
    assert any("glyphs" in line and "embedded" in line for line in run("list").splitlines())


def test_list_counts_the_embedded_set_before_it_is_drawn(cache):
    classes = sum(map(len, glyphs.split_members().values()))
    row = next(line for line in run("list").splitlines() if "glyphs" in line)
    assert [f"{classes}", f"{20 * classes:,}", "28x28x1"] == [cell.strip() for cell in row.split("│")[2:5]]


def test_list_shows_a_damaged_set_as_damaged(cache, own_images):
    run("add", "insects", own_images)
    (cache / "insects" / "meta.json").write_text("{")
    assert any("insects" in line and "damaged" in line for line in run("list").splitlines())


def test_add_stores_class_folders_under_a_name_of_ones_own(cache, own_images):
    output = run("add", "insects", own_images, "--size", "16", "--channels", "1")
    assert "insects: all 2 classes 6 images" in output
    stored = image_set.load("insects").splits["all"]
    assert stored.images.shape == (6, 16, 16, 1)
    assert stored.classes == ("ant", "bee")


def test_add_replaces_a_set_only_by_force(cache, own_images):
    run("add", "insects", own_images)
    with pytest.raises(DataError, match="already here; --force"):
        run("add", "insects", own_images, "--size", "8")
    run("add", "insects", own_images, "--size", "8", "--force")
    assert image_set.load("insects").splits["all"].images.shape == (6, 8, 8, 3)


@pytest.mark.parametrize(
    ("name", "message"), [("My Set", "cannot name an image set"), ("mnist", "mnist expects a folder with")]
)
def test_add_refuses_bad_names_and_layouts(cache, own_images, name, message):
    with pytest.raises(DataError, match=message):
        run("add", name, own_images)


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("inside", [".", "ant", ".."])
def test_add_never_takes_its_images_from_where_the_set_will_be(cache, own_images, inside, force):
    shutil.copytree(own_images, cache / "insects")
    with pytest.raises(DataError):
        run("add", "insects", cache / "insects" / inside, *force)
    assert len(list((cache / "insects").rglob("*.png"))) == 6


def test_add_refuses_its_own_stored_set_as_a_source(cache, own_images):
    run("add", "insects", own_images)
    with pytest.raises(DataError, match="keep them apart"):
        run("add", "insects", cache / "insects", "--force")
    with pytest.raises(DataError, match="keep them apart"):
        run("add", "insects", cache, "--force")


@pytest.mark.parametrize("name", ["mnist", "glyphs"])
def test_get_leaves_a_folder_alone_that_is_no_image_set(cache, monkeypatch, name):
    monkeypatch.setattr(install, "download", lambda *_, **__: pytest.fail("downloaded"))
    (cache / name).mkdir(parents=True)
    (cache / name / "raw.bin").write_bytes(b"precious")
    with pytest.raises(DataError, match=rf"{name} is in the way .* it holds raw\.bin"):
        run("get", name)
    assert (cache / name / "raw.bin").read_bytes() == b"precious"


def test_add_says_how_many_files_it_ignored(cache, own_images):
    (own_images / "ant" / "old").mkdir()
    for place in ("loose.png", "ant/old/nested.png", "ant/film.mpg", "ant/.hidden.png"):
        (own_images / place).write_bytes(b"no image")
    assert "2 classes 6 images (other files ignored: 3)" in run("add", "insects", own_images)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_add_shows_names_that_are_not_utf8(cache, own_images):
    shown = "caf\N{REPLACEMENT CHARACTER}"
    (own_images / "ant").rename(own_images / os.fsdecode(b"caf\xe9"))
    own_images = own_images.rename(own_images.parent / os.fsdecode(b"caf\xe9"))
    run("add", "insects", own_images)
    stored = image_set.load("insects")
    assert stored.splits["all"].classes == ("bee", shown)
    assert stored.info["made_from"].endswith(f"/{shown}")
    (own_images / "bee").rename(own_images / os.fsdecode(b"caf\xe8"))
    with pytest.raises(DataError, match=f"both shown as '{shown}': rename one"):
        run("add", "insects", own_images, "--force")


@pytest.mark.parametrize("name", ["wasp", "ant/3.png"])
@pytest.mark.parametrize("place", [".", "train"])
def test_add_refuses_links_that_lead_nowhere(cache, own_images, tmp_path, name, place):
    folder = tmp_path / "all" / place
    shutil.copytree(own_images, folder)
    (folder / name).symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=rf"cannot read .*{name}: it is a link that leads nowhere"):
        run("add", "insects", tmp_path / "all")


def test_add_refuses_a_split_that_is_a_link_to_nowhere(cache, own_images, tmp_path):
    (tmp_path / "all").mkdir()
    own_images.rename(tmp_path / "all" / "train")
    (tmp_path / "all" / "test").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match="test: it is a link that leads nowhere"):
        run("add", "insects", tmp_path / "all")


def test_add_takes_large_images_silently_and_refuses_larger_ones(cache, own_images, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)  # theirs have 400
    assert "2 classes 6 images" in run("add", "insects", own_images)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 150)
    with pytest.raises(DataError, match=r"ant.0\.png is too large, at more than .* pixels: shrink it"):
        run("add", "others", own_images)


def test_add_help_gives_the_defaults():
    plain = " ".join(run("add", "--help").replace("│", " ").split())
    assert "set of your own (84)" in plain


def test_add_names_a_path_that_does_not_exist(cache, tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        run("add", "insects", tmp_path / "nowhere")


def test_get_leaves_a_stored_set_alone(cache, own_images, monkeypatch):
    monkeypatch.setattr(install, "get", lambda *_, **__: pytest.fail("fetched again"))
    for name, again in (
        ("mnist", "--force gets it again"),
        ("glyphs", "--force gets it again"),
        ("mini-imagenet", "`data add mini-imagenet PATH --force` replaces it"),
        ("insects", "`data add insects PATH --force` replaces it"),
    ):
        image_set.write(name, {"train": one_image()}, {})
        assert run("get", name) == f"{name} is already here ({again})\n"


def test_get_shows_one_bar_at_a_time(cache, monkeypatch):
    shown = []

    @contextmanager
    def bar(label):
        kind = label.split()[0]
        yield lambda *_: shown.append(kind)
        shown.append(f"{kind} ended")

    def get(name, downloading, converting):
        downloading(1, 1)
        converting(1, 2)
        converting(2, 2)
        return image_set.write(name, {"train": one_image()}, {})

    monkeypatch.setattr(data_commands, "progress_bar", bar)
    monkeypatch.setattr(install, "get", get)
    run("get", "mnist")
    assert shown == ["downloading", "downloading ended", "converting", "converting", "converting ended"]


def test_damaged_glyphs_are_drawn_again_by_force(cache, monkeypatch):
    monkeypatch.setattr(glyphs, "draw", lambda *_: {"train": one_image()})
    run("get", "glyphs")
    file = cache / "glyphs" / "train.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(DataError, match="data get glyphs --force"):
        run("check", "glyphs")
    run("get", "glyphs", "--force")
    assert "good" in run("check", "glyphs")


def test_get_explains_what_cannot_be_downloaded(cache):
    with pytest.raises(DataError, match="mini-imagenet cannot be downloaded freely"):
        run("get", "mini-imagenet")


def test_get_of_an_unknown_name_suggests_one(cache):
    with pytest.raises(DataError, match=r"; did you mean omniglot\? Known: "):
        run("get", "omniglott")


def test_check_reports_every_set_and_names_all_damage(cache, own_images):
    for name in ("ants", "bees", "flies"):
        run("add", name, own_images)
    assert run("check").count("good") == 3
    for name in ("ants", "flies"):
        file = cache / name / "all.npy"
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(DataError) as caught:
        run("check")
    assert str(cache / "ants" / "all.npy") in str(caught.value)
    assert str(cache / "flies" / "all.npy") in str(caught.value)
    assert "good" in run("check", "bees")
    with pytest.raises(DataError, match="ants"):
        run("check", "ants")


@pytest.mark.parametrize("command", [("sheet", "nosuch", "x.png"), ("check", "nosuch")])
def test_an_unknown_name_is_not_offered_for_download(cache, command):
    with pytest.raises(DataError, match=r"no known image set is called 'nosuch'") as caught:
        run(*command)
    assert "data add nosuch FOLDER" in str(caught.value)
    assert "data get" not in str(caught.value)


def test_check_of_an_empty_cache_says_so(cache):
    assert "no image set in" in run("check")


def test_sheet_draws_the_images_of_every_class(cache, own_images, tmp_path):
    run("add", "insects", own_images)
    run("sheet", "insects", tmp_path / "out" / "sheet.png")
    with Image.open(tmp_path / "out" / "sheet.png") as sheet:
        colours = {colour for _, colour in sheet.getcolors(1 << 16)}
    assert {(20, 0, 0), (220, 0, 0)} <= colours


def test_sheet_to_an_unknown_kind_of_file_is_refused(cache, own_images, tmp_path):
    run("add", "insects", own_images)
    with pytest.raises(DataError, match=r"cannot write .*sheet\.nonsense"):
        run("sheet", "insects", tmp_path / "sheet.nonsense")


@pytest.mark.parametrize("command", ["list", "get", "add", "check", "sheet"])
def test_every_command_explains_itself(command):
    assert "Usage" in run(command, "--help")
