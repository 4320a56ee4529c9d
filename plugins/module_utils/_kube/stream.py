# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stream the lists of a large cluster item by item: few requests, and never a whole page in memory.

kube-apiserver writes each item as ``{"metadata":{"…`` directly after the previous one, and quotes inside strings are
escaped. So the bytes between two items can be found without parsing the items: items without the wanted words are
skipped, long fields without use here are cut out before parsing, and containers that many pods have in common are
parsed once. Lists in another format are parsed completely, which takes longer.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import gc
import json
import re
import typing as t
from concurrent.futures import ThreadPoolExecutor

from .._core.errors import ShareError
from .._core.types import JsonObject
from .errors import KubeError
from .refs import PagesSeen, key_of

if t.TYPE_CHECKING:
    from .api import Kube

_loads: t.Callable[[bytes], t.Any] = json.loads
with contextlib.suppress(ImportError):
    # Twice as fast, if it is installed.
    import orjson  # type: ignore[import-not-found,unused-ignore]

    _loads = orjson.loads

# The API server reads at most as many objects from etcd at once; longer pages would save nothing.
PAGE = 10000
# The API server's status for a ``continue`` that etcd has compacted away.
GONE = 410
# Bytes in memory at a time; more would leave the processor's cache.
CHUNK = 64 * 1024
# etcd limits objects to 1.5 MiB; anything longer than this isn't an object.
LONGEST = 16 * 1024 * 1024

_ITEMS = re.compile(rb'"items"\s*:\s*(\[|null)')
_START = b'{"metadata":{"'
_BETWEEN = b"}," + _START
# Start and end of long fields without use here, in the order in which kube-apiserver writes them. Each is a list in
# which only the end has this form. If a string in it does, too, the rest is no longer JSON, because the quote that ends
# the string then starts one.
_CONDITIONS = b',"conditions":[{'
_CUT = (
    (b',"managedFields":[', b'}]},"spec":'),
    *((b',"%s":[{' % name, b"}]") for name in (b"env", b"volumeMounts", b"tolerations")),
    (_CONDITIONS, b"}]"),
    (b',"images":[{', b"}]"),
    (b',"containerStatuses":[{', b'}],"qosClass":'),
)
# The conditions of an unscheduled pod have the reason.
_BOUND = b',"nodeName":"'
# A pod's containers end before its restart policy.
_CONTAINERS, _AFTER = b'"containers":[{', b'}],"restartPolicy":"'
# Different lists of containers that are kept at a time.
MOST_SHARED = 1000


@t.runtime_checkable
class Streams(t.Protocol):
    """A client that streams responses."""

    requests: collections.Counter[str]

    def chunks(
        self, api_version: str, kind: str, query: t.Sequence[tuple[str, str]], size: int
    ) -> t.Generator[bytes, None, None]:
        """Yield the response to a list over all namespaces in chunks; see ``Client.chunks``.

        :param api_version: of the objects, such as ``v1``.
        :param kind: of the objects, such as ``Pod``.
        :param query: the parameters of the request.
        :param size: the largest chunk, in bytes.
        """


@contextlib.contextmanager
def uncollected() -> t.Iterator[None]:
    """Disable the garbage collector: it would search millions of objects without reference cycles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class _Odd(Exception):
    """The list isn't in kube-apiserver's format."""


class _NotPaged(Exception):
    """The server answers the token of a page with objects that it has returned before."""


class Wanted(t.NamedTuple):
    """A list of all objects of a kind in all namespaces.

    :param keep: returns the values to keep of an item, which may be any JSON.
    :param words: items with none of these may be skipped; without words all items are parsed.
    :param whole: parse whole items; otherwise without managedFields, images, tolerations and containerStatuses, without
        environment and mounts of the first container, and without the conditions of pods on a node. Pods with equal
        containers then have the same list of them, so ``keep`` must not change it.
    """

    kind: str
    keep: t.Callable[[t.Any], t.Iterable[t.Any]]
    field_selector: str = ""
    words: t.Sequence[bytes] = ()
    whole: bool = False
    api_version: str = "v1"


# With the token of a page; empty for the first one, None for all objects in one answer.
Ask = t.Callable[[Wanted, "str | None"], t.Iterator[bytes]]


def listed(kube: Kube | Streams, *wanted: Wanted) -> list[list[t.Any]]:
    """Return the kept values of each list; the next page is requested while one is parsed.

    No ``resourceVersion`` is sent: a list is at least as new as the request, and all its pages show one state.

    :raises ShareError: the API server refuses or its response is invalid; a list's token expired twice.
    """
    if not isinstance(kube, Streams):
        return [
            [
                kept
                for item in kube.list_all(want.api_version, want.kind, field_selector=want.field_selector)
                for kept in want.keep(item)
            ]
            for want in wanted
        ]
    # A response must have begun before it can be closed.
    with contextlib.ExitStack() as opened, ThreadPoolExecutor(1) as pool:

        def ask(want: Wanted, more: str | None) -> t.Iterator[bytes]:
            """Request a page in the background and return its chunks."""
            query = [] if more is None else [("limit", str(PAGE))]
            query += [("fieldSelector", want.field_selector)] if want.field_selector else []
            query += [("continue", more)] if more else []
            chunks = kube.chunks(want.api_version, want.kind, query, CHUNK)
            opened.callback(chunks.close)
            first = pool.submit(next, chunks, b"")

            def answered() -> t.Iterator[bytes]:
                yield first.result()
                yield from chunks

            return answered()

        return [_kept(want, page, ask) for want, page in [(want, ask(want, "")) for want in wanted]]


def _kept(want: Wanted, page: t.Iterator[bytes], ask: Ask) -> list[t.Any]:
    exact, expired, whole = False, False, False
    while True:
        try:
            return _all_pages(want, page, ask, exact, whole)
        except _Odd:
            exact = True
        except _NotPaged:
            whole = True
        except KubeError as error:
            if error.status != GONE:
                raise
            if expired:
                raise ShareError(
                    f"the list of {want.kind}s expired twice while it was read: the API server or the connection is "
                    "too slow; run again"
                ) from error
            expired = True
        page = ask(want, None if whole else "")


def _all_pages(want: Wanted, page: t.Iterator[bytes], ask: Ask, exact: bool, whole: bool) -> list[t.Any]:
    """Return the kept values of all pages.

    :param whole: the first page has all objects, whatever token it has.
    :raises _NotPaged: so it would have been.
    """
    kept: list[t.Any] = []
    seen = PagesSeen()
    while True:
        about: JsonObject = {}
        following: t.Iterator[bytes] | None = None
        first: list[tuple[str, str]] = []
        for item in items(page, about, want.words, want.whole, exact):
            # The order of a server that doesn't page may differ, so its token tells more than this.
            first = first or [key_of(item)]
            if not following and not whole and _token(about):
                if seen.again(_token(about), first):
                    raise _NotPaged
                following = ask(want, _token(about))
            kept += want.keep(item)
        if not following and not whole:
            if seen.again(_token(about), first):
                raise _NotPaged
            following = ask(want, _token(about)) if _token(about) else None
        if not following:
            return kept
        page = following


def _token(about: JsonObject) -> str:
    """Return the token of the next page; empty after the last one."""
    metadata = about.get("metadata")
    token = metadata.get("continue") if isinstance(metadata, dict) else None
    return token if isinstance(token, str) else ""


def items(
    chunks: t.Iterator[bytes],
    about: JsonObject,
    words: t.Sequence[bytes] = (),
    whole: bool = False,
    exact: bool = False,
) -> t.Iterator[t.Any]:
    """Yield the items of a list that arrives in chunks.

    :param about: receives the list's own fields (such as ``metadata``), before the first item in kube-apiserver's
        format, otherwise after the last.
    :param words: see ``Wanted``, as for ``whole``.
    :param exact: parse everything.
    :raises ShareError: it isn't a list, or is incomplete.
    """
    text = b""
    match = None
    for chunk in chunks:
        text += chunk
        match = _ITEMS.search(text)
        if match or len(text) > LONGEST:
            break
    if not match or match.group(1) == b"null":
        about.update(_envelope(text + b"".join(chunks)))
        return
    head, text = text[: match.start()], text[match.end() :]
    # If the list's fields aren't before its items, they are after them.
    with contextlib.suppress(ShareError):
        about.update(_envelope(head + b'"items":[]}'))
    shared = None if whole else _Shared()
    while not exact:
        # A short list arrives in one chunk.
        end = text.rfind(_BETWEEN)
        if end > 0:
            yield from _parse_fast(text[: end + 1], words, shared)
            text = text[end + 2 :]
        elif len(text) > 4 * 1024 * 1024:
            break
        chunk = next(chunks, b"")
        if not chunk:
            break
        text += chunk
    yield from _parse_exactly(text, chunks, head, about)


def _parse_fast(text: bytes, words: t.Sequence[bytes], shared: _Shared | None) -> list[t.Any]:
    """Parse items in kube-apiserver's format, without the brackets around them.

    :param shared: for items that aren't needed whole.
    """
    pieces = text[:-1].split(_BETWEEN)
    if not pieces[0].startswith(_START):
        raise _Odd
    pieces[0] = pieces[0][len(_START) :]
    if words:
        pieces = [piece for piece in pieces if any(word in piece for word in words)]
    if not pieces:
        return []
    for parse in (_parse,) if shared is None else (shared.parse, _parse):
        try:
            read = parse(pieces)
            # With another order of fields, more than managedFields may have been cut out.
            if all(item["metadata"].get("name") for item in read):
                return read
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
    raise _Odd


def _parse(pieces: t.Sequence[bytes]) -> list[t.Any]:
    text = b"[%s%s}]" % (_START, (b"}," + _START).join(pieces))
    return t.cast("list[t.Any]", _loads(text))


class _Shared:
    """Parses items without long fields, and equal containers once, since a workload's pods have the same ones."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._lists: list[t.Any] = []

    def parse(self, pieces: t.Sequence[bytes]) -> list[t.Any]:
        """Parse items.

        :raises ValueError: they aren't in kube-apiserver's format.
        """
        if len(self._lists) > MOST_SHARED:
            self._numbers, self._lists = {}, []
        parted = [self._part(_shortened(piece)) for piece in pieces]
        read = _parse([piece for piece, _number in parted])
        if len(read) != len(parted):
            raise ValueError("an item isn't one object")
        for item, (_piece, number) in zip(read, parted):
            if number is not None:
                item["spec"]["containers"] = self._lists[number]
        return read

    def _part(self, piece: bytes) -> tuple[bytes, int | None]:
        """Return an item with null for its containers, and the number of their list."""
        begin = piece.find(_CONTAINERS)
        end = piece.find(_AFTER, begin) if begin >= 0 else -1
        if end < 0:
            return piece, None
        begin, end = begin + len(_CONTAINERS) - 2, end + 2
        text = piece[begin:end]
        number = self._numbers.get(text)
        if number is None:
            self._lists.append(_loads(text))
            number = self._numbers[text] = len(self._lists) - 1
        return b"%snull%s" % (piece[:begin], piece[end:]), number


def _shortened(piece: bytes) -> bytes:
    """Return an item without long fields; each is searched only behind the one before."""
    kept, at = [], 0
    for first, last in _CUT:
        begin = piece.find(first, at)
        end = piece.find(last, begin) if begin >= 0 else -1
        if end >= 0 and (first is not _CONDITIONS or piece.rfind(_BOUND, 0, begin) >= 0):
            kept.append(piece[at:begin])
            at = end + 2
    return b"".join([*kept, piece[at:]])


def _parse_exactly(text: bytes, chunks: t.Iterator[bytes], head: bytes, about: JsonObject) -> t.Iterator[t.Any]:
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    scan = json.JSONDecoder().raw_decode
    rest = decode(text)
    while True:
        rest = rest.lstrip(" \t\r\n,")
        if rest.startswith("]"):
            break
        try:
            item, end = scan(rest)
        except (ValueError, RecursionError) as error:
            chunk = next(chunks, b"")
            if not chunk or len(rest) > LONGEST or isinstance(error, RecursionError):
                raise ShareError("the API server's response isn't a list of objects, or is incomplete") from error
            rest += decode(chunk)
            continue
        rest = rest[end:]
        yield item
    tail = (rest[1:] + decode(b"".join(chunks), True)).encode(errors="replace")
    about.update(_envelope(head + b'"items":[]' + tail))


def _envelope(text: bytes) -> JsonObject:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShareError("the API server's response isn't JSON, or is incomplete") from error
    if not isinstance(answer, dict):
        raise ShareError("the API server's response isn't a list of objects")
    return answer
