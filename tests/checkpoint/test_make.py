"""Generated checkpoints: the same bytes everywhere, complete or absent, and loadable by the reference implementation."""

import errno
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from palimpsest.checkpoint import make, synthetic
from palimpsest.checkpoint.index import INDEX, open_checkpoint
from palimpsest.checkpoint.load import read_tensor
from palimpsest.core.errors import BadConfig, Unavailable, UnknownName

#: sha256 over the folder's files in name order, each as name, NUL, its own sha256
GOLDEN = {
    "k31-pro-layer3": "72bffb81de20c40ea5b3099efcdd26f836de2cfaf18ad368756189989434126d",
    "micro": "109f23c727f9dc8109335ad0f593b96e9bc9c01cdcaab598800f5e836f83e098",
    "tiny-dsv32": "57f074cf96d601fd044690a0aa6da4cddc02d87fefb34589e015e4c65c100f6a",
    "tiny-dsv32-fp8": "bb2bfa9f3d4ca32b356cd6a34cf5adfc07b46b01a3c4be01378b4767c3ddc347",
    "tiny-glm": "eac477c8e475ca353b04ef8927e6fb0b66c249cb6b01826cabf010f8211d1c3c",
    "tiny-k31": "0e10f7b2a7af5e98795126f51fe0a25ac7b2e3cb0b916c6c0e274c2f86fe731e",
    "wide-k31": "392941d3aa6c8495a30bc667809554fe9764cc722fe627ff69d4c986183da1b5",
}


def folder_sha256(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(root.iterdir()):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).hexdigest().encode())
    return digest.hexdigest()


#: presets of a few megabytes
SMALL = sorted(set(make.PRESETS) - {"k31-pro-layer3"})


@pytest.mark.parametrize("preset", [*SMALL, pytest.param("k31-pro-layer3", marks=pytest.mark.slow)])
def test_bytes_never_change(presets, preset: str) -> None:
    assert folder_sha256(presets(preset)) == GOLDEN[preset]


def test_every_preset_has_a_golden() -> None:
    assert set(GOLDEN) == set(make.PRESETS)


@pytest.mark.parametrize("preset", SMALL)
def test_folder_is_small_sharded_and_complete(presets, preset: str) -> None:
    root = presets(preset)
    assert {path.name for path in root.iterdir()} == {
        "config.json", INDEX, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip
    checkpoint = open_checkpoint(root)
    assert checkpoint.nbytes < 30 << 20
    assert len(checkpoint.files) == 2
    assert not [path for path in root.parent.iterdir() if path.name.startswith(".")]


def test_seed_and_name_decide_the_bytes(tmp_path: Path, presets) -> None:
    same = make.make("micro", tmp_path / "same")
    other = make.make("micro", tmp_path / "other", seed=1)
    # a changed layer count moves tensors between shards but never their bytes
    longer = make.make("micro", tmp_path / "longer", overrides={"schedule": "FFF"})
    assert folder_sha256(same) == folder_sha256(presets("micro"))
    assert folder_sha256(other) != folder_sha256(same)
    first, second = open_checkpoint(same), open_checkpoint(longer)
    for name in first.tensors:
        assert torch.equal(read_tensor(first, name), read_tensor(second, name)), name


def test_values_have_the_spread_they_declare(presets) -> None:
    checkpoint = open_checkpoint(presets("tiny-k31"))
    draws = synthetic.tensors_of(make.PRESETS["tiny-k31"])
    assert set(draws) == set(checkpoint.tensors)
    for name, draw in draws.items():
        if np.prod(draw.shape) >= 4096:
            values = read_tensor(checkpoint, name).double()
            assert abs(float(values.std()) / draw.spread - 1) < 0.05, name
            assert abs(float(values.mean()) - draw.mean) < 0.1 * draw.spread, name


def test_bf16_rounds_to_nearest_even() -> None:
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    values[:4] = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0], dtype=np.uint32).view(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(make._bf16(values.astype(np.float64)), expected)


@pytest.mark.parametrize(("peak", "scale"), [(448.0, 1.0), (449.0, 2.0), (224.0, 0.5), (447.0, 1.0), (896.0, 2.0)])
def test_block_scale_is_the_smallest_power_of_two_that_fits(peak: float, scale: float) -> None:
    codes, scales = make.quantise_blocks(np.array([[peak, 1.0]], dtype=np.float32), 128)
    assert float(scales[0, 0]) == scale
    value = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    assert abs(float(value[0, 0]) * scale - peak) <= peak / 16


def test_unknown_preset_field_and_impossible_values(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="tiny-k31"):
        make.make("nope", tmp_path / "x")
    with pytest.raises(UnknownName, match="topk"):
        make.make("micro", tmp_path / "x", overrides={"colour": 1})
    for overrides in (
        {"topk": 0},
        {"topk": 1 << 30},
        {"topk": True},
        {"schedule": "FX"},
        {"schedule": "FSF"},
        {"schedule": ""},
        {"hidden": 1 << 20, "vocab": 1 << 20},
    ):
        with pytest.raises(BadConfig):
            make.make("micro", tmp_path / "x", overrides=overrides)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.mkdir()
    (target / "mine").write_text("keep")
    with pytest.raises(BadConfig, match="not empty"):
        make.make("micro", target)
    assert [path.name for path in target.iterdir()] == ["mine"]
    with pytest.raises(BadConfig, match="not a folder"):
        make.make("micro", target / "mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadConfig, match="not a folder"):
        make.make("micro", tmp_path / "link")


def test_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert open_checkpoint(make.make("micro", tmp_path / "x")).tensors


def test_folder_filled_meanwhile_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def late(source: str, target: Path) -> None:
        target.mkdir()
        (target / "theirs").write_text("keep")
        rename(source, target)

    monkeypatch.setattr(make.os, "rename", late)
    with pytest.raises(BadConfig, match="not empty"):
        make.make("micro", tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("call", [1, 2])
def test_failure_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, call: int
) -> None:
    fsync, calls = os.fsync, []

    def failing(fd: int) -> None:
        calls.append(fd)
        if len(calls) == call:
            raise error
        fsync(fd)

    monkeypatch.setattr(make.os, "fsync", failing)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else Unavailable) as caught:
        make.make("micro", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
    if isinstance(caught.value, Unavailable):
        assert "nothing was left behind" in str(caught.value)


def test_real_file_size_limit_leaves_nothing(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import resource, signal, sys\n"
        "from palimpsest.checkpoint.make import make\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "from palimpsest.core.errors import Unavailable\n"
        "try:\n    make('micro', sys.argv[1])\nexcept Unavailable as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_real_spellings() -> None:
    kimi = synthetic.config_of(make.PRESETS["tiny-k31"])
    assert kimi["architectures"] == ["KimiK31ForConditionalGeneration"]
    assert kimi["text_config"]["linear_attn_config"]["full_attn_layers"] == [4, 5]
    assert kimi["text_config"]["dsa_config"] == {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 128}
    assert json.loads(json.dumps(kimi)) == kimi


@pytest.mark.peer
@pytest.mark.parametrize("preset", ["tiny-dsv32", "tiny-glm", "micro"])
def test_reference_implementation_loads_every_tensor(presets, preset: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        presets(preset), output_loading_info=True, dtype=torch.float32, local_files_only=True
    )
    assert not any(info.values()), info
    ids = torch.arange(40)[None] % model.config.vocab_size
    with torch.no_grad():
        logits = model(ids).logits
    assert torch.isfinite(logits).all()
    assert 0.5 < float(logits.std()) < 8
