# SPDX-License-Identifier: GPL-3.0-or-later
"""Notifications as AWX shows them, so that a second run finds no difference, and which of them have a secret."""

from __future__ import annotations

import sys

import pytest
from awx_kit import ROOT

sys.path.insert(0, str(ROOT / "awx" / "filter_plugins"))

from awx_filters import awx_whole_notifications

MAIL = {
    "host": "mail.example",
    "port": 25,
    "use_tls": False,
    "use_ssl": False,
    "sender": "a@b.c",
    "recipients": ["d@e.f"],
}
HOOK = {"url": "https://chat.example", "headers": {}}


@pytest.mark.parametrize(
    ("kind", "given", "added", "secret"),
    [
        (
            "webhook",
            HOOK,
            {"http_method": "POST", "disable_ssl_verification": False, "username": "", "password": ""},
            False,
        ),
        (
            "webhook",
            {**HOOK, "http_method": "PUT", "username": "u", "password": "p", "disable_ssl_verification": True},
            {},
            True,
        ),
        # AWX demands a login's fields of each mail server.
        ("email", MAIL, {"timeout": 30, "username": "", "password": ""}, False),
        ("email", {**MAIL, "username": "u", "password": "p"}, {"timeout": 30}, True),
        ("slack", {"token": "t", "channels": ["c"]}, {}, True),
        ("pagerduty", {"subdomain": "s", "token": "t", "service_key": "k", "client_name": "c"}, {}, True),
        ("grafana", {"grafana_url": "u", "grafana_key": "k"}, {}, True),
        ("twilio", {"account_sid": "s", "account_token": "t", "from_number": "1", "to_numbers": ["2"]}, {}, True),
        ("mattermost", {"mattermost_url": "u", "mattermost_no_verify_ssl": False}, {}, False),
    ],
)
def test_what_awx_adds_and_hides(kind, given, added, secret):
    one = {"name": "n", "notification_type": kind, "notification_configuration": given}
    [whole] = awx_whole_notifications([one])
    assert whole == {**one, "notification_configuration": {**given, **added}, "secret": secret}


def test_messages_have_all_events():
    message = {"message": "{{ job.name }} failed"}
    one = {
        "name": "n",
        "notification_type": "webhook",
        "notification_configuration": HOOK,
        "messages": {"error": message},
    }
    [whole] = awx_whole_notifications([one])
    assert whole["messages"] == {"started": None, "success": None, "error": message, "workflow_approval": None}
