# SPDX-License-Identifier: GPL-3.0-or-later
"""The Policy of OpenShift's own scheduler: a real API server with the real definitions, and a simulated operator."""

from __future__ import annotations

import contextlib
import functools
import sys
import time

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._check import servers, servers_scheduler
from ansible_collections.kubegpu.share.plugins.module_utils._check.model import Options, Servers, Snapshot
from ansible_collections.kubegpu.share.plugins.module_utils._check.result import CheckResult
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._core.wait import Waiting
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import cluster as pure
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import policy as subject
from ansible_collections.kubegpu.share.plugins.module_utils._openshift import scheduler
from ansible_collections.kubegpu.share.plugins.module_utils._openshift.scheduler import ARGUMENTS
from definitions import OLD, definitions
from memory_kube import Killed
from played_operator import CRASH, INSTALLER, NODES, REMOVED, PlayedOperator
from real_apiserver import MERGE, Refused
from simulation import module_of

PREFIX = "gpushare-scheduler-policy"
POLICY = (
    '{"kind": "Policy", "apiVersion": "v1", "extenders": [{"urlPrefix": "http://127.0.0.1:12345/gpushare-scheduler"}]}'
)
OTHER = POLICY.replace("12345", "12346")
USERS = '{"kind": "Policy", "apiVersion": "v1", "predicates": [{"name": "GeneralPredicates"}]}'
MAPS = "/api/v1/namespaces/openshift-config/configmaps"
SCHEDULER = "/apis/config.openshift.io/v1/schedulers/cluster"


def client_of(server, **params):
    return scheduler.DynamicKube.of_module(module_of(server, ARGUMENTS, **params))


@pytest.fixture(params=["openshift", "kubernetes"])
def api(request, openshift):
    openshift.request("DELETE", MAPS)
    return client_of(openshift, library=request.param)


@pytest.fixture
def only(openshift):
    """A client for tests that don't depend on the library."""
    openshift.request("DELETE", MAPS)
    return client_of(openshift)


def users_map(server, name="team-policy", text=USERS):
    server.request("POST", MAPS, {"metadata": {"name": name}, "data": {"policy.cfg": text}})


def run(api, policy=POLICY, base=None, check=False, timeout=25.0, prefix=PREFIX):
    params = {"plan": {"policy": policy, "base": base}, "config_map": prefix}
    return subject.work(api, params, check, Waiting(timeout=timeout, pause=0.02))


def named(server):
    return (server.request("GET", SCHEDULER)["spec"].get("policy") or {}).get("name", "")


def maps(server):
    found = server.request("GET", MAPS)["items"]
    return {one["metadata"]["name"]: (one.get("data") or {}).get("policy.cfg") for one in found}


def edit(server, name, text=OTHER):
    server.request("PATCH", f"{MAPS}/{name}", {"data": {"policy.cfg": text}}, MERGE)


NAME = subject.Options(POLICY, PREFIX).name


# --------------------------------------------------------------------------- success


def test_policy_rolled_out_idempotently_and_removed(api, openshift):
    with PlayedOperator(openshift, "4.9.23") as operator:
        before = run(api, check=True)
        assert before["changed"] and named(openshift) == "" and maps(openshift) == {}
        done = run(api)
        assert done["changed"] and done["diff"] == before["diff"]
        assert done["library"] == api.library
        assert named(openshift) == NAME and maps(openshift) == {NAME: POLICY}
        assert operator.history == [NAME] and set(operator.current.values()) == {9}
        assert not run(api)["changed"] and operator.revision == 9
        assert run(api, policy="")["changed"] and named(openshift) == "" and maps(openshift) == {}
        with pytest.raises(Refused):
            openshift.request("GET", "/api/v1/namespaces/openshift-kube-scheduler/configmaps/policy-configmap")


def test_changed_policy_gets_a_new_config_map(only, openshift):
    with PlayedOperator(openshift, "4.8.0") as operator:
        run(only)
        run(only, OTHER)
        other = subject.Options(OTHER, PREFIX).name
        assert operator.history == [NAME, other] and maps(openshift) == {other: OTHER}


