"""sparse_attend of the avx512 engine: equal to its emulation bit for bit, whatever the target decodes with, and refused where
the machine lacks the instruction or rounds otherwise."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from engines import COMPILED, Attention

from palimpsest.core.errors import Unavailable
from palimpsest.kernels import detect, emulate, sizes, table
from palimpsest.prove.bounds import AVX512_1
from palimpsest.prove.oracle import LatentFormat, attend, check_context

pytestmark = pytest.mark.skipif("avx512" not in COMPILED, reason="the compile target lacks VDPBF16PS")
FORMATS = ("fp8", "bf16", "fp8_ds_mla")
EDGES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 130, 257)


def records(problem: Attention, row: int) -> np.ndarray:
    """The row's records [n, dim] in the order of its ids, as the bf16 values the arithmetic starts from."""
    raw, latent = problem.history[problem.ids[row, : int(problem.count[row])].long()], problem.kv_lora
    if problem.fmt == "fp8":
        return raw.view(torch.float8_e4m3fn).float().numpy()
    if problem.fmt == "bf16":
        return raw.view(torch.bfloat16).float().numpy()
    codes = raw[:, :latent].contiguous().view(torch.float8_e4m3fn).float()
    scales = raw[:, latent : latent + latent // 32].contiguous().view(torch.float32).repeat_interleave(128, 1)
    rope = raw[:, latent + latent // 32 :].contiguous().view(torch.bfloat16).float()
    return np.concatenate([emulate.to_bf16((codes * scales).numpy()), rope.numpy()], 1)


def assert_emulated(problem: Attention, rows: range | None = None) -> None:
    found, stored = problem.attend("avx512").numpy(), problem.latent_scale if problem.fmt == "fp8" else 1.0
    scale = problem.scale * stored * math.log2(math.e)
    for row in rows or range(problem.rows):
        query = problem.query[row].float().numpy()
        expected = emulate.avx512_attend(query, records(problem, row), problem.kv_lora, scale, stored)
        lost = np.isnan(expected)
        assert np.array_equal(np.isnan(found[row]), lost), f"row {row}"
        wrong = (found[row].view(np.int32) != expected.view(np.int32)) & ~lost
        assert not wrong.any(), f"row {row} of {int(problem.count[row])} ids: {wrong.sum()} of {wrong.size} differ"


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 8, 9, 16, 17, 24])
def test_any_number_of_heads_and_ids_has_the_bits_of_the_emulation(fmt, heads):
    assert_emulated(Attention(len(EDGES), 700, heads, fmt, 128, 22, topk=257, counts=EDGES, seed=heads, latent_scale=0.37))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("heads", [96, 128])
def test_many_heads_have_the_bits_of_the_emulation(fmt, heads):
    assert_emulated(Attention(3, 300, heads, fmt, 128, 8, topk=131, counts=(131, 128, 16)))


@pytest.mark.parametrize(("heads", "fmt"), [(8, "fp8"), (6, "fp8_ds_mla"), (16, "bf16")])
def test_rows_of_full_size_have_the_bits_of_the_emulation(heads, fmt):
    assert_emulated(Attention(2, 4096, heads, fmt, 512, 64, topk=2048, counts=(2048, 2047), latent_scale=0.25))


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
@pytest.mark.parametrize(("kv_lora", "rope"), [(1, 0), (2, 1), (16, 4), (31, 0), (32, 9), (33, 0), (40, 24), (63, 2), (65, 62)])
def test_any_dim_has_the_bits_of_the_emulation(fmt, kv_lora, rope):
    assert_emulated(Attention(4, 200, 5, fmt, kv_lora, rope, topk=140, counts=(140, 33, 1, 128), scale=0.3))


@pytest.mark.parametrize("order", ["descending", "shuffled", "one id again and again"])
def test_ids_are_taken_in_their_order(order):
    problem = Attention(2, 400, 6, "fp8", 64, 16, topk=300, counts=(300, 299), scale=0.4)
    for row, count in enumerate(problem.count.tolist()):
        ids = problem.ids[row, :count]
        turned = {
            "descending": ids.flip(0),
            "shuffled": ids[torch.randperm(count)],
            "one id again and again": ids[:1].repeat(count),
        }
        ids.copy_(turned[order])
    assert_emulated(problem)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("heads", "latent_scale"), [(6, 1.0), (16, 0.3)])
