"""Templates: exported programs as JSON text, made from FakeTensors and rebuilt without unpickling anything.

``torch.export.load`` falls back to pickle for tensors and example inputs. A stage has neither: its weights are arguments, and its
example inputs are shapes, which the text beside it spells. So only the graph is stored, and reading it back opens no archive.
The text is still as trusted as the store it lies in: torch evaluates the shape expressions in it.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._export.serde.serialize import SerializedArtifact, deserialize, serialize
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram, export

from palimpsest.core.canon import canonical
from palimpsest.core.errors import BadConfig
from palimpsest.export.spec import Argument
from palimpsest.kernels.call import TORCH_DTYPES

#: names the template text
FORMAT = "palimpsest-template-1"
#: largest extent of a dynamic axis, by name
MOST = {"pages": 1 << 26, "tokens": 1 << 31}


class _Stage(torch.nn.Module):
    def __init__(self, function: Callable[..., None]):
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> None:
        self.function(*tensors)


def fakes(args: Sequence[dict[str, Any]], mode: FakeTensorMode, extent: int = 64) -> tuple[torch.Tensor, ...]:
    """One FakeTensor with a storage of its own per signature; a dynamic axis gets ``extent``."""
    with mode:
        return tuple(
            torch.empty_strided(
                [extent if isinstance(n, str) else n for n in a["size"]], a["stride"], dtype=TORCH_DTYPES[a["dtype"]]
            )
            for a in args
        )


def export_template(name: str, function: Callable[..., None], args: Sequence[Argument], *, exact: bool = True) -> bytes:
    """The template text of ``function`` called with ``args``; no memory is allocated for any of them.

    exact: a compiled copy must give the bytes of the exported program

    Raises BadConfig when the program changes another argument than those marked, or holds a constant.
    """
    signatures = [argument.signature() for argument in args]
    dims = {name: Dim(name, min=1, max=most) for name, most in MOST.items()}
    shapes = [{axis: dims[dim] for axis, dim in argument.dynamic.items()} or None for argument in args]
    made = export(_Stage(function), fakes(signatures, FakeTensorMode()), dynamic_shapes={"tensors": tuple(shapes)}, strict=False)
    _check(name, made, signatures)
    graph = serialize(made, serialize_state_dict=False, serialize_constants=False, serialize_example_inputs=False)
    tree = json.loads(graph.exported_program)
    _forget_sources(tree)
    text = {"format": FORMAT, "name": name, "args": signatures, "exact": exact, "program": tree}
    return json.dumps(text, sort_keys=True, separators=(",", ":")).encode()


def _check(name: str, made: ExportedProgram, signatures: Sequence[dict[str, Any]]) -> None:
    signature = made.run_decompositions({}).graph_signature
    if made.state_dict or made.constants:
        raise BadConfig(
            f"stage {name} holds constants {sorted(made.state_dict) + sorted(made.constants)}; every tensor is an argument"
        )
    inputs = list(signature.user_inputs)
    changed = {inputs.index(one) for one in signature.user_inputs_to_mutate.values()}
    wanted = {i for i, a in enumerate(signatures) if a["mutated"]}
    if changed != wanted:
        raise BadConfig(f"stage {name} changes arguments {sorted(changed)}; {sorted(wanted)} are declared")


def _forget_sources(tree: Any) -> None:
    """Drop stack traces and module names: the text must not depend on where the source lies."""
    if isinstance(tree, dict):
        if isinstance(tree.get("metadata"), dict):
            tree["metadata"] = {}
        for value in tree.values():
            _forget_sources(value)
    elif isinstance(tree, list):
        for value in tree:
            _forget_sources(value)


def digest(template: bytes) -> str:
    """sha256 of the text."""
    return hashlib.sha256(template).hexdigest()


def read_template(template: bytes) -> tuple[dict[str, Any], ExportedProgram]:
    """The text and the program it holds, with FakeTensors as example inputs. Raises BadConfig for another format."""
    tree = json.loads(template)
    if tree.get("format") != FORMAT:
        raise BadConfig(f"template has format {tree.get('format')!r}; this version reads {FORMAT!r}")
    graph = json.dumps(tree["program"]).encode()
    examples: Any = (fakes(tree["args"], FakeTensorMode()), {})
    artifact = SerializedArtifact(graph, {}, {}, examples)  # type: ignore[arg-type]  # values, not bytes: nothing is unpickled
    return tree, deserialize(artifact)


def key_text(template: bytes, program: ExportedProgram, config: dict[str, Any], toolchain: dict[str, str]) -> str:
    """Canonical text of everything a compiled stage depends on; its digest is the store key."""
    tree = json.loads(template)
    parts = {
        "format": FORMAT, "graph": str(program.graph), "signature": str(program.graph_signature), "args": tree["args"],
        "ranges": str(program.range_constraints), "config": config, "toolchain": toolchain,
    }  # fmt: skip
    return canonical(parts)
