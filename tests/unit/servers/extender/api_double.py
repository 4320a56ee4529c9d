# SPDX-License-Identifier: GPL-3.0-or-later
"""An API server in memory, as strict as the real one where the servers depend on it.

Objects have UIDs and resource versions; lists come in pages; watches start from a version, follow the objects that a
field selector matches, and are refused with 410 once history is compacted; merge patches and bindings check their
preconditions. It can be down, fail requests, or execute a request and lose the answer.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gpushare.api.client import KubeError
from gpushare.shared._core.types import JsonObject
from merge_patch import merge_patch

GROUP = r"(?:/api/v1|/apis/(?:coordination|admissionregistration)\.k8s\.io/v1)/"
POLICIES = "validatingadmissionpolicybindings"
KIND = rf"(?:namespaces/(?P<namespace>[^/]+)/)?(?P<kind>pods|nodes|events|leases|{POLICIES})"
OBJECT = re.compile(GROUP + KIND + r"/(?P<name>[^/]+)(?P<sub>/.+)?")
COLLECTION = re.compile(GROUP + KIND)
FIRST = 100


@dataclasses.dataclass
class Change:
    version: int
    kind: str
    before: JsonObject | None
    after: JsonObject | None


@dataclasses.dataclass
class Failure:
    method: str
    path: re.Pattern[str]
    error: KubeError
    times: int
    done: bool


class ApiDouble:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.objects: dict[tuple[str, str, str], JsonObject] = {}
        self.log: list[Change] = []
        self.version = FIRST
        self.oldest = FIRST
        self.down = False
        self.failures: list[Failure] = []
        self.requests: list[tuple[str, str, Any]] = []
        self.hooks: list[Callable[[str, str], None]] = []
        self.pages: dict[str, tuple[list[JsonObject], int]] = {}
        self.epoch = 0
        self.bookmarks = False
        self.budgets: dict[str, int] = {}

    # Used by tests.

    def put(self, kind: str, obj: JsonObject) -> JsonObject:
        """Create or replace an object, as its owner would; a path in place of a kind is a PUT request."""
        if kind.startswith("/"):
            return self._do("PUT", kind, obj, lambda: self._put(kind, obj))
        with self.lock:
            obj = copy.deepcopy(obj)
            metadata = obj.setdefault("metadata", {})
            before = self.objects.get(self._key(kind, obj))
            metadata.setdefault("uid", before["metadata"]["uid"] if before else str(uuid.uuid4()))
            self._store(kind, before, obj)
            return copy.deepcopy(obj)

    def change(self, kind: str, name: str, namespace: str, edit: Callable[[JsonObject], None]) -> JsonObject:
        with self.lock:
            before = self.objects[(kind, namespace, name)]
            after = copy.deepcopy(before)
            edit(after)
            self._store(kind, before, after)
            return copy.deepcopy(after)

    def remove(self, kind: str, name: str, namespace: str = "") -> None:
        with self.lock:
            self._log(kind, self.objects.pop((kind, namespace, name)), None)

    def pod(self, name: str, namespace: str = "default") -> JsonObject:
        with self.lock:
            return copy.deepcopy(self.objects[("pods", namespace, name)])

    def pods(self) -> list[JsonObject]:
        with self.lock:
            return [copy.deepcopy(obj) for (kind, _namespace, _name), obj in self.objects.items() if kind == "pods"]

    def compact(self) -> None:
        """Forget history: watches from before now, and pages of lists, are 410."""
        with self.lock:
            self.oldest = self.version
            self.pages.clear()

    def cut(self) -> None:
        """Break every watch that is open."""
        with self.lock:
            self.epoch += 1
            self.changed.notify_all()

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        self.down = True
        self.cut()
        try:
            yield
        finally:
            self.down = False

    def before(self, method: str, path: str, action: Callable[[], Any], times: int = 1) -> None:
        """Run an action just before the next requests that match."""
        left = [action] * times

        def hook(verb: str, at: str) -> None:
            if verb == method and re.search(path, at) and left:
                left.pop()()

        self.hooks.append(hook)

    def pause(self, method: str, path: str) -> tuple[threading.Event, threading.Event]:
        """Stop the next request that matches just before it is executed.

        :returns: is set when the request has stopped; and resumes it when set.
        """
        reached, resume = threading.Event(), threading.Event()

        def stop() -> None:
            reached.set()
            assert resume.wait(20)

        self.before(method, path, stop)
        return reached, resume

    def fail(self, method: str, path: str, status: int = 500, times: int = 1, done: bool = False) -> None:
        """Fail the next requests; with ``done`` after they have been executed."""
        error = KubeError(status, "Injected", f"injected failure {status}")
        self.failures.append(Failure(method, re.compile(path), error, times, done))

    def asked(self, method: str, path: str) -> list[Any]:
        """The bodies of the requests so far that match."""
        return [body for verb, at, body in self.requests if verb == method and re.search(path, at)]

    # The Kube protocol.

    def get(self, path: str) -> JsonObject:
        return self._do("GET", path, None, lambda: self._get(path))

    def listing(self, path: str) -> ListingDouble:
        return ListingDouble(self.get(path))

    def post(self, path: str, body: JsonObject) -> JsonObject:
        return self._do("POST", path, body, lambda: self._post(path, body))

    def patch(self, path: str, body: Any) -> JsonObject:
        return self._do("PATCH", path, body, lambda: self._patch(path, body))

    def delete(self, path: str) -> JsonObject:
        def delete() -> JsonObject:
            kind, namespace, name = self._object(path)
            self.remove(kind, name, namespace)
            return {}

        return self._do("DELETE", path, None, delete)

    def watch(self, path: str) -> Any:
        return self._do("WATCH", path, None, lambda: WatchDouble(self, path))

    def _do(self, method: str, path: str, body: Any, action: Callable[[], Any]) -> Any:
        # A real client sends JSON, so a later change of a dict does not change the request.
        body = json.loads(json.dumps(body))
        for hook in list(self.hooks):
            hook(method, path)
        with self.lock:
            self.requests.append((method, path, body))
            if self.down:
                raise KubeError(0, "Down", "connection refused")
            failure = next((one for one in self.failures if one.method == method and one.path.search(path)), None)
            if failure is not None:
                failure.times -= 1
                if failure.times <= 0:
                    self.failures.remove(failure)
                if failure.done:
                    action()
                raise failure.error
            return copy.deepcopy(action()) if method != "WATCH" else action()

    def _get(self, path: str) -> JsonObject:
        split = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(split.query).items()}
        if not COLLECTION.fullmatch(split.path):
            kind, namespace, name = self._object(path)
            return self.objects[(kind, namespace, name)]
        token, limit = query.get("continue", ""), int(query.get("limit", "0")) or 10**9
        if "resourceVersion" in query:
            # Only so does the real one answer from its cache.
            assert "limit" not in query and query["resourceVersionMatch"] == "NotOlderThan", path
            if int(query["resourceVersion"]) > self.version:
                raise KubeError(504, "Timeout", "Too large resource version", ["ResourceVersionTooLarge"])
        if token:
            if token not in self.pages:
                raise KubeError(410, "Expired", "the provided continue parameter is too old")
            items, version = self.pages.pop(token)
        else:
            items, version = [obj for obj in self._collection(split.path) if selected(obj, query)], self.version
        metadata = {"resourceVersion": str(version)}
        if len(items) > limit:
            metadata["continue"] = uuid.uuid4().hex
            self.pages[metadata["continue"]] = (items[limit:], version)
        return {"kind": "List", "metadata": metadata, "items": items[:limit]}

    def _post(self, path: str, body: JsonObject) -> JsonObject:
        if path.endswith("/binding"):
            return self._bind(path, body)
        if path.endswith("/eviction"):
            return self._evict(path, body)
        split = urlsplit(path)
        match = COLLECTION.fullmatch(split.path)
        assert match, path
        if self._key(match["kind"], body) in self.objects:
            raise KubeError(409, "AlreadyExists", f'{match["kind"]} "{body["metadata"]["name"]}" already exists')
        return body if "dryRun=All" in split.query else self.put(match["kind"], body)

    def _put(self, path: str, body: JsonObject) -> JsonObject:
        """A whole object in place of one; as the real one, it makes a Lease that isn't there."""
        split = urlsplit(path)
        match = OBJECT.fullmatch(split.path)
        assert match and match["kind"] == "leases" and not match["sub"], path
        before = self.objects.get(self._key("leases", body))
        wanted = body["metadata"]
        if before is None and (wanted.get("resourceVersion") or wanted.get("uid")):
            raise KubeError(409, "Conflict", "Precondition failed: there is no such object")
        if before is not None and wanted.get("resourceVersion") != before["metadata"]["resourceVersion"]:
            raise KubeError(409, "Conflict", "the object has been modified; please apply your changes to the latest")
        if before is not None and wanted.get("uid", before["metadata"]["uid"]) != before["metadata"]["uid"]:
            raise KubeError(409, "Conflict", "Precondition failed: UID in precondition")
        return body if "dryRun=All" in split.query else self.put("leases", body)

    def _bind(self, path: str, body: JsonObject) -> JsonObject:
        kind, namespace, name = self._object(path)
        pod = self.objects[(kind, namespace, name)]
        metadata = body["metadata"]
        if metadata.get("uid") and metadata["uid"] != pod["metadata"]["uid"]:
            raise KubeError(409, "Conflict", f"Precondition failed: UID in precondition: {metadata['uid']}")
        if metadata.get("resourceVersion") not in (None, pod["metadata"]["resourceVersion"]):
            raise KubeError(409, "Conflict", "Precondition failed: ResourceVersion in precondition")
        if pod["metadata"].get("deletionTimestamp"):
            raise KubeError(409, "Conflict", f"pod {name} is being deleted, cannot be assigned to a host")
        if pod["spec"].get("nodeName"):
            raise KubeError(409, "Conflict", f'pod {name} is already assigned to node "{pod["spec"]["nodeName"]}"')

        def bind(obj: JsonObject) -> None:
            obj["spec"]["nodeName"] = body["target"]["name"]
            obj["metadata"].setdefault("annotations", {}).update(metadata.get("annotations") or {})

        self.change("pods", name, namespace, bind)
        return {"kind": "Status", "status": "Success"}

    def _evict(self, path: str, body: JsonObject) -> JsonObject:
        """Ends a pod, unless its disruption budget is used up; ``budgets`` has the rest, by label app."""
        _kind, namespace, name = self._object(path)
        pod = self.objects[("pods", namespace, name)]
        options = body.get("deleteOptions") or {}
        assert (body["metadata"]["name"], body["kind"]) == (name, "Eviction")
        if options.get("preconditions", {}).get("uid", pod["metadata"]["uid"]) != pod["metadata"]["uid"]:
            raise KubeError(409, "Conflict", "Precondition failed: UID in precondition")
        app = (pod["metadata"].get("labels") or {}).get("app", "")
        if self.budgets.get(app, 1) < 1:
            message = "Cannot evict pod as it would violate the pod's disruption budget."
            raise KubeError(429, "TooManyRequests", message, ["DisruptionBudget"])
        if not options.get("dryRun"):
            if app in self.budgets:
                self.budgets[app] -= 1
            self.change("pods", name, namespace, lambda pod: pod["metadata"].update(deletionTimestamp="now"))
        return {"kind": "Status", "status": "Success"}

    def _patch(self, path: str, body: JsonObject) -> JsonObject:
        # The status has a path of its own, by which no specification is changed; the servers may patch nothing else.
        assert path.endswith("/status") and "spec" not in body, (path, body)
        kind, namespace, name = self._object(path)
        now = self.objects[(kind, namespace, name)]["metadata"]
        for field in ("uid", "resourceVersion"):
            wanted = (body.get("metadata") or {}).get(field)
            if wanted and wanted != now[field]:
                raise KubeError(409, "Conflict", f"Precondition failed: {field}")
        return self.change(kind, name, namespace, lambda obj: merge_patch(obj, body))

    def _object(self, path: str) -> tuple[str, str, str]:
        match = OBJECT.fullmatch(urlsplit(path).path)
        assert match, path
        key = (match["kind"], match["namespace"] or "", match["name"])
        if key not in self.objects:
            raise KubeError(404, "NotFound", f'{key[0]} "{key[2]}" not found')
        return key

    def _collection(self, path: str) -> list[JsonObject]:
        match = COLLECTION.fullmatch(path)
        assert match, path
        return [
            obj
            for (kind, namespace, _name), obj in sorted(self.objects.items())
            if kind == match["kind"] and (not match["namespace"] or namespace == match["namespace"])
        ]

    def _key(self, kind: str, obj: JsonObject) -> tuple[str, str, str]:
        return kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"]

    def _store(self, kind: str, before: JsonObject | None, after: JsonObject) -> None:
        after["metadata"]["resourceVersion"] = str(self.version + 1)
        self.objects[self._key(kind, after)] = after
        self._log(kind, before, after)

    def _log(self, kind: str, before: JsonObject | None, after: JsonObject | None) -> None:
        self.version += 1
        self.log.append(Change(self.version, kind, before, after))
        self.changed.notify_all()


