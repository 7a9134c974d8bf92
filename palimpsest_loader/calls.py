"""Calls of one program: views by affine address, made once per place and kept, so that a replay only picks them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from palimpsest_loader.manifest import ITEM_BYTES

Values = dict[str, int]


class Argument:
    """One argument of a pass over the bytes of its buffer.

    whole: the buffer's segment as a vector of the argument's dtype
    start: bytes of the buffer in that segment
    """

    def __init__(self, tree: Mapping[str, Any], whole: torch.Tensor, start: int):
        item = ITEM_BYTES[tree["dtype"]]
        self.size, self.stride = list(tree["size"]), list(tree["stride"])
        self.whole, self.first = whole, (start + tree["offset"]) // item
        self.axes = tuple(sorted(tree["steps"]))
        self.steps = tuple(tree["steps"][axis] // item for axis in self.axes)
        self.dynamic = {int(axis): name for axis, name in tree["dynamic"].items() if name == "pages"}
        self._kept: dict[tuple[int, ...], torch.Tensor] = {}
        self._only = self._make((0,) * len(self.axes)) if not self.axes and not self.dynamic else None

    def at(self, values: Values) -> torch.Tensor:
        """The view at these axis values."""
        if self._only is not None:
            return self._only
        place = (values[self.axes[0]],) if len(self.axes) == 1 else tuple([values[axis] for axis in self.axes])
        found = self._kept.get(place)
        if found is None:
            found = self._kept[place] = self._make(place)
        return found

    def pages(self, count: int, values: Values) -> torch.Tensor:
        """The view with its ``pages`` axis of ``count``; not kept."""
        size = [count if axis in self.dynamic else extent for axis, extent in enumerate(self.size)]
        return self._make(tuple([values.get(axis, 0) for axis in self.axes]), size)

    def _make(self, place: tuple[int, ...], size: list[int] | None = None) -> torch.Tensor:
        at = self.first + sum(step * value for step, value in zip(self.steps, place, strict=True))
        return self.whole.as_strided(size or self.size, self.stride, at)


class Pass:
    """A program and its arguments."""

    def __init__(self, name: str, call: Callable[[list[torch.Tensor]], object], loops: list[str], args: list[Argument]):
        self.name, self.call, self.loops, self.args = name, call, tuple(loops), args
        still = [one for one in args if not one.axes and not one.dynamic]
        self._fixed = [one.at({}) if one in still else one.whole for one in args]
        self._moving = [(at, one) for at, one in enumerate(args) if one not in still]

    def run(self, values: Values) -> None:
        tensors = self._fixed.copy()
        for at, one in self._moving:
            tensors[at] = one.at(values)
        self.call(tensors)
