# SPDX-License-Identifier: GPL-3.0-or-later
"""A kubeconfig with a token that expires: when the token is renewed, and that other clients' files stay."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._kube import service_account
from hypothesis import given
from hypothesis import strategies as st

ADMIN = "apiVersion: v1\nkind: Config\nclusters: []\n"


def token(uid="u-1", hours=24.0, issued=None):
    now = int(time.time())
    claims = {"iat": issued or now, "exp": now + int(hours * 3600), "kubernetes.io": {"serviceaccount": {"uid": uid}}}
    text = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"h.{text}.s"


class Accounts:
    """An API server that issues tokens of at most ``longest`` hours."""

    def __init__(self, uid="u-1", server="https://a:6443", longest=10000, **trust):
        self._uid, self._connection, self._longest, self.requested = uid, {"server": server, **trust}, longest, []

    def uid(self, namespace, name):
        return self._uid

    def token(self, namespace, name, seconds):
        self.requested.append(seconds // 3600)
        return token(self._uid, min(seconds / 3600, self._longest))

    def connection(self):
        return dict(self._connection)


def no_cluster():
    raise AssertionError("no request to the cluster was expected")


@pytest.fixture
def params(tmp_path):
    path = str(tmp_path / "new" / "kubeconfig")
    return {"path": path, "name": "r", "namespace": "s", "hours": 24, "state": "present"}


def ensure(params, accounts=None, check=False, **more):
    accounts = accounts or Accounts()
    return service_account.ensure(lambda: accounts, RealSystem(), {**params, **more}, check)


def read(params):
    return json.loads(Path(params["path"]).read_text())


def test_a_second_run_keeps_the_kubeconfig(params, tmp_path):
    assert ensure(params, check=True)["changed"] and not (tmp_path / "new").exists()
    done = ensure(params)
    assert done["changed"] and done["expires"].endswith("Z") and "h." not in json.dumps(done)
    written = read(params)
    assert written["clusters"][0]["cluster"] == {"server": "https://a:6443"}
    assert written["users"][0]["user"]["token"].startswith("h.")
    assert (tmp_path / "new" / "kubeconfig").stat().st_mode & 0o777 == 0o600
    accounts = Accounts()
    again = ensure(params, accounts)
    assert not again["changed"] and accounts.requested == [] and again["expires"] == done["expires"]
    assert not ensure(params, hours=2)["changed"], "a shorter time needs no new token"


@pytest.mark.parametrize(
    ("more", "accounts"),
    [
        pytest.param({"hours": 49}, Accounts(), id="less than half of the requested time is left"),
        pytest.param({}, Accounts(uid="u-2"), id="the account was recreated"),
        pytest.param({"name": "other"}, Accounts(), id="another account"),
        pytest.param({}, Accounts(server="https://b:6443"), id="another address"),
        pytest.param({}, Accounts(**{"insecure-skip-tls-verify": True}), id="another certificate"),
    ],
)
def test_an_outdated_kubeconfig_is_replaced(params, more, accounts):
    ensure(params)
    before = read(params)
    assert ensure(params, accounts, **more)["changed"] and read(params) != before
    assert not ensure(params, accounts, **more)["changed"]


def test_an_api_server_that_issues_shorter_tokens_causes_no_change(params):
    accounts = Accounts(longest=24)

    def changed(hours):
        return ensure(params, accounts, hours=hours)["changed"]

    assert [changed(720), changed(720), changed(720)] == [True, False, False]
    assert [changed(1), changed(700), changed(700)] == [False, True, False]
    assert accounts.requested == [720, 700]
    # Half of the issued time is over.
    document = read(params)
    document["users"][0]["user"]["token"] = token(hours=1, issued=1)
    Path(params["path"]).write_text(json.dumps(document))
    assert changed(700)


def test_the_certificate_authority_is_in_the_file(params, tmp_path):
    authority = tmp_path / "ca.crt"
    authority.write_text("CA\n")
    ensure(params, Accounts(**{"certificate-authority": str(authority), "proxy-url": "http://p"}))
    data = base64.b64encode(b"CA\n").decode()
    cluster = {"server": "https://a:6443", "proxy-url": "http://p", "certificate-authority-data": data}
    assert read(params)["clusters"][0]["cluster"] == cluster
    with pytest.raises(ShareError, match="doesn't exist"):
        ensure(params, Accounts(**{"certificate-authority": str(tmp_path / "gone")}))


def test_removal_needs_no_request_to_the_cluster(params):
    ensure(params)
    for changed in (True, False):
        done = service_account.ensure(no_cluster, RealSystem(), {**params, "state": "absent"}, False)
        assert done["changed"] is changed
    ensure(params)
    done = service_account.ensure(no_cluster, RealSystem(), {**params, "state": "absent"}, True)
    assert done["changed"] and read(params)


@pytest.mark.parametrize("state", ["present", "absent"])
@pytest.mark.parametrize("text", [ADMIN, "", "{}", "[]", "null", '{"clusters": [], "users": []}', "\0"])
def test_another_clients_file_is_kept(params, tmp_path, state, text):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "kubeconfig").write_text(text)
    with pytest.raises(BadInput, match="isn't a kubeconfig that this module wrote"):
        ensure(params, state=state)
    assert (tmp_path / "new" / "kubeconfig").read_text() == text


def test_invalid_options_are_refused(params, tmp_path):
    for hours in (0, -1, 10**9):
        with pytest.raises(BadInput, match="hours"):
            ensure(params, hours=hours)
    with pytest.raises(BadInput, match="service account s/r doesn't exist"):
        ensure(params, Accounts(uid=""))
    (tmp_path / "new" / "kubeconfig").mkdir(parents=True)
    with pytest.raises(BadInput, match="isn't a file"):
        ensure(params)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(json_values, json_values)
def test_no_token_raises(value, account):
    for claims in (value, {"exp": value, "kubernetes.io": account}, {"kubernetes.io": {"serviceaccount": account}}):
        text = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode()
        for one in (value, f"h.{text}.s", f"h.{text.rstrip('=')}.s", f"{value}.{value}.{value}"):
            assert isinstance(service_account.account_uid(one), str)
            assert isinstance(service_account.timestamp(service_account.expiry(one)), str)


@given(json_values)
def test_any_file_is_ours_or_refused(value):
    ours = {"current-context": service_account.MARK, "clusters": [{"cluster": {}}]}
    ours["users"] = [{"name": "a", "user": value}]
    for document in (value, ours, {**ours, "clusters": value}, {**ours, "users": value}, {**ours, "users": [value]}):
        try:
            found = service_account.read(json.dumps(document), "/p")
        except BadInput:
            continue
        assert found is not None and isinstance(found.user, str)
