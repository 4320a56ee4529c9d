# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Lists of a large cluster, item by item while they come in: few requests, and never a page in memory.

kube-apiserver writes an item as ``{"metadata":{"…`` right after the one before, and inside of strings every quote is
escaped, so bytes in which one item ends and the next begins can be found without reading what is between them. That
lets an item that has none of the words looked for go by unread, and others without what is long and of no use here.
What another server writes differently is read to the letter, which takes longer.
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

from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Expired, Kube

_loads: t.Callable[[bytes], t.Any] = json.loads
with contextlib.suppress(ImportError):
    # In half the time, where it is installed.
    import orjson  # type: ignore[import-not-found,unused-ignore]

    _loads = orjson.loads

# The most that the API server takes from etcd at once; a longer page would cost it, and save nothing.
PAGE = 10000
# What is in memory at a time.
CHUNK = 256 * 1024
# etcd takes objects of 1.5 MiB; nothing that is longer than this is one of the API server's.
LONGEST = 16 * 1024 * 1024

_ITEMS = re.compile(rb'"items"\s*:\s*(\[|null)')
_START = b'{"metadata":{"'
_BETWEEN = b"}," + _START
# What is long and of no use here, from where to where. Each is a list in which nothing but its end ends like that;
# where a string in it does, what is left isn't JSON any more, since the quote that ends that string begins one then.
_MANAGED = (b',"managedFields":[', b'}]},"spec":')
_LISTS = tuple((b',"%s":[{' % name, b"}]") for name in (b"images", b"env", b"tolerations"))
# Why a pod is on no node is in its conditions.
_CONDITIONS, _BOUND = (b',"conditions":[{', b"}]"), b'"nodeName":"'


@t.runtime_checkable
class Streams(t.Protocol):
    """A cluster that hands an answer over while it comes in."""

    requests: collections.Counter[str]

    def chunks(
        self, api_version: str, kind: str, query: t.Sequence[tuple[str, str]], size: int
    ) -> t.Generator[bytes, None, None]: ...


@contextlib.contextmanager
def uncollected() -> t.Iterator[None]:
    """Objects by the million and none that points back to what holds it: looking for such ones takes its time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class _Odd(Exception):
    """Items aren't written as kube-apiserver does it."""


class Wanted(t.NamedTuple):
    """A list of all objects of a kind (of v1) in all namespaces.

    :param keep: gives what is worth keeping of an item, which may be any JSON.
    :param words: an item in which none of these occurs may be left out unread; none means that all are read.
    :param whole: all of an item is wanted; else it has no managedFields, images, environment and tolerations, and no
        conditions where it is on a node.
    """

    kind: str
    keep: t.Callable[[t.Any], t.Iterable[t.Any]]
    field_selector: str = ""
    words: t.Sequence[bytes] = ()
    whole: bool = False


Ask = t.Callable[[Wanted, str], t.Iterator[bytes]]


def listed(kube: Kube | Streams, *wanted: Wanted) -> list[list[t.Any]]:
    """What is worth keeping, list by list. The API server makes what comes next ready while one is read here.

    No ``resourceVersion`` is sent: what is read is at least as new as the question, and one state of the cluster over
    all pages of a list.

    :raises ShareError: the cluster says no, or nothing that can be read; a list's token expired twice.
    """
    if not isinstance(kube, Streams):
        return [
            [
                kept
                for item in kube.list_all("v1", one.kind, field_selector=one.field_selector)
                for kept in one.keep(item)
            ]
            for one in wanted
        ]
    # Who is asked ahead must have answered before its answer can be closed.
    with contextlib.ExitStack() as opened, ThreadPoolExecutor(1) as pool:

        def ask(one: Wanted, more: str) -> t.Iterator[bytes]:
            """A page's text; the question is on its way when this comes back."""
            query = [("limit", str(PAGE))]
            query += [("fieldSelector", one.field_selector)] if one.field_selector else []
            query += [("continue", more)] if more else []
            chunks = kube.chunks("v1", one.kind, query, CHUNK)
            opened.callback(chunks.close)
            first = pool.submit(next, chunks, b"")

            def answered() -> t.Iterator[bytes]:
                yield first.result()
                yield from chunks

            return answered()

        return [_kept(one, page, ask) for one, page in [(one, ask(one, "")) for one in wanted]]


def _kept(one: Wanted, page: t.Iterator[bytes], ask: Ask) -> list[t.Any]:
    exact, expired = False, False
    while True:
        try:
            return _all_pages(one, page, ask, exact)
        except _Odd:
            exact = True
        except Expired as error:
            if expired:
                raise ShareError(
                    f"the list of {one.kind}s expired twice while it was read: the API server, or the way to it, is "
                    "slower than etcd forgets"
                ) from error
            expired = True
        page = ask(one, "")


def _all_pages(one: Wanted, page: t.Iterator[bytes] | None, ask: Ask, exact: bool) -> list[t.Any]:
    kept: list[t.Any] = []
    while page:
        about: Json = {}
        following: t.Iterator[bytes] | None = None
        for item in items(page, about, one.words, one.whole, exact):
            if not following and _token(about):
                following = ask(one, _token(about))
            kept += one.keep(item)
        page = following or (ask(one, _token(about)) if _token(about) else None)
    return kept


def _token(about: Json) -> str:
    """What the next page is asked for with; empty after the last."""
    metadata = about.get("metadata")
    token = metadata.get("continue") if isinstance(metadata, dict) else None
    return token if isinstance(token, str) else ""


def items(
    chunks: t.Iterator[bytes], about: Json, words: t.Sequence[bytes] = (), whole: bool = False, exact: bool = False
) -> t.Iterator[t.Any]:
    """The items of a list whose text comes in pieces.

    :param about: gets the list's own fields (``metadata`` among them): before the first item where they are written
        there, as kube-apiserver does it, and else when the last item has been taken.
    :param words: as ``Wanted`` has it, and so is ``whole``.
    :param exact: take no short cut.
    :raises ShareError: it isn't a list, or ends early.
    """
    text = b""
    found = None
    for chunk in chunks:
        text += chunk
        found = _ITEMS.search(text)
        if found or len(text) > LONGEST:
            break
    if not found or found.group(1) == b"null":
        about.update(_envelope(text + b"".join(chunks)))
        return
    head, text = text[: found.start()], text[found.end() :]
    # Where the list's fields aren't before its items, they are known at the end.
    with contextlib.suppress(ShareError):
        about.update(_envelope(head + b'"items":[]}'))
    while not exact:
        # First what there is: a short list comes in one piece.
        end = text.rfind(_BETWEEN)
        if end > 0:
            yield from _written_as_usual(text[: end + 1], words, whole)
            text = text[end + 2 :]
        elif len(text) > 4 * 1024 * 1024:
            break
        chunk = next(chunks, b"")
        if not chunk:
            break
        text += chunk
    yield from _to_the_letter(text, chunks, head, about)


def _written_as_usual(text: bytes, words: t.Sequence[bytes], whole: bool) -> list[t.Any]:
    """Items without brackets around them."""
    pieces = text[:-1].split(_BETWEEN)
    if not pieces[0].startswith(_START):
        raise _Odd
    pieces[0] = pieces[0][len(_START) :]
    if words:
        pieces = [piece for piece in pieces if any(word in piece for word in words)]
    if not pieces:
        return []
    for leave_out in (bytes,) if whole else (_shortened, bytes):
        short = b"},".join([_START + leave_out(piece) for piece in pieces])
        try:
            read = t.cast("list[t.Any]", _loads(b"[" + short + b"}]"))
            # Where fields have another order, more than managedFields may be missing now.
            if all(item["metadata"].get("name") for item in read):
                return read
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
    raise _Odd


def _shortened(piece: bytes) -> bytes:
    piece = _without(piece, *_MANAGED)
    for first, last in _LISTS:
        piece = _without(piece, first, last)
    return _without(piece, *_CONDITIONS) if _BOUND in piece else piece


def _without(piece: bytes, first: bytes, last: bytes) -> bytes:
    begin = piece.find(first)
    end = piece.find(last, begin) if begin >= 0 else -1
    return piece[:begin] + piece[end + 2 :] if end >= 0 else piece


def _to_the_letter(text: bytes, chunks: t.Iterator[bytes], head: bytes, about: Json) -> t.Iterator[t.Any]:
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
                raise ShareError("the API server's answer isn't a list of objects, or ends in the middle") from error
            rest += decode(chunk)
            continue
        rest = rest[end:]
        yield item
    tail = (rest[1:] + decode(b"".join(chunks), True)).encode(errors="replace")
    about.update(_envelope(head + b'"items":[]' + tail))


def _envelope(text: bytes) -> Json:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShareError("the API server's answer isn't JSON, or ends in the middle") from error
    if not isinstance(answer, dict):
        raise ShareError("the API server's answer isn't a list of objects")
    return answer
