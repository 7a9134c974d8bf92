"""``prepare``: a checked plan -> exported programs -> compiled programs -> a core folder that appears whole or not at all."""

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palimpsest.core.errors import BadConfig, Unavailable
from palimpsest.core.spec import Program
from palimpsest.core.units import align_up
from palimpsest.export import manifest, native
from palimpsest.export.spec import CONTROL, Argument
from palimpsest.export.stages import Built, build
from palimpsest.export.store import Entry, Store, draft, sync
from palimpsest.export.supervisor import Event, Job, Supervisor
from palimpsest.export.template import digest, export_template, key_text, read_template
from palimpsest.export.toolchain import Toolchain, find
from palimpsest.export.weights import weight_buffers, write_weights
from palimpsest.kernels.detect import choose_engine
from palimpsest.plan.check import check
from palimpsest.plan.plan import Plan
from palimpsest.run.weights import Filler

#: programs that need not equal eager torch bit by bit: they sum in fp32 or take an fp32 exponential
ROUNDED = ("sparse_attend", "project_output")

#: called with (program name, what happened)
Progress = Callable[[str, str], None]


@dataclass(frozen=True)
class Options:
    """How to prepare. store: folder of compiled programs; jobs: compile workers; isa: None for the widest of this machine."""

    store: Path
    jobs: int = 1
    isa: str | None = None
    timeout_s: float = 1800.0
    retries: int = 1


@dataclass(frozen=True)
class Prepared:
    """A published core. hits: programs the store already had."""

    folder: Path
    digest: str
    programs: int
    hits: int


def prepare_core(
    program: Program, plan: Plan, fill: Filler, output: Path, options: Options, *, progress: Progress | None = None
) -> Prepared:
    """Publish the core of ``program`` under ``plan`` at ``output``; history memory is never allocated.

    fill: writes one rank's weights and tables, e.g. ``run.weights.from_checkpoint``
    Raises PlanRefused, Unsupported (a step without an exported form), BadConfig (``output`` is taken), Unavailable (no
    compiler, disk full,
    a compile that failed every attempt). Then nothing is published, an older core stays as it was, and finished programs stay
    stored.
    """
    say = progress if progress is not None else lambda name, what: None
    check(program, plan)
    refuse_taken(output)
    built, tools = build(program), find(options.isa)
    entries, hits = compile_programs(program, plan, built, tools, options, say)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with draft(output.parent, f".{output.name}.new-") as work:
            found = _write(work, program, plan, built, entries, tools, fill, say)
            appear(work, output)
    except OSError as error:
        raise Unavailable(
            f"cannot write {output}: {error.strerror or error}; nothing was published, free space or choose another folder"
        ) from None
    return Prepared(output, found, len(entries), hits)


def appear(work: Path, output: Path) -> None:
    """Rename a finished folder into place. Raises BadConfig when another run was first: of two, one wins and none is mixed."""
    refuse_taken(output)
    try:
        os.rename(work, output)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            refuse_taken(output)
        raise
    try:
        sync(output.parent)
    except OSError as error:
        raise Unavailable(
            f"{output} is published and whole, but {output.parent} could not be written to the disk: {error.strerror}; check the "
            "disk, then ask palimpsest-loader for its digest"
        ) from None


def refuse_taken(output: Path) -> None:
    """Raise BadConfig unless ``output`` is free or an empty folder: a core is never changed in place."""
    if output.is_symlink() or (output.exists() and (not output.is_dir() or any(output.iterdir()))):
        raise BadConfig(f"{output} exists; a core is never changed in place: choose another folder, or remove it first")


def compile_programs(
    program: Program, plan: Plan, built: Built, tools: Toolchain, options: Options, say: Progress
) -> tuple[dict[str, Entry], int]:
    """Program name -> store entry, and how many were there before. Raises Unavailable."""
    store = Store(options.store)
    entries: dict[str, Entry] = {}
    with tempfile.TemporaryDirectory(prefix="palimpsest-prepare-") as folder:
        jobs: dict[str, Job] = {}
        keys: dict[str, str] = {}
        for name in built.names:
            template = _template(built, name)
            recipe = recipe_of(template, tools, store)
            keys[name] = recipe.key
            entry = store.get(recipe.key)
            if entry is not None:
                entries[name] = entry
                say(name, "stored")
                continue
            jobs[name] = write_job(Path(folder), name, template, view_spec(program, plan, built.arguments(name)), recipe)
            say(name, "exported")
        hits = len(entries)
        run_jobs(list(jobs.values()), options, say)
        for name in jobs:
            entry = store.get(keys[name])
            if entry is None:
                raise Unavailable(f"store {store.root}: program {name} was compiled and is not there; run prepare again")
            entries[name] = entry
    return {name: entries[name] for name in built.names}, hits


def run_jobs(jobs: list[Job], options: Options, say: Progress) -> None:
    """Compile in supervised workers. Raises Unavailable naming the job that failed every attempt."""
    Supervisor(options.jobs, timeout_s=options.timeout_s, retries=options.retries, notify=lambda e: say(e.job, _words(e))).run(
        jobs
    )


def _words(event: Event) -> str:
    if event.kind == "started":
        return "compiling" if event.attempt == 1 else f"compiling, attempt {event.attempt}"
    return f"compiled in {event.seconds:.0f} s" if event.kind == "done" else f"{event.kind}: {event.why}"


