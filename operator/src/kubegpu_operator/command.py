# SPDX-License-Identifier: GPL-3.0-or-later
"""The program that ansible-operator finds as ``ansible-runner``.

It decides whether there is anything to do, which costs a fraction of a start of Ansible, lets ansible-runner do it, and
writes what came of it as conditions, Events and metrics. The engine gets no failure from it, since it would call again
after milliseconds; it is told when to call again.
"""

from __future__ import annotations

import datetime
import os
import resource as processor
import sys
import time
import typing as t
import uuid
from dataclasses import dataclass
from pathlib import Path

from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError

from . import __version__, conditions, engine, options, watched
from .cluster import Cluster
from .conditions import Outcome
from .memory import Last, Memory
from .outcome import NO_END, cut_short, outcome_of
from .resource import (
    API_VERSION,
    JsonObject,
    Malformed,
    Problem,
    Resource,
    is_allowed,
    owner_of,
    refused,
    resource_of,
    snake,
)

# Seconds between calls; a call that has nothing to do takes a fraction of one. SOON is while pods hold shares.
PERIOD, SOON = 60.0, 15.0
# Seconds after which a run is ended. Its waits have limits of their own, which a resource may set to an hour each.
LONGEST_RUN = 7200.0
# Seconds between runs that fail: the first, doubled up to the second, unless what a run depends on has changed.
RETRY, LONGEST = 60.0, 600.0
NOT_FOUND = 404
# The variable in which the engine gives the whole object.
OBJECT = "_kubegpu_share_gpushare"
HOME = Path(os.environ.get("KUBEGPU_OPERATOR_HOME", "/opt/kubegpu-operator"))
WORK = Path("/tmp/ansible-operator/kubegpu")
# What a resource is given that doesn't name them: the bundle's images.
IMAGES = {"gpushare_image": "RELATED_IMAGE_GPUSHARE", "scheduler_dedicated_image": "RELATED_IMAGE_KUBE_SCHEDULER"}
DEFAULTS: JsonObject = {"gpushare_image_delivery": "registry"}

# Of a run, as a condition's message has them.
LIMITS = {engine.TOO_LONG: f"{LONGEST_RUN / 3600:g} hours", engine.TOO_LARGE: f"{engine.MOST_OF_A_RUN >> 20} MiB"}


@dataclass
class Done:
    """What a call did, for the metrics.

    :param ran: there was a run of Ansible.
    :param ended: it ended by itself, if there was one.
    :param unwanted: it was ended because the resource is being deleted.
    """

    ran: bool = False
    ended: bool = True
    unwanted: bool = False
    failed: bool = False
    changed: int = 0
    nodes: int = 0


