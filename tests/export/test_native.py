"""Native programs: what their code needs, what the loader refuses, and the eager engine's bytes in a process without numba."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from palimpsest.core.errors import BadConfig, Unavailable, Unsupported
from palimpsest.core.geometry import Formats
from palimpsest.export.native import Native, Target, dense, is_native, key_text, note, target, template
from palimpsest.export.prepare import recipe_of
from palimpsest.export.spec import Argument
from palimpsest.export.store import Store
from palimpsest.export.toolchain import ISAS, find
from palimpsest.kernels.detect import request_tiles
from palimpsest_loader import BadCore, CoreError, WrongMachine, load
from palimpsest_loader.check import check_native
from palimpsest_loader.native import load_native

#: what the C library may be asked for: the compiler writes these itself for loops over bytes
MEMORY = {"memset", "memcpy", "memmove"}
needs_avx = pytest.mark.xdist_group("native")


def symbols(program: Path, *which: str) -> set[str]:
    done = subprocess.run(["nm", "-D", *which, str(program)], capture_output=True, text=True, check=True)
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines()}


# -- the code


@needs_avx
def test_code_needs_nothing_but_the_c_library(native) -> None:
    for name, entry in native.entries.items():
        assert symbols(entry.program, "--undefined-only") <= MEMORY, name
        assert symbols(entry.program, "--defined-only") == {"palimpsest_run", "palimpsest_note"}, name
        found = subprocess.run(["readelf", "-dW", str(entry.program)], capture_output=True, text=True, check=True).stdout
        needed = {line.rsplit("[", 1)[1].rstrip("]") for line in found.splitlines() if "NEEDED" in line}
        assert needed <= {"libc.so.6"}, name
        assert "INIT" not in found, f"{name} runs code when it is loaded"
        assert entry.meta["scratch_bytes"] == 0


@needs_avx
def test_equals_the_eager_engine_without_numba(native, natives, tmp_path) -> None:
    ours, theirs = natives.alone(native, tmp_path), natives.eager(native, natives.operands(native))
    assert [len(one) for one in ours] == [len(one) for one in theirs]
    assert ours == theirs
    assert ours[0] == ours[-1]
    assert len(set(ours)) == len(natives.CHUNKS) - 1, "chunks that give the same bytes compare nothing"


@needs_avx
def test_store_has_whole_entries_under_the_key_of_a_second_prepare(native) -> None:
    store, tools = Store(native.store), find()
    for entry in native.entries.values():
        assert store.get(entry.folder.name) is not None
        assert recipe_of(entry.template.read_bytes(), tools, store).key == entry.folder.name


@needs_avx
def test_worker_refuses_code_that_computes_something_else(native, tmp_path) -> None:
    """A shared object with the right symbols and note that does nothing."""
    from palimpsest.export.native_code import Layout
    from palimpsest.export.native_worker import refuse_different

    entry = native.entries["index_select.emit"]
    tree = json.loads(entry.template.read_bytes())
    text = json.dumps(note(entry.template.read_bytes(), Target("x86-64", "", ())))
    (tmp_path / "idle.c").write_text(f"const char palimpsest_note[] = {text};\nint palimpsest_run(void **a) {{ return 0; }}\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "idle.so", tmp_path / "idle.c"], check=True)
    layout = Layout("avx", tree["numbers"])
    with pytest.raises(Unavailable, match=r"index_select.emit leaves other ids"):
        refuse_different(tmp_path / "idle.so", tree, layout)
    refuse_different(entry.program, tree, layout)


@needs_avx
def test_worker_refuses_sources_that_are_not_the_keys(native, tmp_path) -> None:
    from palimpsest.export.native_worker import work

    entry = native.entries["index_select.emit"]
    job = {"store": str(tmp_path / "store"), "key": "0" * 64, "template": str(entry.template), "sources": "0" * 64,
           "template_sha256": entry.meta["template.json"]}  # fmt: skip
    with pytest.raises(BadConfig, match="sources changed while prepare ran"):
        work(job)
    with pytest.raises(BadConfig, match="is not the one that was made"):
        work(job | {"template_sha256": "0" * 64})


@needs_avx
def test_kernel_that_needs_numbas_runtime_is_refused(native, monkeypatch) -> None:
    """A reshape of unknown layout calls numba's C helper; the link would fail in a process without it."""
    from palimpsest.export import native_code

    def helped(layout):
        ids_at = native_code._array(native_code.types.int32, 4)

        def run(arguments):
            ids_at(native_code._address(arguments, 0), 8).reshape(32)[0] = 1

        return run

    monkeypatch.setitem(native_code._MAKERS, "index_select.emit", helped)
    tree = json.loads(native.entries["index_select.emit"].template.read_bytes())
    with pytest.raises(Unavailable, match="numba_attempt_nocopy_reshape"):
        native_code.compile_object(tree, native_code.Layout("avx", tree["numbers"]), "{}", "x86-64", "")


