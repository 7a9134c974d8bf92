"""The engines as a whole: detection before any compilation, refusals that name what there is, projections, and layers that keep
their bits."""

import os
import subprocess
import sys

import pytest
import torch
from bare_ranks import Rank, aligned, on_ranks
from engines import COMPILED, SELECTING, same_bits

from palimpsest.core.errors import BadConfig, Unavailable, UnknownName
from palimpsest.core.geometry import Formats, Geometry, Indexer, Rope
from palimpsest.core.spec import Limits
from palimpsest.kernels import detect, sizes, table
from palimpsest.kernels.call import Chunk, Scratch
from palimpsest.recipes.blocks import layer_program

AMX = [name for name in COMPILED if name == "amx"]
MASKED = """
from palimpsest.core.errors import Unavailable
from palimpsest.kernels import detect, table
print(",".join(detect.available_engines()), detect.choose_engine())
for name in ("amx", "amx-union", "avx512"):
    try:
        table.implementation("index_select", name)
    except Unavailable as error:
        print(error)
from engines import Index
problem = Index(2, 300, heads=4, dim=32, topk=20)
print([t.tolist() for t in problem.select("avx", 298)] == [t.tolist() for t in problem.select("portable", 298)])
"""


@pytest.mark.parametrize("features", ["+avx2,+fma", "+avx512f,+avx512bw", ""])
def test_without_amx_nothing_aborts_and_the_refusal_says_what_there_is(features):
    """The compile target is masked in a process of its own: LLVM would end it if an AMX instruction were compiled."""
    here = os.path.dirname(__file__)
    known = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA")}
    path = os.pathsep.join([os.path.dirname(os.path.dirname(here)), here])
    done = subprocess.run(
        [sys.executable, "-c", MASKED], env=known | {"PYTHONPATH": path, "NUMBA_CPU_FEATURES": features, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "avx,portable avx"
    assert len(lines) == 5
    assert lines[4] == "True"
    for line, instructions in zip(lines[1:4], ("amx-bf16", "amx-bf16", "avx512bf16"), strict=True):
        assert "the compile target lacks" in line
        assert instructions in line
        assert "portable (torch and numpy)" in line


def test_the_best_engine_is_chosen_and_unknown_ones_are_named():
    assert detect.choose_engine() == next(iter(detect.available_engines()))
    assert detect.choose_engine("portable") == "portable"
    with pytest.raises(UnknownName, match="unknown engine 'cuda'; known: amx, avx, avx512, portable"):
        detect.choose_engine("cuda")


def test_a_kernel_that_refuses_tiles_is_believed(monkeypatch):
    monkeypatch.setattr(detect, "request_tiles", lambda: "the kernel refuses AMX tile data (errno 95)")
    monkeypatch.setattr(detect, "target_features", lambda: frozenset(detect.AMX_FEATURES))
    with pytest.raises(Unavailable, match=r"engine amx does not run here: the kernel refuses.*This machine has avx.*portable"):
        detect.choose_engine("amx")


def test_without_numba_only_portable_is_offered(monkeypatch):
    monkeypatch.setattr(detect, "find_spec", lambda name: None)
    assert list(detect.available_engines()) == ["portable"]
    with pytest.raises(Unavailable, match=r"numba is not installed: pip install palimpsest\[cpu\]"):
        detect.choose_engine("avx")


def test_every_engine_names_files_that_exist():
    for engine in table.ENGINES.values():
        for op in table.OPS:
            folder = table.OPS[op].rsplit(".", 1)[1]
            assert os.path.exists(os.path.join(os.path.dirname(table.__file__), folder, f"{engine.file_of(op)}.py"))
    assert len({e.arithmetic for e in table.ENGINES.values()}) == len(table.ENGINES)


@pytest.mark.parametrize("engine", COMPILED)
def test_compiling_reports_progress(engine):
    seen = []
    table.compile_engine(engine, lambda done, total, what: seen.append((done, total, what)))
    assert [done for done, _, _ in seen] == list(range(seen[0][1] + 1))
    assert all(what.endswith(f"for {engine}") for _, _, what in seen[:-1])


def test_an_install_that_cannot_be_written_compiles_without_a_cache(monkeypatch):
    pytest.importorskip("numba")
    from palimpsest.kernels import jit

    def nowhere(function):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(jit, "_StampedCache", nowhere)
    assert jit.kernel("i8", returns="i8")(lambda x: x + 1)(4) == 5


def geometry(rope: str = "interleaved") -> Geometry:
    dims = 32
    rotated = rope != "none"
    indexer = Indexer(heads=4, dim=32, topk=24, rope_layout="half" if rotated else "none", rope_dims=16 if rotated else 0,
                      norm_eps=1e-6, hadamard=True)  # fmt: skip
    return Geometry(
        family="test", name="m1", hidden=64, layers=1, heads=8, q_lora=32, kv_lora=128, nope=32, rope=Rope(rope, dims), v_dim=32,
        softmax_scale=0.2, latent_norm_eps=1e-6, output_gate=True, indexer=indexer, schedule=("full",), max_context=256,
    )  # fmt: skip


def prefill(engine, formats, ranks, chunks, *, threads=1):
    """Outputs, ids and counts of a whole layer over ``chunks``; every rank must agree."""
    g = geometry()
    program = layer_program(g, Limits(256, 64, ranks, 16), formats, 0, engine=engine, threads=threads)
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(sum(chunks), g.hidden, generator=generator)
    whole = {b.name: torch.randn(_whole(b, g, ranks), generator=generator) for b in program.buffers if b.kind == "weights"}

    def body(comm):
        rank, at, parts = Rank(program, comm, engine, fill=0x7F), 0, []
        for name, value in whole.items():
            _load(rank, name, value / value.shape[-1] ** 0.5, g)
        rank.view("inv_freq").copy_(torch.logspace(0, -3, 16))
        for rows in chunks:
            output = rank.run(Chunk(at, rows, hidden[at : at + rows]))
            parts.append((output, rank.view("ids")[:rows].clone(), rank.view("counts")[:rows].clone()))
            at += rows
        return [torch.cat(p) for p in zip(*parts, strict=True)]

    found = on_ranks(ranks, body)
    for other in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(found[0], other, strict=True)), "ranks disagree"
    return found[0]


def _whole(buffer, g, ranks):
    shape = list(buffer.planes[0].shape)
    if buffer.name in ("w.q_b", "w.uk", "w.uv", "w.gate"):
        shape[0] *= ranks
    if buffer.name == "w.o":
        shape[1] *= ranks
    return shape


def _load(rank, name, value, g):
    size, target = rank.comm.size, rank.view(name)
    if name in ("w.q_b", "w.uk", "w.uv", "w.gate"):
        value = value.view(size, -1)[rank.comm.rank]
    elif name == "w.o":
        value = value.view(g.hidden, size, -1)[:, rank.comm.rank]
    target.copy_(value.reshape(target.shape))


LATENTS = ("fp8", "bf16", "fp8_ds_mla")


@pytest.mark.parametrize("engine", SELECTING, indirect=True)
@pytest.mark.parametrize("latent", LATENTS)
def test_a_layer_keeps_its_bits_over_chunks_threads_and_ranks(engine, latent):
    formats = Formats(latent=latent)
    base = prefill(engine, formats, 1, (64, 64, 33))
    assert base[0].isfinite().all()
    for ranks, chunks, threads in (
        (1, (1, 63, 64, 33), 2),
        (2, (64, 64, 33), 1),
        (4, (17, 0, 40, 64, 40), 3),
        (8, (64, 64, 33), 1),
    ):
        found = prefill(engine, formats, ranks, chunks, threads=threads)
        assert all(same_bits(a, b) for a, b in zip(base, found, strict=True)), (
            f"{ranks} ranks, chunks {chunks}, {threads} threads"
        )


@pytest.mark.parametrize("engine", SELECTING, indirect=True)
def test_fp32_formats_are_the_portable_engines(engine):
    """No compiled kernel takes them, and the table's fallback must then be complete."""
    formats = Formats(index="fp32", latent="fp32", activation="fp32", weights="fp32")
    base, found = prefill("portable", formats, 1, (64, 20)), prefill(engine, formats, 1, (64, 20), threads=2)
    assert all(same_bits(a, b) for a, b in zip(base, found, strict=True))


def test_a_plan_for_one_engine_does_not_run_on_another():
    program = layer_program(geometry(), Limits(256, 64, 1, 16), Formats(), 0, engine=COMPILED[0] if COMPILED else "avx")
    with pytest.raises(BadConfig, match="would run on portable; plan it again for portable"):
        table.prepare_engine("portable", program)


def test_scratch_is_planned_per_thread_and_portable_needs_one():
    def scratch(engine, threads):
        program = layer_program(geometry(), Limits(256, 64, 1, 16), Formats(), 0, engine=engine, threads=threads)
        return {step.name: step.scratch for step in program.steps}

    for engine in ("amx", "avx", "avx512"):
        assert scratch(engine, 3)["index_select"] == 3 * scratch(engine, 1)["index_select"]
    for engine in ("amx", "avx512"):
        assert scratch(engine, 2)["sparse_attend"] == 2 * scratch(engine, 1)["sparse_attend"]
    assert scratch("portable", 1) == scratch("portable", 4)


@pytest.mark.parametrize("engine", AMX)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("depth", "columns"), [(32, 1), (64, 45), (512, 128), (7168, 33), (1536, 192)])
def test_projections_are_close_and_rows_keep_their_bits(engine, dtype, depth, columns):
    table.compile_engine(engine)
    from palimpsest.kernels.amx_linear import AmxProjection

    generator = torch.Generator().manual_seed(depth + columns)
    weight = torch.randn(columns, depth, generator=generator).bfloat16()
    rows = torch.randn(32, depth, generator=generator).to(dtype)
    scratch = Scratch(aligned(sizes.amx_linear_scratch(depth, columns, resident=True), 0x7F))
    projection = AmxProjection(scratch, depth, columns, resident=True)
    out = torch.full((32, columns), torch.nan)
    projection.project(rows, weight, out)
    exact, mass = rows.double() @ weight.double().t(), rows.double().abs() @ weight.double().abs().t()
    # a term meets at most the additions of its chain (16), the pair and the total, twice those when the input is split; 2^-16
    # is the split
    relative = (1 + 2.0**-24) ** (2 * (depth // 32) + 18) - 1 + (2.0**-16 if dtype == torch.float32 else 0.0)
    assert ((out.double() - exact).abs() <= relative * mass + 2.0**-126).all()
    for first, end in ((0, 1), (3, 20), (31, 32)):
        part = torch.full((32, columns), torch.nan)
        projection.project(rows[first:end], weight, part)
        assert same_bits(part[: end - first], out[first:end])
        assert (part[end - first :] == 0).all()
    turned = torch.full((32, columns), torch.nan)
    projection.load(weight.t().contiguous().t())
    projection.apply(rows, turned)
    assert same_bits(turned, out)
