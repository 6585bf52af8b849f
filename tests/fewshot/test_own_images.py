import csv
import json
import os
import sys
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image

from wheretolearn import SparseDelta
from wheretolearn.config import from_dict, to_dict
from wheretolearn.data import image_set
from wheretolearn.data.image_set import ImageSplit
from wheretolearn.data.transforms import as_input
from wheretolearn.errors import DataError, MismatchError, NonFiniteError, UserError
from wheretolearn.fewshot import own_images
from wheretolearn.fewshot.config import FewShotConfig, MaskKind
from wheretolearn.fewshot.own_images import FILES, adapt_to_folder, load_adapted, predict_folder, read_images
from wheretolearn.fewshot.trained import load_trained
from wheretolearn.ridge_head import ridge_logits
from wheretolearn.runs.folder import RunFolder
from wheretolearn.storage import load_weights, save_weights

COLOURS = {"blue": (30, 40, 200), "green": (20, 190, 40), "red": (210, 30, 20)}
SMALL = {"data": "gone", "width": 8, "ways": 4, "inner_lr": 0.2, "test_inner_steps": 8}


@pytest.fixture(autouse=True)
def no_image_sets(tmp_path, monkeypatch):
    """A machine that never had the images of training."""
    monkeypatch.setenv("WHERETOLEARN_DATA", str(tmp_path / "no data"))


def finished_run(path, image_shape=(20, 20, 3), **settings):
    """A run with the files that training leaves; its weights are those it started from."""
    config = from_dict(FewShotConfig, {**SMALL, **settings})
    run = RunFolder.create(path, to_dict(config), 0, "fewshot")
    run.close()
    model = config.build_model(image_shape[0], image_shape[2], seed=0)
    save_weights(path / "model.safetensors", model.state_dict(), {"image_shape": json.dumps(image_shape)})
    config.build_mask(model, seed=0).save(path / "mask.safetensors")
    return run


@pytest.fixture
def run(tmp_path):
    return finished_run(tmp_path / "run")