def test_users_policy_restored_byte_for_byte(only, openshift):
    users_map(openshift)
    with PlayedOperator(openshift, "4.6.1", policy="team-policy") as operator:
        run(only, base=USERS)
        assert named(openshift) == NAME and maps(openshift)["team-policy"] == USERS
        # Ours is made from the user's own.
        assert run(only, base=USERS)["changed"] is False
        assert run(only, policy="", base=USERS)["changed"]
        assert named(openshift) == "team-policy" and maps(openshift) == {"team-policy": USERS}
        assert operator.history == [NAME, "team-policy"]
        assert not run(only, policy="", base=USERS)["changed"]


def test_users_policy_with_the_extender_is_kept(only, openshift):
    users_map(openshift, text=POLICY)
    with PlayedOperator(openshift, "4.9.0", policy="team-policy"):
        assert not run(only, base=POLICY)["changed"]


def test_deleted_users_map_not_named_again(only, openshift):
    users_map(openshift)
    with PlayedOperator(openshift, "4.9.0", policy="team-policy"):
        run(only, base=USERS)
        openshift.request("DELETE", f"{MAPS}/team-policy")
        run(only, policy="")
        assert named(openshift) == "" and maps(openshift) == {}


def test_definition_of_4_6_accepts_the_policy(only, openshift):
    old = yaml.safe_load((definitions() / OLD).read_text())
    newest = (definitions() / "schedulers.config.openshift.io.yaml").read_text()
    # The API version of this definition is gone; its schema is tested.
    spec = old["spec"]
    schema, status = spec.pop("validation"), spec.pop("subresources")
    spec["versions"] = [{**version, "schema": schema, "subresources": status} for version in spec["versions"]]
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


# --------------------------------------------------------------------------- failures and kills


@pytest.mark.parametrize(
    ("script", "message"),
    [("crash", CRASH), ("failed-revision", INSTALLER), ("slow", "not within"), ("asleep", "not within")],
)
def test_failed_rollout_rolls_back_with_the_operators_message(only, openshift, script, message):
    users = "" if script == "crash" else "team-policy"
    if users:
        users_map(openshift)
    before = maps(openshift)
    with PlayedOperator(openshift, "4.7.3", [script], policy=users) as operator:
        with pytest.raises(NotInEffect) as failure:
            run(only, base=USERS if users else None, timeout=5.0 if message == "not within" else 20.0)
        assert message in str(failure.value) and "healthy" in str(failure.value)
        assert "isn't healthy" not in str(failure.value)
        assert failure.value.details["changed"]
        assert named(openshift) == users and maps(openshift) == before
        assert operator.history == [NAME, users] or script == "asleep"
        # The next run succeeds.
        assert run(only, base=USERS if users else None)["changed"]
        assert named(openshift) == NAME


def test_failed_rollback_reported_and_nothing_deleted(only, openshift):
    with PlayedOperator(openshift, "4.9.1", ["crash", "asleep"]):
        with pytest.raises(NotInEffect, match="isn't healthy yet"):
            run(only, timeout=0.5)
        assert named(openshift) == "" and NAME in maps(openshift)


def test_failed_removal_rolls_back(only, openshift):
    with PlayedOperator(openshift, "4.9.1", ["rollout", "crash"]):
        run(only)
        with pytest.raises(NotInEffect, match="CrashLoopBackOff"):
            run(only, policy="")
        assert named(openshift) == NAME and maps(openshift) == {NAME: POLICY}
        # The record of the removal is rolled back, too.
        assert not run(only)["changed"]


def test_old_failed_revision_ignored():
    status = {
        "latestAvailableRevision": 8,
        "nodeStatuses": [{"nodeName": "a", "currentRevision": 8, "lastFailedRevision": 5, "targetRevision": 9}],
    }
    assert pure.rollout_of(None, {"status": status}).failure(7) == ""
    status["nodeStatuses"][0]["lastFailedRevision"] = 9
    assert "revision 9 failed on node a" in pure.rollout_of(None, {"status": status}).failure(8)


class Cut:
    """A client that kills the module before or after the n-th change."""

    def __init__(self, api, number, after):
        self.api, self.left, self.after = api, number, after

    def __getattr__(self, name):
        call = getattr(self.api, name)
        return functools.partial(self._change, call) if name in ("apply", "patch", "delete") else call

    def _change(self, call, *arguments):
        self.left -= 1
        if self.left == 0 and not self.after:
            raise Killed
        call(*arguments)
        if self.left == 0:
            raise Killed


