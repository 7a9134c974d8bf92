"""``load``: a core folder -> a verified Core; ``Core.bind`` -> a Session of one rank."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from palimpsest_loader import manifest
from palimpsest_loader.check import check_machine, check_native, check_plan
from palimpsest_loader.comm import Alone, Comm
from palimpsest_loader.errors import BadCore, CoreError
from palimpsest_loader.native import Call, load_native, load_program
from palimpsest_loader.session import Session
from palimpsest_loader.weights import Weights


class Core:
    """A verified core: its files have the manifest's hashes, its plan holds, its programs are loaded."""

    def __init__(self, path: Path, tree: dict[str, Any], digest: str, programs: Mapping[str, Call]):
        self.path, self.tree, self.digest, self.programs = path, tree, digest, programs

    @property
    def ranks(self) -> int:
        return int(self.tree["limits"]["ranks"])

    def bind(self, comm: Comm | None = None) -> Session:
        """The session of ``comm.rank`` (alone without one): maps the weights, makes the backing and every view. Raises
        CoreError.
        """
        comm = Alone() if comm is None else comm
        if comm.size != self.ranks:
            raise CoreError(f"the core is for {self.ranks} ranks and is bound on {comm.size}; start {self.ranks} ranks")
        comm.agree("core", self.digest)
        torch.set_num_threads(1)
        name = self.tree["weights"]["files"][comm.rank]
        return Session(self.tree, Weights(self.path / name, name, self.tree["weights"]["tensors"]), self.programs, comm)


def digest_of(path: str | Path) -> str:
    """sha256 of the folder's manifest: the number to pass to ``load``, told by whoever prepared the core. Raises BadCore."""
    return hashlib.sha256(_read(Path(path), manifest.NAME, None)).hexdigest()


def load(path: str | Path, digest: str | None = None, *, trust: bool = False, rank: int | None = None) -> Core:
    """Verify the core in ``path`` and load its programs.

    digest: sha256 of manifest.json, from somebody you trust: a core holds native code. ``trust`` instead: a core of one's own
    rank:   check only this rank's weights file (other ranks check theirs)
    Raises BadCore (a file is missing, changed or inconsistent; no program of it was run) and WrongMachine.
    """
    path = Path(path)
    data = _read(path, manifest.NAME, None)
    found = hashlib.sha256(data).hexdigest()
    if digest is None and not trust:
        raise CoreError(
            f"{path} holds native code; pass its digest as told by who prepared it, or trust=True for a core of your own"
        )
    if digest is not None and digest != found:
        raise BadCore(f"{path}/{manifest.NAME} has digest {found}; {digest[:64]} was wanted; this is not that core")
    tree = manifest.read(data)
    check_machine(tree["environment"])
    check_plan(tree)
    _check_names(tree)
    skipped = {name for at, name in enumerate(tree["weights"]["files"]) if rank is not None and at != rank}
    code = {}
    for name, fact in tree["files"].items():
        if name in {p["file"] for p in tree["programs"].values()}:
            code[name] = _read(path, name, fact)
        elif name not in skipped:
            _verify(path, name, fact)
    return Core(path, tree, found, _load_programs(tree, code))


def _load_programs(tree: Mapping[str, Any], code: Mapping[str, bytes]) -> dict[str, Call]:
    """Program -> call. A file is loaded once; a native program must take what the manifest calls it with. Raises BadCore."""
    engines = {one["file"]: one["engine"] for one in tree["programs"].values()}
    mixed = [name for name, one in tree["programs"].items() if engines[one["file"]] != one["engine"]]
    if mixed:
        raise BadCore(f"{manifest.NAME}: program {mixed[0]} gives its file another engine than the next that uses it")
    loaded: dict[str, Call] = {}
    notes: dict[str, dict[str, Any]] = {}
    for file, data in code.items():
        if engines[file] == "aoti":
            loaded[file] = load_program(data, file)
        else:
            loaded[file], notes[file] = load_native(data, file, engines[file])
    for name, one in tree["programs"].items():
        if one["file"] in notes:
            check_native(tree, name, notes[one["file"]])
    return {name: loaded[one["file"]] for name, one in tree["programs"].items()}


def _check_names(tree: Mapping[str, Any]) -> None:
    named = {p["file"] for p in tree["programs"].values()} | set(tree["weights"]["files"])
    if len(tree["weights"]["files"]) != tree["limits"]["ranks"]:
        raise BadCore(f"{manifest.NAME}: {len(tree['weights']['files'])} weight files for {tree['limits']['ranks']} ranks")
    if named - set(tree["files"]):
        raise BadCore(f"{manifest.NAME}: {min(named - set(tree['files']))} has no hash")


def _open(path: Path, name: str) -> Any:
    try:
        return (path / name).open("rb")
    except OSError as error:
        raise BadCore(f"{path / name}: {error.strerror}; copy the whole core folder again") from None


def _read(path: Path, name: str, fact: Mapping[str, Any] | None) -> bytes:
    """A file's bytes, with the size and hash of ``fact``."""
    with _open(path, name) as file:
        data: bytes = file.read((fact["bytes"] if fact else manifest.LONGEST) + 1)
    if fact is not None and (len(data) != fact["bytes"] or hashlib.sha256(data).hexdigest() != fact["sha256"]):
        raise _changed(path, name)
    return data


def _verify(path: Path, name: str, fact: Mapping[str, Any]) -> None:
    with _open(path, name) as file:
        if (path / name).stat().st_size != fact["bytes"] or hashlib.file_digest(file, "sha256").hexdigest() != fact["sha256"]:
            raise _changed(path, name)


def _changed(path: Path, name: str) -> BadCore:
    return BadCore(f"{path / name} is not the file that was prepared: its size or sha256 differs; copy the core again")
