"""Whole-model programs: shape, order, names, what crosses layers, and the refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest import recipes
from palimpsest.core.errors import BadConfig, PalimpsestError, UnknownName, Unsupported
from palimpsest.core.geometry import Formats
from palimpsest.core.spec import Limits
from palimpsest.kernels import table
from palimpsest.plan.lifetime import Lifetimes
from palimpsest.recipes.draft_ops import DRAFT_ONLY
from palimpsest.recipes.moe import pairs_of
from palimpsest.recipes.ops import PLANNED_ONLY

#: glm-5.1 has glm-5's numbers
PRESETS = ("deepseek-v3.2", "glm-5", "glm-5.2", "kimi-k3.1-pro")


def model(name, tokens=1 << 17, rows=4096, ranks=16, **options):
    g = recipes.load_geometry(name)
    return recipes.model_program(g, Limits(tokens, rows, ranks), recipes.default_formats(g), **options)


def named(program, kind):
    return {b.name: b.nbytes for b in program.buffers if b.kind == kind}


def total(program, kind):
    return sum(b.nbytes for b in program.all_buffers if b.kind == kind)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_one_program_with_safe_lifetimes(name):
    sizes = ((2048, 1, 1, "dflash"), (1 << 16, 512, 2, None), (1 << 18, 4096, 8, "dflash2"), (1 << 20, 8192, 16, None))
    for tokens, rows, ranks, drafter in sizes:
        program = model(name, tokens, rows, ranks, drafter=drafter)
        lifetimes = Lifetimes(program)
        assert lifetimes.lower_bound >= max(b.nbytes for b in program.all_buffers if b.kind == "reusable")
        assert len(program.by_name) == len(program.all_buffers)
        assert len({s.name for s in program.steps}) == len(program.steps)
        assert not [b.name for b in program.all_buffers if b.nbytes < 1]


@pytest.mark.parametrize("name", PRESETS)
def test_names_say_which_layer_a_buffer_belongs_to(name):
    program = model(name, drafter="dflash2")
    g = recipes.load_geometry(name)
    across = {b.name for b in program.all_buffers if not b.name.startswith(("layer", "drafter."))}
    assert {n.split(".")[0] for n in across} <= {
        "w", "tokens", "residual", "ids", "counts", "rope", "inv_freq", "staging", "signals", "last_hidden", "logits_part",
        "logits", "embed_rows", "rope_table", "final_norm", "last_logits", "gather_logits",
    }  # fmt: skip
    layers = {n.split(".")[0] for n in program.by_name if n.startswith("layer")}
    assert layers == {f"layer{i:03d}" for i in range(g.layers)}
    alike: dict[tuple, set] = {}
    for i, kind in enumerate(g.schedule):
        at = f"layer{i:03d}."
        roles = {(b.name.removeprefix(at), b.planes, b.kind) for b in program.all_buffers if b.name.startswith(at)}
        fresh = bool(g.body.residual_block) and i % g.body.residual_block == 0
        # the mix over block states has scratch for each of them
        roles = {r for r in roles if not r[0].startswith(("input_norm.scratch", "post_norm.scratch"))}
        alike.setdefault((kind, i < g.body.dense_layers, fresh), set()).add(frozenset(roles))
    assert all(len(found) == 1 for found in alike.values())


@pytest.mark.parametrize("name", PRESETS)
def test_a_reusable_layer_buffer_is_written_and_read_inside_its_layer(name):
    program = model(name)
    for step in program.steps:
        for _, buffer in step.accesses():
            if buffer.startswith("layer") and not buffer.endswith(".scratch"):
                assert step.name.split(".")[0] == buffer.split(".")[0], (step.name, buffer)


def test_layer_steps_are_the_layer_programs_own():
    for name in PRESETS:
        g, limits = recipes.load_geometry(name), Limits(1 << 17, 4096, 16)
        program = model(name)
        for layer in (g.sparse_layers[0], g.sparse_layers[-1]):
            alone = recipes.program(g, limits, recipes.default_formats(g), layer)
            at = f"layer{layer:03d}."
            steps = {s.name: s for s in program.steps}
            for step in alone.steps[1:]:
                here = steps[at + step.name]
                assert (here.op, here.params, here.scratch, here.phase, here.scope) == (
                    step.op, step.params, step.scratch, step.phase, step.scope,
                )  # fmt: skip
            for buffer in alone.buffers:
                here = program.by_name.get(at + buffer.name) or program.by_name.get(buffer.name)
                if buffer.name in ("hidden", "output") or buffer.kind == "weights":
                    continue
                assert here is not None, buffer.name
                assert (here.planes, here.kind) == (buffer.planes, buffer.kind)


def test_shared_layers_keep_ids_and_have_no_index_cache():
    """GLM-5.2: 21 index caches, not 78, and layer 5 attends with the ids of layer 2."""
    program = model("glm-5.2", 1 << 20)
    index = [n for n in named(program, "persistent") if n.endswith(".index_cache")]
    assert len(index) == 21
    assert len([n for n in named(program, "persistent") if n.endswith(".latent_cache")]) == 78
    assert not [n for n in program.by_name if n.startswith("layer003.") and "index" in n]
    lives = Lifetimes(program).ranges["ids"]
    steps = program.steps
    assert len(lives) == 21
    readers = [{steps[at].name for at in life.accesses} for life in lives]
    assert readers[2] == {"layer002.exchange_ids", *(f"layer00{i}.sparse_attend" for i in (2, 3, 4, 5))}
    assert readers[-1] == {"layer074.exchange_ids", *(f"layer0{i}.sparse_attend" for i in (74, 75, 76, 77))}


def test_k31_has_24_caches_and_69_states():
    program = model("kimi-k3.1-pro", 1 << 20)
    ends = [n.split(".")[1] for n in named(program, "persistent")]
    assert {name: ends.count(name) for name in set(ends)} == {
        "index_cache": 24, "latent_cache": 24, "kda_state": 69, "conv_state": 69,
    }  # fmt: skip


def test_k31_residual_states_are_kept_until_the_last_norm():
    """Blocks of 12 layers over 93: the embedding, then one state per block begun; every later mix reads all of them."""
    program = model("kimi-k3.1-pro")
    states = [b.name for b in program.buffers if b.name.startswith("residual")]
    assert states == [f"residual.{i:02d}" for i in range(9)]
    steps = {s.name: s for s in program.steps}
    assert not [role for role, _ in steps["layer000.input_norm"].reads if role.startswith("block")]
    assert ("block00", "residual.00") in steps["layer000.post_norm"].reads
    assert dict(steps["layer012.input_norm"].reads)["state"] == "residual.01"
    assert dict(steps["layer012.post_norm"].reads)["state"] == "residual.02"
    assert ("output", "residual.02") in steps["layer012.reduce_attention"].writes
    assert [n for _, n in steps["final_norm"].reads if n.startswith("residual")] == ["residual.08", *states[:8]]
    lifetimes = Lifetimes(program)
    ends = {program.steps[lifetimes.ranges[name][-1].last].name for name in states}
    assert ends == {"final_norm"}
    begins = [program.steps[lifetimes.ranges[name][0].first].name for name in states]
    assert begins[0] == "embed_rows"
    assert [b.split(".")[0] for b in begins[1:]] == [f"layer{12 * i:03d}" for i in range(8)]


def test_a_plain_residual_stream_is_one_buffer():
    program = model("deepseek-v3.2")
    assert [b.name for b in program.buffers if b.name.startswith("residual")] == ["residual"]
    assert len(Lifetimes(program).ranges["residual"]) == 1


def test_kda_state_is_6_mib_and_its_workspace_does_not_grow_with_the_context():
    one, many = model("kimi-k3.1-pro", ranks=1, rows=4096), model("kimi-k3.1-pro", ranks=16)
    assert one.by_name["layer000.kda_state"].nbytes == 6 << 20
    assert many.by_name["layer000.kda_state"].nbytes == 384 << 10
    assert one.by_name["layer000.conv_state"].nbytes == 3 * 3 * 12288 * 2
    short, long = model("kimi-k3.1-pro", 1 << 16), model("kimi-k3.1-pro", 1 << 20)
    for program in (short, long):
        program.by_name["layer000.kda_scan.scratch"]
    kda = [n for n in short.by_name if n.startswith("layer000.")]
    assert {n: short.by_name[n].nbytes for n in kda} == {n: long.by_name[n].nbytes for n in kda}


@pytest.mark.parametrize("op", sorted(PLANNED_ONLY | DRAFT_ONLY))
def test_running_a_planned_only_op_is_refused_by_name(op):
    with pytest.raises(UnknownName, match=f"unknown op '{op}'"):
        table.contract(op)


def test_planned_ops_are_used_and_do_not_hide_real_ones():
    assert not set(PLANNED_ONLY | DRAFT_ONLY) & set(table.OPS)
    used = {s.op for name in PRESETS for s in model(name, drafter="dflash2").steps}
    assert used == set(PLANNED_ONLY | DRAFT_ONLY) | (set(table.OPS) - {"bind_inputs"})


def test_every_history_pair_is_named_and_fenced():
    for name, count in (("deepseek-v3.2", 61), ("glm-5.2", 21), ("kimi-k3.1-pro", 24)):
        program = model(name)
        assert len(program.histories) == 2 * count
        pairs = list(zip(program.histories[::2], program.histories[1::2], strict=True))
        lifetimes = Lifetimes(program)
        assert all(lifetimes.may_share(early, late) for early, late in pairs)
        assert sum(s.scope == "all" for s in program.steps) == count


@pytest.mark.parametrize(("name", "ranks"), [("kimi-k3.1-pro", 3), ("kimi-k3.1-pro", 64), ("glm-5", 128), ("deepseek-v3.2", 12)])
def test_ranks_that_do_not_divide_the_heads_are_refused(name, ranks):
    with pytest.raises(Unsupported, match="power of two that divides"):
        model(name, ranks=ranks)


def test_a_context_below_the_topk_is_refused():
    with pytest.raises(Unsupported, match="top-k 2048 exceeds the context of 1024 tokens"):
        model("glm-5", 1024, 64)


def test_unknown_choices_are_refused_with_the_known_ones():
    with pytest.raises(UnknownName, match="known: bf16, checkpoint, fp8, mxfp4"):
        model("glm-5", weights="int3")
    with pytest.raises(UnknownName, match="known: dflash, dflash2"):
        model("glm-5", drafter="eagle")


def test_a_configuration_without_experts_plans_layers_but_no_model():
    path = Path(recipes.__file__).parent / "presets" / "glm-5.2.json"
    config = json.loads(path.read_text("utf-8"))
    del config["n_routed_experts"]
    g = recipes.geometry_from_config(config, "partial")
    limits, formats = Limits(4096, 64, 4), recipes.default_formats(g)
    recipes.program(g, limits, formats, 0)
    with pytest.raises(Unsupported, match="partial describes its sparse-attention layers only"):
        recipes.model_program(g, limits, formats)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_experts_per_tok": 257}, "257 experts per token, but only 256 experts"),
        ({"vocab_size": -1}, "vocab_size = -1 must be a whole number"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"n_routed_experts": 1 << 20}, "n_routed_experts"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_impossible_body_fields_are_refused(change, match):
    path = Path(recipes.__file__).parent / "presets" / "deepseek-v3.2.json"
    with pytest.raises(PalimpsestError, match=match):
        recipes.geometry_from_config(json.loads(path.read_text("utf-8")) | change, "changed")


def test_an_unknown_expert_packing_is_refused():
    path = Path(recipes.__file__).parent / "presets" / "kimi-k3.1-pro.json"
    config = json.loads(path.read_text("utf-8"))
    config["text_config"]["quantization_config"]["format"] = "nvfp4-pack-quantized"
    with pytest.raises(Unsupported, match="nvfp4-pack-quantized"):
        recipes.geometry_from_config(config, "changed")


def test_tied_embeddings_are_held_once():
    path = Path(recipes.__file__).parent / "presets" / "glm-5.json"
    g = recipes.geometry_from_config(json.loads(path.read_text("utf-8")) | {"tie_word_embeddings": True}, "tied")
    program = recipes.model_program(g, Limits(1 << 16, 64, 4), recipes.default_formats(g))
    assert "w.head" not in program.by_name
    assert recipes.model_parameters(recipes.load_geometry("glm-5")) - recipes.model_parameters(g) == 154880 * 6144


@given(rows=st.integers(1, 1 << 16), each=st.integers(1, 64), most=st.integers(1, 1 << 16))
def test_expert_passes_cover_every_row_in_bounded_pairs(rows, each, most):
    pairs, passes = pairs_of(rows, each, most)
    assert pairs % each == 0
    assert pairs <= max(most, each)
    assert (pairs // each) * (passes - 1) < rows <= (pairs // each) * passes


@settings(max_examples=8, deadline=None)
@given(
    name=st.sampled_from(PRESETS),
    pages=st.integers(32, 1 << 14),
    rows=st.integers(1, 2048),
    ranks=st.sampled_from([1, 2, 4, 8, 16]),
    latent=st.sampled_from(["fp8", "fp8_ds_mla", "bf16"]),
    storage=st.sampled_from(["checkpoint", "bf16", "fp8", "mxfp4"]),
)
def test_sizes_grow_with_every_limit(name, pages, rows, ranks, latent, storage):
    """More tokens, rows or fewer ranks never need less; caches are exactly pages of this rank times the record."""
    g = recipes.load_geometry(name)
    formats = Formats(latent=latent)
    program = recipes.model_program(g, Limits(64 * pages, rows, ranks), formats, weights=storage)
    record = dict(program.facts)["latent_record_bytes"]
    caches = [b.nbytes for b in program.buffers if b.name.endswith(".latent_cache")]
    assert caches == [-(-pages // ranks) * 64 * record] * len(g.sparse_layers)
    more = recipes.model_program(g, Limits(64 * (pages + 1), rows + 1, ranks), formats, weights=storage)
    assert set(more.by_name) == set(program.by_name)
    assert all(more.by_name[n].nbytes >= b.nbytes for n, b in program.by_name.items())
    if ranks > 1:
        fewer = recipes.model_program(g, Limits(64 * pages, rows, ranks // 2), formats, weights=storage)
        assert total(fewer, "weights") >= total(program, "weights")
        assert total(fewer, "persistent") >= total(program, "persistent")


def test_drafter_buffers_match_the_model_page():
    """Taps of 4096 x 7168 bf16: 56 MiB each, 280 MiB for five; codebooks of 163840 x 256 bf16: 80 MiB each, on every rank."""
    program = model("kimi-k3.1-pro", 1 << 20, drafter="dflash2")
    sizes = {b.name: b.nbytes for b in program.buffers}
    assert [sizes[f"drafter.tap{i:02d}"] for i in range(5)] == [56 << 20] * 5
    assert sizes["drafter.context"] == 56 << 20
    assert sizes["drafter.w.predecessors"] == sizes["drafter.w.successors"] == 80 << 20
    assert sizes["drafter.layer00.cache"] == 4096 * 576 * 2
    assert sizes["drafter.layer04.cache"] == (1 << 20) * 576 * 2
    assert sizes["drafter.unary"] == 7 * 16 * 4
    assert sizes["drafter.candidates"] == 7 * 16 * 8
    assert sizes["drafter.lattice"] == 7 * 16 * 16 * 4
    assert sizes["drafter.logits"] == 7 * 163840 * 4
    assert [s.name for s in program.steps if s.op == "tap_hidden"] == [f"drafter.tap0{i}" for i in range(5)]
    at = [s.name for s in program.steps]
    assert [at[at.index(f"drafter.tap0{i}") - 1] for i in range(5)] == [f"layer{i:03d}.add_mlp" for i in (19, 37, 66, 78, 90)]


def test_a_drafter_is_deferred_and_changes_nothing_else():
    plain, drafting = model("kimi-k3.1-pro"), model("kimi-k3.1-pro", drafter="dflash2")
    deferred = set(recipes.deferred_buffers(drafting))
    assert recipes.deferred_buffers(plain) == ()
    assert deferred
    assert {b.name: b for b in drafting.all_buffers if b.name not in deferred} == {b.name: b for b in plain.all_buffers}
    assert [s for s in drafting.steps if not s.name.startswith("drafter.")] == list(plain.steps)
    assert drafting.outputs == ("logits", "drafter.logits", "drafter.tokens")
    assert dict(drafting.facts)["drafter"] == "dflash2"


DRAFT = {
    "architectures": ["DFlash2DraftModel"],
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 4096,
    "dflash_config": {
        "attention_mode": "mla", "block_size": 8, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256,
        "selector_top_k": 16, "target_layer_ids": [19, 37, 66, 78, 90],
    },
}  # fmt: skip


def test_a_draft_configuration_gives_the_usual_drafter():
    g = recipes.load_geometry("kimi-k3.1-pro")
    from palimpsest.recipes.drafter import drafter_named

    assert recipes.drafter_from_config(DRAFT, g) == drafter_named(g, "dflash2")
    qwen = {**DRAFT, "architectures": ["DFlashDraftModel"], "head_dim": 128, "num_key_value_heads": 8}
    qwen["dflash_config"] = {"target_layer_ids": [1, 2], "block_size": 16}
    found = recipes.drafter_from_config(qwen, g)
    assert (found.name, found.kv_lora, found.record, found.selector_rank) == ("dflash", 0, 2 * 8 * 128, 0)
    recipes.model_program(g, Limits(1 << 16, 64, 4), recipes.default_formats(g), drafter=found)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden_size": 4096}, BadConfig, "hidden_size 4096 is not the target's 7168"),
        ({"architectures": ["EagleModel"]}, Unsupported, "DFlashDraftModel and DFlash2DraftModel are"),
        ({"layer_types": ["full_attention"]}, BadConfig, "1 entries but num_hidden_layers = 5"),
        ({"dflash_config": {**DRAFT["dflash_config"], "target_layer_ids": [93]}}, BadConfig, r"\[93\]"),
        ({"dflash_config": {**DRAFT["dflash_config"], "block_size": 1}}, BadConfig, "block_size 1 drafts nothing"),
    ],
)
def test_a_draft_of_another_model_is_refused(change, error, match):
    with pytest.raises(error, match=match):
        recipes.drafter_from_config({**DRAFT, **change}, recipes.load_geometry("kimi-k3.1-pro"))


def test_building_needs_neither_torch_nor_numpy():
    code = (
        "import sys; from palimpsest import recipes; from palimpsest.core.spec import Limits\n"
        "g = recipes.load_geometry('kimi-k3.1-pro')\n"
        "p = recipes.model_program(g, Limits(1 << 20, 4096, 16), recipes.default_formats(g), drafter='dflash2')\n"
        "print(len(p.all_buffers) > 5000, [m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True []"