def colour_image(colour, number, size=(30, 26)):
    random = np.random.default_rng(number)
    pixels = np.array(COLOURS[colour]) + random.integers(-15, 15, (*size, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def colour_folder(path, colours=tuple(COLOURS), count=2, start=0, flat=False):
    for colour in colours:
        folder = path if flat else path / colour
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(start, start + count):
            colour_image(colour, number).save(folder / (f"{colour}-{number}.png" if flat else f"{number}.png"))
    return path


@pytest.fixture
def support(tmp_path):
    return colour_folder(tmp_path / "support")


@pytest.fixture
def query(tmp_path):
    return colour_folder(tmp_path / "query", count=3, start=10)


def shares(predictions):
    return torch.tensor([image.probabilities for image in predictions.images], dtype=torch.float64)


def test_colours_are_told_apart_after_a_few_steps(run, support, query):
    outcome = adapt_to_folder(run, support, query)
    assert outcome.steps == 8
    assert outcome.support_counts == {"blue": 2, "green": 2, "red": 2}
    assert outcome.network.classes == ("blue", "green", "red")
    assert outcome.predictions.accuracy == 1.0
    files = [image.file for image in outcome.predictions.images]
    assert files == [f"{colour}/{number}.png" for colour in COLOURS for number in (10, 11, 12)]
    for image in outcome.predictions.images:
        assert image.label == image.truth == image.file.split("/")[0]
        assert sum(image.probabilities) == pytest.approx(1)
        assert image.confidence == max(image.probabilities)
    untouched = adapt_to_folder(run, support, query, steps=0)
    assert untouched.delta.changed == 0
    assert untouched.predictions.accuracy < 1.0


def test_images_of_unknown_class_get_predictions_alone(run, support, query, tmp_path):
    flat = colour_folder(tmp_path / "flat", count=3, start=10, flat=True)
    outcome = adapt_to_folder(run, support, flat)
    assert outcome.predictions.accuracy is None
    assert [image.file for image in outcome.predictions.images][:2] == ["blue-10.png", "blue-11.png"]
    assert all(image.truth is None for image in outcome.predictions.images)
    assert all(image.file.startswith(image.label) for image in outcome.predictions.images)
    # The layout makes no other difference.
    assert torch.equal(shares(outcome.predictions), shares(adapt_to_folder(run, support, query).predictions))


@pytest.mark.parametrize("mode", ["batch", "support", "running"])
@pytest.mark.parametrize("network", [{}, {"model": "resnet12", "width": 64}], ids=["conv4", "resnet12"])
def test_what_was_saved_gives_the_same_predictions(tmp_path, support, query, mode, network):
    run = finished_run(tmp_path / "run", **network, batch_norm=mode, inner_lr=0.05, test_inner_steps=3)
    outcome = adapt_to_folder(run, support, query)
    assert ("transductive" in " ".join(outcome.notes)) == (mode == "batch")
    out = tmp_path / "out"
    out.mkdir()
    outcome.save(out)
    assert sorted(file.name for file in out.iterdir()) == sorted(FILES)
    for path in (run.path / "model.safetensors", run.path / "mask.safetensors", run.path / "run.json"):
        path.rename(tmp_path / path.name)  # what was saved stands alone
    loaded = load_adapted(out)
    assert loaded.classes == ("blue", "green", "red")
    assert torch.equal(shares(predict_folder(loaded, query)), shares(outcome.predictions))
    assert torch.equal(shares(predict_folder(loaded.train(), query)), shares(outcome.predictions))
    assert torch.equal(
        shares(predict_folder(load_adapted(out / "model.safetensors"), query)), shares(outcome.predictions)
    )


@pytest.mark.parametrize("mask", get_args(MaskKind))
def test_every_mask_kind_adapts_and_loads(tmp_path, support, query, mask):
    run = finished_run(tmp_path / "run", mask=mask, inner_lr=0.05, test_inner_steps=3)
    outcome = adapt_to_folder(run, support, query)
    assert 0 < outcome.delta.changed <= outcome.delta.total
    outcome.network.save(tmp_path / "model.safetensors")
    again = predict_folder(load_adapted(tmp_path / "model.safetensors"), query)
    assert torch.equal(shares(again), shares(outcome.predictions))


def test_a_solved_head_adapts_and_loads(tmp_path, support, query):
    settings = {"head": "ridge", "mask": "fixed", "inner_steps": 0, "test_inner_steps": 0}
    run = finished_run(tmp_path / "run", **settings)
    outcome = adapt_to_folder(run, support, query)
    images, queries = (
        as_input(torch.from_numpy(np.stack([read_one(file) for file in sorted(folder.rglob("*.png"))])))
        for folder in (support, query)
    )
    _, model, _ = load_trained(run)
    with torch.no_grad():
        logits = ridge_logits(model.train(), images, torch.tensor([0, 0, 1, 1, 2, 2]), queries, ways=3)
    torch.testing.assert_close(logits.double().softmax(1), shares(outcome.predictions), rtol=1e-4, atol=1e-5)
    assert outcome.delta is None
    assert outcome.changed == 3 * 8  # classes x features
    outcome.save(tmp_path)
    assert not (tmp_path / "delta.safetensors").exists()
    assert torch.equal(shares(predict_folder(load_adapted(tmp_path), query)), shares(outcome.predictions))
    with pytest.raises(UserError, match="takes no inner steps"):
        adapt_to_folder(run, support, query, steps=3)


def test_transformations_of_a_t_net_stay(tmp_path, support, query):
    run = finished_run(tmp_path / "run", t_net=True, mask="rows")
    outcome = adapt_to_folder(run, support, query)
    assert outcome.predictions.accuracy == 1.0
    outcome.save(tmp_path)
    assert torch.equal(shares(predict_folder(load_adapted(tmp_path), query)), shares(outcome.predictions))


def test_the_delta_and_the_runs_model_make_the_adapted_network(run, support, query, tmp_path):
    outcome = adapt_to_folder(run, support, query)
    outcome.save(tmp_path)
    _, model, mask = load_trained(run)
    closed = sum(int((multiplier == 0).sum()) for multiplier in mask.multipliers().values())
    delta = SparseDelta.load(tmp_path / "delta.safetensors")
    assert 0 < delta.changed <= delta.total - closed
    rebuilt = delta.apply(model).state_dict()
    stored, _ = load_weights(tmp_path / "model.safetensors")
    assert rebuilt.keys() == stored.keys()
    assert all(torch.equal(rebuilt[name], tensor) for name, tensor in stored.items())
    changed = sum(int((tensor != model.state_dict()[name]).sum()) for name, tensor in stored.items())
    assert changed == delta.changed == json.loads((tmp_path / "predictions.json").read_text())["weights_changed"]


def test_outputs_left_over_are_ignored(tmp_path, support, query):
    run = finished_run(tmp_path / "run", ways=20, mask="fixed")
    outcome = adapt_to_folder(run, support, query)
    assert outcome.predictions.accuracy == 1.0
    assert shares(outcome.predictions).shape == (9, 3)
    assert any("of 20" in note for note in outcome.notes)
    before, _ = load_weights(run.path / "model.safetensors")
    after = outcome.network.network.state_dict()
    assert torch.equal(after["head.weight"][3:], before["head.weight"][3:])
    assert not torch.equal(after["head.weight"][:3], before["head.weight"][:3])


def test_as_many_classes_as_ways_need_no_note(tmp_path, support, query):
    run = finished_run(tmp_path / "run", ways=3, batch_norm="support")
    assert adapt_to_folder(run, support, query).notes == ()


def test_classes_may_have_different_numbers_of_images(run, tmp_path, query):
    support = colour_folder(tmp_path / "support", count=1)
    colour_folder(support, ["red"], count=4, start=1)
    outcome = adapt_to_folder(run, support, query)
    assert outcome.support_counts == {"blue": 1, "green": 1, "red": 5}
    assert outcome.predictions.accuracy == 1.0


def test_results_as_files(run, support, query, tmp_path):
    outcome = adapt_to_folder(run, support, query, steps=3)
    outcome.save(tmp_path)
    record = json.loads((tmp_path / "predictions.json").read_text())
    assert (record["inner_steps"], record["batch_norm"], record["accuracy"]) == (
        3,
        "batch",
        outcome.predictions.accuracy,
    )
    assert record["support_images"] == {"blue": 2, "green": 2, "red": 2}
    assert record["notes"] == list(outcome.notes)
    rows = list(csv.DictReader((tmp_path / "predictions.csv").read_text().splitlines()))
    assert len(rows) == len(record["images"]) == 9
    for row, image, prediction in zip(rows, record["images"], outcome.predictions.images, strict=True):
        assert row["file"] == image["file"] == prediction.file
        assert row["prediction"] == image["prediction"] == prediction.label
        assert row["truth"] == image["truth"] == prediction.truth
        assert float(row["confidence"]) == pytest.approx(image["confidence"], abs=1e-4)
        assert image["probabilities"] == dict(zip(COLOURS, prediction.probabilities, strict=True))


@pytest.mark.parametrize("mode", ["batch", "support", "running"])
def test_many_query_images_go_through_in_passes(tmp_path, support, monkeypatch, mode):
    run = finished_run(tmp_path / "run", batch_norm=mode, mask="fixed")
    query = colour_folder(tmp_path / "query", count=6, start=10)
    whole = adapt_to_folder(run, support, query)
    monkeypatch.setattr(own_images, "PASS_IMAGES", 5)
    sizes, ticks = [], []
    forward = own_images.AdaptedNetwork.forward

    def counted(network, x):
        sizes.append(len(x))
        return forward(network, x)

    monkeypatch.setattr(own_images.AdaptedNetwork, "forward", counted)
    parted = adapt_to_folder(run, support, query, progress=lambda done, total: ticks.append((done, total)))
    assert sizes == [5, 5, 4, 4]
    assert [image.file for image in parted.predictions.images] == [image.file for image in whole.predictions.images]
    # Sorted by class, a pass of its own would see one class alone, and batch statistics would hide it.
    assert parted.predictions.accuracy == 1.0
    assert any("in 4 passes" in note for note in parted.notes) == (mode == "batch")
    if mode != "batch":
        torch.testing.assert_close(shares(parted.predictions), shares(whole.predictions))
    assert [done for done, _ in ticks] == sorted(done for done, _ in ticks)
    assert {total for _, total in ticks} == {8 + 4}
    assert ticks[-1][0] == 8 + 3


def test_a_run_that_does_not_know_its_image_shape_asks_its_image_set(run, support, query, tmp_path):
    expected = shares(adapt_to_folder(run, support, query).predictions)
    file = run.path / "model.safetensors"
    save_weights(file, load_weights(file)[0], {"step": "1"})  # as early versions wrote it
    with pytest.raises(DataError, match="gone"):
        adapt_to_folder(run, support, query)
    images = ImageSplit("gone/train", np.zeros((2, 20, 20, 3), np.uint8), np.array([0, 1, 2]), ("a", "b"), ("", ""))
    image_set.write("gone", {"train": images}, {})
    assert torch.equal(shares(adapt_to_folder(run, support, query).predictions), expected)


COLOUR = from_dict(FewShotConfig, {"data": "gone"})
DRAWINGS = from_dict(FewShotConfig, {"data": "glyphs"})


def read_one(file, config=COLOUR, shape=(20, 20, 3)):
    (image,) = read_images([file], config, shape)
    if isinstance(image, DataError):
        raise image
    return image


def halves(size=40):
    """Red above blue."""
    pixels = np.zeros((size, size, 3), np.uint8)
    pixels[: size // 2, :, 0] = pixels[size // 2 :, :, 2] = 255
    return Image.fromarray(pixels)


def test_modes_and_formats_come_out_alike(tmp_path):
    halves().save(tmp_path / "plain.png")
    expected = read_one(tmp_path / "plain.png")
    assert expected.dtype == np.uint8
    assert expected[2, 2].tolist() == [255, 0, 0]
    assert expected[-3, 2].tolist() == [0, 0, 255]
    halves().convert("RGBA").save(tmp_path / "alpha.png")
    halves().quantize().save(tmp_path / "palette.gif")
    halves().quantize().save(tmp_path / "palette.png", transparency=255)
    halves().save(tmp_path / "upper.TIFF")
    halves().save(tmp_path / "lossless.webp", lossless=True)
    halves().save(tmp_path / "bitmap.bmp")
    halves().convert("CMYK").save(tmp_path / "print.tif")
    for name in ("alpha.png", "palette.gif", "palette.png", "upper.TIFF", "lossless.webp", "bitmap.bmp", "print.tif"):
        assert np.array_equal(read_one(tmp_path / name), expected), name
    halves().save(tmp_path / "photo.jpg", quality=95, subsampling=0)
    assert np.abs(read_one(tmp_path / "photo.jpg").astype(int) - expected).max() < 60
    halves(400).resize((400, 200)).save(tmp_path / "wide.png")  # squashed, not cropped
    assert np.abs(read_one(tmp_path / "wide.png").astype(int) - expected).max() < 60


@pytest.mark.parametrize("suffix", ["ico", "jp2", "icns"])
def test_images_of_rarer_formats_are_learned_from_and_judged(run, tmp_path, suffix):
    for folder in ("support", "query"):
        for name, colour in (("red", (250, 0, 0)), ("blue", (0, 0, 250))):
            (tmp_path / folder / name).mkdir(parents=True)
            Image.new("RGB", (32, 32), colour).save(tmp_path / folder / name / f"1.{suffix}")
    outcome = adapt_to_folder(run, tmp_path / "support", tmp_path / "query")
    assert outcome.support_counts == {"blue": 1, "red": 1}
    assert [image.file for image in outcome.predictions.images] == [f"blue/1.{suffix}", f"red/1.{suffix}"]
    assert not any("left out" in note for note in outcome.notes)


def test_grey_and_transparent_images_as_colour(tmp_path):
    Image.fromarray(np.full((30, 30), 77, np.uint8)).save(tmp_path / "grey.png")
    Image.fromarray(np.full((30, 30), 77 * 257, np.uint16)).save(tmp_path / "deep.png")
    for name in ("grey.png", "deep.png"):
        assert np.array_equal(read_one(tmp_path / name), np.full((20, 20, 3), 77))
    Image.new("RGBA", (30, 30), (200, 0, 0, 0)).save(tmp_path / "clear.png")
    assert np.array_equal(read_one(tmp_path / "clear.png"), np.full((20, 20, 3), 255))


def test_photographs_are_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held so that the picture must turn right to stand
    halves().rotate(90).save(tmp_path / "held.png", exif=exif)
    halves().save(tmp_path / "upright.png")
    assert np.array_equal(read_one(tmp_path / "held.png"), read_one(tmp_path / "upright.png"))


def drawing(size=28):
    ink = np.zeros((size, size), np.uint8)
    ink[size // 4 : size // 2, size // 4 : -size // 4] = 255
    ink[size // 2 : -size // 4, size // 2 : -size // 4] = 120
    return ink


def test_drawings_on_any_ground_become_ink_on_black(tmp_path):
    ink = drawing()
    expected = ink[:, :, None]
    grey_paper = np.rint(180 * (1 - ink / 255)).astype(np.uint8)
    slate = np.rint(60 + ink * (195 / 255)).astype(np.uint8)
    grounds = {"black": ink, "white": 255 - ink, "grey paper": grey_paper, "slate": slate}
    for name, pixels in grounds.items():
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
        seen = read_one(tmp_path / f"{name}.png", DRAWINGS, (28, 28, 1))
        exact = name in ("black", "white")  # such as the set's own drawings
        assert np.abs(seen.astype(int) - expected).max() <= (0 if exact else 2), name
    stroke = np.zeros((28, 28, 4), np.uint8)
    stroke[:, :, 3] = ink  # black ink on nothing
    Image.fromarray(stroke).save(tmp_path / "clear.png")
    assert np.array_equal(read_one(tmp_path / "clear.png", DRAWINGS, (28, 28, 1)), expected)
    Image.fromarray(255 - drawing(112)).save(tmp_path / "large.png")
    assert np.array_equal(read_one(tmp_path / "large.png", DRAWINGS, (28, 28, 1)), expected)


@pytest.mark.parametrize("data", ["glyphs", "omniglot", "mnist"])
def test_runs_on_drawings_take_paper_and_black_alike(tmp_path, data):
    run = finished_run(tmp_path / "run", (28, 28, 1), data=data, ways=2, inner_lr=0.1)
    for top, invert in (("black", False), ("paper", True)):
        for label in ("across", "down"):
            folder = tmp_path / top / label
            folder.mkdir(parents=True)
            for number in range(3):
                ink = np.zeros((28, 28), np.uint8)
                ink[8 + number : 12 + number, 6:22] = 255
                ink = ink if label == "across" else ink.T
                Image.fromarray(255 - ink if invert else ink).save(folder / f"{number}.png")
    results = [
        adapt_to_folder(run, tmp_path / one, tmp_path / other)
        for one, other in (("black", "black"), ("paper", "paper"), ("black", "paper"))
    ]
    assert results[0].predictions.accuracy == 1.0
    for result in results[1:]:
        assert torch.equal(shares(result.predictions), shares(results[0].predictions))
        assert any("bright ink on black" in note for note in result.notes)


def test_grey_images_that_are_no_drawings_are_taken_as_they_are(tmp_path):
    Image.fromarray(np.full((28, 28), 200, np.uint8)).save(tmp_path / "grey.png")
    fashion = from_dict(FewShotConfig, {"data": "fashion-mnist"})
    for config in (fashion, COLOUR):
        assert np.array_equal(read_one(tmp_path / "grey.png", config, (28, 28, 1)), np.full((28, 28, 1), 200))


def test_the_network_takes_images_as_the_run_did(run, support, query):
    """One image by hand, through the transform of training, against the prediction of its file."""
    outcome = adapt_to_folder(run, support, query, steps=4)
    pixels = [
        Image.open(query / image.file).resize((20, 20), Image.Resampling.BICUBIC)
        for image in outcome.predictions.images
    ]
    inputs = as_input(torch.from_numpy(np.stack([np.asarray(image) for image in pixels])))
    with torch.no_grad():
        logits = outcome.network(inputs)
    torch.testing.assert_close(logits.double().softmax(1), shares(outcome.predictions), rtol=1e-4, atol=1e-5)


def test_query_images_that_cannot_be_read_are_left_out_and_named(run, support, query, tmp_path, monkeypatch):
    expected = adapt_to_folder(run, support, query).predictions
    assert expected.left_out == ()
    broken = [f"green/{number}-broken.png" for number in range(5)]
    for name in broken:
        (query / name).write_bytes(b"not an image")
    monkeypatch.setattr(own_images, "PASS_IMAGES", 10)  # two passes, each with broken images
    outcome = adapt_to_folder(run, support, query)
    assert [image.file for image in outcome.predictions.images] == [image.file for image in expected.images]
    assert any("0-broken.png" in note and "4 more" in note for note in outcome.notes)
    outcome.save(tmp_path)
    record = json.loads((tmp_path / "predictions.json").read_text())
    assert [image["file"] for image in record["left_out"]] == broken  # every one, in order
    for image in record["left_out"]:
        assert image["reason"] == f"cannot read the image {query / image['file']}: its content is of no known kind"


@pytest.mark.parametrize("target", ["itself", "gone"])
def test_links_that_lead_nowhere_are_left_out_and_named(run, support, query, tmp_path, target):
    flat = colour_folder(tmp_path / "flat", count=3, start=10, flat=True)
    for folder, names in ((query, ("red/dead.png", "yellow")), (flat, ("dead.png",))):
        expected = adapt_to_folder(run, support, folder)
        for name in names:
            link = folder / name
            link.symlink_to(link if target == "itself" else tmp_path / "gone")
        outcome = adapt_to_folder(run, support, folder)
        assert outcome.predictions.images == expected.predictions.images
        assert {image.file for image in outcome.predictions.left_out} == set(names)
        assert all("a link that leads nowhere" in image.reason for image in outcome.predictions.left_out)
        assert not any("suffix" in note for note in outcome.notes)


@pytest.mark.parametrize("target", ["itself", "gone"])
@pytest.mark.parametrize("name", ["red/dead.png", "yellow", "dead.png"])
def test_links_that_lead_nowhere_are_an_error_in_the_support_folder(run, support, query, tmp_path, target, name):
    link = support / name
    link.symlink_to(link if target == "itself" else tmp_path / "gone")
    with pytest.raises(DataError, match=f"{name}: it is a link that leads nowhere"):
        adapt_to_folder(run, support, query)


def test_a_query_folder_of_dead_links_is_an_error(run, support, tmp_path):
    (tmp_path / "query").mkdir()
    (tmp_path / "query" / "dead.png").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"dead\.png: it is a link that leads nowhere"):
        adapt_to_folder(run, support, tmp_path / "query")


def test_an_image_that_is_too_large_says_so(run, support, query):
    Image.new("1", (15000, 15000)).save(query / "red" / "huge.png")
    outcome = adapt_to_folder(run, support, query)
    (image,) = outcome.predictions.left_out
    assert image.file == "red/huge.png"
    assert image.reason.endswith("huge.png is too large, at more than 178 million pixels: shrink it")


def test_a_large_image_is_read_without_a_warning(tmp_path):
    Image.new("1", (9500, 9500), 1).save(tmp_path / "large.png")  # Pillow warns of it
    assert np.array_equal(read_one(tmp_path / "large.png"), np.full((20, 20, 3), 255))


@pytest.mark.parametrize("top", ["support", "query"])
def test_few_bits_in_a_file_of_16_are_noted(run, support, query, tmp_path, top):
    place = {"support": support, "query": query}[top] / "red"
    values = np.arange(900).reshape(30, 30)
    Image.fromarray((values * 72).astype(np.uint16)).save(place / "whole.png")
    Image.fromarray((values // 40).astype(np.uint8)).save(place / "dark, 8-bit.png")
    assert not any("16-bit" in note for note in adapt_to_folder(run, support, query).notes)
    Image.fromarray((values * 4).astype(np.uint16)).save(place / "twelve.png")
    Image.fromarray((values * 4).astype(np.uint16)).save(place / "twelve.tif")
    (note,) = (note for note in adapt_to_folder(run, support, query).notes if "16-bit" in note)
    assert note.startswith(f"{place / 'twelve.png'} and 1 more are almost black")


def test_a_large_image_of_16_bits_is_looked_at_without_a_warning(run, support, query, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)
    Image.fromarray(np.arange(900, dtype=np.uint16).reshape(30, 30)).save(query / "red" / "dark.png")
    assert any("16-bit" in note for note in adapt_to_folder(run, support, query).notes)


def test_a_query_folder_of_broken_images_is_an_error(run, support, tmp_path):
    (tmp_path / "query").mkdir()
    (tmp_path / "query" / "broken.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"cannot read the image .*broken\.png"):
        adapt_to_folder(run, support, tmp_path / "query")


def test_what_the_user_should_know_is_said(run, support, query):
    (query / "red" / "notes.txt").write_text("mine")
    (query / "IMG_1.HEIC").write_bytes(b"")
    (query / ".DS_Store").write_bytes(b"")
    for file in (query / "blue").iterdir():
        file.unlink()
    Image.new("RGB", (20, 20), (9, 9, 9)).save(support / "red" / "blank.png")
    notes = "\n".join(adapt_to_folder(run, support, query).notes)
    assert "IMG_1.HEIC, notes.txt" in notes
    assert ".DS_Store" not in notes
    assert "no images in blue" in notes
    assert "blank.png is blank" in notes
    assert "3 classes, of 4" in notes
    assert "very images" not in notes
    assert "very images" in "\n".join(adapt_to_folder(run, support, support / ".." / "support").notes)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_that_are_no_text_can_be_stored(run, support, query, tmp_path):
    (query / "red" / "10.png").rename(query / "red" / os.fsdecode(b"caf\xe9.png"))
    out = tmp_path / "out"
    out.mkdir()
    adapt_to_folder(run, support, query).save(out)
    assert "red/caf\N{REPLACEMENT CHARACTER}.png" in (out / "predictions.csv").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
@pytest.mark.parametrize(
    ("names", "shown"),
    [((b"caf\xe8", b"caf\xe9"), "caf\N{REPLACEMENT CHARACTER}"), ((b"caf\xc3\xa9", b"cafe\xcc\x81"), "caf\xe9")],
    ids=["not UTF-8", "one text in two spellings"],
)
def test_classes_that_look_alike_are_refused(run, support, query, names, shown):
    for colour, name in zip(("red", "green"), names, strict=True):
        (support / colour).rename(support / os.fsdecode(name))
    with pytest.raises(DataError, match=f"two class folders in {support} are both shown as '{shown}': rename one"):
        adapt_to_folder(run, support, query)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_class_is_the_same_however_its_name_is_spelled(run, support, query):
    (support / "red").rename(support / "caf\xe9")
    (query / "red").rename(query / "cafe\u0301")
    predictions = adapt_to_folder(run, support, query).predictions
    assert predictions.accuracy == 1.0
    assert next(image.file for image in predictions.images if image.truth == "caf\xe9") == "cafe\u0301/10.png"


def spoil_support(support, query, tmp_path, case):
    """One mistake; returns the folders to give, and words that the message must hold."""
    match case:
        case "missing":
            return tmp_path / "nowhere", query, "nowhere does not exist"
        case "a file":
            return support / "red" / "0.png", query, r"0\.png is a file"
        case "empty":
            (tmp_path / "empty").mkdir()
            return tmp_path / "empty", query, "empty holds no image"
        case "flat":
            return colour_folder(tmp_path / "flat", flat=True), query, "no class folders"
        case "mixed":
            halves().save(support / "loose.png")
            return support, query, r"mixes images \(loose\.png\) with class folders \(blue\)"
        case "nested":
            return support.parent, query, "is a folder in a class folder"
        case "empty class":
            (support / "yellow").mkdir()
            return support, query, "yellow holds no image"
        case "one class":
            return colour_folder(tmp_path / "one", ["red"]), query, "one class, red"
        case "too many classes":
            for name in ("four", "five"):
                (support / name).mkdir()
                halves().save(support / name / "0.png")
            return support, query, "5 classes.* only 4 apart.*ways=5"
        case "broken image":
            (support / "red" / "0.png").write_bytes(b"not an image")
            return support, query, r"cannot read the image .*red.0\.png"
        case "too many images":
            for number in range(1000):
                (support / "red" / f"more-{number}.png").touch()
            return support, query, "1006 images.*at most 1000"
    raise AssertionError(case)


@pytest.mark.parametrize(
    "case",
    [
        *("missing", "a file", "empty", "flat", "mixed", "nested", "empty class", "one class", "too many classes"),
        *("broken image", "too many images"),
    ],
)
def test_mistakes_in_the_support_folder(run, support, query, tmp_path, case):
    support, query, words = spoil_support(support, query, tmp_path, case)
    with pytest.raises(DataError, match=words):
        adapt_to_folder(run, support, query)


def spoil_query(query, tmp_path, case):
    match case:
        case "missing":
            return tmp_path / "nowhere", "nowhere does not exist"
        case "a file":
            return query / "red" / "10.png", "is a file"
        case "empty":
            (tmp_path / "empty").mkdir()
            return tmp_path / "empty", "empty holds no image"
        case "mixed":
            halves().save(query / "loose.png")
            return query, "mixes images"
        case "nested":
            return colour_folder(tmp_path / "deep" / "red").parent, "is a folder in a class folder"
        case "unknown class":
            (query / "greenn").mkdir()
            return query, r"greenn is no class of the support folder; did you mean 'green'\? Its .* blue, green, red"
        case "capitals":
            (query / "red").rename(query / "RED")
            return query, r"RED is no class of the support folder; did you mean 'red'\? Its classes"
        case "another class":
            (query / "xyz").mkdir()
            return query, r"xyz is no class of the support folder\. Its classes are blue, green, red"
    raise AssertionError(case)


@pytest.mark.parametrize(
    "case", ["missing", "a file", "empty", "mixed", "nested", "unknown class", "capitals", "another class"]
)
def test_mistakes_in_the_query_folder(run, support, query, tmp_path, case):
    query, words = spoil_query(query, tmp_path, case)
    with pytest.raises(DataError, match=words):
        adapt_to_folder(run, support, query)


def test_a_run_that_is_not_finished(run, support, query):
    (run.path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="not finished"):
        adapt_to_folder(run, support, query)


def test_a_run_of_another_protocol(run, support, query):
    run.info["protocol"] = "continual"
    with pytest.raises(UserError, match="continual"):
        adapt_to_folder(run, support, query)


def test_an_inner_loop_that_diverges_says_where(tmp_path, support, query):
    run = finished_run(tmp_path / "run", inner_lr=1e30, mask="fixed")
    with pytest.raises(NonFiniteError, match="inner step 2 of 8"):
        adapt_to_folder(run, support, query)


def test_only_an_adapted_network_is_loaded(run, tmp_path):
    with pytest.raises(MismatchError, match="no adapted network"):
        load_adapted(run.path)
    with pytest.raises(UserError, match="cannot read"):
        load_adapted(tmp_path / "nowhere")
