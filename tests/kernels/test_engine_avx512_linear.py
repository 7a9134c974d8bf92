"""Projections of the avx512 engine: equal to their emulation bit for bit, a row's bits its own, and as close as derived."""

import numpy as np
import pytest
import torch
from bare_ranks import aligned, make_call
from engines import COMPILED, One, same_bits
from guarded import at_the_edge
from test_allocation import OBJECTS, python_peak, tensor_bytes

from palimpsest.checkpoint.synthetic import PRESETS
from palimpsest.core.errors import Unavailable
from palimpsest.kernels import emulate, linear, sizes, table
from palimpsest.kernels.call import Scratch
from palimpsest.recipes import load_geometry
from palimpsest.recipes.table import presets

pytestmark = pytest.mark.skipif("avx512" not in COMPILED, reason="the compile target lacks VDPBF16PS")
KINDS = (torch.bfloat16, torch.float32)
TINY = [name for name in PRESETS if name != "k31-pro-layer3"]


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    table.compile_engine("avx512")


def projection(depth, columns, *, resident=False):
    """A projection in exactly the scratch planned for it, poisoned."""
    from palimpsest.kernels.avx512_linear import Avx512Projection

    scratch = Scratch(aligned(sizes.linear_scratch(depth, columns, resident=resident, engine="avx512"), 0x7F))
    return Avx512Projection(scratch, depth, columns, resident=resident)


def project(rows, weight):
    out = torch.full((sizes.ROW_TILE, len(weight)), torch.nan)
    projection(weight.shape[1], len(weight)).project(rows, weight, out)
    return out


def drawn(rows, depth, columns, kind, seed=0):
    generator = torch.Generator().manual_seed(seed + depth + columns)
    weight = torch.randn(columns, depth, generator=generator).bfloat16()
    return torch.randn(rows, depth, generator=generator).to(kind), weight


def assert_emulated(rows, weight, out, columns=slice(None)):
    split = rows.dtype != torch.bfloat16
    expected = emulate.avx512_project(rows.float().numpy(), weight[columns].float().numpy(), split=split)
    found, lost = out[: len(rows), columns].numpy(), np.isnan(expected)
    assert np.array_equal(np.isnan(found), lost)
    wrong = (found.view(np.int32) != expected.view(np.int32)) & ~lost
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} differ"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [32, 64, 480, 512, 544, 1024, 1056])
def test_any_depth_has_the_bits_of_the_emulation(kind, depth):
    rows, weight = drawn(32, depth, 13, kind)
    assert_emulated(rows, weight, project(rows, weight))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [*range(1, 21), 24, 31, 47, 48, 49, 60, 61, 95, 96, 97])
def test_any_number_of_columns_has_the_bits_of_the_emulation(kind, columns):
    rows, weight = drawn(3, 96, columns, kind)
    assert_emulated(rows, weight, project(rows, weight))


def shapes(hidden, q_lora, kv_lora, nope, rope, v, index_heads, index_dim):
    """(depth, columns) of every projection of a layer."""
    return [
        (hidden, q_lora), (q_lora, nope + rope), (nope, kv_lora), (hidden, kv_lora + rope), (hidden, index_heads),
        (q_lora, index_dim), (hidden, index_dim), (kv_lora, v), (v, hidden), (hidden, v),
    ]  # fmt: skip


def test_every_shape_of_the_tiny_checkpoints_has_the_bits_of_the_emulation():
    found = set()
    for s in (PRESETS[name] for name in TINY):
        found |= set(shapes(s.hidden, s.q_lora, s.kv_lora, s.nope, s.rope, s.v, s.index_heads, s.index_dim))
    tried = [(depth, columns) for depth, columns in sorted(found) if depth % 32 == 0]
    assert len(tried) >= 9
    for depth, columns in tried:
        for kind in KINDS:
            rows, weight = drawn(2, depth, columns, kind)
            assert_emulated(rows, weight, project(rows, weight))