def once_settled(*arguments):
    """Run once the rollout before is complete."""
    end = time.monotonic() + 20
    while True:
        try:
            return run(*arguments)
        except BadInput as error:
            if error.details.get("code") != "RolloutInProgress" or time.monotonic() > end:
                raise
        time.sleep(0.05)


SECOND = f"{NAME}-2"
TEAM = "team-policy"


@pytest.mark.long
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    # the user's policy; the policies of the run before, the killed and the next one ("": removal); the name at the end
    ("users", "first", "killed", "then", "target"),
    [
        (TEAM, None, POLICY, POLICY, NAME),
        (TEAM, POLICY, OTHER, OTHER, subject.Options(OTHER, PREFIX).name),
        (TEAM, POLICY, "", "", TEAM),
        # Its ConfigMap is edited meanwhile.
        (TEAM, POLICY, POLICY, POLICY, SECOND),
        (TEAM, None, POLICY, "", TEAM),
        ("", None, POLICY, "", ""),
        (TEAM, POLICY, "", POLICY, NAME),
        ("", POLICY, "", POLICY, NAME),
    ],
)
def test_killed_run_is_completed_or_reverted_by_the_next(only, openshift, users, first, killed, then, target, after):
    base = USERS if users else None
    for number in range(1, 20):
        openshift.request("DELETE", MAPS)
        users_map(openshift)
        with PlayedOperator(openshift, "4.9.5", policy=users) as operator:
            if first:
                run(only, first, base)
            if target == SECOND:
                edit(openshift, NAME)
            try:
                run(Cut(only, number, after), killed, base)
            except Killed:
                pass
            else:
                break
            # The named map exists.
            assert named(openshift) in (*maps(openshift), users)
            once_settled(only, then, base)
            assert named(openshift) == target
            assert set(maps(openshift)) == {TEAM, target} - {""}
            assert set(operator.current.values()) == {operator.revision}
            assert killed == then or set(operator.history) <= {NAME, users}
            assert not run(only, then, base)["changed"]
    assert number > 2


def test_refused_removal_leaves_no_record(only, openshift):
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
        # A run that waits for a rollout which never comes takes its whole time.
        assert run(only)["changed"] and time.monotonic() - started < 20
        assert operator.history == [NAME] and named(openshift) == NAME
        assert not run(only)["changed"]


def test_crash_after_a_killed_run_rolls_back(only, openshift):
    with PlayedOperator(openshift, "4.9.5", ["crash"]):
        # Create and name, then die before the first observation.
        with pytest.raises(Killed):
            run(Cut(only, 2, True))
        assert named(openshift) == NAME
        with pytest.raises(NotInEffect, match="CrashLoopBackOff"):
            run(only)
        assert named(openshift) == "" and maps(openshift) == {}


def degraded(api):
    """Wait until kube-scheduler crashes."""
    end = time.monotonic() + 20
    while pure.observe_rollout(api).degraded != CRASH:
        assert time.monotonic() < end
        time.sleep(0.02)


# --------------------------------------------------------------------------- removal of a harmful policy


def test_removal_while_kube_scheduler_is_degraded(only, openshift):
    with PlayedOperator(openshift, "4.9.1", ["rollout", "lingering"]) as operator:
        run(only)
        operator._report(degraded=CRASH)
        operator.version("4.9.1", "Working towards 4.9.2: kube-scheduler is degraded")
        assert run(only, policy="", check=True)["changed"] and named(openshift) == NAME
        assert run(only, policy="")["changed"]
        assert named(openshift) == "" and maps(openshift) == {} and operator.history == [NAME, ""]


def test_removal_of_a_crashing_policy_after_a_killed_run(only, openshift):
    users_map(openshift)
    with PlayedOperator(openshift, "4.9.1", ["crash", "lingering"], policy="team-policy") as operator:
        with pytest.raises(Killed):
            run(Cut(only, 2, True), base=USERS)
        degraded(only)
        with pytest.raises(BadInput, match=r"degraded already: .* our policy, which state absent removes"):
            run(only, OTHER, USERS)
        assert run(only, policy="", base=USERS)["changed"]
        assert named(openshift) == "team-policy" and list(maps(openshift)) == ["team-policy"]
        assert set(operator.current.values()) == {operator.revision}


