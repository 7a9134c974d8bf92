"""The generated checkpoints spell their configurations and tensors as the recipes read them."""

import pytest

from palimpsest import recipes
from palimpsest.checkpoint.synthetic import PRESETS, config_of, tensors_of
from palimpsest.core.spec import Limits

LETTERS = {"full": "F", "shared": "S", "linear": "L"}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_generated_configurations_and_tensors_fit_the_recipe(name):
    shape = PRESETS[name]
    geometry = recipes.geometry_from_config(config_of(shape), name)
    assert "".join(LETTERS[kind] for kind in geometry.schedule) == shape.schedule
    sizes = (
        geometry.hidden,
        geometry.heads,
        geometry.q_lora,
        geometry.kv_lora,
        geometry.nope,
        geometry.rope.dims,
        geometry.v_dim,
    )
    assert sizes == (shape.hidden, shape.heads, shape.q_lora, shape.kv_lora, shape.nope, shape.rope, shape.v)
    index = geometry.indexer
    assert (index.heads, index.dim, index.topk) == (shape.index_heads, shape.index_dim, shape.topk)
    assert geometry.block_fp8 == (shape.fp8, shape.fp8)

    tensors = tensors_of(shape)
    prefix = recipes.resolve_prefix(geometry, tensors)
    for layer, kind in enumerate(geometry.schedule):
        required = recipes.attention_tensors(geometry, layer, prefix)
        assert {n: tensors[n].shape for n in required} == required
        assert not [n for n in tensors if n.startswith(recipes.forbidden_tensors(geometry, layer, prefix))]
        if kind != "linear":
            at = f"{prefix}layers.{layer}.self_attn."
            assert {n for n in tensors if n.startswith(at)} == set(required)
            recipes.program(geometry, Limits(4096, 16, 2), recipes.default_formats(geometry), layer)
