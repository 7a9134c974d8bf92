"""What a config.json may say: both spellings mean the same, and everything that is not computed is refused by name."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest import recipes
from palimpsest.core.errors import BadConfig, UnknownName, Unsupported, UserError
from palimpsest.recipes.table import recipe

PRESETS = Path(recipes.__file__).parent / "presets"


def config(name):
    return json.loads((PRESETS / f"{name}.json").read_text("utf-8"))


def load(data):
    return recipes.geometry_from_config(data, "model")


def changed(name, path, value=None, drop=False):
    """The preset with one field (dotted path) set, or dropped."""
    data = config(name)
    at = data
    *parents, last = path.split(".")
    for key in parents:
        at = at.setdefault(key, {})
    if drop:
        del at[last]
    else:
        at[last] = value
    return data


def nest(data, holder):
    """Move the flat indexer fields of ``holder`` into ``dsa_config``."""
    holder["dsa_config"] = {key: holder.pop(key) for key in ("index_n_heads", "index_head_dim", "index_topk")}
    return data


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.2"])
def test_a_nested_dsa_config_means_the_same_as_flat_fields(name):
    nested = config(name)
    assert load(nest(nested, nested)) == load(config(name))


def test_flat_fields_and_places_of_dsa_config_mean_the_same_for_kimi():
    wanted = load(config("kimi-k3.1-pro"))
    flat = config("kimi-k3.1-pro")
    flat["text_config"] |= flat["text_config"].pop("dsa_config")
    assert load(flat) == wanted
    outside = config("kimi-k3.1-pro")
    outside["dsa_config"] = outside["text_config"].pop("dsa_config")
    assert load(outside) == wanted
    whole = config("kimi-k3.1-pro")
    whole |= {**whole.pop("text_config"), "model_type": "kimi_k31"}
    assert load(whole) == wanted
    short = changed("kimi-k3.1-pro", "text_config.dsa_config", {"n_heads": 32, "head_dim": 128, "top_k": 2048})
    assert load(short) == wanted


def test_kimi_layer_list_inside_dsa_config_must_be_the_full_attention_layers():
    full = config("kimi-k3.1-pro")["text_config"]["linear_attn_config"]["full_attn_layers"]
    assert load(changed("kimi-k3.1-pro", "text_config.dsa_config.layers", full)) == load(config("kimi-k3.1-pro"))
    for wrong in ([n - 1 for n in full], full[:-1], [*full, full[-1]]):
        with pytest.raises(
            BadConfig, match=r"must be exactly the full-attention layers \(1-based\): it is \[.*full_attn_layers is \[4, 8"
        ):
            load(changed("kimi-k3.1-pro", "text_config.dsa_config.layers", wrong))


def _shift(lists):
    return [n - 1 for n in lists["full_attn_layers"]], [n - 1 for n in lists["kda_layers"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_shift, r"1\.\.93 once \(1-based\): outside \[0\], missing \[93\]"),
        (lambda x: (x["full_attn_layers"][:-1], x["kda_layers"]), r"missing \[93\]"),
        (lambda x: ([*x["full_attn_layers"], 4], x["kda_layers"]), r"named twice \[4\]"),
        (lambda x: (x["full_attn_layers"], [*x["kda_layers"], 8]), r"named twice \[8\]"),
        (lambda x: ([n - 1 for n in x["full_attn_layers"]], x["kda_layers"]), r"missing \[4, 8, .*\], named twice \[3, 7"),
        (lambda x: ([*x["full_attn_layers"], 94], x["kda_layers"]), r"outside \[94\]"),
    ],
)
def test_kimi_layer_lists_cover_the_layers_exactly(change, message):
    data = config("kimi-k3.1-pro")
    lists = data["text_config"]["linear_attn_config"]
    lists["full_attn_layers"], lists["kda_layers"] = change(lists)
    with pytest.raises(BadConfig, match=message) as raised:
        load(data)
    assert "full_attn_layers = [" in str(raised.value)
    assert "kda_layers = [" in str(raised.value)


def test_older_and_newer_rope_spellings_mean_the_same():
    old = config("deepseek-v3.2")
    new = config("deepseek-v3.2")
    scaling = new.pop("rope_scaling")
    new["rope_parameters"] = {**scaling, "rope_type": scaling.pop("type"), "rope_theta": new.pop("rope_theta")}
    new["rope_parameters"].pop("type", None)
    assert load(new) == load(old)
    both = config("deepseek-v3.2")
    both["rope_parameters"] = copy.deepcopy(new["rope_parameters"])
    assert load(both) == load(old)
    both["rope_parameters"]["factor"] = 16
    with pytest.raises(BadConfig, match="rope_parameters and rope_scaling disagree"):
        load(both)
    flat = config("glm-5.2")
    flat["rope_theta"] = flat.pop("rope_parameters")["rope_theta"]
    flat["rope_scaling"] = None
    assert load(flat) == load(config("glm-5.2"))


def test_a_base_inside_rope_parameters_wins_over_one_beside_it():
    assert load(changed("glm-5.2", "rope_theta", 10000)) == load(config("glm-5.2"))


def test_glm_schedule_rules():
    listed = config("glm-5.2")
    ruled = changed("glm-5.2", "indexer_types", drop=True)
    letters = "".join({"full": "F", "shared": "S"}[kind] for kind in listed["indexer_types"])
    spelled = {**ruled, "index_topk_freq": 1, "index_topk_pattern": letters}
    assert load(ruled).schedule == load(listed).schedule == load(spelled).schedule
    assert load({**spelled, "index_topk_pattern": listed["indexer_types"]}).schedule == load(listed).schedule
    assert load(changed("glm-5", "index_topk_freq", 4)).full_layers == (0, *range(1, 78, 4))


def test_flags_of_the_index_record_are_read():
    assert load(changed("deepseek-v3.2", "quantization_config.scale_fmt", "fp32")).indexer.scale_format == "fp32"
    assert load(changed("deepseek-v3.2", "index_scale_fmt", "fp32")).indexer.scale_format == "fp32"
    assert load(changed("kimi-k3.1-pro", "text_config.dsa_config.scale_fmt", "fp32")).indexer.scale_format == "fp32"
    assert load(changed("kimi-k3.1-pro", "text_config.dsa_config.hadamard", True)).indexer.hadamard
    assert load(changed("deepseek-v3.2", "index_hadamard", True)).indexer.hadamard
    assert load(changed("glm-5.2", "indexer_rope_interleave", False)).indexer.rope_layout == "half"
    assert load(changed("glm-5.2", "indexer_rope_interleave", drop=True)).indexer.rope_layout == "interleaved"
    assert load(changed("deepseek-v3.2", "indexer_rope_interleave", True)).indexer.rope_layout == "interleaved"
    assert load(changed("kimi-k3.1-pro", "text_config.rms_norm_eps", 1e-6)).indexer.norm_eps == 1e-6
    assert load(changed("deepseek-v3.2", "rms_norm_eps", 1e-5)).indexer.norm_eps == 1e-6
    assert not load(changed("kimi-k3.1-pro", "text_config.mla_use_output_gate", False)).output_gate


K, D, G = "kimi-k3.1-pro", "deepseek-v3.2", "glm-5.2"
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({}, BadConfig, r"names neither architectures nor model_type; supported: KimiK31ForConditionalGeneration \(kimi_k3\)"),
        ([], BadConfig, "must be a JSON object"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            Unsupported,
            "architecture 'LlamaForCausalLM' is not supported; supported: Kimi",
        ),
        ({"model_type": "deepseek_v3"}, Unsupported, "'deepseek_v3' is not supported: its attention is dense; supported"),
        ({"model_type": "glm5_next"}, Unsupported, r"its indexer scores pools of keys \(kpool\)"),
        ({"architectures": "GlmMoeDsaForCausalLM"}, BadConfig, "architectures must be a list of strings"),
        (changed(G, "model_type", "deepseek_v32"), BadConfig, "name different families: deepseek_v32, glm_dsa"),
        (changed(G, "index_kpool", 16), Unsupported, "index_kpool = 16: an indexer that scores pools"),
        (
            changed(K, "text_config.dsa_config", drop=True),
            Unsupported,
            "index_n_heads is missing: without an indexer attention would be dense",
        ),
        (changed(D, "index_topk", None), Unsupported, "index_topk is missing: without an indexer"),
        (
            changed(K, "text_config.dsa_config.pool", 4),
            Unsupported,
            r"text_config\.dsa_config\.pool is not understood.*understood: dsa_layers",
        ),
        (changed(K, "text_config.index_topk", 1024), BadConfig, "index_topk = 1024 but text_config.dsa_config.index_topk = 2048"),
        (changed(K, "text_config.mla_use_nope", False), Unsupported, "mla_use_nope is not true"),
        (changed(K, "text_config.rope_scaling", YARN), Unsupported, "rope_scaling is set although mla_use_nope is true"),
        (changed(K, "text_config.linear_attn_config", drop=True), BadConfig, "text_config.linear_attn_config is missing"),
        (changed(K, "text_config.quantization_config.ignore", ["lm_head"]), Unsupported, "does not leave self_attn unquantised"),
        (changed(K, "index_topk", 64), BadConfig, "index_topk = 64 but text_config.dsa_config.index_topk = 2048"),
        (changed(D, "attention_bias", True), Unsupported, "attention_bias = True: biases on the attention projections"),
        (changed(D, "num_key_value_heads", 8), BadConfig, "num_key_value_heads = 8 but num_attention_heads = 128"),
        (changed(D, "q_lora_rank", None), Unsupported, "q_lora_rank is null or missing"),
        (changed(D, "hidden_size", "7168"), BadConfig, "hidden_size = '7168' must be a whole number from 1"),
        (changed(D, "hidden_size", True), BadConfig, "hidden_size = True must be a whole number"),
        (changed(D, "hidden_size", drop=True), BadConfig, "hidden_size is missing"),
        (
            changed(D, "num_hidden_layers", 1 << 30),
            BadConfig,
            "num_hidden_layers = 1073741824 must be a whole number from 1 to 4096",
        ),
        (changed(D, "qk_rope_head_dim", 63), BadConfig, "qk_rope_head_dim = 63 must be even"),
        (changed(G, "qk_head_dim", 192), BadConfig, r"qk_head_dim = 192 but qk_nope_head_dim 192 \+ qk_rope_head_dim 64 = 256"),
        (changed(D, "index_head_dim", 256), Unsupported, "an index record has one scale"),
        (changed(D, "index_head_dim", 32), BadConfig, "qk_rope_head_dim 64 exceeds index_head_dim 32"),
        (
            changed(D, "rope_scaling.type", "longrope"),
            Unsupported,
            "rope type 'longrope' in rope_scaling is not supported; supported: default, yarn",
        ),
        (changed(D, "rope_scaling.mscale", 0.707), Unsupported, "scales cos and sin by 0.92.*only 1 is supported"),
        (changed(D, "rope_scaling.mscale_all_dim", drop=True), Unsupported, "scales cos and sin by 1.36"),
        (changed(D, "rope_scaling.attention_factor", 1.2), Unsupported, "scales cos and sin by 1.2"),
        (changed(D, "rope_scaling.truncate", False), Unsupported, "truncate = false"),
        (changed(D, "rope_scaling.factor", -4), BadConfig, "factor = -4 must be a number from 1 to 1e"),
        (changed(D, "rope_scaling.short_factor", [1]), Unsupported, "short_factor is not understood"),
        (changed(D, "rope_theta", 1e300), BadConfig, r"rope_theta = 1e\+300 must be a number from 2 to 1e\+15"),
        (changed(D, "rope_scaling.beta_slow", 1e-320), BadConfig, "beta_slow = 1e-320 must be a number from 0.001"),
        (changed(D, "hidden_size", 10**5000), BadConfig, "hidden_size = a value too long to print must be a whole number"),
        (changed(D, "index_topk", [10**5000]), BadConfig, "index_topk = a value too long to print"),
        (changed(K, "text_config.rms_norm_eps", 7), BadConfig, "rms_norm_eps = 7 must be a number from 1e-30 to 1"),
        (changed(D, "rope_theta", drop=True), BadConfig, "rope_theta is missing"),
        (changed(D, "partial_rotary_factor", 0.5), Unsupported, "partial_rotary_factor = 0.5: only 1"),
        (changed(D, "rope_interleave", False), Unsupported, "rope_interleave = false"),
        (changed(D, "layer_types", ["full_attention"] * 61), Unsupported, "layer_types names 'full_attention'"),
        (
            changed(D, "layer_types", ["indexed_attention"] * 60),
            Unsupported,
            "layer_types has 60 entries but num_hidden_layers = 61",
        ),
        (changed(D, "indexer_types", ["full"] * 61), Unsupported, "indexer_types = "),
        (changed(D, "index_topk_freq", 4), Unsupported, "index_topk_freq = 4: every DeepSeek-V3.2 layer"),
        (changed(D, "quantization_config.quant_method", "awq"), Unsupported, "quant_method = 'awq'"),
        (changed(D, "quantization_config.weight_block_size", [128]), BadConfig, r"weight_block_size = \[128\] must be two"),
        (
            changed(D, "quantization_config.scale_fmt", "e8"),
            Unsupported,
            "index scale format 'e8' is not supported; choose from ue8m0, fp32",
        ),
        (changed(G, "indexer_types", ["shared"] + ["full"] * 77), BadConfig, "indexer_types makes layer 0 shared"),
        (changed(G, "indexer_types", ["full"] * 79), BadConfig, "indexer_types has 79 entries but num_hidden_layers = 78"),
        (changed(G, "indexer_types", ["full"] * 77 + ["none"]), BadConfig, "indexer_types names 'none'"),
        ({**changed(G, "indexer_types", drop=True), "index_topk_pattern": "FSX"}, BadConfig, "index_topk_pattern names 'X'"),
        (
            {**changed(G, "indexer_types", drop=True), "index_skip_topk_offset": 0},
            BadConfig,
            "index_topk_freq makes layer 0 shared",
        ),
    ],
)
def test_refusals_name_the_field_and_what_is_supported(data, error, message):
    with pytest.raises(error, match=message) as raised:
        load(data)
    assert "\n" not in str(raised.value)


def test_an_unknown_family_lists_the_known_ones():
    with pytest.raises(UnknownName, match="unknown family 'x'; known: deepseek_v32, glm_dsa, kimi_k31"):
        recipe("x")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


def _paths(data, prefix=""):
    for key, value in data.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")


@pytest.mark.parametrize("name", [K, D, G])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_value_in_any_field_loads_or_is_refused_politely(name, data):
    path = data.draw(st.sampled_from(sorted(_paths(config(name)))))
    try:
        geometry = load(changed(name, path, data.draw(_JSON)))
    except UserError:
        return
    assert geometry.full_layers
    assert geometry.indexer.topk >= 1
    assert 0 < geometry.softmax_scale < float("inf")
    assert all(0 < f <= 1 for f in recipes.tables(geometry).get("inv_freq", ()))
