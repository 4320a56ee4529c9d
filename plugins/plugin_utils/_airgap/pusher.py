# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bring an archive's images into the user's registry: only those that it lacks, each with the digest that it had."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import time
import typing as t

from ...module_utils._core.errors import BadInput, NotInEffect, ShareError
from ...module_utils._core.plan import Change, Plan
from ...module_utils._core.untrusted import line
from . import web
from .layout import Layout
from .mirrors import WORDS
from .programs import NOT_INSTALLED, TIMED_OUT, Run, Watch, last_words, run
from .progress import Progress, Tell
from .push import Registry, Target

# Seconds for a registry's answers about all images, and for one image to be copied.
ASKING, COPYING = 300.0, 4 * 3600.0
TRIES = 3
# What skopeo says of a registry that refuses, whose port may contain such a number.
_DENIED = re.compile(r"denied|unauthorized|forbidden|authentication required|\b40[13]\b", re.IGNORECASE)
# What registries say that have no room, each in its own words; one whose disk is full may say no more than 500.
_FULL = re.compile(r"no space left|insufficient storage|quota|\b507\b|\b500 internal server error", re.IGNORECASE)

# Digest by target; empty where the registry has none of this name.
Known = dict[Target, str]


class Access(t.NamedTuple):
    """How the registry is reached.

    :param auth_file: credentials, as ``podman login`` writes them; empty for those of the environment.
    :param authority: a certificate; empty for the system's authorities alone.
    :param insecure: the user has said that it has no TLS, and that the nodes' runtimes know it.
    """

    auth_file: str = ""
    authority: str = ""
    insecure: bool = False


def without_tls(host: str) -> str:
    """Return why a registry without TLS is refused, and what makes nodes take images from it."""
    return (
        f"airgap_registry: {host} doesn't speak TLS, and container runtimes pull nothing from there. Give it a "
        "certificate; or tell the runtime of each node, which this collection doesn't do, and then set "
        f"airgap_registry_insecure: true. containerd: /etc/containerd/certs.d/{host}/hosts.toml with "
        f'server = "http://{host}", and config_path of its registry configuration has to be /etc/containerd/certs.d. '
        f'CRI-O: a [[registry]] with location = "{host}" and insecure = true in /etc/containers/registries.conf.d. '
        f'Docker: "insecure-registries": ["{host}"] in /etc/docker/daemon.json. k3s, RKE2: endpoint http://{host} in '
        "registries.yaml. Nothing was changed"
    )


