import itertools

import pytest
import torch

from wheretolearn.data.random_bits import (
    distinct,
    normal,
    permutation,
    permutation_keys,
    random_bits,
    random_bits_by_lane,
    uniform,
)


def is_even(counts: torch.Tensor, shares: list[float] | None = None) -> bool:
    """Chi-square: whether the counts fit their expected shares to within five deviations."""
    weights = torch.ones(len(counts)) if shares is None else torch.tensor(shares)
    expected = counts.sum() * weights / weights.sum()
    freedom = len(counts) - 1
    return bool(((counts - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5)


def is_uniform(numbers: torch.Tensor) -> bool:
    """Kolmogorov-Smirnov: whether the empirical distribution keeps close to that of [0, 1)."""
    ranks = torch.arange(1, len(numbers) + 1) / len(numbers)
    return bool((numbers.double().sort().values - ranks).abs().max() < 2 / len(numbers) ** 0.5)


def test_without_keys_it_is_the_published_splitmix64_sequence() -> None:
    published = [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
        0xF88BB8A8724C81EC,
        0x1B39896A51A8749B,
    ]
    assert random_bits((5,)).tolist() == [number >> 1 for number in published]


def test_golden_values_of_keyed_draws() -> None:
    assert random_bits((3,), 7, "train", 11).tolist() == [
        6754598100986878811,
        8883748760315369067,
        3984057986271673956,
    ]
    assert random_bits((1,), -1).tolist() == random_bits((1,), 2**64 - 1).tolist()


@pytest.mark.parametrize("step", [0, 1, -3, 2**40 + 17, 2**63 - 1])
@pytest.mark.parametrize("order", list(itertools.permutations(["seed", "word", "step"])))
def test_a_tensor_key_draws_the_same_as_an_integer(step: int, order: tuple[str, ...]) -> None:
    as_integers = {"seed": 3, "word": "train", "step": step}
    as_tensors = as_integers | {"step": torch.tensor(step)}
    drawn = random_bits((2, 3), *(as_integers[name] for name in order))
    assert torch.equal(drawn, random_bits((2, 3), *(as_tensors[name] for name in order)))
    assert drawn.dtype == torch.int64
    assert drawn.min() >= 0


def test_several_tensor_keys_and_small_integer_types() -> None:
    tensors = (torch.tensor(5, dtype=torch.int32), torch.tensor([9]))
    assert torch.equal(random_bits((4,), *tensors), random_bits((4,), 5, 9))


def test_the_order_of_keys_matters_and_so_does_each_key() -> None:
    draws = [random_bits((4,), *keys) for keys in [(1, 2), (2, 1), (1, 3), (1,), (1, 2, 0), ("1", 2)]]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)


def test_a_smaller_draw_is_the_beginning_of_a_larger_one() -> None:
    assert torch.equal(random_bits((3, 4), 1), random_bits((8, 4), 1)[:3])


@pytest.mark.parametrize("place", [0, 7, 24, 40, 55])
@pytest.mark.parametrize("axis", ["within", "steps", "seeds"])
def test_bytes_are_uniform_along_entries_steps_and_seeds(place: int, axis: str) -> None:
    if axis == "within":
        bits = random_bits((20_000,), 0, 0)
    elif axis == "steps":
        bits = torch.cat([random_bits((4,), 0, step) for step in range(5_000)])
    else:
        bits = torch.cat([random_bits((4,), seed, 0) for seed in range(5_000)])
    counts = ((bits >> place) & 255).bincount(minlength=256)
    assert is_even(counts)


@pytest.mark.parametrize("changed", ["seed", "step", "entry"])
def test_neighbours_are_independent(changed: str) -> None:
    # Each of 63 bits should flip for half of the neighbours: 20,000 pairs give a deviation of 0.0035.
    one = random_bits((20_000,), 4, 9)
    other = {
        "seed": lambda: random_bits((20_000,), 5, 9),
        "step": lambda: random_bits((20_000,), 4, 10),
        "entry": lambda: random_bits((20_001,), 4, 9)[1:],
    }[changed]()
    flips = ((one ^ other).unsqueeze(1) >> torch.arange(63)) & 1
    assert (flips.double().mean(0) - 0.5).abs().max() < 0.02
    correlation = torch.corrcoef(torch.stack([one.double(), other.double()]))[0, 1]
    assert abs(correlation) < 0.03


def test_neighbouring_keys_change_half_of_the_bits_of_one_entry() -> None:
    entries = torch.cat([random_bits((1,), 0, step) for step in range(4_000)])
    flips = ((entries[1:] ^ entries[:-1]).unsqueeze(1) >> torch.arange(63)) & 1
    assert (flips.double().mean(0) - 0.5).abs().max() < 0.04


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_fill_the_unit_interval(dtype: torch.dtype) -> None:
    numbers = uniform((50_000,), 1, dtype=dtype)
    assert numbers.dtype == dtype
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert is_uniform(numbers)


def test_all_permutations_are_equally_likely() -> None:
    orders = permutation_keys((24_000, 4), 2).argsort(dim=1)
    codes = (orders * torch.tensor([64, 16, 4, 1])).sum(1)
    counts = codes.bincount()
    counts = counts[counts > 0]
    assert len(counts) == 24
    assert is_even(counts)


def test_invalid_entries_sort_last() -> None:
    valid = torch.tensor([True, False, True, False])
    orders = permutation_keys((100, 4), 0, valid=valid).argsort(dim=1)
    assert set(orders[:, :2].flatten().tolist()) == {0, 2}


def test_permutation_holds_every_index_once() -> None:
    assert permutation(1000, 3).sort().values.equal(torch.arange(1000))
    assert not permutation(1000, 3).equal(permutation(1000, 4))


def test_distinct_draws_every_ordered_choice_equally_often() -> None:
    drawn = distinct(torch.full((24_000,), 4), 3, 8)
    codes = (drawn * torch.tensor([16, 4, 1])).sum(1)
    counts = codes.bincount()
    counts = counts[counts > 0]
    assert len(counts) == 24
    assert is_even(counts)


def test_distinct_keeps_within_each_limit() -> None:
    limits = torch.tensor([[5, 6], [20, 7000]])
    drawn = distinct(limits.repeat(500, 1), 5, 1)
    assert drawn.shape == (1000, 2, 5)
    assert (drawn < limits.repeat(500, 1).unsqueeze(-1)).all()
    assert (drawn.sort().values.diff() > 0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_numbers() -> None:
    step = torch.tensor(5, device="cuda")
    assert torch.equal(random_bits((100, 99), 3, "train", step).cpu(), random_bits((100, 99), 3, "train", 5))
    assert torch.equal(uniform((999,), 1, device="cuda").cpu(), uniform((999,), 1))


def test_normal_numbers_have_mean_zero_variance_one_and_normal_tails():
    x = normal((100_000,), 7, "noise", 3)
    assert abs(x.mean()) < 0.02
    assert abs(x.var() - 1) < 0.02
    assert abs((x.abs() > 1.96).float().mean() - 0.05) < 0.005
    assert x.isfinite().all()
    assert torch.equal(x, normal((100_000,), 7, "noise", torch.tensor(3)))
    assert not torch.equal(x, normal((100_000,), 7, "noise", 4))


def test_bits_by_lane_are_those_of_each_seed_alone() -> None:
    seeds, steps = torch.tensor([0, 5, 2**31 - 1]), torch.tensor([3, 9, 4])
    for key in (7, torch.tensor(7)):
        together = random_bits_by_lane((2, 3), seeds, "word", key)
        alone = torch.stack([random_bits((2, 3), int(seed), "word", 7) for seed in seeds])
        assert torch.equal(together, alone)
    own_keys = random_bits_by_lane((4,), seeds, steps)
    alone = torch.stack([random_bits((4,), int(seed), int(step)) for seed, step in zip(seeds, steps, strict=True)])
    assert torch.equal(own_keys, alone)
