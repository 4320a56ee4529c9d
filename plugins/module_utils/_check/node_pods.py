# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Evidence of nodes whose machines aren't reached: their own pod of the device plugin, or of the DRA driver, has it.

The command ``gpushare-node-facts`` in its container answers as nvml_info and kubelet_devices_info do on a machine. The
API decides which pod is asked and what it may know: one of this collection's DaemonSet, under its account, on that
node. The answer is that node's word and nobody else's: it is JSON of any shape until ``evidence`` has read it.
No I/O but the given command.
"""

from __future__ import annotations

import dataclasses
import json
import typing as t
from concurrent.futures import ThreadPoolExecutor

from .._contracts import card_exclusion
from .._core.errors import ShareError
from .._core.types import JsonObject
from .._kube.refs import Ref
from .parse import shorten

if t.TYPE_CHECKING:
    from .._kube.pod_exec import Execute

NAME = "app.kubernetes.io/name"
# By the DaemonSet's name, which is its account's and its command's, too: the container.
SERVERS = {"gpushare-device-plugin": "device-plugin", "gpushare-dra-driver": "dra-driver"}
COMMAND = "gpushare-node-facts"
VERSION = 1
# Nodes that are asked at a time: each has a connection, and an answer in memory.
AT_ONCE = 16
NOT_OBSERVED = "its machine wasn't observed in this run"
FOLDER, EXCLUDE = "--kubelet-dir=", "--exclude-cards="


class ObjectReader(t.Protocol):
    """Reads single objects of the API."""

    def get(self, ref: Ref) -> JsonObject | None: ...


@dataclasses.dataclass(frozen=True)
class NodePod:
    """A pod that can answer for its node.

    :param server: its DaemonSet.
    :param owner: UID of the DaemonSet that it says it is of.
    :param host_pid: it has the node's own process IDs; only then can it know whose processes there are.
    :param command: of its container, whose options the answer depends on.
    """

    node: str
    namespace: str
    name: str
    server: str
    owner: str
    host_pid: bool
    command: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def container(self) -> str:
        return SERVERS[self.server]

    def argv(self, timeout: int) -> list[str]:
        """Return the command that is run in it.

        :param timeout: of NVML, in seconds.
        :raises BadInput: the container's own command can't be read.
        """
        given = [word[len(EXCLUDE) :] for word in self.command if word.startswith(EXCLUDE)]
        exclude = card_exclusion.options({self.node: card_exclusion.of_node(self.node, given)})
        folder = [word for word in self.command if word.startswith(FOLDER)]
        pids = ["--host-pid"] if self.host_pid else []
        return [COMMAND, f"--timeout={timeout}", *folder, *(EXCLUDE + value for value in exclude), *pids]


def pod_of(raw: t.Any, namespace: str) -> NodePod | None:
    """Return a pod that can answer; None for every other one.

    :param raw: as the API has it.
    :param namespace: of the servers.
    """
    try:
        metadata, spec = raw["metadata"], raw["spec"]
        server = metadata["labels"][NAME]
        if metadata["namespace"] != namespace or server not in SERVERS or metadata.get("deletionTimestamp"):
            return None
        owners = [owner for owner in metadata["ownerReferences"] if owner.get("controller")]
        of_set = [owner["uid"] for owner in owners if (owner["kind"], owner["name"]) == ("DaemonSet", server)]
        container = next(each for each in spec["containers"] if each["name"] == SERVERS[server])
        command = tuple(str(word) for word in container.get("command") or ())
        # Upstream's image has another command.
        if len(of_set) != 1 or spec["serviceAccountName"] != server or command[:1] != (server,):
            return None
        statuses = raw["status"]["containerStatuses"]
        if not any(each["name"] == container["name"] and "running" in each["state"] for each in statuses):
            return None
        pids = spec.get("hostPID") is True
        return NodePod(spec["nodeName"], namespace, metadata["name"], server, str(of_set[0]), pids, command)
    except (AttributeError, TypeError, KeyError, IndexError, StopIteration):
        return None


def evidence_from(
    api: ObjectReader,
    pods: t.Iterable[NodePod],
    given: t.Mapping[str, t.Any],
    wanted: t.Collection[str],
    timeout: int,
    executor: t.Callable[[], Execute],
) -> dict[str, t.Any]:
    """Return the evidence, with that of nodes that had none from their pods.

    :param pods: that can answer.
    :param given: by node name; of a machine that was observed it stays as it is.
    :param wanted: names of the nodes that may be asked; empty for all.
    :param timeout: of NVML, in seconds.
    :param executor: returns what runs commands in containers; called only where a pod is asked.
    """
    evidence = dict(given)
    asked: dict[str, tuple[NodePod, str]] = {}
    for pod in pods:
        missing = NOT_OBSERVED if pod.node not in given else _missing(given[pod.node])
        if missing and (not wanted or pod.node in wanted):
            asked[pod.node] = (pod, missing)
    if not asked:
        return evidence
    owners = {server: _owner(api, pod) for server, pod in {pod.server: pod for pod, _why in asked.values()}.items()}

    try:
        execute = executor()
    except ShareError as error:
        # Without it everything else is checked all the same.
        execute = _refusing(error)

    def ask(entry: tuple[NodePod, str]) -> JsonObject:
        pod, missing = entry
        try:
            uid = owners[pod.server]
            if isinstance(uid, ShareError):
                raise uid
            if uid != pod.owner:
                raise ShareError(f"it is of another DaemonSet than {pod.namespace}/{pod.server}")
            return _answer(pod, execute(pod.namespace, pod.name, pod.container, pod.argv(timeout)))
        except ShareError as error:
            why = shorten(f"{missing}, and pod {pod.key} doesn't answer for it: {error}", 500)
            return {"nvml": None, "kubelet": None, "problem": why}

    with ThreadPoolExecutor(AT_ONCE) as pool:
        evidence.update(zip(asked, pool.map(ask, asked.values())))
    return evidence


def _refusing(error: ShareError) -> Execute:
    """Return what runs no command."""

    def refuse(namespace: str, pod: str, container: str, argv: t.Sequence[str]) -> str:
        raise error

    return refuse


def _owner(api: ObjectReader, pod: NodePod) -> str | ShareError:
    """Return the UID of the DaemonSet of a pod's name, or why it is unknown."""
    ref = Ref("apps/v1", "DaemonSet", pod.namespace, pod.server)
    try:
        live = api.get(ref)
    except ShareError as error:
        return error
    uid = ((live or {}).get("metadata") or {}).get("uid")
    return uid if isinstance(uid, str) and uid else ShareError(f"{ref} doesn't exist")


