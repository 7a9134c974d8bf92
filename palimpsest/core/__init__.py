"""The nouns: errors, units, specs, contracts, canonical text. Standard library only."""
