# SPDX-License-Identifier: GPL-3.0-or-later
"""OpenShift's own scheduler and its Policy: a real API server with the real definitions, and a played operator."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils import _openshift as pure
from ansible_collections.kubegpu.share.plugins.module_utils import _openshift_client as client
from ansible_collections.kubegpu.share.plugins.module_utils import _openshift_scheduler as subject
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._verification_scheduler import look_at_scheduler
from definitions import OLD, definitions
from played_operator import CRASH, INSTALLER, NODES, REMOVED, PlayedOperator
from real_apiserver import MERGE, Refused

PREFIX = "gpushare-scheduler-policy"
POLICY = (
    '{"kind": "Policy", "apiVersion": "v1", "extenders": [{"urlPrefix": "http://127.0.0.1:12345/gpushare-scheduler"}]}'
)
OTHER = POLICY.replace("12345", "12346")
USERS = '{"kind": "Policy", "apiVersion": "v1", "predicates": [{"name": "GeneralPredicates"}]}'
MAPS = "/api/v1/namespaces/openshift-config/configmaps"
SCHEDULER = "/apis/config.openshift.io/v1/schedulers/cluster"


def module_of(server, **params):
    """What the door takes of AnsibleModule."""
    auth = dict.fromkeys(subject.ARGUMENTS)
    return SimpleNamespace(
        params={**auth, "kubeconfig": str(server.kubeconfig), **params}, tmpdir=str(server.folder), no_log_values=set()
    )


@pytest.fixture(params=["openshift", "kubernetes"])
def api(request, openshift):
    openshift.request("DELETE", MAPS)
    return client.DynamicKube.of_module(module_of(openshift, library=request.param))


@pytest.fixture
def only(openshift):
    """For what doesn't depend on the library."""
    openshift.request("DELETE", MAPS)
    return client.DynamicKube.of_module(module_of(openshift))


def users_map(server, name="team-policy", text=USERS):
    server.request("POST", MAPS, {"metadata": {"name": name}, "data": {"policy.cfg": text}})


def run(api, policy=POLICY, base=None, check=False, timeout=8.0):
    params = {"plan": {"policy": policy, "base": base}, "config_map": PREFIX}
    return subject.work(api, params, check, subject.Waiting(timeout=timeout, pause=0.02))


def named(server):
    return (server.request("GET", SCHEDULER)["spec"].get("policy") or {}).get("name", "")


def maps(server):
    found = server.request("GET", MAPS)["items"]
    return {one["metadata"]["name"]: one["data"].get("policy.cfg") for one in found}


NAME = subject.Wish(POLICY, PREFIX).name


# --------------------------------------------------------------------------- the way that it should go


def test_a_policy_is_rolled_out_and_a_second_run_has_nothing_to_do(api, openshift):
    with PlayedOperator(openshift, "4.9.23") as operator:
        before = run(api, check=True)
        assert before["changed"] and named(openshift) == "" and maps(openshift) == {}
        done = run(api)
        assert done["changed"] and done["diff"] == before["diff"]
        assert done["library"] == api.library
        assert named(openshift) == NAME and maps(openshift) == {NAME: POLICY}
        assert operator.seen == [NAME] and set(operator.current.values()) == {9}
        assert not run(api)["changed"] and operator.revision == 9


def test_another_policy_is_another_name_and_the_old_map_goes_at_last(only, openshift):
    with PlayedOperator(openshift, "4.8.0") as operator:
        run(only)
        run(only, OTHER)
        other = subject.Wish(OTHER, PREFIX).name
        assert operator.seen == [NAME, other] and maps(openshift) == {other: OTHER}


def test_the_users_policy_comes_back_byte_for_byte(only, openshift):
    users_map(openshift)
    with PlayedOperator(openshift, "4.6.1", policy="team-policy") as operator:
        run(only, base=USERS)
        assert named(openshift) == NAME and maps(openshift)["team-policy"] == USERS
        # What the user changes in his own is what ours is made from.
        assert run(only, base=USERS)["changed"] is False
        assert run(only, policy="", base=USERS)["changed"]
        assert named(openshift) == "team-policy" and maps(openshift) == {"team-policy": USERS}
        assert operator.seen == [NAME, "team-policy"]
        assert not run(only, policy="", base=USERS)["changed"]


