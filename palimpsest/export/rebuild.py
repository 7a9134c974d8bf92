"""Rebuild a core for another toolchain without the model code: its manifest, its weights, and the templates of the store."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from palimpsest.core.errors import BadConfig, Unavailable
from palimpsest.export import manifest
from palimpsest.export.native import of_tools
from palimpsest.export.prepare import Options, Prepared, Progress, appear, file_fact, recipe_of, refuse_taken, run_jobs, write_job
from palimpsest.export.qualify_core import view_spec
from palimpsest.export.store import Store, draft, sync
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
    flags: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="palimpsest-rebuild-") as folder:
        jobs = []
        for name, one in tree["programs"].items():
            if one["template"] not in templates:
                raise BadConfig(
                    f"store {options.store} has no template {one['template'][:16]} of program {name}; "
                    "give the store it was prepared with"
                )
            template = templates[one["template"]].read_bytes()
            recipe = recipe_of(template, tools, store)
            keys[name] = recipe.key
            if one["engine"] != "aoti":
                flags |= set(of_tools(one["engine"].removeprefix("native-"), tools).flags)
            if store.get(recipe.key) is None:
                jobs.append(write_job(Path(folder), name, template, specs[name], recipe))
        run_jobs(jobs, options, say)
    return _publish(core, output, tree, keys, store, tools.environment(flags), len(keys) - len(jobs))


def _publish(
    core: Path, output: Path, tree: dict[str, Any], keys: dict[str, str], store: Store, environment: dict[str, Any], hits: int
) -> Prepared:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with draft(output.parent, f".{output.name}.new-") as work:
            (work / "programs").mkdir()
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
            appear(work, output)
    except OSError as error:
        raise Unavailable(f"cannot write {output}: {error.strerror or error}; nothing was published") from None
    return Prepared(output, digest_of(output), len(keys), hits)
