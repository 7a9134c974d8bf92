"""Rebuild views from JSON in this process and print which of them share storage: ``python -m palimpsest.export.identity <
specs``.

Equal shapes, strides and offsets prove nothing here: a transport that gives every view a storage of its own keeps all of them.
"""

import json
import sys
from itertools import combinations

from torch._subclasses.fake_tensor import FakeTensorMode

from palimpsest.export.worker import rebuild


def main() -> int:
    found = {}
    for name, spec in json.load(sys.stdin).items():
        storages = [view.untyped_storage()._cdata for view in rebuild(spec, FakeTensorMode())]
        found[name] = [[i, k] for i, k in combinations(range(len(storages)), 2) if storages[i] == storages[k]]
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
