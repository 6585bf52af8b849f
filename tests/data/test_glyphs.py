import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, features

from wheretolearn.data import glyphs, image_set
from wheretolearn.data.image_set import ImageSplit
from wheretolearn.errors import ConfigError, DataError

BOX = 26  # long side of a reference rendering, pixels
FRAME = 32
NEAR = 2.0  # pixels: ink nearer than this to the other character's ink tells nothing
UNLIKE = 0.015  # share of a character's ink that must lie further away
REFERENCE_FONTS = ("DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSerif-Italic.ttf", "STIXGeneral.ttf")

Masks = npt.NDArray[np.bool_]


@pytest.fixture(scope="module")
def splits() -> dict[str, ImageSplit]:
    return glyphs.draw(seed=0, drawings=2)


@pytest.fixture
def one_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small set: two classes per split, one drawing each."""
    members = {split: pairs[:2] for split, pairs in glyphs.split_members().items()}
    monkeypatch.setattr(glyphs, "split_members", lambda: members)
    monkeypatch.setattr(glyphs, "DRAWINGS", 1)


def reference(character: str, face: glyphs.Face) -> Masks:
    """The character's ink, scaled to fit BOX and centred: place and size are gone, shape is left."""
    mask = face.font.getmask(character, mode="L")
    glyph = Image.frombytes("L", mask.size, bytes(mask))
    glyph = glyph.crop(glyph.getbbox())
    scale = BOX / max(glyph.size)
    width, height = (max(1, round(side * scale)) for side in glyph.size)
    frame = Image.new("L", (FRAME, FRAME))
    frame.paste(glyph.resize((width, height), Image.Resampling.BOX), ((FRAME - width) // 2, (FRAME - height) // 2))
    return np.asarray(frame) > 127


def thickened(masks: Masks) -> Masks:
    """Every pixel within NEAR of ink."""
    reach = int(NEAR)
    padded = np.pad(masks, ((0, 0), (reach, reach), (reach, reach)))
    near = np.zeros_like(masks)
    for down in range(-reach, reach + 1):
        for right in range(-reach, reach + 1):
            if down**2 + right**2 <= NEAR**2:
                near |= padded[:, reach + down : reach + down + FRAME, reach + right : reach + right + FRAME]
    return near


def look_alikes(members: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """Pairs whose ink nearly coincides, both ways, in one of the reference fonts."""
    pairs = set()
    for face in glyphs.all_faces():
        if face.file not in REFERENCE_FONTS:
            continue
        present = [c for script, c in members if face in glyphs.faces_of(c, script)]
        masks = np.stack([reference(character, face) for character in present])
        ink = masks.reshape(len(masks), -1).astype(np.float32)
        far = 1 - thickened(masks).reshape(len(masks), -1)
        far_share = (ink / ink.sum(axis=1, keepdims=True)) @ far.T.astype(np.float32)
        alike = np.maximum(far_share, far_share.T) < UNLIKE
        first, second = np.nonzero(np.triu(alike, k=1))
        pairs |= {(present[i], present[j]) for i, j in zip(first, second, strict=True)}
    return pairs


def all_members() -> list[tuple[str, str]]:
    return [pair for pairs in glyphs.split_members().values() for pair in pairs]


def test_there_are_at_least_600_classes_with_twenty_drawings_each() -> None:
    assert len(all_members()) >= 600
    assert glyphs.draw_character("A", "latin").shape == (20, 28, 28, 1)


def test_a_split_holds_its_classes_sorted_with_their_scripts(splits: dict[str, ImageSplit]) -> None:
    train = splits["train"]
    index = train.classes.index("LATIN SMALL LETTER G")
    start, end = train.class_offsets[index : index + 2]
    assert train.groups[index] == "latin"
    assert np.array_equal(train.images[start:end], glyphs.draw_character("g", "latin", 0, 2))
    assert len(train.images) == train.class_offsets[-1] == 2 * len(train.classes)


def test_the_same_seed_draws_the_same_bytes() -> None:
    again = glyphs.draw_character("Q", "latin", seed=3)
    assert np.array_equal(glyphs.draw_character("Q", "latin", seed=3), again)


def test_another_seed_draws_otherwise() -> None:
    first, second = (glyphs.draw_character("Q", "latin", seed=seed) for seed in (3, 4))
    assert not any(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_drawing_does_not_depend_on_how_many_are_made() -> None:
    assert np.array_equal(
        glyphs.draw_character("Q", "latin", drawings=20)[:3], glyphs.draw_character("Q", "latin", drawings=3)
    )


def test_the_drawings_of_a_class_all_differ() -> None:
    drawings = glyphs.draw_character("\N{TIFINAGH LETTER YAB}", "tifinagh")
    assert len({drawing.tobytes() for drawing in drawings}) == 20


def test_no_class_is_in_two_splits(splits: dict[str, ImageSplit]) -> None:
    names = [name for split in splits.values() for name in split.classes]
    assert len(set(names)) == len(names)


def test_validation_and_scripts_hold_out_whole_scripts(splits: dict[str, ImageSplit]) -> None:
    scripts = {name: set(split.groups) for name, split in splits.items()}
    assert scripts["validation"].isdisjoint(scripts["train"] | scripts["scripts"])
    assert scripts["scripts"].isdisjoint(scripts["train"])
    assert min(len(scripts["validation"]), len(scripts["scripts"])) >= 3


def test_held_out_characters_come_from_every_training_script(splits: dict[str, ImageSplit]) -> None:
    assert set(splits["characters"].groups) == set(splits["train"].groups)


def test_no_font_draws_its_box_for_a_missing_glyph() -> None:
    missing = "\U000eeeee"
    for face in glyphs.all_faces():
        assert ord(missing) not in face.code_points
        box = face.font.getmask(missing, mode="L")
        for script, character in all_members():
            if face in glyphs.faces_of(character, script):
                mask = face.font.getmask(character, mode="L")
                assert mask.size != box.size or bytes(mask) != bytes(box), f"{character} in {face.file}"


def test_no_two_classes_look_alike() -> None:
    assert look_alikes(all_members()) == set()


def test_the_look_alike_check_finds_known_look_alikes() -> None:
    members = [("latin", "A"), ("greek", "\N{GREEK CAPITAL LETTER ALPHA}"), ("latin", "c"), ("latin", "C")]
    assert look_alikes(members) == {("A", "\N{GREEK CAPITAL LETTER ALPHA}"), ("c", "C")}


def test_every_image_has_some_ink_and_some_paper(splits: dict[str, ImageSplit]) -> None:
    for split in splits.values():
        ink = (split.images > 100).mean(axis=(1, 2, 3))
        assert ink.min() > 0.03
        assert ink.max() < 0.65
        assert split.images.max(axis=(1, 2, 3)).min() > 150


def test_cyrillic_is_drawn_without_italics() -> None:
    files = [face.file for face in glyphs.faces_of("\N{CYRILLIC CAPITAL LETTER ZHE}", "cyrillic")]
    assert "DejaVuSans-Oblique.ttf" in files
    assert "DejaVuSerif-Italic.ttf" not in files


def test_progress_ends_at_the_number_of_images(one_drawing: None) -> None:
    reports: list[tuple[int, int]] = []
    glyphs.draw(drawings=3, progress=lambda done, total: reports.append((done, total)))
    assert reports[-1] == (24, 24)
    assert len(reports) == 8


def test_a_second_load_does_not_draw(tmp_path, one_drawing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first = glyphs.load(tmp_path)
    monkeypatch.setattr(glyphs, "draw", None)
    second = glyphs.load(tmp_path)
    assert second.info["generator"] == glyphs.GENERATOR
    for name, split in first.splits.items():
        assert np.array_equal(split.images, second.splits[name].images)
        assert split.groups == second.splits[name].groups


@pytest.mark.parametrize("outdated", ["GENERATOR", "SEED"])
def test_an_outdated_copy_is_made_anew(
    tmp_path, one_drawing: None, monkeypatch: pytest.MonkeyPatch, outdated: str
) -> None:
    glyphs.load(tmp_path)
    monkeypatch.setattr(glyphs, outdated, 99)
    assert glyphs.load(tmp_path).info[outdated.lower()] == 99


def test_a_damaged_copy_is_made_anew(tmp_path, one_drawing: None) -> None:
    glyphs.load(tmp_path)
    (tmp_path / "glyphs" / "train.npy").write_bytes(b"")
    assert len(glyphs.load(tmp_path).splits["train"].images) == 2


def test_a_copy_that_another_process_finished_first_is_used(
    tmp_path, one_drawing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = glyphs.draw

    def draw_while_another_finishes(*arguments: object) -> dict[str, ImageSplit]:
        monkeypatch.setattr(glyphs, "draw", draw)
        glyphs.load(tmp_path)
        (tmp_path / "glyphs" / "mark").touch()
        return draw(0, 1)

    monkeypatch.setattr(glyphs, "draw", draw_while_another_finishes)
    glyphs.load(tmp_path)
    assert (tmp_path / "glyphs" / "mark").exists()


def test_a_lost_race_to_store_the_set_uses_the_winner(
    tmp_path, one_drawing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = image_set.write

    def lose(*arguments: object) -> None:
        write(*arguments)
        raise DataError("another folder is in the way")

    monkeypatch.setattr(image_set, "write", lose)
    assert glyphs.load(tmp_path).info["generator"] == glyphs.GENERATOR


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"drawings": 0}])
def test_a_negative_seed_or_no_drawing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 0 and 1"):
        glyphs.draw(**wrong)


def test_pillow_without_freetype_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "check", lambda feature: False)
    glyphs.all_faces.cache_clear()
    with pytest.raises(DataError, match="without FreeType"):
        glyphs.draw_character("A", "latin")
