"""Loading: the stored bytes and nothing else, block scales applied once, and a file that changes underneath is noticed."""

import hashlib
import json
import os
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from palimpsest.checkpoint import make
from palimpsest.checkpoint.index import open_checkpoint
from palimpsest.checkpoint.load import Reader, dequantise, file_sha256, read_tensor, tensor_sha256
from palimpsest.core.errors import BadCheckpoint

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


def one_shard(root: Path, tensors: dict, config: object = None) -> Path:
    root.mkdir(exist_ok=True)
    make.write_safetensors(root / "model.safetensors", tensors, {})
    (root / "config.json").write_text(json.dumps(config or {}))
    return root


def test_agrees_with_the_reference_library(presets) -> None:
    checkpoint = open_checkpoint(presets("micro"))
    for file in checkpoint.files:
        with safe_open(checkpoint.root / file, "pt") as reference:
            for name in reference.keys():  # noqa: SIM118 - not a dict
                assert torch.equal(read_tensor(checkpoint, name), reference.get_tensor(name)), name


def test_tensors_are_views_that_outlive_the_reader(presets) -> None:
    checkpoint = open_checkpoint(presets("micro"))
    with Reader(checkpoint) as reader:
        tensor = reader.read("model.embed_tokens.weight")
        again = reader.read("model.embed_tokens.weight")
        assert tensor.data_ptr() == again.data_ptr()
    assert tensor.shape == (64, 32)
    assert tensor.dtype is torch.bfloat16
    assert torch.isfinite(tensor.float()).all()


