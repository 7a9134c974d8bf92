"""Tensors of a checkpoint, mapped read-only from its files; block-fp8 weights become fp32.

A file is opened again for reading, must still be what its header was read from, and is compared once more when the reader closes.
"""

import hashlib
import math
import mmap
import os
import warnings
from types import TracebackType

import torch

from palimpsest.checkpoint.header import ELEMENT_BYTES, TensorRef
from palimpsest.checkpoint.index import Checkpoint
from palimpsest.checkpoint.preflight import FP8, SCALE_SUFFIX, SCALES
from palimpsest.checkpoint.strict import Identity, check_unchanged, open_regular, open_root, shown
from palimpsest.core.errors import BadCheckpoint
from palimpsest.core.units import ceil_div

_CHUNK = 1 << 20


def _torch_dtype(dtype: str) -> torch.dtype:
    return {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "U16": torch.uint16,
        "I16": torch.int16,
        "U32": torch.uint32,
        "I32": torch.int32,
        "U64": torch.uint64,
        "I64": torch.int64,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
    }[dtype]


class Reader:
    """Reads tensors of one checkpoint and remembers which were read. A context manager: leaving it re-checks every file.

    Tensors keep the mapping they view alive; they are read-only, and writing to one ends the process.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.consumed: set[str] = set()
        self._fds: dict[str, int] = {}
        self._maps: dict[str, mmap.mmap] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.verify()
        finally:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()
            self._maps.clear()

    def verify(self) -> None:
        """Raises BadCheckpoint when a file that was read changed since its header was checked, in place or by replacement."""
        for name, fd in self._fds.items():
            check_unchanged(fd, self.checkpoint.files[name], name)

    def raw(self, name: str) -> torch.Tensor:
        """Tensor ``name`` exactly as stored, a read-only view of the file. Raises BadCheckpoint."""
        ref = self._ref(name)
        mapping = self._map(ref)
        # a file that shrank must be noticed before its missing pages are touched
        check_unchanged(self._fds[ref.file], self.checkpoint.files[ref.file], ref.file)
        self.consumed.add(name)
        return _view(mapping, ref)

    def read(self, name: str) -> torch.Tensor:
        """Tensor ``name`` ready for arithmetic: bf16 and fp32 as stored, fp16 as fp32, block-fp8 times its scales as fp32.

        Raises BadCheckpoint for an fp8 weight without its scale, a NaN, a negative or non-finite scale, and a changed file.
        """
        ref = self._ref(name)
        if ref.dtype == "F16":
            return self.raw(name).float()
        if ref.dtype == FP8:
            return self._dequantised(name, ref)
        return self.raw(name)

    def unconsumed_scales(self, prefix: str = "") -> tuple[str, ...]:
        """Scales under ``prefix`` that no ``read`` has used; after loading a layer there must be none under it."""
        return tuple(
            sorted(
                name
                for name in self.checkpoint.tensors
                if name.startswith(prefix) and name.endswith(SCALE_SUFFIX) and name not in self.consumed
            )
        )

    def _ref(self, name: str) -> TensorRef:
        try:
            return self.checkpoint.tensors[name]
        except KeyError:
            raise BadCheckpoint(
                f"tensor {shown(name)} is not in {shown(self.checkpoint.root.name)}; run: palimpsest preflight"
            ) from None

    def _map(self, ref: TensorRef) -> mmap.mmap:
        if ref.file not in self._fds:
            root_fd = open_root(self.checkpoint.root)
            try:
                fd = open_regular(root_fd, ref.file)
            finally:
                os.close(root_fd)
            self._fds[ref.file] = fd
            # before mapping: the length mapped below is that of the file whose header was checked
            check_unchanged(fd, self.checkpoint.files[ref.file], ref.file)
        if ref.file not in self._maps:
            self._maps[ref.file] = mmap.mmap(self._fds[ref.file], self.checkpoint.files[ref.file].size, access=mmap.ACCESS_READ)
        return self._maps[ref.file]

    def _dequantised(self, name: str, ref: TensorRef) -> torch.Tensor:
        scale_name = name + SCALE_SUFFIX
        if scale_name not in self.checkpoint.tensors:
            raise BadCheckpoint(
                f"fp8 tensor {shown(name)} {list(ref.shape)} has no {shown(scale_name)}; raw codes are not weights: download it"
            )
        scale_ref = self.checkpoint.tensors[scale_name]
        if scale_ref.dtype not in SCALES:
            raise BadCheckpoint(
                f"scale {shown(scale_name)} has dtype {scale_ref.dtype}, expected {' or '.join(SCALES)}; store it as fp32"
            )
        block = _block(self.checkpoint, name)
        return dequantise(self.raw(name), self.raw(scale_name), block, name)


def _block(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """weight_block_size of the config, also nested in text_config."""
    config = checkpoint.config
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        quantization = part.get("quantization_config")
        block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
        if isinstance(block, list) and len(block) == 2 and all(type(size) is int and 0 < size <= 65_536 for size in block):
            return block[0], block[1]
    raise BadCheckpoint(
        f"fp8 tensor {shown(name)} needs quantization_config.weight_block_size in config.json, e.g. [128, 128]; it has none"
    )


def _view(mapping: mmap.mmap, ref: TensorRef) -> torch.Tensor:
    dtype, count = _torch_dtype(ref.dtype), math.prod(ref.shape)
    if not count:
        return torch.empty(ref.shape, dtype=dtype)
    with warnings.catch_warnings():
        # torch warns that the buffer is read-only; that is the point
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        if ref.begin % ELEMENT_BYTES[ref.dtype]:
            return (
                torch.frombuffer(mapping, dtype=torch.uint8, count=ref.nbytes, offset=ref.begin)
                .clone()
                .view(dtype)
                .view(ref.shape)
            )
        return torch.frombuffer(mapping, dtype=dtype, count=count, offset=ref.begin).view(ref.shape)


def dequantise(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], name: str = "weight") -> torch.Tensor:
    """fp32 [out,in] = e4m3 [out,in] x scale [ceil(out/rows), ceil(in/columns)], the exact product rounded once.

    Edges may be ragged. Source: DeepSeek-V3's ``weight_scale_inv``, which is multiplied. Scales are fp32 or e8m0. Raises
    BadCheckpoint for a wrong shape, a NaN weight, and a scale that is negative or not finite.
    """
    rows, columns = block
    if weight.dim() != 2:
        raise BadCheckpoint(
            f"fp8 tensor {shown(name)} has shape {list(weight.shape)}, expected two dimensions; use a bf16 checkpoint"
        )
    expected = (ceil_div(weight.shape[0], rows), ceil_div(weight.shape[1], columns))
    if tuple(scale.shape) != expected:
        raise BadCheckpoint(
            f"scale of {shown(name)} {list(weight.shape)} has shape {list(scale.shape)}, expected {list(expected)} for blocks "
            f"of {list(block)}; it belongs to another weight or block size"
        )
    factors = scale.float()
    if not bool((torch.isfinite(factors) & (factors >= 0)).all()):
        raise BadCheckpoint(f"scale of {shown(name)} holds a value that is negative or not finite; download the checkpoint again")
    result = torch.empty(weight.shape, dtype=torch.float32)
    for band in range(expected[0]):
        part = slice(band * rows, (band + 1) * rows)
        result[part] = weight[part].float()
        result[part] *= factors[band].repeat_interleave(columns)[: weight.shape[1]]
    if bool(torch.isnan(result).any()):
        raise BadCheckpoint(
            f"fp8 tensor {shown(name)} holds {int(torch.isnan(result).sum())} NaN codes; download the checkpoint again"
        )
    return result


def read_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """One tensor, as ``Reader.read``; its file is compared with its header's before and after."""
    with Reader(checkpoint) as reader:
        return reader.read(name)


