"""Certificates of an authority that lives as long as a test, as files."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import trustme


class Authority:
    """An authority, and a server's certificate of it.

    Args:
        folder: Where the files lie.
        name: Name or address in the certificate.
    """

    def __init__(self, folder: Path, name: str = "127.0.0.1") -> None:
        self.authority = trustme.CA()
        self.ca, self.cert, self.key = folder / "ca.pem", folder / "server.pem", folder / "server.key"
        folder.mkdir()
        self.authority.cert_pem.write_to_path(self.ca)
        self.issue(self.cert, self.key, name)

    def issue(self, cert: Path, key: Path, name: str, *, not_after: datetime | None = None) -> None:
        issued = self.authority.issue_cert(name, not_after=not_after)
        issued.private_key_pem.write_to_path(key)
        issued.cert_chain_pems[0].write_to_path(cert)
