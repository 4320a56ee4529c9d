# SPDX-License-Identifier: GPL-3.0-or-later
"""Keep a collection of the Kubernetes API in memory by list and watch."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from gpushare.api.client import Kube, KubeError, Pages, Stream
from gpushare.shared._core.types import JsonObject

# The API server ends a watch after this time; a new one then begins. Shorter ones where something cuts them before.
WATCH_SECONDS, SHORTEST_WATCH_SECONDS = 280, 10
# After a watch that lived for this time the next pause is the shortest one again.
LIVED_SECONDS = 5.0
# Everything is listed again within this time, also if the watch seems right.
RELIST_SECONDS = 3600.0
# The API server sends a bookmark every minute; two missing ones mean that the state may be wrong.
STALE_SECONDS = 120.0
# Without a list or an open watch for this time the state may be wrong as well.
FAILING_SECONDS = 40.0
# The API server sends a bookmark just before it ends a watch, unless nothing of the kind has changed in the whole
# cluster; without one for this time everything is listed again.
SILENT_SECONDS = 90.0
# Objects in a page of a list, for the API server's sake: here they are decoded one by one.
PAGE, PAGE_BESIDE = 500, 50
# Objects that are kept: Kubernetes' own limit of pods in a cluster.
MOST_OBJECTS = 150_000
# Before a collection that has more is listed again.
TOO_MANY_SECONDS = 60.0
# After a list beside the watch has failed.
AGAIN_SECONDS = 60.0
# The API server's reason where its cache doesn't have the version that a list asks for.
TOO_LARGE = "ResourceVersionTooLarge"
CLUSTER_SCOPED = ("nodes", "resourceslices")
T = TypeVar("T")

log = logging.getLogger("gpushare.kube")


def object_key(obj: JsonObject) -> str:
    """Return ``namespace/name``, or the name alone without a namespace."""
    metadata = obj.get("metadata") or {}
    name, namespace = str(metadata.get("name", "")), str(metadata.get("namespace") or "")
    return f"{namespace}/{name}" if namespace else name


# Called with the key, the object before, and the object now; None where there was or is none.
OnChange = Callable[[str, T | None, T | None], None]


class _Relist(Exception):
    """The collection must be listed again; the message is the reason."""


class _OlderState(_Relist):
    """The API's state is older than the known one: etcd was restored."""


class _TooMany(Exception):
    """The collection has more objects than may be kept."""


class _Listing(Generic[T]):
    """A list that is read while the watch goes on.

    :param known: the mirror's version before.
    """

    def __init__(self, known: int) -> None:
        self.known, self.version = known, 0
        self.items: dict[str, T | None] = {}
        # The versions of the events since then, by key.
        self.changed: dict[str, int] = {}
        self.done = self.failed = False


