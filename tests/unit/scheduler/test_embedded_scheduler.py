# SPDX-License-Identifier: GPL-3.0-or-later
"""kube-scheduler as k3s and RKE2 run it: their settings, our drop-in, and a server in memory that reads both."""

from __future__ import annotations

import json
import typing as t

import manifests
import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._rancher import settings
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler import embedded
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.embedded_plan import make_plan
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.plan import Options
from fake_machine import ABSENT, EXTENDER, OTHER, PRESENT, carry_out, left_by_kills, plan, run
from fake_server import FakeServer


@pytest.fixture(params=["k3s", "rke2"])
def server(request: pytest.FixtureRequest) -> FakeServer:
    return FakeServer(request.param)


BOTH = pytest.mark.parametrize("name", ["k3s", "rke2"])


def observe(server: FakeServer) -> t.Any:
    return cp.observe(server, ask=server.ask)


def kept(server: FakeServer) -> dict[str, str]:
    return {path: text for path, text in server.files.items() if path.startswith(("/etc/", "/var/", "/srv/"))}


@BOTH
def test_install_change_and_remove(name: str) -> None:
    server = FakeServer(name, "kube-scheduler-arg: [kube-api-qps=75]\n")
    before, places = kept(server), server.places
    planned = run(server, PRESENT)
    assert [file.path for file in planned.files] == [places.config, f"{places.kind.folder}/99-kubegpu-scheduler.yaml"]
    assert planned.urls == ("https://127.0.0.1:10259/livez", "https://127.0.0.1:10259/readyz")
    assert f"--config={places.config}" in server.arguments and "--kube-api-qps=75" in server.arguments
    config = yaml.safe_load(server.files[places.config])
    kubeconfig = f"/var/lib/rancher/{name}/server/cred/scheduler.kubeconfig"
    assert config["clientConnection"] == {"kubeconfig": kubeconfig, "qps": 75.0}
    assert config["enableProfiling"] is False and config["extenders"] == [EXTENDER.entry()]
    assert server.modes[places.config] == 0o644
    assert server.log.count(f"systemctl restart {places.unit}") == 1
    assert plan(server, PRESENT).plan.empty
    again = run(server, OTHER)
    assert places.config in [file.path for file in again.files] and plan(server, OTHER).plan.empty
    assert [file.path for file in run(server, ABSENT).files][-1] == places.config, "nothing names a file that is gone"
    assert kept(server) == before and plan(server, ABSENT).plan.empty
    assert f"rmdir {places.folder}" in server.log and f"--config={places.config}" not in server.arguments


@BOTH
def test_on_a_machine_without_ipv4_the_scheduler_answers_on_its_other_loopback_address(name: str) -> None:
    """k3s and RKE2 give kube-scheduler --bind-address=::1 there."""
    server = FakeServer(name)
    answers = server.ask
    server.ask = lambda url: answers(url) if "//[::1]:" in url else 0  # type: ignore[method-assign]
    run(server, PRESENT)
    assert observe(server)["health"] == 200 and plan(server, PRESENT).plan.empty


def test_rke2_pod_gets_mount_and_stamp() -> None:
    server = FakeServer("rke2")
    run(server, PRESENT)
    drop_in = yaml.safe_load(server.files["/etc/rancher/rke2/config.yaml.d/99-kubegpu-scheduler.yaml"])
    folder = "/etc/rancher/rke2/kubegpu-share"
    assert drop_in["kube-scheduler-extra-mount+"] == [f"{folder}:{folder}:ro"]
    [process] = observe(server)["running"]
    assert process["config"] == f"{folder}/scheduler.yaml" and len(process["stamp"]) == 64
    run(server, OTHER)
    assert observe(server)["running"][0]["stamp"] != process["stamp"], "a changed configuration starts the pod again"