@pytest.mark.slow
@needs_avx
def test_narrow_code_gives_the_same_bytes(small, natives, native, tmp_path) -> None:
    """For --isa avx2: other kernels (plain loops, with a table of their own), no wider register, the same selection."""
    narrow = natives.make(small, tmp_path / "narrow", "avx2")
    assert not {f for f in narrow.tree["environment"]["cpu_flags"] if f.startswith("avx512")}
    for entry in narrow.entries.values():
        assert symbols(entry.program, "--undefined-only") <= MEMORY
        code = subprocess.run(["objdump", "-d", str(entry.program)], capture_output=True, text=True, check=True).stdout
        assert "%ymm" in code or entry is narrow.entries["index_select.emit"]
        assert "%zmm" not in code
    assert natives.alone(narrow, tmp_path) == natives.eager(native, natives.operands(native))


AMX = """
import json, sys
from pathlib import Path
from palimpsest.export.native import Native, note, target, template
from palimpsest.export.native_code import Layout, compile_object
from palimpsest.export.native_worker import link
from palimpsest.export.spec import Argument
from palimpsest.export.toolchain import ISAS
from palimpsest.kernels import sizes
to = target("amx", ISAS["avx512"].flags, frozenset())
numbers = {"topk": 64, "heads": 4, "dim": 128, "rows": 16, "keys": 4096, "scratch": sizes.amx_select_scratch(64, 4, 128)}
for kernel in ("index_select.tile", "index_select.emit"):
    text = template(kernel, Native("amx", kernel, numbers), [Argument("x", "u8", (16,), (1,))])
    tree = json.loads(text)
    link(compile_object(tree, Layout("amx", numbers), note(text, to), to.cpu, to.features), Path(sys.argv[1]) / kernel, "g++")
"""


@pytest.mark.slow
@needs_avx
def test_amx_kernels_become_code_too(native, tmp_path) -> None:
    """Compiled and linked here for a processor that this may not be; only such a one can run it."""
    to = target("amx", ISAS["avx512"].flags, frozenset())
    assert {"amx_tile", "amx_bf16", "avx512vbmi"} <= set(to.flags)
    env = {**os.environ, "NUMBA_CPU_NAME": to.cpu, "NUMBA_CPU_FEATURES": to.features}
    subprocess.run([sys.executable, "-c", AMX, str(tmp_path)], env=env, check=True)
    for kernel in ("index_select.tile", "index_select.emit"):
        assert symbols(tmp_path / kernel, "--undefined-only") <= MEMORY
    code = subprocess.run(["objdump", "-d", str(tmp_path / "index_select.tile")], capture_output=True, text=True, check=True)
    assert "tdpbf16ps" in code.stdout


# -- the loader


@needs_avx
def test_wrong_instruction_set_is_refused_by_name(native, tmp_path) -> None:
    environment = native.tree["environment"]
    assert set(ISAS[environment["isa"]].flags) <= set(environment["cpu_flags"])
    core = native.publish(tmp_path / "more", environment=environment | {"cpu_flags": [*environment["cpu_flags"], "avx4096"]})
    with pytest.raises(WrongMachine, match="avx4096"):
        load(core, trust=True)
    fewer = [flag for flag in environment["cpu_flags"] if flag != "avx2"]
    core = native.publish(tmp_path / "fewer", environment=environment | {"cpu_flags": fewer})
    with pytest.raises(BadCore, match="was compiled for avx2, which cpu_flags leaves out"):
        load(core, trust=True)


