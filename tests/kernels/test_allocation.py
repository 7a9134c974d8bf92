"""No implementation of the portable engine allocates tensor memory, and numpy's temporaries stay at object size."""

import tracemalloc
from importlib import import_module

import pytest
import torch
from bare_ranks import Rank, WireComm, Wires, make_call
from micro import FORMATS, TOKENS, geometry, hidden_rows, load, program, weights
from torch.profiler import ProfilerActivity, profile

from palimpsest.kernels import table
from palimpsest.kernels.call import Chunk
from palimpsest.kernels.hostile import Case

#: Python objects of one call (views, slices, small ints); far below one row tile of any operand a real model has
OBJECTS = 24 << 10


def tensor_bytes(body) -> list[int]:
    """Sizes of torch allocations while ``body`` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        body()
    return [e.nbytes() for e in watched.profiler.kineto_results.events() if e.name() == "[memory]" and e.nbytes() > 0]


def python_peak(body) -> int:
    """Peak of traced memory (Python objects and numpy data) above the start."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        body()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_the_detectors_detect():
    assert tensor_bytes(lambda: torch.empty(1000)) == [4000]
    assert tensor_bytes(lambda: torch.zeros(4).add_(1)) != []
    assert python_peak(lambda: torch.zeros(100).numpy().repeat(1000)) >= 400_000


@pytest.mark.parametrize("formats", FORMATS)
def test_a_layer_allocates_nothing_after_warm_up(formats):
    g = geometry(latent=128 if formats == "fp8_ds_mla" else 16)
    rank = Rank(program(g, FORMATS[formats], 1), WireComm(Wires(1), 0), "portable")
    load(rank, g, weights(g))
    hidden = hidden_rows().to(rank.view("hidden").dtype)
    for history, rows in ((0, 16), (16, 16), (32, 5), (37, 0), (TOKENS - 1, 1)):
        chunk = Chunk(history, rows, hidden[history : history + rows])
        for run, call in rank.steps:
            run(call, chunk)
        for run, call in rank.steps:
            assert tensor_bytes(lambda run=run, call=call, chunk=chunk: run(call, chunk)) == [], (
                f"{call.name}, {rows} rows at {history}"
            )
            assert python_peak(lambda run=run, call=call, chunk=chunk: run(call, chunk)) < OBJECTS, f"{call.name}, {rows} rows"


SINGLE = [
    (op, case)
    for op in (
        "index_select",
        "sparse_attend",
        "append_latent",
        "append_index",
        "index_query",
        "project_output",
        "attention_query",
    )
    for case in import_module(f"palimpsest.kernels.{op}.cases").cases()
    if case.ranks == 1
]


@pytest.mark.parametrize(("op", "case"), SINGLE, ids=[f"{op}: {case.name}" for op, case in SINGLE])
def test_hostile_values_allocate_nothing(op, case: Case):
    """NaN and ties take the same path as ordinary values."""
    call, run = make_call(op, case.params, case.planes[0], WireComm(Wires(1), 0)), table.implementation(op, "portable")
    run(call, case.chunk)
    assert tensor_bytes(lambda: run(call, case.chunk)) == []


def test_numpy_stays_small_in_attention_at_a_real_width():
    """6 heads over 1500 and 2048 of 3000 records of 512 + 64."""
    params = {
        "topk": 2048, "heads": 6, "kv_lora": 512, "rope_dims": 64, "format": "fp8", "latent_scale": 0.5, "softmax_scale": 0.07,
    }  # fmt: skip
    planes = {
        "ids": {"ids": torch.arange(2048, dtype=torch.int32).repeat(2, 1)},
        "counts": {"counts": torch.tensor([1500, 2048], dtype=torch.int32)},
        "latent_history": {"latent_history": torch.randint(0, 120, (3000, 576), dtype=torch.uint8)},
        "query": {"query": torch.randn(2, 6, 576).bfloat16()},
        "context": {"context": torch.zeros(2, 6, 512)},
    }
    call, run = (
        make_call("sparse_attend", params, planes, WireComm(Wires(1), 0)),
        table.implementation("sparse_attend", "portable"),
    )
    run(call, Chunk(2998, 2))
    assert tensor_bytes(lambda: run(call, Chunk(2998, 2))) == []
    assert python_peak(lambda: run(call, Chunk(2998, 2))) < OBJECTS


def test_numpy_stays_small_in_selection_at_a_real_width():
    """Index tiles of a real model: 32 heads of 128, 2048 of 5000 keys."""
    keys, rows = 5000, 2
    params = {"topk": 2048, "heads": 32, "dim": 128, "format": "fp8", "ranks": 1}
    codes = torch.randint(0, 120, (keys, 128), dtype=torch.uint8).view(torch.float8_e4m3fn)
    query = torch.randint(0, 120, (rows, 32, 128), dtype=torch.uint8).view(torch.float8_e4m3fn)
    planes = {
        "index_history": {"keys": codes, "scales": torch.ones(keys)},
        "index_query": {"index_query": query},
        "head_weights": {"head_weights": torch.randn(rows, 32)},
        "local_ids": {"local_ids": torch.zeros(rows, 2048, dtype=torch.int32)},
        "local_counts": {"counts": torch.zeros(rows, dtype=torch.int32), "nans": torch.zeros(rows, dtype=torch.int32)},
    }
    call, run = make_call("index_select", params, planes, WireComm(Wires(1), 0)), table.implementation("index_select", "portable")
    chunk = Chunk(keys - rows, rows)
    run(call, chunk)
    assert tensor_bytes(lambda: run(call, chunk)) == []
    assert python_peak(lambda: run(call, chunk)) < OBJECTS