def test_unproven_policy_not_named_again(only, openshift):
    with PlayedOperator(openshift, "4.9.1", ["crash", "asleep"]) as operator:
        with pytest.raises(Killed):
            run(Cut(only, 2, True))
        degraded(only)
        with pytest.raises(NotInEffect, match="names no policy in place of ours, and that isn't in effect yet"):
            run(only, policy="", timeout=0.5)
        assert named(openshift) == "" and operator.history == [NAME, ""]
        # The next run still waits.
        with pytest.raises(NotInEffect, match="isn't in effect yet"):
            run(only, policy="", timeout=0.5)
        operator._play("lingering")
        assert run(only, policy="")["changed"] and maps(openshift) == {}
        assert not run(only, policy="")["changed"]


def test_removal_waits_for_the_end_of_an_upgrade(only, openshift):
    with PlayedOperator(openshift, "4.8.1") as operator:
        run(only)
        operator.version("4.9.1", "Working towards 4.9.1")
        with pytest.raises(BadInput, match="being upgraded"):
            run(only, policy="")
        assert named(openshift) == NAME


@pytest.mark.parametrize("rolled_out", [False, True])
def test_edited_map_of_ours_is_replaced(only, openshift, rolled_out):
    users_map(openshift)
    with PlayedOperator(openshift, "4.9.1", policy="team-policy") as operator:
        run(only, base=USERS)
        for before, after in ((NAME, SECOND), (SECOND, NAME)):
            edit(openshift, before)
            if rolled_out:
                operator._play("rollout")
            # The named map is not written to.
            checked = run(only, base=USERS, check=True)
            assert run(only, base=USERS)["diff"] == checked["diff"]
            assert named(openshift) == after and maps(openshift) == {after: POLICY, "team-policy": USERS}
            assert set(operator.current.values()) == {operator.revision}
            assert not run(only, base=USERS)["changed"]
        edit(openshift, NAME)
        assert run(only, policy="", base=USERS)["changed"]
        assert named(openshift) == "team-policy" and maps(openshift) == {"team-policy": USERS}


def test_deleted_map_of_ours_is_replaced(only, openshift):
    with PlayedOperator(openshift, "4.9.1") as operator:
        for wanted, target in ((POLICY, SECOND), ("", "")):
            run(only)
            gone = named(openshift)
            openshift.request("DELETE", f"{MAPS}/{gone}")
            assert run(only, wanted)["changed"]
            assert named(openshift) == target and set(maps(openshift)) == {target} - {""}
            assert set(operator.current.values()) == {operator.revision}


def test_other_config_map_prefix_needs_no_new_revision(only, openshift):
    with PlayedOperator(openshift, "4.9.1") as operator:
        run(only)
        assert run(only, prefix="team-b")["changed"]
        assert list(maps(openshift)) == [named(openshift)] and named(openshift).startswith("team-b-")
        assert operator.revision == 9


def test_concurrently_named_policy_is_kept(only, openshift):
    class Meddled(Cut):
        def patch(self, ref, body):
            users_map(openshift)
            openshift.request("PATCH", SCHEDULER, {"spec": {"policy": {"name": "team-policy"}}}, MERGE)
            return self.api.patch(ref, body)

    with PlayedOperator(openshift, "4.9.5"):
        with pytest.raises(ShareError, match="409"):
            run(Meddled(only, 0, True))
        assert named(openshift) == "team-policy"


def test_unreachable_api_server_is_retried(only, openshift):
    class Flaky(Cut):
        reads = 0

        def get(self, ref):
            self.reads += 1
            if 8 < self.reads < 14:
                raise BadInput("the API server can't be reached")
            return self.api.get(ref)

    with PlayedOperator(openshift, "4.9.5"):
        api = Flaky(only, 0, True)
        assert run(api)["changed"] and api.reads > 14


# --------------------------------------------------------------------------- refusals


def test_policy_refused_from_4_10_on(api, openshift):
    for version in ("4.10.0", "4.10.0-rc.3", "4.18.7", "5.0.1"):
        with (
            PlayedOperator(openshift, version),
            pytest.raises(BadInput, match=r"scheduler_mode: the scheduler of OpenShift .* degrades"),
        ):
            run(api)
        assert maps(openshift) == {} and named(openshift) == ""


