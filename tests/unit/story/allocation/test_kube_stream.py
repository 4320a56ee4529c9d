# SPDX-License-Identifier: GPL-3.0-or-later
"""Lists that come in pieces: as kube-apiserver writes them, as others do, cut anywhere, expired, and broken."""

from __future__ import annotations

import collections
import contextlib
import json
import threading
import tracemalloc

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _kube_stream as stream
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Expired
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


def pieces(text, size):
    return (text[at : at + size] for at in range(0, len(text), size))


def without_managed_fields(items):
    return [{**one, "metadata": {k: v for k, v in one["metadata"].items() if k != "managedFields"}} for one in items]


class Cluster:
    """Hands answers over in pieces; an answer may be an error."""

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
        yield from pieces(answer, self.size)


def listed(cluster, keep, *rest, **more):
    (found,) = stream.listed(cluster, stream.Wanted("Pod", keep, *rest, **more))
    return found


def names(item):
    return [item["metadata"]["name"]]


# --------------------------------------------------------------------------- one page


@given(st.lists(st.text(max_size=8), max_size=9), st.integers(1, 400), st.booleans())
def test_every_item_comes_out_wherever_the_text_is_cut(texts, size, exact):
    wanted = [pod(f"p{at}é", text) for at, text in enumerate(texts)]
    about = {}
    found = list(stream.items(pieces(written(wanted), size), about, exact=exact))
    assert without_managed_fields(found) == without_managed_fields(wanted)
    assert about["metadata"] == {"resourceVersion": "7"}


@given(st.integers(1, 400), st.sampled_from([{"indent": 1}, {}, {"sort_keys": True}]))
def test_another_server_may_write_it_differently(size, style):
    wanted = [pod("a"), pod("b"), {"metadata": {"name": "c", "ownerReferences": [{"kind": "x"}]}, "spec": {}}]
    about = {}
    assert list(stream.items(pieces(written(wanted, "token", style), size), about)) == wanted
    assert about["metadata"]["continue"] == "token"


def test_managed_fields_are_dropped_before_anything_is_read_of_them():
    text = written([pod("a"), pod("b"), pod("c")])
    found = list(stream.items(pieces(text, 50), {}))
    # The last one is read to the letter.
    assert ["managedFields" in one["metadata"] for one in found] == [False, False, True]


@pytest.mark.parametrize("size", [50, 100000])
def test_nothing_is_dropped_where_all_of_it_is_wanted(size):
    wanted = [{**pod(name), "status": {"images": [{"names": ["x"]}], "conditions": [{"type": "a"}]}} for name in "abc"]
    assert list(stream.items(pieces(written(wanted), size), {}, whole=True)) == wanted
    assert listed(Cluster(written(wanted), size=size), lambda item: [item], whole=True) == wanted


def test_what_is_long_and_of_no_use_is_dropped_too():
    images = [{"names": [f"x/{at}", "y]}"], "sizeBytes": at} for at in range(3)]
    made = [{"metadata": {"name": name}, "status": {"a": 1, "images": images, "b": [{}]}} for name in "abc"]
    found = list(stream.items(pieces(written(made), 50), {}))
    assert [one["status"] for one in found[:2]] == [{"a": 1, "b": [{}]}] * 2
    assert found[2] == made[2]


def container(*values):
    env = [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}, *({"name": "V", "value": v} for v in values)]
    return {"name": "main", "env": env, "resources": {"limits": {"aliyun.com/gpu-mem": "2"}}}


@pytest.mark.parametrize("bound", [True, False])
def test_nothing_that_is_asked_for_is_dropped(bound):
    where = {"nodeName": "n1"} if bound else {}
    conditions = [{"type": "PodScheduled", "status": "False", "message": "no [{card}]"}]
    spec = {"containers": [container("x")], **where, "tolerations": [{"key": "a"}], "last": 1}
    made = [
        {"metadata": {"name": name}, "spec": spec, "status": {"phase": "P", "conditions": conditions, "z": 1}}
        for name in "ab"
    ]
    conditions[0]["message"] = "no card"
    first = next(stream.items(pieces(written(made), 50), {}))
    kept = {key: value for key, value in made[0]["spec"]["containers"][0].items() if key != "env"}
    assert first["spec"] == {"containers": [kept], **where, "last": 1}
    assert first["status"] == {"phase": "P", **({} if bound else {"conditions": conditions}), "z": 1}