def tensor_sha256(checkpoint: Checkpoint, name: str) -> str:
    """sha256 of the stored bytes of tensor ``name``, in hexadecimal. Raises BadCheckpoint."""
    if name not in checkpoint.tensors:
        raise BadCheckpoint(f"tensor {shown(name)} is not in {shown(checkpoint.root.name)}; run: palimpsest preflight")
    ref = checkpoint.tensors[name]
    return _sha256(checkpoint, ref.file, ref.begin, ref.end)


def file_sha256(checkpoint: Checkpoint, file: str) -> str:
    """sha256 of a whole shard, in hexadecimal. Raises BadCheckpoint."""
    if file not in checkpoint.files:
        raise BadCheckpoint(
            f"{shown(file)} is no shard of {shown(checkpoint.root.name)}; shards: {', '.join(sorted(checkpoint.files)[:4])}"
        )
    return _sha256(checkpoint, file, 0, checkpoint.files[file].size)


def _sha256(checkpoint: Checkpoint, file: str, begin: int, end: int) -> str:
    identity: Identity = checkpoint.files[file]
    digest = hashlib.sha256()
    root_fd = open_root(checkpoint.root)
    try:
        fd = open_regular(root_fd, file)
    finally:
        os.close(root_fd)
    try:
        check_unchanged(fd, identity, file)
        at = begin
        while at < end:
            part = os.pread(fd, min(_CHUNK, end - at), at)
            if not part:
                raise BadCheckpoint(
                    f"{shown(file)} ended at byte {at}, expected {end}; it shrank while being read, copy it again"
                )
            digest.update(part)
            at += len(part)
        check_unchanged(fd, identity, file)
    finally:
        os.close(fd)
    return digest.hexdigest()
