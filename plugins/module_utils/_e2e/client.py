# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The suites' client of the cluster: their namespace, their pods, the nodes, and commands in containers."""

from __future__ import annotations

import dataclasses
import typing as t

from .._contracts import gpushare as contract
from .._contracts import virtual
from .._contracts.claim_templates import API_VERSION
from .._contracts.claims import MALFORMED
from .._contracts.model import Node, Pod, PodParser, node_of
from .._core.errors import BadInput, ShareError
from .._core.natural import natural
from .._core.types import JsonObject
from .._core.wait import Waiting
from .._kube.api import Kube
from .._kube.errors import KubeError, KubeUnusable
from .._kube.refs import Ref
from . import assertions, nodes
from .assertions import PodState, is_running, pod_state
from .nodes import NodeState, Options, PodTemplate
from .result import NoBackend, StepOutcome

MANAGER = "kubegpu-acceptance"
# Seconds. Removing a namespace takes this long, even if the steps have a shorter timeout.
CLEAN_SECONDS = 120.0
# HTTP statuses of the API server that may pass.
TRANSIENT = (429, 500, 502, 503, 504)
# Until the controller manager has created the namespace's service account, the API server forbids pods with this text.
NO_ACCOUNT = ("serviceaccount", "not found")
# And until it has counted what a new quota limits.
UNCOUNTED = ("status unknown for quota",)

Result = t.TypeVar("Result")


class CreatedPod(t.TypedDict):
    """A pod that a suite created, with its last state."""

    pod: str
    uid: str
    units: int
    node: str
    card: int | None
    phase: str
    summary: str


def is_transient(error: ShareError) -> bool:
    """Return whether a request may succeed in a moment."""
    if isinstance(error, KubeUnusable):
        return True
    if not isinstance(error, KubeError):
        return False
    if error.status in TRANSIENT:
        return not error.admission
    return error.status == 403 and any(
        all(part in error.message for part in parts) for parts in (NO_ACCOUNT, UNCOUNTED)
    )