@pytest.mark.parametrize("model", presets())
def test_every_shape_of_the_real_models_has_the_bits_of_the_emulation(model):
    """Whole weights, compared at columns from every group and both ends."""
    g = load_geometry(model)
    ix = g.indexer
    for depth, columns in set(shapes(g.hidden, g.q_lora, g.kv_lora, g.nope, g.rope.dims, g.v_dim, ix.heads, ix.dim)):
        rows, weight = drawn(32, depth, columns, torch.bfloat16)
        out = project(rows, weight)
        some = torch.tensor(sorted({0, 11, 12, columns // 2, columns - 2, columns - 1}))
        assert_emulated(rows[:2], weight, out[:2], some)
        assert out.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_are_its_own(kind):
    """Whatever its place in the tile, its neighbours (NaN and infinity among them) and their number."""
    rows, weight = drawn(32, 544, 45, kind)
    out = project(rows, weight)
    for shift in (1, 7, 16, 31):
        assert same_bits(project(rows.roll(shift, 0), weight), out.roll(shift, 0))
    for first, end in ((0, 1), (3, 20), (31, 32), (5, 5)):
        part = project(rows[first:end], weight)
        assert same_bits(part[: end - first], out[first:end])
        assert same_bits(part[end - first :], torch.zeros(32 - (end - first), 45))
    hostile = rows.clone()
    hostile[::2], hostile[5] = torch.nan, torch.inf
    kept = [r for r in range(1, 32, 2) if r != 5]
    assert same_bits(project(hostile, weight)[kept], out[kept])


@pytest.mark.parametrize("kind", KINDS)
def test_a_columns_bits_are_its_own(kind):
    rows, weight = drawn(32, 160, 101, kind)
    out = project(rows, weight)
    for first, end in ((0, 1), (1, 13), (50, 101), (96, 100)):
        assert same_bits(project(rows, weight[first:end]), out[:, first:end].contiguous())


@pytest.mark.parametrize("kind", KINDS)
def test_strides_change_no_bit(kind):
    """Rows and weights cut out of wider ones, turned ones, and a loaded weight applied again."""
    rows, weight = drawn(32, 96, 50, kind)
    out = project(rows, weight)
    wide, heads = torch.full((32, 3, 96), torch.nan, dtype=kind), torch.full((50, 288), torch.nan).bfloat16()
    wide[:, 1], heads[:, 96:192] = rows, weight
    assert same_bits(project(wide[:, 1], heads[:, 96:192]), out)
    assert same_bits(project(rows.t().contiguous().t(), weight), out)
    kept, turned = projection(96, 50, resident=True), torch.full((32, 50), torch.nan)
    kept.load(weight.t().contiguous().t())
    for _ in range(2):
        kept.apply(rows, turned)
        assert same_bits(turned, out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1, 13, 50])
def test_nothing_is_read_or_written_past_an_end(kind, columns):
    rows, weight = drawn(32, 64, columns, kind)
    out = at_the_edge(torch.full((32, columns), torch.nan))
    projection(64, columns).project(at_the_edge(rows), at_the_edge(weight), out)
    assert same_bits(out, project(rows, weight))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("finite", [True, False])
def test_any_bits_have_the_bits_of_the_emulation(kind, finite):
    """Subnormals, sums that are flushed or overflow, infinities and NaN."""
    rng = np.random.default_rng(8)
    mask = np.uint16(0xBFFF if finite else 0xFFFF)  # without the exponent's top bit everything stays finite
    weight = torch.from_numpy((rng.integers(0, 1 << 16, (13, 64), np.uint16) & mask).view(np.int16)).view(torch.bfloat16)
    bits = rng.integers(0, 1 << 32, (32, 64), np.uint32) & (np.uint32(mask) << 16 | 0xFFFF)
    bits[1::2] &= 0x80FFFFFF  # at most around the smallest normal
    rows = torch.from_numpy(bits.view(np.float32)).to(kind)
    assert_emulated(rows, weight, project(rows, weight))
    weight = (weight.float() * 2.0**-20).bfloat16()
    assert_emulated(rows, weight, project(rows, weight))


def test_rows_that_need_no_low_part_have_the_bits_of_bf16_rows():
    rows, weight = drawn(32, 608, 29, torch.bfloat16)
    assert same_bits(project(rows.float(), weight), project(rows, weight))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("depth", "columns"), [(32, 1), (512, 128), (7168, 33), (1536, 192), (128, 700)])
def test_projections_are_as_close_as_derived(kind, depth, columns):
    """A term of a chain meets at most a rounding per element of its block, then that of the pair of parts and one a block.
    Products are exact; an operation loses up to 2^-126 more where it flushes; splitting loses 2^-17 of the row."""
    rows, weight = drawn(32, depth, columns, kind)
    split = kind == torch.float32
    parts = emulate.split_bf16(rows.numpy()) if split else (rows.float().numpy(),)
    mass = sum(torch.from_numpy(np.abs(part)).double() for part in parts) @ weight.double().abs().t()
    exact = rows.double() @ weight.double().t()
    roundings = min(depth, sizes.DEPTH_BLOCK) + split + -(-depth // sizes.DEPTH_BLOCK)
    relative = (1 + 2.0**-24) ** roundings - 1 + (2.0**-17 if split else 0.0) + depth * 2.0**-53
    flushed = len(parts) * depth * 2.0**-125
    assert ((project(rows, weight).double() - exact).abs() <= relative * mass + flushed).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_allocated(kind):
    """Nor for a turned weight, which torch's own copy would need a block for: bf16 has no other dtype to pass through."""
    rows, weight = drawn(32, 128, 512, kind)
    turned, out, copied = weight.t().contiguous().t(), torch.empty(32, 512), torch.empty_like(weight)
    kept = projection(128, 512, resident=True)
    assert tensor_bytes(lambda: copied.copy_(turned)) != []

    def body():
        kept.load(turned)
        kept.apply(rows, out)
        kept.project(rows[:5], weight, out)

    body()
    assert tensor_bytes(body) == []
    assert python_peak(body) < OBJECTS


def test_which_weights_are_projected_with_it():
    from palimpsest.kernels.avx512_linear import Avx512Projection

    def made(engine, depth, dtype):
        params = {"hidden": depth, "q_lora": 40, "eps": 1e-6, "engine": engine}
        call = make_call("query_latent", params, {}, One())
        return type(linear.make_projection(call, torch.zeros(40, depth, dtype=dtype), depth, 40))

    assert made("avx512", 64, torch.bfloat16) is Avx512Projection
    for engine, depth, dtype in (("avx512", 64, torch.float32), ("avx512", 40, torch.bfloat16), ("avx", 64, torch.bfloat16)):
        assert made(engine, depth, dtype) is linear.Projection


def test_the_engine_compiles_its_projections():
    seen = []
    table.compile_engine("avx512", lambda done, total, what: seen.append(what))
    assert "projections for avx512" in seen


def test_a_machine_that_rounds_in_another_order_is_refused():
    from palimpsest.kernels import avx512_linear

    def swapped(rows, weight):
        turn = [i ^ 1 for i in range(rows.shape[1])]
        return avx512_linear.product_of(np.ascontiguousarray(rows[:, turn]), np.ascontiguousarray(weight[:, turn]))

    avx512_linear.check_roundings()
    with pytest.raises(
        Unavailable, match=r"\d+ of 14 numbers of a probe projection differ from avx512-1.*choose engine avx or portable"
    ):
        avx512_linear.check_roundings(swapped)