@given(st.lists(st.text(alphabet='}]{[",:\\ae', max_size=12), min_size=1, max_size=3), st.integers(20, 300))
def test_strings_that_look_like_the_end_of_a_list_lose_nothing(values, size):
    made = [{"metadata": {"name": name}, "spec": {"containers": [container(*values)], "x": values}} for name in "abc"]
    for one in stream.items(pieces(written(made), size), {}):
        (found,) = one["spec"]["containers"]
        assert found["resources"] == {"limits": {"aliyun.com/gpu-mem": "2"}}
        assert found.get("env", made[0]["spec"]["containers"][0]["env"]) == made[0]["spec"]["containers"][0]["env"]
        assert one["spec"]["x"] == values


def test_items_without_the_words_are_left_out_unread():
    wanted = [pod("a"), pod("b", "gpu-mem"), pod("c"), pod("d", "hami.io"), pod("e")]
    found = list(stream.items(pieces(written(wanted), 100), {}, (b"gpu-mem", b"hami.io")))
    # The last one may be there or not: who asks looks for himself.
    assert [one["metadata"]["name"] for one in found] == ["b", "d", "e"]


@pytest.mark.parametrize("items", [None, []])
def test_an_empty_list(items):
    about = {}
    assert list(stream.items(pieces(written(items), 7), about)) == []
    assert about["metadata"] == {"resourceVersion": "7"}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>hello",
        b"[]",
        b"null",
        b'"items":[',
        b'{"items":[{"metadata":{"name":"a"',
        b'{"items":[{"metadata":{"name":"a"}}',
        b'{"items":[{"metadata":{"name":"a"}}]',
        b'{"items":[{"metadata":{"name":"a"}}]]',
        b'{"items":[' + b"[" * 200000,
        b'{"items":[' + b'{"metadata":{"name":"a"}},' * 20 + b'{"metadata":{"',
        b"[" * 200000,
    ],
)
@pytest.mark.parametrize("size", [13, 1000000])
def test_what_isnt_a_list_is_one_sentence(text, size):
    with pytest.raises(ShareError) as error:
        list(stream.items(pieces(text, size), {}))
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


@given(st.binary(max_size=200), st.integers(1, 50))
def test_nonsense_is_never_a_traceback(noise, size):
    for text in (noise, b'{"items":[' + noise, b'{"items":[{"metadata":{"name":"a"}},{"metadata":{"' + noise):
        with contextlib.suppress(ShareError, stream._Odd):
            list(stream.items(pieces(text, size), {}))


def test_an_item_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(stream, "LONGEST", 5000)

    def endless():
        yield b'{"items":[{"metadata":{"name":"'
        while True:
            yield b"x" * 1000

    with pytest.raises(ShareError):
        list(stream.items(endless(), {}, exact=True))


# --------------------------------------------------------------------------- all pages


def test_pages_follow_each_other_and_the_selector_is_sent():
    cluster = Cluster(written([pod("a")], "two"), written([pod("b"), pod("c")], "three"), written([]))
    assert listed(cluster, names, "status.phase!=Failed") == ["a", "b", "c"]
    first = {"limit": str(stream.PAGE), "fieldSelector": "status.phase!=Failed"}
    assert cluster.queries == [first, {**first, "continue": "two"}, {**first, "continue": "three"}]


def test_the_next_page_is_asked_for_while_one_is_read():
    asked = threading.Event()

    class Watched(Cluster):
        def chunks(self, api_version, kind, query, size):
            if dict(query).get("continue"):
                asked.set()
            yield from super().chunks(api_version, kind, query, size)

    def keep(item):
        assert item["metadata"]["name"] == "a" or asked.wait(10)
        return names(item)

    cluster = Watched(written([pod("a"), pod("b"), pod("c")], "two"), written([pod("d")]))
    assert listed(cluster, keep) == ["a", "b", "c", "d"]


