"""Hostile and incomplete folders: paths that leave the folder, files that are no files, an index its shards contradict."""

import contextlib
import json
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest.checkpoint import index, make
from palimpsest.checkpoint.index import open_checkpoint
from palimpsest.core.errors import BadCheckpoint, UserError


def edit(root: Path, **changes: object) -> None:
    path = root / index.INDEX
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def remap(root: Path, **places: object) -> None:
    weight_map = json.loads((root / index.INDEX).read_text())["weight_map"]
    edit(root, weight_map=weight_map | places)


def refused(root: Path) -> str:
    with pytest.raises(BadCheckpoint) as caught:
        open_checkpoint(root)
    message = str(caught.value)
    assert "\n" not in message
    assert message.isprintable()
    return message


def test_plain_folder(plain: Path) -> None:
    checkpoint = open_checkpoint(plain)
    assert checkpoint.root == plain
    assert checkpoint.config == {"model_type": "plain"}
    assert set(checkpoint.tensors) == {"x", "y", "z"}
    assert checkpoint.nbytes == 41
    assert checkpoint.notes == ()
    assert {ref.file for ref in checkpoint.tensors.values()} == set(checkpoint.files)


def test_single_file_without_index(plain: Path) -> None:
    (plain / index.INDEX).unlink()
    (plain / "a.safetensors").rename(plain / "model.safetensors")
    checkpoint = open_checkpoint(plain)
    assert set(checkpoint.tensors) == {"x", "y"}
    assert any("b.safetensors" in note for note in checkpoint.notes)


@pytest.mark.parametrize(
    "name",
    [
        "../b.safetensors", "/etc/b.safetensors", "a/../../b.safetensors", "sub/b.safetensors", "./b.safetensors",
        "b.safetensors/", "b.safetensors\0", "b\0.safetensors", "b.safetensors\n", "\uff42.safetensors", "b\u200b.safetensors",
        "b.safetensor\u0455", "b .safetensors", "~.safetensors ", ".safetensors/..", "", "..", "C:\\b.safetensors",
        "b.SAFETENSORS",
    ],
)  # fmt: skip
def test_shard_names_that_are_not_plain(plain: Path, name: str) -> None:
    remap(plain, z=name)
    assert "'z'" in refused(plain)


@pytest.mark.parametrize("value", [None, 3, ["b.safetensors"], {"file": "b.safetensors"}, True])
def test_shard_that_is_no_string(plain: Path, value: object) -> None:
    remap(plain, z=value)
    assert "expected a file name" in refused(plain)


def test_shard_outside_is_never_opened(plain: Path) -> None:
    outside = plain.parent / "b.safetensors"
    outside.write_bytes((plain / "b.safetensors").read_bytes())
    (plain / "b.safetensors").unlink()
    (plain / "b.safetensors").symlink_to(outside)
    assert "symbolic link" in refused(plain)
    (plain / "b.safetensors").unlink()
    (plain / "b.safetensors").symlink_to("a.safetensors")
    assert "cp -rL" in refused(plain)


def test_symlinked_index_and_config(plain: Path) -> None:
    for name in ("config.json", index.INDEX):
        moved = plain.parent / name
        (plain / name).rename(moved)
        (plain / name).symlink_to(moved)
        assert "symbolic link" in refused(plain)
        (plain / name).unlink()
        moved.rename(plain / name)


def test_symlinked_root_is_the_users_own_path(plain: Path) -> None:
    link = plain.parent / "link"
    link.symlink_to(plain)
    assert open_checkpoint(link).root == plain


def test_hard_link_is_a_regular_file(plain: Path) -> None:
    os.link(plain / "b.safetensors", plain.parent / "other-name")
    assert "z" in open_checkpoint(plain).tensors


