# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The canary's hands: its namespace, its pods, and its looks at the cluster; none of it decides anything."""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _acceptance_plan as workloads
from ansible_collections.kubegpu.share.plugins.module_utils import _canary as plan
from ansible_collections.kubegpu.share.plugins.module_utils import _canary_objects as objects
from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils._allocation import natural
from ansible_collections.kubegpu.share.plugins.module_utils._canary import Chosen, Survey
from ansible_collections.kubegpu.share.plugins.module_utils._canary_objects import Wish
from ansible_collections.kubegpu.share.plugins.module_utils._canary_result import NoBackend, NotShown, Told
from ansible_collections.kubegpu.share.plugins.module_utils._canary_seen import Seen, read
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Json, Ref
from ansible_collections.kubegpu.share.plugins.module_utils._waiting import Waiting

MANAGER = "kubegpu-canary"
# A namespace takes its time to go, however little patience the steps have.
CLEAN_SECONDS = 120.0
# Once a node is known on which the extender can be shown, so many more are looked at for a cheaper one.
MORE_NODES = 10

# The API server's answers that may be others a moment later.
PASSING = ("(429)", "(500)", "(502)", "(503)", "(504)")
# Pods are refused until the controller manager has made the namespace's service account.
NO_ACCOUNT = "serviceaccount"

Answer = t.TypeVar("Answer")


def passes(error: ShareError) -> bool:
    """Whether what was refused may be granted in a moment: nobody answered, or somebody in trouble."""
    text = str(error)
    return isinstance(error, BadInput) or text.endswith(PASSING) or (NO_ACCOUNT in text and "not found" in text)