def _missing(given: t.Any) -> str:
    """Return why a machine's evidence has nothing; empty where it has something, or only UUIDs are given."""
    if isinstance(given, str):
        # Evidence that has something is longer, and is read later.
        if len(given) > 4096:
            return ""
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return ""
    if not isinstance(given, dict) or given.get("nvml") is not None or given.get("kubelet") is not None:
        return ""
    problem = given.get("problem")
    return problem if isinstance(problem, str) and problem else NOT_OBSERVED


def _answer(pod: NodePod, text: str) -> JsonObject:
    """Return the evidence in a pod's answer.

    :raises ShareError: it isn't one, or is of another node.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        raise ShareError("its answer isn't JSON") from None
    if not isinstance(answer, dict) or answer.get("version") != VERSION:
        raise ShareError("its answer has another form: its image is of another version")
    if answer.get("node") != pod.node:
        raise ShareError(f"it answers for node {shorten(str(answer.get('node')))}")
    nvml, kubelet = answer.get("nvml"), answer.get("kubelet")
    if not pod.host_pid:
        # To the driver and in /proc there are no processes but its own, which an empty list would deny.
        nvml = {**nvml, "cards": _unknown(nvml.get("cards"), "processes")} if isinstance(nvml, dict) else nvml
        (kubelet,) = _unknown([kubelet], "device_nodes")
    return {"nvml": nvml, "kubelet": kubelet, "problem": "", "source": f"pod {pod.key}"}


def _unknown(rows: t.Any, field: str) -> t.Any:
    """Return rows in which a field is null."""
    if not isinstance(rows, list):
        return rows
    return [{**row, field: None} if isinstance(row, dict) else row for row in rows]