class Mirror(Generic[T]):
    """A collection of the API, kept in memory by list and watch; the last state stays while the API is away.

    A watch is trusted while it delivers events or bookmarks of rising versions. The collection is listed again after an
    error event, a refusal, a minute and a half without event or bookmark, a version below the known one (etcd was
    restored to an older state), a long failure, and once an hour. The hourly list is read beside the watch and replaces
    the state when the watch has reached its version; later events of an object win.

    Small collections are listed in one answer from the API server's cache, at least as new as the known state. Large
    ones, and any one after etcd seems to be restored, are listed in pages from etcd.

    Memory doesn't depend on the objects' sizes: they come one by one, and of each only the row that ``trim`` makes of
    it is kept. Nor does it grow beyond ``most`` rows: of a collection that has more the state counts as wrong.

    Callbacks run in the mirror's own thread, in the order of the events, once for each real change: neither a new list
    nor a repeated event calls them for an equal object. ``synced`` becomes true after those of the first list.

    Versions of one collection are numbers that rise with each change (Kubernetes KEP-5504). ``version``: the callbacks
    of all changes up to this one have run. ``delivered``: the highest version of any object that was listed or changed,
    set before its callback runs, also page by page while a list is read; every mirror of the collection reaches it
    without waiting for another change.
    """

    def __init__(
        self,
        kube: Kube,
        path: str,
        query: Mapping[str, str] | None = None,
        trim: Callable[[JsonObject], Any] = lambda obj: obj,
        on_change: OnChange[T] | None = None,
        backoff: tuple[float, float] = (0.2, 10.0),
        before_list: Callable[[], None] | None = None,
        page: int = 0,
        clock: Callable[[], float] = time.monotonic,
        relist: float = RELIST_SECONDS,
        most: int = MOST_OBJECTS,
    ) -> None:
        """
        :param query: of the requests, such as selectors.
        :param trim: converts an object to the value that is kept, or None to keep nothing.
        :param on_change: the first callback.
        :param backoff: the first and the longest pause after errors, in seconds.
        :param before_list: called before each list until the mirror is synced.
        :param page: the maximum of objects in an answer, for a list of etcd's latest state; 0: all in one answer, from
            the API server's cache.
        :param clock: monotonic, in seconds.
        :param relist: seconds within which everything is listed again.
        :param most: objects that are kept.
        """
        self._kube, self._path, self._query = kube, path, dict(query or {})
        self._trim, self._page, self._clock, self._before_list = trim, page, clock, before_list
        self._most, self._has_too_many = most, False
        self._first_pause, self._longest_pause = backoff
        self._items: dict[str, T] = {}
        self._callbacks: list[OnChange[T]] = [] if on_change is None else [on_change]
        self._lock = threading.Lock()
        self._synced, self._stopped = threading.Event(), threading.Event()
        self._relist, self._next_list = relist, 0.0
        self._last_contact: float | None = None
        self._failing_since: float | None = None
        # How long the last watch lived, whether it has delivered nothing, and how long the next one shall live at most.
        self._lived, self._silent, self._watch_seconds = 0.0, False, float(WATCH_SECONDS)
        # Whether the next list must come from etcd, and the list beside the watch.
        self._is_restored = False
        self._listing: _Listing[T] | None = None
        self._stream: Stream | None = None
        self._thread: threading.Thread | None = None
        self._error = ""
        self.version = self.delivered = 0
        # Lists that ended, that began, and which of the latter ended last.
        self.lists = self._begun = self._listed = 0
        self._is_relist_wanted = False

    def on_change(self, callback: OnChange[T]) -> None:
        """Add a callback; before :meth:`start`, so that it receives all changes."""
        self._callbacks.append(callback)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"mirror {self._path}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.close()
        if self._thread is not None:
            self._thread.join(5)

    @property
    def synced(self) -> bool:
        """Whether the first list is read, and its callbacks have run."""
        return self._synced.is_set()

    def wait_synced(self, seconds: float | None = None) -> bool:
        return self._synced.wait(seconds)

    @property
    def age(self) -> float:
        """Seconds since the last list, event or bookmark of this collection; infinite before the first list."""
        return float("inf") if self._last_contact is None else self._clock() - self._last_contact

    @property
    def stale(self) -> str:
        """Why the state may be wrong by now: what happened and for how long; otherwise empty."""
        if self._has_too_many:
            return self._error
        failing = self._failing_since
        if failing is not None and (seconds := self._clock() - failing) > FAILING_SECONDS:
            return f"they can't be read from the API for {seconds:.0f} s: {self._error or 'no answer'}"
        if self.age > STALE_SECONDS:
            return f"the API sent nothing about them for {self.age:.0f} s: {self._error or 'no answer'}"
        return ""

    @property
    def error(self) -> str:
        """The API server's last error while the collection can't be watched; otherwise empty."""
        return self._error

    def wait_for(self, version: int, seconds: float) -> bool:
        """Wait until the state has all changes up to a version.

        :returns: whether it has.
        """
        return self._wait_until(lambda: self.version >= version, seconds)

    def relist(self) -> int:
        """Have the collection listed again, from now on.

        :returns: the number of that list, for ``wait_listed``.
        """
        number = self._begun + 1
        self._is_relist_wanted = True
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.close()
        return number

    def wait_listed(self, number: int, seconds: float) -> bool:
        """Wait until a list that ``relist`` has announced, or a later one, has ended.

        :returns: whether it has.
        """
        return self._wait_until(lambda: self._listed >= number, seconds)

    def _wait_until(self, is_done: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not is_done():
            if time.monotonic() > end or self._stopped.wait(0.005):
                return False
        return True

    def items(self) -> list[T]:
        with self._lock:
            return list(self._items.values())

    def get(self, key: str) -> T | None:
        """Return the object with a key (see :func:`object_key`)."""
        with self._lock:
            return self._items.get(key)

    def __len__(self) -> int:
        return len(self._items)

    # The mirror's thread.

    def _run(self) -> None:
        version, pause = "", self._first_pause
        while not self._stopped.is_set():
            began, self._lived = self._clock(), 0.0
            try:
                if self._is_list_due(began):
                    version = ""
                if version:
                    self._check_history(version)
                else:
                    version = self._list()
                self._list_in_time()
                for at in self._watch(version):
                    version, pause = at, self._first_pause
                # A watch that ends at once would otherwise be opened again without a pause.
                wait = self._first_pause if self._clock() - began < 1 else 0.0
            except _Relist as reason:
                log.warning("%s: %s; listing again", self._path, reason)
                self._is_restored |= isinstance(reason, _OlderState)
                version, wait, pause = "", self._pause(pause), self._longer(pause)
            except _TooMany:
                self._has_too_many = True
                self._failed(f"there are more than the {self._most} that this server keeps")
                log.error("%s: %s; listing again in %.0f s", self._path, self._error, TOO_MANY_SECONDS)
                version, wait = "", self._pause(TOO_MANY_SECONDS)
            except KubeError as error:
                if self._stopped.is_set():
                    return
                self._failed(error.message)
                if self._lived > LIVED_SECONDS:
                    pause = self._first_pause
                log.warning("%s: %s; trying again in %.1f s", self._path, error.message, pause)
                if _refuses_version(error):
                    version = ""
                wait, pause = self._pause(pause), self._longer(pause)
            except Exception:
                # An object of an unexpected shape must not end the watch of all others.
                log.exception("%s: unexpected failure, listing again", self._path)
                self._failed("unexpected failure; the log has it")
                version, wait, pause = "", self._pause(pause), self._longer(pause)
            self._stopped.wait(wait)

    def _pause(self, seconds: float) -> float:
        return seconds * random.uniform(0.8, 1.2)

    def _longer(self, seconds: float) -> float:
        return min(seconds * 2, self._longest_pause)

    def _is_list_due(self, now: float) -> bool:
        failing = self._failing_since
        long = failing is not None and now - failing > FAILING_SECONDS
        return self._is_relist_wanted or long or self.age >= SILENT_SECONDS

    def _check_history(self, version: str) -> None:
        """Compare the collection's current version with the known one.

        A watch from a version in the future, after etcd was restored to an older state, says nothing.

        :raises _OlderState: the current one is older.
        """
        # One object, which needn't exist: for a list of all namespaces the API server would read each object.
        parent, _slash, kind = self._path.rpartition("/")
        path = f"{parent}/{kind}" if kind in CLUSTER_SCOPED else f"{parent}/namespaces/default/{kind}"
        query = {"fieldSelector": "metadata.name=gpushare", "limit": "1"}
        metadata = self._kube.get(f"{path}?{urlencode(query)}").get("metadata") or {}
        _check_order(version, str(metadata.get("resourceVersion", "")), "the API's state")

    def _list(self) -> str:
        """List the collection.

        :returns: the version to watch from.
        """
        if self._before_list is not None and not self.synced:
            self._before_list()
        self._begun += 1
        self._is_relist_wanted, self._listing = False, None
        number, seen, delivered = self._begun, set[str](), 0
        pages = self._objects(self._page or PAGE)
        try:
            for obj in pages:
                delivered = max(delivered, _version_of(obj))
                # Not the list's version: other mirrors would only reach that with the next change or bookmark.
                self.delivered = max(self.delivered, delivered)
                key = self._upsert(obj)
                if key in self._items:
                    seen.add(key)
        except _TooMany:
            # Those that weren't listed may be gone, so the next list has room for as many.
            self._has_too_many = True
            self._remove_others(seen)
            raise
        self._remove_others(seen)
        # The state before may have had later versions, of an etcd that was restored since.
        self.version, self.delivered, self._is_restored = int(pages.version or 0), delivered, False
        self._has_too_many, self._listed = False, number
        self._contact()
        self._has_listed()
        self._synced.set()
        return pages.version

    def _remove_others(self, keys: Container[str]) -> None:
        for key in [key for key in self._items if key not in keys]:
            self._put(key, None)

    def _has_listed(self) -> None:
        self.lists += 1
        # Not all mirrors at once.
        self._next_list = self._clock() + max(0.0, self._relist - WATCH_SECONDS) * random.uniform(0.8, 1.0)

    def _objects(self, size: int) -> _Objects:
        """Return the objects of one list, all of one version.

        :param size: the maximum of objects in a page, where it isn't one answer from the cache.
        """
        known = None if self._page or self._is_restored else self.version
        return _Objects(self._kube, self._path, self._query, size, known)

    # The list beside the watch.

    def _list_in_time(self) -> None:
        """Begin a list when an hour has passed, and apply it when the watch has reached its version.

        :raises _OlderState: it has an older version than the state had before.
        """
        listing = self._listing
        if listing is None:
            if self._clock() >= self._next_list:
                self._listing = listing = _Listing(self.version)
                name = f"list {self._path}"
                threading.Thread(target=self._list_beside, args=(listing,), name=name, daemon=True).start()
        elif listing.failed:
            self._listing, self._next_list = None, self._clock() + AGAIN_SECONDS
        elif listing.done:
            _check_order(str(listing.known), str(listing.version), "the API's list")
            if self.version >= listing.version:
                self._apply(listing)

    def _list_beside(self, listing: _Listing[T]) -> None:
        """Read a list, in a thread of its own."""
        try:
            objects = self._objects(min(PAGE_BESIDE, self._page or PAGE_BESIDE))
            for obj in objects:
                if self._stopped.is_set():
                    return
                key, now = object_key(obj), self._trim(obj)
                if now is None:
                    continue
                known = self._items.get(key)
                # Mostly equal: then no second copy of the state is kept.
                listing.items[key] = known if known == now else now
                if len(listing.items) > self._most or len(listing.changed) > self._most:
                    raise _TooMany(f"there are more than {self._most}")
            listing.version = int(objects.version or 0)
            listing.done = True
        except Exception as error:
            log.warning("%s: can't be listed beside the watch, which goes on: %s", self._path, error)
            listing.failed = True

    def _apply(self, listing: _Listing[T]) -> None:
        """Replace the state by a list, but for what has changed since."""
        self._listing = None
        for key in {*listing.items, *self._items}:
            now = listing.items.get(key)
            if listing.changed.get(key, 0) <= listing.version and self._items.get(key) != now:
                log.warning("%s: the watch has missed a change of %s", self._path, key)
                self.delivered = max(self.delivered, listing.version)
                self._put(key, now)
        self._has_listed()

    def _watch(self, version: str) -> Iterator[str]:
        """Apply the changes since a version; yields the version of each event."""
        longest = self._watch_seconds * random.uniform(0.9, 1.0)
        if self._silent:
            # The next list must come before the state counts as stale.
            longest = min(longest, SILENT_SECONDS - self.age)
        seconds = max(SHORTEST_WATCH_SECONDS, int(longest))
        query = {
            **self._query,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        opened, self._silent = self._clock(), True
        stream = self._kube.watch(f"{self._path}?{urlencode(query)}")
        with self._lock:
            self._stream = stream
        # That it is open doesn't show that the state is right, only that nothing has failed yet.
        self._failing_since = None
        try:
            if self._stopped.is_set() or self._is_relist_wanted:
                return
            for event in stream:
                obj = event.get("object") or {}
                kind = event.get("type")
                if kind == "ERROR":
                    raise _Relist(f"the watch ended with the error {obj.get('code')} {obj.get('message') or ''}")
                at = str((obj.get("metadata") or {}).get("resourceVersion") or version)
                _check_order(version, at, "the watch's bookmark" if kind == "BOOKMARK" else "the watch's event")
                self._contact()
                if kind != "BOOKMARK" and self._listing is not None:
                    self._listing.changed[object_key(obj)] = int(at)
                if kind == "DELETED":
                    self._put(object_key(obj), None)
                elif kind in ("ADDED", "MODIFIED"):
                    self.delivered = _version_of(obj)
                    self._upsert(obj)
                version, self.version = at, int(at)
                self._list_in_time()
                yield at
        finally:
            self._lived = self._clock() - opened
            self._adapt(seconds)
            with self._lock:
                self._stream = None
            stream.close()

    def _adapt(self, seconds: int) -> None:
        """Choose how long the next watch shall live: less than a proxy lets one without events live.

        The API server's bookmark comes two seconds before the end that it was asked for.

        :param seconds: how long this one was to live.
        """
        if self._stopped.is_set() or self._is_relist_wanted:
            return
        was_cut = self._lived < seconds - 1
        # After an error at once, or a restart of the API server, short watches of all nodes would only be load.
        if was_cut and self._silent and self._lived > SHORTEST_WATCH_SECONDS:
            self._watch_seconds = max(self._lived * 0.8, SHORTEST_WATCH_SECONDS)
        elif not was_cut and not self._silent:
            self._watch_seconds = min(self._watch_seconds * 2, WATCH_SECONDS)

    def _contact(self) -> None:
        self._last_contact, self._error, self._failing_since, self._silent = self._clock(), "", None, False

    def _failed(self, message: str) -> None:
        self._error = message
        if self._failing_since is None:
            self._failing_since = self._clock()

    def _upsert(self, obj: JsonObject) -> str:
        key = object_key(obj)
        self._put(key, self._trim(obj))
        return key

    def _put(self, key: str, now: T | None) -> None:
        """Keep a value, or none.

        :raises _TooMany: there is no room for it.
        """
        before = self._items.get(key)
        if before == now:
            return
        if before is None and len(self._items) >= self._most:
            raise _TooMany
        with self._lock:
            if now is None:
                self._items.pop(key, None)
            else:
                self._items[key] = now
        for callback in self._callbacks:
            try:
                callback(key, before, now)
            except Exception:
                log.exception("%s: a callback failed on %s", self._path, key)


class _Objects:
    """The objects of one list, in one answer from the cache or in pages; iterate once.

    :ivar version: its resourceVersion, when all objects have come.
    """

    def __init__(self, kube: Kube, path: str, query: Mapping[str, str], size: int, known: int | None) -> None:
        """
        :param size: the maximum of objects in a page.
        :param known: the version that the cache must have; None for pages of etcd's latest state.
        """
        self._kube, self._path, self._query, self._known = kube, path, query, known
        self._pages = Pages(kube, path, query, size)
        self.version = ""

    def __iter__(self) -> Iterator[JsonObject]:
        if self._known is not None:
            known = {"resourceVersion": str(self._known), "resourceVersionMatch": "NotOlderThan"}
            try:
                answer = self._kube.listing(f"{self._path}?{urlencode({**self._query, **known})}")
            except KubeError as error:
                # The cache isn't as far, or etcd was restored.
                if TOO_LARGE not in error.causes:
                    raise
            else:
                yield from answer
                self.version = answer.version
                return
        yield from self._pages
        self.version = self._pages.version


def _version_of(obj: JsonObject) -> int:
    """Return an object's or a list's resourceVersion.

    :raises ValueError: it is no number.
    """
    return int((obj.get("metadata") or {}).get("resourceVersion") or 0)


def _refuses_version(error: KubeError) -> bool:
    """Return whether a new list may help. It doesn't against an overloaded API server."""
    return 400 <= error.status < 500 and error.status != 429


def _check_order(known: str, now: str, what: str) -> None:
    """Compare a resourceVersion with the last known one.

    :raises _OlderState: a version is below the known one.
    """
    if known.isdecimal() and now.isdecimal() and int(now) < int(known):
        raise _OlderState(f"{what} has version {now}, which is older than the known {known}: etcd was restored")