def test_users_policy_not_named_again_after_upgrade_to_4_10(only, openshift):
    users_map(openshift)
    with PlayedOperator(openshift, "4.9.9", policy="team-policy"):
        run(only, base=USERS)
    with PlayedOperator(openshift, "4.10.1", policy=NAME) as operator:
        assert pure.observe_rollout(only).degraded == REMOVED
        done = run(only, policy="", base=USERS)
        assert done["changed"] and "team-policy, which Scheduler/cluster named before ours" in done["warnings"][0]
        assert operator.history == [""] and not pure.observe_rollout(only).degraded
        assert named(openshift) == "" and maps(openshift) == {"team-policy": USERS}
        assert "warnings" not in run(only, policy="", base=USERS)


def test_our_policy_never_named_again_from_4_10_on(only, openshift):
    with PlayedOperator(openshift, "4.9.9"):
        run(only)
    with PlayedOperator(openshift, "4.10.1", ["asleep"], policy=NAME) as operator:
        with pytest.raises(NotInEffect, match="names no policy in place of ours"):
            run(only, policy="", timeout=0.5)
        assert named(openshift) == "" and operator.history == [""]
        operator._play("rollout")
        assert run(only, policy="")["changed"] and maps(openshift) == {}


def test_upgrade_degradation_or_rollout_in_progress_refused(only, openshift):
    with PlayedOperator(openshift, "4.8.2") as operator:
        operator.version("4.9.0", "Working towards 4.9.0: 71 of 738 done (9% complete)")
        with pytest.raises(BadInput, match=r"being upgraded .Working towards 4.9.0"):
            run(only)
        operator.version("4.9.0")
        operator._report(degraded=CRASH)
        with pytest.raises(BadInput, match="degraded already: StaticPodsDegraded"):
            run(only)
        operator.revision += 1
        operator._report()
        with pytest.raises(BadInput, match="still being rolled out: newest revision 9, master-0 at revision 8"):
            run(only)
        assert maps(openshift) == {} and named(openshift) == ""


def test_missing_or_foreign_policy_map_refused(only, openshift):
    with PlayedOperator(openshift, "4.9.0", policy="gone"):
        with pytest.raises(BadInput, match="names the policy gone, and ConfigMap openshift-config/gone doesn't exist"):
            run(only)
        openshift.request("POST", MAPS, {"metadata": {"name": "gone"}, "data": {"policy.json": "{}"}})
        with pytest.raises(BadInput, match=r"has no policy.cfg"):
            run(only)
    with PlayedOperator(openshift, "4.9.0"):
        # Of the very name, which a digest makes unlikely, and with the label of ours.
        labels = {"app.kubernetes.io/part-of": "gpushare"}
        openshift.request("POST", MAPS, {"metadata": {"name": NAME, "labels": labels}, "data": {"policy.cfg": POLICY}})
        with pytest.raises(BadInput, match=f"config_map: ConfigMap openshift-config/{NAME} exists and isn't ours"):
            run(only)


def test_removal_does_nothing_where_the_users_policy_is_broken(only, openshift):
    with PlayedOperator(openshift, "4.9.0", policy="gone") as operator:
        assert not run(only, policy="")["changed"]
        openshift.request("POST", MAPS, {"metadata": {"name": "gone"}, "data": {"policy.json": "{}"}})
        labels, note = {"app.kubernetes.io/part-of": "gpushare"}, {subject.USERS: ""}
        ours = {"name": NAME, "labels": labels, "annotations": note}
        openshift.request("POST", MAPS, {"metadata": ours, "data": {"policy.cfg": POLICY}})
        # What nothing names any more is deleted.
        assert run(only, policy="")["changed"] and list(maps(openshift)) == ["gone"]
        assert not run(only, policy="")["changed"]
        assert named(openshift) == "gone" and operator.history == []


def test_a_users_map_without_a_policy_isnt_named_again(only, openshift):
    users_map(openshift)
    with PlayedOperator(openshift, "4.9.0", policy="team-policy"):
        run(only, base=USERS)
        openshift.request("PATCH", f"{MAPS}/team-policy", {"data": {"policy.cfg": None}}, MERGE)
        done = run(only, policy="")
        assert "ConfigMap openshift-config/team-policy has no policy.cfg, so team-policy, which" in done["warnings"][0]
        assert named(openshift) == "" and list(maps(openshift)) == ["team-policy"]