@BOTH
@pytest.mark.parametrize("where", ["config.yaml", "drop-in", "command line"])
def test_users_configuration_gets_the_extender(name: str, where: str) -> None:
    path = "/etc/rancher/mine.yaml"
    flags = f"--kube-scheduler-arg=config={path}" if where == "command line" else ""
    setting = f"kube-scheduler-arg:\n  - v=2\n  - config={path}   # mine\n"
    server = FakeServer(name, setting if where == "config.yaml" else "", flags=flags)
    if where == "drop-in":
        server.put(f"{server.places.kind.folder}/10-mine.yaml", f'"kube-scheduler-arg+": ["config={path}"]\n', 0o644)
    entry = "urlPrefix: http://127.0.0.1:32766/g, bindVerb: b, managedResources: [{name: aliyun.com/gpu-mem}]"
    config = manifests.USERS_CONFIG.replace("extenders:\n", f"extenders:\n  - {{{entry}}} # upstream's\n")
    server.put(path, config, 0o640)
    server.restart()
    server.sleep(10)
    before = kept(server)
    assert [file.path for file in run(server, PRESENT).files][:2] == [server.places.merged, path]
    assert yaml.safe_load(server.files[path])["extenders"][0]["urlPrefix"] == EXTENDER.url
    assert server.files[path].startswith("# The platform team's scheduler.") and server.modes[path] == 0o640
    assert server.places.config not in server.files
    assert [argument for argument in server.arguments if "--config=" in argument] == [f"--config={path}"]
    assert plan(server, PRESENT).plan.empty
    run(server, OTHER)
    run(server, ABSENT)
    assert kept(server) == before and plan(server, ABSENT).plan.empty


def test_pod_of_rke2_that_sees_another_file_does_not_count() -> None:
    server = FakeServer("rke2", "kube-scheduler-arg: [config=/etc/rancher/mine.yaml]\n")
    for path in ("/etc/rancher/mine.yaml", "/elsewhere.yaml"):
        server.put(path, manifests.USERS_CONFIG, 0o644)
    server.restart()
    server.sleep(10)
    before, seen = kept(server), server.seen
    server.seen = lambda path: "/elsewhere.yaml" if "/root/" in path else seen(path)  # type: ignore[method-assign]
    with pytest.raises(NotInEffect, match=r"has other text in /etc/rancher/mine.yaml than .* has.*; rolled back"):
        run(server, PRESENT)
    assert kept(server) == before


@pytest.mark.parametrize("mount", ["/srv/scheduler:/conf", "/srv/scheduler/mine.yaml:/conf/mine.yaml:ro"])
def test_users_configuration_behind_a_mount_of_rke2(mount: str) -> None:
    settings = f"kube-scheduler-arg: [config=/conf/mine.yaml]\nkube-scheduler-extra-mount: ['/x:/', '{mount}']\n"
    server = FakeServer("rke2", settings)
    server.put("/srv/scheduler/mine.yaml", manifests.USERS_CONFIG, 0o644)
    server.restart()
    server.sleep(10)
    before = kept(server)
    planned = run(server, PRESENT)
    assert "/srv/scheduler/mine.yaml" in [file.path for file in planned.files] and planned.config == "/conf/mine.yaml"
    assert EXTENDER.url in server.loaded and planned.lease == ("kube-system", "kube-scheduler")
    [seen] = observe(server)["running"]
    assert (seen["fresh"], seen["extender"]) == (True, True) and plan(server, PRESENT).plan.empty
    del server.files[server.places.merged]
    run(server, ABSENT)
    assert kept(server) == before and plan(server, ABSENT).plan.empty


@pytest.mark.parametrize(
    ("version", "settings", "address"),
    [
        ("1.21.4", "", "127.0.0.1:10251"),
        ("1.21.4", "kube-scheduler-arg: [address=0.0.0.0, port=10300]\n", "0.0.0.0:10300"),
        ("1.22.4", "", "127.0.0.1:10251"),
        ("1.23.4", "", None),
    ],
)
def test_insecure_port_keeps_its_address(version: str, settings: str, address: str | None) -> None:
    server = FakeServer("k3s", settings, version=version)
    config = yaml.safe_load(plan(server, PRESENT).files[0].after or "")
    assert config.get("healthzBindAddress") == config.get("metricsBindAddress") == address


