"""Which part of which tensor a rank keeps: every element exactly once over the ranks, in the shape the program plans."""

import dataclasses
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest import recipes
from palimpsest.core.errors import BadCheckpoint, Unsupported
from palimpsest.core.geometry import Geometry, Indexer, Rope
from palimpsest.core.spec import Limits

REPLICATED = {
    "w.q_a",
    "w.q_a_norm",
    "w.kv_a",
    "w.kv_a_norm",
    "w.index_q",
    "w.index_k",
    "w.index_k_norm",
    "w.index_k_norm_bias",
    "w.index_w",
}


def small(heads=4, family="kimi_k31", **changes):
    gate = family == "kimi_k31"
    layout = "none" if gate else "interleaved"
    geometry = Geometry(
        family=family,
        name="small",
        hidden=6,
        layers=3,
        heads=heads,
        q_lora=5,
        kv_lora=4,
        nope=3,
        rope=Rope(layout, 2),
        v_dim=2,
        softmax_scale=5**-0.5,
        latent_norm_eps=1e-6,
        output_gate=gate,
        indexer=Indexer(2, 4, 8, layout, 0 if gate else 2, 1e-6),
        schedule=("full", "linear" if gate else "shared", "full"),
        max_context=64,
    )
    return dataclasses.replace(geometry, **changes)


def taken(part):
    """Element coordinates of the source that a slice keeps, from ``view`` and ``ranges``, in order."""
    picked = []
    for index in product(*(range(a, b) for a, b in part.ranges)):
        flat = 0
        for at, size in zip(index, part.view, strict=True):
            flat = flat * size + at
        picked.append(flat)
    return picked


def by_rectangles(part):
    columns = part.source[1] if len(part.source) == 2 else 1
    return [row * columns + column for r0, r1, c0, c1 in part.rectangles() for row in range(r0, r1) for column in range(c0, c1)]


def product_of(shape):
    total = 1
    for size in shape:
        total *= size
    return total


@settings(max_examples=40, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 4, 6, 8]),
    split=st.integers(0, 3),
    nope=st.integers(1, 4),
    v_dim=st.integers(1, 4),
    kv_lora=st.integers(1, 5),
    family=st.sampled_from(["kimi_k31", "deepseek_v32", "glm_dsa"]),
)
def test_slices_cover_every_tensor_exactly_once_over_the_ranks(heads, split, nope, v_dim, kv_lora, family):
    g = small(heads, family, nope=nope, v_dim=v_dim, kv_lora=kv_lora)
    ranks = 1 << split
    if heads % ranks:
        with pytest.raises(Unsupported, match=f"the {heads} heads of small must divide evenly"):
            recipes.weight_slices(g, 0, 0, ranks)
        return
    shapes = recipes.attention_tensors(g, 0)
    seen: dict[str, list[int]] = {tensor: [] for tensor in shapes}
    for rank in range(ranks):
        for buffer, part in recipes.weight_slices(g, 0, rank, ranks).items():
            assert part.source == shapes[part.tensor]
            assert product_of(part.view) == product_of(part.source)
            elements = taken(part)
            assert len(elements) == product_of(part.shape)
            assert elements == by_rectangles(part)
            if buffer not in REPLICATED or rank == 0:
                seen[part.tensor] += elements
    for tensor, elements in seen.items():
        assert sorted(elements) == list(range(product_of(shapes[tensor]))), tensor


@pytest.mark.parametrize("family", ["kimi_k31", "deepseek_v32", "glm_dsa"])
def test_slices_have_the_shapes_the_program_plans(family):
    g = small(family=family)
    for layer, ranks in product(g.sparse_layers, (1, 2, 4)):
        program = recipes.program(g, Limits(64, 16, ranks), recipes.default_formats(g).replace(latent="bf16"), layer)
        planned = {b.name: b.planes[0].shape for b in program.buffers if b.kind == "weights"}
        for rank in range(ranks):
            assert {name: part.shape for name, part in recipes.weight_slices(g, layer, rank, ranks).items()} == planned