class ListingDouble:
    """The objects of a list that is there as a whole."""

    def __init__(self, answer: JsonObject) -> None:
        self._answer, self.size = answer, 0
        self.version = self.more = ""

    def __iter__(self) -> Iterator[JsonObject]:
        yield from self._answer.get("items") or []
        metadata = self._answer["metadata"]
        self.version, self.more = str(metadata.get("resourceVersion", "")), str(metadata.get("continue") or "")


class WatchDouble:
    def __init__(self, api: ApiDouble, path: str) -> None:
        split = urlsplit(path)
        match = COLLECTION.fullmatch(split.path)
        assert match, path
        self.query = {key: values[0] for key, values in parse_qs(split.query).items()}
        assert self.query.get("watch") == "1" and self.query.get("resourceVersion"), path
        self.api, self.kind = api, match["kind"]
        self.at = int(self.query["resourceVersion"])
        self.epoch, self.closed = api.epoch, False
        if self.at < api.oldest:
            raise KubeError(410, "Expired", f"too old resource version: {self.at} ({api.oldest})")

    def close(self) -> None:
        with self.api.lock:
            self.closed = True
            self.api.changed.notify_all()

    def __iter__(self) -> Iterator[JsonObject]:
        while True:
            with self.api.lock:
                self.api.changed.wait_for(
                    lambda: self.closed or self.epoch != self.api.epoch or self._next(), timeout=30
                )
                if self.closed:
                    return
                if self.epoch != self.api.epoch:
                    raise KubeError(0, "Cut", "connection reset")
                changes = self._next()
                if not changes:
                    return
                if self.at < self.api.oldest:
                    # The error of the watch cache when it has lost the versions between.
                    yield {
                        "type": "ERROR",
                        "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"},
                    }
                    return
            for change in changes:
                self.at = change.version
                event = self._event(change)
                if event is not None:
                    yield copy.deepcopy(event)
                elif self.api.bookmarks:
                    yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.at)}}}

    def _next(self) -> list[Change]:
        # One version for each change, without a gap.
        return [one for one in self.api.log[self.at - FIRST :] if one.kind == self.kind]

    def _event(self, change: Change) -> JsonObject | None:
        was = change.before is not None and selected(change.before, self.query)
        now = change.after is not None and selected(change.after, self.query)
        if now:
            return {"type": "MODIFIED" if was else "ADDED", "object": change.after}
        if was:
            gone = copy.deepcopy(change.before or {})
            gone["metadata"]["resourceVersion"] = str(change.version)
            return {"type": "DELETED", "object": gone}
        return None


