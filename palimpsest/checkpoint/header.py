"""One safetensors file: its header read within bounds and checked to describe every byte of the file exactly once. Stdlib only.

Layout (https://huggingface.co/docs/safetensors): 8 bytes N, little endian; N bytes of JSON; then the tensors, without holes.
Nothing is sized from the header before it is checked against the file.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from palimpsest.checkpoint.strict import Identity, check_unchanged, open_regular, read_exact, shown, strict_json
from palimpsest.core.errors import BadCheckpoint

#: bytes of one element, by safetensors' own names; sub-byte types are refused (packed weights are stored as U8)
ELEMENT_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
MAX_HEADER = 16 << 20
MAX_TENSORS = 65_536
MAX_RANK = 8
MAX_NAME = 512
#: separators in a legal header: at most 18 per tensor, and some for metadata; bounds what parsing may allocate
_MAX_SEPARATORS = 20 * MAX_TENSORS
_MAX_SPAN = 1 << 62
_METADATA = "__metadata__"


@dataclass(frozen=True)
class TensorRef:
    """Where one tensor's bytes lie: ``[begin, end)`` counted from the start of ``file``, a name inside the checkpoint folder."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """A checked header. ``identity`` is the file it was read from, to notice a later change."""

    tensors: Mapping[str, TensorRef]
    metadata: Mapping[str, str]
    identity: Identity


def open_shard(root_fd: int, name: str) -> tuple[int, Header]:
    """Open the shard ``name`` inside the folder ``root_fd`` and read its header; the caller closes the descriptor.

    Raises BadCheckpoint naming the file, both numbers and the next step.
    """
    fd = open_regular(root_fd, name)
    try:
        return fd, read_header(fd, name)
    except BaseException:
        os.close(fd)
        raise


def read_header(fd: int, name: str) -> Header:
    """The checked header of the safetensors file behind ``fd``. Raises BadCheckpoint."""
    identity = Identity.of(fd)
    start = read_exact(fd, min(identity.size, 16), 0, name)
    _refuse_other_formats(start, name)
    if identity.size < 10:
        _fail(name, f"has {identity.size} bytes, a safetensors file has at least 10", "download it again")
    length = int.from_bytes(start[:8], "little")
    if length > identity.size - 8:
        _fail(
            name,
            f"declares a header of {length} bytes, the file has {identity.size - 8} after the length",
            "it is truncated: download it again",
        )
    if length > MAX_HEADER:
        _fail(
            name, f"declares a header of {length} bytes, at most {MAX_HEADER} are read", "split the checkpoint into more shards"
        )
    tensors, metadata = parse_header(read_exact(fd, length, 8, name), name, identity.size)
    check_unchanged(fd, identity, name)
    return Header(tensors, metadata, identity)


def parse_header(data: bytes, name: str, file_size: int) -> tuple[dict[str, TensorRef], dict[str, str]]:
    """Tensors and metadata of the header text ``data`` of a file of ``file_size`` bytes. Raises BadCheckpoint."""
    if data[:1] != b"{":
        _fail(name, f"header starts with {data[:1]!r}, expected b'{{'", "it is not a safetensors file")
    for what, count, limit in (
        ("tensors", data.count(b"{") - 2, MAX_TENSORS),
        ("separators", data.count(b",") + data.count(b"[") + data.count(b":"), _MAX_SEPARATORS),
    ):
        if count > limit:
            _fail(name, f"header holds about {count} {what}, at most {limit} are read", "split the checkpoint into more shards")
    entries = strict_json(data, name=name, depth=3)
    if not isinstance(entries, dict):
        _fail(name, "header is not a JSON object", "it is not a safetensors file")
    metadata = _metadata(entries.pop(_METADATA, {}), name)
    if len(entries) > MAX_TENSORS:
        _fail(
            name, f"header holds {len(entries)} tensors, at most {MAX_TENSORS} are read", "split the checkpoint into more shards"
        )
    base = 8 + len(data)
    tensors = {tensor: _entry(tensor, entry, name, base) for tensor, entry in entries.items()}
    _contiguous(tensors, name, base, file_size)
    return tensors, metadata


