"""The MLP half of a layer: dense, routed over experts, and Kimi K3's routed experts in a smaller latent width.

Every rank runs every expert on its part of the intermediate size, so nothing is sent to an expert's rank: dispatch only sorts
(row, slot) pairs. Experts work in passes of at most ``expert_pairs`` pairs, which bounds their workspace whatever the row count.
"""

from palimpsest.core.units import ceil_div, dtype_bytes
from palimpsest.kernels.reduce_output.contract import CONTRACT as REDUCE_OUTPUT
from palimpsest.recipes import ops
from palimpsest.recipes.sheet import Sheet


def mlp(sheet: Sheet, layer: int, inside: str) -> str:
    """The steps from the normed rows ``inside`` to the buffer with the MLP's output, which is returned."""
    body, g = sheet.body, sheet.geometry
    if layer < body.dense_layers:
        hidden = _up(sheet, "mlp", "", inside, body.dense_inter)
        partial = _down(sheet, "mlp", "", hidden, body.dense_inter)
        return reduce_rows(sheet, "mlp", partial, g.hidden)
    _route(sheet, inside)
    if not body.expert_latent:
        partial = _experts(sheet, inside, g.hidden)
        if body.shared_experts:
            _shared(sheet, inside, partial)
        return reduce_rows(sheet, "mlp", partial, g.hidden)
    return _latent(sheet, inside)


def reduce_rows(sheet: Sheet, name: str, partial: str, width: int, into: str = "") -> str:
    """All-reduce ``partial`` [rows, width] fp32 through the staging buffer; returns the buffer with the sum."""
    output = into or sheet.rows(f"{name}_output", width)
    roles = {"partial": partial, "staging": "staging", "output": output}
    sheet.step(REDUCE_OUTPUT, f"reduce_{name}", "p8", roles, hidden=width, ranks=sheet.limits.ranks)
    return output


