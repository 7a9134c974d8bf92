"""Seeded mutations of valid files: bytes, JSON tokens, and whole JSON trees. Standard library only, fast, reproducible.

The same seed gives the same inputs on every machine: only ``random.Random`` decides.
"""

import copy
import json
import random
from typing import Any

#: JSON texts that readers have stumbled over, put where a value was
TOKENS = [
    b"0",
    b"-1",
    b"1",
    b"null",
    b"true",
    b"false",
    b"[]",
    b"{}",
    b'""',
    b"1e999",
    b"-0.0",
    b"NaN",
    b"Infinity",
    b"1.5",
    b"9007199254740993",
    b"18446744073709551616",
    b"9" * 400,
    b"9" * 5000,
    b"-" + b"9" * 30,
    b'"\\ud800"',
    b'"\\u0000"',
    b'"../../etc/passwd"',
    b'"' + b"a" * 600 + b'"',
    b"[" * 40 + b"]" * 40,
    b"[" * 3000,
    b'{"a":' * 40 + b"1" + b"}" * 40,
    b'{"__metadata__":{}}',
    b"[[[[0]]]]",
    b'"1"',
    b"[1,2]",
    b"[-1,0]",
    b'"\xff"',
    b"\xef\xbb\xbf",
    b"/**/",
    b"'x'",
    b"0x10",
    b"01",
    b"+1",
    b"1_000",
    b'"\\x"',
]
#: values put into parsed trees
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    64,
    255,
    1 << 31,
    1 << 53,
    (1 << 62) - 1,
    1 << 64,
    10**40,
    -(10**12),
    0.5,
    -0.0,
    "",
    "x",
    "\ud800",
    "a\nb",
    "\0",
    "9" * 300,
    "nan",
    "0x1.0p+1",
    "F32",
    "F8_E4M3",
    "full",
    "rank",
    "PASS",
    [],
    {},
    [[]],
    [0],
    ["x"],
    {"": None},
    {"a": {"b": []}},
    [None, "x", 1, []],
]


def mutated(rng: random.Random, seed: bytes, other: bytes) -> bytes:
    """One to four byte-level edits of ``seed``; ``other`` is what a splice takes its second half from."""
    data = bytearray(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _edit(rng, data, other)
    return bytes(data)


def _edit(rng: random.Random, data: bytearray, other: bytes) -> None:
    size = len(data)
    at = rng.randrange(size + 1)
    kind = rng.randrange(9)
    if kind == 0 and size:
        data[at % size] ^= 1 << rng.randrange(8)
    elif kind == 1 and size:
        data[at % size] = rng.randrange(256)
    elif kind == 2:
        del data[at : at + rng.choice((1, 2, 4, 16, 64, size))]
    elif kind == 3:
        data[at:at] = rng.randbytes(rng.choice((1, 2, 8, 32)))
    elif kind == 4:
        length = rng.choice((1, 4, 16, 64))
        data[at:at] = data[at : at + length] * rng.choice((1, 2, 50))
    elif kind == 5:
        data[at:] = other[rng.randrange(len(other) + 1) :]
    else:
        _token(rng, data, at)


def _token(rng: random.Random, data: bytearray, at: int) -> None:
    """Replace the number, word or string around ``at`` by a token."""
    edges = b',:[]{}" \n'
    start = end = min(at, len(data))
    while start > 0 and data[start - 1] not in edges and end - start < 64:
        start -= 1
    while end < len(data) and data[end] not in edges and end - start < 128:
        end += 1
    data[start:end] = rng.choice(TOKENS)


def retreed(rng: random.Random, tree: Any) -> Any:
    """A copy of a JSON tree with one to three values replaced, dropped, doubled, renamed or exchanged."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 2, 3))):
        spot = _spot(rng, tree)
        if spot is None:
            return rng.choice(VALUES)
        _change(rng, tree, *spot)
    return tree


def _spot(rng: random.Random, tree: Any) -> tuple[Any, Any] | None:
    """(container, key), by a random walk that stops early now and then."""
    found = None
    while isinstance(tree, dict | list) and tree:
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        found = (tree, key)
        if rng.random() < 0.12:
            break
        tree = tree[key]
    return found


def _change(rng: random.Random, tree: Any, node: Any, key: Any) -> None:
    kind = rng.randrange(7)
    value = node[key]
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[rng.choice(("", "x", str(key) + "x", "\ud800", "__metadata__", "C01"))] = node.pop(key)
    elif kind == 1:
        node.insert(key, copy.deepcopy(value))
    elif kind == 2 and type(value) is int:
        node[key] = rng.choice((value + 1, value - 1, -value, value * 2, value + 64, value << 40, value << 4000))
    elif kind == 3:
        other = _spot(rng, tree)
        node[key] = copy.deepcopy(other[0][other[1]]) if other else None
    elif kind == 4 and isinstance(value, str):
        node[key] = rng.choice((value[:-1], value + "0", value.upper(), value * 2, value[::-1]))
    else:
        node[key] = copy.deepcopy(rng.choice(VALUES))


def text_of(tree: Any) -> bytes:
    """Compact JSON, surrogates escaped, numbers of any length."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
