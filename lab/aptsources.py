# SPDX-License-Identifier: GPL-3.0-or-later
"""The machine's own apt sources, deb822 and one-line: the mirror and suite that nodes are built from."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from lab.shell import LabError


@dataclass(frozen=True)
class Source:
    """One suite of one archive."""

    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str = ""


def parse_one_line(text: str) -> list[Source]:
    """Parse lines like `deb [signed-by=/a] http://mirror/debian bookworm main`."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s*([^#]*)", line)
        if match:
            options = dict(option.split("=", 1) for option in (match[1] or "").split() if "=" in option)
            found.append(Source(match[2].rstrip("/"), match[3], tuple(match[4].split()), options.get("signed-by", "")))
    return found


def parse_deb822(text: str) -> list[Source]:
    """Parse stanzas with Types, URIs, Suites and Components."""
    found = []
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for stanza in re.split(r"\n\s*\n", "\n".join(lines)):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1].isspace():
                fields[name] = f"{fields.get(name, '')}\n{line.strip()}"
            elif ":" in line:
                name, _colon, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in ("no", "false"):
            continue
        signed = fields.get("signed-by", "")
        # The key may stand in the stanza itself; debootstrap takes only a file.
        keyring = signed if signed.startswith("/") and "\n" not in signed else ""
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                found.append(Source(uri.rstrip("/"), suite, tuple(fields.get("components", "").split()), keyring))
    return found


def choose(sources: list[Source], codename: str) -> Source:
    """Choose the archive of the machine's own release: the suite is its codename and main is among the components."""
    for source in sources:
        if source.suite == codename and "main" in source.components and re.match(r"(https?|file|copy)://?", source.uri):
            return source
    raise LabError(f"this machine's apt sources name no archive of its own release {codename!r} to build nodes from.")


def of_suite(source: Source, suite: str) -> Source:
    """Return the same archive with another release."""
    return replace(source, suite=suite)


def codename(os_release: str) -> str:
    """Return VERSION_CODENAME of /etc/os-release."""
    match = re.search(r'^VERSION_CODENAME="?([a-z]+)', os_release, re.MULTILINE)
    return match[1] if match else ""


def read_machine(etc: Path = Path("/etc")) -> Source:
    """Read this machine's source."""
    found: list[Source] = []
    listed = etc / "apt" / "sources.list"
    if listed.exists():
        found += parse_one_line(listed.read_text())
    folder = etc / "apt" / "sources.list.d"
    for path in sorted(folder.glob("*")) if folder.is_dir() else []:
        if path.suffix == ".list":
            found += parse_one_line(path.read_text())
        elif path.suffix == ".sources":
            found += parse_deb822(path.read_text())
    return choose(found, codename((etc / "os-release").read_text()))
