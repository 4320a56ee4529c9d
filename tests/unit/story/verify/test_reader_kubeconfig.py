# SPDX-License-Identifier: GPL-3.0-or-later
"""A kubeconfig with a token that expires: when a new one is asked for, and whose files are never touched."""

from __future__ import annotations

import base64
import json
import time

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _reader_kubeconfig as room
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._system import RealSystem
from hypothesis import given
from hypothesis import strategies as st

ADMIN = "apiVersion: v1\nkind: Config\nclusters: []\n"


def token(uid="u-1", hours=24.0, **more):
    claims = {"exp": int(time.time() + hours * 3600), "kubernetes.io": {"serviceaccount": {"uid": uid}}, **more}
    text = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"h.{text}.s"


class Accounts:
    def __init__(self, uid="u-1", server="https://a:6443", **trust):
        self._uid, self._connection, self.asked = uid, {"server": server, **trust}, []

    def uid(self, namespace, name):
        return self._uid

    def token(self, namespace, name, seconds):
        self.asked.append(seconds)
        return token(self._uid, seconds / 3600)

    def connection(self):
        return dict(self._connection)


def nobody():
    raise AssertionError("the cluster was asked")


@pytest.fixture
def params(tmp_path):
    path = str(tmp_path / "new" / "reader")
    return {"path": path, "name": "r", "namespace": "s", "hours": 24, "state": "present"}


def bring(params, accounts=None, check=False, **more):
    accounts = accounts or Accounts()
    return room.bring(lambda: accounts, RealSystem(), {**params, **more}, check)


def read(params):
    with open(params["path"]) as file:
        return json.load(file)


def test_it_is_written_once(params, tmp_path):
    assert bring(params, check=True)["changed"] and not (tmp_path / "new").exists()
    done = bring(params)
    assert done["changed"] and done["expires"].endswith("Z") and "h." not in json.dumps(done)
    written = read(params)
    assert written["clusters"][0]["cluster"] == {"server": "https://a:6443"}
    assert written["users"][0]["user"]["token"].startswith("h.")
    assert (tmp_path / "new" / "reader").stat().st_mode & 0o777 == 0o600
    accounts = Accounts()
    again = bring(params, accounts)
    assert not again["changed"] and accounts.asked == [] and again["expires"] == done["expires"]


@pytest.mark.parametrize(
    ("more", "accounts"),
    [
        # Less than half of what is asked for is left.
        ({"hours": 49}, Accounts()),
        # The account was made anew, or is another one.
        ({}, Accounts(uid="u-2")),
        ({"name": "other"}, Accounts()),
        # The API server is elsewhere, or shows another certificate.
        ({}, Accounts(server="https://b:6443")),
        ({}, Accounts(**{"insecure-skip-tls-verify": True})),
    ],
    ids=["time", "uid", "name", "server", "trust"],
)
def test_it_is_written_anew_where_it_would_not_do(params, more, accounts):
    bring(params)
    before = read(params)
    assert bring(params, accounts, **more)["changed"] and read(params) != before
    assert not bring(params, accounts, **more)["changed"]


def test_a_shorter_time_needs_no_new_token(params):
    bring(params)
    assert not bring(params, hours=2)["changed"]


def test_the_certificate_authority_is_in_the_file(params, tmp_path):
    authority = tmp_path / "ca.crt"
    authority.write_text("CA\n")
    bring(params, Accounts(**{"certificate-authority": str(authority), "proxy-url": "http://p"}))
    data = base64.b64encode(b"CA\n").decode()
    cluster = {"server": "https://a:6443", "proxy-url": "http://p", "certificate-authority-data": data}
    assert read(params)["clusters"][0]["cluster"] == cluster
    with pytest.raises(ShareError, match="isn't there"):
        bring(params, Accounts(**{"certificate-authority": str(tmp_path / "gone")}))


def test_it_goes_without_asking_the_cluster(params):
    bring(params)
    for changed in (True, False):
        done = room.bring(nobody, RealSystem(), {**params, "state": "absent"}, False)
        assert done["changed"] is changed
    bring(params)
    assert room.bring(nobody, RealSystem(), {**params, "state": "absent"}, True)["changed"] and read(params)


@pytest.mark.parametrize("state", ["present", "absent"])
@pytest.mark.parametrize("text", [ADMIN, "", "{}", "[]", "null", '{"clusters": [], "users": []}', "\0"])
def test_somebody_elses_file_stays(params, tmp_path, state, text):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "reader").write_text(text)
    with pytest.raises(BadInput, match="isn't a kubeconfig that this module has written"):
        bring(params, state=state)
    assert (tmp_path / "new" / "reader").read_text() == text


def test_a_folder_is_no_file(params, tmp_path):
    (tmp_path / "new" / "reader").mkdir(parents=True)
    with pytest.raises(BadInput, match="is no file"):
        bring(params)


@pytest.mark.parametrize("hours", [0, -1, 10**9])
def test_hours_are_sensible(params, hours):
    with pytest.raises(BadInput, match="hours"):
        bring(params, hours=hours)


def test_an_account_that_is_not_there(params):
    with pytest.raises(BadInput, match="no service account s/r"):
        bring(params, Accounts(uid=""))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(json_values, json_values)
def test_any_token_is_survived(value, account):
    for claims in (value, {"exp": value, "kubernetes.io": account}, {"kubernetes.io": {"serviceaccount": account}}):
        text = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode()
        for one in (value, f"h.{text}.s", f"h.{text.rstrip('=')}.s", f"{value}.{value}.{value}"):
            assert isinstance(room.account_uid(one), str)
            assert isinstance(room.said_time(room.ends(one)), str)


@given(json_values)
def test_any_file_is_ours_or_somebody_elses(value):
    ours = {"current-context": room.OURS, "clusters": [{"cluster": {}}], "users": [{"name": "a", "user": value}]}
    for document in (value, ours, {**ours, "clusters": value}, {**ours, "users": value}, {**ours, "users": [value]}):
        try:
            found = room.read(json.dumps(document), "/p")
        except BadInput:
            continue
        assert found is not None and isinstance(found["user"], str)