class Hands:
    """What one run of the canary made, and how it looks at it.

    :param run: a name of this run; only what carries it is removed at its end.
    """

    def __init__(self, kube: Kube, wish: Wish, patience: Waiting, run: str) -> None:
        self._kube = kube
        self._wish = wish
        self._patience = patience
        self._run = run
        self._user = objects.NOBODY
        self.image = wish.image or ""
        # By name, what is told of each pod that was made.
        self.made: dict[str, Json] = {}
        # Something may be there that has to go, and: something was changed.
        self.touched = False
        self.changed = False

    # ----------------------------------------------------------------- looking

    def now(self) -> float:
        return self._patience.now()

    def wait(self, timeout: float | None = None) -> Waiting:
        return dataclasses.replace(self._patience, timeout=self._wish.timeout if timeout is None else timeout)

    def ask(self, call: t.Callable[[], Answer], timeout: float | None = None) -> Answer:
        """An answer of the API server; once something was made, it may be away for a moment.

        :raises ShareError: it refuses, or wasn't there all the time.
        """
        error = ShareError("no answer")
        for _look in self.wait(timeout).looks():
            try:
                return call()
            except ShareError as found:
                error = found
                if not (self.touched and passes(found)):
                    break
        raise error

    def find_image(self) -> None:
        """
        :raises BadInput: no image is named, and the device plugin's can't be found.
        """
        if self.image:
            return
        try:
            found = workloads.plugin_image(self.ask(lambda: self._kube.list_all("apps/v1", "DaemonSet")))
        except BadInput:
            raise
        except (ShareError, *plan.NONSENSE) as error:
            raise BadInput(f"image: not set, and the device plugin's can't be looked up: {error}") from error
        if not found:
            raise BadInput(
                f"image: not set, and the cluster has no DaemonSet that runs {workloads.PLUGIN_WORDS} whose image "
                "could be taken"
            )
        self.image = found

    def choose(self) -> Chosen:
        """The node on which most can be shown.

        :raises BadInput: the node that was named doesn't exist.
        :raises NotShown: nothing can be shown anywhere; the reason.
        """
        nodes = [one for one in self.ask(lambda: self._kube.list_all("v1", "Node")) if plan.name_of(one)]
        if self._wish.node:
            nodes = [one for one in nodes if plan.name_of(one) == self._wish.node]
            if not nodes:
                raise BadInput(f"node: the cluster has no node {self._wish.node}")
        sharing = sorted((one for one in nodes if plan.shares_memory(one)), key=lambda one: natural(plan.name_of(one)))
        if not sharing:
            raise NoBackend(plan.nobody_shares(nodes))
        best: Chosen | None = None
        reasons: dict[str, str] = {}
        more = MORE_NODES
        for node in sharing:
            found = self._consider(node)
            if isinstance(found, str):
                reasons[plan.name_of(node)] = found
            elif best is None or found.worth > best.worth:
                best = found
            more -= int(best is not None and best.sizes.decides)
            if best is not None and (best.best or more <= 0):
                break
        if best is None:
            said = [f"{name}: {reason}" for name, reason in list(reasons.items())[:3]]
            rest = f", and {len(reasons) - 3} more" if len(reasons) > 3 else ""
            raise NotShown(f"no node has a free share to try ({'; '.join(said)}{rest})")
        return best

    def _consider(self, node: Json) -> Chosen | str:
        reason = plan.unfit(node)
        if reason:
            return reason
        seen = plan.survey(node, self._pods_of(plan.name_of(node)))
        return seen if isinstance(seen, str) else plan.choose(seen, self._wish.namespace)

    def _pods_of(self, node: str) -> list[Json]:
        return self.ask(lambda: self._kube.list_all("v1", "Pod", field_selector=f"spec.nodeName={node}"))

    def survey(self, name: str) -> Survey:
        """
        :raises Told: the node is gone or can't be read.
        """
        node = self.ask(lambda: self._kube.get(Ref("v1", "Node", "", name)))
        if node is None:
            raise Told(f"node {name} is gone")
        seen = plan.survey(node, self._pods_of(name))
        if isinstance(seen, str):
            raise Told(f"node {name}: {seen}")
        return seen

    def claimed(self) -> bool:
        """Whether the extender keeps memory for a pod that others were evicted for."""
        return bool(self.ask(lambda: self._kube.list_all("v1", "Pod", label_selector=contract.POD_CLAIM)))

    def pods(self) -> dict[str, Seen]:
        """The canary's pods as they are now, by name."""
        found = self.ask(lambda: self._kube.list_all("v1", "Pod", self._wish.namespace))
        events: list[Json] = []
        if any(not workloads.running(one) for one in found if isinstance(one, dict)):
            events = self._events()
        seen = {one.name: one for one in (read(pod, events) for pod in found)}
        for name, one in seen.items():
            if name in self.made:
                self.made[name].update(
                    {"uid": one.uid, "node": one.node, "card": one.index, "phase": one.phase, "says": one.says}
                )
        return seen

    def _events(self) -> list[Json]:
        """Reasons beside those on the pods; without the right to read them these must do."""
        try:
            found = self._kube.list_all("v1", "Event", self._wish.namespace)
        except ShareError:
            return []
        return [one for one in found if isinstance(one, dict)]

    def watch(self, names: t.Collection[str], enough: t.Callable[[dict[str, Seen]], bool]) -> dict[str, Seen]:
        """Look at pods until it is enough or the time is over; what was seen last.

        :raises Told: somebody else removed one of them.
        """
        seen: dict[str, Seen] = {}
        for _look in self.wait().looks():
            seen = {name: one for name, one in self.pods().items() if name in names}
            gone = sorted(set(names) - set(seen))
            if gone:
                raise Told(f"pod {gone[0]} is gone: somebody else removed it", "run one canary at a time", gone[0])
            if enough(seen):
                break
        return seen

    # ----------------------------------------------------------------- making

    def space(self) -> Json | None:
        """The namespace, if it is there.

        :raises BadInput: it is somebody else's.
        """
        found = self.ask(lambda: self._kube.get(self._ref()))
        if found is not None and objects.labels_of(found).get(objects.LABEL) != objects.LABEL_VALUE:
            raise BadInput(
                f"namespace: {self._wish.namespace} exists and isn't the canary's (it lacks the label "
                f"{objects.LABEL}={objects.LABEL_VALUE}); name another one"
            )
        return found

    def _ref(self) -> Ref:
        return Ref("v1", "Namespace", "", self._wish.namespace)

    def make_space(self) -> None:
        """
        :raises BadInput: somebody else made it at the same time.
        """
        self.touched = self.changed = True
        made = self.ask(lambda: self._kube.apply(objects.namespace(self._wish.namespace, self._run), MANAGER))
        fields = (made.get("metadata") or {}).get("managedFields") or []
        if any(one.get("manager") != MANAGER for one in fields):
            # Applying takes over what is there: our labels go again, and the namespace stays.
            self.touched = False
            bare = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self._wish.namespace}}
            self.ask(lambda: self._kube.apply(bare, MANAGER))
            raise BadInput(f"namespace: somebody else made {self._wish.namespace} at the same time; name another one")
        # On OpenShift it gets its users in a moment.
        self._user = objects.user_of(self.ask(lambda: self._kube.get(self._ref())) or made)

    def make(self, name: str, units: int, node: str) -> Seen:
        made = objects.pod(self._wish, self.image, self._run, name, units, node, self._user)
        self.made[name] = {"pod": f"{self._wish.namespace}/{name}", "uid": "", "units": units, "node": "", "card": None}
        self.made[name].update({"phase": "", "says": ""})
        seen = read(self.ask(lambda: self._kube.apply(made, MANAGER)))
        self.made[name]["uid"] = seen.uid
        return seen

    # ----------------------------------------------------------------- removing

    def remove(self, names: t.Collection[str]) -> list[str]:
        """Remove pods and wait until they are gone; those that aren't when the time is over."""
        for name in names:
            self.ask(lambda name=name: self._kube.delete(Ref("v1", "Pod", self._wish.namespace, name)))  # type: ignore[misc]
        left: list[str] = []
        # Scheduler and extender hear of it by their own watches, in a moment.
        self._patience.sleep(self._patience.pause)
        for _look in self.wait().looks():
            left = sorted(set(names) & set(self.pods())) if names else []
            if not left:
                break
        return left

    def ask_to_go(self, name: str) -> None:
        """Ask for a pod's removal, whatever becomes of it."""
        try:
            self._kube.delete(Ref("v1", "Pod", self._wish.namespace, name))
        except ShareError:
            # The namespace goes with all of it in the end.
            return

    def clean(self, only_ours: bool) -> str:
        """Remove the namespace with all in it and wait until it is gone; why it isn't, or nothing.

        :param only_ours: leave what another run made.
        """
        said = ""
        for _look in self.wait(max(CLEAN_SECONDS, self._wish.timeout)).looks():
            try:
                found = self._kube.get(self._ref())
                labels = objects.labels_of(found)
                mine = labels.get(objects.LABEL) == objects.LABEL_VALUE
                if found is None or not mine or (only_ours and labels.get(objects.RUN_LABEL) != self._run):
                    return ""
                said = "it is still there"
                if not (found.get("metadata") or {}).get("deletionTimestamp"):
                    self._kube.delete(self._ref())
                    self.changed = True
            except ShareError as error:
                said = str(error)
                if not passes(error):
                    break
        return said
