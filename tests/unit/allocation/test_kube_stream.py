# SPDX-License-Identifier: GPL-3.0-or-later
"""Lists in chunks: as kube-apiserver and other servers write them, cut anywhere, expired, and malformed."""

from __future__ import annotations

import collections
import contextlib
import json
import threading
import tracemalloc

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import stream
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError
from hypothesis import given
from hypothesis import strategies as st

MANAGED = [{"manager": "kubelet", "fieldsV1": {"f:spec": {'k:{"name":"},"spec":{"}': {}}, "f:status": {}}}]


def pod(name, words="", managed=True):
    fields = {"managedFields": MANAGED} if managed else {}
    return {
        "metadata": {"name": name, "annotations": {"a": words, "b": '}]},"spec":{ },{"metadata":{"'}, **fields},
        "spec": {"containers": [{"name": "main"}]},
        "status": {"phase": "Running"},
    }


def written(items, more="", style=None):
    """The text of a list, as kube-apiserver writes it or in another style."""
    metadata = {"resourceVersion": "7", **({"continue": more} if more else {})}
    whole = {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items}
    text = json.dumps(whole, separators=(",", ":"), ensure_ascii=False) if style is None else json.dumps(whole, **style)
    return text.encode() + b"\n"


def chunks_of(text, size):
    return (text[at : at + size] for at in range(0, len(text), size))


def without_managed_fields(items):
    return [{**item, "metadata": {k: v for k, v in item["metadata"].items() if k != "managedFields"}} for item in items]


class Cluster:
    """Yields responses in chunks; a response that is an exception is raised."""

    def __init__(self, *answers, size=100):
        self.requests = collections.Counter()
        self.queries, self.answers, self.size = [], list(answers), size

    def chunks(self, api_version, kind, query, size):
        assert api_version == "v1"
        self.requests["GET"] += 1
        self.queries.append(dict(query))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        yield from chunks_of(answer, self.size)


def listed(cluster, keep, *rest, **more):
    (found,) = stream.listed(cluster, stream.Wanted("Pod", keep, *rest, **more))
    return found


def names(item):
    return [item["metadata"]["name"]]


# --------------------------------------------------------------------------- one page


@given(st.lists(st.text(max_size=8), max_size=9), st.integers(1, 400), st.booleans())
def test_every_item_is_returned_with_any_chunk_size(texts, size, exact):
    wanted = [pod(f"p{at}é", text) for at, text in enumerate(texts)]
    about = {}
    found = list(stream.items(chunks_of(written(wanted), size), about, exact=exact))
    assert without_managed_fields(found) == without_managed_fields(wanted)
    assert about["metadata"] == {"resourceVersion": "7"}


@given(st.integers(1, 400), st.sampled_from([{"indent": 1}, {}, {"sort_keys": True}]))
def test_other_json_styles_are_accepted(size, style):
    wanted = [pod("a"), pod("b"), {"metadata": {"name": "c", "ownerReferences": [{"kind": "x"}]}, "spec": {}}]
    about = {}
    assert list(stream.items(chunks_of(written(wanted, "token", style), size), about)) == wanted
    assert about["metadata"]["continue"] == "token"


@pytest.mark.parametrize("size", [50, 100000])
def test_option_whole_drops_nothing(size):
    wanted = [{**pod(name), "status": {"images": [{"names": ["x"]}], "conditions": [{"type": "a"}]}} for name in "abc"]
    assert list(stream.items(chunks_of(written(wanted), size), {}, whole=True)) == wanted
    assert listed(Cluster(written(wanted), size=size), lambda item: [item], whole=True) == wanted


def container(*values):
    env = [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}, *({"name": "V", "value": v} for v in values)]
    return {"name": "main", "env": env, "resources": {"limits": {"aliyun.com/gpu-mem": "2"}}}


@pytest.mark.parametrize("bound", [True, False])
def test_long_fields_without_use_are_dropped_before_they_are_parsed(bound):
    where = {"nodeName": "n1"} if bound else {}
    conditions = {"conditions": [{"type": "PodScheduled", "status": "False", "message": "no card"}]}
    images = [{"names": [f"x/{at}", "y]}"], "sizeBytes": at} for at in range(3)]
    spec = {"containers": [container("x")], **where, "tolerations": [{"key": "a"}], "last": 1}
    status = {"phase": "P", **conditions, "images": images, "z": [{}]}
    made = [{**pod(name), "spec": spec, "status": status} for name in "abc"]
    first, second, last = stream.items(chunks_of(written(made), 50), {})
    kept = {key: value for key, value in spec["containers"][0].items() if key != "env"}
    for one in (first, second):
        assert "managedFields" not in one["metadata"]
        assert one["spec"] == {"containers": [kept], **where, "last": 1}
        assert one["status"] == {"phase": "P", **({} if bound else conditions), "z": [{}]}
    # The last item is parsed completely.
    assert last == made[2]


