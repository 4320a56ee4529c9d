# SPDX-License-Identifier: GPL-3.0-or-later
"""k3s and RKE2: our drop-in, and a simulated service that generates containerd's configuration."""

from __future__ import annotations

import json
import re
import tomllib
import typing as t
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._core.errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import Done
from ansible_collections.kubegpu.share.plugins.module_utils._rancher import settings
from ansible_collections.kubegpu.share.plugins.module_utils._rancher.settings import K3S, RKE2, Kind
from ansible_collections.kubegpu.share.plugins.module_utils._runtime import cri, k3s, kubelet
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.containerd import TOOLKIT_CONFIG, Options
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.k3s_apply import K3sEngine
from ansible_collections.kubegpu.share.plugins.module_utils._runtime.k3s_plan import TEXT, make_plan
from fake_node import FakeNode
from layers import ROOT
from own_cluster import run_playbook
from runtime_kit import ABSENT, AVAILABLE, BINARY, PRESENT, REPLACED, REPLACING, kill_steps, show_unit, update

BASE = "plugins.'io.containerd.cri.v1.runtime'.containerd"
BOTH = pytest.mark.parametrize("kind", [K3S, RKE2], ids=lambda kind: kind.name)


class Service:
    """A simulated k3s or RKE2: the last file with a default runtime wins; a restart regenerates containerd's file."""

    def __init__(self, node: FakeNode, kind: Kind, unit: str, version: str) -> None:
        self.node, self.kind, self.unit, self.version = node, kind, unit, version
        self.pid = 9
        self.flags, self.environment = "", ""
        self.rejects: t.Callable[[str], bool] = lambda default: False
        self.finds = BINARY

    def settings(self) -> settings.Settings:
        return k3s.settings_of(self.node, self.kind, k3s.daemon_of(self.node, self.kind))

    def default(self) -> str:
        return settings.value(self.settings(), k3s.KEY)

    @property
    def data(self) -> str:
        return k3s.data_folder(self.kind, self.settings())

    def restart(self) -> int:
        default = self.default()
        if self.rejects(default):
            self.pid = 0
            return 1
        self.pid += 1
        template = next(
            (self.node.files[one] for one in k3s.templates(self.data, self.version) if one in self.node.files),
            "{{",
        )
        # Everything in braces stands for the base template, but a comment.
        rendered = re.sub(r"(?s)\{\{/\*.*?\*/\}\}", "", template)
        rendered = re.sub(r"\{\{.*", lambda _found: self.base(default), rendered)
        try:
            tomllib.loads(rendered)
        except tomllib.TOMLDecodeError:
            self.pid = 0
            return 1
        self.node.files[k3s.rendered(self.data)] = rendered
        return 0

    def base(self, default: str) -> str:
        folder = f"{self.kind.data}/agent/etc/containerd/config-v3.toml.d"
        lines = ["version = 3", f'imports = ["{folder}/*.toml"]']
        lines += [f"[{BASE}]", f'default_runtime_name = "{default}"'] if default else []
        for name, binary in (("runc", ""), ("nvidia", self.finds)):
            if name == "nvidia" and not (binary and self.node.exists(binary)):
                continue
            lines += [f'[{BASE}.runtimes."{name}"]', 'runtime_type = "io.containerd.runc.v2"']
            lines += [f'[{BASE}.runtimes."{name}".options]', *([f'BinaryName = "{binary}"'] if binary else [])]
            lines += ["SystemdCgroup = true"]
        return "\n".join(lines) + "\n"

    def info(self) -> Done:
        if not self.pid:
            return Done(1, "", "no")
        found = k3s.effective(self.node, self.data)
        runtimes = {
            name: {"options": {"BinaryName": found.runtimes[name].get(("options", "BinaryName"), "")}}
            for name in found.names
        }
        config = {"containerd": {"defaultRuntimeName": found.default_runtime or "runc", "runtimes": runtimes}}
        status = {"conditions": [{"type": "RuntimeReady", "status": True}]}
        return Done(0, json.dumps({"status": status, "config": config}), "")


