# SPDX-License-Identifier: GPL-3.0-or-later
"""An API double that reviews tokens."""

from __future__ import annotations

from typing import Any

from api_double import ApiDouble, JsonObject
from plugin_fakes import FakeKube

# Its user may read the metrics; "another" is the token of a user who may not.
TOKEN = "reader"


class _Reviews(ApiDouble):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.readers = {TOKEN}

    def _post(self, path: str, body: JsonObject) -> JsonObject:
        if path.endswith("/tokenreviews"):
            token = body["spec"]["token"]
            known = token in (TOKEN, "another")
            return {"status": {"authenticated": known, "user": {"username": token, "groups": ["g"]}}}
        if path.endswith("/subjectaccessreviews"):
            spec = body["spec"]
            assert spec["groups"] == ["g"] and spec["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
            return {"status": {"allowed": spec["user"] in self.readers}}
        return super()._post(path, body)


class Reviewer(_Reviews):
    """That of an extender."""


class PluginReviewer(_Reviews, FakeKube):
    """That of a device plugin."""
