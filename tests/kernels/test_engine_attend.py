"""sparse_attend of the compiled engines: within the derived bound of fp64, bits that depend on a row and head alone, no read past
the end."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from engines import COMPILED, Attention, Index, same_bits

from palimpsest.kernels.detect import available_engines
from palimpsest.prove.bounds import AMX_1, AVX512_1, U32, U_BF16, Softmax, context_bound, own_bound

#: the engines with an attention of their own; where there is neither AMX nor VDPBF16PS, none: then the portable file serves
#: every engine
NEEDS = {"amx": "amx", "amx-union": "amx", "avx512": "avx512"}
ATTENDING = [name for name, needs in NEEDS.items() if needs in COMPILED]
#: those whose bits depend on a row and head alone
ROWWISE = [name for name in ATTENDING if name != "amx-union"]
ARITHMETIC = {"amx": AMX_1, "amx-union": AMX_1, "avx512": AVX512_1}
EDGES = (0, 1, 2, 31, 32, 63, 64, 65, 127, 128, 129, 300)
FORMATS = ("fp8", "fp8_ds_mla", "bf16")


def values(problem, row):
    """Records [n, dim] of a row's ids in fp64, exact but for nothing."""
    raw = problem.history[problem.ids[row, : int(problem.count[row])].long()]
    latent = problem.kv_lora
    if problem.fmt == "fp8":
        return raw.view(torch.float8_e4m3fn).double() * problem.latent_scale
    if problem.fmt == "bf16":
        return raw.view(torch.bfloat16).double()
    codes = raw[:, :latent].contiguous().view(torch.float8_e4m3fn).double().view(len(raw), -1, 128)
    scales = raw[:, latent : latent + latent // 32].contiguous().view(torch.float32).double()
    rope = raw[:, latent + latent // 32 :].contiguous().view(torch.bfloat16).double()
    return torch.cat([(codes * scales.unsqueeze(2)).reshape(len(raw), latent), rope], 1)


def check_row(problem, row, context, model):
    if int(problem.count[row]) == 0:
        assert (context == 0).all()
        return
    records = values(problem, row).numpy()
    dequant = (1 + U32) * (1 + U_BF16) - 1 if problem.fmt == "fp8_ds_mla" else 0.0
    for head in range(problem.heads):
        query = problem.query[row, head].double().numpy()
        logits, spread = records @ query * problem.scale, np.abs(records) @ np.abs(query) * problem.scale
        softmax = Softmax.of(logits, spread, records[:, : problem.kv_lora], dim=records.shape[1], dequant_u=dequant)
        own = own_bound(softmax)
        off = np.abs(context[head].double().numpy() - softmax.context)
        assert (off <= context_bound(model, softmax, own) + own).all(), f"row {row}, head {head}: {off.max()}"


@pytest.mark.parametrize("engine", ATTENDING)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("heads", "kv_lora", "rope"), [(3, 128, 16), (20, 128, 64), (6, 512, 64), (2, 256, 0)])
def test_context_is_within_the_bound(engine, fmt, heads, kv_lora, rope):
    problem = Attention(12, 700, heads, fmt, kv_lora, rope, topk=320, counts=EDGES, latent_scale=0.37 if fmt == "fp8" else 1.0)
    context = problem.attend(engine)
    for row in range(problem.rows):
        check_row(problem, row, context[row], ARITHMETIC[engine])


@pytest.mark.parametrize("engine", ATTENDING)
@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
@pytest.mark.parametrize(("kv_lora", "rope"), [(32, 9), (16, 4), (40, 24), (33, 0)])
def test_sizes_that_are_no_multiples_of_a_vector(engine, fmt, kv_lora, rope):
    problem = Attention(5, 200, 4, fmt, kv_lora, rope, topk=96, counts=(96, 1, 40))
    context = problem.attend(engine)
    for row in range(problem.rows):
        check_row(problem, row, context[row], ARITHMETIC[engine])


@pytest.mark.parametrize("engine", ROWWISE)
@pytest.mark.parametrize("fmt", FORMATS)
def test_bits_depend_on_the_row_and_head_alone(engine, fmt):
    """Threads, cuts of the chunk, and heads per rank: 40 heads are three tiles, 20 are two, 5 are one."""
    problem = Attention(37, 900, 40, fmt, 128, 64, topk=320, counts=EDGES)
    base = problem.attend(engine)
    for threads in (2, 5):
        assert same_bits(base, problem.attend(engine, threads=threads)), f"{threads} threads"
    for cuts in ((0, 1, 16, 37), (0, 17, 37)):
        parts = [problem.attend(engine, rows=slice(a, b), start=a) for a, b in pairwise(cuts)]
        assert same_bits(base, torch.cat(parts)), f"cuts {cuts}"
    for heads in (20, 10, 5, 1):
        parts = [problem.attend(engine, heads=slice(h, h + heads)) for h in range(0, 40, heads)]
        assert same_bits(base, torch.cat(parts, 1)), f"{heads} heads a rank"


@pytest.mark.parametrize("engine", [e for e in ATTENDING if e == "amx-union"])
def test_a_union_keeps_its_bits_over_threads_and_cuts_at_whole_groups(engine):
    problem = Attention(48, 600, 6, "fp8", 128, 64, topk=512, counts=(512,))
    base = problem.attend(engine)
    assert not same_bits(base, problem.attend("amx")), "nothing was joined"
    assert same_bits(base, problem.attend(engine, threads=3))
    parts = [problem.attend(engine, rows=slice(a, b), start=a) for a, b in ((0, 16), (16, 48))]
    assert same_bits(base, torch.cat(parts))


@pytest.mark.parametrize("engine", [e for e in ATTENDING if e == "amx-union"])
def test_too_many_distinct_ids_go_row_by_row(engine):
    problem = Attention(16, 9000, 6, "fp8", 64, 0, topk=256, counts=(256,))
    assert same_bits(problem.attend(engine), problem.attend("amx"))


@pytest.mark.parametrize("engine", ATTENDING)
@pytest.mark.parametrize("fill", [0x00, 0x80, 0xFF])
def test_stale_scratch_never_shows(engine, fill):
    problem = Attention(17, 300, 6, "fp8_ds_mla", 128, 8, topk=130, counts=(0, 1, 129, 130))
    assert same_bits(problem.attend(engine), problem.attend(engine, fill=fill))


@pytest.mark.parametrize("engine", ATTENDING)
@pytest.mark.parametrize("place", ["latent", "rope"])
def test_a_nan_record_reaches_every_dim_of_the_rows_that_select_it(engine, place):
    problem = Attention(2, 64, 3, "fp8", 64, 64, topk=40, counts=(40,))
    hurt = int(problem.ids[0, 7])
    problem.history[hurt, 5 if place == "latent" else 100] = 0x7F
    context = problem.attend(engine)
    assert context[0].isnan().all()
    assert context[1].isnan().all() == (hurt in problem.ids[1].tolist())


@pytest.mark.parametrize("engine", ATTENDING)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rope", [0, 4, 10, 64])
def test_nothing_is_read_past_the_history(engine, fmt, rope):
    """The last record ends at an inaccessible page, and every row selects it."""
    from guarded import at_the_edge

    problem = Attention(3, 50, 2, fmt, 128, rope, topk=50, counts=(50, 33))
    edge = at_the_edge(problem.history)
    assert same_bits(problem.attend(engine), problem.attend(engine, history=edge))


@pytest.mark.parametrize("engine", COMPILED)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 128), (31, 128), (33, 64), (1025, 128), (70, 24)])
def test_selection_reads_nothing_past_the_history(engine, tokens, dim):
    from guarded import at_the_edge

    problem = Index(1, tokens, heads=3, dim=dim, topk=16)
    plain = problem.select(engine, tokens - 1)
    problem.keys, problem.scales = (
        at_the_edge(problem.keys.view(torch.uint8)).view(torch.float8_e4m3fn),
        at_the_edge(problem.scales),
    )
    problem.queries = at_the_edge(problem.queries.view(torch.uint8)).view(torch.float8_e4m3fn)
    assert all(same_bits(a, b) for a, b in zip(plain, problem.select(engine, tokens - 1), strict=True))


