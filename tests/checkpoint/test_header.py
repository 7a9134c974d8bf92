"""Hostile and damaged safetensors headers: each refused in one line that names the file, and memory stays bounded."""

import contextlib
import json
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest.checkpoint import header, make
from palimpsest.checkpoint.strict import open_root
from palimpsest.core.errors import BadCheckpoint, UserError

NAME = "x.safetensors"


def file_of(text: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": list(offsets)}  # type: ignore[call-overload]


def text_of(entries: object) -> bytes:
    return json.dumps(entries).encode()


def read(folder: Path, blob: bytes) -> header.Header:
    (folder / NAME).write_bytes(blob)
    root = open_root(folder)
    try:
        fd, found = header.open_shard(root, NAME)
        os.close(fd)
        return found
    finally:
        os.close(root)


ONE = {"t": entry()}
HOSTILE = {
    "empty file": (b"", "0 bytes"),
    "nine bytes": (b"\x01" + bytes(8), "9 bytes"),
    "length past the end": (file_of(text_of(ONE), bytes(4), length=1 << 40), "declares a header of 1099511627776 bytes"),
    "length of all ones": (file_of(b"{}", length=(1 << 64) - 1), "18446744073709551615"),
    "truncated header": (file_of(text_of(ONE))[:-5], "declares a header"),
    "not an object start": (file_of(b" {}"), "starts with"),
    "a list": (file_of(b"[]"), "starts with"),
    "not JSON": (file_of(b"{nope}"), "not JSON"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "not UTF-8"),
    "trailing text": (file_of(b"{} {}"), "not JSON"),
    "duplicate tensor": (file_of(b'{"t":' + text_of(entry()) + b',"t":' + text_of(entry()) + b"}", bytes(4)), "twice"),
    "duplicate key in a tensor": (
        file_of(b'{"t":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', bytes(4)),
        "twice",
    ),
    "NaN offset": (file_of(b'{"t":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)), "NaN"),
    "Infinity": (file_of(b'{"t":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,4]}}', bytes(4)), "Infinity"),
    "fraction": (file_of(b'{"t":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}}', bytes(4)), "not an integer"),
    "huge exponent": (file_of(b'{"t":{"dtype":"U8","shape":[1e999],"data_offsets":[0,4]}}', bytes(4)), "not an integer"),
    "5000-digit integer": (
        file_of(b'{"t":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', bytes(4)),
        "outside",
    ),
    "boolean size": (file_of(b'{"t":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', bytes(1)), "shape"),
    "negative size": (file_of(text_of({"t": entry(shape=(-4,))}), bytes(4)), "shape"),
    "shape is a number": (file_of(text_of({"t": entry(shape=4)}), bytes(4)), "shape"),
    "rank 9": (file_of(text_of({"t": entry(shape=(1,) * 9, offsets=(0, 1))}), bytes(1)), "up to 8"),
    "product overflow": (file_of(text_of({"t": entry(shape=(1 << 40, 1 << 40))}), bytes(4)), "needs more than"),
    "overflow to a small product": (file_of(text_of({"t": entry(shape=(1 << 32, 1 << 32, 4))}), bytes(4)), "needs more than"),
    "shape and offsets disagree": (file_of(text_of({"t": entry(shape=(5,))}), bytes(4)), "needs 5 bytes, data_offsets hold 4"),
    "dtype unknown": (file_of(text_of({"t": entry(dtype="F4")}), bytes(4)), "F4"),
    "dtype is a list": (file_of(text_of({"t": entry(dtype=[])}), bytes(4)), "dtype"),
    "offsets reversed": (file_of(text_of({"t": entry(offsets=(4, 0))}), bytes(4)), "data_offsets"),
    "offsets negative": (file_of(text_of({"t": entry(offsets=(-4, 0))}), bytes(4)), "data_offsets"),
    "three offsets": (file_of(text_of({"t": entry(offsets=(0, 2, 4))}), bytes(4)), "data_offsets"),
    "extra key": (file_of(text_of({"t": entry() | {"x": 1}}), bytes(4)), "exactly dtype"),
    "missing key": (file_of(text_of({"t": {"dtype": "U8", "shape": [4]}}), bytes(4)), "exactly dtype"),
    "tensor is a string": (file_of(text_of({"t": "U8"}), bytes(4)), "exactly dtype"),
    "overlap": (file_of(text_of({"a": entry(), "b": entry(offsets=(2, 6))}), bytes(6)), "overlap"),
    "same bytes twice": (file_of(text_of({"a": entry(), "b": entry()}), bytes(4)), "overlap"),
    "hole at the start": (file_of(text_of({"a": entry(offsets=(4, 8))}), bytes(8)), "hole"),
    "hole inside": (file_of(text_of({"a": entry(), "b": entry(offsets=(8, 12))}), bytes(12)), "hole"),
    "truncated data": (file_of(text_of(ONE), bytes(3)), "truncated"),
    "bytes after the end": (file_of(text_of(ONE), bytes(5)), "no tensor owns"),
    "name too long": (file_of(text_of({"n" * 513: entry()}), bytes(4)), "513"),
    "empty name": (file_of(text_of({"": entry()}), bytes(4)), "0 characters"),
    "control character": (file_of(text_of({"a\x1b[31m": entry()}), bytes(4)), "control"),
    "NUL in a name": (file_of(text_of({"a\0b": entry()}), bytes(4)), "control"),
    "lone surrogate": (file_of(b'{"\\ud800":' + text_of(entry()) + b"}", bytes(4)), "control"),
    "metadata number": (file_of(text_of({"__metadata__": {"a": 1}})), "__metadata__"),
    "metadata list": (file_of(text_of({"__metadata__": []})), "__metadata__"),
    "metadata nested": (file_of(text_of({"__metadata__": {"a": {"b": "c"}}})), "__metadata__"),
    "deep nesting": (file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested deeper"),
    "a little too deep": (file_of(b'{"a":{"b":[[1]]}}'), "nested deeper"),
    "zip": (b"PK\x03\x04" + bytes(60), "pickle"),
    "raw pickle": (b"\x80\x02}q\x00X\x01\x00\x00\x00" + bytes(60), "pickle"),
    "numpy": (b"\x93NUMPY" + bytes(60), "NumPy"),
    "gguf": (b"GGUF" + bytes(60), "GGUF"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_refused(tmp_path: Path, case: str) -> None:
    blob, says = HOSTILE[case]
    with pytest.raises(BadCheckpoint) as caught:
        read(tmp_path, blob)
    message = str(caught.value)
    assert says in message
    assert NAME in message
    assert "\n" not in message
    assert message.isprintable()
    assert len(message) < 700


def test_good_headers(tmp_path: Path) -> None:
    text = text_of(
        {"a": entry("F32", (2, 3), (0, 24)), "empty": entry("BF16", (0, 7), (24, 24)), "scalar": entry("I64", (), (24, 32))}
    )
    found = read(tmp_path, file_of(text + b"   ", bytes(32)))
    base = 8 + len(text) + 3
    assert found.tensors["a"] == header.TensorRef(NAME, "F32", (2, 3), base, base + 24)
    assert found.tensors["empty"].nbytes == 0
    assert found.tensors["scalar"].shape == ()
    assert read(tmp_path, file_of(b"{}")).tensors == {}
    assert read(tmp_path, file_of(text_of({"__metadata__": {"format": "pt, \u00fc"}}))).metadata == {"format": "pt, \u00fc"}


@pytest.mark.parametrize("dtype", header.ELEMENT_BYTES)
def test_every_dtype_of_the_list(tmp_path: Path, dtype: str) -> None:
    size = header.ELEMENT_BYTES[dtype]
    found = read(tmp_path, file_of(text_of({"t": entry(dtype, (3,), (0, 3 * size))}), bytes(3 * size)))
    assert found.tensors["t"].nbytes == 3 * size


def test_agrees_with_the_reference_library(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(3, dtype=torch.bfloat16), "c": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / NAME, metadata={"format": "pt"})
    found = read(tmp_path, (tmp_path / NAME).read_bytes())
    assert {name: ref.shape for name, ref in found.tensors.items()} == {name: tuple(t.shape) for name, t in tensors.items()}
    ours = tmp_path / "ours.safetensors"
    make.write_safetensors(ours, {"b": ("F32", (2, 3), tensors["b"].numpy().tobytes())}, {"format": "pt"})
    assert torch.equal(load_file(ours)["b"], tensors["b"])


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":[' + b"[]," * 5_000_000 + b"[]]}",
        b'{"a":"' + b"\\u0001" * 2_700_000 + b'"}',
        b"{" + b",".join(b'"%d":{}' % i for i in range(70_000)) + b"}",
        b'{"a":[' + b"1," * 7_000_000 + b"1]}",
    ],
    ids=["many lists", "long string", "many tensors", "many numbers"],
)
def test_header_memory_is_bounded(tmp_path: Path, text: bytes) -> None:
    blob = file_of(text)
    (tmp_path / NAME).write_bytes(blob)
    tracemalloc.start()
    try:
        with pytest.raises(BadCheckpoint):
            read(tmp_path, blob)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(blob) + (64 << 20)


def test_header_above_the_cap_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / NAME, "wb") as file:
        file.write((header.MAX_HEADER + 1).to_bytes(8, "little") + b"{")
        file.truncate(header.MAX_HEADER + 100)
    root = open_root(tmp_path)
    try:
        with pytest.raises(BadCheckpoint, match=f"at most {header.MAX_HEADER}"):
            header.open_shard(root, NAME)
    finally:
        os.close(root)


GOOD = file_of(text_of({"a": entry("F32", (2, 3), (0, 24)), "b": entry("U8", (3,), (24, 27))}), bytes(27))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(GOOD)), st.binary(max_size=12), st.integers(0, 8))
def test_damaged_headers_raise_nothing_but_user_errors(tmp_path_factory, at: int, patch: bytes, drop: int) -> None:
    blob = GOOD[:at] + patch + GOOD[at + drop :]
    try:
        found = read(tmp_path_factory.getbasetemp(), blob)
    except UserError:
        return
    assert sum(ref.nbytes for ref in found.tensors.values()) + 8 + int.from_bytes(blob[:8], "little") == len(blob)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries({"dtype": st.sampled_from(["U8", "F32"]), "shape": JSON, "data_offsets": JSON})


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=6), JSON | ENTRY, max_size=3))
def test_any_json_header_raises_nothing_but_user_errors(entries: dict) -> None:
    data = text_of(entries)
    with contextlib.suppress(UserError):
        header.parse_header(data, NAME, 8 + len(data))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_raise_nothing_but_user_errors(data: bytes) -> None:
    with contextlib.suppress(UserError):
        header.parse_header(data, NAME, 8 + len(data))
