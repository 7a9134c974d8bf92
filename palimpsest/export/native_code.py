"""Object code of native programs: a compiled engine's kernels behind one C function, without Python and without numba's runtime.

The entry point of numba is left aside; what is taken is the machine-level function under it, made over plain addresses:

* ``_array`` and ``Layout.group`` are intrinsics that build a kernel's arrays from addresses and constants: nothing owns memory.
* Everything but our entry is made internal, and LLVM is told to propagate constants between functions. All arrays have a null
  owner, so it proves that no reference count is ever touched, and drops that code. Whatever is left that is neither a function of
  this module nor an LLVM intrinsic is an error here: a kernel that allocates or calls Python cannot become a program.

Only processes of ``palimpsest.export.native_worker`` import this: numba compiles for the target in their environment.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, cast

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np import arrayobj

from palimpsest.core.errors import BadConfig, Unavailable, UnknownName
from palimpsest.kernels.call import Call, Scratch
from palimpsest.kernels.index_select.streaming import Kernels
from palimpsest.kernels.jit import intrinsic

#: the symbols of a program
RUN, NOTE = "palimpsest_run", "palimpsest_note"
_I64, _I8 = ir.IntType(64), ir.IntType(8)


def _kernels(engine: str) -> Kernels:
    """An engine's selection kernels; only its own are imported, because the others may not compile for this target."""
    if engine == "amx":
        return cast(Kernels, import_module("palimpsest.kernels.index_select.amx").KERNELS)
    if engine == "avx":
        return cast(Kernels, import_module("palimpsest.kernels.index_select.avx").KERNELS)
    raise UnknownName("engine with native selection", engine, ["amx", "avx"])