class SuiteClient:
    """Everything that one run creates, and its access to the cluster.

    :param run: identifies this run; only objects with this label are removed at its end.
    :ivar created_pods: by name.
    :ivar touched: objects of this run may exist.
    :ivar changed: the cluster was changed.
    :ivar allocations: who allocates the cards of each node that shares memory.
    """

    def __init__(self, kube: Kube, options: Options, waiting: Waiting, run: str) -> None:
        self._kube = kube
        self._options = options
        self._waiting = waiting
        self._run = run
        self._user = nodes.NOBODY
        self.image = options.image or ""
        self.created_pods: dict[str, CreatedPod] = {}
        self.touched = False
        self.changed = False
        self.allocations: dict[str, str] = {}
        self._has_claims = False

    # ----------------------------------------------------------------- requests

    def now(self) -> float:
        return self._waiting.now()

    def wait(self, timeout: float | None = None) -> Waiting:
        return dataclasses.replace(self._waiting, timeout=self._options.timeout if timeout is None else timeout)

    def request(self, call: t.Callable[[], Result]) -> Result:
        """Call the API server; once objects were created, transient errors are retried.

        :raises ShareError: it refuses, or the retries took the whole timeout.
        """
        last = ShareError("no response")
        for _attempt in self.wait().attempts():
            try:
                return call()
            except ShareError as error:
                last = error
                if not (self.touched and is_transient(error)):
                    break
        raise last

    def find_image(self) -> None:
        """Set the image to the device plugin's, unless the user named one.

        :raises BadInput: the device plugin's image can't be found.
        """
        if self.image:
            return
        try:
            image = nodes.plugin_image(self.request(lambda: self._kube.list_all("apps/v1", "DaemonSet")))
        except BadInput:
            raise
        except (ShareError, *MALFORMED) as error:
            raise BadInput(f"image: not set, and the device plugin's image can't be read: {error}") from error
        if not image:
            raise BadInput(
                f"image: not set, and the cluster has no DaemonSet that runs {' or '.join(nodes.PLUGIN_COMMANDS)} "
                "whose image could be used"
            )
        self.image = image

    # ----------------------------------------------------------------- nodes

    def sharing_nodes(self) -> list[Node]:
        """Return the nodes that share memory, of those that the user allows, in natural order.

        :raises BadInput: the node that the user named doesn't exist.
        :raises NoBackend: no node shares memory.
        """
        there = self.all_nodes()
        if self._options.node:
            there = [node for node in there if node.name == self._options.node]
            if not there:
                raise BadInput(f"node: the cluster has no node {self._options.node}")
        sharing = [node for node in there if nodes.shares_memory(node)]
        if not sharing:
            raise NoBackend(nodes.no_backend_reason(there))
        return sorted(sharing, key=lambda node: natural(node.name))

    def all_nodes(self) -> list[Node]:
        """Return the nodes, or those of one kind where the run is for that."""
        only = self._options.only
        listed = map(node_of, self.request(lambda: self._kube.list_all("v1", "Node")))
        there = [node for node in listed if node is not None and (only is None or node.name in only)]
        self._has_claims = any(nodes.allocation_of(node) == nodes.DRA for node in there)
        cards = self._cards()
        there = [assertions.as_announced(node, cards.get(node.name)) for node in there]
        self.allocations = {node.name: nodes.allocation_of(node) for node in there if nodes.shares_memory(node)}
        return there

    def usable_state(self, node: Node) -> NodeState | str:
        """Return a node's state, or why the node can't be used."""
        reason = nodes.unusable_reason(node, self._options.node_selector, self._options.tolerations)
        return reason or nodes.node_state(node, self._pods_of(node.name))

    def node_state(self, name: str) -> NodeState:
        """Return a node's present state.

        :raises StepOutcome: the node doesn't exist any more, or is malformed.
        """
        node = self.node(name)
        if node is None:
            raise StepOutcome(f"node {name} doesn't exist any more")
        state = nodes.node_state(assertions.as_announced(node, self._cards().get(name)), self._pods_of(name))
        if isinstance(state, str):
            raise StepOutcome(f"node {name}: {state}")
        return state

    def unfinished_pods(self, node: str) -> list[Pod]:
        """Return the pods on a node that haven't ended."""
        return [pod for pod in self._pods_of(node) if not pod.finished]

    def daemon_sets(self) -> list[JsonObject]:
        return self.request(lambda: self._kube.list_all("apps/v1", "DaemonSet"))

    def node(self, name: str) -> Node | None:
        return node_of(self.request(lambda: self._kube.get(Ref("v1", "Node", "", name))))

    def config_map(self, namespace: str, name: str) -> JsonObject:
        """Return a ConfigMap's data; empty where it doesn't exist."""
        config = self.request(lambda: self._kube.get(Ref("v1", "ConfigMap", namespace, name)))
        return (config or {}).get("data") or {}

    def has_definition(self, name: str) -> bool:
        """Return whether the cluster has a CustomResourceDefinition."""
        ref = Ref("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", name)
        return self.request(lambda: self._kube.get(ref)) is not None

    def kubevirts(self) -> list[JsonObject]:
        """Return the cluster's KubeVirt; it has one at most. Its definition has to be there."""
        return self.request(lambda: self._kube.list_all(virtual.API, "KubeVirt"))

    def runtime_classes(self) -> dict[str, JsonObject]:
        """Return the cluster's RuntimeClasses by name."""
        listed = self.request(lambda: self._kube.list_all(*virtual.CLASSES))
        return {str(item["metadata"]["name"]): item for item in listed}

    def create_machine(self, definition: JsonObject) -> None:
        """Create a virtual machine of KubeVirt, with the run's labels."""
        name = str(definition["metadata"]["name"])
        definition["metadata"]["labels"] = {nodes.LABEL: self._options.suite, nodes.RUN_LABEL: self._run}
        self.created_pods[name] = created = CreatedPod(
            pod=f"{self._options.namespace}/{name}", uid="", units=1, node="", card=None, phase="", summary=""
        )
        applied = self.request(lambda: self._kube.apply(definition, MANAGER))
        created["uid"] = str(applied["metadata"].get("uid") or "")

    def machine_status(self, name: str) -> JsonObject:
        """Return the status of a virtual machine that the suite created; empty where it doesn't exist."""
        ref = Ref(virtual.API, virtual.INSTANCE, self._options.namespace, name)
        status: JsonObject = (self.request(lambda: self._kube.get(ref)) or {}).get("status") or {}
        created = self.created_pods[name]
        created["phase"], created["node"] = str(status.get("phase") or ""), str(status.get("nodeName") or "")
        return status

    def own_pods(self) -> list[Pod]:
        """Return the pods in the suite's namespace, which others may have created there."""
        listed = self.request(lambda: self._kube.list_all("v1", "Pod", self._options.namespace))
        return [pod for pod in map(PodParser(), listed) if pod is not None]

    def _pods_of(self, node: str) -> list[Pod]:
        return self._booked(
            self.request(lambda: self._kube.list_all("v1", "Pod", field_selector=f"spec.nodeName={node}"))
        )

    def _cards(self) -> dict[str, assertions.Cards]:
        """Return the cards in slices by node, where a node has them."""
        if not self._has_claims:
            return {}
        return assertions.cards_by_node(self.request(lambda: self._kube.list_all(API_VERSION, "ResourceSlice")))

    def _booked(self, listed: t.Iterable[JsonObject]) -> list[Pod]:
        """Parse pods, with what their claims are allocated where a node's cards are allocated by claims."""
        pods = [pod for pod in map(PodParser(), listed) if pod is not None]
        if not self._has_claims:
            return pods
        claims = self.request(lambda: self._kube.list_all(API_VERSION, "ResourceClaim"))
        return assertions.as_booked(pods, claims, self._cards())

    def has_claims(self) -> bool:
        """Return whether the extender reserves memory for a pod that preempted others."""
        return bool(self.request(lambda: self._kube.list_all("v1", "Pod", label_selector=contract.POD_CLAIM)))

    # ----------------------------------------------------------------- pods

    def create_pod(
        self, name: str, units: t.Sequence[int], node: str | None, allocation: str, image: str = ""
    ) -> PodState:
        """Create a pod with one container for each number of units.

        :param node: the only node where it may run; None for any.
        :param allocation: who is to allocate its share.
        :param image: another one than the run's.
        """
        return self.create(self.template(image).pod(name, units, node, allocation), sum(units))

    def template(self, image: str = "") -> PodTemplate:
        """Return what all pods of the run have in common.

        :param image: another one than the run's.
        """
        return PodTemplate(self._options, image or self.image, self._run, self._user)

    def create(self, manifest: JsonObject, units: int) -> PodState:
        """Create a pod."""
        name = str(manifest["metadata"]["name"])
        self.created_pods[name] = created = CreatedPod(
            pod=f"{self._options.namespace}/{name}", uid="", units=units, node="", card=None, phase="", summary=""
        )
        state = pod_state(self.request(lambda: self._kube.apply(manifest, MANAGER)))
        created["uid"] = state.uid
        return state

    def pods(self) -> dict[str, PodState]:
        """Return the present state of the suite's pods, by name."""
        listed = self.request(lambda: self._kube.list_all("v1", "Pod", self._options.namespace))
        booked = {pod.name: pod for pod in self._booked(listed)}
        events = self._events() if any(not is_running(pod) for pod in listed) else []
        states = {}
        for raw in listed:
            state = pod_state(raw, events, booked.get(str((raw.get("metadata") or {}).get("name"))))
            states[state.name] = state
        for name, state in states.items():
            if name in self.created_pods:
                created = self.created_pods[name]
                created["uid"], created["node"], created["card"] = state.uid, state.node, state.index
                created["phase"], created["summary"] = state.phase, state.summary
        return states

    def _events(self) -> list[JsonObject]:
        """Return the namespace's events; without the right to list them the pods' conditions have to do."""
        try:
            events = self._kube.list_all("v1", "Event", self._options.namespace)
        except ShareError:
            return []
        return [event for event in events if isinstance(event, dict)]

    def watch(self, names: t.Collection[str], done: t.Callable[[dict[str, PodState]], bool]) -> dict[str, PodState]:
        """Poll pods until ``done`` or the timeout, and return their last state.

        :raises StepOutcome: another client removed one of them.
        """
        states: dict[str, PodState] = {}
        for _poll in self.wait().attempts():
            states = {name: pod for name, pod in self.pods().items() if name in names}
            gone = sorted(set(names) - set(states))
            if gone:
                raise StepOutcome(
                    f"pod {gone[0]} doesn't exist any more: another client removed it",
                    "run one suite at a time",
                    gone[0],
                )
            if done(states):
                break
        return states

    def remove_pods(self, names: t.Collection[str]) -> list[str]:
        """Delete pods, wait until they are gone, and return those that aren't at the timeout."""
        for name in names:
            self.request(lambda name=name: self._kube.delete(Ref("v1", "Pod", self._options.namespace, name)))  # type: ignore[misc]
        left: list[str] = []
        # Scheduler and extender see the deletion by their own watches, a moment later.
        self._waiting.sleep(self._waiting.pause)
        for _poll in self.wait().attempts():
            left = sorted(set(names) & set(self.pods())) if names else []
            if not left:
                break
        return left

    def delete_pod(self, name: str) -> None:
        """Request a pod's deletion without waiting for it."""
        try:
            self._kube.delete(Ref("v1", "Pod", self._options.namespace, name))
        except ShareError:
            # It is removed with its namespace.
            return

    # ----------------------------------------------------------------- namespace

    def find_namespace(self) -> JsonObject | None:
        """Return the suite's namespace, if it exists.

        :raises BadInput: it isn't the suite's.
        """
        existing = self.request(lambda: self._kube.get(self._ref()))
        if existing is not None and nodes.labels_of(existing).get(nodes.LABEL) != self._options.suite:
            raise BadInput(
                f"namespace: {self._options.namespace} exists and isn't the suite's (it lacks the label "
                f"{nodes.LABEL}={self._options.suite}); name another one"
            )
        return existing

    def _ref(self) -> Ref:
        return Ref("v1", "Namespace", "", self._options.namespace)

    def create_namespace(self) -> None:
        """Create the suite's namespace.

        :raises BadInput: another client created it at the same time.
        """
        self.touched = self.changed = True
        applied = self.request(lambda: self._kube.apply(nodes.namespace(self._options, self._run), MANAGER))
        fields = (applied.get("metadata") or {}).get("managedFields") or []
        if any(field.get("manager") != MANAGER for field in fields):
            # The apply took over an existing namespace: remove the labels again and keep it.
            self.touched = False
            bare = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self._options.namespace}}
            self.request(lambda: self._kube.apply(bare, MANAGER))
            raise BadInput(
                f"namespace: another client created {self._options.namespace} at the same time; name another one"
            )
        # OpenShift adds the range of user IDs a moment later.
        self._user = nodes.user_of(self.request(lambda: self._kube.get(self._ref())) or applied)

    def remove_namespace(self, only_this_run: bool) -> str:
        """Delete the namespace, wait until it is gone, and return why it isn't; empty if it is.

        :param only_this_run: keep a namespace that another run created.
        """
        reason = ""
        for _attempt in self.wait(max(CLEAN_SECONDS, self._options.timeout)).attempts():
            try:
                existing = self._kube.get(self._ref())
                labels = nodes.labels_of(existing)
                ours = labels.get(nodes.LABEL) == self._options.suite
                if existing is None or not ours or (only_this_run and labels.get(nodes.RUN_LABEL) != self._run):
                    return ""
                reason = "it still exists"
                if not (existing.get("metadata") or {}).get("deletionTimestamp"):
                    self._kube.delete(self._ref())
                    self.changed = True
            except ShareError as error:
                reason = str(error)
                if not is_transient(error):
                    break
        return reason