class Operator:
    """One call.

    :param cluster: the API server.
    :param events: the engine's socket.
    :param known: the options that a resource may set; None where there is no list.
    :param period: seconds until the next call.
    """

    def __init__(
        self,
        call: engine.Call,
        cluster: Cluster,
        events: engine.Events,
        known: t.Container[str] | None,
        period: float = PERIOD,
    ) -> None:
        self._call, self._cluster, self._events, self._known = call, cluster, events, known
        self._period, self._soon = period, min(SOON, period)
        self._memory = Memory(WORK)
        self.done = Done()
        self._removing = call.playbook.name == "uninstall.yml"

    def act(self) -> None:
        given = self._call.take_variables()
        name = str(given["ansible_operator_meta"]["name"])
        item = self._cluster.resource(name)
        if item is None:
            self._events.stats()
            return
        resource = resource_of(item)
        seen = given[OBJECT]["metadata"]
        if resource.deleting != self._removing or (resource.uid, resource.generation) != (
            _plain(seen["uid"]),
            seen["generation"],
        ):
            # The engine's cache is older than the resource, and so are the variables that it has written.
            self._events.again_after(1)
            return
        resources = [resource_of(each) for each in self._cluster.resources()]
        self._call.remove_others({each.name for each in resources})
        owner = owner_of(resources)
        if owner is not None and owner.uid != resource.uid:
            self._not_the_owner(resource, owner)
            return
        # What it may not set is left out of an uninstall: it keeps no resource from being deleted.
        problem = None if self._removing else refused(resource.spec, self._known)
        if problem:
            self._report(resource, Outcome(problem.id, problem.text, True))
            self.done.failed = True
            self._events.again_after(self._period)
            return
        self._decide(resource, given)

    def _not_the_owner(self, resource: Resource, owner: Resource) -> None:
        if self._removing:
            # Nothing of it is deployed, and what is belongs to the other.
            self._events.stats()
            return
        problem = Problem("another-resource", {"owner": owner.name})
        self._report(resource, Outcome(problem.id, problem.text, True))
        self.done.failed = True
        self._events.again_after(self._period)

    def _decide(self, resource: Resource, given: JsonObject) -> None:
        seen = self._look(resource)
        self.done.nodes = seen.nodes
        last = self._memory.recall(resource.uid)
        if last and self._nothing_to_do(last, seen.digest):
            self.done.failed = last.failures > 0
            if self._removing and last.settled:
                # Somebody has changed the resource while the engine took the finalizer away.
                self._events.stats()
            else:
                self._events.again_after(self._soon if self._removing else self._period)
            return
        self._run(resource, given, seen, last)

    def _look(self, resource: Resource) -> watched.Watched:
        given = [__version__, resource.generation, resource.spec, self._removing, _images()]
        return watched.look(self._cluster, given, set(_texts(resource.spec)))

    def _nothing_to_do(self, last: Last, digest: str) -> bool:
        """Return whether a run would end as the last one did."""
        age = time.time() - last.at
        if last.holders:
            return watched.still_there(self._cluster, last.holders)
        if last.failures:
            return last.digest == digest and 0 <= age < min(RETRY * 2 ** (last.failures - 1), LONGEST)
        return last.settled and last.digest == digest and 0 <= age < watched.FULL

    def _run(self, resource: Resource, given: JsonObject, seen: watched.Watched, last: Last | None) -> None:
        self._memory.forget(resource.uid)
        if (
            self._removing
            or resource.status.get("observedGeneration") != resource.generation
            or not _is_well(resource.status)
        ):
            self._write(resource, conditions.begun(resource.generation, resource.status, self._removing, _now()))
        self._call.write_variables(self._variables(resource, given, seen))
        runner = (sys.executable, "-m", "ansible_runner")
        ended_by = engine.run(self._call, runner, LONGEST_RUN, lambda: self._is_wanted(resource))
        if ended_by == engine.UNWANTED:
            # The next call is for the uninstall.
            self.done.unwanted = True
            self._events.again_after(1)
            return
        events, status = engine.left(self._call)
        cut = cut_short(events, ended_by, LIMITS[ended_by]) if ended_by else None
        outcome = cut or outcome_of(events, status, self._removing)
        self.done = Done(True, outcome.id not in NO_END, False, outcome.failed, outcome.changed, seen.nodes)
        failures = (last.failures if last else 0) + 1 if outcome.failed else 0
        settled = not outcome.failed and not outcome.changed
        # After a change the next call runs once more, and finds that nothing is left to do.
        digest = seen.digest
        if outcome.failed:
            # What it has changed itself is no reason to repeat it at once.
            digest = self._look(resource).digest
        self._memory.keep(resource.uid, Last(digest, time.time(), failures, settled, outcome.holders))
        self._report(resource, outcome)
        # After an uninstall the engine takes the finalizer away, by ansible-runner's own event.
        if outcome.failed or not self._removing:
            # Else an annotation of the resource would decide when: never, or each millisecond.
            self._events.again_after(self._soon if self._removing else self._period)

    def _is_wanted(self, resource: Resource) -> bool:
        """Return whether a run still has a purpose; what it sets up is removed where its resource is being deleted."""
        if self._removing:
            return True
        try:
            item = self._cluster.resource(resource.name)
            now = resource_of(item) if item is not None else None
            return now is not None and now.uid == resource.uid and not now.deleting
        except (KubeError, Malformed):
            # The API server may be restarting; the run waits for it, too.
            return True

    def _variables(self, resource: Resource, given: JsonObject, seen: watched.Watched) -> JsonObject:
        """Return a run's extra variables: those of watches.yaml, and of the resource those that it may set."""
        own = {snake(name) for name in resource.spec}
        # The engine's own have the whole object, whose metadata has keys of anybody's choice.
        others = {name: value for name, value in given.items() if not name.startswith("_")}
        kept = {name: value for name, value in others.items() if name not in own or is_allowed(name, self._known)}
        # watches.yaml comes after the resource.
        kept |= {name: value for name, value in given.items() if name in ("gpu_kubeconfig", "gpu_owner")}
        made = {**DEFAULTS, **_images(), **kept}
        if self._removing:
            named = resource.spec.get("gpushareNodes", resource.spec.get("gpushare_nodes"))
            made["gpushare_nodes"] = _unsafe(sorted({*seen.ours, *(named if isinstance(named, list) else [])}, key=str))
            made["uninstall_cluster"] = True
            made["uninstall_with_pods"] = False
        return made

    def _report(self, resource: Resource, outcome: Outcome) -> None:
        """Write the conditions, and an Event where they say something new or where a run changed something."""
        item = self._cluster.resource(resource.name)
        if item is None or (now := resource_of(item)).uid != resource.uid:
            return
        status = conditions.ended(resource.generation, now.status, outcome, _now())
        news = _said(now.status) != _said(status) or outcome.changed
        self._write(now, status)
        if news:
            name = f"{resource.name[:200]}.{uuid.uuid4().hex[:16]}"
            self._cluster.write_event(conditions.event(resource.name, resource.uid, outcome, _now(), name, API_VERSION))

    def _write(self, resource: Resource, status: JsonObject) -> None:
        if conditions.differs(resource.status, status):
            try:
                self._cluster.write_status(resource.name, status)
            except KubeError as error:
                # Deleted meanwhile: nobody reads it any more.
                if error.status != NOT_FOUND:
                    raise


