# SPDX-License-Identifier: GPL-3.0-or-later
"""The service account of a server that a test starts, for an API server with plain HTTP."""

from __future__ import annotations

from pathlib import Path


def service_account(folder: Path, url: str, token: str = "any") -> list[str]:
    """Write the account's files into a folder.

    :returns: the command line options by which a server takes them.
    """
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text(f"{token}\n")
    return [f"--api-server={url}", f"--service-account={folder}"]