def node(kind: Kind = K3S, agent: bool = False, version: str = "1.32.4") -> tuple[FakeNode, Service]:
    made = FakeNode({BINARY: "", kind.config: "write-kubeconfig-mode: '0644'\n"})
    service = Service(made, kind, kind.units[1 if agent else 0], version)

    def systemctl(argv: Sequence[str]) -> Done:
        if argv[1] == "show":
            if argv[2] != service.unit:
                return Done(0, "LoadState=not-found\nActiveState=inactive\nMainPID=0\n", "")
            more = {"Environment": f'"{service.environment}"'} if service.environment else {}
            return show_unit(service.pid, f"/usr/local/bin/{kind.name} server {service.flags}", **more)
        return Done(service.restart() if argv[1] == "restart" else 0, "", "")

    def program(argv: Sequence[str]) -> Done:
        if argv[-1] == "--version":
            return Done(0, f"{kind.name} version v{version}+{kind.name}1 (abc)\ngo version go1.24\n", "")
        return service.info()

    made.answers = {
        "systemctl": systemctl,
        kind.name: program,
        "env": program,
        "crictl": lambda argv: service.info(),
        "journalctl": lambda argv: Done(0, 'time="x" level=fatal msg="no such runtime"\n', ""),
    }
    service.restart()
    return made, service


def observe(made: FakeNode, kind: Kind = K3S) -> dict[str, t.Any]:
    seen = k3s.observe(made, kind)
    assert seen is not None
    return seen


def run(made: FakeNode, wanted: Options, kind: Kind = K3S) -> dict[str, t.Any]:
    planned = make_plan(kind, wanted, observe(made, kind))
    return {"changed": False} if planned.plan.empty else update(made, K3sEngine(made, wanted, kind), planned.files)


@BOTH
@pytest.mark.parametrize("agent", [False, True])
def test_addition_and_removal(kind: Kind, agent: bool) -> None:
    made, service = node(kind, agent)
    before = dict(made.files)
    done = run(made, PRESENT, kind)
    assert done["effective"] == {"default_runtime": "nvidia", "runtimes": {"nvidia": BINARY, "runc": ""}}
    assert made.files[f"/etc/rancher/{kind.name}/config.yaml.d/99-kubegpu-nvidia.yaml"] == TEXT
    assert made.log.count(f"systemctl restart {kind.units[agent]}") == 1
    assert run(made, PRESENT, kind) == {"changed": False}
    run(made, ABSENT, kind)
    assert made.files == before and run(made, ABSENT, kind) == {"changed": False}
    assert service.pid and not any("daemon-reload" in one for one in made.log)


def test_set_default_false_needs_no_file() -> None:
    made, _service = node()
    assert run(made, AVAILABLE) == {"changed": False}
    run(made, PRESENT)
    assert run(made, AVAILABLE)["effective"]["default_runtime"] == "" and K3S.drop_in not in made.files


def test_a_users_own_setting_stays() -> None:
    made, service = node()
    made.files[K3S.config] += "default-runtime: nvidia # mine\n"
    service.restart()
    assert run(made, PRESENT) == {"changed": False}
    made.files[K3S.config] = 'default-runtime: "crun"\n'
    service.restart()
    run(made, REPLACING)
    assert service.default() == "nvidia"
    again = make_plan(K3S, PRESENT, observe(made))
    assert again.plan.empty and REPLACED.format("k3s", "crun") in again.warnings[0]
    assert make_plan(K3S, REPLACING, observe(made)).warnings == ()
    run(made, AVAILABLE)
    assert service.default() == "crun"
    with pytest.raises(
        BadInput,
        match=r"runtime_replace_default: k3s's default runtime is crun, and pods .* name crun first in runtimes",
    ):
        run(made, PRESENT)
    # As the message says.
    made.files[TOOLKIT_CONFIG] = '[nvidia-container-runtime]\nruntimes = ["/usr/bin/crun", "runc"]\n'
    run(made, PRESENT)
    assert service.default() == "nvidia" and make_plan(K3S, PRESENT, observe(made)).warnings == ()
    run(made, ABSENT)
    assert service.default() == "crun"


def test_a_toolkit_installed_after_the_start() -> None:
    made, service = node()
    del made.files[BINARY]
    service.restart()
    made.files[BINARY] = ""
    run(made, AVAILABLE)
    assert "nvidia" in observe(made)["runtimes"]


