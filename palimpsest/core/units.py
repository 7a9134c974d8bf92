"""Sizes: dtypes in bytes, alignment, and the way people write 1M, 256K and 96GiB."""

import re

from palimpsest.core.errors import BadConfig, UnknownName

#: bytes of one element; the names are safetensors' in lower case, plus ``u8`` for raw records
DTYPE_BYTES = {"u8": 1, "e4m3": 1, "bf16": 2, "fp16": 2, "fp32": 4, "i32": 4, "fp64": 8, "i64": 8}

#: alignment of every planned buffer (a CPU cache line; a device build plans with 256)
CPU_ALIGN = 64

_SUFFIX = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_COUNT = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]?)$", re.IGNORECASE)
_BYTES = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?$", re.IGNORECASE)


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
