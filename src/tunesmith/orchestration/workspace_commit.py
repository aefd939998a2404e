"""The git commit of the workspace, kept with a run: free metadata of its spec, so no fingerprint depends on it."""

from __future__ import annotations

from collections.abc import Mapping

from tunesmith.core.git import commit_of
from tunesmith.profiles.workspace import PROJECT_FILE, Workspace
from tunesmith.runs.commit import COMMIT, DIRTY


def with_commit(workspace: Workspace, metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata with the commit that the workspace is at now, in place of one that an earlier run brought along."""
    own = {name: value for name, value in metadata.items() if name not in (COMMIT, DIRTY)}
    found = commit_of(workspace.root, PROJECT_FILE)
    if found is None:
        return own
    dirty = "unknown" if found.is_dirty is None else "yes" if found.is_dirty else "no"
    return {**own, COMMIT: found.commit, DIRTY: dirty}