def test_a_service_that_fails_to_start_is_rolled_back() -> None:
    made, service = node()
    before = dict(made.files)
    service.rejects = lambda default: default == "nvidia"
    with pytest.raises(NotInEffect, match=r"k3s .* rolled back, it runs with the old one: level=fatal"):
        run(made, PRESENT)
    assert made.files == before and service.pid


@BOTH
def test_a_rollback_after_the_first_installation_of_the_toolkit(kind: Kind) -> None:
    """The restart with the old settings finds NVIDIA's runtime, which wasn't there when the service started."""
    made, service = node(kind)
    del made.files[BINARY]
    service.restart()
    made.files[BINARY] = ""
    before = set(made.files)
    service.rejects = lambda default: default == "nvidia"
    with pytest.raises(NotInEffect, match=r" rolled back, it runs with the old one: level=fatal"):
        run(made, PRESENT, kind)
    assert observe(made, kind)["runtimes"].keys() == {"runc", "nvidia"}
    assert set(made.files) == before


@BOTH
@pytest.mark.parametrize(
    ("log", "named"),
    [
        ("containerd: toml: cannot decode TOML string into struct field of type int\n", True),
        ('time="x" level=info msg="ImageCreate event"\n', False),
        ("", False),
    ],
)
def test_why_its_containerd_ended_is_said(kind: Kind, log: str, named: bool) -> None:
    made, service = node(kind)
    read = f"{kind.data}/agent/containerd/containerd.log"
    made.answers["tail"] = lambda argv: Done(0 if argv[-1] == read else 1, log if argv[-1] == read else "", "")
    service.rejects = lambda default: default == "nvidia"
    with pytest.raises(NotInEffect, match=r"runs with the old one: level=fatal") as found:
        run(made, PRESENT, kind)
    assert str(found.value).endswith(f" | {log.strip()}") is named


def test_an_ineffective_change_is_rolled_back() -> None:
    made, service = node()
    before = dict(made.files)
    service.finds = "/usr/local/bin/nvidia-container-runtime"
    made.files[service.finds] = ""
    with pytest.raises(NotInEffect, match="it uses NVIDIA's runtime at '/usr/local/bin/nvidia-container-runtime'"):
        run(made, PRESENT)
    assert K3S.drop_in not in made.files and made.files[K3S.config] == before[K3S.config]


@pytest.mark.long
@pytest.mark.parametrize("wanted", [PRESENT, ABSENT], ids=["present", "absent"])
def test_the_run_after_a_killed_one_finishes(wanted: Options) -> None:
    def start() -> tuple[FakeNode, Service]:
        made, service = node()
        if not wanted.present:
            run(made, PRESENT)
        return made, service

    for made, service in kill_steps(start, lambda made: run(made, wanted)):
        run(made, wanted)
        assert observe(made)["default_runtime"] == ("nvidia" if wanted.present else "")
        assert run(made, wanted) == {"changed": False} and K3S.record not in made.files
        assert service.pid


@pytest.mark.parametrize(
    ("version", "has_setting"),
    [
        ("1.25.16+k3s1", False),
        ("1.27.8+rke2r1", False),
        ("1.27.9+rke2r1", True),
        ("1.28.4+k3s2", False),
        ("1.28.5+k3s1", True),
        ("1.29.0+k3s1", True),
        ("", False),
    ],
)
def test_releases_with_the_setting(version: str, has_setting: bool) -> None:
    assert k3s.since(version, k3s.HAVE_KEY) is has_setting


@pytest.mark.parametrize(
    ("files", "flags", "version", "message"),
    [
        ({}, "", "1.28.4", "k3s 1.28.4.k3s1 has no setting default-runtime"),
        ({f"{K3S.folder}/99-z.yaml": "default-runtime: crun\n"}, "", "1.32.4", "99-z.yaml is read after"),
        ({}, "--default-runtime=crun", "1.32.4", "starts k3s with --default-runtime=crun"),
        ({"/run/nvidia/toolkit/toolkit.pid": "1"}, "", "1.32.4", "GPU Operator"),
    ],
)
def test_refusals(files: dict[str, str], flags: str, version: str, message: str) -> None:
    made, service = node(version=version)
    made.files.update(files)
    service.flags = flags
    with pytest.raises(BadInput, match=message):
        make_plan(K3S, PRESENT, observe(made))