@dataclass(frozen=True)
class Recipe:
    """How a template becomes a program. key: of the store; facts: what its worker is told; environment: its NAME=value."""

    key: str
    worker: str
    facts: Mapping[str, Any]
    environment: tuple[str, ...]


def recipe_of(template: bytes, tools: Toolchain, store: Store) -> Recipe:
    """The recipe of an exported or a native template. Raises BadConfig for one this version does not read,
    Unavailable for a native one whose engine does not run here: its worker compares it with that engine.
    """
    folder = str(store.root.resolve())
    if native.is_native(template):
        to = native.of_tools(choose_engine(json.loads(template)["engine"]), tools)
        made_of = native.sources()
        key = hashlib.sha256(native.key_text(template, tools, to, made_of).encode()).hexdigest()
        target = {"cpu": to.cpu, "features": to.features, "compiler": tools.compiler.split()[0]}
        told = {"store": folder, "key": key, "note": native.note(template, to), "sources": made_of, **target}
        numba = (f"NUMBA_CPU_NAME={to.cpu}", f"NUMBA_CPU_FEATURES={to.features}")
        return Recipe(key, "palimpsest.export.native_worker", told, numba)
    key = hashlib.sha256(key_text(template, read_template(template)[1], tools.config(), tools.facts()).encode()).hexdigest()
    # keeps the precompiled header of torch, most of the cost of a first job; compiled programs are never taken from it
    environment = (f"TORCHINDUCTOR_CACHE_DIR={folder}/.compiler",)
    facts = {"store": folder, "key": key, "config": tools.config(), "isa": tools.isa}
    return Recipe(key, "palimpsest.export.worker", facts, environment)


def _template(built: Built, name: str) -> bytes:
    if name in built.natives:
        return native.template(name, built.natives[name], built.arguments(name))
    return export_template(name, built.functions[name], built.arguments(name), exact=name not in ROUNDED)


def write_job(folder: Path, name: str, template: bytes, spec: Mapping[str, Any], recipe: Recipe) -> Job:
    """Write the job's files; the worker reads the template only with this hash."""
    source = folder / f"{name}.template.json"
    source.write_bytes(template)
    job = {**recipe.facts, "template": str(source), "template_sha256": digest(template), "spec": spec}
    path = folder / f"{name}.job.json"
    path.write_text(json.dumps(job, sort_keys=True))
    command = ("env", *recipe.environment, "OMP_NUM_THREADS=1", sys.executable, "-m", recipe.worker, str(path))
    return Job(name, command, folder / f"{name}.log")


def view_spec(program: Program, plan: Plan, args: tuple[Argument, ...]) -> dict[str, Any]:
    """The views of a call at axis values 0: storages with their bytes, and per argument where it lies in which storage."""
    storages: dict[str, int] = {}
    views = []
    files = {b.name for b in weight_buffers(program)}
    for argument in args:
        if argument.buffer.startswith(CONTROL) or argument.buffer in files:
            storage, start = argument.buffer, 0
            storages[storage] = max(storages.get(storage, 0), argument.offset + align_up(argument.span, 64))
        else:
            place = plan.by_name[argument.buffer]
            storage, start = place.kind, place.offset
            storages[storage] = plan.by_kind[place.kind].nbytes
        views.append(
            {
                "storage": storage,
                "byte_offset": start + argument.offset,
                "size": list(argument.size),
                "stride": list(argument.stride),
                "dtype": argument.dtype,
            }
        )
    return {"storages": storages, "views": views}


def _write(
    folder: Path,
    program: Program,
    plan: Plan,
    built: Built,
    entries: Mapping[str, Entry],
    tools: Toolchain,
    fill: Filler,
    say: Progress,
) -> str:
    """All files of the core, the manifest last; returns its digest."""
    (folder / "programs").mkdir()
    (folder / "weights").mkdir()
    compiled = {
        n: manifest.Compiled(e.folder.name, str(e.meta["template.json"]), int(e.meta["scratch_bytes"]), built.engine(n))
        for n, e in entries.items()
    }
    for name, entry in entries.items():
        shutil.copyfile(entry.program, folder / manifest.program_file(compiled[name].key))
    weight_files = [f"weights/rank{rank}.safetensors" for rank in range(program.limits.ranks)]
    for rank, name in enumerate(weight_files):
        say(name, "writing")
        write_weights(folder / name, program, fill, rank)
    names = sorted({manifest.program_file(one.key) for one in compiled.values()} | set(weight_files))
    files = {name: file_fact(folder / name) for name in names}
    data = manifest.encode(manifest.tree(program, plan, built, compiled, environment(tools, built), files, weight_files))
    _prove_readable(data)
    (folder / manifest.NAME).write_bytes(data)
    for name in (*names, manifest.NAME):
        sync(folder / name)
    sync(folder)
    return hashlib.sha256(data).hexdigest()


def environment(tools: Toolchain, built: Built) -> dict[str, Any]:
    """What a loader checks; native programs may need more of the processor than the exported ones."""
    return tools.environment({flag for one in built.natives.values() for flag in native.of_tools(one.engine, tools).flags})


def _prove_readable(data: bytes) -> None:
    """The loader's own reader and checks accept what is about to be published."""
    from palimpsest_loader.check import check_plan
    from palimpsest_loader.manifest import read

    check_plan(read(data))


def file_fact(path: Path) -> dict[str, Any]:
    """What the manifest says of a file."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}
