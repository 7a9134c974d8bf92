"""The words of rank failures, written once so that both transports say the same thing (stdlib only)."""

from collections.abc import Iterable

from palimpsest.core.errors import RankError, UserError

#: what a rank does before ``main`` starts
START = "start"


def mismatch(sender: int, receiver: int, phase: str, *, sent: str, expected: str) -> RankError:
    """Two ranks disagree about the message between them. The higher rank is named: rank 0 is the reference."""
    return RankError(
        f"rank {sender} sends {sent}, but rank {receiver} expects {expected}; "
        "every rank must make the same calls with the same sizes",
        rank=max(sender, receiver),
        phase=phase,
    )


def parcel(call: str, label: str, sizes: Iterable[int]) -> str:
    """``exchange 'ids' of 2 messages, 96 bytes``."""
    sizes = list(sizes)
    return f"{call} {label!r} of {len(sizes)} message{'s' if len(sizes) != 1 else ''}, {sum(sizes)} bytes"


def disagreement(rank: int, phase: str, label: str, *, theirs: str, reference: str) -> RankError:
    """``agree`` found ``rank`` different from rank 0."""
    return RankError(
        f"disagrees with rank 0 on {label!r}: it has {theirs!r}, rank 0 has {reference!r}; "
        "run every rank from the same inputs and source",
        rank=rank,
        phase=phase,
    )


def raised(rank: int, phase: str, error: BaseException) -> RankError:
    """What a rank's exception becomes. A RankError stays; a UserError keeps its exit code 2."""
    if isinstance(error, RankError):
        return error
    wrapped = RankError(f"{type(error).__name__}: {error}", rank=rank, phase=phase)
    if isinstance(error, UserError):
        wrapped.exit_code = error.exit_code
    return wrapped