@needs_avx
def test_flipped_byte_is_refused(native, tmp_path) -> None:
    core = native.publish(tmp_path / "core")
    assert load(core, trust=True).ranks == 1
    for name in {one["file"] for one in native.tree["programs"].values()}:
        data = bytearray((core / name).read_bytes())
        data[len(data) // 2] ^= 1
        (core / name).write_bytes(data)
        with pytest.raises(BadCore, match=name.replace(".", r"\.")):
            load(core, trust=True)
        data[len(data) // 2] ^= 1
        (core / name).write_bytes(data)


@needs_avx
def test_call_that_the_code_was_not_made_for_is_refused(native, tmp_path) -> None:
    """The plan is consistent, the program is another: only its own note can tell."""
    for at, (change, message) in enumerate(
        (({"dtype": "i32"}, r"argument 1 of index_select.tile is .*i32.*takes.*fp32"), ({"mutated": True}, "argument 1"))
    ):
        steps = native.tree["steps"]
        step = next(s for s in steps if s["runner"] == "select")
        step["passes"][0]["args"][1] |= change
        step["writes"] = sorted({*step["writes"], "head_weights"})
        core = native.publish(tmp_path / str(at), steps=steps)
        with pytest.raises(BadCore, match=message):
            load(core, trust=True)
    step["passes"][0]["args"] = step["passes"][0]["args"][:-1]
    with pytest.raises(BadCore, match=r"argument 1 of index_select.tile|argument 7"):
        load(native.publish(tmp_path / "short", steps=steps), trust=True)


@needs_avx
def test_unaligned_scratch_and_sizes_that_vary_are_refused(native) -> None:
    fact = json.loads(note(native.entries["index_select.emit"].template.read_bytes(), Target("x86-64", "", ())))
    for change, message in (({"offset": 32}, "begins at byte 32"), ({"dynamic": {"0": "pages"}}, "may be shorter")):
        tree = native.tree
        check_native(tree, "index_select.emit", fact)
        next(s for s in tree["steps"] if s["runner"] == "select")["passes"][1]["args"][0] |= change
        with pytest.raises(BadCore, match=message):
            check_native(tree, "index_select.emit", fact)


@needs_avx
def test_engine_of_another_name_is_refused(native, tmp_path) -> None:
    programs = native.tree["programs"]
    changed = {name: one | {"engine": "native-amx"} for name, one in programs.items()}
    with pytest.raises(BadCore, match="a program of native-amx with ABI 1 is wanted"):
        load(native.publish(tmp_path / "amx", programs=changed), trust=True)
    changed = {name: one | {"engine": "native-fpga"} for name, one in programs.items()}
    with pytest.raises(BadCore, match="native-avx"):
        load(native.publish(tmp_path / "fpga", programs=changed), trust=True)


def test_file_that_is_no_native_program_is_refused() -> None:
    with pytest.raises(BadCore, match="no native program"):
        load_native(b"no shared object", "x", "native-avx")


@needs_avx
def test_amx_program_needs_tiles_of_the_system(native, tmp_path) -> None:
    """The loader asks Linux itself, and so agrees with what the eager engine found out."""
    tree = json.loads(native.entries["index_select.emit"].template.read_bytes()) | {"engine": "amx"}
    text = json.dumps(note(json.dumps(tree).encode(), Target("x86-64", "", ())))
    (tmp_path / "amx.c").write_text(f"const char palimpsest_note[] = {text};\nint palimpsest_run(void **a) {{ return 0; }}\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "amx.so", tmp_path / "amx.c"], check=True)
    data = (tmp_path / "amx.so").read_bytes()
    if request_tiles():
        with pytest.raises(WrongMachine, match=r"amx.so needs AMX tile registers"):
            load_native(data, "amx.so", "native-amx")
    else:
        load_native(data, "amx.so", "native-amx")


@needs_avx
def test_status_of_a_program_is_an_error(native, tmp_path) -> None:
    text = json.dumps(note(native.entries["index_select.emit"].template.read_bytes(), Target("x86-64", "", ())))
    (tmp_path / "bad.c").write_text(f"const char palimpsest_note[] = {text};\nint palimpsest_run(void **a) {{ return 3; }}\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "bad.so", tmp_path / "bad.c"], check=True)
    call, fact = load_native((tmp_path / "bad.so").read_bytes(), "bad.so", "native-avx")
    assert len(fact["args"]) == 3
    with pytest.raises(CoreError, match=r"bad.so ended with status 3"):
        call([torch.zeros(1)] * 3)


@needs_avx
def test_wrong_number_of_tensors_is_refused(native) -> None:
    call = load(native.folder, native.digest).programs["index_select.emit"]
    with pytest.raises(CoreError, match="takes 3 arguments; 1 are given"):
        call([torch.zeros(1)])


# -- the plan


def test_manifest_says_which_engine_a_core_holds(small) -> None:
    tree = small.planned(engine="avx").tree()
    engines = {name: one["engine"] for name, one in tree["programs"].items()}
    natives = {"index_select.tile", "index_select.emit"}
    assert {name for name, engine in engines.items() if engine == "native-avx"} == natives
    assert set(engines.values()) == {"native-avx", "aoti"}
    assert tree["arithmetic"] == "core-1+avx-1"
    assert small.planned().tree()["arithmetic"] == "core-1"
    assert {one["engine"] for one in small.planned().tree()["programs"].values()} == {"aoti"}


def test_fp32_records_are_selected_by_the_exported_program(small) -> None:
    """The avx engine leaves them to the portable one."""
    formats = Formats(index="fp32", latent="fp32", activation="fp32", weights="fp32")
    assert small.planned(formats, engine="avx").built.natives == {}


@pytest.mark.parametrize("engine", ["amx", "avx512"])
def test_engines_without_an_exported_form_are_refused_by_name(small, engine) -> None:
    with pytest.raises(Unsupported, match=f"no form of engine {engine}"):
        small.planned(engine=engine)


def test_programs_do_not_depend_on_the_context(small) -> None:
    one, two = (small.planned(engine="avx", tokens=tokens) for tokens in (1 << 13, 1 << 20))
    for name, what in one.built.natives.items():
        texts = [template(name, what, p.built.arguments(name)) for p in (one, two)]
        assert texts[0] == texts[1]


# -- templates, targets, keys


def test_template_and_its_refusals() -> None:
    text = template("s", Native("avx", "index_select.emit", {"topk": 4}), [Argument("a", "u8", (3, 4), (4, 1))])
    assert is_native(text)
    assert not is_native(b'{"format": "palimpsest-template-1"}')
    with pytest.raises(BadConfig, match="dense"):
        template("s", Native("avx", "index_select.emit", {}), [Argument("a", "u8", (3, 4), (8, 1))])
    with pytest.raises(BadConfig, match=r"wants moon.tile of engine avx"):
        is_native(text.replace(b"index_select.emit", b"moon.tile"))
    assert dense((2, 3, 4)) == [12, 4, 1]


def test_target_is_the_instruction_set_unless_this_machine_may_add_to_it() -> None:
    here = frozenset({*ISAS["avx512"].flags, "avx512_bf16", "avx512vbmi", "amx_tile"})
    plain, more = (target("avx", ISAS["avx512"].flags, have) for have in (frozenset(), here))
    assert set(plain.flags) == set(ISAS["avx512"].flags)
    assert set(more.flags) - set(plain.flags) == {"avx512_bf16", "avx512vbmi"}
    assert "+avx512bf16" in more.features.split(",")
    assert set(target("avx", ISAS["avx2"].flags, here).flags) == set(ISAS["avx2"].flags)


def test_key_covers_the_target_the_template_and_the_sources() -> None:
    pytest.importorskip("numba")
    tools, arguments = find(), [Argument("a", "u8", (3,), (1,))]
    text, other = (template("s", Native("avx", "index_select.emit", {"topk": topk}), arguments) for topk in (4, 8))
    to, narrow = (target("avx", ISAS[isa].flags, frozenset()) for isa in ("avx512", "avx2"))
    keys = [key_text(text, tools, to, "a"), key_text(other, tools, to, "a"), key_text(text, tools, narrow, "a")]
    keys.append(key_text(text, tools, to, "b"))
    assert len(set(keys)) == len(keys)
    assert all(word in keys[0] for word in ("numba", "llvmlite", "sources", "compiler"))
