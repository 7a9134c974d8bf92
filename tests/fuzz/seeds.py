"""Valid evidence to mutate: a small qualification on in-process ranks, and one true tie certificate. Imports torch and numpy."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "prove"))
from harness import job, qualify_locally, with_parent

from palimpsest.core.canon import canonical
from palimpsest.prove.bounds import PORTABLE_1
from palimpsest.prove.evidence import EvidenceFolder, new_run_id
from palimpsest.prove.exact import decode_keys, exact_cutoff, filtered_scores
from palimpsest.prove.qualify import Request, publish
from palimpsest.prove.rank_setup import Setup
from palimpsest.prove.ties import TieRow, certificate, difference


def evidence(place: Path) -> Path:
    """A published evidence folder below ``place``."""
    made = job(place)
    results = with_parent(made, qualify_locally(made))
    with EvidenceFolder(place / "evidence", new_run_id()) as folder:
        folder.write("log.txt", "[rank 00] a line\n")
        return publish(folder, Setup(made), results, request=Request(model=Path(made.model)), elapsed_ns=1).folder


def tie_line() -> str:
    """One line of ties.jsonl: a certificate that its own records prove."""
    rng = np.random.default_rng(8)
    codes = np.array([0, 0x38, 0xB8], np.uint8)
    query, values = codes[rng.integers(0, 3, (4, 32))], codes[rng.integers(0, 3, (80, 32))]
    weights, scales = np.array([1, -2, 2, 1], np.float32), np.ones(80, np.float32)
    row = TieRow(5, 0, 20, 80, "fp8", 4, 32, query.tobytes(), weights.tobytes())
    near = filtered_scores(row.index_row, decode_keys(values, "fp8"), scales)
    cutoff = exact_cutoff(near.value, near.error, 20, lambda i: [])
    row = dataclasses.replace(row, topk=len(cutoff.above) + 1)
    cutoff = exact_cutoff(near.value, near.error, row.topk, lambda i: [])
    assert cutoff.tied
    found = difference(cutoff.equal[:1], cutoff.equal[-1:])
    bits = dict(enumerate(near.value.astype(np.float32).view(np.uint32).tolist()))

    def read(token: int) -> bytes:
        return values[token].tobytes() + scales[token].tobytes()

    made = certificate(row, found, cutoff, read, model=PORTABLE_1, bits=bits)
    wanted = {made["kth"]["id"], *(member["id"] for member in made["members"])}
    records = {str(token): read(token).hex() for token in sorted(wanted)}
    return canonical({"case": "C03", "replay": 0, "between": ["base", "alias"], "certificate": made, "records": records}) + "\n"


def main() -> None:
    """``python seeds.py FOLDER``: prints the evidence folder and the file of the tie line as JSON."""
    place = Path(sys.argv[1])
    folder, tie = evidence(place), place / "ties.jsonl"
    tie.write_text(tie_line())
    print(json.dumps([str(folder), str(tie)]))


if __name__ == "__main__":
    main()
