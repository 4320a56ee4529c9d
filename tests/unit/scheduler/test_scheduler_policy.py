# SPDX-License-Identifier: GPL-3.0-or-later
"""Policy files of kube-scheduler up to 1.22: ours merged into a user's own, validated by the real 1.20."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import real_scheduler
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import config as sp
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.extenders import Extender
from fake_machine import EXTENDER
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ENTRY = {
    **{key: value for key, value in EXTENDER.entry().items() if key != "enableHTTPS"},
    "enableHttps": False,
    "httpTimeout": 30_000_000_000,
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


OWN_RULES = "own rules"
_validator = OWN_RULES


@pytest.fixture(scope="module", autouse=True, params=[OWN_RULES, real_scheduler.release("1.20")])
def validator(request: pytest.FixtureRequest) -> None:
    """Validate by the collection's own rules and, in long runs, by the real kube-scheduler 1.20."""
    global _validator
    _validator = request.param


def complaint(text: str, folder: Path) -> str:
    if _validator != OWN_RULES:
        return real_scheduler.complaint(text, folder, _validator, policy=True)
    try:
        sp.POLICY_FORM.check("/p", text, None)
    except BadInput as error:
        return str(error)
    return ""


def test_new_policy(tmp_path: Path) -> None:
    text = sp.POLICY_FORM.new(None, {}, EXTENDER)
    assert json.loads(text) == {"kind": "Policy", "apiVersion": "v1", "extenders": [ENTRY]}
    assert complaint(text, tmp_path) == ""


def test_merge_into_users_policy(tmp_path: Path) -> None:
    done = sp.POLICY_FORM.merged("/p", USERS, None, EXTENDER)
    head, tail = USERS.split("    }\n  ],\n")
    assert done.startswith(head + "    },\n    {\n") and done.endswith("\n    }\n  ],\n" + tail), (
        "all else is as it was"
    )
    policy = json.loads(done)
    assert policy == {**json.loads(USERS), "extenders": [*json.loads(USERS)["extenders"], ENTRY]}
    assert sp.POLICY_FORM.merged("/p", done, None, EXTENDER) == done
    assert sp.POLICY_FORM.without("/p", done) == USERS
    assert complaint(done, tmp_path) == ""


def test_upstream_extender_is_replaced(tmp_path: Path) -> None:
    done = sp.POLICY_FORM.merged("/p", UPSTREAM, None, EXTENDER)
    assert json.loads(done)["extenders"] == [ENTRY]
    kept = [line for line in UPSTREAM.splitlines() if "32766" not in line and '"ignorable"' not in line]
    lines = iter(done.splitlines())
    assert all(line in lines for line in kept), "what was right stays as it is written"
    assert complaint(done, tmp_path) == ""
    assert json.loads(sp.POLICY_FORM.without("/p", done)) == {"kind": "Policy", "apiVersion": "v1"}


def test_preempt_verb_in_any_case_is_removed() -> None:
    quiet = sp.POLICY_FORM.merged("/p", USERS, None, EXTENDER)
    asking = sp.POLICY_FORM.merged("/p", quiet, None, Extender(EXTENDER.url, 30, preempts=True))
    assert json.loads(asking)["extenders"][-1]["preemptVerb"] == "preempt"
    for text in (asking, asking.replace("preemptVerb", "PreemptVerb")):
        assert json.loads(sp.POLICY_FORM.merged("/p", text, None, EXTENDER)) == json.loads(quiet)
        assert sp.POLICY_FORM.has("/p", text, EXTENDER)


def test_extender_keys_in_any_case(tmp_path: Path) -> None:
    text = UPSTREAM.replace("bindVerb", "BindVerb").replace('"enableHttps": false', '"EnableHTTPS": true, "WEIGHT": 3')
    text = text.replace('"ignoredByScheduler": false', '"ignoredbyscheduler": true')
    done = sp.POLICY_FORM.merged("/p", text, None, EXTENDER)
    assert complaint(done, tmp_path) == ""
    [entry] = json.loads(done)["extenders"]
    assert entry["EnableHTTPS"] is False and "enableHttps" not in entry and "WEIGHT" not in entry
    assert entry["managedResources"] == [{"name": "aliyun.com/gpu-mem", "ignoredbyscheduler": False}]
    assert sp.POLICY_FORM.merged("/p", done, None, EXTENDER) == done
    with pytest.raises(BadInput, match="binds pods already"):
        sp.POLICY_FORM.merged("/p", USERS.replace('"filterVerb": "filter"', '"BINDVERB": "bind"'), None, EXTENDER)