def test_another_binary_is_refused() -> None:
    made, _service = node()
    with pytest.raises(BadInput, match="runtime_nvidia_binary: k3s detects NVIDIA's runtime by itself"):
        make_plan(K3S, Options(True, binary="/opt/nvidia-container-runtime"), observe(made))


V3, V2 = (f"{K3S.data}/agent/etc/containerd/{name}" for name in k3s.TEMPLATES)
# As k3s' documentation has it.
CUSTOM = f"""
[{BASE}.runtimes.'custom']
  runtime_type = "io.containerd.runc.v2"
[{BASE}.runtimes.'custom'.options]
  BinaryName = "/usr/bin/custom-container-runtime"
  SystemdCgroup = true
"""
OTHER_DEFAULT = f'[{BASE}]\n  default_runtime_name = "%s"\n'


@BOTH
@pytest.mark.parametrize(
    "template",
    [
        '{{ template "base" . }}\n' + CUSTOM,
        "    {{- template `base` . -}}\n",
        '{{/* ours: default_runtime_name = "crun" */}}\n# [site]\n{{ template "base" . }}\n',
        "{{- if .NodeConfig.DefaultRuntime }}x{{ end }}",
    ],
)
def test_a_template_that_renders_the_setting(kind: Kind, template: str) -> None:
    made, service = node(kind)
    made.files[k3s.templates(kind.data, "1.32.4")[1]] = template
    service.restart()
    before = dict(made.files)
    assert run(made, PRESENT, kind)["effective"]["default_runtime"] == "nvidia"
    assert "custom" not in template or "custom" in observe(made, kind)["runtimes"]
    assert run(made, PRESENT, kind) == {"changed": False}
    run(made, ABSENT, kind)
    assert made.files == before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({V3: "version = 3\n"}, "config-v3.toml.tmpl replaces k3s's own template"),
        ({V2: '{{/* {{ template "base" . */}}\nversion = 2\n'}, "config.toml.tmpl replaces k3s's own template"),
        # Without a version containerd 2 ignores it.
        ({V2: '[plugins.cri.containerd]\ndefault_runtime_name = "nvidia"\n'}, "config.toml.tmpl replaces"),
        (
            {V3: '{{ template "base" . }}\n' + OTHER_DEFAULT % "custom" + CUSTOM},
            'tmpl sets default_runtime_name = "custom"',
        ),
        (
            {V3: '{{ template "base" . }}\n' + OTHER_DEFAULT % "kata"},
            "runtime_replace_default: .* default runtime is kata",
        ),
        ({V3: "{{ template `base` . }}\n" + CUSTOM.replace("custom'", "nvidia'")}, "has a table of the runtime nvidia"),
        (
            {
                V3: '{{ template "base" . }}\n'
                "[ plugins . 'io.containerd.cri.v1.runtime' . \"containerd\" . runtimes . nvidia ]  # ours\n"
            },
            "has a table of the runtime nvidia",
        ),
        ({f"{V3[:-5]}.d/50-site.toml": OTHER_DEFAULT % "runc"}, '50-site.toml sets default_runtime_name = "runc"'),
    ],
)
def test_templates_and_imported_files_that_are_refused(files: dict[str, str], message: str) -> None:
    made, service = node()
    made.files.update(files)
    service.restart()
    with pytest.raises(BadInput, match=message):
        run(made, PRESENT)
    assert K3S.drop_in not in made.files and "systemctl restart k3s.service" not in made.log


def test_containerd_1_has_no_template_of_version_3() -> None:
    refused, base = "version = 2\n", "{{ template `base` . }}"
    for version, counts, other in (("1.31.5", V2, V3), ("1.31.6", V3, V2), ("1.34.1", V3, V2)):
        made, _service = node(version=version)
        made.files |= {counts: base, other: refused}
        assert not make_plan(K3S, PRESENT, observe(made)).plan.empty
        made.files |= {counts: refused, other: base}
        with pytest.raises(BadInput, match=f"{counts} replaces"):
            make_plan(K3S, PRESENT, observe(made))


SETS_DEFAULT = f"""version = 3
[{BASE}]
  # default_runtime_name = "runc"
  default_runtime_name = "nvidia"
[{BASE}.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[{BASE}.runtimes.nvidia]
  runtime_type = "io.containerd.runc.v2"
[{BASE}.runtimes.nvidia.options]
  BinaryName = "{BINARY}"
"""
V1 = SETS_DEFAULT.replace(BASE, "plugins.cri.containerd").replace("version = 3\n", "")


