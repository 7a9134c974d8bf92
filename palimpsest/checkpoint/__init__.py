"""Checkpoint folders, read as files from strangers: bounded headers, one index, config as data, no pickle, no remote code."""
