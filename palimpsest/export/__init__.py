"""Prepared cores: stage programs made from metadata, compiled by supervised workers, stored by content, published as one
folder.
"""
