# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""k3s and RKE2: their paths and settings. Pure.

Both regenerate their containerd's configuration at each start, detect NVIDIA's runtime by themselves and have one
setting for the default one. https://github.com/k3s-io/k3s/blob/v1.34.1%2Bk3s1/pkg/cli/cmds/agent.go
"""

from __future__ import annotations

import dataclasses
import posixpath
import re

from .containerd import RUNTIME_NAME

DROP_IN_NAME = "99-kubegpu-nvidia.yaml"
KEY = "default-runtime"
SOCKET = "/run/k3s/containerd/containerd.sock"


@dataclasses.dataclass(frozen=True)
class Kind:
    """One of the two.

    :param units: its systemd units, that of a server first.
    :param one_binary: its clients are commands of its binary, not files of their own.
    """

    name: str
    title: str
    units: tuple[str, ...]
    one_binary: bool

    @property
    def config(self) -> str:
        return f"/etc/rancher/{self.name}/config.yaml"

    @property
    def folder(self) -> str:
        return f"{self.config}.d"

    @property
    def drop_in(self) -> str:
        return posixpath.join(self.folder, DROP_IN_NAME)

    @property
    def data(self) -> str:
        return f"/var/lib/rancher/{self.name}"

    @property
    def record(self) -> str:
        return f"/var/lib/kubegpu-share/{self.name}.json"

    def client(self, name: str, binary: str, data: str) -> tuple[str, ...]:
        """Return the command of the client ``crictl`` or ``ctr`` that it brings along.

        :param binary: its own; empty if unknown.
        :param data: the directory of its state.
        """
        return (binary or self.name, name) if self.one_binary else (posixpath.join(data, "bin", name),)


# https://docs.rke2.io/reference/cli_tools
K3S = Kind("k3s", "k3s", ("k3s.service", "k3s-agent.service"), True)
RKE2 = Kind("rke2", "RKE2", ("rke2-server.service", "rke2-agent.service"), False)


def version_of(text: str) -> str:
    """Parse ``k3s version v1.30.4+k3s1 (98262b5d)``."""
    found = re.search(r"version v([0-9]+\.[0-9]+\.[0-9]+\S*)", text)
    return found.group(1) if found else ""


def setting(text: str, key: str) -> str:
    """Read a top-level scalar of a configuration file; nodes have no YAML library."""
    found = re.findall(rf"(?m)^[\"']?{re.escape(key)}[\"']?:[ \t]*(.*?)[ \t]*(?:[ \t]#.*)?\r?$", text)
    return str(found[-1]).strip("\"'") if found else ""


def templates(data: str) -> list[str]:
    """Return the paths of a user's own template for containerd's configuration."""
    folder = f"{data}/agent/etc/containerd"
    return [f"{folder}/config-v3.toml.tmpl", f"{folder}/config.toml.tmpl"]


def rendered(data: str) -> str:
    """Return the path of the generated containerd configuration."""
    return f"{data}/agent/etc/containerd/config.toml"


def renders_default(template: str) -> bool:
    """Return whether a template renders the setting: it includes the base template, or names the setting."""
    return bool(re.search(r"template\s+([\"`])base\1", template)) or "DefaultRuntime" in template


def sets_default(template: str) -> bool:
    """Return whether a template itself makes NVIDIA's runtime the default one; a comment doesn't count."""
    return bool(re.search(rf"(?m)^[^#\n]*\bdefault_runtime_name\s*=\s*([\"']){RUNTIME_NAME}\1", template))