@pytest.mark.parametrize(
    ("dtype", "stored", "read"),
    [
        ("F16", torch.float16, torch.float32), ("BF16", torch.bfloat16, torch.bfloat16), ("F32", torch.float32, torch.float32),
        ("U8", torch.uint8, torch.uint8), ("I64", torch.int64, torch.int64), ("BOOL", torch.bool, torch.bool),
        ("F8_E5M2", torch.float8_e5m2, torch.float8_e5m2),
    ],
)  # fmt: skip
def test_dtypes(tmp_path: Path, dtype: str, stored: torch.dtype, read: torch.dtype) -> None:
    values = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(stored)
    data = values.view(torch.uint8).numpy().tobytes()
    root = one_shard(
        tmp_path / "c", {"t": (dtype, (2, 3), data), "none": (dtype, (0, 3), b""), "scalar": (dtype, (), data[: len(data) // 6])}
    )
    checkpoint = open_checkpoint(root)
    found = read_tensor(checkpoint, "t")
    assert found.dtype is read
    assert torch.equal(found.float(), values.float())
    assert read_tensor(checkpoint, "none").shape == (0, 3)
    assert read_tensor(checkpoint, "scalar").shape == ()


def test_misaligned_tensor_is_read_right(tmp_path: Path) -> None:
    root = one_shard(tmp_path / "c", {})
    values = np.arange(5, dtype="<f4").tobytes()
    text = json.dumps(
        {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}, "b": {"dtype": "F32", "shape": [5], "data_offsets": [3, 23]}}
    )
    (root / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode() + b"abc" + values)
    assert read_tensor(open_checkpoint(root), "b").tolist() == [0, 1, 2, 3, 4]


def exact_product(code: float, scale: float) -> float:
    """Round-to-nearest-even fp32 of the exact product, from integers."""
    exact = Fraction(code) * Fraction(scale)
    near = np.float32(float(exact))
    candidates = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    even = [abs(int(np.float32(c).view(np.uint32))) % 2 for c in candidates]
    best = min(range(3), key=lambda i: (abs(Fraction(float(candidates[i])) - exact), even[i]))
    return float(candidates[best])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_block_product_is_exact_and_rounded_once(rows: int, columns: int, block_rows: int, block_columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    weight = codes.view(torch.float8_e4m3fn)
    shape = (-(-rows // block_rows), -(-columns // block_columns))
    scale = torch.rand(shape, generator=generator) * 3
    result = dequantise(weight, scale, (block_rows, block_columns))
    for i in range(rows):
        for j in range(columns):
            expected = exact_product(float(weight[i, j].float()), float(scale[i // block_rows, j // block_columns]))
            assert float(result[i, j]) == expected


def test_every_code_and_e8m0_scales() -> None:
    legal = torch.tensor([i for i in range(256) if i & 0x7F != 0x7F], dtype=torch.uint8)
    weight = legal.view(torch.float8_e4m3fn).view(1, -1)
    scale = torch.tensor([[127, 128]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    result = dequantise(weight, scale, (128, 128))
    assert torch.equal(result[:, :128], weight.float()[:, :128])
    assert torch.equal(result[:, 128:], weight.float()[:, 128:] * 2)


def test_scales_are_applied_and_counted(copy) -> None:
    checkpoint = open_checkpoint(copy("tiny-dsv32-fp8"))
    name = "model.layers.0.self_attn.indexer.wk.weight"
    with Reader(checkpoint) as reader:
        weight, raw, scale = reader.read(name), reader.raw(name), reader.raw(f"{name}_scale_inv")
        assert weight.dtype is torch.float32
        assert not bool((scale == 1).all()), "a scale of one would hide a dropped scale"
        assert torch.equal(weight, raw.float() * scale.repeat_interleave(128, 1)[:, :256])
        assert 0.5 < float(weight.std() * 256**0.5) < 2
        assert f"{name}_scale_inv" not in reader.unconsumed_scales()
        left = reader.unconsumed_scales("model.layers.0.self_attn.")
        assert left
        for other in [
            n for n in checkpoint.tensors if n.startswith("model.layers.0.self_attn.") and not n.endswith("_scale_inv")
        ]:
            reader.read(other)
        assert reader.unconsumed_scales("model.layers.0.self_attn.") == ()


def test_ragged_rows(presets) -> None:
    checkpoint = open_checkpoint(presets("tiny-dsv32-fp8"))
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert checkpoint.tensors[name].shape == (576, 256)
    assert checkpoint.tensors[f"{name}_scale_inv"].shape == (5, 2)
    assert read_tensor(checkpoint, name).shape == (576, 256)


BAD_SCALES = {
    "NaN": (torch.tensor([[float("nan")]]), "not finite"),
    "infinite": (torch.tensor([[float("inf")]]), "not finite"),
    "negative": (torch.tensor([[-1.0]]), "negative"),
    "shape": (torch.ones(1, 2), r"\[1, 2\], expected \[1, 1\]"),
    "e8m0 NaN": (torch.tensor([[255]], dtype=torch.uint8).view(torch.float8_e8m0fnu), "not finite"),
}


@pytest.mark.parametrize("case", BAD_SCALES)
def test_bad_scales(case: str) -> None:
    scale, says = BAD_SCALES[case]
    with pytest.raises(BadCheckpoint, match=says):
        dequantise(E4M3[:4].view(2, 2), scale, (128, 128))


def test_nan_code_is_refused() -> None:
    with pytest.raises(BadCheckpoint, match="2 NaN"):
        dequantise(E4M3[[0x7F, 0xFF, 0, 1]].view(2, 2), torch.ones(1, 1), (128, 128))


def test_fp8_without_scale_block_or_with_a_strange_scale(tmp_path: Path) -> None:
    weight = ("F8_E4M3", (2, 2), bytes(4))
    quantised = {"quantization_config": {"weight_block_size": [128, 128]}}
    root = one_shard(tmp_path / "a", {"w.weight": weight}, quantised)
    with pytest.raises(BadCheckpoint, match="raw codes are not weights"):
        read_tensor(open_checkpoint(root), "w.weight")
    root = one_shard(tmp_path / "b", {"w.weight": weight, "w.weight_scale_inv": ("F32", (1, 1), bytes(4))})
    with pytest.raises(BadCheckpoint, match="weight_block_size"):
        read_tensor(open_checkpoint(root), "w.weight")
    root = one_shard(tmp_path / "c", {"w.weight": weight, "w.weight_scale_inv": ("I32", (1, 1), bytes(4))}, quantised)
    with pytest.raises(BadCheckpoint, match="dtype I32"):
        read_tensor(open_checkpoint(root), "w.weight")


def test_unknown_names(plain: Path) -> None:
    checkpoint = open_checkpoint(plain)
    for call in (read_tensor, tensor_sha256):
        with pytest.raises(BadCheckpoint, match="'ghost' is not in 'plain'"):
            call(checkpoint, "ghost")
    with pytest.raises(BadCheckpoint, match="no shard"):
        file_sha256(checkpoint, "../plain/a.safetensors")


def test_digests(plain: Path) -> None:
    checkpoint = open_checkpoint(plain)
    assert tensor_sha256(checkpoint, "z") == hashlib.sha256(b"1234567").hexdigest()
    assert file_sha256(checkpoint, "a.safetensors") == hashlib.sha256((plain / "a.safetensors").read_bytes()).hexdigest()


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


def rewrite(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    touch(path)


def replace(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)
    other.rename(path)


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"x")


def relink(path: Path) -> None:
    moved = path.parent.parent / "moved"
    path.rename(moved)
    path.symlink_to(moved)


@pytest.mark.parametrize("change", [touch, rewrite, replace, grow, relink, Path.unlink])
@pytest.mark.parametrize(
    "read", [lambda c: read_tensor(c, "z"), lambda c: tensor_sha256(c, "z"), lambda c: file_sha256(c, "b.safetensors")]
)
def test_change_after_the_header_was_read(plain: Path, change, read) -> None:
    checkpoint = open_checkpoint(plain)
    change(plain / "b.safetensors")
    with pytest.raises(BadCheckpoint, match=r"b\.safetensors"):
        read(checkpoint)


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("change", [touch, rewrite, grow, shrink])
def test_change_while_mapped(plain: Path, change) -> None:
    checkpoint = open_checkpoint(plain)
    reader = Reader(checkpoint).__enter__()
    reader.read("z")
    change(plain / "b.safetensors")
    with pytest.raises(BadCheckpoint, match="changed while in use"):
        reader.read("z")
    with pytest.raises(BadCheckpoint, match="changed while in use"):
        reader.__exit__(None, None, None)


def fail_after_a_change(plain: Path) -> None:
    with Reader(open_checkpoint(plain)) as reader:
        reader.read("z")
        grow(plain / "b.safetensors")
        raise ZeroDivisionError


def test_error_inside_the_block_is_not_hidden(plain: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fail_after_a_change(plain)


def test_no_descriptor_is_left_open(plain: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = open_checkpoint(plain)
    for _ in range(20):
        read_tensor(checkpoint, "z")
        file_sha256(checkpoint, "b.safetensors")
    (plain / "b.safetensors").unlink()
    (plain / "b.safetensors").mkdir()
    for _ in range(20):
        with pytest.raises(BadCheckpoint):
            open_checkpoint(plain)
    assert len(os.listdir("/proc/self/fd")) == before