def test_uk_and_uv_are_the_two_halves_of_each_head():
    parts = recipes.weight_slices(small(), 0, 1, 2)
    assert parts["w.uk"].rectangles() == ((10, 13, 0, 4), (15, 18, 0, 4))
    assert parts["w.uv"].rectangles() == ((13, 15, 0, 4), (18, 20, 0, 4))
    assert parts["w.q_b"].rectangles() == ((10, 20, 0, 5),)
    assert parts["w.o"].rectangles() == ((0, 6, 4, 8),)
    assert parts["w.gate"].rectangles() == ((4, 8, 0, 6),)
    assert parts["w.uk"].tensor == "language_model.model.layers.0.self_attn.kv_b_proj.weight"


def test_names_and_shapes_of_the_published_checkpoints():
    k3 = recipes.attention_tensors(recipes.load_geometry("kimi-k3.1-pro"), 3)
    at = "language_model.model.layers.3.self_attn."
    assert k3 == {
        f"{at}q_a_proj.weight": (1536, 7168),
        f"{at}q_a_layernorm.weight": (1536,),
        f"{at}q_b_proj.weight": (18432, 1536),
        f"{at}kv_a_proj_with_mqa.weight": (576, 7168),
        f"{at}kv_a_layernorm.weight": (512,),
        f"{at}kv_b_proj.weight": (24576, 512),
        f"{at}o_proj.weight": (7168, 12288),
        f"{at}g_proj.weight": (12288, 7168),
        f"{at}indexer.wq_b.weight": (4096, 1536),
        f"{at}indexer.wk.weight": (128, 7168),
        f"{at}indexer.k_norm.weight": (128,),
        f"{at}indexer.k_norm.bias": (128,),
        f"{at}indexer.weights_proj.weight": (32, 7168),
    }
    assert recipes.attention_tensors(recipes.load_geometry("kimi-k3.1-pro"), 4) == {}
    glm = recipes.load_geometry("glm-5.2")
    full, shared = recipes.attention_tensors(glm, 2), recipes.attention_tensors(glm, 3)
    assert len(full) == 12
    assert len(shared) == 7
    assert not any("indexer" in name for name in shared)


def test_forbidden_names():
    glm, k3 = recipes.load_geometry("glm-5.2"), recipes.load_geometry("kimi-k3.1-pro")
    assert "model.layers.3.self_attn.indexer." in recipes.forbidden_tensors(glm, 3)
    full = recipes.forbidden_tensors(glm, 2)
    assert "model.layers.2.self_attn.indexer." not in full
    assert "model.layers.2.self_attn.indexer.weights_proj.bias" in full
    assert "model.layers.2.self_attn.g_proj." in full
    assert recipes.forbidden_tensors(k3, 4, "model.") == ("model.layers.4.self_attn.indexer.",)
    assert not any(".g_proj.w" in name or name.endswith(".g_proj.") for name in recipes.forbidden_tensors(k3, 3))
    for g in (glm, k3):
        for layer in range(g.layers):
            required = recipes.attention_tensors(g, layer)
            assert not [n for n in required if n.startswith(recipes.forbidden_tensors(g, layer))]


def test_the_prefix_is_found_in_the_checkpoint_names():
    k3 = recipes.load_geometry("kimi-k3.1-pro")
    for prefix in ("language_model.model.", "model.", "model.language_model."):
        assert recipes.resolve_prefix(k3, recipes.attention_tensors(k3, 3, prefix)) == prefix
    with pytest.raises(BadCheckpoint, match=r"holds none of language_model\.model\.layers\.3\.self_attn\.kv_a_proj_with_mqa"):
        recipes.resolve_prefix(k3, ["lm_head.weight"])
    both = [*recipes.attention_tensors(k3, 3, "model."), *recipes.attention_tensors(k3, 3)]
    with pytest.raises(BadCheckpoint, match="holds several of"):
        recipes.resolve_prefix(k3, both)


def test_layers_that_do_not_exist_are_refused():
    g = small()
    for layer in (-1, 3):
        for ask in (recipes.attention_tensors, recipes.forbidden_tensors):
            with pytest.raises(Unsupported, match=r"small has layers 0\.\.2"):
                ask(g, layer)
    with pytest.raises(Unsupported, match="layer 1 of small has no sparse attention"):
        recipes.weight_slices(g, 1, 0, 1)
    with pytest.raises(Unsupported, match="rank 2 of 2"):
        recipes.weight_slices(g, 0, 2, 2)
