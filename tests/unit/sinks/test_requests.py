# SPDX-License-Identifier: GPL-3.0-or-later
"""Names in the paths of the collection's own requests, as an HTTP server gets them."""

from __future__ import annotations

import hostile
import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._kube.direct import Access, DirectKube
from ansible_collections.kubegpu.share.plugins.module_utils._kube.errors import KubeError, refused
from ansible_collections.kubegpu.share.plugins.module_utils._kube.refs import Ref
from kube_api import Api


@pytest.fixture
def api():
    served = Api()
    yield served
    served.close()


def direct(api) -> DirectKube:
    return DirectKube(Access(api.url, {}, None, ""))


def test_a_name_never_leaves_its_place(api) -> None:
    kube = direct(api)
    names = [text for text in hostile.TEXTS if len(text) < 1000]
    for name in (*names, "../../../version", "a/b", "a?dryRun=All", "a#b", "%2e%2e"):
        assert kube.get(Ref("v1", "Pod", "ns", name)) is None
        method, path, _headers, _body = api.received[-1]
        assert (method, path.rpartition("/")[0]) == ("GET", "/api/v1/namespaces/ns/pods") and path.isascii()
        assert not set(path.rpartition("/")[2]) & set("?#& ")


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_without_a_name_nothing_is_requested(api, name: str) -> None:
    """DELETE of a path without a name would delete all objects of the kind."""
    kube = direct(api)
    ref = Ref("v1", "Pod", "ns", name)
    for act in (
        lambda: kube.get(ref),
        lambda: kube.delete(ref),
        lambda: kube.patch(ref, {}),
        lambda: kube.evict("ns", name),
        lambda: kube.log("ns", name, "c", 1),
        lambda: kube.get(Ref("v1", "Pod", name or "..", "p")),
    ):
        with pytest.raises(BadInput):
            act()
    assert not api.received


@pytest.mark.parametrize("text", hostile.TEXTS, ids=lambda one: ascii(one)[:30])
def test_the_words_of_the_api_are_one_printable_line(text: str) -> None:
    error = refused(403, text, '{"message": "x", "reason": "y"}', "https://x", "Pod a")
    assert isinstance(error, KubeError)
    error = refused(500, text, "no json", "https://x", "Pod a")
    assert not hostile.FORBIDDEN.search(str(error)) and "\n" not in str(error)
