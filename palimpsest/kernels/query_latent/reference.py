"""query_latent, reference. The projection is exact to fp64, so an fp32 engine agrees within the bound of one dot product."""

from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.twin import project, rms_norm, store, wide


def run(call: Call, chunk: Chunk) -> None:
    hidden = wide(call.view("hidden")[: chunk.rows])  # [rows, hidden]
    latent = project(hidden, call.view("q_a"))  # [rows, q_lora]
    store(call.view("q_latent")[: chunk.rows], rms_norm(latent, wide(call.view("q_a_norm")), call.params["eps"]))
