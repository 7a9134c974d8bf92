"""A compile worker: template in, one shared object in the store out. Knows nothing about models.

``python -m palimpsest.export.worker job.json``. The job names the template with its hash, the store and its key, the
compiler's options
and the views a call will get: storage, byte offset, shape, stride, dtype. Views are rebuilt on Fake storage, never received:
a pickled
view forgets silently that it shares its storage.
"""

import hashlib
import json
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram

from palimpsest.core.errors import BadConfig, Unavailable, UserError
from palimpsest.export.rounding import GRID, bounded, share
from palimpsest.export.store import Store
from palimpsest.export.supervisor import GIVE_UP
from palimpsest.export.template import read_template
from palimpsest.export.toolchain import vectors
from palimpsest.kernels.call import TORCH_DTYPES

#: inputs of at least this many bytes are address space without memory while temporaries are measured
LARGE = 16 << 20
#: extent of an axis the runner shortens at will, while temporaries are measured
PAGES = 2
#: extent of dynamic axes, largest whole number, and draws of the comparison with eager torch
FEW, SMALL, DRAWS = 64, 7, 3


def rebuild(spec: Mapping[str, Any], mode: FakeTensorMode) -> list[torch.Tensor]:
    """The views of ``spec`` on FakeTensors: those of one storage share one, others do not. Raises BadConfig where that fails."""
    with mode:
        storages = {name: torch.empty(nbytes, dtype=torch.uint8) for name, nbytes in spec["storages"].items()}
        found = []
        for view in spec["views"]:
            kind = TORCH_DTYPES[view["dtype"]]
            if view["byte_offset"] % kind.itemsize:
                raise BadConfig(f"view of {view['storage']} at byte {view['byte_offset']} is not aligned to {kind}")
            whole = storages[view["storage"]].untyped_storage()
            found.append(
                torch.empty(0, dtype=kind).set_(whole, view["byte_offset"] // kind.itemsize, view["size"], view["stride"])
            )
    for (a, x), (b, y) in combinations(zip(spec["views"], found, strict=True), 2):
        if (x.untyped_storage()._cdata == y.untyped_storage()._cdata) != (a["storage"] == b["storage"]):
            raise BadConfig(f"rebuilt views of {a['storage']} and {b['storage']} share storage wrongly")
    return found


def refuse_overlap(spec: Mapping[str, Any], args: list[dict[str, Any]]) -> None:
    """Raise BadConfig when a changed argument shares a byte with another: the compiler would not notice, and compute wrongly."""
    reach = []
    for view in spec["views"]:
        last = sum((n - 1) * s for n, s in zip(view["size"], view["stride"], strict=True))
        reach.append((view["byte_offset"], view["byte_offset"] + (last + 1) * TORCH_DTYPES[view["dtype"]].itemsize))
    for i, k in combinations(range(len(args)), 2):
        same = spec["views"][i]["storage"] == spec["views"][k]["storage"]
        if same and (args[i]["mutated"] or args[k]["mutated"]) and max(reach[i][0], reach[k][0]) < min(reach[i][1], reach[k][1]):
            raise BadConfig(
                f"arguments {i} and {k} share bytes of {spec['views'][i]['storage']} inside one program, and one is changed"
            )


def compile_template(template: bytes, config: Mapping[str, Any], isa: str, output: Path) -> list[dict[str, Any]]:
    """Write the shared object of ``template`` to ``output``; returns its argument signatures."""
    import torch._inductor
    from torch._inductor import cpu_vec_isa

    chosen = vectors(isa)
    # the widest set would be chosen otherwise; this process compiles one program and ends
    compiler: Any = cpu_vec_isa
    compiler.valid_vec_isa_list = lambda: [chosen]
    tree, program = read_template(template)
    examples = program.example_inputs[0]
    torch._inductor.aot_compile(program.module(), examples, options={**config, "aot_inductor.output_path": str(output)})
    args: list[dict[str, Any]] = tree["args"]
    return args


def scratch_bytes(program: Path, args: list[dict[str, Any]], spec: Mapping[str, Any]) -> int:
    """Most bytes of temporaries alive at once in one call. Large inputs are mapped without memory and read as zeros."""
    from palimpsest_loader.native import load_program

    call = load_program(program.read_bytes(), program.name)
    tensors = [_zeros(argument, view) for argument, view in zip(args, spec["views"], strict=True)]
    torch.set_num_threads(1)
    call(tensors)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call(tensors)
    alive = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def refuse_miscompiled(program: Path, template: bytes, spec: Mapping[str, Any]) -> None:
    """Raise Unavailable unless the compiled program gives the bytes of the exported one, run by eager torch on random inputs.

    torch 2.13 miscompiles some vectorised loops without a word. Inputs of whole histories are left out by taking a few
    tokens. A last
    bit may differ by chance where fp64 is rounded to fp32, so the program may pick the best of a few draws; a miscompiled one
    never passes. A program that rounds (``exact`` is false) must keep its derived bound on every draw.
    """
    from palimpsest_loader.native import load_program

    tree, exported = read_template(template)
    call, eager = load_program(program.read_bytes(), program.name), exported.module()
    if not tree["exact"]:
        refuse_outside(call, exported, [_draw(tree["args"], spec, seed, exact=False) for seed in range(DRAWS)])
        return
    for seed in range(DRAWS):
        ours = _draw(tree["args"], spec, seed)
        theirs = [tensor.clone() if a["mutated"] else tensor for a, tensor in zip(tree["args"], ours, strict=True)]
        call(ours)
        eager(*theirs)
        off = [i for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if not _same(x, y)]
        if not off:
            return
    raise Unavailable(
        f"the compiler gave a program whose argument {off[0]} differs from eager torch's; report it, and try --isa avx2"
    )


def refuse_outside(call: Callable[[list[torch.Tensor]], Any], exported: ExportedProgram, draws: list[list[torch.Tensor]]) -> None:
    """Raise Unavailable when ``call`` leaves, on any draw, the bound that ``exported`` derives for it (``export.rounding``)."""
    for tensors in draws:
        wanted = bounded(exported, tensors)
        call(tensors)
        for at, real in wanted.items():
            used = share(tensors[at], real)
            if used > 1:
                raise Unavailable(
                    f"the compiler gave a program whose argument {at} lies {used:.3g} times its rounding error bound from the "
                    "exported one; report it, and try --isa avx2"
                )


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def _draw(args: list[dict[str, Any]], spec: Mapping[str, Any], seed: int, *, exact: bool = True) -> list[torch.Tensor]:
    """Inputs of one call. ``exact`` false: whole numbers reach all ``FEW`` tokens, and the first draw lies on the grid on which
    few sums round, so that its bound is tight.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for argument, view in zip(args, spec["views"], strict=True):
        size = [
            min(extent, FEW) if isinstance(n, str) else extent for n, extent in zip(argument["size"], view["size"], strict=True)
        ]
        kind, stride = TORCH_DTYPES[argument["dtype"]], argument["stride"]
        count = sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
        if kind.is_floating_point and not exact and not seed:
            flat = (torch.randint(-4, 5, (count,), generator=generator) * GRID).to(kind)
        elif not kind.is_floating_point and not exact:
            flat = torch.randint(1, FEW, (count,), generator=generator).to(kind)
        elif kind.is_floating_point:
            flat = torch.randn(count, generator=generator).to(kind)
        else:
            flat = (torch.arange(count) % SMALL + 1).to(kind)
        found.append(flat.as_strided(size, stride))
    return found


def _zeros(argument: Mapping[str, Any], view: Mapping[str, Any]) -> torch.Tensor:
    size = [PAGES if n == "pages" else extent for n, extent in zip(argument["size"], view["size"], strict=True)]
    kind, stride = TORCH_DTYPES[argument["dtype"]], argument["stride"]
    nbytes = (sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1) * kind.itemsize
    if nbytes < LARGE:
        return torch.zeros(nbytes, dtype=torch.uint8).view(kind).as_strided(size, stride)
    space = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
    return torch.frombuffer(space, dtype=torch.uint8).view(kind).as_strided(size, stride)


def work(job: Mapping[str, Any]) -> None:
    """One job: check, compile, measure, publish."""
    store, started = Store(Path(job["store"])), time.monotonic()
    if store.get(job["key"]) is not None:
        return
    template = Path(job["template"]).read_bytes()
    if hashlib.sha256(template).hexdigest() != job["template_sha256"]:
        raise BadConfig(f"template {job['template']} is not the one that was exported; run prepare again")
    rebuild(job["spec"], FakeTensorMode())
    refuse_overlap(job["spec"], json.loads(template)["args"])
    with tempfile.TemporaryDirectory(prefix="palimpsest-worker-") as folder:
        output = Path(folder) / "program.so"
        args = compile_template(template, job["config"], job["isa"], output)
        refuse_miscompiled(output, template, job["spec"])
        facts = {"scratch_bytes": scratch_bytes(output, args, job["spec"]), "seconds": round(time.monotonic() - started)}
        store.publish(job["key"], output, template, facts)


def leave_with_the_supervisor() -> None:
    """When standard input ends, the supervisor is gone: end this session, compilers included."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGKILL)

    if os.getpgrp() == os.getpid():
        threading.Thread(target=wait, daemon=True).start()


def main() -> int:
    leave_with_the_supervisor()
    try:
        work(json.loads(Path(sys.argv[1]).read_text()))
    except UserError as error:  # a full disk, a refused program: the next attempt would end the same way
        sys.stderr.write(f"{error}\n")
        return GIVE_UP
    return 0


if __name__ == "__main__":
    sys.exit(main())