@pytest.mark.parametrize(
    "text",
    [
        '{"kind":"Policy","apiVersion":"v1"}',
        '{"kind":"Policy","apiVersion":"v1","extenders":[{"urlPrefix":"http://a","filterVerb":"f"}]}\n',
        '{"kind":"Policy", "apiVersion":"v1", "extenders":[ {"urlPrefix":"http://a"} , {"urlPrefix":"http://b"} ]}',
        json.dumps({"kind": "Policy", "apiVersion": "v1", "priorities": []}, indent="\t") + "\n",
        json.dumps(json.loads(USERS), indent=4).replace("\n", "\r\n"),
        '{\n  "kind" : "Policy", "apiVersion" : "v1",\n  "extenders" : [ {\n    "urlPrefix" : "http://a"\n  } ]\n}',
        "# in YAML, which kube-scheduler reads too\nkind: Policy\napiVersion: v1\nextenders:\n- urlPrefix: http://a\n",
    ],
)
def test_every_layout_is_restored(text: str, tmp_path: Path) -> None:
    done = sp.POLICY_FORM.merged("/p", text, None, EXTENDER)
    assert yaml.safe_load(done.replace("\t", " "))["extenders"][-1] == ENTRY
    assert ("\r\n" in text) == ("\r\n" in done) and "\n\n" not in done
    assert done.count("\n") == done.count("\r\n") or "\r" not in done
    assert sp.POLICY_FORM.without("/p", done) == text
    assert complaint(done, tmp_path) == ""


def line(number: int, place: str, words: str = "") -> str:
    return rf"^/p, line {number}: {re.escape(place)}{words}"


@pytest.mark.parametrize(
    ("old", "new", "words", "real"),
    [
        ('"weight": 5,', "", line(15, "extenders[0].weight", " isn't greater than 0"), "positive weight"),
        ('"weight": 1}', '"weight": "1"}', line(10, "priorities[0].weight", " isn't a whole"), "unexpected character"),
        ('"weight": 1}', '"weight": 0}', line(10, "priorities[0].weight", " isn't greater"), "weight"),
        ("5000000000", '"5s"', line(18, "extenders[0].httpTimeout", " isn't a whole"), "httpTimeout"),
        ('SymmetricWeight" : 10', 'SymmetricWeight" : 101', "SymmetricWeight isn't between", "0-100"),
        ('"Policy"', '"Polizei"', "^/p isn't a Policy$", "no kind"),
        ('"v1"', '"v2"', "^/p: kube-scheduler reads a Policy of v1, not v2$", "no kind"),
        ('"extenders" : [', '"extenders" : [,', r"^/p, line 14, can't be parsed \(.+\); it is left", "invalid"),
        (
            '"nodeCacheCapable": true',
            '"managedResources": [{"name": "cpu"}]',
            line(19, "extenders[0].managedResources[0].name", " isn't the name of an extended resource"),
            "invalid extended resource",
        ),
        (
            '"EqualPriority", ',
            '"EqualPriority", "argument": {}, ',
            line(11, "priorities[1].argument", " has none of labelPreference"),
            "no priority arguments",
        ),
        (
            '"presence": true',
            '"presents": true',
            r"^/p, line 7: .* no field predicates\[3\]\.argument\.labelsPresence\.presents$",
            "unknown field: presents",
        ),
        (
            '"LeastRequestedPriority",   "weight": 1},\n    {"name" : "EqualPriority", ',
            f'{OTHER}}},\n    {{"name" : {PREFERS}',
            line(11, "priorities[1]", " has a labelPreference, and so has an earlier priority"),
            "has a different weight",
        ),
        ('"predicates" : [', '"predicates" : 3, "x": [', line(4, "predicates", " isn't a list"), "cannot|expect"),
    ],
)
def test_invalid_policy_refused(old: str, new: str, words: str, real: str, tmp_path: Path) -> None:
    text = USERS.replace(old, new)
    assert text != USERS
    with pytest.raises(BadInput, match=words):
        sp.POLICY_FORM.merged("/p", text, None, EXTENDER)
    assert complaint(text, tmp_path) if _validator == OWN_RULES else re.search(real, complaint(text, tmp_path))


def test_unknown_fields_are_kept(tmp_path: Path) -> None:
    text = USERS.replace('"weight": 5,', '"weight": 5, "comment": "ours",')
    done = sp.POLICY_FORM.merged("/p", text, None, EXTENDER)
    assert '"comment": "ours"' in done
    assert complaint(done, tmp_path) == ""
    text = USERS.replace('"kind" : "Policy",', '"kind" : "Policy", "comment": "ours",')
    assert '"comment": "ours"' in sp.POLICY_FORM.merged("/p", text, 16, EXTENDER)
    with pytest.raises(BadInput, match=r"^/p, line 2: kube-scheduler 1\.18 has no field comment$"):
        sp.POLICY_FORM.merged("/p", text, 18, EXTENDER)


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
    chance=st.integers(0, 9),
)
def test_generated_policies_merged_and_restored(
    extenders, more, indent, separators, end, chance, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    policy = {"kind": "Policy", "apiVersion": "v1", **more, **({"extenders": extenders} if extenders else {})}
    text = json.dumps(policy, indent=indent, separators=separators, ensure_ascii=False) + end
    done = sp.POLICY_FORM.merged("/p", text, None, EXTENDER)
    assert json.loads(done) == {**policy, "extenders": [*extenders, ENTRY]}
    assert sp.POLICY_FORM.merged("/p", done, None, EXTENDER) == done
    assert sp.POLICY_FORM.without("/p", done) == text
    if chance == 0:
        assert complaint(done, tmp_path) == ""