def test_without_a_policy_before_there_is_none_after(only, openshift):
    with PlayedOperator(openshift, "4.9.0"):
        run(only)
        run(only, policy="")
        assert named(openshift) == "" and maps(openshift) == {}
        with pytest.raises(Refused):
            openshift.request("GET", "/api/v1/namespaces/openshift-kube-scheduler/configmaps/policy-configmap")


def test_a_user_who_has_the_extender_in_his_own_policy_keeps_it(only, openshift):
    users_map(openshift, text=POLICY)
    with PlayedOperator(openshift, "4.9.0", policy="team-policy"):
        assert not run(only, base=POLICY)["changed"]


def test_a_users_map_that_was_deleted_meanwhile_isnt_named_again(only, openshift):
    users_map(openshift)
    with PlayedOperator(openshift, "4.9.0", policy="team-policy"):
        run(only, base=USERS)
        openshift.request("DELETE", f"{MAPS}/team-policy")
        run(only, policy="")
        assert named(openshift) == "" and maps(openshift) == {}


def test_the_definition_of_4_6_takes_it_too(only, openshift):
    old = yaml.safe_load((definitions() / OLD).read_text())
    newest = (definitions() / "schedulers.config.openshift.io.yaml").read_text()
    # The API of definitions that it was written in is gone; its schema is what judges.
    spec = old["spec"]
    schema, status = spec.pop("validation"), spec.pop("subresources")
    spec["versions"] = [{**one, "schema": schema, "subresources": status} for one in spec["versions"]]
    spec.pop("preserveUnknownFields", None)
    old["apiVersion"] = "apiextensions.k8s.io/v1"
    try:
        openshift.apply(old, manager="kubectl")
        with PlayedOperator(openshift, "4.6.60"):
            run(only)
            assert named(openshift) == NAME
            run(only, policy="")
    finally:
        openshift.apply(yaml.safe_load(newest), manager="kubectl")


# --------------------------------------------------------------------------- the ways that it goes wrong


@pytest.mark.parametrize(
    ("script", "words"),
    [("crash", CRASH), ("failed-revision", INSTALLER), ("slow", "not within"), ("asleep", "not within")],
)
def test_what_doesnt_come_up_is_put_back_and_told_in_the_operators_words(only, openshift, script, words):
    users = "" if script == "crash" else "team-policy"
    if users:
        users_map(openshift)
    before = maps(openshift)
    with PlayedOperator(openshift, "4.7.3", [script], policy=users) as operator:
        with pytest.raises(NotInEffect) as failure:
            run(only, base=USERS if users else None, timeout=5.0 if words == "not within" else 20.0)
        assert words in str(failure.value) and "healthy" in str(failure.value)
        assert "isn't healthy" not in str(failure.value)
        assert failure.value.details["changed"]
        assert named(openshift) == users and maps(openshift) == before
        assert operator.seen == [NAME, users] or script == "asleep"
        # The next run, with nothing in its way, does it.
        assert run(only, base=USERS if users else None)["changed"]
        assert named(openshift) == NAME


def test_an_old_policy_that_doesnt_come_back_either_is_said_and_nothing_is_deleted(only, openshift):
    with PlayedOperator(openshift, "4.9.1", ["crash", "asleep"]):
        with pytest.raises(NotInEffect, match="isn't healthy with that yet"):
            run(only, timeout=0.5)
        assert named(openshift) == "" and NAME in maps(openshift)


def test_taking_it_out_is_put_back_too(only, openshift):
    with PlayedOperator(openshift, "4.9.1", ["rollout", "crash"]):
        run(only)
        with pytest.raises(NotInEffect, match="CrashLoopBackOff"):
            run(only, policy="")
        assert named(openshift) == NAME and maps(openshift) == {NAME: POLICY}
        # What was noted on the way out is taken back, too.
        assert not run(only)["changed"]


