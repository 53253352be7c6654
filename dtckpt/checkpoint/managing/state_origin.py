"""`StateOrigin`: the client, the checkpoint and the run that the training state of this process comes from."""

from __future__ import annotations

import json

from dtckpt.checkpoint.managing.candidates import Candidate
from dtckpt.checkpoint.managing.lineage import LINEAGE_NAME, Run, Saved, current_steps
from dtckpt.checkpoint.managing.retention import Metrics
from dtckpt.checkpoint.managing.step_folders import METRICS_NAME, StepFolders
from dtckpt.checkpoint.managing.step_sources import StepSources
from dtckpt.coordination.api import Member


class StateOrigin:
    """The origin of the state that a manager saves and restores.

    Args:
        member: The client that this process is; None if it is not connected yet.
        folders: The steps of the root.
        sources: The places that steps are restored from.
    """

    def __init__(self, member: Member | None, folders: StepFolders, sources: StepSources) -> None:
        self.member = member
        """The client that this process was when it got its state."""
        self.is_torn = False
        """Whether the state may have been changed in part since then."""
        self.restored: Candidate | None = None
        """The step that was restored last, until a save of the run is committed."""
        self._folders = folders
        self._sources = sources
        # On client 0 only: the run that the state descends from, and the steps on storage; None until they are known.
        self._run: Run | None = None
        self._saved: Saved | None = None

    def note_whole(self, member: Member) -> None:
        """Note that this process has the whole state of a client."""
        self.member, self.is_torn = member, False

    def note_restored(self, chosen: Candidate, run: Run | None, member: Member) -> None:
        """Note that the state was restored from a step, as a client; ``run`` is known on client 0 only."""
        self.note_whole(member)
        self.restored, self._run, self._saved = chosen, run, None

    def note_moved(self, restored: Candidate | None, member: Member) -> None:
        """Note that a resize moved the state to this client; ``restored`` is the step that it was restored from."""
        if (self.member is None or self.member.client, member.client) != (0, 0):
            self._run = None
        self.note_whole(member)
        self.restored, self._saved = restored, None

    def note_listed(self, saved: Saved | None) -> None:
        """Note the steps on storage, for the next save; None: that save lists them."""
        self._saved = saved

    def step_files(self, step: int, number: int, metrics: Metrics) -> dict[str, bytes]:
        """Begin a save in the lineage of the state; return the small files of its checkpoint. On client 0.

        Args:
            step: The step.
            number: The number of the save, in nanoseconds since the epoch.
            metrics: The metrics of the step.
        """
        # The last save listed the steps in the background, after its commit. If it failed, they are listed here.
        saved, self._saved = self._saved or self._folders.saved(), None
        run = self._run or self._run_of_restored() or Run.at(saved, current_steps(saved))
        self._run, lineage = run.save(step, saved, number)
        files = {METRICS_NAME: json.dumps(dict(metrics)).encode()} if metrics else {}
        return files | {LINEAGE_NAME: lineage.to_bytes()}

    def _run_of_restored(self) -> Run | None:
        return None if self.restored is None else self._sources.run_at(self.restored)
