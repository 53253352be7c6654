"""`Publisher`: a job publishes versions of its state from the memory of its hosts; other jobs read them.

::

    training      | publish: copy |  next steps ...
    background                    | digests | held: all parts are whole, and known to the registry: READABLE
    next publish  | versions that are retired, and that nobody reads, give their memory back | copy | ...

The bytes stay here. The registry (`dtckpt.coordination.feeds`) knows which client has which part, who reads, and when
memory may be freed. A version becomes readable with its last part, so a reader sees all of a version or nothing of it.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.live.version_checkpoint import index_digest
from dtckpt.checkpoint.live.versions import SCHEME, Endpoint, job_of_feed, save_of_version, title_of_version
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.part_writer import PartInProgress, described_pieces
from dtckpt.checkpoint.parts.peers import Peer, own_address
from dtckpt.checkpoint.parts.records import NO_COPIES, PartIndex, SaveId
from dtckpt.checkpoint.parts.server import PartServer
from dtckpt.checkpoint.saving.agree import Agreed, Proposal, agree
from dtckpt.checkpoint.saving.plan import SavePlan
from dtckpt.checkpoint.saving.report import SaveReport
from dtckpt.checkpoint.saving.save_handle import SaveHandle
from dtckpt.checkpoint.saving.state import State, state_of_tree
from dtckpt.coordination.connect import current_coordination
from dtckpt.coordination.feeds.tickets import check_ticket
from dtckpt.errors import ConfigError, CoordinationError, DtckptError, StorageFullError, TicketError, VersionLeasedError
