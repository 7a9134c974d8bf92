"""Weight bytes: hand-computed totals against the public parameter counts, storage by storage, and exactly from headers."""

import json
from pathlib import Path

import pytest

from palimpsest import recipes
from palimpsest.checkpoint.synthetic import PRESETS, config_of, tensors_of
from palimpsest.core.errors import Unsupported
from palimpsest.core.geometry import Formats, index_record_bytes, latent_record_bytes
from palimpsest.core.spec import Limits
from palimpsest.recipes.tensors import EXPERT, LINEAR, Weight, layer_weights, outer_weights

SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
FOLDER = Path(recipes.__file__).parent / "presets"
MIB = 1 << 20


def weight_bytes(g, ranks, storage, layer=None):
    program = recipes.model_program(g, Limits(1 << 16, 64, ranks), recipes.default_formats(g), weights=storage)
    at = "" if layer is None else f"layer{layer:03d}."
    return sum(b.nbytes for b in program.buffers if b.kind == "weights" and b.name.startswith(at))


def mla(hidden, heads, q, nope, v, index_heads, gate=False):
    attention = hidden * q + q + q * heads * (nope + 64) + hidden * 576 + 512 + 512 * heads * (nope + v) + heads * v * hidden
    indexer = q * index_heads * 128 + hidden * 128 + 256 + hidden * index_heads
    return attention + (hidden * heads * v if gate else 0), indexer


def test_deepseek_v32_has_671b_parameters_and_its_indexers():
    attention, indexer = mla(7168, 128, 1536, 128, 128, 64)
    dense, moe = 3 * 7168 * 18432, 257 * 3 * 7168 * 2048 + 256 * 7168 + 256
    v3 = 61 * (attention + 2 * 7168) + 3 * dense + 58 * moe + 2 * 129280 * 7168 + 7168
    assert v3 == 671_026_419_200
    assert recipes.model_parameters(recipes.load_geometry("deepseek-v3.2")) == v3 + 61 * indexer == 671_877_944_064


def test_glm_5_has_744b_parameters_and_glm_52_57_indexers_less():
    attention, indexer = mla(6144, 64, 2048, 192, 256, 32)
    dense, moe = 3 * 6144 * 12288, 257 * 3 * 6144 * 2048 + 256 * 6144 + 256
    rest = 78 * (attention + 2 * 6144) + 3 * dense + 75 * moe + 2 * 154880 * 6144 + 6144
    for name, indexers in (("glm-5", 78), ("glm-5.1", 78), ("glm-5.2", 21)):
        count = recipes.model_parameters(recipes.load_geometry(name))
        assert count == rest + indexers * indexer
        assert round(count / 1e9) in (743, 744)
    assert rest + 78 * indexer == 743_911_218_432


def test_kimi_k31_has_2_8t_parameters():
    attention, indexer = mla(7168, 96, 1536, 128, 128, 32, gate=True)
    width = 96 * 128
    kda = 4 * width * 7168 + 3 * width * 4 + 128 * 7168 + 128 * width + 96 * 7168 + 96 + width + 128 + width * 7168
    mixes = 2 * 2 * 7168
    experts = 896 * 3 * 3584 * 3072
    moe = experts + 2 * 3584 * 7168 + 3584 + 3 * 7168 * 2 * 3072 + 896 * 7168 + 896
    layers = 93 * (2 * 7168 + mixes) + 24 * (attention + indexer) + 69 * kda + 3 * 7168 * 33792 + 92 * moe
    count = layers + 2 * 163840 * 7168 + 7168 + 2 * 7168
    assert recipes.model_parameters(recipes.load_geometry("kimi-k3.1-pro")) == count == 2_779_663_002_208
    assert round(count / 1e12, 1) == 2.8
    # 16 of 896 experts are active; the head counts, the embedding's one row does not
    active = count - 92 * experts * (896 - 16) // 896 - 163840 * 7168
    assert round(active / 1e9) in range(100, 107), "public figure: 104B active"


@pytest.mark.parametrize("name", recipes.presets())
def test_one_rank_in_bf16_is_two_bytes_a_parameter(name):
    """All but the fp32 ones: router bias; KDA's convolutions, A_log, dt_bias and output norm."""
    g = recipes.load_geometry(name)
    fp32 = 256 * (g.layers - 3)
    if name.startswith("kimi"):
        fp32 = 92 * 896 + 69 * (3 * 12288 * 4 + 96 + 12288 + 128)
    assert weight_bytes(g, 1, "bf16") == 2 * recipes.model_parameters(g) + 2 * fp32