@pytest.mark.parametrize("kind", ["fifo", "folder", "socket"])
def test_not_a_regular_file(plain: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = plain / "b.safetensors"
    shard.unlink()
    if kind == "fifo":
        os.mkfifo(shard)
    elif kind == "folder":
        shard.mkdir()
    else:
        monkeypatch.chdir(plain)
        socket.socket(socket.AF_UNIX).bind("b.safetensors")
    assert "regular file" in refused(plain)


def test_device_file(plain: Path) -> None:
    shard = plain / "b.safetensors"
    shard.unlink()
    try:
        os.mknod(shard, 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("making a device file needs privileges")
    assert "device" in refused(plain)


def test_missing_shard(plain: Path) -> None:
    (plain / "b.safetensors").unlink()
    assert "'b.safetensors' is not in the checkpoint folder" in refused(plain)


def test_short_shard(plain: Path) -> None:
    path = plain / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    message = refused(plain)
    assert "truncated" in message
    assert str(path.stat().st_size) in message


def test_listed_tensor_that_no_shard_holds(plain: Path) -> None:
    remap(plain, ghost="b.safetensors")
    assert "no shard holds it" in refused(plain)


def test_tensor_in_another_shard_than_listed(plain: Path) -> None:
    remap(plain, y="b.safetensors")
    assert "'a.safetensors' holds it" in refused(plain)


def test_tensor_in_two_shards(plain: Path) -> None:
    (plain / "b.safetensors").unlink()
    make.write_safetensors(plain / "b.safetensors", {"z": ("U8", (7,), bytes(7)), "x": ("U8", (1,), b"0")}, {})
    assert "tensor 'x' is in 'a.safetensors' and in 'b.safetensors'" in refused(plain)


def test_unlisted_tensor_is_noted_and_not_read(plain: Path) -> None:
    (plain / "b.safetensors").unlink()
    make.write_safetensors(plain / "b.safetensors", {"z": ("U8", (7,), bytes(7)), "extra": ("U8", (1,), b"0")}, {})
    checkpoint = open_checkpoint(plain)
    assert "extra" not in checkpoint.tensors
    assert any("'extra'" in note for note in checkpoint.notes)


@pytest.mark.parametrize("total", [40, 42, -1, "41", True, 41.5, 1 << 52])
def test_total_size_that_disagrees(plain: Path, total: object) -> None:
    edit(plain, metadata={"total_size": total})
    assert "total_size" in refused(plain)


@pytest.mark.parametrize("metadata", [{}, {"total_size": 41.0}, {"total_size": None}, {"total_parameters": 3}])
def test_total_size_that_is_absent_or_equal(plain: Path, metadata: object) -> None:
    edit(plain, metadata=metadata)
    assert len(open_checkpoint(plain).tensors) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "{",
        "\ufeff{}",
        '{"weight_map": {}}',
        '{"weight_map": []}',
        '{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}',
        '{"weight_map": {"x": "a.safetensors"}, "metadata": []}',
        '{"metadata": {"total_size": NaN}, "weight_map": {"x": "a.safetensors"}}',
        '{"weight_map": ' + '{"a":' * 100_000 + "1" + "}" * 100_001,
        '{"weight_map": {"a\\u0000": "a.safetensors"}}',
    ],
)
def test_index_text_that_is_no_index(plain: Path, text: str) -> None:
    (plain / index.INDEX).write_text(text)
    refused(plain)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_pickle_is_refused_with_the_reason(plain: Path, suffix: str) -> None:
    remap(plain, z=f"b{suffix}")
    assert "run code" in refused(plain)
    for name in ("a.safetensors", "b.safetensors", index.INDEX):
        (plain / name).unlink()
    (plain / f"pytorch_model{suffix}").write_bytes(b"\x80\x02.")
    assert "run code" in refused(plain)


def test_pickle_beside_the_weights_is_noted(plain: Path) -> None:
    (plain / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    assert any("pytorch_model.bin" in note for note in open_checkpoint(plain).notes)


def test_pickle_under_a_safetensors_name(plain: Path) -> None:
    (plain / "b.safetensors").write_bytes(b"PK\x03\x04" + bytes(100))
    assert "torch.save" in refused(plain)


def test_paths_that_are_no_folder(plain: Path, tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "not a folder" in refused(plain / "config.json")
    assert "null" in refused(Path("a\0b"))
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert "neither" in refused(tmp_path / "empty")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_index_raises_nothing_but_user_errors(data: bytes) -> None:
    with contextlib.suppress(UserError):
        index.parse_index(data)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.text(max_size=8), st.text(max_size=30) | st.integers() | st.none(), max_size=4),
    st.integers() | st.floats() | st.text(),
)
def test_any_weight_map_raises_nothing_but_user_errors(weight_map: dict, total: object) -> None:
    try:
        places, _ = index.parse_index(json.dumps({"weight_map": weight_map, "metadata": {"total_size": total}}).encode())
    except UserError:
        return
    assert all("/" not in place and place.isascii() for place in places.values())
