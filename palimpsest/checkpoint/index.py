"""A whole checkpoint folder: which file holds which tensor, checked against every shard's own header. Stdlib only."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from palimpsest.checkpoint.config import read_config_at
from palimpsest.checkpoint.header import Header, TensorRef, check_tensor_name, open_shard
from palimpsest.checkpoint.strict import Identity, open_regular, open_root, read_small, shown, strict_json
from palimpsest.core.errors import BadCheckpoint

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: an index of a model with 10**6 tensors has about 120 MB
MAX_INDEX = 128 << 20
MAX_INDEX_TENSORS = 1 << 20
MAX_SHARDS = 4096
_SHARD = re.compile(r"[A-Za-z0-9._-]+\.safetensors", re.ASCII)
_PICKLE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers have been read and agree with its index and its file sizes.

    root:    absolute path of the folder
    config:  config.json as data
    tensors: name -> place, every tensor exactly once
    files:   shard -> what it was when its header was read; a later reader compares
    notes:   what is odd but harmless, one line each
    """

    root: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorRef]
    files: Mapping[str, Identity]
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(ref.nbytes for ref in self.tensors.values())


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read config, index and every shard's header of the folder ``path``; no tensor byte is touched.

    Raises BadCheckpoint (or BadConfig for the text of config.json) naming the file, both numbers and the next step.
    """
    root_fd = open_root(path)
    try:
        root = Path(os.path.realpath(path))
        config = read_config_at(root_fd)
        listing = sorted(os.listdir(root_fd))
        if INDEX in listing:
            weight_map, total = _read_index(root_fd)
        elif SINGLE in listing:
            weight_map, total = None, None
        else:
            _refuse_without_weights(root, listing)
        shards = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]
        headers = {shard: _header(root_fd, shard) for shard in shards}
    finally:
        os.close(root_fd)
    tensors, notes = _join(weight_map, headers)
    if total is not None and total != (held := sum(ref.nbytes for ref in tensors.values())):
        _fail(
            f"declares total_size {total}, its tensors hold {held} bytes",
            "a shard or the index is from another export: download both again",
        )
    notes += [
        f"{shown(name)} is in the folder but not in the index; it is not read"
        for name in listing
        if name.endswith((".safetensors", *_PICKLE)) and name not in headers
    ]
    return Checkpoint(root, config, tensors, {name: header.identity for name, header in headers.items()}, tuple(notes))


def _fail(reason: str, step: str) -> NoReturn:
    raise BadCheckpoint(f"{INDEX} {reason}; {step}")


def _header(root_fd: int, shard: str) -> Header:
    fd, header = open_shard(root_fd, shard)
    os.close(fd)
    return header


def _refuse_without_weights(root: Path, listing: list[str]) -> NoReturn:
    pickles = [name for name in listing if name.endswith((*_PICKLE, ".bin.index.json"))]
    if pickles:
        raise BadCheckpoint(
            f"{shown(root.name)} holds its weights as pickle ({shown(pickles[0])}), which can run code when loaded, and has "
            f"neither {INDEX} nor {SINGLE}: convert it to safetensors where you trust it"
        )
    raise BadCheckpoint(f"{shown(root.name)} has neither {INDEX} nor {SINGLE}; give a complete Hugging Face safetensors folder")


def _read_index(root_fd: int) -> tuple[dict[str, str], int | None]:
    fd = open_regular(root_fd, INDEX)
    try:
        data = read_small(fd, INDEX, MAX_INDEX)
    finally:
        os.close(fd)
    return parse_index(data)


def parse_index(data: bytes) -> tuple[dict[str, str], int | None]:
    """tensor -> shard, and total_size when declared, of the index text ``data``. Raises BadCheckpoint."""
    if (count := data.count(b":")) > 2 * MAX_INDEX_TENSORS or data.count(b",") + data.count(b"[") + data.count(
        b"{"
    ) > 2 * MAX_INDEX_TENSORS:
        _fail(f"holds about {count} tensors, at most {MAX_INDEX_TENSORS} are read", "this is no model's index")
    value = strict_json(data, name=INDEX, depth=8, floats=True)
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        _fail("has no weight_map object with at least one tensor", "download it again")
    checked: set[str] = set()
    for tensor, shard in weight_map.items():
        check_tensor_name(tensor, INDEX)
        if not isinstance(shard, str):
            _fail(f"maps tensor {shown(tensor)} to a {type(shard).__name__}, expected a file name", "download it again")
        if shard not in checked:
            _check_shard_name(tensor, shard)
            checked.add(shard)
    if len(checked) > MAX_SHARDS:
        _fail(f"names {len(checked)} shards, at most {MAX_SHARDS} are read", "merge shards")
    return weight_map, _total_size(value.get("metadata"))


def _total_size(metadata: Any) -> int | None:
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        _fail(f"has metadata of type {type(metadata).__name__}, expected an object", "download it again")
    total = metadata.get("total_size")
    # some exporters write it as 1234.0
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    if total is not None and (type(total) is not int or total < 0):
        _fail(f"has total_size {shown(str(total))}, expected bytes >= 0", "download it again")
    return total


def _check_shard_name(tensor: str, shard: str) -> None:
    if shard.endswith(_PICKLE):
        _fail(
            f"keeps tensor {shown(tensor)} in the pickle file {shown(shard)}, which can run code when loaded",
            "convert it to safetensors where you trust it",
        )
    if not _SHARD.fullmatch(shard):
        _fail(
            f"keeps tensor {shown(tensor)} in {shown(shard)}, which is not a plain name like model-00001-of-00002.safetensors",
            "a shard must lie in the checkpoint folder itself",
        )


def _join(weight_map: Mapping[str, str] | None, headers: Mapping[str, Header]) -> tuple[dict[str, TensorRef], list[str]]:
    """Index and headers must agree: every listed tensor is in its shard, and no tensor is in two shards."""
    tensors: dict[str, TensorRef] = {}
    unlisted: list[str] = []
    for shard, header in headers.items():
        for tensor, ref in header.tensors.items():
            if tensor in tensors:
                raise BadCheckpoint(
                    f"tensor {shown(tensor)} is in {shown(tensors[tensor].file)} and in {shown(shard)}; store every tensor once"
                )
            tensors[tensor] = ref
            if weight_map is not None and tensor not in weight_map:
                unlisted.append(tensor)
    for tensor, shard in (weight_map or {}).items():
        if tensor not in tensors or tensors[tensor].file != shard:
            held = f"{shown(tensors[tensor].file)} holds it" if tensor in tensors else "no shard holds it"
            _fail(
                f"lists tensor {shown(tensor)} in {shown(shard)}, but {held}",
                "index and shards are from different exports: download both again",
            )
    notes = [f"tensor {shown(tensor)} in {shown(tensors[tensor].file)} is not in {INDEX}; it is not read" for tensor in unlisted]
    return {name: ref for name, ref in tensors.items() if weight_map is None or name in weight_map}, notes
