"""A bound core: memory, weights and programs of one rank, and the walk over its steps."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from palimpsest_loader.calls import Argument, Pass
from palimpsest_loader.comm import Comm
from palimpsest_loader.errors import CapacityError, CoreError
from palimpsest_loader.manifest import ITEM_BYTES
from palimpsest_loader.memory import TORCH_DTYPES, Segment, flat
from palimpsest_loader.runners import Chunk, Step, runner
from palimpsest_loader.weights import Weights

CONTROL = "control."
Call = Callable[[list[torch.Tensor]], object]


class Session:
    """One rank, ready to run; made by ``Core.bind``.

    segments: kind -> the backing
    views:    buffer -> plane -> tensor at full prepared size
    """

    def __init__(self, tree: dict[str, Any], weights: Weights, programs: Mapping[str, Call], comm: Comm):
        self.tree, self.comm, self.closed = tree, comm, False
        self.limits: dict[str, int] = tree["limits"]
        self.segments = {kind: Segment(kind, nbytes) for kind, nbytes in tree["backing"]["segments"].items()}
        self.views = {name: self._planes(buffer) for name, buffer in tree["buffers"].items()}
        self._weights = weights
        self._flats: dict[tuple[str, str], torch.Tensor] = {}
        self.steps = [(runner(one["runner"]), self._step(one, programs)) for one in tree["steps"]]
        self.output = self.view(tree["outputs"][0])

    def _planes(self, buffer: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        raw, found = self.segments[buffer["kind"]].raw, {}
        for plane in buffer["planes"]:
            at, count = buffer["offset"] + plane["offset"], ITEM_BYTES[plane["dtype"]]
            for extent in plane["shape"]:
                count *= extent
            found[plane["name"]] = raw[at : at + count].view(TORCH_DTYPES[plane["dtype"]]).view(plane["shape"])
        return found

    def view(self, buffer: str, plane: str | None = None) -> torch.Tensor:
        """A plane of a buffer, or its first one."""
        planes = self.views[buffer]
        return next(iter(planes.values())) if plane is None else planes[plane]

    def raw(self, buffer: str) -> torch.Tensor:
        """A buffer as u8."""
        place = self.tree["buffers"][buffer]
        return self.segments[place["kind"]].raw[place["offset"] : place["offset"] + place["nbytes"]]

    def _step(self, one: Mapping[str, Any], programs: Mapping[str, Call]) -> Step:
        control = {name: torch.zeros(size, dtype=torch.int64) for name, size in one["control"].items()}
        passes = [
            Pass(p["program"], programs[p["program"]], p["loops"], [self._argument(a, control) for a in p["args"]])
            for p in one["passes"]
        ]
        views = {role: self.view(buffer) for role, buffer in one["roles"].items()}
        raws = {role: self.raw(buffer) for role, buffer in one["roles"].items()}
        return Step(
            one["name"], one["phase"], one["numbers"], passes, control, views, raws, one["planes"], self.limits, self.comm
        )

    def _argument(self, tree: Mapping[str, Any], control: Mapping[str, torch.Tensor]) -> Argument:
        name, dtype = tree["buffer"], tree["dtype"]
        if name.startswith(CONTROL):
            return Argument(tree, control[name.removeprefix(CONTROL)], 0)
        if name in self._weights.places:
            return Argument(tree, self._flat("weights", dtype), self._weights.places[name])
        place = self.tree["buffers"][name]
        return Argument(tree, self._flat(place["kind"], dtype), place["offset"])

    def _flat(self, kind: str, dtype: str) -> torch.Tensor:
        if (kind, dtype) not in self._flats:
            raw = self._weights.raw if kind == "weights" else self.segments[kind].raw
            self._flats[kind, dtype] = flat(raw, dtype)
        return self._flats[kind, dtype]

    def prefill(
        self,
        hidden: torch.Tensor,
        history: int,
        *,
        rows: int | None = None,
        ids: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        after: Callable[[str], None] | None = None,
        copy: bool = False,
    ) -> torch.Tensor:
        """Append ``rows`` tokens after ``history`` cached ones and return their output [rows, hidden].

        hidden:      normed hidden rows [>= rows, hidden], activation dtype or fp32
        ids, counts: int32 [rows, topk] and [rows], for a core whose ``inputs`` name them
        after:       called with each step's name once it is done, for observers that copy bytes
        copy:        a private copy; otherwise the result is a view that the next call overwrites
        Collective. Raises CoreError and CapacityError before any byte is touched, CommError when a rank is missing.
        """
        chunk = self._checked(hidden, history, rows)
        selection = self._checked_selection(ids, counts, chunk)
        self.comm.enter("request")
        self.comm.agree("chunk", f"history {chunk.history}, rows {chunk.rows}")
        with torch.no_grad():
            for name, tensor in selection.items():
                self.view(name)[: chunk.rows].copy_(tensor)
                self.view(name)[chunk.rows :].fill_(-1 if name == "ids" else 0)
            for run, step in self.steps:
                self.comm.enter(step.phase)
                run(step, chunk)
                if after is not None:
                    after(step.name)
        result = self.output[: chunk.rows]
        return result.clone() if copy else result

    def _checked(self, hidden: torch.Tensor, history: int, rows: int | None) -> Chunk:
        if self.closed:
            raise CoreError("this session is closed; bind the core again")
        name, view = self.tree["name"], self.view("hidden")
        if hidden.dim() != 2 or hidden.shape[1] != view.shape[1]:
            raise CoreError(f"{name}: hidden has shape {list(hidden.shape)}; [rows, {view.shape[1]}] is wanted")
        if hidden.dtype not in (view.dtype, torch.float32) or hidden.device.type != "cpu":
            raise CoreError(f"{name}: hidden is {hidden.dtype} on {hidden.device}; {view.dtype} or float32 on the CPU is wanted")
        rows = hidden.shape[0] if rows is None else rows
        for what, value in (("history", history), ("rows", rows)):
            if type(value) is not int or value < 0:
                raise CapacityError(f"{name}: {what} = {value!r}; a whole number from 0 on is wanted")
        if rows > self.limits["rows"]:
            raise CapacityError(f"{name}: {rows} rows in one chunk, {self.limits['rows']} are prepared; send at most that many")
        if history + rows > self.limits["tokens"]:
            raise CapacityError(
                f"{name}: {history} + {rows} tokens, {self.limits['tokens']} are prepared; prepare a longer context"
            )
        if hidden.shape[0] < rows:
            raise CoreError(f"{name}: hidden has {hidden.shape[0]} rows; {rows} are active")
        return Chunk(history, rows, hidden[:rows])

    def _checked_selection(self, ids: torch.Tensor | None, counts: torch.Tensor | None, chunk: Chunk) -> dict[str, torch.Tensor]:
        given = {what: tensor for what, tensor in (("ids", ids), ("counts", counts)) if tensor is not None}
        name, wanted = self.tree["name"], self.tree["inputs"]
        if set(given) != set(wanted):
            raise CoreError(f"{name}: takes {wanted or 'no selection'}; given {list(given)}")
        for what, tensor in given.items():
            shape = [chunk.rows, *self.view(what).shape[1:]]
            if list(tensor.shape) != shape or tensor.dtype != torch.int32:
                raise CoreError(f"{name}: {what} is {list(tensor.shape)} {tensor.dtype}; {shape} torch.int32 is wanted")
        if given and chunk.rows:
            width, visible = given["ids"].shape[1], torch.arange(chunk.history + 1, chunk.visible + 1).unsqueeze(1)
            used = torch.arange(width) < given["counts"].unsqueeze(1)
            unseen = (used & ((given["ids"] < 0) | (given["ids"] >= visible))).any(1)
            bad = unseen | (given["counts"] < 0) | (given["counts"] > width)
            if bool(bad.any()):
                raise CoreError(f"{name}: row {int(bad.nonzero()[0])} selects a token it cannot see, or counts too many ids")
        return given

    def poison(self, byte: int, keep: Iterable[str] = ()) -> None:
        """Fill the reusable and staging bytes; nothing a replay reads may have been there before."""
        for kind in ("reusable", "staging"):
            if kind in self.segments and kind not in keep:
                self.segments[kind].raw.fill_(byte)

    def reset(self) -> None:
        """Zero every byte: an empty history."""
        for segment in self.segments.values():
            segment.raw.zero_()

    def close(self) -> None:
        """Forget the views; the memory goes when the last result is gone."""
        self.steps, self.views, self._flats, self.segments, self.closed = [], {}, {}, {}, True

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
