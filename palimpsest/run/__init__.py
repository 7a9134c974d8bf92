"""Run a planned program: one mapping per pool, steps bound to views once, guards and meters that watch it."""
