"""Kimi K3's linear-attention layers (Kimi Delta Attention): heads over the ranks, a state that does not grow with the context.

What one request keeps per layer: the fp32 state [heads, dim, dim] and the last rows of the short convolutions. The scan works in
chunks, so its workspace is scratch of one chunk and not of the whole row count.
"""

from palimpsest.core.errors import Unsupported
from palimpsest.core.geometry import Kda
from palimpsest.core.units import dtype_bytes
from palimpsest.recipes import ops
from palimpsest.recipes.moe import reduce_rows
from palimpsest.recipes.sheet import Sheet


def local_heads(sheet: Sheet) -> tuple[Kda, int]:
    """The linear attention and the heads of one rank. Raises Unsupported when the ranks do not divide them."""
    kda, ranks = sheet.body.kda, sheet.limits.ranks
    assert kda is not None, "layer_weights refuses linear layers without heads"
    if kda.heads % ranks:
        raise Unsupported(f"{ranks} ranks do not divide the {kda.heads} linear-attention heads of {sheet.geometry.name}")
    return kda, kda.heads // ranks


def linear_attention(sheet: Sheet, inside: str, into: str = "") -> str:
    """The steps from the normed rows ``inside`` to the buffer with the attention's output, which is returned."""
    hidden, (kda, heads) = sheet.geometry.hidden, local_heads(sheet)
    sizes = {"hidden": hidden, "heads": heads, "dim": kda.dim}
    wide, width = {"rows": sheet.limits.rows, "fixed:qkv": 3, "heads": heads, "fixed": kda.dim}, heads * kda.dim
    formula = f"rows x 3 x {heads} heads x {kda.dim} x {dtype_bytes(sheet.act)}"
    raw, qkv = (sheet.buffer(name, sheet.act, wide, formula) for name in ("kda_raw", "kda_qkv"))
    _project(sheet, inside, raw, sizes)
    _convolve(sheet, raw, qkv, (kda, heads))
    decay = sheet.rows("kda_decay", width, "fp32", of=f"{heads} heads x {kda.dim}")
    beta = sheet.rows("kda_beta", heads, "fp32", of=f"{heads} heads")
    gates = {role: sheet.w(f"kda_{role}") for role in ("f_a", "f_b", "b", "a_log", "dt_bias")}
    sheet.step(ops.KDA_GATES, "kda_gates", "kda", {"input": inside, "decay": decay, "beta": beta} | gates, **sizes)
    state = sheet.buffer(
        "kda_state", "fp32", {"heads": heads, "fixed:k": kda.dim, "fixed:v": kda.dim},
        f"{heads} heads x {kda.dim} x {kda.dim} x 4", "persistent",
    )  # fmt: skip
    out = sheet.rows("kda_out", width, of=f"{heads} heads x {kda.dim}")
    roles = {"qkv": qkv, "decay": decay, "beta": beta, "state": state, "out": out}
    sheet.step(ops.KDA_SCAN, "kda_scan", "kda", roles, heads=heads, dim=kda.dim, chunk=ops.KDA_CHUNK)
    partial = sheet.rows("partial", hidden, "fp32")
    roles = {"input": inside, "out": out, "gate": sheet.w("kda_gate"), "o_norm": sheet.w("kda_o_norm"), "o": sheet.w("kda_o")}
    sheet.step(ops.KDA_OUTPUT, "kda_output", "kda", roles | {"partial": partial}, **sizes)
    return reduce_rows(sheet, "attention", partial, hidden, into)


def _project(sheet: Sheet, inside: str, raw: str, sizes: dict[str, int]) -> None:
    roles = {"input": inside, "raw": raw} | {role: sheet.w(f"kda_{role}") for role in "qkv"}
    sheet.step(ops.KDA_PROJECT, "kda_project", "kda", roles, **sizes)


def _convolve(sheet: Sheet, raw: str, qkv: str, local: tuple[Kda, int]) -> None:
    kda, heads = local
    kept = max(1, kda.conv_kernel - 1)
    state = sheet.buffer(
        "conv_state", sheet.act, {"fixed:taps": kept, "fixed:qkv": 3, "heads": heads, "fixed": kda.dim},
        f"{kept} rows x 3 x {heads} heads x {kda.dim} x {dtype_bytes(sheet.act)}", "persistent",
    )  # fmt: skip
    roles = {"raw": raw, "conv_state": state, "qkv": qkv} | {f"{role}_conv": sheet.w(f"kda_{role}_conv") for role in "qkv"}
    sheet.step(ops.KDA_CONV, "kda_conv", "kda", roles, heads=heads, dim=kda.dim, kernel=kda.conv_kernel)
