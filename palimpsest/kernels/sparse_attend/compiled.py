"""sparse_attend: what the ``amx`` and ``avx512`` engines do alike around their kernels. Compiles nothing."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from palimpsest.kernels import sizes
from palimpsest.kernels.call import Call, Chunk, Scratch
from palimpsest.kernels.sparse_attend.avx512_records import BF16, DS_MLA, FP8, Form
from palimpsest.kernels.workers import each

KINDS = {"fp8": FP8, "fp8_ds_mla": DS_MLA, "bf16": BF16}


def halves(scratch: Scratch, *shape: int) -> np.ndarray:
    """Scratch of 16-bit words."""
    return scratch.take((*shape[:-1], 2 * shape[-1]), "u8").numpy().view(np.uint16)


class Operands:
    """The arrays and numbers of one call, as the kernels take them. ``attend``: ``attend_rows`` of the engine's kernel;
    ``lanes``: of one row in a union."""

    def __init__(self, call: Call, attend: Callable[..., None], lanes: int = 0):
        p, self._attend = call.params, attend
        stored = p["latent_scale"] if p["format"] == "fp8" else 1.0
        scale = p["softmax_scale"] * stored * math.log2(math.e)
        self.form = Form(KINDS[p["format"]], p["kv_lora"], p["rope_dims"], scale, stored, lanes)
        self.history, self.context = call.view("latent_history").numpy(), call.view("context").numpy()
        self.query = call.view("query").view(torch.int16).numpy().view(np.uint16)
        self.ids, self.counts = call.view("ids").numpy(), call.view("counts").numpy()

    def rows(self, work: tuple[Any, ...], rows: slice) -> None:
        """Attend ``rows`` one after the other."""
        self._attend(self.history, self.ids[rows], self.counts[rows], self.query[rows], self.context[rows], self.form, work)


def takes(call: Call) -> bool:
    """Whether the compiled engines have kernels for the call's records and queries."""
    query = "bf16" if call.view("query").dtype == torch.bfloat16 else "fp32"
    return sizes.amx_attends(call.params["format"], query)


def checked_counts(call: Call, chunk: Chunk) -> None:
    counts, topk = call.view("counts")[: chunk.rows].numpy(), call.params["topk"]
    assert not chunk.rows or (counts.min() >= 0 and counts.max() <= topk), f"{call.name}: a row's count is not within 0..{topk}"


def attend_groups(call: Call, chunk: Chunk, carve: Callable[..., Any], attend: Callable[..., None]) -> None:
    """All rows of a call on its threads, ATTEND_ROWS at a time; ``carve`` makes a thread's scratch, ``attend`` is the kernel."""
    checked_counts(call, chunk)
    p, operands = call.params, Operands(call, attend)
    call.scratch.reset()
    works = [carve(call.scratch, p["topk"], p["heads"], p["kv_lora"], p["rope_dims"]) for _ in range(p.get("threads", 1))]
    groups = [slice(first, min(first + sizes.ATTEND_ROWS, chunk.rows)) for first in range(0, chunk.rows, sizes.ATTEND_ROWS)]
    each(groups, len(works), lambda thread, rows: operands.rows(works[thread], rows))