def test_a_revision_that_failed_long_ago_is_no_failure():
    status = {
        "latestAvailableRevision": 8,
        "nodeStatuses": [{"nodeName": "a", "currentRevision": 8, "lastFailedRevision": 5, "targetRevision": 9}],
    }
    assert pure.rollout_of(None, {"status": status}).failure(7) == ""
    status["nodeStatuses"][0]["lastFailedRevision"] = 9
    assert "revision 9 failed on node a" in pure.rollout_of(None, {"status": status}).failure(8)


class Killed(BaseException):
    """SIGKILL: nothing of ours is run any more."""


class Cut:
    """The API until the n-th change, before or after which the module is killed."""

    def __init__(self, api, number, after):
        self.api, self.left, self.after, self.library = api, number, after, api.library

    def get(self, ref):
        return self.api.get(ref)

    def list_all(self, *arguments, **named):
        return self.api.list_all(*arguments, **named)

    def _change(self, call, *arguments):
        self.left -= 1
        if self.left == 0 and not self.after:
            raise Killed
        done = getattr(self.api, call)(*arguments)
        if self.left == 0:
            raise Killed
        return done

    def apply(self, definition, manager):
        return self._change("apply", definition, manager)

    def patch(self, ref, body):
        return self._change("patch", ref, body)

    def delete(self, ref):
        return self._change("delete", ref)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("way", ["in", "over", "out", "edited"])
def test_a_run_that_is_killed_anywhere_is_finished_by_the_next(only, openshift, way, after):
    wanted = {"in": POLICY, "over": OTHER, "out": "", "edited": POLICY}[way]
    target = SECOND if way == "edited" else subject.Wish(wanted, PREFIX).name or "team-policy"
    for number in range(1, 20):
        openshift.request("DELETE", MAPS)
        users_map(openshift)
        with PlayedOperator(openshift, "4.9.5", policy="team-policy") as operator:
            if way != "in":
                run(only, base=USERS)
            if way == "edited":
                edit(openshift, NAME)
            try:
                run(Cut(only, number, after), wanted, USERS)
            except Killed:
                pass
            else:
                break
            # Whatever is named is there.
            assert named(openshift) in maps(openshift)
            run(only, wanted, USERS)
            assert named(openshift) == target
            assert set(maps(openshift)) == {"team-policy", target}
            assert set(operator.current.values()) == {operator.revision}
            assert not run(only, wanted, USERS)["changed"]
    assert number > 2


def once_settled(*arguments, **named):
    """A change in the other direction is begun when the one before has come to rest."""
    end = time.monotonic() + 20
    while True:
        try:
            return run(*arguments, **named)
        except BadInput as error:
            if "still being rolled out" not in str(error) or time.monotonic() > end:
                raise
        time.sleep(0.05)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("users", ["", "team-policy"])
def test_a_run_that_is_killed_anywhere_is_taken_back_by_one_in_the_other_direction(only, openshift, way, after, users):
    wanted, other, target = (POLICY, "", users) if way == "in" else ("", POLICY, NAME)
    base = USERS if users else None
    for number in range(1, 20):
        openshift.request("DELETE", MAPS)
        users_map(openshift)
        with PlayedOperator(openshift, "4.9.5", policy=users) as operator:
            if way == "out":
                run(only, base=base)
            try:
                run(Cut(only, number, after), wanted, base)
            except Killed:
                pass
            else:
                break
            once_settled(only, other, base)
            assert named(openshift) == target
            assert set(maps(openshift)) == {"team-policy", target} - {""}
            assert set(operator.current.values()) == {operator.revision}
            assert set(operator.seen) <= {NAME, users}
            assert not run(only, other, base)["changed"]
    assert number > 2


