"""Foreign kernels that are wrong: what the self-test binds where a user's own would be. Each runs our kernel and spoils one
thing."""

from palimpsest.kernels.call import Call, Chunk
from palimpsest.kernels.index_select.cpu import run as select
from palimpsest.kernels.query_latent.cpu import run as project
from palimpsest.prove.mutations import flip, live, wrong_id


def index_select(call: Call, chunk: Chunk) -> None:
    """The first row of each slice takes an id that does not belong there."""
    select(call, chunk)
    if live(chunk) and call.comm.rank * len(call.view("local_ids")) < chunk.rows:
        wrong_id(call, chunk)


def query_latent(call: Call, chunk: Chunk) -> None:
    """One bit of the first row is turned."""
    project(call, chunk)
    if live(chunk):
        flip(call.view("q_latent"))
