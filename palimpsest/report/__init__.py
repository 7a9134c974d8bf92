"""Records and plans as people read them. May import rich; computes nothing."""