def test_the_first_pages_of_all_lists_are_asked_for_at_once():
    asked = threading.Event()

    class Both(Cluster):
        def chunks(self, api_version, kind, query, size):
            if kind == "Pod":
                asked.set()
            yield from super().chunks(api_version, kind, query, size)

    def keep(item):
        assert asked.wait(10)
        return names(item)

    cluster = Both(written([pod("n1"), pod("n2")]), written([pod("a")]))
    wanted = stream.Wanted("Node", keep), stream.Wanted("Pod", names, "f")
    assert stream.listed(cluster, *wanted) == [["n1", "n2"], ["a"]]
    assert cluster.requests == {"GET": 2}


def test_of_two_lists_only_the_one_that_expired_is_begun_again():
    gone = Expired("gone (410)")
    # The other list is asked for before the page that is gone.
    cluster = Cluster(written([pod("n")], "two"), written([pod("a")]), gone, written([pod("n"), pod("m")]))
    wanted = stream.Wanted("Node", names), stream.Wanted("Pod", names)
    assert stream.listed(cluster, *wanted) == [["n", "m"], ["a"]]
    assert cluster.requests == {"GET": 4}


@pytest.mark.parametrize("size", [60, 100000])
def test_all_answers_are_closed_where_one_cant_be_read(size):
    closed = []

    class Watched(Cluster):
        def chunks(self, *arguments):
            number = self.requests["GET"]
            try:
                yield from super().chunks(*arguments)
            finally:
                closed.append(number)

    broken = written([pod("a"), pod("b")], "two")[:-20]
    cluster = Watched(broken, written([pod("c")]), size=size)
    with pytest.raises(ShareError, match="ends in the middle"):
        listed(cluster, names)
    assert sorted(closed) == list(range(cluster.requests["GET"]))


def test_a_list_that_expired_is_begun_again_once():
    gone = Expired("gone (410)")
    cluster = Cluster(written([pod("a")], "two"), gone, written([pod("a"), pod("b")]))
    assert listed(cluster, names) == ["a", "b"]
    cluster = Cluster(written([pod("a")], "two"), gone, written([pod("a")], "two"), gone)
    with pytest.raises(ShareError, match="the list of Pods expired twice"):
        listed(cluster, names)
    assert cluster.requests == {"GET": 4}


def test_items_in_an_order_that_the_short_cut_doesnt_know_are_read_whole():
    def odd(name):
        # managedFields first, and owners last: cut out, the name would be missing.
        metadata = {"annotations": {}, "managedFields": MANAGED, "name": name, "ownerReferences": [{"kind": "x"}]}
        return {"metadata": metadata, "spec": {}}

    cluster = Cluster(written([odd("a"), odd("b"), odd("c")]))
    assert listed(cluster, names) == ["a", "b", "c"]
    assert cluster.requests == {"GET": 1}


def test_lists_inside_of_items_that_look_like_items_are_read_to_the_letter():
    nested = {"metadata": {"name": "a"}, "spec": {"parts": [{"metadata": {"name": "x"}}, {"metadata": {"name": "y"}}]}}
    text = written([nested, pod("b")])
    cluster = Cluster(text, text, size=20)
    assert listed(cluster, names) == ["a", "b"]
    assert cluster.requests == {"GET": 2}


def test_a_cluster_that_hands_out_whole_lists_is_served_too():
    class Whole:
        def __init__(self):
            self.requests = collections.Counter()

        def list_all(self, api_version, kind, namespace="", field_selector="", label_selector=""):
            assert (api_version, kind, field_selector) == ("v1", "Pod", "f")
            return [pod("a"), pod("b")]

    assert listed(Whole(), names, "f") == ["a", "b"]


def test_without_a_faster_library_it_is_the_same(monkeypatch):
    text = written([pod("a", "\N{GRINNING FACE}"), pod("b", "NaN"), pod("c")])
    monkeypatch.setattr(stream, "_loads", json.loads)
    assert listed(Cluster(text), names) == ["a", "b", "c"]


def test_only_a_piece_and_what_is_kept_is_in_memory():
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
    # 26 MB have gone through.
    assert most < 3e6