def test_a_change_of_the_name_that_is_refused_on_the_way_out_leaves_nothing_behind(only, openshift):
    class Refusing(Cut):
        def patch(self, ref, body):
            if ref.kind == "Scheduler":
                raise ShareError("Scheduler cluster: the object has been modified (409)")
            return self.api.patch(ref, body)

    with PlayedOperator(openshift, "4.9.5") as operator:
        run(only)
        with pytest.raises(ShareError, match="409"):
            run(Refusing(only, 0, True), policy="")
        started = time.monotonic()
        assert run(only)["changed"] and time.monotonic() - started < 5
        assert operator.seen == [NAME] and named(openshift) == NAME
        assert not run(only)["changed"]


def test_killed_while_waiting_for_a_revision_that_crashes_the_next_run_puts_back(only, openshift):
    with PlayedOperator(openshift, "4.9.5", ["crash"]):
        # Create and name, then die before the first look.
        with pytest.raises(Killed):
            run(Cut(only, 2, True))
        assert named(openshift) == NAME
        with pytest.raises(NotInEffect, match="CrashLoopBackOff"):
            run(only)
        assert named(openshift) == "" and maps(openshift) == {}


def until(true):
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


# --------------------------------------------------------------------------- taking out what does harm


def test_ours_is_taken_out_while_kube_scheduler_is_degraded(only, openshift):
    with PlayedOperator(openshift, "4.9.1", ["rollout", "lingering"]) as operator:
        run(only)
        operator._tell(degraded=CRASH)
        operator.version("4.9.1", "Working towards 4.9.2: kube-scheduler is degraded")
        assert run(only, policy="", check=True)["changed"] and named(openshift) == NAME
        assert run(only, policy="")["changed"]
        assert named(openshift) == "" and maps(openshift) == {} and operator.seen == [NAME, ""]


def test_ours_that_crashes_is_taken_out_after_a_run_that_was_killed(only, openshift):
    users_map(openshift)
    with PlayedOperator(openshift, "4.9.1", ["crash", "lingering"], policy="team-policy") as operator:
        with pytest.raises(Killed):
            run(Cut(only, 2, True), base=USERS)
        until(lambda: pure.look_at_rollout(only).degraded == CRASH)
        with pytest.raises(BadInput, match=r"degraded already: .* ours: state absent takes it out"):
            run(only, OTHER, USERS)
        assert run(only, policy="", base=USERS)["changed"]
        assert named(openshift) == "team-policy" and list(maps(openshift)) == ["team-policy"]
        assert set(operator.current.values()) == {operator.revision}


def test_what_never_worked_isnt_named_again_and_the_next_run_goes_on(only, openshift):
    with PlayedOperator(openshift, "4.9.1", ["crash", "asleep"]) as operator:
        with pytest.raises(Killed):
            run(Cut(only, 2, True))
        until(lambda: pure.look_at_rollout(only).degraded == CRASH)
        with pytest.raises(NotInEffect, match="names no policy in place of ours, and that isn't in effect yet"):
            run(only, policy="", timeout=0.5)
        assert named(openshift) == "" and operator.seen == [NAME, ""]
        # The next run still knows that there is something to wait for.
        with pytest.raises(NotInEffect, match="isn't in effect yet"):
            run(only, policy="", timeout=0.5)
        operator._play("lingering")
        assert run(only, policy="")["changed"] and maps(openshift) == {}
        assert not run(only, policy="")["changed"]


def test_an_upgrade_of_a_healthy_cluster_ends_before_ours_is_taken_out(only, openshift):
    with PlayedOperator(openshift, "4.8.1") as operator:
        run(only)
        operator.version("4.9.1", "Working towards 4.9.1")
        with pytest.raises(BadInput, match="being upgraded"):
            run(only, policy="")
        assert named(openshift) == NAME


def edit(server, name, text=OTHER):
    server.request("PATCH", f"{MAPS}/{name}", {"data": {"policy.cfg": text}}, MERGE)


SECOND = f"{NAME}-2"


