"""What the ``amx`` and ``avx512`` attention kernels share before their products: records in as bf16."""

from typing import Annotated, NamedTuple

import numpy as np

from palimpsest.kernels.avx512_decode import copy64, decode_codes, decode_scaled, prefetch
from palimpsest.kernels.jit import piece
from palimpsest.kernels.sparse_attend.avx512_softmax import read_address, read_byte, write_word

#: record kinds
FP8, DS_MLA, BF16 = 0, 1, 2
#: records whose lines are asked for before they are read
AHEAD = 32


class Form(NamedTuple):
    """Numbers of one call: record kind, elements of the latent and after it, softmax scale (times the record's, times log2(e)),
    scale of the
    values, and lanes a row takes in a union (0 without)."""

    kind: Annotated[int, "i8"]
    latent: Annotated[int, "i8"]
    rope: Annotated[int, "i8"]
    scale: Annotated[float, "f8"]
    factor: Annotated[float, "f8"]
    lanes: Annotated[int, "i8"]


@piece
def decode_record(source, form, to, staging):
    """One record at ``source`` -> bf16 at ``to``, 64 at a time; what lies behind is left alone or zero. ``staging``: 128 bytes.

    Everything is an address: an array here would be counted in and out once a record, which costs as much as decoding it.
    """
    kind, latent, rope, dim = form.kind, form.latent, form.rope, form.latent + form.rope
    if kind == FP8:
        for d in range(0, dim // 64 * 64, 64):
            decode_codes(source + np.uint64(d), to + np.uint64(2 * d))
        if dim % 64:
            _copy_short(source + np.uint64(dim // 64 * 64), dim % 64, staging)
            decode_codes(staging, to + np.uint64(dim // 64 * 128))
    elif kind == DS_MLA:
        scales = source + np.uint64(latent)
        for d in range(0, latent, 64):
            decode_scaled(source + np.uint64(d), to + np.uint64(2 * d), scales + np.uint64(4 * (d // 128)))
        _copy_bf16(source + np.uint64(latent + latent // 32), rope, to + np.uint64(2 * latent), staging)
    else:
        _copy_bf16(source, dim, to, staging)


@piece
def _copy_short(source, count, to):
    """``count`` < 128 bytes to ``to``, zeros behind; reads whole 8-byte words only inside the record."""
    for i in range(16):
        write_word(to + np.uint64(8 * i), np.uint64(0))
    for i in range(count // 8):
        write_word(to + np.uint64(8 * i), read_address(source + np.uint64(8 * i)))
    last = np.uint64(0)
    if count >= 8 and count % 8:
        last = read_address(source + np.uint64(count - 8)) >> np.uint64(8 * (8 - count % 8))
    elif count % 8:
        for i in range(count):
            last |= np.uint64(read_byte(source + np.uint64(i))) << np.uint64(8 * i)
    if count % 8:
        write_word(to + np.uint64(count // 8 * 8), last)


@piece
def _copy_bf16(source, count, to, staging):
    for d in range(0, count // 32 * 32, 32):
        copy64(source + np.uint64(2 * d), to + np.uint64(2 * d))
    if count % 32:
        at = np.uint64(count // 32 * 64)
        _copy_short(source + at, 2 * (count % 32), staging)
        copy64(staging, to + at)


@piece
def gather(records, first, count, padded, row, form, work, ahead):
    """Decode records [first, first + count) of the address list to work.wide[row], [row + 1]..., zeros up to ``padded`` rows.

    ahead: the record so many further on is asked for, 0 for none
    """
    wide = work.wide
    width, lines = np.uint64(2 * wide.shape[1]), (form.latent + form.rope) * (2 if form.kind == BF16 else 1) // 64
    to, short = wide.ctypes.data + np.uint64(row) * width, work.staging.ctypes.data
    for t in range(count):
        if ahead and first + t + ahead < records.shape[0]:
            later = records[first + t + ahead]
            for line in range(lines):
                prefetch(later + np.uint64(64 * line))
        decode_record(records[first + t], form, to, short)
        to += width
    for t in range(count, padded):
        for d in range(wide.shape[1]):
            wide[row + t, d] = 0