def _plain(value: t.Any) -> t.Any:
    """Return a text as it was before ansible-operator marked it."""
    return value["__ansible_unsafe"] if isinstance(value, dict) and set(value) == {"__ansible_unsafe"} else value


def _texts(value: t.Any) -> t.Iterator[str]:
    """Yield every text of a spec, among which are the names of nodes."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _unsafe(names: t.Iterable[t.Any]) -> list[JsonObject]:
    """Return texts of the cluster as ansible-operator marks them: Ansible evaluates no template in them."""
    return [{"__ansible_unsafe": str(name)} for name in names]


def _is_well(status: JsonObject) -> bool:
    wanted = {(conditions.AVAILABLE, "True"), (conditions.DEGRADED, "False")}
    return wanted <= {(condition.get("type"), condition.get("status")) for condition in status.get("conditions") or ()}


def _said(status: JsonObject) -> list[tuple[t.Any, ...]]:
    """Return the finding that a status names."""
    return [
        (
            condition.get("status"),
            condition.get("reason"),
            condition.get("message") if condition.get("status") == "True" else "",
        )
        for condition in status.get("conditions") or ()
        if condition.get("type") == conditions.DEGRADED
    ]


def _images() -> JsonObject:
    return {name: os.environ[given] for name, given in IMAGES.items() if os.environ.get(given)}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def metrics(done: Done, seconds: float) -> list[JsonObject]:
    """Return a call's metrics. The engine's have no labels, and a gauge that is set to 0 keeps its value."""

    def metric(name: str, about: str, **value: JsonObject) -> JsonObject:
        return {"name": f"kubegpu_operator_{name}", "description": about, **value}

    spent = sum(sum(processor.getrusage(who)[:2]) for who in (processor.RUSAGE_SELF, processor.RUSAGE_CHILDREN))
    made = [
        metric("cpu_seconds_total", "Processor time of all calls, without the engine's own.", counter={"add": spent}),
        metric("nodes", "Nodes of the cluster.", gauge={"set": float(done.nodes)}),
    ]
    if done.unwanted:
        return made
    if not done.ran:
        made.append(metric("checks_total", "Calls that found nothing to do.", counter={"increment": True}))
        return made
    what = "failed" if done.failed else "succeeded"
    made += [
        metric(f"runs_{what}_total", f"Runs of Ansible that {what}.", counter={"increment": True}),
        metric(f"last_{what}_timestamp_seconds", f"When the last run {what}.", gauge={"set": time.time()}),
        metric("run_seconds", "How long runs of Ansible take.", summary={"observe": seconds}),
    ]
    if done.changed:
        made.append(metric("changes_total", "Tasks that changed something.", counter={"add": float(done.changed)}))
    return made


def period_of(text: str) -> float:
    """Return the seconds between calls.

    :param text: the variable KUBEGPU_OPERATOR_PERIOD; empty for the usual ones.
    :raises BadInput: it is no number from 1 to 3600.
    """
    try:
        seconds = float(text) if text else PERIOD
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 3600:
        raise BadInput(
            f"KUBEGPU_OPERATOR_PERIOD is {text[:60]!a}, in the environment of the operator's container: set it to "
            "the seconds between two calls, a number from 1 to 3600"
        )
    return seconds


def main() -> int:
    call = engine.Call.parse(sys.argv[1:])
    if call is None:
        print("ansible-operator starts this program; for Ansible alone, run python3 -m ansible_runner", file=sys.stderr)
        return 2
    started = time.monotonic()
    try:
        events = engine.Events(call)
        try:
            period = period_of(os.environ.get("KUBEGPU_OPERATOR_PERIOD", ""))
        except BadInput as error:
            print(error, file=sys.stderr)
            events.again_after(PERIOD)
            return 1
        cluster = Cluster(os.environ.get("KUBEGPU_OPERATOR_KUBECONFIG", str(HOME / "kubeconfig")))
        operator = Operator(call, cluster, events, options.known(HOME / "options.yml"), period)
        try:
            operator.act()
        except KubeError as error:
            # Nothing is known, so nothing is written; the engine calls again.
            print(f"the API server: {error}", file=sys.stderr)
            events.again_after(min(SOON, period))
            return 1
        engine.publish(metrics(operator.done, time.monotonic() - started))
        # The engine prints what was printed here where this isn't 0, and it has been told when to call again.
        return 0 if operator.done.ended else 1
    except (ShareError, Malformed, OSError, ValueError, KeyError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
