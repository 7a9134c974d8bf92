"""A module whose import fails."""

f = 1 / 0
