"""attention_query, reference. Both projections are exact to fp64, so an fp32 engine agrees within the bound of two dot
products.
"""

from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.twin import project, rotate, store, table_rows, wide


def run(call: Call, chunk: Chunk) -> None:
    p, rows = call.params, chunk.rows
    latent = wide(call.view("q_latent")[:rows])  # [rows, q_lora]
    table = table_rows(call, 0, rows)  # [rows, pairs, 2]
    size = p["nope"] + p["rope_dims"]
    for head in range(p["heads"]):
        q = project(latent, call.view("q_b")[head * size : (head + 1) * size])  # [rows, nope+rope]
        absorbed = project(q[:, : p["nope"]], call.view("uk")[head].T)  # [rows, kv_lora]
        turned = q[:, p["nope"] :]  # [rows, rope]
        if p["rope_layout"] != "none" and table is not None:
            turned = rotate(turned, table, p["rope_layout"])
        out = call.view("query")[:rows, head]  # [rows, kv_lora+rope]
        store(out[:, : p["kv_lora"]], absorbed)
        store(out[:, p["kv_lora"] :], turned)
