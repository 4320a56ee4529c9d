# SPDX-License-Identifier: GPL-3.0-or-later
"""k3s and RKE2: the one file of ours, and a made-up node whose service writes containerd's configuration."""

from __future__ import annotations

import functools
import json
import typing as t
from collections.abc import Sequence

import pytest
from ansible_collections.kubegpu.share.plugins.module_utils import _cri_info, _k3s, _observe_k3s
from ansible_collections.kubegpu.share.plugins.module_utils._containerd import Wanted
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._k3s import K3S, RKE2, Kind
from ansible_collections.kubegpu.share.plugins.module_utils._k3s_apply import Rancher
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import replacements
from ansible_collections.kubegpu.share.plugins.module_utils._runtime_apply import Apply
from ansible_collections.kubegpu.share.plugins.module_utils._system import Done
from ansible_collections.kubegpu.share.plugins.plugin_utils._k3s_plan import TEXT, make_plan
from fake_node import Clock, FakeNode, killed

BINARY = "/usr/bin/nvidia-container-runtime"
PRESENT = Wanted(True, True, BINARY, True, False)
AVAILABLE = Wanted(True, False, BINARY, True, False)
ABSENT = Wanted(False, True, BINARY, True, False)
BOTH = pytest.mark.parametrize("kind", [K3S, RKE2], ids=lambda kind: kind.name)


class Service:
    """As both behave: the last file that names a default runtime wins, and containerd's configuration is made anew."""

    def __init__(self, node: FakeNode, kind: Kind, unit: str) -> None:
        self.node, self.kind, self.unit = node, kind, unit
        self.pid = 9
        self.flags = ""
        self.hates: t.Callable[[str], bool] = lambda default: False
        self.finds = BINARY

    def default(self) -> str:
        folder = [one for one in sorted(self.node.files) if one.startswith(f"{self.kind.folder}/")]
        texts = [self.node.files.get(path, "") for path in (self.kind.config, *folder)]
        return (
            [value for text in texts if (value := _k3s.setting(text, _k3s.KEY))][-1:][0]
            if any(_k3s.setting(text, _k3s.KEY) for text in texts)
            else ""
        )

    def restart(self) -> int:
        default = self.default()
        if self.hates(default):
            self.pid = 0
            return 1
        self.pid += 1
        base = "plugins.'io.containerd.cri.v1.runtime'.containerd"
        lines = ["version = 3", f"[{base}]", *([f'default_runtime_name = "{default}"'] if default else [])]
        for name, binary in (("runc", ""), ("nvidia", self.finds)):
            if name == "nvidia" and not (binary and self.node.exists(binary)):
                continue
            lines += [f'[{base}.runtimes."{name}"]', 'runtime_type = "io.containerd.runc.v2"']
            lines += [f'[{base}.runtimes."{name}".options]', *([f'BinaryName = "{binary}"'] if binary else [])]
            lines += ["SystemdCgroup = true"]
        self.node.files[_k3s.rendered(self.kind.data)] = "\n".join(lines) + "\n"
        return 0

    def info(self) -> Done:
        if not self.pid:
            return Done(1, "", "no")
        found = _observe_k3s.effective(self.node, self.kind.data)
        runtimes = {
            name: {"options": {"BinaryName": found.runtime(name).get(("options", "BinaryName"), "")}}
            for name in found.runtimes()
        }
        config = {"containerd": {"defaultRuntimeName": found.default_runtime or "runc", "runtimes": runtimes}}
        status = {"conditions": [{"type": "RuntimeReady", "status": True}]}
        return Done(0, json.dumps({"status": status, "config": config}), "")


