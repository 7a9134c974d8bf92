"""What the engines reach on this machine, as ratios measured in one interleaved run: ``python -m benchmarks``."""
