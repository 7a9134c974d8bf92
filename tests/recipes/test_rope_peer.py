"""Softmax scale and inverse frequencies against transformers, bit for bit in fp32."""

import json
from pathlib import Path

import pytest

from palimpsest import recipes
from palimpsest.core.geometry import Rope, Yarn
from palimpsest.recipes.rope import inv_freq

pytestmark = pytest.mark.peer
PRESETS = Path(recipes.__file__).parent / "presets"


def _peer(model_type, **fields):
    """(inv_freq as Python floats, factor on cos and sin, softmax scale) of transformers' attention of ``model_type``."""
    if model_type == "deepseek_v32":
        from transformers.models.deepseek_v32 import configuration_deepseek_v32 as conf
        from transformers.models.deepseek_v32 import modeling_deepseek_v32 as model

        config, rotary = conf.DeepseekV32Config(**fields), model.DeepseekV32RotaryEmbedding
    else:
        from transformers.models.glm_moe_dsa import configuration_glm_moe_dsa as conf
        from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as model

        config, rotary = conf.GlmMoeDsaConfig(**fields), model.GlmMoeDsaRotaryEmbedding
    table = rotary(config)
    scale = model.yarn_apply_mscale(config.rope_parameters, config.qk_head_dim**-0.5)
    return tuple(table.inv_freq.tolist()), table.attention_scaling, scale


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5", "glm-5.1", "glm-5.2"])
def test_presets_have_the_peers_table_and_scale(name):
    data = json.loads((PRESETS / f"{name}.json").read_text("utf-8"))
    wanted, factor, scale = _peer(**{k: v for k, v in data.items() if k not in ("architectures", "quantization_config")})
    geometry = recipes.load_geometry(name)
    assert recipes.tables(geometry) == {"inv_freq": wanted}
    assert factor == 1.0
    assert geometry.softmax_scale == scale


@pytest.mark.parametrize("dims", [8, 16, 32, 64])
@pytest.mark.parametrize("theta", [10000.0, 1e6, 8e6])
@pytest.mark.parametrize(
    "yarn", [None, Yarn(40.0, 4096), Yarn(4.0, 256), Yarn(16.0, 65536, beta_fast=16.0, beta_slow=2.0), Yarn(1.5, 64)]
)
def test_small_tables_are_the_peers(dims, theta, yarn):
    parameters = {"rope_type": "default", "rope_theta": theta}
    if yarn is not None:
        parameters = {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_context,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    wanted, _, _ = _peer("deepseek_v32", qk_rope_head_dim=dims, rope_parameters=parameters)
    assert inv_freq(Rope("interleaved", dims, theta, yarn)) == wanted


def test_glm_schedules_are_the_peers():
    from transformers.models.glm_moe_dsa.configuration_glm_moe_dsa import GlmMoeDsaConfig

    data = json.loads((PRESETS / "glm-5.json").read_text("utf-8"))
    for every in (0, 1, 2, 3, 4, 7):
        for skip in (1, 2, 3, 5):
            rule = {"index_topk_freq": every, "index_skip_topk_offset": skip}
            wanted = GlmMoeDsaConfig(num_hidden_layers=78, **rule).indexer_types
            assert list(recipes.geometry_from_config({**data, **rule}, "glm").schedule) == wanted