def test_deepseek_v32_in_fp8_by_hand():
    """Every linear weight in e4m3 with one fp32 scale per 128 x 128; embedding, head, norms, routers, index_w in bf16."""
    g = recipes.load_geometry("deepseek-v3.2")
    linear = [
        (1536, 7168), (128 * 192, 1536), (576, 7168), (128 * 256, 512), (7168, 128 * 128), (64 * 128, 1536), (128, 7168),
    ]  # fmt: skip
    stored = 61 * sum(a * b + 4 * -(-a // 128) * -(-b // 128) for a, b in linear)
    expert = 3 * (2048 * 7168 + 4 * 16 * 56)
    stored += 58 * 257 * expert + 3 * 3 * (18432 * 7168 + 4 * 144 * 56)
    norms = 61 * (1536 + 512 + 2 * 128 + 2 * 7168) + 7168
    stored += 2 * (norms + 61 * 64 * 7168 + 58 * 256 * 7168 + 2 * 129280 * 7168) + 4 * 58 * 256
    assert weight_bytes(g, 1, "checkpoint") == weight_bytes(g, 1, "fp8") == stored


def test_kimi_experts_in_mxfp4_by_hand():
    """Two values to a byte and one e8m0 byte per 32 columns: 17/32 byte a value; the rank keeps 192 of 3072 columns."""
    g = recipes.load_geometry("kimi-k3.1-pro")
    for ranks in (1, 16):
        program = recipes.model_program(g, Limits(1 << 16, 64, ranks), recipes.default_formats(g))
        sizes = {b.name: b.nbytes for b in program.buffers if b.name.startswith("layer001.w.")}
        inter = 3072 // ranks
        assert sizes["layer001.w.experts_gate"] == 896 * inter * (3584 // 2 + 3584 // 32)
        assert sizes["layer001.w.experts_down"] == 896 * 3584 * (inter // 2 + inter // 32)
        assert sizes["layer001.w.latent_down"] == 3584 * 7168 * 2
        assert sizes["layer001.w.shared_gate_proj"] == 6144 // ranks * 7168 * 2
    assert dict(program.facts)["weights"] == "mxfp4"
    # the experts of all layers on all ranks together, in the public size of an MXFP4 checkpoint
    total = 16 * 92 * sum(sizes[f"layer001.w.experts_{part}"] for part in ("gate", "up", "down"))
    assert total == 92 * 896 * 3 * 3584 * 3072 * 17 // 32


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.2", "kimi-k3.1-pro"])
@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_attention_weights_are_those_of_the_layer_program(name, ranks):
    g = recipes.load_geometry(name)
    limits, formats = Limits(1 << 16, 64, ranks), recipes.default_formats(g)
    program = recipes.model_program(g, limits, formats, weights="bf16")
    for layer in {g.schedule.index(kind) for kind in set(g.schedule) - {"linear"}}:
        at = f"layer{layer:03d}."
        for buffer in recipes.program(g, limits, formats, layer).buffers:
            if buffer.kind == "weights":
                here = program.by_name[at + buffer.name]
                assert (here.nbytes, here.planes[0].dtype) == (buffer.nbytes, buffer.planes[0].dtype), buffer.name
                assert here.planes[0].shape == buffer.planes[0].shape


@pytest.mark.parametrize("name", recipes.presets())
@pytest.mark.parametrize("storage", ["bf16", "fp8", "mxfp4"])
def test_ranks_together_hold_at_least_the_model_and_split_what_can_be_split(name, storage):
    g = recipes.load_geometry(name)
    one = weight_bytes(g, 1, storage)
    shares = [weight_bytes(g, ranks, storage) for ranks in (2, 4, 8, 16)]
    assert all(ranks * share >= one for ranks, share in zip((2, 4, 8, 16), shares, strict=True))
    assert sorted(shares, reverse=True) == shares
    assert shares[-1] < one / 8


def test_a_scale_block_that_two_ranks_need_is_counted_on_both():
    weight = Weight("w", "w", (320, 256), 0, 1, LINEAR)
    assert [weight.blocks(ranks, 0, 128) for ranks in (1, 2, 5)] == [3, 2, 1]
    # 64 rows of 320 start inside a block on every other rank, and 192 rows of 768 span two of them
    assert Weight("w", "w", (768, 1), 0, 1, LINEAR).blocks(4, 0, 128) == 2
    assert Weight("w", "w", (960, 1), 0, 1, LINEAR).blocks(3, 0, 128) == 3
    assert weight.blocks(5, 1, 128) == 2


def test_uneven_cuts_take_the_largest_share():
    assert Weight("w", "w", (129280, 64), 0).local(3) == (43094, 64)
    assert Weight("w", "w", (10 * 192, 64), 0, 192).local(4) == (3 * 192, 64)
    assert Weight("w", "w", (7, 5)).local(4) == (7, 5)


def test_public_cache_sizes_to_the_byte():
    """132 MiB of index and 576 MiB of latent history at 1M; 656 B records for V3.2 and GLM; caches of all layers, all ranks."""
    for name, tokens, index, latent in (
        ("kimi-k3.1-pro", 1 << 20, 132, 576),
        ("glm-5.2", 1 << 20, 132, 656),
        ("deepseek-v3.2", 163840, 132, 656),
        ("glm-5", 131072, 132, 656),
    ):
        g = recipes.load_geometry(name)
        formats = recipes.default_formats(g)
        assert (index_record_bytes(g, formats), latent_record_bytes(g, formats)) == (index, latent)
        program = recipes.model_program(g, Limits(tokens, 64, 16), formats)
        held = {end: sum(b.nbytes for b in program.buffers if b.name.endswith(end)) for end in (".index_cache", ".latent_cache")}
        assert 16 * held[".index_cache"] == len(g.full_layers) * tokens * index
        assert 16 * held[".latent_cache"] == len(g.sparse_layers) * tokens * latent
        first = f"layer{g.full_layers[0]:03d}."
        assert program.by_name[f"{first}index_history"].nbytes == tokens * index
        assert program.by_name[f"{first}latent_history"].nbytes == tokens * latent
    k31 = recipes.load_geometry("kimi-k3.1-pro")
    program = recipes.model_program(k31, Limits(1 << 20, 4096, 16), recipes.default_formats(k31))
    assert program.by_name["layer003.index_history"].nbytes == 132 * MIB
    assert program.by_name["layer003.latent_history"].nbytes == 576 * MIB
    assert program.by_name["ids"].nbytes == 32 * MIB
    caches = [b.nbytes for b in program.buffers if b.name.endswith(("index_cache", "latent_cache"))]
    assert 16 * sum(caches) == 24 * 708 * MIB


@pytest.mark.parametrize(("latent", "record"), [("fp8", 576), ("fp8_ds_mla", 656), ("bf16", 1152), ("fp32", 2304)])
def test_cache_bytes_follow_the_record_format(latent, record):
    g = recipes.load_geometry("kimi-k3.1-pro")
    program = recipes.model_program(g, Limits(1 << 18, 64, 8), Formats(latent=latent))
    assert program.by_name["layer092.latent_cache"].nbytes == (1 << 15) * record


def headers(shape):
    """(dtype, shape, bytes) by name of a generated checkpoint, with its block scales, as its files would have them."""
    found = {}
    for name, draw in tensors_of(shape).items():
        count = 1
        for size in draw.shape:
            count *= size
        found[name] = (draw.dtype, draw.shape, count * SIZES[draw.dtype])
        if draw.dtype == "F8_E4M3":
            blocks = tuple(-(-size // shape.fp8) for size in draw.shape)
            found[f"{name}_scale_inv"] = ("F32", blocks, 4 * blocks[0] * blocks[1])
    return found


def generated(name):
    shape = PRESETS[name]
    g = recipes.geometry_from_config(config_of(shape), name)
    tensors = headers(shape)
    return g, tensors, recipes.resolve_prefix(g, tensors)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_headers_and_plan_agree_to_the_byte(name, ranks):
    """Two ways to the same number: the table's shapes, and what the files hold."""
    g, tensors, prefix = generated(name)
    found = recipes.weights_from_headers(tensors, g, Limits(4096, 64, ranks), prefix)
    assert (found.unknown, found.missing, found.unused) == ((), (), ())
    program = recipes.model_program(g, Limits(4096, 64, ranks), recipes.default_formats(g))
    assert found.per_rank == sum(b.nbytes for b in program.buffers if b.kind == "weights")
    assert found.per_rank == sum(count for _, count in found.groups)
    assert found.stored == sum(nbytes for _, _, nbytes in tensors.values())
    if ranks == 1:
        # K3 stores A_log padded to 128 entries; only its heads are resident
        padding = sum(4 * (s[0] - g.body.kda.heads) for n, (_, s, _) in tensors.items() if n.endswith("A_log"))
        assert found.per_rank == found.stored - padding


def test_headers_of_packed_experts_agree_too():
    shape = PRESETS["tiny-k31"]
    config = config_of(shape)
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["re:.*self_attn.*"],
    }  # fmt: skip
    g = recipes.geometry_from_config(config, "packed")
    assert g.body.expert_format == "mxfp4"
    tensors = {}
    for name, (dtype, size, nbytes) in headers(shape).items():
        if ".experts." in name:
            rows, columns = size
            tensors[name.replace(".weight", ".weight_packed")] = ("U8", (rows, columns // 2), rows * columns // 2)
            tensors[name.replace(".weight", ".weight_scale")] = ("U8", (rows, columns // 32), rows * columns // 32)
        else:
            tensors[name] = (dtype, size, nbytes)
    prefix = recipes.resolve_prefix(g, tensors)
    for ranks in (1, 2, 4):
        found = recipes.weights_from_headers(tensors, g, Limits(4096, 64, ranks), prefix)
        assert (found.unknown, found.missing) == ((), ())
        assert found.per_rank == weight_bytes(g, ranks, "checkpoint")


def test_what_is_not_understood_is_counted_whole_and_named():
    g, tensors, prefix = generated("tiny-glm")
    clean = recipes.weights_from_headers(tensors, g, Limits(4096, 64, 4), prefix)
    odd = {
        "vision_tower.patch.weight": ("BF16", (10, 10), 200),
        "model.layers.1.self_attn.extra.weight": ("BF16", (4, 4), 32),
        "model.layers.1.mlp.experts.4.up_proj.weight": ("BF16", (128, 256), 128 * 256 * 2),
        "model.layers.4.eh_proj.weight": ("BF16", (256, 512), 256 * 512 * 2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (32,), 128),
    }
    changed = dict(tensors)
    dtype, _, _ = changed.pop("model.norm.weight")
    changed["model.layers.0.input_layernorm.weight"] = (dtype, (257,), 514)
    found = recipes.weights_from_headers(changed | odd, g, Limits(4096, 64, 4), prefix)
    assert [name for name, _, _ in found.unknown] == ["model.layers.0.input_layernorm.weight", *list(odd)[:3]]
    assert [why for _, _, why in found.unknown] == [
        "shape [257] is not that of [256]", "the model has no such tensor", "the model has no such tensor",
        "the model has experts 0..3",
    ]  # fmt: skip
    assert found.unused == tuple(list(odd)[3:])
    assert found.missing == ("model.norm.weight", "model.layers.0.input_layernorm.weight")
    assert dict(found.groups)["not understood"] == 514 + 200 + 32 + 128 * 256 * 2
    assert found.per_rank == clean.per_rank - 512 - 512 + 514 + 200 + 32 + 128 * 256 * 2


def test_missing_experts_are_counted_in_one_line():
    g, tensors, prefix = generated("tiny-glm")
    less = {n: t for n, t in tensors.items() if "layers.2.mlp.experts.3." not in n}
    found = recipes.weights_from_headers(less, g, Limits(4096, 64, 1), prefix)
    assert found.missing == tuple(
        f"model.layers.2.mlp.experts.*.{part}_proj.weight (1 of 4 experts)" for part in ("gate", "up", "down")
    )


def test_headers_need_a_whole_configuration():
    config = json.loads((FOLDER / "glm-5.json").read_text("utf-8"))
    del config["vocab_size"]
    with pytest.raises(Unsupported, match="vocab_size"):
        recipes.weights_from_headers({}, recipes.geometry_from_config(config, "partial"), Limits(4096, 64, 1))


def test_every_role_and_tensor_name_is_distinct():
    for name in recipes.presets():
        g = recipes.load_geometry(name)
        for table in (outer_weights(g), *(layer_weights(g, layer) for layer in range(g.layers))):
            assert len({w.role for w in table}) == len({w.tensor for w in table}) == len(table)
            assert all(w.form not in (LINEAR, EXPERT) or len(w.shape) == 2 for w in table)