@BOTH
def test_removal_leaves_a_users_own_extender(name: str) -> None:
    own = manifests.USERS_CONFIG.replace("http://127.0.0.1:9000", EXTENDER.url)
    server = FakeServer(name, "kube-scheduler-arg: [config=/etc/rancher/mine.yaml]\n")
    server.put("/etc/rancher/mine.yaml", own, 0o644)
    assert plan(server, ABSENT).plan.empty


def test_refused_configuration_is_rolled_back(server: FakeServer) -> None:
    before = kept(server)
    server.refuses = lambda _server, config: "extenders" in config
    on_k3s = server.places.kind.name == "k3s"
    why = "it restarts again and again" if on_k3s else "it hasn't started kube-scheduler with .*"
    begun = server.time
    match = rf"\({why}\); rolled back, it runs with the old one: .*scheduler exited: no such file"
    with pytest.raises(NotInEffect, match=match):
        run(server, PRESENT)
    assert server.time - begun < 120
    assert kept(server) == before and server.healthy


def test_settings_overridden_by_a_later_file_refused(server: FakeServer) -> None:
    later = f"{server.places.kind.folder}/99-z.yaml"
    server.put(later, "kube-scheduler-arg: [v=4]\n", 0o644)
    with pytest.raises(BadInput, match=rf"{later} is read after .*-scheduler.yaml and overrides kube-scheduler-arg"):
        plan(server, PRESENT)
    server.put(later, "kube-scheduler-arg+: [v=4]\n", 0o644)
    run(server, PRESENT)
    assert "--v=4" in server.arguments


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        # Of two configurations the last counts.
        (
            "kube-scheduler-arg: [config=/a, config=/b]\n",
            {},
            "^/b, which k3s gives kube-scheduler as its --config, doesn't",
        ),
        ("disable-scheduler: true\n", {}, "k3s runs no kube-scheduler on this machine"),
        ("kube-scheduler-arg: [config=/a]\n", {}, "/a, which k3s gives kube-scheduler as its --config, doesn't exist"),
        ("kube-scheduler-arg: [config=/a\n", {}, r"/etc/rancher/k3s/config.yaml, line 1: k3s's settings can't be read"),
        ("", {"version": "1.20.4"}, r"k3s 1.20.4.* reads no drop-ins"),
        ("", {"version": "1.18.4"}, "scheduler_configuration: k3s's kube-scheduler gets the extender in a config"),
    ],
)
def test_refused(settings: str, changes: dict[str, t.Any], words: str) -> None:
    server = FakeServer("k3s", **changes)
    server.put(server.places.kind.config, settings, 0o600)
    with pytest.raises(BadInput, match=words):
        plan(server, PRESENT)
    assert not [one for one in server.log if one.startswith(("write", "remove"))]


def test_only_scheduler_settings_are_collected() -> None:
    text = """\
token: secret1
kube-scheduler-arg:   # flags
- v=2
# datastore-endpoint: postgres://user:secret2@host/db
- config=/a
agent-token: secret3
"disable-scheduler" : false
kube-apiserver-arg:
  - x=secret4
kube-scheduler-extra-env: [A=secret5]
kube-scheduler-extra-mount+: ["/a:/a",
  "/b:/b"]
"""
    server = FakeServer("k3s", text, flags="--token=secret6 --kubelet-arg=secret7")
    found = observe(server)["server"]["settings"]
    assert {key: settings.values(found, key) for key in embedded.KEYS} == {
        "kube-scheduler-arg": ["v=2", "config=/a"],
        "kube-scheduler-extra-mount": ["/a:/a", "/b:/b"],
        "kube-scheduler-extra-env": ["A"],
        "disable-scheduler": ["false"],
    }
    assert "secret" not in json.dumps(observe(server))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{token: secret, kube-scheduler-arg: [v=2", 2),
        ("{kube-scheduler-arg: [v=2]} secret", 2),
        ("kube-apiserver-arg: [&q v=2, secret]\nkube-scheduler-arg: [*r]", 3),
        ("kube-scheduler-arg: {secret: v=2}", 2),
    ],
)
def test_settings_that_cannot_be_read_are_refused(text: str, line: int) -> None:
    server = FakeServer("k3s")
    server.put(server.places.kind.config, f"# mine\n{text}\n", 0o600)
    with pytest.raises(BadInput, match=rf"config.yaml, line {line}: k3s's settings can't be read here: ") as error:
        plan(server, PRESENT)
    assert "secret" not in str(error.value)


