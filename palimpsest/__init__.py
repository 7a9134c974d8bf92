"""Palimpsest plans, proves and runs long-context sparse-attention (DSA) prefill in the smallest fixed memory.

Importing this package imports neither torch nor numpy. ``python -m palimpsest.cli.main --help`` lists what it does.
"""

__version__ = "0.1.0"