def test_equal_containers_are_parsed_once_and_others_stay_apart(monkeypatch):
    monkeypatch.setattr(stream, "MOST_SHARED", 2)

    def of(name, image):
        spec = {"containers": [{"name": "main", "image": image, "env": [{"name": name}]}], "restartPolicy": "Always"}
        return {"metadata": {"name": name}, "spec": spec}

    # More different lists than are kept, each for two pods in turn.
    made = [of(f"p{at}", f"image-{at % 5}") for at in range(30)]
    for size in (50, 700, 100000):
        found = list(stream.items(chunks_of(written([*made, pod("last")]), size), {}))[:-1]
        assert [one["spec"]["containers"][0]["image"] for one in found] == [f"image-{at % 5}" for at in range(30)]
    first, *_rest = found
    assert first["spec"]["containers"] is found[5]["spec"]["containers"]
    # A number in place of the containers is the item's own.
    odd = [{"metadata": {"name": "a"}, "spec": {"containers": 0}}, of("b", "x"), of("c", "x")]
    assert next(stream.items(chunks_of(written(odd), 100000), {}))["spec"]["containers"] == 0


@given(st.lists(st.text(alphabet='}]{[",:\\ae', max_size=12), min_size=1, max_size=3), st.integers(20, 300))
def test_brackets_in_strings_end_no_list(values, size):
    made = [{"metadata": {"name": name}, "spec": {"containers": [container(*values)], "x": values}} for name in "abc"]
    for one in stream.items(chunks_of(written(made), size), {}):
        (found,) = one["spec"]["containers"]
        assert found["resources"] == {"limits": {"aliyun.com/gpu-mem": "2"}}
        assert found.get("env", made[0]["spec"]["containers"][0]["env"]) == made[0]["spec"]["containers"][0]["env"]
        assert one["spec"]["x"] == values


def test_items_without_the_given_texts_are_skipped():
    wanted = [pod("a"), pod("b", "gpu-mem"), pod("c"), pod("d", "hami.io"), pod("e")]
    found = list(stream.items(chunks_of(written(wanted), 100), {}, (b"gpu-mem", b"hami.io")))
    # The last item may be returned too: callers filter again.
    assert [one["metadata"]["name"] for one in found] == ["b", "d", "e"]


@pytest.mark.parametrize("items", [None, []])
def test_an_empty_list(items):
    about = {}
    assert list(stream.items(chunks_of(written(items), 7), about)) == []
    assert about["metadata"] == {"resourceVersion": "7"}


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"<html>hello", b"[]", b"null", b'"items":[', b"[" * 200000),
        *(b'{"items":[{"metadata":{"name":"a"' + more for more in (b"", b"}}", b"}}]", b"}}]]")),
        b'{"items":[' + b"[" * 200000,
        b'{"items":[' + b'{"metadata":{"name":"a"}},' * 20 + b'{"metadata":{"',
    ],
)
@pytest.mark.parametrize("size", [13, 1000000])
def test_a_malformed_list_is_an_error_of_one_line(text, size):
    with pytest.raises(ShareError) as error:
        list(stream.items(chunks_of(text, size), {}))
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


@given(st.binary(max_size=200), st.integers(1, 50))
def test_malformed_responses_raise_no_other_error(noise, size):
    for text in (noise, b'{"items":[' + noise, b'{"items":[{"metadata":{"name":"a"}},{"metadata":{"' + noise):
        with contextlib.suppress(ShareError, stream._Odd):
            list(stream.items(chunks_of(text, size), {}))


def test_an_endless_item_is_an_error(monkeypatch):
    monkeypatch.setattr(stream, "LONGEST", 5000)

    def endless():
        yield b'{"items":[{"metadata":{"name":"'
        while True:
            yield b"x" * 1000

    with pytest.raises(ShareError):
        list(stream.items(endless(), {}, exact=True))


# --------------------------------------------------------------------------- all pages


def test_every_page_is_requested_with_the_selector():
    cluster = Cluster(written([pod("a")], "two"), written([pod("b"), pod("c")], "three"), written([]))
    assert listed(cluster, names, "status.phase!=Failed") == ["a", "b", "c"]
    first = {"limit": str(stream.PAGE), "fieldSelector": "status.phase!=Failed"}
    assert cluster.queries == [first, {**first, "continue": "two"}, {**first, "continue": "three"}]


class Watched(Cluster):
    """Sets ``requested`` when a matching request is made."""

    def __init__(self, *answers, when):
        super().__init__(*answers)
        self.when, self.requested = when, threading.Event()

    def chunks(self, api_version, kind, query, size):
        if self.when(kind, dict(query)):
            self.requested.set()
        yield from super().chunks(api_version, kind, query, size)