@pytest.mark.parametrize("rolled_out", [False, True])
def test_a_map_of_ours_that_somebody_edited_is_replaced_by_another(only, openshift, rolled_out):
    users_map(openshift)
    with PlayedOperator(openshift, "4.9.1", policy="team-policy") as operator:
        run(only, base=USERS)
        for before, after in ((NAME, SECOND), (SECOND, NAME)):
            edit(openshift, before)
            if rolled_out:
                operator._play("rollout")
            # What is named isn't written to.
            checked = run(only, base=USERS, check=True)
            assert run(only, base=USERS)["diff"] == checked["diff"]
            assert named(openshift) == after and maps(openshift) == {after: POLICY, "team-policy": USERS}
            assert set(operator.current.values()) == {operator.revision}
            assert not run(only, base=USERS)["changed"]
        edit(openshift, NAME)
        assert run(only, policy="", base=USERS)["changed"]
        assert named(openshift) == "team-policy" and maps(openshift) == {"team-policy": USERS}


def test_a_map_of_ours_that_somebody_deleted_is_replaced_and_doesnt_stay_named(only, openshift):
    with PlayedOperator(openshift, "4.9.1") as operator:
        for wanted, target in ((POLICY, SECOND), ("", "")):
            run(only)
            gone = named(openshift)
            openshift.request("DELETE", f"{MAPS}/{gone}")
            assert run(only, wanted)["changed"]
            assert named(openshift) == target and set(maps(openshift)) == {target} - {""}
            assert set(operator.current.values()) == {operator.revision}


def test_another_beginning_of_the_names_needs_no_new_revision(only, openshift):
    with PlayedOperator(openshift, "4.9.1") as operator:
        run(only)
        params = {"plan": {"policy": POLICY, "base": None}, "config_map": "team-b"}
        assert subject.work(only, params, False, subject.Waiting(timeout=8, pause=0.02))["changed"]
        assert list(maps(openshift)) == [named(openshift)] and named(openshift).startswith("team-b-")
        assert operator.revision == 9


def test_somebody_who_names_another_policy_meanwhile_wins(only, openshift):
    class Meddled(Cut):
        def patch(self, ref, body):
            users_map(openshift)
            openshift.request("PATCH", SCHEDULER, {"spec": {"policy": {"name": "team-policy"}}}, MERGE)
            return self.api.patch(ref, body)

    with PlayedOperator(openshift, "4.9.5"):
        with pytest.raises(ShareError, match="409"):
            run(Meddled(only, 0, True))
        assert named(openshift) == "team-policy"


def test_an_api_server_that_goes_away_in_the_middle_is_waited_for(only, openshift):
    class Flaky(Cut):
        looks = 0

        def get(self, ref):
            self.looks += 1
            if 8 < self.looks < 14:
                raise BadInput("the API server can't be reached")
            return self.api.get(ref)

    with PlayedOperator(openshift, "4.9.5"):
        api = Flaky(only, 0, True)
        assert run(api)["changed"] and api.looks > 14


# --------------------------------------------------------------------------- what is refused


def test_from_4_10_on_nothing_is_named_and_nothing_changed(api, openshift):
    for version in ("4.10.0", "4.10.0-rc.3", "4.18.7", "5.0.1"):
        with (
            PlayedOperator(openshift, version),
            pytest.raises(BadInput, match=r"scheduler_mode: OpenShift .* degrades"),
        ):
            run(api)
        assert maps(openshift) == {} and named(openshift) == ""


def test_what_an_upgrade_to_4_10_left_degraded_is_mended_by_taking_it_out(only, openshift):
    with PlayedOperator(openshift, "4.9.9"):
        run(only)
    with PlayedOperator(openshift, "4.10.1", policy=NAME):
        assert pure.look_at_rollout(only).degraded == REMOVED
        assert run(only, policy="")["changed"]
        assert named(openshift) == "" and maps(openshift) == {}


def test_after_an_upgrade_to_4_10_the_users_policy_isnt_named_again_either(only, openshift):
    users_map(openshift)
    with PlayedOperator(openshift, "4.9.9", policy="team-policy"):
        run(only, base=USERS)
    with PlayedOperator(openshift, "4.10.1", policy=NAME) as operator:
        done = run(only, policy="", base=USERS)
        assert done["changed"] and "team-policy, which Scheduler/cluster named before ours" in done["warnings"][0]
        assert operator.seen == [""] and not pure.look_at_rollout(only).degraded
        assert named(openshift) == "" and maps(openshift) == {"team-policy": USERS}
        assert "warnings" not in run(only, policy="", base=USERS)


