"""What the loader refuses, in one tree. Every message names the file or buffer, what was found, what was wanted, and the next
step.
"""


class CoreError(ValueError):
    """Base: the core, the machine or the request is wrong. Nothing was run."""


class BadCore(CoreError):
    """A file of the core is missing, changed, truncated or contradicts the manifest."""


class WrongMachine(CoreError):
    """The core was prepared for another torch, processor or machine."""


class CapacityError(CoreError):
    """A request is larger than what was prepared; raised before any byte is touched."""


class CommError(RuntimeError):
    """Another rank is missing, late, or does something else than this one."""