@pytest.mark.parametrize(
    ("version", "path", "text"),
    [
        ("1.32.4", V3, SETS_DEFAULT),
        ("1.32.4", V2, SETS_DEFAULT.replace('"nvidia"', "'nvidia'")),
        ("1.32.4", V3, '{{ template "base" . }}\n' + OTHER_DEFAULT % "nvidia"),
        # It was valid for containerd 1, as the first templates for NVIDIA's runtime were written.
        ("1.25.16", V2, V1),
        ("1.32.4", f"{V3[:-5]}.d/99-nvidia.toml", OTHER_DEFAULT % "nvidia"),
    ],
)
def test_a_default_that_the_user_sets_for_containerd_needs_no_file(version: str, path: str, text: str) -> None:
    made, service = node(version=version)
    made.files[path] = text
    before = dict(made.files)
    # The service renders a template at its next start.
    done = run(made, PRESENT)
    assert path.endswith(".tmpl") is (done != {"changed": False})
    assert observe(made)["default_runtime"] == "nvidia"
    assert K3S.drop_in not in made.files and service.pid == (10 if path.endswith("99-nvidia.toml") else 11)
    assert run(made, PRESENT) == {"changed": False}
    rendered = k3s.rendered(K3S.data)
    assert {**made.files, rendered: ""} == {**before, rendered: ""}


@pytest.mark.parametrize("path", [V3, f"{V3[:-5]}.d/10-site.toml"])
def test_what_containerd_reads_at_its_start_makes_the_service_stale(path: str) -> None:
    made, service = node()
    made.files[path] = '{{ template "base" . }}\n' if path == V3 else "# none\n"
    service.restart()
    # Booted at 1000, started at 1090.
    made.files |= {
        f"/proc/{service.pid}/stat": f"10 (k3s) S {' '.join(['0'] * 18)} 9000 0",
        "/proc/uptime": "100.00 50.00\n",
    }
    made.answers |= {
        "stat": lambda argv: Done(0, "".join(f"{1095 if argument == path else 900}\n" for argument in argv[4:]), ""),
        "date": lambda _argv: Done(0, "1100.000000000\n", ""),
    }
    assert observe(made)["stale"] is True and not make_plan(K3S, AVAILABLE, observe(made)).plan.empty


def test_a_commented_default_of_a_template_is_none() -> None:
    made, _service = node(version="1.28.4")
    made.files[V2] = SETS_DEFAULT.replace("  default", "  # default")
    with pytest.raises(BadInput, match="has no setting default-runtime"):
        run(made, PRESENT)


@pytest.mark.parametrize(
    ("runtime_type", "name"), [("io.containerd.kata.v2", "safe (Kata)"), ("io.containerd.runsc.v1", "safe (gVisor)")]
)
def test_a_sandbox_is_replaced_only_where_the_user_allows_it(runtime_type: str, name: str) -> None:
    made, service = node()
    made.files[K3S.config] += "default-runtime: safe\n"
    service.restart()
    made.files[k3s.rendered(K3S.data)] += f'[{BASE}.runtimes."safe"]\nruntime_type = "{runtime_type}"\n'
    with pytest.raises(BadInput, match=re.escape(f"runtime_replace_default: k3s's default runtime is {name}, and")):
        run(made, PRESENT)
    assert run(made, AVAILABLE) == {"changed": False}
    run(made, REPLACING)
    assert service.default() == "nvidia" and run(made, REPLACING) == {"changed": False}


@BOTH
def test_nothing_lists_a_runtime_whose_program_was_removed(kind: Kind) -> None:
    made, service = node(kind)
    run(made, PRESENT, kind)
    run(made, ABSENT, kind)
    # k3s has started while the toolkit was there.
    assert "nvidia" in observe(made, kind)["runtimes"] and run(made, ABSENT, kind) == {"changed": False}
    del made.files[BINARY]
    done = run(made, ABSENT, kind)
    assert done["restarted"] and "nvidia" not in observe(made, kind)["runtimes"]
    assert run(made, ABSENT, kind) == {"changed": False}
    # A user's own table stays, whatever it names, and needs no restart each time.
    made.files[k3s.templates(kind.data, "1.32.4")[0]] = SETS_DEFAULT
    service.restart()
    assert observe(made, kind)["gone"] == ["nvidia"] and run(made, ABSENT, kind) == {"changed": False}


