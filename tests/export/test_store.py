"""The store: an entry is there whole or not at all; damage is found and made good; a full disk leaves nothing."""

import errno
import shutil

import pytest

from palimpsest.core.errors import Unavailable
from palimpsest.export.store import META, PROGRAM, TEMPLATE, Store

KEY = "a" * 64


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "made.so"
    path.write_bytes(b"native code" * 100)
    return path


def test_published_entry_is_found(tmp_path, source) -> None:
    store = Store(tmp_path / "store")
    assert store.get(KEY) is None
    store.publish(KEY, source, b"{}", {"scratch_bytes": 7})
    found = store.get(KEY)
    assert found is not None
    assert found.program.read_bytes() == source.read_bytes()
    assert found.meta["scratch_bytes"] == 7
    assert list(store.templates().values()) == [found.template]


@pytest.mark.parametrize("name", [PROGRAM, TEMPLATE, META])
def test_damaged_entry_is_set_aside(tmp_path, source, name) -> None:
    store = Store(tmp_path / "store")
    entry = store.publish(KEY, source, b"{}", {})
    path = entry.folder / name
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    assert store.get(KEY) is None
    assert not entry.folder.exists()
    assert store.publish(KEY, source, b"{}", {}).program.exists()


def test_second_publisher_keeps_the_first(tmp_path, source) -> None:
    store = Store(tmp_path / "store")
    first = store.publish(KEY, source, b"{}", {"by": "first"})
    assert store.publish(KEY, source, b"{}", {"by": "second"}).meta["by"] == "first"
    assert first.program.exists()
    assert [p.name for p in store.root.iterdir()] == [KEY]


def test_full_disk_leaves_nothing(tmp_path, source, monkeypatch) -> None:
    store = Store(tmp_path / "store")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(Unavailable, match=r"No space left.*free space"):
        store.publish(KEY, source, b"{}", {})
    assert list(store.root.iterdir()) == []
    assert store.get(KEY) is None


def test_leftovers_of_a_killed_publisher_are_not_entries(tmp_path, source) -> None:
    store = Store(tmp_path / "store")
    half = store.root / ".new-0123"
    half.mkdir()
    (half / PROGRAM).write_bytes(b"half")
    (store.root / KEY).mkdir()
    assert store.get(KEY) is None
    assert store.publish(KEY, source, b"{}", {}).program.exists()
