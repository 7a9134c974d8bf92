"""Every error a user can see, in one tree.

    PalimpsestError                     base; ``exit_code`` says what the command line returns
    |- UserError (ValueError)           exit 2: the input is wrong, nothing was touched
    |  |- UnknownName                   a model, op, layout, profile or engine nobody knows
    |  |- BadConfig                     config.json, preset or option holds an impossible value
    |  |- BadCheckpoint                 a file from strangers is truncated, hostile or incomplete
    |  |- CapacityError                 more rows or tokens than were prepared
    |  |- PlanRefused                   the checker found an unsafe or impossible plan
    |  |- Unsupported                   a combination no recipe or engine implements
    |  `- Unavailable                   the machine lacks something (engine, disk, memory)
    |- RankError (RuntimeError)         exit 1: a rank died, hung, raised or disagreed
    |- HiddenAllocation (RuntimeError)  exit 1: run-time code allocated after the seal
    `- EvidenceError (ValueError)       exit 1: a record does not verify

Every message names the thing, both numbers, where, and the next step.
"""


class PalimpsestError(Exception):
    """Base of every error raised on purpose."""

    exit_code = 1


class UserError(PalimpsestError, ValueError):
    """The caller can fix it; nothing was written and nothing was lost."""

    exit_code = 2


class UnknownName(UserError):
    """A name that no registry holds. The message lists the known ones."""

    def __init__(self, kind: str, name: str, known: list[str] | tuple[str, ...]):
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(sorted(known)) or '(none)'}")


class BadConfig(UserError):
    """A configuration value is missing, of the wrong type, or impossible."""


class BadCheckpoint(UserError):
    """A checkpoint file is malformed, truncated, hostile or incomplete."""


class CapacityError(UserError):
    """A request is larger than what was prepared; raised before any byte is touched."""


class PlanRefused(UserError):
    """The independent checker refuses a plan."""


class Unsupported(UserError):
    """A combination that no recipe or engine implements; the message says what is."""


class Unavailable(UserError):
    """The machine lacks something that was asked for; the message says what it has."""


class RankError(PalimpsestError, RuntimeError):
    """A rank died, passed its deadline, raised, or disagreed with the others.

    ``rank`` and ``phase`` name the first failing rank and where it was. ``secondary`` marks a rank that only saw a peer vanish:
    whoever watches all ranks reports the cause instead.
    """

    def __init__(self, message: str, *, rank: int, phase: str, secondary: bool = False):
        super().__init__(f"rank {rank} in {phase}: {message}")
        self.message = message
        self.rank = rank
        self.phase = phase
        self.secondary = secondary


class HiddenAllocation(PalimpsestError, RuntimeError):
    """Run-time code allocated tensor memory after ``seal``."""


class EvidenceError(PalimpsestError, ValueError):
    """An evidence folder is incomplete, edited, or does not support its verdict."""