def test_from_4_10_on_ours_is_never_named_again(only, openshift):
    with PlayedOperator(openshift, "4.9.9"):
        run(only)
    with PlayedOperator(openshift, "4.10.1", ["asleep"], policy=NAME) as operator:
        with pytest.raises(NotInEffect, match="names no policy in place of ours"):
            run(only, policy="", timeout=0.5)
        assert named(openshift) == "" and operator.seen == [""]
        operator._play("rollout")
        assert run(only, policy="")["changed"] and maps(openshift) == {}


def test_nothing_is_begun_while_the_cluster_is_upgraded_or_the_scheduler_not_settled(only, openshift):
    with PlayedOperator(openshift, "4.8.2") as operator:
        operator.version("4.9.0", "Working towards 4.9.0: 71 of 738 done (9% complete)")
        with pytest.raises(BadInput, match=r"being upgraded .Working towards 4.9.0"):
            run(only)
        operator.version("4.9.0")
        operator._tell(degraded=CRASH)
        with pytest.raises(BadInput, match="degraded already: StaticPodsDegraded"):
            run(only)
        operator.revision += 1
        operator._tell()
        with pytest.raises(BadInput, match="still being rolled out: newest revision 9, master-0 at revision 8"):
            run(only)
        assert maps(openshift) == {} and named(openshift) == ""


def test_a_policy_that_isnt_there_or_is_somebody_elses_is_refused(only, openshift):
    with PlayedOperator(openshift, "4.9.0", policy="gone"):
        with pytest.raises(BadInput, match="names the policy gone, and ConfigMap openshift-config/gone isn't there"):
            run(only)
        openshift.request("POST", MAPS, {"metadata": {"name": "gone"}, "data": {"policy.json": "{}"}})
        with pytest.raises(BadInput, match=r"has no policy.cfg"):
            run(only)
    with PlayedOperator(openshift, "4.9.0"):
        # Of the very name, which a digest makes unlikely, and with the label of ours.
        labels = {"app.kubernetes.io/part-of": "gpushare"}
        openshift.request("POST", MAPS, {"metadata": {"name": NAME, "labels": labels}, "data": {"policy.cfg": POLICY}})
        with pytest.raises(BadInput, match=f"config_map: ConfigMap openshift-config/{NAME} is there and isn't ours"):
            run(only)


def test_a_users_policy_that_changed_since_the_plan_was_made_is_refused(only, openshift):
    users_map(openshift)
    with PlayedOperator(openshift, "4.9.0", policy="team-policy"):
        with pytest.raises(BadInput, match="changed meanwhile; run again"):
            run(only, base="what it said before")
        assert list(maps(openshift)) == ["team-policy"]


def test_a_cluster_that_isnt_openshift_is_told_apart(only, openshift):
    with contextlib.suppress(Refused):
        openshift.request("DELETE", "/apis/config.openshift.io/v1/clusterversions/version")
    with pytest.raises(BadInput, match="isn't OpenShift"):
        subject.observe(only, PREFIX)


