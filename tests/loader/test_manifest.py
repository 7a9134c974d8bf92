"""The strict reader: one form only, every truncation and every flipped byte refused, the writer and the reader agree byte for
byte.
"""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest.export import manifest as writer
from palimpsest_loader import manifest
from palimpsest_loader.errors import BadCore


def test_writer_and_reader_share_the_bytes(tree) -> None:
    assert writer.encode(tree) == manifest.seal(tree)
    assert manifest.read(manifest.seal(tree)) == tree


def test_every_truncation_is_refused(tree) -> None:
    data = manifest.seal(tree)
    # every length near both ends, then a prime stride: each is parsed as far as it goes
    lengths = {*range(64), *range(64, len(data), 97), *range(len(data) - 200, len(data))}
    for length in sorted(lengths):
        with pytest.raises(BadCore, match=r"manifest.json"):
            manifest.read(data[:length])


@pytest.mark.slow
def test_every_single_truncation_is_refused(tree) -> None:
    data = manifest.seal(tree)
    for length in range(len(data)):
        with pytest.raises(BadCore, match=r"manifest.json"):
            manifest.read(data[:length])


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 1 << 30), bit=st.integers(0, 7))
def test_one_flipped_bit_is_refused(small_manifest, place: int, bit: int) -> None:
    data = bytearray(small_manifest)
    data[place % len(data)] ^= 1 << bit
    with pytest.raises(BadCore, match=r"manifest.json"):
        manifest.read(bytes(data))


@pytest.fixture(scope="session")
def small_manifest(small) -> bytes:
    return manifest.seal(small.planned().tree())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(format="palimpsest-core-2"), "format"),
        (lambda t: t.update(spare=1), "unknown fields"),
        (lambda t: t.pop("limits"), "lacks fields"),
        (lambda t: t["limits"].update(tokens=-1), "limits.tokens"),
        (lambda t: t["limits"].update(tokens=True), "limits.tokens"),
        (lambda t: t["limits"].update(tokens=1 << 60), "limits.tokens"),
        (lambda t: t["files"].update({"../../etc/passwd": {"sha256": "0" * 64, "bytes": 1}}), "relative path"),
        (lambda t: t["files"].update({"/etc/passwd": {"sha256": "0" * 64, "bytes": 1}}), "relative path"),
        (lambda t: t["files"].update({".hidden": {"sha256": "0" * 64, "bytes": 1}}), "relative path"),
        (lambda t: t["files"].update({"manifest.json": {"sha256": "0" * 64, "bytes": 1}}), "relative path"),
        (lambda t: t["steps"][0].update(runner="shell"), "runner"),
        (lambda t: t["steps"][0].update(name=7), "name"),
        (lambda t: t["environment"].update(device="cuda"), "device"),
    ],
)
def test_impossible_fields_are_refused(tree, change, message: str) -> None:
    change(tree)
    with pytest.raises(BadCore, match=message):
        manifest.read(manifest.seal(tree))


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"{", b'{"a":1,"a":2}', b"\xff\xfe", b"[" * 100_000, b'{"format": NaN}', b"1e5"]
)
def test_other_json_is_refused(text: bytes) -> None:
    with pytest.raises(BadCore, match=r"manifest.json"):
        manifest.read(text)


def test_other_spelling_is_refused(tree) -> None:
    """One value has one text: a digest of the text is a digest of the value."""
    with pytest.raises(BadCore, match="checksum"):
        manifest.read(json.dumps(json.loads(manifest.seal(tree)), indent=1).encode())


def test_golden_bytes(golden_tree) -> None:
    """The bytes of one small manifest: a change of the format changes this number, and the version with it."""
    data = manifest.seal(golden_tree)
    assert hashlib.sha256(data).hexdigest() == GOLDEN
    assert manifest.read(data)["limits"] == {"page": 64, "ranks": 1, "rows": 1, "tokens": 64}


@pytest.fixture
def golden_tree() -> dict:
    plane = {"name": "output", "dtype": "fp32", "shape": [1, 4], "offset": 0}
    argument = {
        "buffer": "output",
        "dtype": "fp32",
        "size": [1, 4],
        "stride": [4, 1],
        "offset": 0,
        "steps": {"row": 16},
        "mutated": True,
        "dynamic": {},
    }
    step = {
        "name": "only",
        "phase": "p0",
        "runner": "rows",
        "passes": [{"program": "only", "loops": ["row"], "args": [argument]}],
        "numbers": {"tile": 1},
        "control": {},
        "roles": {},
        "planes": [],
        "reads": [],
        "writes": ["output"],
    }
    return {
        "format": "palimpsest-core-1",
        "checksum": "",
        "name": "golden",
        "arithmetic": "core-1",
        "program": "1" * 64,
        "plan": "2" * 64,
        "environment": {
            "torch": "2.13.0",
            "machine": "x86_64",
            "isa": "avx2",
            "cpu_flags": ["avx2"],
            "compiler": "g++ 12",
            "device": "cpu",
        },
        "facts": {"layer": 0},
        "limits": {"tokens": 64, "rows": 1, "ranks": 1, "page": 64},
        "backing": {"align": 64, "segments": {"reusable": 64}},
        "buffers": {"output": {"kind": "reusable", "offset": 0, "nbytes": 16, "planes": [plane]}},
        "inputs": [],
        "outputs": ["output"],
        "histories": [],
        "weights": {"files": ["weights/rank0.safetensors"], "tensors": {}},
        "programs": {
            "only": {"engine": "aoti", "file": "programs/a.so", "key": "3" * 64, "template": "4" * 64, "scratch_bytes": 0}
        },
        "steps": [step],
        "files": {n: {"sha256": "5" * 64, "bytes": 1} for n in ("programs/a.so", "weights/rank0.safetensors")},
    }


GOLDEN = "179457850c5ac129070ff722a84d699a3fa8a20c60cb9dbda33d88f4680bf03b"