def _fail(name: str, reason: str, step: str) -> NoReturn:
    raise BadCheckpoint(f"{shown(name)} {reason}; {step}")


def _refuse_other_formats(start: bytes, name: str) -> None:
    """Say what a file is when it is something else under a safetensors name. Nothing is ever unpickled."""
    pickle = start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and start[8:9] != b"{"
    if pickle or start[:4] == b"PK\x03\x04":
        _fail(
            name,
            "is a pickle or zip archive (torch.save), which can run code when loaded",
            "convert it to safetensors where you trust it",
        )
    if start[:6] == b"\x93NUMPY":
        _fail(name, "is a NumPy file, which may hold pickled objects", "convert it to safetensors where you trust it")
    if start[:4] == b"GGUF":
        _fail(name, "is a GGUF file", "give the original safetensors checkpoint")
    if start.startswith(b"version https://"):
        _fail(name, "is a Git LFS pointer, not the weights", "fetch them with: git lfs pull")


def _metadata(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        _fail(name, f"{_METADATA} must map strings to strings", "write the file again with a safetensors library")
    return value


def check_tensor_name(tensor: str, name: str) -> None:
    """Raises BadCheckpoint for an empty, long or unprintable tensor name."""
    if not tensor or len(tensor) > MAX_NAME:
        _fail(name, f"tensor name {shown(tensor)} has {len(tensor)} characters, allowed are 1 to {MAX_NAME}", "rename the tensor")
    if not tensor.isprintable():
        _fail(name, f"tensor name {shown(tensor)} holds control or unprintable characters", "rename the tensor")


def _entry(tensor: str, entry: Any, name: str, base: int) -> TensorRef:
    check_tensor_name(tensor, name)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _fail(
            name,
            f"tensor {shown(tensor)} must have exactly dtype, shape and data_offsets",
            "write the file again with a safetensors library",
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        _fail(
            name,
            f"tensor {shown(tensor)} has dtype {shown(str(dtype))}; known: {', '.join(ELEMENT_BYTES)}",
            "convert it to one of these",
        )
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_natural, shape)):
        _fail(
            name,
            f"tensor {shown(tensor)} has shape {shown(str(shape))}; allowed are up to {MAX_RANK} sizes >= 0",
            "write the file again",
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)) or offsets[1] < offsets[0]:
        _fail(
            name,
            f"tensor {shown(tensor)} has data_offsets {shown(str(offsets))}, expected [begin, end] with 0 <= begin <= end",
            "write the file again",
        )
    size = ELEMENT_BYTES[dtype]
    for length in shape:
        size *= length
        if size > _MAX_SPAN:
            _fail(
                name,
                f"tensor {shown(tensor)} of shape {shown(str(shape))} needs more than {_MAX_SPAN} bytes",
                "its header is damaged",
            )
    if size != offsets[1] - offsets[0]:
        _fail(
            name,
            f"tensor {shown(tensor)} {dtype} {shape} needs {size} bytes, data_offsets hold {offsets[1] - offsets[0]}",
            "write the file again",
        )
    return TensorRef(name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _contiguous(tensors: Mapping[str, TensorRef], name: str, base: int, file_size: int) -> None:
    """Every data byte belongs to exactly one tensor: no hole, no overlap, nothing after the last one."""
    at = base
    for tensor, ref in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if ref.begin != at:
            what = "a hole" if ref.begin > at else "an overlap"
            _fail(
                name,
                f"has {what} before tensor {shown(tensor)}: it begins at byte {ref.begin}, expected {at}",
                "write the file again",
            )
        at = ref.end
    if at != file_size:
        step = "it is truncated: download it again" if file_size < at else "it has bytes no tensor owns: download it again"
        _fail(name, f"has {file_size} bytes, its header describes {at}", step)
