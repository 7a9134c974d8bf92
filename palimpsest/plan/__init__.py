"""From a program to a plan: derived lifetimes, placement, the separate checker, accounting. Standard library only."""
