# SPDX-License-Identifier: GPL-3.0-or-later
"""Options that all servers have in common, and how options come from the environment."""

from __future__ import annotations

import argparse
import os
import typing as t

import gpushare

# Type, default and help by name.
Flags = t.Mapping[str, tuple[t.Callable[[str], t.Any], str, str]]
COMMON: Flags = {
    "status-socket": (
        str,
        "",
        "path of a Unix socket for probes: /healthz, /readyz, /metrics, /version; unset: none",
    ),
    "log-format": (str, "text", "text or json"),
    "log-level": (str, "info", "debug, info, warning or error"),
    "api-server": (str, "", "URL; unset: the cluster's own"),
    "service-account": (str, "", "folder with the files token and ca.crt; unset: the one that kubelet mounts in a pod"),
}


def add(made: argparse.ArgumentParser, flags: Flags) -> None:
    """Add options that come from the environment, then from the defaults."""
    for name, (kind, usual, help_text) in flags.items():
        # The environment's values are strings, which argparse converts as those of the command line.
        variable = "NODE_NAME" if name == "node-name" else "GPUSHARE_" + name.upper().replace("-", "_")
        made.add_argument(f"--{name}", type=kind, default=os.environ.get(variable, usual), help=help_text)


def add_common(made: argparse.ArgumentParser) -> None:
    """Add the common options, and the one that prints the version."""
    add(made, COMMON)
    made.add_argument("--version", action="version", version=gpushare.__version__)


def check_common(made: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check the common options; a wrong one ends the process."""
    check_choice(made, options, "log-format", ("text", "json"))
    check_choice(made, options, "log-level", ("debug", "info", "warning", "error"))


def check_choice(
    made: argparse.ArgumentParser, options: argparse.Namespace, name: str, allowed: t.Sequence[str]
) -> None:
    """End the process if an option has none of the allowed values; argparse doesn't check those of the environment.

    :param made: the parser.
    :param options: what it parsed.
    :param name: the option's, without its dashes.
    """
    value = getattr(options, name.replace("-", "_"))
    if value not in allowed:
        made.error(f"--{name}: {value!r} is none of {', '.join(allowed)}")
