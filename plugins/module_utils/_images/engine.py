# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The programs that build images and push them: podman, buildah and docker."""

from __future__ import annotations

import dataclasses
import posixpath
import re
import typing as t

from .._core.errors import BadInput, NotInEffect
from .._host.system import Done, System

ENGINES = ("podman", "buildah", "docker")
# The machine's own platform, by uname's name of its processor.
MACHINES = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
_DIGEST = re.compile(r"\bsha256:[0-9a-f]{64}\b")


def native(system: System) -> str:
    """Return the machine's own platform; empty for a processor without images."""
    return MACHINES.get(system.run(["uname", "-m"]).out.strip(), "")


def choose(system: System, wanted: str, platforms: t.Collection[str]) -> str:
    """Return the first engine that works here and can build for all platforms.

    :param wanted: one of ``ENGINES``, or ``auto``.
    :param platforms: of what is to be built; empty where nothing is.
    :raises BadInput: there is none.
    """
    foreign = set(platforms) - {native(system)}
    refused = []
    names = ENGINES if wanted == "auto" else (wanted,)
    for name in names:
        if system.run([name, "--version"], timeout=30).rc != 0:
            continue
        # Its daemon may be down, or this user may have no right to it.
        question = "version" if name == "docker" else "info"
        answer = system.run([name, question], timeout=60)
        if answer.rc != 0:
            refused.append(f"{name} {question} failed: {last_lines(answer, 1)}")
        elif name == "docker" and foreign and system.run([name, "buildx", "version"]).rc != 0:
            refused.append(f"docker builds for {', '.join(sorted(foreign))} only with its plugin buildx")
        else:
            return name
    reason = "; ".join(refused) or f"this machine has no {', no '.join(names)}"
    raise BadInput(f"image_build_engine: {reason}")


def last_lines(done: Done, count: int) -> str:
    """Return the last lines of what a program wrote, in one."""
    lines = [line.strip() for line in (done.err or done.out).splitlines() if line.strip()]
    return " | ".join(lines[-count:])


@dataclasses.dataclass(frozen=True)
class Engine:
    """An engine that works.

    :param tls_verify: whether a registry's certificate is verified.
    :param timeout: of each build and each push, in seconds.
    """

    system: System
    name: str
    tls_verify: bool = True
    timeout: float = 3600

    def do(self, command: list[str], timeout: float = 60) -> str:
        """Run a program and return what it writes.

        :raises NotInEffect: it fails; with its last words.
        """
        done = self.system.run(command, timeout=timeout)
        if done.rc != 0:
            why = last_lines(done, 3) if done.rc != 124 else f"it didn't finish within {timeout:g} s"
            raise NotInEffect(f"{' '.join(command[:2])} failed: {why}")
        return done.out

    def build(
        self,
        containerfile: str,
        context: str,
        platform: str,
        arguments: t.Mapping[str, str],
        epoch: int,
        reference: str,
        archive: str,
    ) -> None:
        """Build an image for one platform and save it.

        :param context: the folder with its sources.
        :param arguments: of the build.
        :param epoch: the timestamp of everything, in seconds since 1970; also an argument of the build.
        :param reference: the image's name in the archive, where podman or buildah writes it.
        :param archive: the path of the archive.
        :raises NotInEffect: the engine fails.
        """
        own, local = native(self.system), f"{reference}-{posixpath.basename(platform)}"
        given = {**arguments, "SOURCE_DATE_EPOCH": str(epoch)}
        if self.name == "docker":
            # Its old builder doesn't set this argument.
            given["BUILDPLATFORM"] = own
            special = ["--force-rm", *([] if platform == own else [f"--platform={platform}"])]
        else:
            special = [f"--platform={platform}", f"--timestamp={epoch}", "--format=docker"]
        options = [f"--file={containerfile}", "--no-cache", *special]
        options += [f"--build-arg={name}={value}" for name, value in given.items()]
        self.do([self.name, "build", *options, f"--tag={local}", context], self.timeout)
        if self.name == "docker":
            self.do(["docker", "save", f"--output={archive}", local], self.timeout)
        else:
            self.do([self.name, "push", local, f"docker-archive:{archive}:{reference}"], self.timeout)

    def push(self, reference: str, archives: t.Mapping[str, str]) -> str:
        """Push archives to a registry, as one reference for all platforms.

        :param archives: by platform the path of an archive, which has the image under ``reference``.
        :returns: the digest under which the registry has it; empty where the engine doesn't say.
        :raises NotInEffect: the engine fails.
        """
        if self.name == "docker":
            return self._push_docker(reference, archives)
        name = f"{reference}-list"
        said = f"{next(iter(archives.values()))}.digest"
        self.system.run([self.name, "manifest", "rm", name])
        self.do([self.name, "manifest", "create", name])
        for path in archives.values():
            self.do([self.name, "manifest", "add", name, f"docker-archive:{path}"])
        options = ["--all", f"--tls-verify={'true' if self.tls_verify else 'false'}", f"--digestfile={said}"]
        self.do([self.name, "manifest", "push", *options, name, f"docker://{reference}"], self.timeout)
        self.do([self.name, "manifest", "rm", name])
        digest = self.system.read(said) or ""
        self.system.remove(said)
        return _last_digest(digest)

    def _push_docker(self, reference: str, archives: t.Mapping[str, str]) -> str:
        parts, said = [], ""
        for platform, path in archives.items():
            self.do(["docker", "load", f"--input={path}"], self.timeout)
            parts.append(reference if len(archives) == 1 else f"{reference}-{posixpath.basename(platform)}")
            if len(archives) > 1:
                self.do(["docker", "tag", reference, parts[-1]])
            said = self.do(["docker", "push", parts[-1]], self.timeout)
        if len(archives) > 1:
            insecure = [] if self.tls_verify else ["--insecure"]
            self.do(["docker", "manifest", "create", *insecure, "--amend", reference, *parts])
            said = self.do(["docker", "manifest", "push", *insecure, "--purge", reference])
        return _last_digest(said)


def _last_digest(text: str) -> str:
    found = _DIGEST.findall(text)
    return str(found[-1]) if found else ""
