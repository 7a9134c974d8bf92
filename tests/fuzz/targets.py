"""What is fuzzed: every reader of a file from strangers, as a function of bytes. Standard library and the readers only."""

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palimpsest.checkpoint import config as config_file
from palimpsest.checkpoint.header import read_header
from palimpsest.checkpoint.index import parse_index
from palimpsest.checkpoint.strict import strict_json
from palimpsest.core.canon import canonical
from palimpsest.core.errors import BadConfig
from palimpsest.core.spec import Buffer, Limits, Plane, Program, Step
from palimpsest.plan.check import check
from palimpsest.plan.file import plan_text
from palimpsest.plan.place import place
from palimpsest.plan.plan import Plan
from palimpsest.plan.verify import verify_plan_file
from palimpsest.prove import schema
from palimpsest.prove import verify as evidence
from palimpsest.prove.verify_layout import check_layout
from palimpsest.prove.verify_ties import check_certificates
from palimpsest.recipes import default_formats, geometry_from_config
from palimpsest.recipes import program as layer_program
from palimpsest.recipes.table import preset_folder


@dataclass(frozen=True)
class Target:
    """seeds: valid inputs; read: what must refuse politely; share: part of the inputs; json: also mutate the parsed tree"""

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]
    share: float
    json: bool = True