def test_verification_finds_what_is_rolled_out_and_what_an_upgrade_left(only, openshift):
    kube = RealKube.of_module(module_of(openshift))
    managed = (
        '{"kind": "Policy", "apiVersion": "v1", "extenders": [{"managedResources": [{"name": "aliyun.com/gpu-mem"}]}]}'
    )
    name = subject.Wish(managed, PREFIX).name

    def found():
        return look_at_scheduler(kube, "openshift", "deny", kube.list_all("v1", "Pod"))

    with PlayedOperator(openshift, "4.9.23"):
        assert found() == [("problems", NO_POLICY)]
        run(only, managed)
        passed = [text for field, text in found() if field == "passed"]
        assert passed[0] == f"Scheduler/cluster names policy {name}, which is ours" and len(passed) == 4
        # Nobody runs the extenders here.
        assert [text for field, text in found() if field != "passed"] == [
            f"no extender is ready on {node}, where kube-scheduler asks for one" for node in NODES
        ]
        openshift.request("PATCH", f"{MAPS}/{name}", {"data": {"policy.cfg": managed + " "}}, MERGE)
        assert [text for _field, text in found() if "hasn't taken policy" in text]
    with PlayedOperator(openshift, "4.18.3", policy=name):
        assert [text[:60] for field, text in found() if field == "problems"] == [
            f"Scheduler/cluster still names policy {name}"[:60],
            "the secondary scheduler doesn't run: Deployment openshift-secondary-scheduler-operator"[:60],
            "ValidatingAdmissionPolicy gpushare-scheduler isn't there, so that a GPU pod"[:60],
        ]


NO_POLICY = "Scheduler/cluster names no policy, so that kube-scheduler asks no extender; run site.yml again"


# --------------------------------------------------------------------------- the library


def test_a_library_that_is_asked_for_and_missing_is_named(monkeypatch, openshift):
    monkeypatch.setitem(__import__("sys").modules, "openshift", None)
    monkeypatch.setitem(__import__("sys").modules, "openshift.dynamic", None)
    with pytest.raises(ShareError, match=r"library: .* lacks openshift .* install it with pip"):
        client.DynamicKube.of_module(module_of(openshift, library="openshift"))
    assert client.DynamicKube.of_module(module_of(openshift, library="auto")).library == "kubernetes"
    monkeypatch.setitem(__import__("sys").modules, "kubernetes.dynamic", None)
    with pytest.raises(ShareError, match="lacks openshift and kubernetes"):
        client.client_class("auto")


def test_discovery_is_kept_where_no_other_user_writes(openshift, tmp_path):
    module = module_of(openshift)
    module.tmpdir = str(tmp_path)
    client.DynamicKube.of_module(module)
    assert [file.name for file in tmp_path.iterdir()] == ["discovery.json"]


def test_an_api_server_that_cant_be_reached_or_refuses_is_told_in_one_sentence(openshift, tmp_path):
    config = yaml.safe_load(openshift.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    elsewhere = tmp_path / "kubeconfig"
    elsewhere.write_text(yaml.safe_dump(config))
    module = module_of(openshift, kubeconfig=str(elsewhere))
    module.tmpdir = str(tmp_path)
    with pytest.raises(BadInput, match="can't be reached: connection refused"):
        client.DynamicKube.of_module(module)
    nobody = module_of(openshift, kubeconfig=str(openshift.kubeconfig_of("nobody", ("system:authenticated",))))
    with pytest.raises(ShareError, match="may not do this: clusterversions"):
        subject.observe(client.DynamicKube.of_module(nobody), PREFIX)
    api = client.DynamicKube.of_module(module_of(openshift))
    with pytest.raises(ShareError, match="the cluster doesn't know Route"):
        api.patch(client.Ref("route.openshift.io/v1", "Route", "a", "b"), {})
    assert api.get(client.Ref("route.openshift.io/v1", "Route", "a", "b")) is None
    api.delete(client.Ref("v1", "ConfigMap", "openshift-config", "never-there"))


@pytest.mark.parametrize(
    ("version", "takes", "minor"),
    [("4.6.0", True, 19), ("4.9.59", True, 22), ("4.10.0-rc.1", False, 23), ("4.22", False, 35), ("5.0.0", False, 0)],
)
def test_versions(version, takes, minor):
    assert (pure.takes_policy(version), pure.kubernetes_minor(version)) == (takes, minor)


def test_a_version_that_isnt_one():
    with pytest.raises(BadInput, match="'nightly' isn't a version of OpenShift"):
        pure.release("nightly")


def test_no_thread_is_left():
    end = time.monotonic() + 5
    while any("_follow" in thread.name for thread in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [thread for thread in threading.enumerate() if "_follow" in thread.name]
