"""A worker for native programs: template in, one shared object in the store out.

``python -m palimpsest.export.native_worker job.json``, with numba's target set in its environment: kernels are compiled for the
core's instruction sets and not for this machine's. The object is linked against the C library alone, loaded as the loader loads
it, and compared with the eager engine's own entry points before it is published.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from palimpsest.core.errors import BadConfig, Unavailable, UserError
from palimpsest.export.native import sources
from palimpsest.export.native_code import NOTE, RUN, Layout, compile_object
from palimpsest.export.store import Store
from palimpsest.export.supervisor import GIVE_UP
from palimpsest.export.worker import leave_with_the_supervisor, refuse_overlap
from palimpsest_loader.native import load_native

#: draws of the comparison with the eager engine
DRAWS = 2
#: the e4m3 code of NaN
NAN = 0x7F


def link(code: bytes, output: Path, compiler: str) -> None:
    """``output``: a shared object of ``code`` that exports the program's two symbols and needs nothing but libc and libm.

    Raises Unavailable with the linker's words.
    """
    with tempfile.TemporaryDirectory(prefix="palimpsest-link-") as folder:
        source, exports = Path(folder) / "program.o", Path(folder) / "exports.map"
        source.write_bytes(code)
        exports.write_text(f"{{ global: {RUN}; {NOTE}; local: *; }};\n")
        flags = f"-z,defs -z,noexecstack -z,relro -z,now --build-id=none --as-needed --version-script={exports}".split()
        command = [compiler, "-shared", "-nostdlib", "-s", "-o", str(output), str(source), *(f"-Wl,{one}" for one in flags)]
        command += ["-lc", "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{compiler} cannot link a native program: {done.stderr.strip().splitlines()[-1][:300]}")


def refuse_different(output: Path, tree: Mapping[str, Any], layout: Layout) -> None:
    """Raise Unavailable unless the linked program leaves the bytes that the eager engine's entry points do, scratch included."""
    run, _ = load_native(output.read_bytes(), output.name, f"native-{tree['engine']}")
    check = {"index_select.tile": _tile_differs, "index_select.emit": _emit_differs}[tree["kernel"]]
    for seed in range(DRAWS):
        found = check(run, layout, torch.Generator().manual_seed(seed))
        if found:
            name = tree["name"]
            raise Unavailable(f"native program {name} leaves other {found} than the eager engine; report it, try --isa avx2")


def _draw(layout: Layout, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Operands over one and a half key tiles: e4m3 codes of both signs, a few of the keys NaN; the last row is not active."""
    n = layout.numbers
    rows, heads, dim, tokens = n["rows"], n["heads"], n["dim"], n["keys"] + n["keys"] // 2
    codes = torch.randn(rows * heads + tokens, dim, generator=random).to(torch.float8_e4m3fn).view(torch.uint8)
    codes[rows * heads :: 7, 0] = NAN
    seen = (tokens - rows + 1 + torch.arange(rows)).clamp(min=0)
    seen[1:][-1:] = 0
    return {
        "queries": codes[: rows * heads].view(rows, heads, dim),
        "weights": torch.randn(rows, heads, generator=random),
        "keys": codes[rows * heads :],
        "scales": torch.rand(tokens, generator=random),
        "seen": seen,
    }


def _scored(layout: Layout, data: Mapping[str, torch.Tensor], scratch: int) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """(scratch, group, nans) after the eager engine's entry points."""
    raw, group = layout.made(scratch)
    nans = torch.zeros(len(data["seen"]), dtype=torch.int32)
    keys, scales, seen = data["keys"].numpy(), data["scales"].numpy(), data["seen"].numpy()
    layout.kernels.begin(group, data["queries"].numpy(), data["weights"].numpy())
    for first, stop in _parts(layout):
        layout.kernels.score(group, keys, scales, seen, first, min(stop, int(seen.max())), True, nans.numpy())
    return raw, group, nans


def _parts(layout: Layout) -> list[tuple[int, int]]:
    """The tokens that each call scores: a whole view, then the rest of one that begins earlier."""
    extent = layout.numbers["keys"]
    return [(0, extent), (extent, extent + extent // 2)]


def _tile_differs(run: Any, layout: Layout, random: torch.Generator) -> str:
    data, extent = _draw(layout, random), layout.numbers["keys"]
    wanted, _, lost = _scored(layout, data, 0x00)
    raw, nans = torch.zeros_like(wanted), torch.full_like(lost, -7)
    for first, stop in _parts(layout):
        view = stop - extent
        given = [data["queries"], data["weights"], data["keys"][view:stop], data["scales"][view:stop], data["seen"]]
        run([*given, torch.tensor([view, first]), nans, raw])
    # field by field: ``make`` may leave bytes between the fields
    same = all(torch.equal(_bytes(layout, raw, at), _bytes(layout, wanted, at)) for at in range(len(layout.fields)))
    return "NaN counts" if not torch.equal(nans, lost) else "" if same else "scratch"


def _bytes(layout: Layout, raw: torch.Tensor, at: int) -> torch.Tensor:
    """The bytes of one field of the group."""
    field = layout.fields[at]
    if isinstance(field, int):
        return raw[:0]
    size = layout.kind.types[at].dtype.bitwidth // 8
    for extent in field[1]:
        size *= extent
    return raw[field[0] : field[0] + size]


def _emit_differs(run: Any, layout: Layout, random: torch.Generator) -> str:
    raw, group, _ = _scored(layout, _draw(layout, random), 0x00)
    mine, rows, topk = raw.clone(), layout.numbers["rows"], layout.numbers["topk"]
    ids, counts = torch.full((2, rows, topk), -7, dtype=torch.int32), torch.full((2, rows), -7, dtype=torch.int32)
    layout.kernels.emit(group, ids[0].numpy(), counts[0].numpy())
    run([mine, ids[1], counts[1]])
    return "" if torch.equal(ids[0], ids[1]) and torch.equal(counts[0], counts[1]) and torch.equal(mine, raw) else "ids"


def work(job: Mapping[str, Any]) -> None:
    """One job: compile, link, compare, publish."""
    store, started = Store(Path(job["store"])), time.monotonic()
    if store.get(job["key"]) is not None:
        return
    text = Path(job["template"]).read_bytes()
    if hashlib.sha256(text).hexdigest() != job["template_sha256"]:
        raise BadConfig(f"template {job['template']} is not the one that was made; run prepare again")
    if sources() != job["sources"]:
        raise BadConfig("the kernels' sources changed while prepare ran: the key would lie; run prepare again")
    tree = json.loads(text)
    refuse_overlap(job["spec"], tree["args"])
    layout = Layout(tree["engine"], tree["numbers"])
    with tempfile.TemporaryDirectory(prefix="palimpsest-worker-") as folder:
        output = Path(folder) / "program.so"
        link(compile_object(tree, layout, job["note"], job["cpu"], job["features"]), output, job["compiler"])
        refuse_different(output, tree, layout)
        # it calls no allocator: ``compile_object`` refuses every foreign function
        store.publish(job["key"], output, text, {"scratch_bytes": 0, "seconds": round(time.monotonic() - started)})


def main() -> int:
    leave_with_the_supervisor()
    try:
        work(json.loads(Path(sys.argv[1]).read_text()))
    except UserError as error:  # the next attempt would end the same way
        sys.stderr.write(f"{error}\n")
        return GIVE_UP
    return 0


if __name__ == "__main__":
    sys.exit(main())
