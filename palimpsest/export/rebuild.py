"""Rebuild a core for another toolchain without the model code: its manifest, its weights, and the templates of the store."""

import hashlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

from palimpsest.core.errors import BadConfig, Unavailable
from palimpsest.export import manifest
from palimpsest.export.prepare import Options, Prepared, Progress, file_fact, refuse_taken, run_jobs, write_job
from palimpsest.export.qualify_core import view_spec
from palimpsest.export.store import Store, sync
from palimpsest.export.template import key_text, read_template
from palimpsest.export.toolchain import find
from palimpsest_loader.core import digest_of
from palimpsest_loader.manifest import read


def rebuild_core(core: Path, output: Path, options: Options, *, progress: Progress | None = None) -> Prepared:
    """Compile the programs of ``core`` again with this machine's toolchain and publish the result at ``output``.

    Weights, plan and steps stay as they are. Raises BadConfig when the store lacks a template, Unavailable as
    ``prepare_core`` does.
    """
    refuse_taken(output)
    tree, tools, store = read((core / manifest.NAME).read_bytes()), find(options.isa), Store(options.store)
    templates, say = store.templates(), progress if progress is not None else lambda name, what: None
    specs = {one["program"]: view_spec(tree, one["args"]) for step in tree["steps"] for one in step["passes"]}
    keys: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="palimpsest-rebuild-") as folder:
        jobs = []
        for name, one in tree["programs"].items():
            if one["template"] not in templates:
                raise BadConfig(
                    f"store {options.store} has no template {one['template'][:16]} of program {name}; "
                    "give the store it was prepared with"
                )
            template = templates[one["template"]].read_bytes()
            text = key_text(template, read_template(template)[1], tools.config(), tools.facts())
            keys[name] = hashlib.sha256(text.encode()).hexdigest()
            if store.get(keys[name]) is None:
                facts = {"store": str(store.root.resolve()), "key": keys[name], "config": tools.config(), "isa": tools.isa}
                jobs.append(write_job(Path(folder), name, template, specs[name], facts))
        run_jobs(jobs, options, say)
    return _publish(core, output, tree, keys, store, tools.environment(), len(keys) - len(jobs))


def _publish(
    core: Path, output: Path, tree: dict[str, Any], keys: dict[str, str], store: Store, environment: dict[str, Any], hits: int
) -> Prepared:
    work = output.parent / f".{output.name}.new-{secrets.token_hex(6)}"
    try:
        (work / "programs").mkdir(parents=True)
        (work / "weights").mkdir()
        old = {one["file"] for one in tree["programs"].values()}
        files = {name: fact for name, fact in tree["files"].items() if name not in old}
        for name in files:
            shutil.copyfile(core / name, work / name)
        for name, key in keys.items():
            entry = store.get(key)
            if entry is None:
                raise Unavailable(f"store {store.root}: program {name} is not there any more; run it again")
            path = manifest.program_file(key)
            shutil.copyfile(entry.program, work / path)
            files[path] = file_fact(work / path)
            tree["programs"][name] |= {"file": path, "key": key, "scratch_bytes": int(entry.meta["scratch_bytes"])}
        data = manifest.encode({**tree, "environment": environment, "files": files})
        (work / manifest.NAME).write_bytes(data)
        for name in (*files, manifest.NAME):
            sync(work / name)
        refuse_taken(output)
        os.rename(work, output)
        sync(output.parent)
    except OSError as error:
        raise Unavailable(f"cannot write {output}: {error.strerror or error}; nothing was published") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Prepared(output, digest_of(output), len(keys), hits)
