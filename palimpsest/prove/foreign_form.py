"""Wrap a foreign kernel as an implementation of its op: plain functions of tensors, taps cut off, bytes compared with the
engine's.

An implementation made here runs in the same step, on the same planned bytes, as the one it replaces.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from palimpsest.core.errors import BadConfig
from palimpsest.kernels.call import Call, Chunk, Implementation, Scratch, no_tap
from palimpsest.kernels.table import contract
from palimpsest.prove.foreign import RULES, Foreign

#: the event under which a compared step reports
TWIN = "twin"


def implementation(foreign: Foreign, engine: Implementation) -> Implementation:
    """``run(call, chunk)`` of a foreign kernel; ``engine`` is the implementation it replaces."""
    run: Implementation = _PLAIN[foreign.op](foreign) if foreign.form == "plain" else _silent(foreign)
    return Compared(foreign.op, run, engine) if "B1" in RULES[foreign.op].extra else run


def _silent(foreign: Foreign) -> Implementation:
    def run(call: Call, chunk: Chunk) -> None:
        foreign.function(replace(call, tap=no_tap), chunk)

    return run


@dataclass(frozen=True)
class _Select:
    """index_select from ``f(keys, scales, query, weights, visible, topk) -> ids``."""

    foreign: Foreign

    def __call__(self, call: Call, chunk: Chunk) -> None:
        with _disable_current_modes():
            self._run(call, chunk)

    def _run(self, call: Call, chunk: Chunk) -> None:
        out, topk = call.view("local_ids"), int(call.params["topk"])
        first = min(call.comm.rank * out.shape[0], chunk.rows)
        n = min(out.shape[0], chunk.rows - first)
        if not n:
            return
        seen = chunk.history + first + n
        stored = call.params["format"] == "fp8"
        scales = call.view("index_history", "scales")[:seen] if stored else torch.ones(seen)
        visible = torch.arange(chunk.history + first + 1, seen + 1)
        keys, query, weights = (
            call.view("index_history", "keys")[:seen],
            call.view("index_query")[:n],
            call.view("head_weights")[:n],
        )
        given = self.foreign.function(keys, scales, query, weights, visible, topk)
        ids = _ids(given, n, topk, self.foreign)
        out[:n] = torch.from_numpy(ids)
        call.view("local_counts", "counts")[:n] = torch.from_numpy(np.count_nonzero(ids != -1, axis=1).astype(np.int32))
        call.view("local_counts", "nans")[:n] = 0


def _ids(given: Any, rows: int, topk: int, foreign: Foreign) -> np.ndarray:
    """What a plain selector returned as int32 [rows, topk], ascending with -1 last; ids are otherwise left as they are, right
    or wrong.
    """
    array = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
    if array.ndim != 2 or len(array) != rows or array.shape[1] > topk or array.dtype.kind not in "iu":
        raise BadConfig(
            f"{foreign.name} returned {list(array.shape)} {array.dtype}; integers [{rows}, at most {topk}] are wanted"
        )
    wide = np.full((rows, topk), -1, np.int64)
    wide[:, : array.shape[1]] = np.clip(array.astype(np.int64), -(1 << 31), (1 << 31) - 1)
    last = np.where(wide == -1, np.iinfo(np.int64).max, wide)
    last.sort(axis=1)
    return np.where(last == np.iinfo(np.int64).max, -1, last).astype(np.int32)


@dataclass(frozen=True)
class _Attend:
    """sparse_attend from ``f(query, records, ids, counts, scale) -> context``."""

    foreign: Foreign

    def __call__(self, call: Call, chunk: Chunk) -> None:
        with _disable_current_modes():
            self._run(call, chunk)

    def _run(self, call: Call, chunk: Chunk) -> None:
        if not chunk.rows:
            return
        n, out = chunk.rows, call.view("context")
        ids, counts = call.view("ids")[:n], call.view("counts")[:n]
        used, place = torch.unique(ids, return_inverse=True)
        pads = int((used < 0).sum())
        records = decode(call.view("latent_history")[used[pads:].long()], call.params)
        local = (place.to(torch.int32) - pads).clamp(min=-1)
        given = self.foreign.function(call.view("query")[:n], records, local, counts, float(call.params["softmax_scale"]))
        wanted = [n, *out.shape[1:]]
        if not isinstance(given, torch.Tensor) or list(given.shape) != wanted:
            shown = list(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
            raise BadConfig(f"{self.foreign.name} returned {shown}; a tensor {wanted} is wanted")
        out[:n] = given.to(out.dtype)


def decode(raw: torch.Tensor, params: Mapping[str, Any]) -> torch.Tensor:
    """Latent records u8 [n, bytes] as fp32 [n, kv_lora + rope dims], the values the bytes stand for."""
    kind, latent, n = params["format"], int(params["kv_lora"]), len(raw)
    if kind == "fp8":
        return raw.view(torch.float8_e4m3fn).float() * float(params["latent_scale"])
    if kind == "fp8_ds_mla":
        end = latent + 4 * (latent // 128)
        scales = raw[:, latent:end].contiguous().view(torch.float32)
        values = raw[:, :latent].contiguous().view(torch.float8_e4m3fn).float().view(n, -1, 128) * scales.unsqueeze(2)
        return torch.cat([values.view(n, latent), raw[:, end:].contiguous().view(torch.bfloat16).float()], 1)
    return raw.contiguous().view({"bf16": torch.bfloat16, "fp32": torch.float32}[kind]).float()


_PLAIN: dict[str, Callable[[Foreign], Implementation]] = {"index_select": _Select, "sparse_attend": _Attend}


@dataclass(frozen=True)
class Compared:
    """Runs the foreign kernel on the planned bytes, then the engine's on private copies, and reports where they differ."""

    op: str
    run: Implementation
    engine: Implementation

    def __call__(self, call: Call, chunk: Chunk) -> None:
        if not call.watched:  # the warm replay and the recorded tail
            self.run(call, chunk)
            return
        roles = [o.role for o in contract(self.op).operands if o.access != "read" and o.role in call.raws]
        with _disable_current_modes():
            private = {role: call.raws[role].clone() for role in roles}
            scratch = torch.empty_like(call.scratch.raw)
        self.run(call, chunk)
        with _disable_current_modes():
            views = {
                role: _moved(call, role, private[role]) if role in private else planes for role, planes in call.views.items()
            }
            self.engine(replace(call, views=views, raws={**call.raws, **private}, scratch=Scratch(scratch), tap=no_tap), chunk)
            bad = [role for role in roles if not torch.equal(private[role], call.raws[role])]
            first = int(torch.nonzero(private[bad[0]] != call.raws[bad[0]])[0]) if bad else 0
            said = (
                f"byte {first} of {bad[0]} is {int(call.raws[bad[0]][first])}, the engine writes {int(private[bad[0]][first])}"
                if bad
                else ""
            )
            call.tap(TWIN, bad=said, nbytes=sum(raw.numel() for raw in private.values()))


def _moved(call: Call, role: str, raw: torch.Tensor) -> dict[str, torch.Tensor]:
    """The planes of a role as views of private bytes."""
    start, made = call.raws[role].data_ptr(), {}
    for name, plane in call.views[role].items():
        at = plane.data_ptr() - start
        made[name] = raw[at : at + plane.numel() * plane.element_size()].view(plane.dtype).view(plane.shape)
    return made