class Pusher:
    """Reconciles a registry with an archive's images; ``_core.plan`` runs it.

    :param tell: prints what is being done.
    """

    def __init__(
        self,
        registry: Registry,
        targets: t.Sequence[Target],
        layout: Layout,
        access: Access,
        skopeo: str,
        tell: Tell,
        program: Run = run,
        fetch: web.Fetch | None = None,
        environment: t.Mapping[str, str] | None = None,
    ) -> None:
        self._registry = registry
        self._targets = targets
        self._layout = layout
        self._access = access
        self._skopeo = skopeo
        self._tell = tell
        self._program = program
        fetch = fetch or web.fetcher(access.authority, "airgap_registry_ca")
        known = web.credentials(os.environ if environment is None else environment, access.auth_file)
        self._registries = web.Registries(fetch, known, [registry.host] if access.insecure else ())
        # Whether the registry has answered without TLS.
        self._plain = False
        self._bytes = {target: layout.require(target.image, target.digest) for target in targets}

    def observe(self) -> Known:
        """Ask the registry for the digest of each image.

        :raises BadInput: it doesn't say.
        """
        until = time.monotonic() + ASKING
        return {target: self._digest(target, until) for target in self._targets}

    def _digest(self, target: Target, until: float) -> str:
        answer = self._registries.manifest(self._registry.host, target.repository, target.reference, until)
        self._plain = answer.plain
        if answer.plain and not self._access.insecure:
            raise BadInput(without_tls(self._registry.host), code="no_tls")
        if answer.status in (404, 410):
            return ""
        if answer.status == 200 and not answer.failure:
            return f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
        code = answer.failure or f"http_{answer.status}"
        reason = WORDS.get(answer.failure, f"it answers with HTTP {answer.status}")
        if answer.status in (401, 403):
            reason = (
                f"it doesn't accept these credentials (HTTP {answer.status}): set airgap_registry_auth_file to a file "
                "that podman login --authfile wrote; Harbor says the same of a project that isn't there"
            )
        elif answer.failure == "tls":
            reason += ": set airgap_registry_ca to its authority's certificate"
        where = f"{self._registry.host}/{target.repository}"
        raise BadInput(f"airgap_registry: whether {where} is there isn't known: {reason}", code=code, repository=where)

    def plan(self, state: Known) -> Plan:
        return Plan(
            tuple(
                Change(
                    f"{self._registry.host}/{target.repository}:{target.reference}",
                    f"{state[target]}\n" if state[target] else "",
                    f"{target.digest}\n",
                    target,
                )
                for target in self._targets
                if state[target] != target.digest
            )
        )

    def apply(self, _state: Known, plan: Plan) -> None:
        """Copy what is missing.

        :raises ShareError: one wasn't copied; those before it are there, and the next run goes on.
        """
        with self._certificates() as options:
            progress = Progress(self._tell, [self._bytes[change.step] for change in plan.changes])
            for number, change in enumerate(plan.changes, 1):
                progress.begin(change.header)
                self._copy(change.step, options, len(plan.changes) - number, progress.within)
                progress.end(self._bytes[change.step])

    @contextlib.contextmanager
    def _certificates(self) -> t.Iterator[list[str]]:
        """Yield skopeo's options for the registry."""
        options = ["--dest-authfile", self._access.auth_file] if self._access.auth_file else []
        # Only where it has none: the option would also take any certificate.
        options += ["--dest-tls-verify=false"] if self._plain else []
        if not self._access.authority:
            yield options
            return
        # It takes a folder, in which authorities end with .crt.
        with tempfile.TemporaryDirectory(prefix="kubegpu-") as folder:
            shutil.copyfile(self._access.authority, os.path.join(folder, "authority.crt"))
            yield [*options, "--dest-cert-dir", folder]

    def _copy(self, target: Target, options: t.Sequence[str], later: int, watch: Watch) -> None:
        with self._layout.view(target.image) as source:
            place = f"{self._registry.host}/{target.repository}"
            place += f":{target.tag}" if target.tag else f"@{target.digest}"
            # What says whose images are accepted is for images that are pulled; the archive's signature was verified.
            command = [self._skopeo, "--insecure-policy", "copy", "--all", "--preserve-digests"]
            command += ["--retry-times", str(TRIES), *options, f"oci:{source}", f"docker://{place}"]
            done = self._program(command, timeout=COPYING, watch=watch)
        if done.rc == NOT_INSTALLED:
            raise BadInput(
                f"airgap_skopeo: there is no {self._skopeo} on this machine: install skopeo", code="no_skopeo"
            )
        if done.rc == TIMED_OUT:
            raise NotInEffect(
                f"{place} wasn't copied within {COPYING:g} s; run it again, it goes on there", later=later
            )
        if done.rc != 0:
            words = last_words(done)
            hint = ""
            if _DENIED.search(words):
                project = f"{self._registry.host}/{target.repository.partition('/')[0]}"
                hint = (
                    f": the credentials have to allow writing there, and Harbor needs the project {line(project)} first"
                )
            elif _FULL.search(words):
                hint = f": make room on the disk of {self._registry.host}, or raise its quota; its log says which it is"
            raise ShareError(
                f"airgap_registry: {place} wasn't taken ({words}){hint}; {later} more images were still to be copied, "
                "and the next run goes on there",
                code="not_taken",
                later=later,
            )