def test_variable_that_rke2_would_ignore_is_refused() -> None:
    server = FakeServer("rke2")
    server.put("/etc/default/rke2-server", "# mine\nRKE2_KUBE_SCHEDULER_EXTRA_MOUNT='/a:/a'\n", 0o644)
    server.environment_files = ("/etc/default/rke2-server", "/etc/sysconfig/rke2-server")
    match = "has RKE2_KUBE_SCHEDULER_EXTRA_MOUNT in its environment, and RKE2 ignores it once"
    with pytest.raises(BadInput, match=match):
        plan(server, PRESENT)
    server.put(server.places.kind.config, "kube-scheduler-extra-mount: /a:/a\n", 0o600)
    run(server, PRESENT)


@BOTH
def test_settings_that_moved(name: str) -> None:
    server = FakeServer(name)
    before = kept(server)
    run(server, PRESENT)
    default = f"{server.places.kind.folder}/99-kubegpu-scheduler.yaml"
    server.flags = "--config=/srv/own.yaml"
    server.put("/srv/own.yaml", "token: x\n", 0o600)
    planned = plan(server, PRESENT)
    assert {file.path: file.after is None for file in planned.files} == {
        "/srv/own.yaml.d/99-kubegpu-scheduler.yaml": False,
        default: True,
    }
    assert [file.path for file in plan(server, ABSENT).files] == [server.places.config, default]
    assert default not in before


@BOTH
@pytest.mark.parametrize("where", ["flag", "drop-in"])
def test_kubeconfig_of_another_data_directory(name: str, where: str) -> None:
    server = FakeServer(name, flags="--data-dir /srv/x" if where == "flag" else "")
    if where == "drop-in":
        server.put(f"{server.places.kind.folder}/50-rancher.yaml", '{"data-dir": "/srv/x"}', 0o600)
    [config, *_rest] = plan(server, PRESENT).files
    assert (
        yaml.safe_load(config.after or "")["clientConnection"]["kubeconfig"]
        == "/srv/x/server/cred/scheduler.kubeconfig"
    )


@BOTH
def test_server_that_rancher_has_provisioned(name: str) -> None:
    """Rancher writes its settings as JSON to 50-rancher.yaml, at every change of the cluster, and leaves our file."""
    server = FakeServer(name, "node-label: [a=b]\n")
    ranchers = {"token": "secret", "kube-scheduler-arg": ["secure-port=10259"], "tls-san": ["x"]}
    path = f"{server.places.kind.folder}/50-rancher.yaml"
    server.put(path, json.dumps(ranchers, indent=2), 0o600)
    before = kept(server)
    run(server, PRESENT)
    assert {f"--config={server.places.config}", "--secure-port=10259"} <= set(server.arguments)
    server.put(path, json.dumps({**ranchers, "kube-scheduler-arg": ["secure-port=10259", "v=4"]}), 0o600)
    server.restart()
    server.sleep(10)
    assert {f"--config={server.places.config}", "--v=4"} <= set(server.arguments) and plan(server, PRESENT).plan.empty
    server.put(path, before[path], 0o600)
    run(server, ABSENT)
    assert kept(server) == before and "secret" not in json.dumps(observe(server))