def shard(tensors: dict[str, tuple[str, list[int], int]], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file of zeros: name -> (dtype, shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata is not None else {}
    at = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(at)


SHARDS = (
    shard({"x": ("F32", [2, 3], 24), "y": ("BF16", [5], 10)}, {"format": "pt"}),
    shard({f"model.layers.{i}.self_attn.indexer.wk.weight": ("F8_E4M3", [4, 2], 8) for i in range(4)}),
    shard({"empty": ("I64", [0], 0), "scalar": ("F64", [], 8), "deep": ("U8", [1, 1, 1, 2, 1, 1, 1, 1], 2)}),
    shard({}),
)


class Memory:
    """A file without a disk, rewritten for every input."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("fuzz")
        self.path = f"/proc/self/fd/{self.fd}"

    def put(self, data: bytes) -> int:
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, data, 0)
        return self.fd


def read_config(data: bytes) -> object:
    """config.json, as far as a plan goes: text, geometry, program."""
    value = strict_json(data, name="config.json", error=BadConfig, depth=config_file.MAX_DEPTH, floats=True)
    if not isinstance(value, dict):
        raise BadConfig("not an object")
    config_file.remote_code(value)
    geometry = geometry_from_config(value, "fuzz")
    layer = geometry.full_layers[0] if geometry.full_layers else 0
    return layer_program(geometry, Limits(1 << 16, 64, 1), default_formats(geometry), layer)


def toy() -> Program:
    """Two histories, a barrier, an output: the smallest program with an overlap."""

    def buffer(name: str, nbytes: int, kind: str = "reusable") -> Buffer:
        return Buffer(name, kind, (Plane(name, "u8", (nbytes,), ("fixed",)),), str(nbytes))

    sizes = {"index_history": 128, "ids": 64, "latent_history": 640, "output": 64}
    buffers = (buffer("cache", 640, "persistent"), *(buffer(name, size) for name, size in sizes.items()))
    steps = (
        Step("gather_index", "g", "p2", reads=(("c", "cache"),), writes=(("h", "index_history"),)),
        Step("select", "s", "p4", reads=(("h", "index_history"),), writes=(("i", "ids"),), scratch=64),
        Step("barrier", "b", "barrier", scope="all"),
        Step("gather_latent", "g", "p6", reads=(("c", "cache"),), writes=(("h", "latent_history"),)),
        Step("attend", "a", "p7", reads=(("i", "ids"), ("h", "latent_history")), writes=(("o", "output"),)),
    )
    return Program("toy", Limits(64, 16, 2), buffers, steps, histories=("index_history", "latent_history"), outputs=("output",))


def plan_reader() -> tuple[bytes, Callable[[bytes], object]]:
    made = toy()

    def read(data: bytes) -> object:
        plan = Plan.from_json(data.decode("utf-8", "replace"))
        check(made, plan)
        return plan.digest, plan.text(), plan.overlaps, plan.to_json()

    return place(made).to_json().encode(), read


def plan_file_reader() -> tuple[bytes, Callable[[bytes], object]]:
    made, memory = toy(), Memory()

    def read(data: bytes) -> object:
        memory.put(data)
        return verify_plan_file(memory.path).lines()

    return plan_text(made, place(made)).encode(), read


class Evidence:
    """An evidence folder that a forger edits: digests, counts and the manifest always fit what was edited."""

    def __init__(self, folder: Path):
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.record = json.loads(self.files["record.json"])
        self.work = Path(tempfile.mkdtemp(prefix="palimpsest-fuzz-"))

        atexit.register(shutil.rmtree, self.work, ignore_errors=True)

    def whole(self, **changed: bytes) -> object:
        """Verify the folder with some files replaced, as the command does."""
        files = {**self.files, **{name.replace("_", "."): data for name, data in changed.items()}}
        listed = [name for name in files if name != "MANIFEST.sha256"]
        files["MANIFEST.sha256"] = "".join(f"{hashlib.sha256(files[n]).hexdigest()}  {n}\n" for n in sorted(listed)).encode()
        for name, data in files.items():
            (self.work / name).write_bytes(data)
        return evidence.verify(self.work)

    def read_record(self, data: bytes) -> object:
        """The record, in canonical form when it can be."""
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            data = (canonical(json.loads(data)) + "\n").encode()
        return self.whole(record_json=data)

    def read_flags(self, data: bytes) -> object:
        fits = {"sha256": hashlib.sha256(data).hexdigest(), "cells": data.count(b"\n")}
        return self._with(data, "flags_jsonl", flags=self.record["flags"] | fits)

    def read_ties(self, data: bytes) -> object:
        """Certificates, with counts in the record that fit the first of them."""
        return self._with(data, "ties_jsonl", selection=self.record["selection"] | tie_counts(data))

    def read_manifest(self, data: bytes) -> object:
        for name, whole in self.files.items():
            (self.work / name).write_bytes(whole)
        (self.work / "MANIFEST.sha256").write_bytes(data)
        return evidence.verify(self.work)

    def _with(self, data: bytes, name: str, **record: object) -> object:
        text = (canonical(self.record | record) + "\n").encode()
        return self.whole(**{name: data, "record_json": text})


def targets(folder: Path | None, tie: bytes | None) -> list[Target]:
    """All targets; those of evidence only with a valid ``folder`` and one valid line ``tie`` of ties.jsonl."""
    memory = Memory()
    plan, read_plan = plan_reader()
    file, read_file = plan_file_reader()
    configs = tuple(path.read_bytes() for path in sorted(preset_folder().glob("*.json")))
    texts = tuple(s[8 : 8 + int.from_bytes(s[:8], "little")] for s in SHARDS)
    names = {f"model.layers.{i}.x": f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)}
    index = {"metadata": {"total_size": 41}, "weight_map": names}
    found = [
        Target("header", SHARDS, lambda data: read_header(memory.put(data), "x.safetensors"), 36, json=False),
        Target("header text", texts, lambda data: read_header(memory.put(framed(data)), "x.safetensors"), 20),
        Target("index", (json.dumps(index).encode(),), parse_index, 20),
        Target("config", configs, read_config, 14),
        Target("plan", (plan,), read_plan, 8),
        Target("plan file", (file,), read_file, 3),
    ]
    if folder is not None and tie is not None:
        forger = Evidence(folder)
        flags = forger.files["flags.jsonl"]
        few = b"".join(line + b"\n" for line in flags.splitlines()[:12])
        found += [
            Target("flag lines", (few,), lambda data: evidence._lines(data, "flags.jsonl", schema.FLAG), 4, json=False),
            Target("tie lines", (tie,), lambda data: read_ties(data, forger.record), 3),
            Target("record text", (forger.files["record.json"],), read_record_text, 1),
            Target("record", (forger.files["record.json"],), forger.read_record, 0.08),
            Target("flags", (flags,), forger.read_flags, 0.04, json=False),
            Target("ties", (tie,), forger.read_ties, 0.05),
            Target("manifest", (forger.files["MANIFEST.sha256"],), forger.read_manifest, 0.05, json=False),
        ]
    return found


def read_record_text(data: bytes) -> object:
    """The record on its own: text, shape, layout."""
    record = evidence._parse(data, "record.json")
    schema.validate(record, schema.RECORD, "record.json")
    return check_layout(record)


def tie_counts(data: bytes) -> dict[str, int]:
    """What a record would count for the first line of ties.jsonl."""
    try:
        members = [member["class"] for member in json.loads(data.split(b"\n")[0])["certificate"]["members"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        members = []
    found = {"exact_tie": members.count("exact_tie"), "rounded_tie": members.count("rounded_tie")}
    return {"rows_changed": 1, "rows_reordered": 0, **found}


def read_ties(data: bytes, record: dict[str, Any]) -> object:
    """Certificates against the one cell they may belong to."""
    cells = {("C03", 0, "K4"): {"verdict": "PASS"}}
    fits = record | {"selection": record["selection"] | tie_counts(data)}
    return check_certificates(evidence._lines(data, "ties.jsonl", None), fits, cells)


def framed(text: bytes) -> bytes:
    """A safetensors file with this header and as many bytes of data as its largest offset says, within reason."""
    try:
        entries = json.loads(text)
        end = max((e["data_offsets"][1] for e in entries.values() if isinstance(e, dict) and "data_offsets" in e), default=0)
        end = end if type(end) is int and 0 <= end <= 1 << 16 else 0
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        end = 0
    return len(text).to_bytes(8, "little") + text + bytes(end)