def selected(obj: JsonObject, query: dict[str, str]) -> bool:
    """Whether a field selector takes an object."""
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        path, operator, wanted = re.fullmatch(r"([^!=]+)(!=|==?)(.*)", term).groups()  # type: ignore[union-attr]
        value: Any = obj
        for step in path.split("."):
            value = (value or {}).get(step)
        if (str(value or "") == wanted) != (operator != "!="):
            return False
    return True


# --------------------------------------------------------------------------- over HTTP


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that ends closes its connections, whatever it still waits for.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def served(api: ApiDouble, token: Callable[[], str] | None = None) -> Iterator[str]:
    """The double behind real HTTP, for the real client; its address. ``token`` gives the one that is accepted now."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if token is not None and self.headers.get("Authorization", "").split()[-1:] != [token()]:
                self.send(401, {"kind": "Status", "reason": "Unauthorized", "message": "Unauthorized"})
            elif "watch=1" in self.path:
                self.watch()
            elif self.command in ("GET", "DELETE"):
                self.reply(lambda: getattr(api, self.command.lower())(self.path))
            else:
                if self.command == "PATCH":
                    assert self.headers["Content-Type"] == "application/merge-patch+json"
                status = 201 if self.command == "POST" else 200
                self.reply(lambda: getattr(api, self.command.lower())(self.path, json.loads(body)), status)

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

        def reply(self, action: Callable[[], JsonObject], status: int = 200) -> None:
            try:
                self.send(status, action())
            except KubeError as error:
                if error.status == 0:
                    self.close_connection = True
                    self.connection.close()
                else:
                    self.send_error_of(error)

        def send_error_of(self, error: KubeError) -> None:
            causes = [{"reason": cause} for cause in error.causes]
            status = {"kind": "Status", "reason": error.reason, "message": error.message, "details": {"causes": causes}}
            self.send(error.status or 500, status)

        def send(self, status: int, value: JsonObject) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def watch(self) -> None:
            try:
                stream = api.watch(self.path)
            except KubeError as error:
                return self.send_error_of(error)
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with contextlib.suppress(KubeError, OSError):
                for event in stream:
                    # Cut in two, as a network would.
                    line = json.dumps(event).encode() + b"\n"
                    for part in (line[: len(line) // 2], line[len(line) // 2 :]):
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                        self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")
            self.close_connection = True
            return None

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        api.cut()
        server.shutdown()
        server.server_close()


# --------------------------------------------------------------------------- objects


def make_node(
    name: str, *sizes: int, unit: int = 1024, unhealthy: tuple[int, ...] = (), models: tuple[str, ...] = ()
) -> JsonObject:
    """A node with cards of these sizes in units."""
    cards = [
        {
            "index": index,
            "uuid": f"GPU-{name}-{index}",
            "minor": index,
            "memoryMiB": size * unit,
            "units": size,
            "healthy": index not in unhealthy,
            "model": models[index] if models else "Test",
        }
        for index, size in enumerate(sizes)
    ]
    capacity = {"aliyun.com/gpu-mem": str(sum(sizes)), "aliyun.com/gpu-count": str(len(sizes))} if sizes else {}
    annotations = {"kubegpu.share/cards": json.dumps(cards)} if sizes else {}
    return {"metadata": {"name": name, "annotations": annotations}, "status": {"capacity": capacity}}


def make_pod(
    name: str, units: int, node: str = "", card: int | None = None, namespace: str = "default", priority: int = 0
) -> JsonObject:
    pod: JsonObject = {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [{"name": "main", "resources": {"limits": {"aliyun.com/gpu-mem": str(units)}}}]},
        "status": {"phase": "Pending"},
    }
    if priority:
        pod["spec"]["priority"] = priority
    if node:
        pod["spec"]["nodeName"] = node
    if card is not None:
        pod["metadata"]["annotations"] = {
            "ALIYUN_COM_GPU_MEM_IDX": str(card),
            "ALIYUN_COM_GPU_MEM_POD": str(units),
            "ALIYUN_COM_GPU_MEM_ASSIGNED": "true",
        }
    return pod