def test_configuration_in_a_comment_ignored() -> None:
    text = "kube-scheduler-arg:\n- config=/a # was config=/old\n- v=2 # config=/old\n- x-config=/b\n"
    server = FakeServer("k3s", text)
    assert (embedded.observe(server, "k3s") or {})["named"] == "/a"


def test_agent_has_no_scheduler() -> None:
    server = FakeServer("k3s")
    server.places = embedded.PLACES["rke2"]
    observed = observe(server)
    assert observed["kind"] == "" and observed["embedded"] == "k3s" and observed["server"] is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"health": 0}, "not healthy"), ({"pending": True}, "an earlier run was interrupted")],
)
def test_right_files_and_unhealthy_scheduler_need_a_restart(
    server: FakeServer, changes: dict[str, t.Any], words: str
) -> None:
    run(server, PRESENT)
    planned = make_plan(PRESENT, {**observe(server), **changes})
    assert planned.files == () and [change.before for change in planned.plan.changes] == [f"{words}\n"]


def test_k3s_older_than_its_configuration_is_restarted() -> None:
    server = FakeServer("k3s")
    planned = plan(server, PRESENT)
    for file in planned.files:
        server.put(file.path, file.after or "", 0o644)
    server.time += 5
    observed = plan(server, PRESENT)
    assert [change.before for change in observed.plan.changes] == ["k3s.service is older than this configuration\n"]
    carry_out(server, observed)
    assert plan(server, PRESENT).plan.empty


@BOTH
@pytest.mark.parametrize("users", [False, True], ids=["ours", "the user's"])
def test_rewritten_configuration_is_loaded_anew(name: str, users: bool) -> None:
    """Another program rewrites the file, kube-scheduler ends and starts with it, and then site.yml runs."""
    path = "/etc/rancher/mine.yaml" if users else embedded.PLACES[name].config
    server = FakeServer(name, f"kube-scheduler-arg: [config={path}]\n" if users else "")
    server.put(path, manifests.USERS_CONFIG, 0o644)
    for restarts in (0, 1, 2):
        server.restart()
        server.sleep(10)
        run(server, PRESENT)
        [seen] = observe(server)["running"]
        assert (seen["fresh"], seen["extender"], server.loaded == server.files[path]) == (True, True, True), restarts
        assert plan(server, PRESENT).plan.empty, "the process has loaded it"
        server.sleep(10)
        server.put(path, manifests.USERS_CONFIG, 0o644)
        server.sleep(10)
        server.container_restarts()
        server.sleep(10)
        assert server.loaded == manifests.USERS_CONFIG
    run(server, ABSENT)
    assert plan(server, ABSENT).plan.empty


@BOTH
@pytest.mark.parametrize("refused", [False, pytest.param(True, marks=pytest.mark.long)], ids=["good", "bad"])
@pytest.mark.parametrize(
    ("first", "wanted"), [(None, PRESENT), (PRESENT, ABSENT), pytest.param(PRESENT, OTHER, marks=pytest.mark.long)]
)
def test_run_killed_at_any_call_is_completed_by_the_next(
    name: str, first: Options | None, wanted: Options, refused: bool
) -> None:
    start = FakeServer(name)
    if first:
        run(start, first)
    old = kept(start)
    if refused and wanted.present:
        start.refuses = lambda _server, config: f"httpTimeout: {wanted.extender.timeout_seconds}s" in config
    left = left_by_kills(start, wanted, timeout=15)
    assert len(left) > 8
    for at, server in enumerate(left):
        again = plan(server, wanted)
        if refused and wanted.present and not again.plan.empty:
            with pytest.raises(NotInEffect, match="rolled back, it runs with the old one"):
                carry_out(server, again, timeout=15)
            assert kept(server) == old, at
        elif not again.plan.empty:
            carry_out(server, again)
            assert plan(server, wanted).plan.empty, at
        assert server.healthy and server.places.record not in server.files, at
