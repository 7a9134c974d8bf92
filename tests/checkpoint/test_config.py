"""config.json is data: bounded, strict, and it never makes anything import or run."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest.checkpoint.config import MAX_BYTES, read_config, remote_code
from palimpsest.checkpoint.index import open_checkpoint
from palimpsest.checkpoint.load import Reader
from palimpsest.cli.preflight import examine
from palimpsest.core.errors import BadCheckpoint, BadConfig, UserError


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "config.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_unknown_keys_are_kept(tmp_path: Path) -> None:
    value = {"a": 1, "b": [1.5, None, True], "rms_norm_eps": 1e-05, "deep": {"c": "d"}}
    path = write(tmp_path, json.dumps(value))
    assert read_config(tmp_path) == value
    assert read_config(path) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "a": 2}', "twice"),
        ('{"a": {"b": 1, "b": 1}}', "twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a": 1e999}', "not finite"),
        ('{"a": 9007199254740993}', "outside"),
        ('{"a": -9007199254740993}', "outside"),
        ('{"a": ' + "9" * 5000 + "}", "outside"),
        ("[" * 33 + "]" * 33, "deeper than 32"),
        ('{"a":' * 32 + "[]" + "}" * 32, "deeper than 32"),
        ("[" * 200_000, "deeper than 32"),
        ("[]", "expected an object"),
        ('"text"', "expected an object"),
        ("", "not JSON"),
        ("{", "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ("// no\n{}", "not JSON"),
    ],
)
def test_text_that_is_not_plain_data(tmp_path: Path, text: str | bytes, says: str) -> None:
    write(tmp_path, text)
    with pytest.raises(BadConfig) as caught:
        read_config(tmp_path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_depth_and_size_limits_are_inclusive(tmp_path: Path) -> None:
    write(tmp_path, '{"a":' * 31 + "[]" + "}" * 31)
    read_config(tmp_path)
    write(tmp_path, '{"a":"' + "x" * (MAX_BYTES - 8) + '"}')
    read_config(tmp_path)
    write(tmp_path, '{"a":"' + "x" * (MAX_BYTES - 7) + '"}')
    with pytest.raises(BadCheckpoint, match="more than the"):
        read_config(tmp_path)


def test_link_inside_a_folder_is_refused_and_a_named_link_is_followed(tmp_path: Path) -> None:
    real = tmp_path / "real.json"
    real.write_text("{}")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").symlink_to(real)
    with pytest.raises(BadCheckpoint, match="symbolic link"):
        read_config(folder)
    assert read_config(folder / "config.json") == {}


def test_remote_code_is_reported() -> None:
    config = {"auto_map": {"AutoModel": "modeling.M", "AutoConfig": "c.C"}, "text_config": {"auto_map": "x.Y\n"}}
    assert remote_code(config) == (
        "auto_map.AutoConfig -> c.C",
        "auto_map.AutoModel -> modeling.M",
        "text_config.auto_map -> x.Y\\n",
    )
    assert remote_code({"auto_map": 3, "architectures": ["X"]}) == ("auto_map -> 3",)
    assert remote_code({}) == ()


def test_code_in_the_folder_never_runs(copy, tmp_path: Path) -> None:
    root = copy("micro")
    marker = tmp_path / "marker"
    for name in ("modeling_evil", "configuration_evil", "conftest", "sitecustomize"):
        (root / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    config = json.loads((root / "config.json").read_text())
    config |= {
        "auto_map": {"AutoConfig": "configuration_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"},
        "trust_remote_code": True,
    }
    (root / "config.json").write_text(json.dumps(config))
    report = examine(str(root))
    assert report.ok
    assert len(report.facts["remote_code"]) == 2
    checkpoint = open_checkpoint(root)
    with Reader(checkpoint) as reader:
        for name in checkpoint.tensors:
            reader.read(name)
    assert not marker.exists()
    assert not [name for name in sys.modules if "evil" in name]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_any_bytes_raise_nothing_but_user_errors(tmp_path_factory, data: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    write(folder, data)
    with contextlib.suppress(UserError):
        assert isinstance(read_config(folder), dict)