def pairs_of(rows: int, each: int, most: int) -> tuple[int, int]:
    """Pairs of one pass, and passes: whole rows, at least one, at most ``most`` pairs when a row has fewer."""
    share = min(rows, max(1, most // each))
    return share * each, ceil_div(rows, share)


def _width(sheet: Sheet, inter: int) -> int:
    return ceil_div(inter, sheet.limits.ranks)


def _up(sheet: Sheet, name: str, role: str, inside: str, inter: int) -> str:
    width = _width(sheet, inter)
    hidden = sheet.rows(f"{name}_hidden", width, of=f"{inter}/ranks")
    roles = {"input": inside, "gate": sheet.w(f"{role}gate_proj"), "up": sheet.w(f"{role}up_proj"), "hidden": hidden}
    sheet.step(ops.MLP_UP, f"{name}_up", "mlp", roles, hidden=sheet.geometry.hidden, inter=width)
    return hidden


def _down(sheet: Sheet, name: str, role: str, hidden: str, inter: int) -> str:
    partial = sheet.rows(f"{name}_partial", sheet.geometry.hidden, "fp32")
    roles = {"hidden": hidden, "down": sheet.w(f"{role}down_proj"), "partial": partial}
    sheet.step(ops.MLP_DOWN, f"{name}_down", "mlp", roles, hidden=sheet.geometry.hidden, inter=_width(sheet, inter))
    return partial


def _route(sheet: Sheet, inside: str) -> None:
    body, rows = sheet.body, sheet.limits.rows
    each = body.experts_per_token
    passes = pairs_of(rows, each, sheet.expert_pairs)[1]
    ids, weights, pairs = (
        sheet.buffer(name, dtype, {"rows": rows, "fixed": each}, f"rows x {each} x 4")
        for name, dtype in (("expert_ids", "i32"), ("expert_weights", "fp32"), ("expert_pairs", "i32"))
    )
    shape = {"fixed:passes": passes, "fixed": body.experts + 1}
    offsets = sheet.buffer("expert_offsets", "i32", shape, f"{passes} passes x {body.experts + 1} x 4")
    sheet.step(
        ops.ROUTE_EXPERTS, "route_experts", "mlp",
        {"input": inside, "router": sheet.w("router"), "bias": sheet.w("router_bias"), "expert_ids": ids,
         "expert_weights": weights},
        hidden=sheet.geometry.hidden, experts=body.experts, each=each,
    )  # fmt: skip
    roles = {"expert_ids": ids, "pairs": pairs, "offsets": offsets}
    sheet.step(ops.DISPATCH_EXPERTS, "dispatch_experts", "mlp", roles, experts=body.experts, each=each, passes=passes)


def _experts(sheet: Sheet, inside: str, width: int) -> str:
    body = sheet.body
    pairs, passes = pairs_of(sheet.limits.rows, body.experts_per_token, sheet.expert_pairs)
    inter, size = _width(sheet, body.moe_inter), dtype_bytes(sheet.act)
    hidden = sheet.buffer(
        "expert_hidden", sheet.act, {"fixed:pairs": pairs, "fixed": inter}, f"{pairs} pairs x {body.moe_inter}/ranks x {size}"
    )
    output = sheet.buffer("expert_output", sheet.act, {"fixed:pairs": pairs, "fixed": width}, f"{pairs} pairs x {width} x {size}")
    partial = sheet.rows("expert_partial", width, "fp32")
    sheet.step(
        ops.RUN_EXPERTS, "run_experts", "mlp",
        {"input": inside, "expert_weights": f"{sheet.at}expert_weights", "pairs": f"{sheet.at}expert_pairs",
         "offsets": f"{sheet.at}expert_offsets", "gate": sheet.w("experts_gate"), "up": sheet.w("experts_up"),
         "down": sheet.w("experts_down"), "hidden": hidden, "output": output, "partial": partial},
        width=width, inter=inter, experts=body.experts, each=body.experts_per_token, passes=passes,
    )  # fmt: skip
    return partial


def _shared(sheet: Sheet, inside: str, partial: str) -> None:
    """The shared experts, one MLP, added to the routed partial sums: one all-reduce for both."""
    inter = sheet.body.shared_experts * sheet.body.moe_inter
    hidden = _up(sheet, "shared", "shared_", inside, inter)
    roles = {"hidden": hidden, "down": sheet.w("shared_down_proj"), "partial": partial}
    sheet.step(ops.MLP_DOWN_ADD, "shared_down", "mlp", roles, hidden=sheet.geometry.hidden, inter=_width(sheet, inter))


def _latent(sheet: Sheet, inside: str) -> str:
    """K3: down to the latent width, experts, sum over the ranks, norm, up; beside the shared experts in the full width."""
    g, body = sheet.geometry, sheet.body
    width = body.expert_latent
    rows = sheet.rows("latent_rows", width)
    roles = {"input": inside, "weight": sheet.w("latent_down"), "output": rows}
    sheet.step(ops.LATENT_DOWN, "latent_down", "mlp", roles, hidden=g.hidden, width=width)
    routed = reduce_rows(sheet, "routed", _experts(sheet, rows, width), width)
    if body.expert_latent_norm:
        normed = sheet.rows("latent_normed", width)
        roles = {"input": routed, "weight": sheet.w("latent_norm"), "output": normed}
        sheet.step(ops.RMS_NORM, "latent_norm", "mlp", roles, hidden=width, rows=0)
        routed = normed
    if body.shared_experts:
        inter = body.shared_experts * body.moe_inter
        partial = _down(sheet, "shared", "shared_", _up(sheet, "shared", "shared_", inside, inter), inter)
        output, op = reduce_rows(sheet, "mlp", partial, g.hidden), ops.LATENT_UP
    else:
        output, op = sheet.rows("mlp_output", g.hidden), ops.LATENT_DOWN
    roles = {"input": routed, "weight": sheet.w("latent_up"), "output": output}
    sizes = {"hidden": g.hidden, "width": width} if op is ops.LATENT_UP else {"hidden": width, "width": g.hidden}
    sheet.step(op, "latent_up", "mlp", roles, **sizes)
    return output