def test_the_next_page_is_requested_while_one_is_parsed():
    def keep(item):
        assert item["metadata"]["name"] == "a" or cluster.requested.wait(10)
        return names(item)

    pages = written([pod("a"), pod("b"), pod("c")], "two"), written([pod("d")])
    cluster = Watched(*pages, when=lambda _kind, query: query.get("continue"))
    assert listed(cluster, keep) == ["a", "b", "c", "d"]


def test_the_first_pages_of_all_lists_are_requested_at_once():
    def keep(item):
        assert cluster.requested.wait(10)
        return names(item)

    lists = written([pod("n1"), pod("n2")]), written([pod("a")])
    cluster = Watched(*lists, when=lambda kind, _query: kind == "Pod")
    wanted = stream.Wanted("Node", keep), stream.Wanted("Pod", names, "f")
    assert stream.listed(cluster, *wanted) == [["n1", "n2"], ["a"]]
    assert cluster.requests == {"GET": 2}


def test_only_the_expired_one_of_two_lists_is_requested_again():
    gone = KubeError("gone", 410)
    # The other list is requested before the expired page.
    cluster = Cluster(written([pod("n")], "two"), written([pod("a")]), gone, written([pod("n"), pod("m")]))
    wanted = stream.Wanted("Node", names), stream.Wanted("Pod", names)
    assert stream.listed(cluster, *wanted) == [["n", "m"], ["a"]]
    assert cluster.requests == {"GET": 4}


@pytest.mark.parametrize("size", [60, 100000])
def test_all_responses_are_closed_after_an_error(size):
    closed = []

    class Closing(Cluster):
        def chunks(self, *arguments):
            number = self.requests["GET"]
            try:
                yield from super().chunks(*arguments)
            finally:
                closed.append(number)

    broken = written([pod("a"), pod("b")], "two")[:-20]
    cluster = Closing(broken, written([pod("c")]), size=size)
    with pytest.raises(ShareError, match="is incomplete"):
        listed(cluster, names)
    assert sorted(closed) == list(range(cluster.requests["GET"]))


def test_items_with_another_order_of_fields_are_parsed_completely():
    def odd(name):
        # managedFields first, and owners last: cut out, the name would be missing.
        metadata = {"annotations": {}, "managedFields": MANAGED, "name": name, "ownerReferences": [{"kind": "x"}]}
        return {"metadata": metadata, "spec": {}}

    cluster = Cluster(written([odd("a"), odd("b"), odd("c")]))
    assert listed(cluster, names) == ["a", "b", "c"]
    assert cluster.requests == {"GET": 1}


def test_nested_lists_of_objects_are_parsed_completely():
    nested = {"metadata": {"name": "a"}, "spec": {"parts": [{"metadata": {"name": "x"}}, {"metadata": {"name": "y"}}]}}
    text = written([nested, pod("b")])
    cluster = Cluster(text, text, size=20)
    assert listed(cluster, names) == ["a", "b"]
    assert cluster.requests == {"GET": 2}


def test_the_standard_librarys_parser_gives_the_same(monkeypatch):
    text = written([pod("a", "\N{GRINNING FACE}"), pod("b", "NaN"), pod("c")])
    monkeypatch.setattr(stream, "_loads", json.loads)
    assert listed(Cluster(text), names) == ["a", "b", "c"]


def test_memory_is_independent_of_the_lists_size():
    big = pod("p", "x" * 4000)
    text = written([big] * 3)
    between = text.index(b'},{"metadata"')
    one = text[text.index(b'{"metadata":{"name"') : between + 2]
    head = text[: text.index(b'{"metadata":{"name"')]

    def endless():
        yield head
        for _piece in range(300):
            yield one * 20
        yield json.dumps(big, separators=(",", ":")).encode() + b"]}"

    class Large(Cluster):
        def chunks(self, *_):
            return endless()

    tracemalloc.start()
    found = listed(Large(), lambda item: [len(item)])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 6001
    # The list has 26 MB.
    assert most < 3e6


# --------------------------------------------------------------------------- a server that doesn't page


@pytest.mark.parametrize("style", [None, {"indent": 1, "sort_keys": True}])
def test_a_list_of_a_server_that_does_not_page_is_read_once_more_without_limit(style):
    """As ansible-operator's proxy answers: each time all objects, in any order, and the same token."""
    answers = [written([pod(name) for name in order], "continue-not-supported", style) for order in ("ab", "ba", "ba")]
    cluster = Cluster(*answers)
    assert listed(cluster, names) == ["b", "a"]
    assert [query.get("limit") for query in cluster.queries] == [str(stream.PAGE), str(stream.PAGE), None]


def test_a_list_that_begins_again_with_another_token_is_read_once_more_without_limit():
    cluster = Cluster(*(written([pod("a"), pod("b")], token) for token in ("one", "two", "three", "")))
    assert listed(cluster, names) == ["a", "b"]
    # The page after the repeated one was requested while that one was read.
    assert len(cluster.queries) <= 4 and "limit" not in cluster.queries[-1]
