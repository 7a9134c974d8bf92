"""Make a small deterministic checkpoint: a Hugging Face folder that appears complete or not at all.

Each tensor's random bits are SHAKE-256 of (seed, name), so its bytes depend neither on the order of creation nor on a library's
random generator, and the arithmetic from bits to values is exact or rounded once by IEEE rules: the same bytes on every machine.
"""

import errno
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from palimpsest.checkpoint.header import ELEMENT_BYTES
from palimpsest.checkpoint.index import INDEX
from palimpsest.checkpoint.preflight import FP8, SCALE_SUFFIX
from palimpsest.checkpoint.strict import shown
from palimpsest.checkpoint.synthetic import PRESETS, Draw, Shape, config_of, tensors_of
from palimpsest.core.errors import BadConfig, Unavailable, UnknownName
from palimpsest.core.units import ceil_div

SEED = 20_261_201
#: standard deviation of a sum of four 16-bit uniforms, in units of one: sqrt(4 * (65536**2 - 1) / 12)
_SUM_OF_FOUR = math.sqrt(4 * (65536**2 - 1) / 12)
#: largest finite e4m3 value
_E4M3_MAX = 448.0
_HEADER_ALIGN = 8
#: elements drawn at once
_BATCH = 1 << 20
MAX_MODEL_BYTES = 4 << 30


def make(
    preset: str, directory: str | os.PathLike[str], *, seed: int = SEED, overrides: Mapping[str, int | str] | None = None
) -> Path:
    """Write the checkpoint ``preset`` into the new folder ``directory`` and return its path.

    overrides: fields of ``synthetic.Shape`` to change, e.g. ``{"topk": 16}``
    Raises UnknownName for a preset or field nobody knows, BadConfig for an impossible override or a folder that is not empty, and
    Unavailable when the disk refuses. The folder is written under a temporary name beside its place and then renamed.
    """
    if preset not in PRESETS:
        raise UnknownName("checkpoint preset", preset, list(PRESETS))
    shape = _shape(PRESETS[preset], overrides or {})
    target = Path(directory)
    _refuse_occupied(target)
    partial = target.parent / f".{target.name}.partial-{secrets.token_hex(6)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.mkdir(partial)
        try:
            _write_folder(partial, shape, seed)
            os.rename(partial, target)
        except BaseException:
            # also for Ctrl-C: what is not published must not stay
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            _refuse_occupied(target)
        raise Unavailable(
            f"cannot write {target}: {error.strerror or error}; nothing was left behind, free space or choose another folder"
        ) from None
    return target


def _shape(shape: Shape, overrides: Mapping[str, int | str]) -> Shape:
    known = {field.name for field in fields(Shape)} - {"family"}
    for name, value in overrides.items():
        if name not in known:
            raise UnknownName("checkpoint field", name, sorted(known))
        if name == "schedule":
            letters = "LF" if shape.family == "kimi_k31" else "FS" if shape.family == "glm_moe_dsa" else "F"
            if not isinstance(value, str) or not 1 <= len(value) <= 128 or set(value) - set(letters):
                raise BadConfig(f"schedule {value!r} must be 1 to 128 letters of {letters} for {shape.family}")
        elif type(value) is not int or (not (name == "fp8" and value == 0) and not 1 <= value <= 1 << 21):
            raise BadConfig(f"checkpoint field {name} is {value!r}, expected a whole number from 1 to {1 << 21}")
    given: dict[str, Any] = dict(overrides)
    changed = replace(shape, **given)
    need = sum(math.prod(draw.shape) * ELEMENT_BYTES[draw.dtype] for draw in tensors_of(changed).values())
    if need > MAX_MODEL_BYTES:
        raise BadConfig(
            f"this checkpoint would have {need} bytes, more than the {MAX_MODEL_BYTES} allowed; choose smaller fields"
        )
    return changed


def _refuse_occupied(target: Path) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise BadConfig(f"{target} exists and is not a folder; choose a new folder")
    if target.is_dir() and any(target.iterdir()):
        raise BadConfig(
            f"{target} is not empty ({shown(min(entry.name for entry in target.iterdir()))}, ...); choose a new folder"
        )