@pytest.mark.parametrize("engine", ROWWISE)
def test_the_exponential_is_as_good_as_the_bound_says(engine):
    """Two ids whose logits differ by x: the ratio of their weights is 2^x of the kernel, seen through a one-hot latent."""
    problem = Attention(1, 2, 16, "bf16", 64, 64, topk=2, counts=(2,), scale=1.0)
    worst = 0.0
    for step in range(64):
        history = torch.zeros(2, 128, dtype=torch.bfloat16)
        history[0, 0], history[1, 64] = 1.0, 1.0
        problem.history = history.view(torch.uint8).view(2, -1)
        problem.query = torch.zeros(1, 16, 128, dtype=torch.bfloat16)
        problem.query[0, :, 64] = torch.linspace(0, 40, 16 * 64)[step * 16 : step * 16 + 16].bfloat16()
        share = problem.attend(engine)[0, :, 0].double()
        logit = -problem.query[0, :, 64].double()
        exact = torch.exp(logit) / (1 + torch.exp(logit))
        worst = max(worst, float(((share - exact).abs() / exact).max()))
    assert worst <= U_BF16 + 41 * 4 * U32 + 2.0**-21


def test_the_engines_of_this_machine_are_the_ones_tested():
    assert set(COMPILED) | {"portable"} == set(available_engines())
