"""Random numbers without a generator: a function of keys such as (seed, step), the same on every device.

Keys are folded into one 64-bit state with the finaliser of MurmurHash3, and the state starts a SplitMix64
sequence. All of it is integer arithmetic on int64 tensors, where products and sums wrap around modulo 2^64,
so the numbers do not depend on the device. A key may be a tensor: a captured CUDA graph then draws anew
whenever that tensor changes. Numbers follow the flat index, so the first rows of a large draw are those of a
smaller one.
"""

import hashlib
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

Key = int | str | Tensor

_MODULUS = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
_LARGEST = torch.iinfo(torch.int64).max


def random_bits(shape: Sequence[int], *keys: Key, device: torch.device | str | None = None) -> Tensor:
    """63 random bits per entry: an int64 tensor of ``shape``, every value in [0, 2^63).

    Keys are integers, words, or integer tensors with one element. The device is that of the first tensor key,
    else the CPU.
    """
    state: int | Tensor = 0
    for key in keys:
        if isinstance(key, Tensor):
            device = key.device if device is None else device
            number: int | Tensor = key.to(torch.int64)
        else:
            number = _word_key(key) if isinstance(key, str) else operator.index(key)
        state = _fold(state, number)
    return _sequence(state, math.prod(shape), device).reshape(tuple(shape))


def random_bits_by_lane(shape: Sequence[int], seeds: Tensor, *keys: Key) -> Tensor:
    """``random_bits(shape, seed, *keys)`` for each of the seeds, stacked; keys as there, or one per seed."""
    state: int | Tensor = _fold(0, seeds.to(torch.int64).unsqueeze(1))
    for key in keys:
        if isinstance(key, Tensor):
            state = _fold(state, key.to(torch.int64).reshape(-1, 1))
        else:
            state = _fold(state, _word_key(key) if isinstance(key, str) else operator.index(key))
    return _sequence(state, math.prod(shape), seeds.device).reshape(len(seeds), *shape)


def uniform(
    shape: Sequence[int],
    *keys: Key,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Numbers uniform in [0, 1): multiples of 2^-24 in single precision, of 2^-53 in double."""
    digits = 53 if dtype == torch.float64 else 24
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    bits = random_bits(shape, *keys, device=device) >> (63 - digits)
    return (bits.to(exact) * 2.0**-digits).to(dtype)


def normal(
    shape: Sequence[int],
    *keys: Key,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard normal numbers, by the method of Box and Muller; equal on every device up to rounding."""
    first, second = (uniform(shape, *keys, which, device=device, dtype=torch.float64) for which in (0, 1))
    return ((-2.0 * (1.0 - first).log()).sqrt() * (2.0 * math.pi * second).cos()).to(dtype)


def permutation_keys(
    shape: Sequence[int],
    *keys: Key,
    device: torch.device | str | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Sort keys: the order in which they sort along the last dimension is a uniformly random permutation.

    Entries where ``valid`` is false sort after all others.
    """
    bits = random_bits(shape, *keys, device=device)
    return bits if valid is None else torch.where(valid, bits, _LARGEST)


def permutation(length: int, *keys: Key, device: torch.device | str | None = None) -> Tensor:
    """A random order of 0 .. length-1."""
    return permutation_keys((length,), *keys, device=device).argsort()


def torch_generator(*keys: int | str) -> torch.Generator:
    """PyTorch's own random numbers for these keys: apart from those of other keys, and of plain seeds."""
    return torch.Generator().manual_seed(int(random_bits((), *keys)))


def distinct(limits: Tensor, count: int, *keys: Key) -> Tensor:
    """``count`` different integers in [0, limit) for each of the ``limits``, in random order: [..., count].

    Its cost does not depend on the limits, which must be at least ``count``.
    """
    left = limits.unsqueeze(-1) - torch.arange(count, device=limits.device)
    draws = random_bits(left.shape, *keys, device=limits.device) % left
    chosen = draws[..., :1]
    for number in range(1, count):
        # The r-th of the values still free: step over each chosen value that lies at or below it, in order.
        draw = draws[..., number]
        for taken in chosen.sort().values.unbind(-1):
            draw = draw + (draw >= taken)
        chosen = torch.cat([chosen, draw.unsqueeze(-1)], dim=-1)
    return chosen


def _sequence(state: int | Tensor, length: int, device: torch.device | str | None) -> Tensor:
    counter = torch.arange(1, length + 1, dtype=torch.int64, device=device)
    start = state if isinstance(state, Tensor) else _signed(state)
    return _shift_right(_splitmix(counter * _signed(_GOLDEN) + start), 1)


def _word_key(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    number %= _MODULUS
    return number - _MODULUS if number > _LARGEST else number


def _shift_right(x: Tensor, places: int) -> Tensor:
    """Shift in zeros; torch's own shift copies the sign bit."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def _splitmix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _fold(state: int | Tensor, key: int | Tensor) -> int | Tensor:
    """Mix one more key into the state: in plain integers as long as no tensor takes part."""
    if isinstance(state, int) and isinstance(key, int):
        x = ((state ^ key) + _GOLDEN) % _MODULUS
        x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD % _MODULUS
        x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53 % _MODULUS
        return x ^ (x >> 33)
    state = _signed(state) if isinstance(state, int) else state
    key = _signed(key) if isinstance(key, int) else key
    y = torch.as_tensor(state ^ key) + _signed(_GOLDEN)
    y = (y ^ _shift_right(y, 33)) * _signed(0xFF51AFD7ED558CCD)
    y = (y ^ _shift_right(y, 33)) * _signed(0xC4CEB9FE1A85EC53)
    return y ^ _shift_right(y, 33)
