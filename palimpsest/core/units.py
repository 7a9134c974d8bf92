"""Sizes: dtypes in bytes, alignment, and the way people write 1M, 256K and 96GiB."""

import re
from typing import Self

from palimpsest.core.errors import BadConfig, UnknownName

#: bytes of one element; the names are safetensors' in lower case, plus ``u8`` for raw records
DTYPE_BYTES = {"u8": 1, "e4m3": 1, "bf16": 2, "fp16": 2, "fp32": 4, "i32": 4, "fp64": 8, "i64": 8}

#: alignment of every planned buffer (a CPU cache line; a device build plans with 256)
CPU_ALIGN = 64

_SUFFIX = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_COUNT = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]?)$", re.IGNORECASE)
_BYTES = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?$", re.IGNORECASE)


class Count(int):
    """A whole number of one thing. Two counts of different things do not add, subtract or compare; plain numbers do.

    Wrap a number where it enters (``Tokens(parse_count(...))``): ``Limits`` then refuses rows where tokens are meant.
    """

    __slots__ = ()

    def _same(self, other: int) -> int:
        if isinstance(other, Count) and type(other) is not type(self):
            raise TypeError(f"{self!r} and {other!r} count different things; convert one of them first")
        return int(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({int(self)})"

    __str__ = int.__repr__

    def __add__(self, other: int) -> Self:
        return type(self)(int(self) + self._same(other))

    __radd__ = __add__

    def __sub__(self, other: int) -> Self:
        return type(self)(int(self) - self._same(other))

    def __rsub__(self, other: int) -> Self:
        return type(self)(self._same(other) - int(self))

    def __lt__(self, other: int) -> bool:
        return int(self) < self._same(other)

    def __le__(self, other: int) -> bool:
        return int(self) <= self._same(other)

    def __gt__(self, other: int) -> bool:
        return int(self) > self._same(other)

    def __ge__(self, other: int) -> bool:
        return int(self) >= self._same(other)

    def __eq__(self, other: object) -> bool:
        return int(self) == (self._same(other) if isinstance(other, int) else other)

    def __hash__(self) -> int:
        return hash(int(self))


class Tokens(Count):
    """History tokens."""

    def pages(self, page: int) -> "Pages":
        """Pages of ``page`` tokens that hold them, the last one perhaps partial."""
        return Pages(-(-int(self) // page))

    def pools(self, pool: int) -> "Pools":
        """Pools of ``pool`` tokens that score as one key, the last one perhaps partial."""
        return Pools(-(-int(self) // pool))


class Pages(Count):
    """Cache pages."""

    def tokens(self, page: int) -> Tokens:
        """Tokens that fit into them."""
        return Tokens(int(self) * page)


class Pools(Count):
    """Pools of keys that an indexer scores as one."""

    def tokens(self, pool: int) -> Tokens:
        """Tokens of whole pools."""
        return Tokens(int(self) * pool)


class Rows(Count):
    """Query rows of a chunk."""


class Ranks(Count):
    """Tensor-parallel ranks."""


def plain_count(value: object, unit: type[Count], name: str) -> int:
    """``value`` as a plain int when it is a whole number or a count of the right thing. Raises BadConfig for another thing."""
    if isinstance(value, Count):
        if type(value) is not unit:
            raise BadConfig(f"{name} = {value!r} counts {type(value).__name__.lower()}; {unit.__name__.lower()} are wanted")
        return int(value)
    if type(value) is not int:
        raise BadConfig(f"{name} = {value!r} must be a positive whole number")
    return value


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of ``dtype``. Raises UnknownName."""
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise UnknownName("dtype", dtype, list(DTYPE_BYTES)) from None


def align_up(value: int, align: int) -> int:
    """The smallest multiple of ``align`` that is not below ``value``."""
    return -(-value // align) * align


def ceil_div(value: int, by: int) -> int:
    """``value / by`` rounded up."""
    return -(-value // by)


def _parse(text: str, pattern: re.Pattern[str], what: str, example: str) -> int:
    match = pattern.match(text.strip())
    if not match:
        raise BadConfig(f"{what} {text!r} is not a size; write it like {example}")
    if len(match[1]) > 15:  # beyond, a float no longer holds every whole number
        raise BadConfig(f"{what} {text[:24]!r} has {len(match[1])} digits, at most 15 are read; write it like {example}")
    scaled = float(match[1]) * _SUFFIX[match[2].upper()]
    if scaled != int(scaled):
        raise BadConfig(f"{what} {text!r} is {scaled}, not a whole number; write it like {example}")
    return int(scaled)


def parse_count(text: str, what: str = "count") -> int:
    """``"1M"`` -> 1048576 (binary, as context lengths are written). Raises BadConfig."""
    return _parse(text, _COUNT, what, "4096, 256K or 1M")


def parse_bytes(text: str, what: str = "size") -> int:
    """``"96GiB"`` -> 103079215104; GB, GiB and G all mean 2**30. Raises BadConfig."""
    return _parse(text, _BYTES, what, "512MiB or 96GiB")


def format_bytes(count: int) -> str:
    """``138412032`` -> ``"132 MiB"``: exact when it is exact, else three significant digits."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            value = count / size
            return f"{int(value)} {unit}" if value == int(value) else f"{value:.2f} {unit}"
    return f"{count} B"


def format_count(count: int) -> str:
    """``1048576`` -> ``"1M"`` when exact, else the digits with separators."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count:,}"