def _write_folder(folder: Path, shape: Shape, seed: int) -> None:
    draws = tensors_of(shape)
    _write(folder / "config.json", _json(config_of(shape)))
    shards = _shards(draws)
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        stored: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
        for name in names:
            stored |= _stored(name, draws[name], seed, shape.fp8)
        write_safetensors(folder / file, stored, {"format": "pt"})
        weight_map |= dict.fromkeys(stored, file)
        total += sum(len(data) for _, _, data in stored.values())
    _write(folder / INDEX, _json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=True) + "\n").encode()


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)


def _shards(draws: Mapping[str, Draw]) -> list[list[str]]:
    """Two shards of about the same size, cut between layers' tensors in the order of creation."""
    sizes = {name: math.prod(draw.shape) * ELEMENT_BYTES[draw.dtype] for name, draw in draws.items()}
    half, at = sum(sizes.values()) / 2, 0
    first: list[str] = []
    for name, size in sizes.items():
        if at >= half:
            break
        first.append(name)
        at += size
    held = set(first)
    return [first, [name for name in draws if name not in held]]


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], metadata: Mapping[str, str]) -> None:
    """Write ``name -> (dtype, shape, bytes)`` as one safetensors file: wide elements first, then by name, so all are aligned."""
    order = sorted(tensors, key=lambda name: (-ELEMENT_BYTES[tensors[name][0]], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGN)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            file.write(tensors[name][2])
        file.flush()
        # a full disk may only show when the pages are written out
        os.fsync(file.fileno())


def _stored(name: str, draw: Draw, seed: int, block: int) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    values = _values(name, draw, seed)
    if draw.dtype == "F32":
        return {name: ("F32", draw.shape, values.astype("<f4").tobytes())}
    if draw.dtype == FP8:
        codes, scales = quantise_blocks(values.astype(np.float32), block)
        return {
            name: (FP8, draw.shape, codes.tobytes()),
            name + SCALE_SUFFIX: ("F32", scales.shape, scales.astype("<f4").tobytes()),
        }
    return {name: ("BF16", draw.shape, _bf16(values).tobytes())}


def _values(name: str, draw: Draw, seed: int) -> np.ndarray:
    """float64 array of ``draw.shape``: mean + spread * (sum of four uniform 16-bit integers, centred, of unit variance)."""
    count = math.prod(draw.shape)
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    bits = np.frombuffer(hashlib.shake_256(key).digest(8 * count), dtype="<u2").reshape(count, 4)
    out = np.empty(count)
    for start in range(0, count, _BATCH):
        centred = bits[start : start + _BATCH].sum(axis=1, dtype=np.int64) - 2 * 65_535
        out[start : start + _BATCH] = centred.astype(np.float64) * (draw.spread / _SUM_OF_FOUR) + draw.mean
    return out.reshape(draw.shape)


def _bf16(values: np.ndarray) -> np.ndarray:
    """Little-endian bfloat16 bits, rounded to nearest even by way of float32."""
    bits = values.astype("<f4").view("<u4")
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")


def quantise_blocks(values: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 codes [out,in] and fp32 scales [ceil(out/block), ceil(in/block)] with ``codes * scale`` near ``values``.

    A scale is the smallest power of two that brings the block's largest magnitude to at most 448 (DeepSeek-V3.2's ue8m0).
    """
    import torch

    rows, columns = values.shape
    scales = np.empty((ceil_div(rows, block), ceil_div(columns, block)), np.float32)
    scaled = np.empty_like(values)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
            mantissa, exponent = np.frexp(max(float(np.abs(values[part]).max()), 1e-4) / _E4M3_MAX)
            scales[i, j] = np.ldexp(1.0, int(exponent) - (1 if mantissa == 0.5 else 0))
            scaled[part] = values[part] / scales[i, j]
    codes = torch.from_numpy(scaled).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return codes, scales
