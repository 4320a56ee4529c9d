# SPDX-License-Identifier: GPL-3.0-or-later
"""Which template is made or deleted next, so that no namespace takes the turns, the room or the memory of others.

A change costs the names of one pod, and a turn a look at one namespace, however many names are known. No I/O.
"""

from __future__ import annotations

import enum
import heapq
import threading
from collections import OrderedDict
from collections.abc import Callable

from gpushare.api.rate import Bucket
from gpushare.templates.rows import MOST_PER_POD, Made, Waiting, digest_of

# A template goes when no waiting pod has named it for so long: the next pod of a Deployment is to find it.
UNUSED_SECONDS = 600.0
# Templates of a namespace, and of the cluster.
PER_NAMESPACE, MOST_TEMPLATES = 64, 2048
# Templates that are made for a namespace, a second and at once.
RATE, BURST = 2.0, 32
# The first and the longest pause after a refusal, for each template.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# By then the watch has shown a template that was made.
SHOWN_SECONDS = 30.0
# A pod that waits for so long gets an Event, and another one after the second time; so many pods of a namespace are
# remembered for that.
REPORT_SECONDS, AGAIN_SECONDS, MOST_REPORTS = 5.0, 1800.0, 64
# Events of a namespace, a second and at once.
EVENT_RATE, EVENT_BURST = 1 / 30, 5
# A namespace is forgotten so long after its last request: then it may have as many templates made at once again.
FORGET_SECONDS = BURST / RATE
# Memory, in bytes: of a namespace's rows, while all take less than the second number; of a namespace's when they take
# more; and of all.
SPACE_BYTES, SHARED_BYTES, SMALL_BYTES, MOST_BYTES = 8 << 20, 64 << 20, 64 << 10, 96 << 20
# What a pod's row takes with all that refers to it, and each of its names; what a name or a template takes. An upper
# bound, as measured; the characters of names come in addition.
ROW_BYTES, EACH_BYTES, NAME_BYTES = 450, 16, 400
NEVER = float("inf")


class Code(enum.StrEnum):
    """Why a pod's template isn't made; the beginning of an Event's message."""

    POD = "PodTemplateLimit"
    NAMESPACE = "NamespaceTemplateLimit"
    CLUSTER = "ClusterTemplateLimit"
    API = "KubernetesAPIError"


class Do(enum.Enum):
    CREATE = "create"
    DELETE = "delete"


class Step:
    """One request.

    :param why: of a deletion.
    :param behalf: the namespace that a deletion makes room for in the cluster; empty for any other one.
    """

    __slots__ = ("behalf", "do", "name", "namespace", "why")

    def __init__(self, do: Do, namespace: str, name: str, why: str = "", behalf: str = "") -> None:
        self.do, self.namespace, self.name, self.why, self.behalf = do, namespace, name, why, behalf