def test_another_data_directory() -> None:
    made, _service = node()
    made.files[K3S.config] += "data-dir: /srv/k3s\n"
    made.files[k3s.rendered("/srv/k3s")] = "version = 3\n" + OTHER_DEFAULT % "x"
    assert observe(made)["default_runtime"] == "x"


KATA = [
    "default-runtime: kata\n",
    '{"default-runtime": "kata"}\n',
    "{default-runtime: kata}\n",
    "default-runtime : kata\n",
    "  token: x\n  default-runtime: kata\n",
    "default-runtime: >-\n  kata\n",
    "x: &r kata\ndefault-runtime: *r\n",
    '"default-runtime" : "ka\\x74a" # mine\n',
    "default-runtime: !!str kata\n",
    "---\ndefault-runtime: kata\n...\n",
    "\ufeffdefault-runtime: kata\r\n",
]


@BOTH
@pytest.mark.parametrize("text", KATA, ids=repr)
@pytest.mark.parametrize("where", ["", ".d/50-rancher.yaml", ".d/1.YML"])
def test_kata_is_never_replaced_in_silence(kind: Kind, text: str, where: str) -> None:
    made, service = node(kind)
    made.files[kind.config + where] = text
    service.restart()
    made.files[k3s.rendered(kind.data)] += f'[{BASE}.runtimes."kata"]\nruntime_type = "io.containerd.kata.v2"\n'
    with pytest.raises(BadInput, match=r"runtime_replace_default: .* default runtime is kata \(Kata\), and"):
        make_plan(kind, PRESENT, observe(made, kind))


@BOTH
@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        ("--config=/srv/own.yaml", ""),
        ("-c /srv/own.yaml", ""),
        ("$MORE", "MORE=--config /srv/own.yaml"),
        ("", "{}_CONFIG_FILE=/srv/own.yaml"),
    ],
)
def test_the_drop_in_is_written_where_it_is_read(kind: Kind, flags: str, environment: str) -> None:
    made, service = node(kind)
    service.flags, service.environment = flags, environment.format(kind.name.upper())
    made.files |= {"/srv/own.yaml": "data-dir: /srv/state\n", kind.drop_in: TEXT}
    service.restart()
    before = dict(made.files)
    assert service.default() == ""
    run(made, PRESENT, kind)
    assert made.files["/srv/own.yaml.d/99-kubegpu-nvidia.yaml"] == TEXT and service.default() == "nvidia"
    # One of ours at the default place isn't read.
    assert kind.drop_in not in made.files and run(made, PRESENT, kind) == {"changed": False}
    assert observe(made, kind)["default_runtime"] == "nvidia"
    run(made, ABSENT, kind)
    del before[kind.drop_in]
    assert made.files == before


@BOTH
@pytest.mark.parametrize("flags", ["--data-dir /srv/x", "-d=/srv/x", "--selinux --data-dir=/srv/x/"])
def test_data_directory_on_the_command_line(kind: Kind, flags: str) -> None:
    made, service = node(kind)
    service.flags = flags
    service.restart()
    assert run(made, PRESENT, kind)["effective"]["default_runtime"] == "nvidia"
    asked = [one for one in made.log if "crictl" in one]
    client = (
        "env K3S_DATA_DIR=/srv/x CRI_CONFIG_FILE=/dev/null /usr/local/bin/k3s crictl"
        if kind is K3S
        else "/srv/x/bin/crictl"
    )
    assert asked and all(one.startswith(client) for one in asked)


@BOTH
def test_an_agent_with_all_its_files_elsewhere(kind: Kind) -> None:
    made, service = node(kind, agent=True)
    service.flags = "--config /srv/own.yaml --data-dir /srv/x"
    unit = f"/usr/local/lib/systemd/system/{kind.units[1]}"
    made.files = {BINARY: "", "/srv/own.yaml": "a: b\n", unit: "[Service]\n"}
    service.restart()
    found = kubelet.observe(made)
    assert found and found["runtime"] == kind.name
    run(made, PRESENT, kind)
    assert observe(made, kind)["default_runtime"] == "nvidia"