def test_users_policy_changed_since_planning_refused(only, openshift):
    users_map(openshift)
    with PlayedOperator(openshift, "4.9.0", policy="team-policy"):
        with pytest.raises(BadInput, match="changed meanwhile; run again"):
            run(only, base="an older text")
        assert list(maps(openshift)) == ["team-policy"]


def test_cluster_without_cluster_version_refused(only, openshift):
    with contextlib.suppress(Refused):
        openshift.request("DELETE", "/apis/config.openshift.io/v1/clusterversions/version")
    with pytest.raises(BadInput, match="isn't OpenShift"):
        subject.observe(only, PREFIX)


def test_verify_checks_rollout_and_leftovers(only, openshift):
    kube = RealKube.of_module(module_of(openshift, ARGUMENTS))
    managed = POLICY.replace('"urlPrefix"', '"managedResources": [{"name": "aliyun.com/gpu-mem"}], "urlPrefix"')
    name = subject.Options(managed, PREFIX).name

    def found():
        """Level and cause of the findings of the checks S2 and S3."""
        pods = tuple(pod for pod in kube.list_all("v1", "Pod") if servers.is_server_pod(pod))
        given = Servers((), "gpushare-system", "openshift", "deny", pods=pods, api=kube)
        moment = Snapshot((), (), (), {}, "", (), 0, Options(), servers=given)
        results = [CheckResult("S2"), CheckResult("S3")]
        servers.schedulers_call_extender(moment, results[0])
        servers_scheduler.admission_policy_exists(moment, results[1])
        return [(finding.level, finding.cause, finding.node) for result in results for finding in result.findings]

    with PlayedOperator(openshift, "4.9.23"):
        assert found() == [("FAIL", "no_policy", "")]
        run(only, managed)
        # No extenders run here.
        missing = [("FAIL", "no_extender_on_node", node) for node in NODES]
        assert found() == missing
        edit(openshift, name, managed + " ")
        assert found() == [("FAIL", "policy_not_rolled_out", ""), *missing]
    with PlayedOperator(openshift, "4.18.3", policy=name):
        causes = [cause for _level, cause, _node in found()]
        assert causes == ["policy_left", "secondary_missing", "missing"]


# --------------------------------------------------------------------------- the library


def test_missing_library_reported(monkeypatch, openshift):
    for name in ("openshift", "openshift.dynamic"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ShareError, match=r"library: .* lacks openshift .* install it with pip"):
        client_of(openshift, library="openshift")
    assert client_of(openshift, library="auto").library == "kubernetes"
    monkeypatch.setitem(sys.modules, "kubernetes.dynamic", None)
    with pytest.raises(ShareError, match="lacks openshift and kubernetes"):
        scheduler.client_class("auto")


def test_discovery_cache_is_in_the_modules_folder(openshift, tmp_path):
    client_of(openshift, tmpdir=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["discovery.json"]


def test_client_errors(openshift, tmp_path):
    config = yaml.safe_load(openshift.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    elsewhere = tmp_path / "kubeconfig"
    elsewhere.write_text(yaml.safe_dump(config))
    with pytest.raises(BadInput, match="can't be reached: connection refused"):
        client_of(openshift, tmpdir=tmp_path, kubeconfig=str(elsewhere))
    nobody = str(openshift.kubeconfig_of("nobody", ("system:authenticated",)))
    with pytest.raises(ShareError, match="lacks a permission: clusterversions"):
        subject.observe(client_of(openshift, kubeconfig=nobody), PREFIX)
    api, route = client_of(openshift), scheduler.Ref("route.openshift.io/v1", "Route", "a", "b")
    with pytest.raises(ShareError, match="the cluster doesn't serve Route"):
        api.patch(route, {})
    assert api.get(route) is None
    api.delete(scheduler.Ref("v1", "ConfigMap", "openshift-config", "never-there"))


@pytest.mark.parametrize(
    ("version", "takes", "minor"),
    [("4.6.0", True, 19), ("4.9.59", True, 22), ("4.10.0-rc.1", False, 23), ("4.22", False, 35), ("5.0.0", False, 0)],
)
def test_versions(version, takes, minor):
    assert (pure.takes_policy(version), pure.kubernetes_minor(version)) == (takes, minor)
    with pytest.raises(BadInput, match="'nightly' isn't a version of OpenShift"):
        pure.release("nightly")