class Layout:
    """Where an engine's own ``make`` puts its scratch: run it on memory of the planned size and look.

    kernels:   the engine's, as the eager step uses them
    kind:      numba's type of its group
    fields:    per field (offset, shape) of an array, or a whole number
    constants: (offset, bytes) of what ``make`` writes: arrays that are equal over two different fillings
    """

    def __init__(self, engine: str, numbers: Mapping[str, int]):
        self.kernels = _kernels(engine)
        self.numbers = dict(numbers)
        (raw, group), (_, again) = (self.made(fill) for fill in (0x00, 0xFF))
        self.kind: Any = numba.typeof(group)
        self.fields: list[Any] = []
        self.constants: list[tuple[int, bytes]] = []
        for one, other in zip(group, again, strict=True):
            if not isinstance(one, np.ndarray):
                self.fields.append(int(one))
                continue
            at = one.ctypes.data - raw.data_ptr()
            self.fields.append((at, one.shape))
            if one.tobytes() == other.tobytes():
                self.constants.append((at, one.tobytes()))
        if len(group.held) < self.numbers["rows"]:
            raise BadConfig(f"engine {engine} holds {len(group.held)} rows at once; {self.numbers['rows']} are planned")

    def made(self, fill: int) -> tuple[torch.Tensor, Any]:
        """(scratch full of ``fill``, the group that the engine makes in it)."""
        room = torch.full((self.numbers["scratch"] + 64,), fill, dtype=torch.uint8)
        raw = room[-room.data_ptr() % 64 :][: self.numbers["scratch"]]
        call = Call("index_select", {n: self.numbers[n] for n in ("topk", "heads", "dim")}, {}, {}, Scratch(raw), cast(Any, None))
        return raw, self.kernels.make(call)

    def group(self) -> Any:
        """Intrinsic: the group at a scratch address."""
        kind, fields = self.kind, self.fields

        @intrinsic
        def group_at(typing: Any, address: Any) -> Any:
            def body(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
                values = []
                for one, field in zip(kind.types, fields, strict=True):
                    if isinstance(one, types.Array):
                        at, shape = field
                        values.append(_filled(context, b, one, b.add(args[0], _I64(at)), [_I64(n) for n in shape]))
                    else:
                        values.append(context.get_constant(one, field))
                return context.make_tuple(b, kind, values)

            return kind(types.int64), body

        return group_at

    def fill(self) -> Any:
        """Intrinsic: write the constants into the scratch at an address."""
        constants = self.constants

        @intrinsic
        def fill_at(typing: Any, address: Any) -> Any:
            def body(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
                for at, data in constants:
                    source = cgutils.global_constant(b, "palimpsest_constant", cgutils.create_constant_array(_I8, list(data)))
                    to = b.inttoptr(b.add(args[0], _I64(at)), _I8.as_pointer())
                    cgutils.raw_memcpy(b, to, b.bitcast(source, _I8.as_pointer()), _I64(len(data)), 1)
                return context.get_dummy_value()

            return types.void(types.int64), body

        return fill_at


def _filled(context: Any, b: ir.IRBuilder, kind: Any, address: ir.Value, shape: list[ir.Value]) -> ir.Value:
    """A dense array of ``kind`` over memory nobody owns."""
    made = arrayobj.make_array(kind)(context, b)
    element = context.get_data_type(kind.dtype)
    item = context.get_abi_sizeof(element)
    strides, at = [], _I64(item)
    for extent in reversed(shape):
        strides.append(at)
        at = b.mul(at, extent)
    data = b.inttoptr(address, element.as_pointer())
    arrayobj.populate_array(made, data=data, shape=shape, strides=strides[::-1], itemsize=_I64(item), meminfo=None)
    return made._getvalue()


def _array(dtype: Any, *tail: int) -> Any:
    """Intrinsic (address, count): a dense array [count, *tail]."""
    kind = types.Array(dtype, 1 + len(tail), "C")

    @intrinsic
    def array_at(typing: Any, address: Any, count: Any) -> Any:
        def body(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            return _filled(context, b, kind, args[0], [args[1], *(_I64(n) for n in tail)])

        return kind(types.int64, types.int64), body

    return array_at


@intrinsic
def _address(typing: Any, arguments: Any, at: Any) -> Any:
    """Address of argument ``at``."""

    def body(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return b.load(b.gep(b.inttoptr(args[0], _I64.as_pointer()), [args[1]]))

    return types.int64(types.int64, types.int64), body


def _tile(layout: Layout) -> Callable[..., None]:
    """index_select.tile: queries, weights, keys, scales, seen, start, nans, scratch; see ``programs.select_tile``."""
    rows, heads, dim, extent = (layout.numbers[n] for n in ("rows", "heads", "dim", "keys"))
    begin, score = layout.kernels.begin, layout.kernels.score
    group_at, fill = layout.group(), layout.fill()
    queries_at, weights_at, keys_at = _array(types.uint8, heads, dim), _array(types.float32, heads), _array(types.uint8, dim)
    floats_at, counts_at, ints_at = _array(types.float32), _array(types.int32), _array(types.int64)

    def tile(arguments):
        group = group_at(_address(arguments, 7))
        seen, start = ints_at(_address(arguments, 4), rows), ints_at(_address(arguments, 5), 2)
        nans = counts_at(_address(arguments, 6), rows)
        view, first = start[0], start[1]
        if first == 0:
            fill(_address(arguments, 7))
            begin(group, queries_at(_address(arguments, 0), rows), weights_at(_address(arguments, 1), rows))
            for i in range(rows):
                nans[i] = 0
        last = 0
        for i in range(rows):
            last = max(last, seen[i])
        # as if the view began at token 0: only tokens inside it are touched
        keys = keys_at(_address(arguments, 2) - view * dim, view + extent)
        scales = floats_at(_address(arguments, 3) - 4 * view, view + extent)
        score(group, keys, scales, seen, first, min(view + extent, last), True, nans)

    return tile


def _emit(layout: Layout) -> Callable[..., None]:
    """index_select.emit: scratch, ids, counts; see ``programs.select_emit``."""
    rows, group_at, emit = layout.numbers["rows"], layout.group(), layout.kernels.emit
    ids_at, counts_at = _array(types.int32, layout.numbers["topk"]), _array(types.int32)

    def ids(arguments):
        emit(group_at(_address(arguments, 0)), ids_at(_address(arguments, 1), rows), counts_at(_address(arguments, 2), rows))

    return ids


_MAKERS: dict[str, Callable[[Layout], Callable[..., None]]] = {"index_select.tile": _tile, "index_select.emit": _emit}


def compile_object(tree: Mapping[str, Any], layout: Layout, note: str, cpu: str, features: str) -> bytes:
    """Position-independent object code of a template; exports ``RUN`` and ``NOTE``. Raises Unavailable for a kernel that needs
    more than this file and the C library's memory functions.
    """
    bare: dict[str, Any] = {"_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compiled: Any = numba.njit(nogil=True, error_model="numpy", **bare)(_MAKERS[tree["kernel"]](layout))
    compiled.compile(types.void(types.int64))
    (signature,) = compiled.signatures
    inner = compiled.overloads[signature].fndesc.mangled_name
    module = llvm.parse_assembly(_with_entry(compiled.inspect_llvm(signature), inner, note))
    module.verify()
    for one in (*module.functions, *module.global_variables):
        if not one.is_declaration and one.name not in (RUN, NOTE):
            one.linkage = "internal"
    machine = llvm.Target.from_triple(module.triple).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small"
    )
    _drop_unreachable(module, machine)
    foreign = sorted(f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm."))
    if foreign:
        raise Unavailable(f"program {tree['name']} cannot be native: its code calls {', '.join(foreign)}, which a loader has not")
    code: bytes = machine.emit_object(module)
    return code


def _with_entry(text: str, inner: str, note: str) -> str:
    """The module and its C functions; the inner one takes numba's places for a result and an error, and returns 0 when done."""
    data = "".join(f"\\{byte:02X}" for byte in note.encode()) + "\\00"
    return f"""{text}
@{NOTE} = constant [{len(note.encode()) + 1} x i8] c"{data}", align 1
define i32 @{RUN}(ptr %arguments) {{
  %result = alloca ptr
  %error = alloca ptr
  %address = ptrtoint ptr %arguments to i64
  %status = call i32 @{inner}(ptr %result, ptr %error, i64 %address)
  ret i32 %status
}}
"""


def _drop_unreachable(module: Any, machine: Any) -> None:
    """Constants across functions, arguments nobody reads, then functions nobody calls. No pass here reorders arithmetic."""
    passes = llvm.create_new_module_pass_manager()
    passes.add_ipsccp_pass()
    passes.add_dead_arg_elimination_pass()
    passes.add_global_opt_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3)))