def test_contexts_lie_within_the_bound_of_the_oracle(fmt, heads, latent_scale):
    stored = latent_scale if fmt == "fp8" else 1.0
    problem = Attention(5, 3000, heads, fmt, 512, 64, topk=2048, counts=(2048, 1000, 129, 17, 1), latent_scale=stored, scale=0.07)
    context, layout = problem.attend("avx512").numpy(), LatentFormat(fmt, 512, 64, stored)
    for row, count in enumerate(problem.count.tolist()):
        raw, query = problem.history[problem.ids[row, :count].long()].numpy(), problem.query[row].double().numpy()
        found = check_context(context[row], attend(raw, query, layout, softmax_scale=problem.scale, arithmetic=AVX512_1))
        assert found.faults == 0, found
        assert found.worst <= 1
        assert found.worst > 0 or count == 1, "p of one id is one"


@pytest.mark.parametrize("scale", [1e-30, 0.05, 30.0])
def test_any_bf16_has_the_bits_of_the_emulation(scale):
    """Subnormals, infinities and NaN among the records and queries, values near overflow and underflow."""
    problem = Attention(6, 150, 4, "bf16", 40, 8, topk=150, counts=(150, 40), scale=scale)
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 1 << 16, (150, 48), dtype=np.uint16)
    problem.history = torch.from_numpy(bits).view(torch.uint8)
    small = torch.from_numpy(rng.integers(0, 256, problem.query.shape, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)
    problem.query[1::2] = small[1::2]
    assert_emulated(problem)
    bits &= 0xBFFF  # no exponent above 127: everything stays finite
    assert_emulated(problem)


def test_subnormal_sums_are_flushed_as_in_the_emulation():
    problem = Attention(4, 100, 2, "bf16", 16, 0, topk=100, counts=(1, 2, 3, 100), scale=1.0)
    values = (torch.randn(100, 16, generator=torch.Generator().manual_seed(1)) * 2.0**-126).bfloat16()
    problem.history = values.view(torch.uint8)
    assert_emulated(problem)
    small = values[problem.ids[0, 0]].abs() < 2.0**-126
    assert small.any()
    assert torch.equal(problem.attend("avx512")[0, 0] == 0, small)


@pytest.fixture(scope="module")
def instruction():
    """total [n, 16], x, y [n, 32] bf16 -> what one VDPBF16PS makes of each."""
    from numba import njit, types

    from palimpsest.kernels.jit import intrinsic
    from palimpsest.kernels.llvm_ir import ADDRESS, F32X16, I32X16, load, store, void
    from palimpsest.kernels.sparse_attend.avx512_ir import dp

    @intrinsic
    def step(typing, total, x, y):
        def body(b, total, x, y):
            store(b, dp(b, load(b, total, F32X16), load(b, x, I32X16), load(b, y, I32X16)), total)

        return types.void(ADDRESS, ADDRESS, ADDRESS), void(body)

    @njit
    def all_of(total, x, y):
        for i in range(len(total)):
            step(total[i].ctypes.data, x[i].ctypes.data, y[i].ctypes.data)

    def run(total, x, y):
        found = total.copy()
        all_of(found, *((part.view(np.uint32) >> 16).astype(np.uint16) for part in (x, y)))
        return found

    return run


def drawn(rng, shape, exponents, fraction):
    """fp32 of any sign and ``fraction`` bits, exponent fields within ``exponents``."""
    sign, power = rng.integers(0, 2, shape, np.uint32), rng.integers(*exponents, shape, np.uint32)
    return (sign << 31 | power << 23 | rng.integers(0, 1 << fraction, shape, np.uint32) << (23 - fraction)).view(np.float32)


@pytest.mark.parametrize(
    ("products", "totals"),
    [
        ((0, 256), (0, 256)),
        ((55, 75), (0, 4)),
        ((60, 67), (0, 30)),
        ((100, 150), (100, 150)),
        ((62, 65), (0, 2)),
        ((0, 3), (0, 3)),
    ],
)
def test_the_instruction_is_the_emulation(instruction, products, totals):
    """Ordinary numbers, and those around the smallest normal and the largest."""
    rng = np.random.default_rng(products[0])
    x, y, total = drawn(rng, (4000, 32), products, 7), drawn(rng, (4000, 32), products, 7), drawn(rng, (4000, 16), totals, 23)
    expected = emulate.vdpbf16ps(total, (x[:, ::2], x[:, 1::2]), (y[:, ::2], y[:, 1::2]))
    found, lost = instruction(total, x, y), np.isnan(expected)
    assert np.array_equal(np.isnan(found), lost)
    assert np.array_equal(found.view(np.int32)[~lost], expected.view(np.int32)[~lost])


@pytest.mark.parametrize(("power", "kept"), [(-150, False), (-151, True), (-152, True)])
def test_a_result_is_subnormal_after_rounding(instruction, power, kept):
    """2^-126 less 2^-150 has 24 bits and is flushed; less half of that it rounds up to 2^-126 and stays."""
    x, y, total = np.zeros((1, 32), np.float32), np.zeros((1, 32), np.float32), np.full((1, 16), 2.0**-126, np.float32)
    x[:, 1], y[:, 1] = 2.0**-75, -(2.0 ** (power + 75))
    expected = emulate.vdpbf16ps(total, (x[:, ::2], x[:, 1::2]), (y[:, ::2], y[:, 1::2]))
    assert np.array_equal(instruction(total, x, y), expected)
    assert bool(expected[0, 0]) == kept


@pytest.fixture(scope="module")
def exponential():
    from numba import njit, types

    from palimpsest.kernels.jit import intrinsic
    from palimpsest.kernels.llvm_ir import ADDRESS, F32X16, load, store, void
    from palimpsest.kernels.sparse_attend.avx512_softmax import exp2

    @intrinsic
    def step(typing, at):
        return types.void(ADDRESS), void(lambda b, at: store(b, exp2(b, load(b, at, F32X16)), at))

    @njit
    def all_of(x):
        for i in range(len(x)):
            step(x[i].ctypes.data)

    def run(x):
        found = x.copy()
        all_of(found)
        return found

    return run


def test_the_exponential_is_the_emulation_and_as_good_as_the_bound_says(exponential):
    """Every power of two down to the floor, 4096 arguments in each; the relative error is half of ``exp_eps`` at most."""
    rng, worst = np.random.default_rng(4), 0.0
    edges = np.array([0, -0.0, -0.5, -1, -1.5, -125.5, -126, -126.5, -1e30, -np.inf, np.nan, -1e-30, -1e-45, 0, 0, 0], np.float32)
    found = exponential(edges[None])
    assert found.tobytes() == emulate.exp2(edges[None]).tobytes()
    assert found[0, [0, 1, 3, 6, 7, 8, 9]].tolist() == [1, 1, 0.5, 2.0**-126, 0, 0, 0]
    for whole in range(126):
        x = -(whole + rng.random((256, 16))).astype(np.float32)
        found = exponential(x)
        assert np.array_equal(found.view(np.int32), emulate.exp2(x).view(np.int32))
        worst = max(worst, float(np.abs(found / np.exp2(x.astype(np.float64)) - 1).max()))
    assert 0 < worst <= AVX512_1.exp_eps / 2


MASKED = """
import hashlib
from palimpsest.kernels import detect
from engines import Attention
print("avx512vbmi" in detect.target_features())
every = Attention(256, 256, 1, "fp8", 64, 0, topk=1, counts=(1,))
mixed = Attention(3, 300, 6, "fp8_ds_mla", 128, 20, topk=300, counts=(300, 9, 1))
every.history = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, 64)
every.ids[:, 0] = torch.arange(256)
mixed.history[:254, 5] = torch.cat([torch.arange(127), torch.arange(128, 255)]).to(torch.uint8)
for problem in (every, mixed):
    problem.query[:, :, 5] = 0
    context = problem.attend("avx512")
    print(int(context.isnan().sum()), hashlib.sha256(context.nan_to_num(7.0).numpy().tobytes()).hexdigest())
"""


def masked(code: str, *lacking: str) -> list[str]:
    """Lines printed by ``code`` in a process whose compile target lacks these features: they are read once."""
    here = os.path.dirname(__file__)
    known = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA")}
    features = ",".join(f"+{name}" for name in sorted(detect.target_features() - set(lacking)))
    path = os.pathsep.join([os.path.dirname(os.path.dirname(here)), here])
    done = subprocess.run(
        [sys.executable, "-c", "import torch\n" + code], env=known | {"PYTHONPATH": path, "NUMBA_CPU_FEATURES": features,
        "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_target_without_vbmi_decodes_to_the_same_bits():
    """As Cooper Lake, which has BF16 and no VBMI. Every e4m3 code is among the records."""
    with_it, without = masked(MASKED), masked(MASKED, "avx512vbmi")
    assert without[0] == "False"
    assert with_it[1:] == without[1:]
    assert len(set(without)) == 3
    assert [line.split()[0] for line in without[1:]] == ["128", "0"]  # two NaN codes times 64, and none


def test_every_code_is_decoded_exactly():
    """One id a row: its context is its record's latent."""
    problem = Attention(256, 256, 1, "fp8", 64, 0, topk=1, counts=(1,))
    problem.history = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, 64)
    problem.query.zero_()
    problem.ids[:, 0] = torch.arange(256)
    found, exact = problem.attend("avx512")[:, 0], problem.history.view(torch.float8_e4m3fn).float()
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found.nan_to_num(), exact.nan_to_num())


REFUSED = """
from palimpsest.core.errors import Unavailable
from palimpsest.kernels import detect, table
import sys
print(",".join(detect.available_engines()))
try:
    table.compile_engine("avx512")
except Unavailable as error:
    print(error)
print("palimpsest.kernels.sparse_attend.avx512_kernel" in sys.modules)
"""


@pytest.mark.parametrize("feature", detect.ATTEND_FEATURES)
def test_a_masked_target_is_refused_before_anything_compiles(feature):
    engines, refusal, compiled = masked(REFUSED, feature, "amx-tile")
    assert engines == "avx,portable"
    assert f"engine avx512 does not run here: the compile target lacks {feature}. This machine has avx (" in refusal
    assert compiled == "False"


def test_a_machine_that_rounds_in_another_order_is_refused():
    from palimpsest.kernels.sparse_attend import avx512

    def swapped(query, records):
        turn = [i ^ 1 for i in range(query.shape[1] - 1)]
        query, records = query.copy(), records.copy()
        query[:, : len(turn)], records[:, : len(turn)] = query[:, turn], records[:, turn]
        context = avx512.context_of(query, records)
        context[:, :16] = context[:, turn[:16]]
        return context

    avx512.check_roundings()
    with pytest.raises(
        Unavailable, match=r"\d+ of 51 numbers of a probe row differ from avx512-1.*choose engine avx or portable"
    ):
        avx512.check_roundings(swapped)


@pytest.mark.parametrize(("heads", "topk"), [(1, 64), (6, 2048), (8, 2048), (16, 2048), (96, 2048), (128, 2048), (128, 16384)])
def test_scratch_fits_and_stays_within_4_mib(heads, topk):
    """``Scratch.take`` refuses an overrun."""
    assert Attention(1, topk, heads, topk=topk, counts=(topk,)).attend("avx512").isfinite().all()
    assert sizes.avx512_attend_scratch(topk, heads, 512, 64) <= 4 << 20


def test_fp32_records_and_queries_are_the_portable_engines():
    assert table.implementation("sparse_attend", "avx512") is not table.implementation("sparse_attend", "portable")
    problem = Attention(2, 100, 3, "bf16", 32, 8, topk=50, counts=(50, 7))
    problem.history = problem.history.view(torch.bfloat16).float().view(torch.uint8)
    problem.fmt = "fp32"
    assert torch.equal(problem.attend("avx512"), problem.attend("portable"))
