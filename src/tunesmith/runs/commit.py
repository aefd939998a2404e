"""Names under which a run's metadata holds the git commit that its workspace was at when it was submitted."""

COMMIT = "git.commit"
DIRTY = "git.dirty"
"""yes, no, or unknown: whether a tracked file differed from the commit."""