class _Name:
    """A name that waiting pods of a namespace name.

    :param text: the one string to which all rows refer.
    """

    __slots__ = ("is_first", "is_theirs", "needs", "pause", "paused_until", "pods", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        # Pods that name it, those by which a claim has still to be made, and whether it is the first name of one.
        self.pods, self.needs, self.is_first = 0, 0, False
        self.pause, self.paused_until = FIRST_PAUSE / 2, -NEVER
        # Whether somebody else has made a template of this name.
        self.is_theirs = False


class _Space:
    """A namespace."""

    def __init__(self, name: str, now: float) -> None:
        self.name, self.size = name, 0
        self.names: dict[str, _Name] = {}
        self.made: dict[str, Made] = {}
        # Names to be made: the first of each pod, its others, and those whose claims are all made already.
        self.queues = (OrderedDict[str, None](), OrderedDict[str, None](), OrderedDict[str, None]())
        # Templates that no waiting pod names, with the time since then, and those by which no claim has to be made.
        self.idle, self.spare = OrderedDict[str, float](), OrderedDict[str, None]()
        # Templates that can't be deleted now, and those that the watch has still to show, with the time until then.
        self.stuck, self.unseen = set[str](), dict[str, float]()
        self.bucket, self.events = Bucket(RATE, BURST, now), Bucket(EVENT_RATE, EVENT_BURST, now)
        # The time of its last request, by which namespaces take turns; whether it waits for one; its next timer.
        self.served, self.is_queued, self.timer = -NEVER, False, NEVER
        # Whether a template was deleted to make room in the cluster for one of this namespace.
        self.has_room = False
        # The limit that keeps it from making the next one, and the API server's last refusal.
        self.limit: Code | None = None
        self.refusal = ""
        # Pods that wait, by key, and when they get an Event.
        self.reports = OrderedDict[str, tuple[Waiting, float]]()


class State:
    """What is wanted and what is there, and whose turn it is.

    :param unit: of the cluster's memory, ``GiB`` or ``MiB``.
    :param clock: monotonic, in seconds.
    :param per_namespace: how many templates a namespace has at most.
    :param most: how many the cluster has at most.
    :param unused: seconds after which a template that no waiting pod names is deleted.
    """

    def __init__(
        self,
        unit: str,
        clock: Callable[[], float],
        per_namespace: int = PER_NAMESPACE,
        most: int = MOST_TEMPLATES,
        unused: float = UNUSED_SECONDS,
    ) -> None:
        self._unit, self._clock, self._unused = unit, clock, unused
        self._per_namespace, self._most = per_namespace, most
        self._lock = threading.Lock()
        self._spaces: dict[str, _Space] = {}
        # Namespaces with something to do, by the time of their last request; namespaces that the cluster's limit stops.
        self._queue: list[tuple[float, int, str]] = []
        self._stopped: set[str] = set()
        # Namespaces that have room for one.
        self._reserved = 0
        # When to look at a name again, or without a name at a namespace.
        self._timers: list[tuple[float, int, str, str]] = []
        self._number = self._size = 0
        self._reports: list[tuple[Waiting, Code, str]] = []
        # Templates that are there; how often a row wasn't kept, as there was no room for it.
        self.existing = self.overlooked = 0

    @property
    def missing(self) -> int:
        """Names by which claims have still to be made, and that have no template."""
        with self._lock:
            return sum(len(space.queues[0]) + len(space.queues[1]) for space in self._spaces.values())

    # --------------------------------------------------------------------------- what the API has

    def keep_pod(self, row: Waiting | None, is_known: bool) -> Waiting | None:
        """Return a pod's row with the strings that are there already; None if there is no room for it.

        A pod without room is seen again when it changes, or with the next list of all.

        :param is_known: whether a row of the pod is kept already.
        """
        if row is None:
            return None
        with self._lock:
            space = self._spaces.get(row.namespace)
            if not is_known and not self._has_room(space, _size_of(row) + sum(map(_name_size, row.templates))):
                return None
            if space is None:
                return row
            texts = {name: space.names[name].text if name in space.names else name for name in row.templates}
            templates = tuple(texts.values())
            needed = templates if len(row.needed) == len(templates) else tuple(texts[name] for name in row.needed)
            return Waiting(space.name, row.name, row.uid, templates, needed)

    def keep_template(self, row: Made | None, is_known: bool) -> Made | None:
        """Return a template's row; None if there is no room for it.

        :param is_known: whether a row of it is kept already.
        """
        with self._lock:
            if row is None or is_known or self._has_room(self._spaces.get(row.namespace), _name_size(row.name)):
                return row
            return None

    def _has_room(self, space: _Space | None, more: int) -> bool:
        size = more + (space.size if space is not None else 0)
        most = SPACE_BYTES if self._size < SHARED_BYTES else SMALL_BYTES
        if size <= most and self._size + more <= MOST_BYTES:
            return True
        self.overlooked += 1
        return False

    def pod_changed(self, key: str, before: Waiting | None, now: Waiting | None) -> None:
        """Take over a change of a pod; rows are those that ``keep_pod`` has returned."""
        row = now or before
        assert row is not None
        with self._lock:
            at, space = self._clock(), self._space(row.namespace)
            touched: dict[str, None] = {}
            if before is not None:
                self._resize(space, -_size_of(before))
                touched.update(dict.fromkeys(before.templates))
                for text in before.templates:
                    space.names[text].pods -= 1
                    space.names[text].needs -= text in before.needed
            if now is not None:
                self._resize(space, _size_of(now))
                touched.update(dict.fromkeys(now.templates))
                for text in now.templates:
                    if text not in space.names:
                        space.names[text] = _Name(text)
                        self._resize(space, _name_size(text))
                    name = space.names[text]
                    name.pods += 1
                    name.needs += text in now.needed
                    name.is_first |= text == now.templates[0]
            for text in touched:
                if not space.names[text].pods:
                    del space.names[text]
                    self._resize(space, -_name_size(text))
                self._look(space, text, at)
            self._remember(space, key, now, at)
            self._has_changed(space, at)

    def _remember(self, space: _Space, key: str, row: Waiting | None, at: float) -> None:
        """Remember a pod until it has its templates."""
        known = space.reports.get(key)
        if row is None or not (row.needed or row.has_too_many):
            space.reports.pop(key, None)
        elif known is not None:
            space.reports[key] = (row, known[1])
        elif len(space.reports) < MOST_REPORTS:
            due = at if row.has_too_many else at + REPORT_SECONDS
            space.reports[key] = (row, due)
            self._wake_at(space, due)

    def template_changed(self, before: Made | None, now: Made | None) -> None:
        """Take over a change of a template, as the watch shows it."""
        row = now or before
        assert row is not None
        with self._lock:
            space = self._space(row.namespace)
            space.unseen.pop(row.name, None)
            self._set(space, row.name, now, self._clock())

    def _set(self, space: _Space, text: str, row: Made | None, at: float) -> None:
        was = space.made.pop(text, None)
        if row is None:
            space.stuck.discard(text)
        else:
            space.made[text] = row
        change = int(row is not None) - int(was is not None)
        self.existing += change
        self._resize(space, change * _name_size(text))
        self._look(space, text, at)
        if change < 0:
            for namespace in self._stopped & self._spaces.keys():
                self._schedule(self._spaces[namespace])
            self._stopped.clear()
        self._has_changed(space, at)

    def _resize(self, space: _Space, change: int) -> None:
        space.size += change
        self._size += change

    def _reserve(self, space: _Space, has_room: bool) -> None:
        self._reserved += int(has_room) - int(space.has_room)
        space.has_room = has_room

    def _look(self, space: _Space, text: str, at: float) -> None:
        """Sort a name into the queues of its namespace; it keeps its place where that is right."""
        name, there = space.names.get(text), space.made.get(text)
        is_free = there is not None and not there.is_going and text not in space.stuck
        queue = None
        is_idle = is_spare = False
        if name is None:
            is_idle = is_free
        elif there is None or (is_free and there.digest != digest_of(text, self._unit)):
            if name.paused_until <= at:
                position = 0 if name.is_first else 1
                queue = space.queues[position if name.needs else 2]
        else:
            is_spare = is_free and not name.needs
        for other in space.queues:
            if other is not queue:
                other.pop(text, None)
        if queue is not None:
            queue.setdefault(text)
        if is_idle:
            space.idle.setdefault(text, at)
        else:
            space.idle.pop(text, None)
        if is_spare:
            space.spare.setdefault(text)
        else:
            space.spare.pop(text, None)

    # --------------------------------------------------------------------------- namespaces and timers

    def _space(self, name: str) -> _Space:
        space = self._spaces.get(name)
        if space is None:
            space = self._spaces[name] = _Space(name, self._clock())
        return space

    def _has_changed(self, space: _Space, at: float) -> None:
        """Give a namespace a turn, or forget it if nothing is left of it."""
        if space.size:
            self._schedule(space)
        elif at - space.served >= FORGET_SECONDS:
            self._reserve(space, False)
            self._spaces.pop(space.name, None)
        else:
            self._wake_at(space, space.served + FORGET_SECONDS)

    def _schedule(self, space: _Space) -> None:
        if not space.is_queued:
            space.is_queued = True
            self._number += 1
            heapq.heappush(self._queue, (space.served, self._number, space.name))
            if len(self._queue) > 1000 + 2 * len(self._spaces):
                # Entries of namespaces that are gone: nobody takes them out while another process leads.
                self._queue = [entry for entry in self._queue if entry[2] in self._spaces]
                heapq.heapify(self._queue)

    def _wake_at(self, space: _Space, due: float) -> None:
        if due < space.timer:
            space.timer = due
            self._timer(due, space.name, "")

    def _timer(self, due: float, namespace: str, text: str) -> None:
        self._number += 1
        heapq.heappush(self._timers, (due, self._number, namespace, text))
        if len(self._timers) > 10_000 + 4 * len(self._spaces):
            self._timers = [timer for timer in self._timers if self._is_current(timer)]
            heapq.heapify(self._timers)

    def _is_current(self, timer: tuple[float, int, str, str]) -> bool:
        space = self._spaces.get(timer[2])
        return space is not None and (bool(timer[3]) or timer[0] == space.timer)

    def _ring(self, at: float) -> None:
        """Look again at what has a timer that is due."""
        while self._timers and self._timers[0][0] <= at:
            timer = heapq.heappop(self._timers)
            if not self._is_current(timer):
                continue
            space, text = self._spaces[timer[2]], timer[3]
            if space.unseen.get(text, NEVER) <= at:
                # Somebody has deleted it before the watch could show it.
                del space.unseen[text]
                self._set(space, text, None, at)
            elif text:
                space.stuck.discard(text)
                self._look(space, text, at)
            else:
                space.timer = NEVER
                self._report(space, at)
            self._has_changed(space, at)

    # --------------------------------------------------------------------------- turns

    def next_step(self) -> Step | None:
        """Return the next request; None if there is none now. What became of it is told by the methods below."""
        with self._lock:
            at = self._clock()
            self._ring(at)
            while self._queue:
                space = self._spaces.get(heapq.heappop(self._queue)[2])
                if space is None or not space.is_queued:
                    continue
                space.is_queued = False
                step = self._step(space, at)
                if step is not None:
                    space.served = at
                    self._schedule(space)
                    return step
            return None

    def seconds(self, longest: float) -> float:
        """Return after how many seconds there may be something to do without any change."""
        with self._lock:
            due = self._timers[0][0] if self._timers else NEVER
            return min(longest, max(0.0, due - self._clock()))

    def reports(self) -> list[tuple[Waiting, Code, str]]:
        """Return the pods that get an Event now: why their templates aren't made, and the sentence."""
        with self._lock:
            reports, self._reports = self._reports, []
            return reports

    def _step(self, space: _Space, at: float) -> Step | None:
        """Return the next request of a namespace, or on behalf of it."""
        space.limit = None
        queue = next((waiting for waiting in space.queues if waiting), None)
        if queue is not None:
            text = next(iter(queue))
            if text in space.made:
                # A template can't be changed. It is created after its end.
                del queue[text]
                return Step(Do.DELETE, space.name, text, "it has another content")
            step = self._make_room(space, is_needed=queue is not space.queues[2])
            if step is not None:
                return step
            if space.limit is None:
                if space.bucket.take(at):
                    del queue[text]
                    return Step(Do.CREATE, space.name, text)
                self._wake_at(space, at + 1 / RATE)
        else:
            self._reserve(space, False)
        if space.idle:
            text, since = next(iter(space.idle.items()))
            if at - since >= self._unused or len(space.made) > self._per_namespace:
                del space.idle[text]
                return Step(Do.DELETE, space.name, text, "no waiting pod names it")
            self._wake_at(space, since + self._unused)
        return None

    def _make_room(self, space: _Space, is_needed: bool) -> Step | None:
        """Return a deletion that has to come before the next template; sets the limit where there can be none.

        :param is_needed: whether a claim has to be made by the next template.
        """
        if len(space.made) >= self._per_namespace:
            text = self._less_needed(space, is_needed)
            if text is None:
                space.limit = Code.NAMESPACE
                return None
            return Step(Do.DELETE, space.name, text, "the namespace has no room for another one")
        if space.has_room or self.existing + self._reserved < self._most:
            return None
        largest, text = space, self._less_needed(space, is_needed)
        if text is None and is_needed:
            # Whoever has the most gives one up, needed or not: many namespaces can't take the room of one.
            largest = max(self._spaces.values(), key=_removable)
            if _removable(largest) > len(space.made) + 1:
                text = self._less_needed(largest, True) or next(
                    (name for name, row in largest.made.items() if not row.is_going and name not in largest.stuck), None
                )
        if text is None:
            space.limit = Code.CLUSTER
            self._stopped.add(space.name)
            return None
        return Step(Do.DELETE, largest.name, text, "the cluster has no room for another one", space.name)

    def _less_needed(self, space: _Space, is_needed: bool) -> str | None:
        """Take out the template that may go for another one: the longest unused, else one with all claims made."""
        if space.idle:
            return space.idle.popitem(last=False)[0]
        if is_needed and space.spare:
            return space.spare.popitem(last=False)[0]
        return None

    def _report(self, space: _Space, at: float) -> None:
        """Choose the pods of a namespace that get an Event."""
        for key, (row, due) in list(space.reports.items()):
            if due > at:
                continue
            missing = [name for name in row.needed if name not in space.made and not space.names[name].is_theirs]
            if row.has_too_many:
                code: Code | None = Code.POD
            elif not missing:
                del space.reports[key]
                continue
            else:
                code = Code.API if space.names[missing[0]].paused_until > at else space.limit
            if code is not None and space.events.take(at):
                space.reports[key] = (row, at + AGAIN_SECONDS)
                self._reports.append((row, code, self._sentence(space, code, missing[0] if missing else "")))
        if space.reports:
            self._wake_at(space, max(at + REPORT_SECONDS, min(due for _row, due in space.reports.values())))

    def _sentence(self, space: _Space, code: Code, text: str) -> str:
        if code is Code.POD:
            return (
                f"the pod names more than {MOST_PER_POD} different templates of claims on GPU memory, the most of one "
                "pod, and gets none of them"
            )
        waits = f"template {text} of its claim can't be made, and it waits for it: "
        if code is Code.NAMESPACE:
            return waits + f"the namespace has {self._per_namespace}, the most of one, and all have claims to be made"
        if code is Code.CLUSTER:
            return waits + f"the cluster has {self.existing} of at most {self._most}"
        return waits + space.refusal

    # --------------------------------------------------------------------------- what became of a step

    def created(self, step: Step) -> None:
        """A template was made."""
        with self._lock:
            at, space = self._clock(), self._space(step.namespace)
            self._reserve(space, False)
            space.refusal = ""
            if (name := space.names.get(step.name)) is not None:
                name.pause, name.is_theirs = FIRST_PAUSE / 2, False
            if step.name not in space.made:
                space.unseen[step.name] = at + SHOWN_SECONDS
                self._timer(at + SHOWN_SECONDS, space.name, step.name)
                self._set(space, step.name, Made(space.name, step.name, digest_of(step.name, self._unit)), at)

    def deleted(self, step: Step) -> None:
        """A template was deleted, or was gone already."""
        with self._lock:
            if step.behalf in self._spaces:
                self._reserve(self._spaces[step.behalf], True)
            space = self._space(step.namespace)
            space.unseen.pop(step.name, None)
            self._set(space, step.name, None, self._clock())

    def failed(self, step: Step, refusal: str) -> None:
        """The API server has refused a step, which is tried again after a pause.

        :param refusal: its sentence.
        """
        with self._lock:
            space = self._space(step.namespace)
            space.refusal = refusal[:500]
            name = space.names.get(step.name)
            if step.do is Do.DELETE:
                space.stuck.add(step.name)
                self._again(space, step.name, LONGEST_PAUSE)
            elif name is not None:
                name.pause = min(name.pause * 2, LONGEST_PAUSE)
                self._again(space, step.name, name.pause)

    def exists(self, step: Step) -> None:
        """There is a template of the name already: one of the namespace's owner, or the watch is behind."""
        with self._lock:
            space = self._space(step.namespace)
            if (name := space.names.get(step.name)) is not None:
                name.is_theirs = True
                self._again(space, step.name, LONGEST_PAUSE)

    def dropped(self, step: Step) -> None:
        """A step wasn't tried."""
        with self._lock:
            space = self._space(step.namespace)
            self._look(space, step.name, self._clock())
            self._has_changed(space, self._clock())

    def _again(self, space: _Space, text: str, pause: float) -> None:
        at = self._clock()
        if text in space.names:
            space.names[text].paused_until = at + pause
        self._timer(at + pause, space.name, text)
        self._look(space, text, at)
        self._has_changed(space, at)


def _removable(space: _Space) -> int:
    return len(space.made) - len(space.stuck)


def _size_of(row: Waiting) -> int:
    return ROW_BYTES + 2 * len(row.name) + EACH_BYTES * len(row.templates)


def _name_size(text: str) -> int:
    return NAME_BYTES + len(text)
