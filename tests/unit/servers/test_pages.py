# SPDX-License-Identifier: GPL-3.0-or-later
"""Lists in pages from a server that doesn't page: the servers refuse it instead of asking for ever."""

from __future__ import annotations

import pytest
from gpushare.api.client import KubeError, Pages


class Answer(list):
    def __init__(self, names, more):
        super().__init__({"metadata": {"name": name}} for name in names)
        self.version, self.more, self.size = "7", more, 100


class Server:
    def __init__(self, *answers):
        self.answers, self.asked = list(answers), 0

    def listing(self, _path):
        self.asked += 1
        return self.answers[min(self.asked, len(self.answers)) - 1]


@pytest.mark.parametrize(
    "answers",
    [
        [Answer("ab", "continue-not-supported"), Answer("ba", "continue-not-supported")],
        [Answer("ab", "one"), Answer("ab", "two")],
        [Answer("ab", "one"), Answer("", "one")],
    ],
)
def test_a_server_that_does_not_page_is_refused_and_no_object_comes_twice(answers):
    server, found = Server(*answers), []
    with pytest.raises(KubeError) as failure:
        for page in Pages(server, "/api/v1/pods"):
            found.append(page["metadata"]["name"])
    assert failure.value.reason == "NotPaged" and server.asked == 2 and found == ["a", "b"]


def test_pages_without_objects_are_followed():
    server = Server(Answer("", "one"), Answer("a", "two"), Answer("", "three"), Answer("b", ""))
    assert [page["metadata"]["name"] for page in Pages(server, "/api/v1/pods")] == ["a", "b"]