def node(kind: Kind = K3S, agent: bool = False, version: str = "1.32.4") -> tuple[FakeNode, Service]:
    made = FakeNode({BINARY: "", kind.config: "write-kubeconfig-mode: '0644'\n"})
    service = Service(made, kind, kind.units[1 if agent else 0])
    service.restart()

    def systemctl(argv: Sequence[str]) -> Done:
        if argv[1] == "show":
            if argv[2] != service.unit:
                return Done(0, "LoadState=not-found\nActiveState=inactive\nMainPID=0\n", "")
            state = "active" if service.pid else "failed"
            start = (
                f"{{ path=/usr/local/bin/{kind.name} ; argv[]=/usr/local/bin/{kind.name} server {service.flags} ; }}"
            )
            return Done(0, f"LoadState=loaded\nActiveState={state}\nMainPID={service.pid}\nExecStart={start}\n", "")
        return Done(service.restart() if argv[1] == "restart" else 0, "", "")

    def program(argv: Sequence[str]) -> Done:
        if argv[-1] == "--version":
            return Done(0, f"{kind.name} version v{version}+{kind.name}1 (abc)\ngo version go1.24\n", "")
        return service.info()

    made.answers = {
        "systemctl": systemctl,
        kind.name: program,
        "crictl": lambda argv: service.info(),
        "journalctl": lambda argv: Done(0, 'time="x" level=fatal msg="no such runtime"\n', ""),
    }
    return made, service


def look(made: FakeNode, kind: Kind = K3S) -> dict[str, t.Any]:
    seen = _observe_k3s.observe(made, kind)
    assert seen is not None
    return seen


def run(made: FakeNode, wanted: Wanted, kind: Kind = K3S) -> dict[str, t.Any]:
    planned = make_plan(kind, wanted, look(made, kind))
    if planned.plan.empty:
        return {"changed": False}
    clock = Clock()
    return Apply(made, Rancher(made, wanted, kind), 10, clock.sleep, clock.now).run(replacements(planned.files))


@BOTH
@pytest.mark.parametrize("agent", [False, True])
def test_there_and_back_again(kind: Kind, agent: bool) -> None:
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


def test_only_available_needs_no_file() -> None:
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
    run(made, PRESENT)
    assert service.default() == "nvidia"
    run(made, ABSENT)
    assert service.default() == "crun"


def test_a_toolkit_that_came_after_its_start() -> None:
    made, service = node()
    del made.files[BINARY]
    service.restart()
    made.files[BINARY] = ""
    run(made, AVAILABLE)
    assert "nvidia" in look(made)["runtimes"]


def test_a_service_that_refuses_gets_its_old_files_back() -> None:
    made, service = node()
    before = dict(made.files)
    service.hates = lambda default: default == "nvidia"
    with pytest.raises(
        NotInEffect, match=r"k3s .* runs with the old one again \(systemctl restart ended with 1\): level=fatal"
    ):
        run(made, PRESENT)
    assert made.files == before and service.pid


def test_what_it_didnt_take_over_is_put_back() -> None:
    made, service = node()
    before = dict(made.files)
    service.finds = "/usr/local/bin/nvidia-container-runtime"
    made.files[service.finds] = ""
    with pytest.raises(NotInEffect, match="it has found NVIDIA's runtime at '/usr/local/bin/nvidia-container-runtime'"):
        run(made, PRESENT)
    assert K3S.drop_in not in made.files and made.files[K3S.config] == before[K3S.config]


def test_a_full_disk_leaves_all_as_it_was() -> None:
    made, _service = node()
    before, write = dict(made.files), made.write

    def full_disk(path: str, text: str, mode: int = 0o644) -> None:
        if path == K3S.drop_in:
            raise ShareError(f"{path} can't be written: No space left on device")
        write(path, text, mode)

    made.write = full_disk  # type: ignore[method-assign]
    with pytest.raises(ShareError, match="No space left on device; k3s's configuration is as it was"):
        run(made, PRESENT)
    assert made.files == before


@pytest.mark.parametrize("wanted", [PRESENT, ABSENT], ids=["present", "absent"])
def test_a_run_killed_anywhere_is_finished_by_the_next(wanted: Wanted) -> None:
    at = 1
    while True:
        made, service = node()
        if not wanted.present:
            run(made, PRESENT)
        ended = not killed(made, at, functools.partial(run, made, wanted))
        run(made, wanted)
        assert look(made)["default_runtime"] == ("nvidia" if wanted.present else ""), at
        assert run(made, wanted) == {"changed": False} and K3S.record not in made.files, at
        assert service.pid
        if ended:
            break
        at += 1
    assert at > 10


