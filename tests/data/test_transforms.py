import numpy as np
import pytest
import torch
from PIL import Image

from wheretolearn.data.transforms import as_input, rotate
from wheretolearn.errors import ConfigError, DataError


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def smooth_image() -> torch.Tensor:
    """A 28x28 image with a zero border, where libraries differ in how they fill."""
    image = torch.zeros(28, 28)
    image[6:22, 6:22] = torch.rand(16, 16, generator=torch.Generator().manual_seed(0))
    return image


def test_colour_is_normalised_by_imagenet_statistics() -> None:
    images = bytes_of(2, 6, 5, 3)
    expected = (images.numpy() / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    actual = as_input(images, dtype=torch.float64)
    torch.testing.assert_close(actual, torch.from_numpy(expected).permute(0, 3, 1, 2))
    torch.testing.assert_close(as_input(images), actual.float())


def test_one_channel_is_scaled_to_the_unit_interval() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(1, 1, 3, 1)
    torch.testing.assert_close(as_input(images), torch.tensor([0, 0.2, 1]).reshape(1, 1, 1, 3))


def test_colour_may_be_scaled_to_the_unit_interval() -> None:
    images = bytes_of(2, 6, 5, 3)
    torch.testing.assert_close(as_input(images, "unit"), images.permute(0, 3, 1, 2) / 255)


def test_half_precision_rounds_only_the_result() -> None:
    images = bytes_of(4, 8, 8, 3)
    assert torch.equal(as_input(images, dtype=torch.bfloat16), as_input(images).bfloat16())


@pytest.mark.parametrize("scaling", ["imagenet", "unit"])
def test_memory_format_is_as_asked_and_values_are_equal(scaling: str) -> None:
    images = bytes_of(2, 6, 5, 3)
    plain = as_input(images, scaling)
    assert plain.is_contiguous()
    packed = as_input(images, scaling, channels_last=True)
    assert packed.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain, packed)


def test_leading_dimensions_are_kept() -> None:
    images = bytes_of(2, 4, 6, 5, 3)
    assert torch.equal(as_input(images)[1], as_input(images[1]))
    assert as_input(images[0, 0]).shape == (3, 6, 5)


def test_unfit_images_are_refused() -> None:
    with pytest.raises(DataError, match="uint8"):
        as_input(torch.rand(2, 6, 5, 3))
    with pytest.raises(DataError, match="3 channels, not 1"):
        as_input(bytes_of(2, 6, 5, 1), "imagenet")
    with pytest.raises(ConfigError, match="unknown scaling 'minmax'"):
        as_input(bytes_of(2, 6, 5, 3), "minmax")


@pytest.mark.parametrize("size", [(28, 28), (7, 7), (5, 8)])
@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0.0), torch.zeros(3)])
def test_no_turn_is_the_exact_identity(size: tuple[int, int], zero: float | torch.Tensor) -> None:
    images = torch.rand(3, *size)
    assert torch.equal(rotate(images, zero), images)


@pytest.mark.parametrize("side", [27, 28])
@pytest.mark.parametrize("quarters", [1, 2, 3, -1])
def test_quarter_turns_are_counter_clockwise(side: int, quarters: int) -> None:
    images = torch.rand(2, side, side)
    torch.testing.assert_close(rotate(images, 90.0 * quarters), torch.rot90(images, quarters, (1, 2)))


@pytest.mark.parametrize("degrees", [3.7, 45.0, 101.3, 177.9])
def test_other_angles_agree_with_pillow(degrees: float) -> None:
    image = smooth_image()
    expected = Image.fromarray(image.numpy()).rotate(degrees, Image.Resampling.BILINEAR)
    actual = rotate(image.unsqueeze(0), degrees)[0]
    torch.testing.assert_close(actual, torch.from_numpy(np.array(expected)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("images", [torch.full((1, 9, 9), 200, dtype=torch.uint8), torch.rand(9, 9)])
def test_only_float_images_are_turned(images: torch.Tensor) -> None:
    with pytest.raises(DataError, match="must be float"):
        rotate(images, 30.0)


def test_what_turns_in_from_outside_is_zero() -> None:
    turned = rotate(torch.ones(1, 21, 21), 45.0)[0]
    assert turned[0, 0] == 0
    assert turned[10, 10] == 1


def test_each_image_may_have_its_own_angle() -> None:
    images = torch.rand(3, 9, 9)
    angles = torch.tensor([10.0, 50.0, 170.0])
    together = rotate(images, angles)
    for image, angle, turned in zip(images, angles.tolist(), together, strict=True):
        torch.testing.assert_close(turned, rotate(image.unsqueeze(0), angle)[0])