@BOTH
def test_settings_that_cannot_be_read_are_refused(kind: Kind) -> None:
    made, _service = node(kind)
    made.files[f"{kind.folder}/50-x.yaml"] = "a: 1\ndefault-runtime: {secret: x}\n"
    match = f"50-x.yaml, line 2: {kind.title}'s settings can't be read here: a setting that is a mapping"
    with pytest.raises(BadInput, match=match) as error:
        make_plan(kind, PRESENT, observe(made, kind))
    assert "secret" not in str(error.value)
    assert make_plan(kind, ABSENT, observe(made, kind)).plan.empty
    made.files[kind.drop_in] = TEXT
    with pytest.raises(BadInput, match=match):
        make_plan(kind, ABSENT, observe(made, kind))


@pytest.mark.parametrize(
    ("text", "flags", "docker"),
    [
        ("docker: true\n", "", True),
        ('"docker" : "true"\n', "", True),
        ("{docker: on}\n", "", True),
        ("docker: true\n", "--docker=false", False),
        ("", "--docker=true", True),
        ("", "-docker", True),
        ("docker: false\n", "", False),
        ("docker: 1\n", "--selinux", True),
    ],
)
def test_docker_in_all_spellings(text: str, flags: str, docker: bool) -> None:
    made, service = node()
    made.files[K3S.config], service.flags = text, flags
    found = kubelet.observe(made)
    assert found and found["runtime"] == ("docker" if docker else "k3s")


def test_rke2_has_no_docker_and_its_own_containerd() -> None:
    made, _service = node(RKE2, agent=True)
    made.files[RKE2.config] = f"docker: true\ncontainer-runtime-endpoint: unix://{k3s.SOCKET}\n"
    found = kubelet.observe(made)
    assert found and found["runtime"] == "rke2"
    made.files[f"{RKE2.folder}/1.yml"] = "container-runtime-endpoint: /run/crio/crio.sock\n"
    found = kubelet.observe(made)
    assert found and (found["runtime"], found["endpoint"]) == ("crio", "/run/crio/crio.sock")


def test_parse_crictl_info() -> None:
    status = {"conditions": [{"type": "RuntimeReady", "status": False}]}
    config = {"containerd": {"defaultRuntimeName": "runc", "runtimes": {"runc": {"options": None}}}}
    found = cri.parse_info(json.dumps({"status": status, "config": config}))
    assert found == cri.CriInfo(False, "runc", {"runc": ""})
    assert cri.differences(found, PRESENT) == ["its default runtime is 'runc'", "it has no runtime 'nvidia'"]
    assert cri.differences(None, PRESENT) == [] and cri.parse_info("x") is None
    assert cri.parse_info('{"status": {}}') == cri.CriInfo(None, "", {})


def test_uninstall_restarts_only_nodes_of_k3s_and_rke2(tmp_path: Path) -> None:
    """By Ansible itself, which refuses conditions that are no booleans, with the facts of each kind of node."""
    plays = yaml.safe_load((ROOT / "playbooks/uninstall.yml").read_text())
    (second,) = [
        role for play in plays for role in play.get("roles", ()) if "runtime_name" in role and "runtime" in role["role"]
    ]
    shapes = {
        "containerd": {"containerd": {"version": "2.2.9"}, "k3s": None, "rke2": None},
        "k3s": {"k3s": {"version": "v1.34.1+k3s1"}, "rke2": None},
        "rke2": {"k3s": None, "rke2": {"version": "v1.34.1+rke2r1"}},
        "nothing": {},
    }
    tasks = [
        {
            "ansible.builtin.debug": {"msg": f"second run on {name} as {second['runtime_name']}"},
            "when": second["when"],
            "vars": {"gpu_node": {"runtimes": shape}, "node_baseline_known": True},
        }
        for name, shape in shapes.items()
    ]
    done = run_playbook(tmp_path, [{"hosts": "localhost", "gather_facts": False, "tasks": tasks}])
    assert done.rc == 0, done.text
    found = re.findall(r"second run on (\w+) as (\w+)", done.text)
    assert found == [("k3s", "k3s"), ("rke2", "rke2")]
