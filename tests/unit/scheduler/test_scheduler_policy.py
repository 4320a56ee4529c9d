# SPDX-License-Identifier: GPL-3.0-or-later
"""Policy files of kube-scheduler up to 1.22: ours in a user's own, byte for byte, judged by the real 1.20."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import real_scheduler
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.plugin_utils import _scheduler_policy as sp
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_config import Extender
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXTENDER = Extender("http://127.0.0.1:12345/gpushare-scheduler", 30)
ENTRY = {
    "urlPrefix": "http://127.0.0.1:12345/gpushare-scheduler",
    "filterVerb": "filter",
    "bindVerb": "bind",
    "enableHttps": False,
    "httpTimeout": 30000000000,
    "nodeCacheCapable": True,
    "ignorable": False,
    "managedResources": [{"name": "aliyun.com/gpu-mem", "ignoredByScheduler": False}],
}

USERS = """\
{
  "kind" : "Policy",
  "apiVersion" : "v1",
  "predicates" : [
    {"name": "PodFitsHostPorts"}, {"name": "PodFitsResources"},
    {"name": "NoDiskConflict"},
    {"name": "TestLabelsPresence", "argument": {"labelsPresence": {"labels": ["zone"], "presence": true}}}
  ],
  "priorities" : [
    {"name": "LeastRequestedPriority",   "weight": 1},
    {"name" : "EqualPriority", "weight" : 1}
  ],
  "hardPodAffinitySymmetricWeight" : 10,
  "extenders" : [
    {
      "urlPrefix": "http://127.0.0.1:9000",
      "filterVerb": "filter", "prioritizeVerb": "prioritize", "weight": 5,
      "httpTimeout": 5000000000,
      "nodeCacheCapable": true
    }
  ],
  "alwaysCheckAllPredicates" : false
}
"""

PREFERS = '"EqualPriority", "argument": {"labelPreference": {"label": "a", "presence": true}}, '
OTHER = '"Other", "argument": {"labelPreference": {"label": "b", "presence": true}}, "weight": 2'

# As gpushare's own guide has it.
UPSTREAM = """\
{
  "kind": "Policy",
  "apiVersion": "v1",
  "extenders": [
    {
      "urlPrefix": "http://127.0.0.1:32766/gpushare-scheduler",
      "filterVerb": "filter",
      "bindVerb":   "bind",
      "enableHttps": false,
      "nodeCacheCapable": true,
      "managedResources": [
        {
          "name": "aliyun.com/gpu-mem",
          "ignoredByScheduler": false
        }
      ],
      "ignorable": false
    }
  ]
}
"""


def complaint(text: str, folder: Path) -> str:
    return real_scheduler.complaint(text, folder, "1.20", policy=True)


def test_new(tmp_path: Path) -> None:
    text = sp.new_policy(EXTENDER)
    assert json.loads(text) == {"kind": "Policy", "apiVersion": "v1", "extenders": [ENTRY]}
    assert complaint(text, tmp_path) == ""


def test_merged_into_a_users_file(tmp_path: Path) -> None:
    done = sp.merged("/p", USERS, EXTENDER)
    head, tail = USERS.split("    }\n  ],\n")
    assert done.startswith(head + "    },\n    {\n") and done.endswith("\n    }\n  ],\n" + tail), (
        "all else is as it was"
    )
    policy = json.loads(done)
    assert policy == {**json.loads(USERS), "extenders": [*json.loads(USERS)["extenders"], ENTRY]}
    assert sp.merged("/p", done, EXTENDER) == done
    assert sp.without("/p", done) == USERS
    assert complaint(done, tmp_path) == ""


def test_upstreams_extender_becomes_ours(tmp_path: Path) -> None:
    done = sp.merged("/p", UPSTREAM, EXTENDER)
    assert json.loads(done)["extenders"] == [ENTRY]
    kept = [line for line in UPSTREAM.splitlines() if "32766" not in line and '"ignorable"' not in line]
    lines = iter(done.splitlines())
    assert all(line in lines for line in kept), "what was right stays as it is written"
    assert complaint(done, tmp_path) == ""
    assert json.loads(sp.without("/p", done)) == {"kind": "Policy", "apiVersion": "v1"}


def test_whom_to_evict_is_asked_or_not_any_more() -> None:
    preempting = Extender(EXTENDER.url, 30, preempts=True)
    quiet = sp.merged("/p", USERS, EXTENDER)
    asking = sp.merged("/p", quiet, preempting)
    assert json.loads(asking)["extenders"][-1]["preemptVerb"] == "preempt"
    assert sp.merged("/p", asking, preempting) == asking
    folded = asking.replace("preemptVerb", "PreemptVerb")
    for text in (asking, folded):
        assert json.loads(sp.merged("/p", text, EXTENDER)) == json.loads(quiet)
        assert sp.has("/p", text, EXTENDER) and sp.has("/p", text, preempting)
    assert sp.has("/p", quiet, preempting)


def test_an_extenders_keys_may_be_written_in_any_case(tmp_path: Path) -> None:
    text = UPSTREAM.replace("bindVerb", "BindVerb").replace('"enableHttps": false', '"EnableHTTPS": true, "WEIGHT": 3')
    text = text.replace('"ignoredByScheduler": false', '"ignoredbyscheduler": true')
    done = sp.merged("/p", text, EXTENDER)
    assert complaint(done, tmp_path) == ""
    [entry] = json.loads(done)["extenders"]
    assert entry["EnableHTTPS"] is False and "enableHttps" not in entry and "WEIGHT" not in entry
    assert entry["managedResources"] == [{"name": "aliyun.com/gpu-mem", "ignoredbyscheduler": False}]
    assert sp.merged("/p", done, EXTENDER) == done
    with pytest.raises(BadInput, match="binds pods already"):
        sp.merged("/p", USERS.replace('"filterVerb": "filter"', '"BINDVERB": "bind"'), EXTENDER)


@pytest.mark.parametrize(
    "text",
    [
        '{"kind":"Policy","apiVersion":"v1"}',
        '{"kind":"Policy","apiVersion":"v1","extenders":[{"urlPrefix":"http://a","filterVerb":"f"}]}\n',
        '{"kind":"Policy", "apiVersion":"v1", "extenders":[ {"urlPrefix":"http://a"} , {"urlPrefix":"http://b"} ]}',
        json.dumps({"kind": "Policy", "apiVersion": "v1", "priorities": []}, indent="\t") + "\n",
        json.dumps(json.loads(USERS), indent=4).replace("\n", "\r\n"),
        '{\n  "extenders" : [ {\n    "urlPrefix" : "http://a"\n  }, {\n    "urlPrefix" : "http://b"\n  } ],\n'
        '  "kind" : "Policy",\n  "apiVersion" : "v1"\n}',
        "# in YAML, which kube-scheduler reads too\nkind: Policy\napiVersion: v1\nextenders:\n- urlPrefix: http://a\n",
    ],
)
def test_any_layout_comes_back(text: str, tmp_path: Path) -> None:
    done = sp.merged("/p", text, EXTENDER)
    assert yaml.safe_load(done.replace("\t", " "))["extenders"][-1] == ENTRY
    assert ("\r\n" in text) == ("\r\n" in done) and "\n\n" not in done
    assert done.count("\n") == done.count("\r\n") or "\r" not in done
    assert sp.without("/p", done) == text
    assert complaint(done, tmp_path) == ""


@pytest.mark.parametrize(
    ("text", "words", "real"),
    [
        (
            USERS.replace('"weight": 5,', ""),
            r"^/p, line 15: extenders\[0\]\.weight isn't greater than 0",
            "positive weight",
        ),
        (
            USERS.replace('"weight": 1}', '"weight": "1"}'),
            r"^/p, line 10: priorities\[0\]\.weight isn't a whole",
            "unexpected character",
        ),
        (
            USERS.replace('"weight": 1}', '"weight": 0}'),
            r"^/p, line 10: priorities\[0\]\.weight isn't greater",
            "weight",
        ),
        (
            USERS.replace("5000000000", '"5s"'),
            r"^/p, line 18: extenders\[0\]\.httpTimeout isn't a whole",
            "httpTimeout",
        ),
        (USERS.replace('SymmetricWeight" : 10', 'SymmetricWeight" : 101'), r"SymmetricWeight isn't between", "0-100"),
        (USERS.replace('"Policy"', '"Polizei"'), "^/p isn't a Policy$", "no kind"),
        (USERS.replace('"v1"', '"v2"'), "^/p: kube-scheduler reads a Policy of v1, not v2$", "no kind"),
        (
            USERS.replace('"extenders" : [', '"extenders" : [,'),
            r"^/p, line 14, can't be parsed \(.+\); it is left",
            "invalid",
        ),
        (
            USERS.replace('"nodeCacheCapable": true', '"managedResources": [{"name": "cpu"}]'),
            r"^/p, line 19: extenders\[0\]\.managedResources\[0\]\.name isn't the name of an extended resource",
            "invalid extended resource",
        ),
        (
            USERS.replace('"EqualPriority", ', '"EqualPriority", "argument": {}, '),
            r"^/p, line 11: priorities\[1\]\.argument has none of labelPreference",
            "no priority arguments",
        ),
        (
            USERS.replace('"presence": true', '"presents": true'),
            r"^/p, line 7: .* no field predicates\[3\]\.argument\.labelsPresence\.presents$",
            "unknown field: presents",
        ),
        (
            USERS.replace('"EqualPriority", ', PREFERS).replace('"LeastRequestedPriority",   "weight": 1', OTHER),
            r"^/p, line 11: priorities\[1\] has a labelPreference, and so has an earlier priority",
            "has a different weight",
        ),
        (
            USERS.replace('"predicates" : [', '"predicates" : 3, "x": ['),
            r"^/p, line 4: predicates isn't a list",
            "cannot|expect",
        ),
    ],
)
def test_refused_as_the_real_one_does(text: str, words: str, real: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words):
        sp.merged("/p", text, EXTENDER)
    assert re.search(real, complaint(text, tmp_path))


def test_only_one_binds_and_only_one_is_for_the_resource() -> None:
    with pytest.raises(BadInput, match=r"^scheduler_mode: /p has an extender that binds pods already \(http://127"):
        sp.merged("/p", USERS.replace('"filterVerb"', '"bindVerb"'), EXTENDER)
    two = json.loads(UPSTREAM)
    two["extenders"] *= 2
    for change in (lambda text: sp.merged("/p", text, EXTENDER), lambda text: sp.without("/p", text)):
        with pytest.raises(BadInput, match=r"^/p has 2 extenders for aliyun\.com/gpu-mem"):
            change(json.dumps(two))


def test_what_it_passes_over_stays(tmp_path: Path) -> None:
    text = USERS.replace('"weight": 5,', '"weight": 5, "comment": "ours",')
    done = sp.merged("/p", text, EXTENDER)
    assert '"comment": "ours"' in done
    assert complaint(done, tmp_path) == ""
    text = USERS.replace('"kind" : "Policy",', '"kind" : "Policy", "comment": "ours",')
    assert '"comment": "ours"' in sp.merged("/p", text, EXTENDER, minor=16)
    with pytest.raises(BadInput, match=r"^/p, line 2: kube-scheduler 1\.18 knows no field comment$"):
        sp.merged("/p", text, EXTENDER, minor=18)


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    extenders=st.lists(
        st.fixed_dictionaries(
            {"urlPrefix": st.sampled_from(["http://a", "https://b/c"]), "filterVerb": WORDS},
            optional={
                "httpTimeout": st.integers(1, 10**12),
                "ignorable": st.booleans(),
                "tlsConfig": st.just({"insecure": True, "certData": "YQ=="}),
                "weight": st.integers(0, 10**6),
                "x-comment": st.recursive(WORDS | st.floats(allow_nan=False, allow_infinity=False), st.lists),
            },
        ),
        max_size=3,
    ),
    more=st.fixed_dictionaries(
        {},
        optional={
            "priorities": st.lists(
                st.fixed_dictionaries({"name": st.just("EqualPriority"), "weight": st.integers(1, 9)}), max_size=2
            ),
            "hardPodAffinitySymmetricWeight": st.integers(0, 100),
        },
    ),
    indent=st.sampled_from([None, 0, 1, 2, 4, "\t"]),
    separators=st.sampled_from([None, (",", ":"), (" , ", " : ")]),
    end=st.sampled_from(["", "\n", "\n\n"]),
    judged=st.integers(0, 9),
)
def test_any_users_policy(extenders, more, indent, separators, end, judged, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    policy = {"kind": "Policy", "apiVersion": "v1", **more, **({"extenders": extenders} if extenders else {})}
    text = json.dumps(policy, indent=indent, separators=separators, ensure_ascii=False) + end
    done = sp.merged("/p", text, EXTENDER)
    assert json.loads(done) == {**policy, "extenders": [*extenders, ENTRY]}
    assert sp.merged("/p", done, EXTENDER) == done
    assert sp.without("/p", done) == text
    if judged == 0:
        assert complaint(done, tmp_path) == ""