@pytest.mark.parametrize(
    ("version", "knows"),
    [
        ("1.25.16+k3s1", False),
        ("1.26.11+k3s1", False),
        ("1.26.12+k3s1", True),
        ("1.27.8+rke2r1", False),
        ("1.27.9+rke2r1", True),
        ("1.28.4+k3s2", False),
        ("1.28.5+k3s1", True),
        ("1.29.0+k3s1", True),
        ("1.36.3+k3s1", True),
        ("", False),
    ],
)
def test_releases_that_know_the_setting(version: str, knows: bool) -> None:
    assert _k3s.knows_default_runtime(version) is knows


@pytest.mark.parametrize(
    ("files", "flags", "version", "words"),
    [
        ({}, "", "1.28.4", "k3s 1.28.4+k3s1 has no setting default-runtime"),
        ({_k3s.templates(K3S.data)[0]: "version = 3\n"}, "", "1.32.4", "config-v3.toml.tmpl takes the place of"),
        ({f"{K3S.folder}/99-z.yaml": "default-runtime: crun\n"}, "", "1.32.4", "99-z.yaml is read after"),
        ({}, "--default-runtime=crun", "1.32.4", "starts k3s with --default-runtime=crun"),
        ({"/run/nvidia/toolkit/toolkit.pid": "1"}, "", "1.32.4", "GPU Operator"),
    ],
)
def test_refused_in_a_sentence(files: dict[str, str], flags: str, version: str, words: str) -> None:
    made, service = node(version=version)
    made.files.update(files)
    service.flags = flags
    with pytest.raises(BadInput) as refused:
        make_plan(K3S, PRESENT, look(made))
    assert words in str(refused.value)


def test_another_program_cant_be_given() -> None:
    made, _service = node()
    with pytest.raises(BadInput, match="runtime_nvidia_binary: k3s finds NVIDIA's runtime by itself"):
        make_plan(K3S, Wanted(True, True, "/opt/nvidia-container-runtime", True, False), look(made))


@pytest.mark.parametrize(
    "template", ['{{ template "base" . }}\n[x]\n', "{{- if .NodeConfig.DefaultRuntime }}x{{ end }}"]
)
def test_a_template_that_heeds_the_setting(template: str) -> None:
    made, _service = node()
    made.files[_k3s.templates(K3S.data)[1]] = template
    assert not make_plan(K3S, PRESENT, look(made)).plan.empty


def test_another_data_folder() -> None:
    made, _service = node()
    made.files[K3S.config] += "data-dir: /srv/k3s\n"
    made.files[_k3s.rendered("/srv/k3s")] = made.files[_k3s.rendered(K3S.data)].replace(
        "]\n", ']\ndefault_runtime_name = "x"\n', 1
    )
    assert look(made)["default_runtime"] == "x"


def test_not_there() -> None:
    made = FakeNode({}, {name: lambda argv: Done(127, "", "") for name in ("systemctl", "k3s", "rke2")})
    assert _observe_k3s.observe(made, K3S) is None and _observe_k3s.observe(made, RKE2) is None
    with pytest.raises(BadInput, match="RKE2 isn't installed"):
        make_plan(RKE2, PRESENT, None)
    assert make_plan(RKE2, ABSENT, None).plan.empty


def test_what_the_cri_says() -> None:
    text = json.dumps(
        {
            "status": {"conditions": [{"type": "RuntimeReady", "status": False}]},
            "config": {"containerd": {"defaultRuntimeName": "runc", "runtimes": {"runc": {"options": None}}}},
        }
    )
    found = _cri_info.read(text)
    assert found == _cri_info.CriInfo(False, "runc", {"runc": ""})
    assert _cri_info.differences(found, True, True, BINARY) == [
        "its default runtime is 'runc'",
        "it has no runtime 'nvidia'",
    ]
    assert _cri_info.differences(None, True, True, BINARY) == [] and _cri_info.read("x") is None
    assert _cri_info.read('{"status": {}}') == _cri_info.CriInfo(None, "", {})
