# SPDX-License-Identifier: GPL-3.0-or-later
"""Certificates of a remote extender: created once, kept, renewed, and used for a real connection."""

from __future__ import annotations

import base64
import datetime
import http.client
import ssl

import pytest
from ansible_collections.kubegpu.share.plugins.filter.scheduler import FilterModule
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import certificates as subject
from gpushare.http.server import Endpoint
from gpushare.http.service import Service, text
from gpushare.http.tls import Tls

NAME = "gpushare-extender.gpushare-system.svc"
NAMES = (NAME, f"{NAME}.cluster.local")
NOW = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)


def fitting(secrets=(), names=NAMES, now=NOW):
    return subject.fitting(list(secrets), names, now)


def secret(name, side):
    data = {key: base64.b64encode(side[part].encode()).decode() for part, key in subject.PARTS.items()}
    return {"metadata": {"name": name}, "data": data}


def kept(made, **changed):
    """The two Secrets as the cluster has them."""
    sides = {"server": made["server"], "client": made["client"], **changed}
    return [secret(subject.SERVER, sides["server"]), secret(subject.CLIENT, sides["client"])]


@pytest.fixture(scope="module")
def made():
    return fitting()


@pytest.fixture(scope="module")
def foreign(made):
    """Certificates of another authority, which differ only in the issuer's name."""
    before, subject.AUTHORITY = subject.AUTHORITY, "somebody's authority"
    try:
        return fitting()
    finally:
        subject.AUTHORITY = before


def test_valid_certificates_are_kept(made):
    assert made["ours"] is True
    again = fitting(kept(made))
    assert again == made
    assert fitting(kept(made), now=NOW + datetime.timedelta(days=subject.DAYS - subject.RENEW_DAYS - 1)) == made


@pytest.mark.parametrize(
    ("change", "given"),
    [
        ({}, {"now": NOW + datetime.timedelta(days=subject.DAYS - subject.RENEW_DAYS + 1)}),
        ({}, {"now": NOW - datetime.timedelta(days=1)}),
        ({}, {"names": [*NAMES, "gpushare-extender.other.svc"]}),
        ({"lose": subject.CLIENT}, {}),
        ({"lose": subject.SERVER}, {}),
        ({"mix": "server"}, {}),
        ({"mix": "client"}, {}),
        ({"empty": True}, {}),
    ],
    ids=str,
)
def test_our_unfit_certificates_are_recreated(made, change, given):
    other = fitting()
    secrets = kept(made, **{side: other[side] for side in [change.get("mix")] if side})
    secrets = [secret for secret in secrets if secret["metadata"]["name"] != change.get("lose")]
    if "empty" in change:
        secrets[0]["data"] = {}
    new = fitting(secrets, **given)
    assert new["server"] not in (made["server"], other["server"]) and new["ours"]
    assert fitting(kept(new), **given) == new


def test_foreign_certificates_used_until_expiry(made, foreign):
    late = NOW + datetime.timedelta(days=subject.DAYS - 1)
    assert fitting(kept(foreign)) == fitting(kept(foreign), now=late) == {**foreign, "ours": False}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"now": NOW + datetime.timedelta(days=subject.DAYS + 1)}, "gpushare-extender-tls: its certificate is valid"),
        ({"names": ["other.svc"]}, "gpushare-extender-tls: its certificate isn't for other.svc"),
        ({"key": True}, "gpushare-extender-client: tls.key isn't the key of tls.crt"),
        ({"authority": True}, "gpushare-extender-tls: its certificate isn't signed by"),
        ({"text": True}, "gpushare-extender-tls: it, or the ca.crt of the other one, has no readable certificate"),
        ({"lose": True}, "gpushare-extender-client: it doesn't exist"),
    ],
    ids=str,
)
def test_unfit_foreign_certificates_refused(foreign, made, change, message):
    server, client = dict(foreign["server"]), dict(foreign["client"])
    if "key" in change:
        client["key"] = server["key"]
    if "authority" in change:
        client["authority"] = made["client"]["authority"]
    if "text" in change:
        server["certificate"] = "none"
    secrets = kept(foreign, server=server, client=client)[: 1 if "lose" in change else 2]
    with pytest.raises(BadInput, match=message):
        fitting(secrets, change.get("names", NAMES), change.get("now", NOW))
    result = FilterModule().filters()["extender_certificates"](secrets, ["other.svc"])
    assert result["problem"] and "server" not in result


def test_authority_bundle_of_two_accepted(foreign, made):
    client = {**foreign["client"], "authority": made["client"]["authority"] + foreign["client"]["authority"]}
    assert fitting(kept(foreign, client=client))["client"] == client


# --------------------------------------------------------------------------- a real connection


@pytest.fixture
def address(made, tmp_path):
    """An extender's service with the server's side of the Secret."""
    for part, key in subject.PARTS.items():
        (tmp_path / key).write_text(made["server"][part])
    tls = Tls(*(str(tmp_path / key) for key in ("tls.crt", "tls.key", "ca.crt")))
    routes = {("POST", "/bind"): lambda _request: text("bound")}
    service = Service("tests", Endpoint(tls=tls), routes)
    service.start()
    yield "127.0.0.1", service.port
    service.stop()


def ask(address, method, path, authority, certificate=None, name=NAME, folder=None):
    context = ssl.create_default_context(cadata=authority)
    if certificate:
        (folder / "c.pem").write_text(certificate["certificate"] + certificate["key"])
        context.load_cert_chain(folder / "c.pem")
    connection = http.client.HTTPSConnection(*address, context=context, timeout=10)
    # kube-scheduler calls it by its Service's name.
    connection._create_connection = lambda _where, *rest, **more: __import__("socket").create_connection(address, 10)
    connection.host = name
    try:
        connection.request(method, path, body=b"{}" if method == "POST" else None)
        return connection.getresponse().status
    finally:
        connection.close()


def test_only_the_scheduler_connects(made, address, tmp_path):
    client, other = made["client"], fitting()
    assert ask(address, "POST", "/bind", client["authority"], client, folder=tmp_path) == 200
    assert ask(address, "POST", "/bind", client["authority"], client, NAMES[1], tmp_path) == 200
    with pytest.raises(OSError):
        ask(address, "POST", "/bind", client["authority"])
    for name, authority in ((NAME, other["client"]["authority"]), ("elsewhere.svc", client["authority"])):
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(address, "POST", "/bind", authority, client, name, tmp_path)
    with pytest.raises(OSError):
        ask(address, "POST", "/bind", client["authority"], other["client"], folder=tmp_path)


# --------------------------------------------------------------------------- metrics


METRICS = ["gpushare-metrics"]


def metrics_secret(side):
    return secret("gpushare-extender-metrics-tls", side)


def test_a_valid_certificate_of_metrics_is_kept_and_renewed_in_its_last_year():
    side = subject.of_server([], METRICS, NOW)
    assert subject.of_server([metrics_secret(side)], METRICS, NOW) == side
    last_year = NOW + datetime.timedelta(days=subject.DAYS - subject.RENEW_DAYS + 1)
    assert subject.of_server([metrics_secret(side)], METRICS, last_year) != side
    other = subject.of_server([], METRICS, NOW)
    for broken in ({**side, "key": other["key"]}, {**side, "authority": other["authority"]}, {}):
        given = metrics_secret(broken) if broken else {"metadata": {"name": "x"}, "data": {}}
        assert subject.of_server([given], METRICS, NOW) not in (side, other, broken)
