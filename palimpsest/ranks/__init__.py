"""Who owns what, and how ranks talk. ``layout`` is plain arithmetic; everything else moves bytes."""
