# SPDX-License-Identifier: GPL-3.0-or-later
"""Both sides of the lab's air gap: the vendors and a machine with access, and a controller inside, with a registry.

The lab's own repositories, a chart server and a registry on loopback stand for NVIDIA, HAMi and their registries, and
Galaxy is a stand-in; PyPI and Debian are the real ones. The controller has this machine's programs and files, a network
of its own, and none of the checkout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import http.server
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import typing as t
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import ansible_collections.kubernetes.core as core
import yaml
from _closed import Member
from _lab import LAB, ROOT, Done, JsonObject, Lab, until

sys.path += [str(ROOT / "tests" / "unit"), str(ROOT / "tests" / "unit" / "airgap"), str(ROOT / "tests/unit/operator")]

import local_registry
import played_galaxy
import ports
import real_skopeo

from lab import aptsources, nodes, publish, repository, rootfs
from lab import archive as images
from lab import engine as engines
from lab.inventory import inventory
from lab.network import machine_address

# Of the lab's network: what isn't a node.
OUTSIDE, CONTROLLER, REGISTRY = 100, 101, 102
SIGNER = "archive@lab.example.org"
# What acceptance.yml's pods run, of the vendors' registry.
BASE = "registry.lab.example.org/kubegpu-lab/base:1"
FILES_PORT = 8090
FILES_FOLDER = "/var/lib/kubegpu-airgap"
VARIABLES = "group_vars/all/airgap.yml"


def listed(path: Path) -> JsonObject:
    return t.cast(JsonObject, yaml.load(path.read_text(), yaml.CSafeLoader))


# --------------------------------------------------------------------------- outside


def _chart(folder: Path, name: str) -> bytes:
    """Pack a folder as helm packs charts; the same content gives the same bytes."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", fileobj=packed, mtime=0) as plain,
        tarfile.open(fileobj=plain, mode="w") as tar,
    ):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                member = tarfile.TarInfo(f"{name}/{path.relative_to(folder)}")
                member.size, member.mode = path.stat().st_size, 0o644
                tar.addfile(member, io.BytesIO(path.read_bytes()))
    return packed.getvalue()


class Vendors:
    """Who has what an inventory needs.

    :ivar registry: its host, which stands for every public registry.
    :ivar charts: address of the server of charts.
    :ivar galaxy: address for ansible-galaxy.
    """

    def __init__(self, lab: Lab, folder: Path, registry: str, charts: str, galaxy: str) -> None:
        """Make the home of who works on the machine with access, whose programs ask these vendors."""
        self.registry, self.charts, self.galaxy = registry, charts, galaxy
        self.home = folder / "home"
        self._folder = folder
        self._repository = lab.state["repository"]["url"]
        self._places = repository.places(publish.tree(publish.DEBIAN[lab.state["suite"]], own=True))
        containers = self.home / ".config/containers"
        containers.mkdir(parents=True)
        (containers / "policy.json").write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
        hosts = ("docker.io", "nvcr.io", "registry.k8s.io", BASE.partition("/")[0])
        rows = (f'[[registry]]\nprefix = "{host}"\nlocation = "{registry}/{host}"\ninsecure = true\n' for host in hosts)
        (containers / "registries.conf").write_text("\n".join(rows))
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")},
            "HOME": str(self.home),
            "CONTAINERS_REGISTRIES_CONF": str(containers / "registries.conf"),
            "GNUPGHOME": str(folder / "gpg"),
            "ANSIBLE_GALAXY_SERVER": galaxy,
            "ANSIBLE_NOCOLOR": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "TMPDIR": str(folder),
        }

    @property
    def key_digests(self) -> dict[str, str]:
        """The variables that hold the vendors' keys, as an inventory has them."""
        return {f"{role}_repo_key_sha256": self._places[f"{role}_key_sha256"] for role in ("driver", "toolkit")}

    def image(self, reference: str, layers: Sequence[Path], environment: Sequence[str] = ()) -> None:
        """Put an image into the registry under its public name.

        :param environment: instead of an image's usual one.
        """
        packed = self._folder / "image.tar"
        made = images.Image(reference, tuple(layers))
        if environment:
            made = dataclasses.replace(made, environment=tuple(environment))
        images.write([made], packed, publish.architecture_here().debian)
        target = f"docker://{self.registry}/{reference}"
        command = [real_skopeo.program(), "copy", "--quiet", "--dest-tls-verify=false", f"docker-archive:{packed}"]
        subprocess.run([*command, target], check=True, env=self.environment, capture_output=True)
        packed.unlink()

    def program(self, reference: str, program: Path, *names: str) -> None:
        """Put a stand-in into the registry: a program of the tests on top of the servers' image.

        :param names: by which it is called.
        """
        layers = []
        with tarfile.open(LAB / "images" / "gpushare.tar") as saved:

            def content(name: str) -> bytes:
                file = saved.extractfile(name)
                assert file is not None
                return file.read()

            [known] = json.loads(content("manifest.json"))
            environment = json.loads(content(known["Config"]))["config"]["Env"]
            for number, name in enumerate(known["Layers"]):
                layers.append(self._folder / f"{number}.layer")
                layers[-1].write_bytes(content(name))
        own = images.layer_of({f"usr/local/bin/{name}": program for name in names}, self._folder / "own.layer")
        # Its plugin asks for the cards without being given any.
        kept = [row for row in environment if not row.startswith("NVIDIA_")]
        cards = ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=utility")
        self.image(reference, [*layers, own], [*kept, *cards])
        for path in (*layers, own):
            path.unlink()

    def sell(self, needed: Path) -> None:
        """Change a list of what is needed so that it names the lab's vendors, who have their own digests."""
        known = listed(needed)
        for item in known["items"]:
            if item["kind"] == "chart":
                item["source"] = self.charts
            elif item["kind"] == "image":
                item["digest"], item["platforms"] = "", {}
        needed.write_text(yaml.safe_dump(known, sort_keys=False))
        of_the_labs_repositories(needed, self._repository, self._places)


def of_the_labs_repositories(needed: Path, url: str, places: Mapping[str, str]) -> None:
    """Change a list of what is needed: driver and toolkit are in the lab's repositories.

    :param places: paths of these and of their keys, as the lab's state has them of a machine.
    """
    known = listed(needed)
    for item in known["items"]:
        section, part, *_rest = item["id"].split("/")
        if (section, part) in (("packages", "driver"), ("packages", "toolkit")):
            item["source"] = url + places[part]
        elif (section, part) == ("files", "key"):
            item["source"] = url + places["toolkit_key" if "libnvidia-container" in item["id"] else "driver_key"]
    # The tests' helm is built here, not downloaded.
    kept = [item for item in known["items"] if item["id"] != "files/program/helm"]
    needed.write_text(yaml.safe_dump({**known, "items": kept}, sort_keys=False))


@contextlib.contextmanager
def vendors(lab: Lab, folder: Path, charts: Mapping[str, Path]) -> Iterator[Vendors]:
    """Run the vendors' servers.

    :param charts: by name the folders of charts.
    """
    folder.mkdir(parents=True)
    served = folder / "charts"
    served.mkdir()
    handler = functools.partial(_Quiet, directory=str(served))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    collection = Path(next(iter(core.__path__)))
    about = json.loads((collection / "MANIFEST.json").read_text())["collection_info"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(ports.serving(server))
        registry = stack.enter_context(local_registry.running(folder / "registry"))
        galaxy = stack.enter_context(played_galaxy.galaxy(played_galaxy.tarball_of(collection), about))
        made = Vendors(lab, folder, registry.host, f"http://127.0.0.1:{server.server_port}", galaxy)
        rows = {}
        for name, source in charts.items():
            version = listed(source / "Chart.yaml")["version"]
            (served / f"{name}-{version}.tgz").write_bytes(_chart(source, name))
            rows[name] = [{"name": name, "version": version, "urls": [f"{name}-{version}.tgz"]}]
        (served / "index.yaml").write_text(yaml.safe_dump({"apiVersion": "v1", "entries": rows}))
        base = rootfs.rootfs("base", rootfs.BASE_PACKAGES, aptsources.read_machine())
        made.image(BASE, [base])
        _make_key(folder, made.environment)
        yield made
        subprocess.run(["gpgconf", "--kill", "gpg-agent"], env=made.environment, check=False)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_args: t.Any) -> None:
        pass


def _make_key(folder: Path, environment: Mapping[str, str]) -> None:
    (folder / "gpg").mkdir(mode=0o700)
    gpg = ["gpg", "--batch", "--quiet", "--no-tty"]
    for words in (
        ["--passphrase", "", "--quick-generate-key", SIGNER, "ed25519", "sign", "1y"],
        ["--armor", "--output", str(folder / "key.asc"), "--export", SIGNER],
    ):
        subprocess.run([*gpg, *words], env=environment, check=True, capture_output=True)


def chart_digest(source: Path, name: str) -> str:
    return hashlib.sha256(_chart(source, name)).hexdigest()


@contextlib.contextmanager
def machine_with_access(lab: Lab, folder: Path) -> Iterator[Path]:
    """Run a machine as the lab's nodes are, with the way out that they have; yields an inventory that has it alone."""
    engine = engines.find()
    assert engine is not None
    first = next(iter(lab.nodes.values()))
    image = engine.out("inspect", "--format={{.Config.Image}}", first["container"])
    address = machine_address(lab.state["settings"]["subnet"], OUTSIDE)
    node = nodes.Node("outside", address, 0, (("etc/kubegpu-lab/routes", 0o644, ""),))
    table = {"repository": lab.state["repository"]["address"]}
    engine.docker("rm", "--force", "--volumes", node.container, check=False)
    try:
        nodes.create(engine, image, node, table, (0, ""))
        engine.docker("start", node.container)
        known_hosts, path = folder / "known_hosts", folder / "hosts.yml"
        known_hosts.write_text(nodes.known_hosts({node.name: address}))
        options = f"-F none -o UserKnownHostsFile={known_hosts} -o StrictHostKeyChecking=yes -o IdentitiesOnly=yes"
        variables = {
            **{"ansible_host": address, "ansible_user": "root", "ansible_ssh_private_key_file": str(nodes.KEY)},
            **{"ansible_ssh_common_args": options, "ansible_python_interpreter": "/usr/bin/python3"},
        }
        groups = {"airgap_package_hosts": {"hosts": {node.name: variables}}, "gpu_nodes": {"hosts": {}}}
        path.write_text(yaml.safe_dump({"all": {"children": groups}}))
        command = ["ssh", "-i", str(nodes.KEY), *options.split(), f"root@{address}", "systemctl is-active containerd"]
        until(lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0, "SSH outside", 60)
        yield path
    finally:
        engine.docker("rm", "--force", "--volumes", node.container, check=False)


def download(lab: Lab, made: Vendors, hosts: Path, needed: Path, archive: Path, **variables: t.Any) -> Done:
    """Run airgap_download.yml on the machine with access, for a list that was carried out."""
    given = {
        **{"airgap_needed": str(needed), "airgap_folder": str(archive.with_suffix("")), "airgap_archive": str(archive)},
        **{"airgap_signing_key": SIGNER, "airgap_skopeo": real_skopeo.program()},
        **variables,
    }
    command = ["ansible-playbook", "-i", str(hosts), "playbooks/airgap_download.yml", "-e", json.dumps(given)]
    return _run(lab, "airgap_download", command, environment=made.environment, cwd=str(ROOT))


def _run(lab: Lab, name: str, command: Sequence[str], seconds: float = 1200, **more: t.Any) -> Done:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=seconds,
        env=more["environment"],
        cwd=more["cwd"],
    )
    lab.keep_output(name, done.stdout)
    return Done(done.returncode, done.stdout)


# --------------------------------------------------------------------------- inside


@dataclasses.dataclass(frozen=True)
class Inside:
    """The controller: a folder of its own, which is the home of who works there.

    :ivar registry: the one that takes the archive's images.
    """

    lab: Lab
    member: Member
    home: Path
    registry: real_skopeo.Registry

    @property
    def inventory(self) -> Path:
        return self.home / "inventory" / "hosts.yml"

    @property
    def files_address(self) -> str:
        return f"{self.lab.nodes[self.lab.control_planes[0]]['address']}:{FILES_PORT}"

    def settle(self, variables: Mapping[str, t.Any]) -> None:
        """Give the controller what its owner has: access to nodes and cluster, and an inventory with his variables."""
        shutil.copytree(LAB / "ssh", self.home / "ssh")
        shutil.copy(LAB / "kubeconfig", self.home / "kubeconfig")
        text = json.dumps(inventory(self.lab.state)).replace(str(LAB), str(self.home))
        known = json.loads(text)
        hostvars = known["_meta"]["hostvars"]
        groups = {
            name: {"hosts": {host: hostvars[host] for host in known[name]["hosts"]}}
            for name in ("control_plane", "gpu_nodes")
        }
        self.inventory.parent.mkdir()
        self.inventory.write_text(yaml.safe_dump({"all": {"children": groups}}))
        self.say(variables)

    def say(self, variables: Mapping[str, t.Any], hosts: Mapping[str, Mapping[str, t.Any]] | None = None) -> None:
        """Write the owner's variables, of all and of hosts; the archive's count more, as their file comes later."""
        own = {"group_vars/all/00-own": {"gpu_kubeconfig": str(self.home / "kubeconfig"), **variables}}
        own |= {f"host_vars/{name}": dict(values) for name, values in (hosts or {}).items()}
        for name, values in own.items():
            path = self.inventory.parent / f"{name}.yml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump(values))

    def run(self, name: str, script: str, seconds: float = 1200) -> Done:
        """Run a shell script in the home, in the closed network, where the checkout is an empty folder."""
        enter = ["ip", "netns", "exec", Path(self.member.path).name, "unshare", "--mount", "--propagation", "private"]
        hide = 'mount -t tmpfs none "$1" && cd "$2" && shift 2 && exec env -i "$@"'
        variables = {
            **{"HOME": str(self.home), "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1", "ANSIBLE_FORKS": "20"},
            **{"ANSIBLE_PIPELINING": "1", "PYTHON": python(), "USER": "root"},
            "PATH": f"{self.home}/kubegpu-share/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        }
        words = [f"{key}={value}" for key, value in variables.items()]
        command = [*enter, "sh", "-c", hide, "sh", str(ROOT), str(self.home), *words, "sh", "-euc", script]
        return _run(self.lab, name, command, seconds, environment=dict(os.environ), cwd="/")

    def playbook(self, name: str, *arguments: str, **variables: t.Any) -> Done:
        """Run a playbook of the collection that the archive has brought."""
        (self.home / "extra.json").write_text(json.dumps(variables))
        words = " ".join(["ansible-playbook", "-i", str(self.inventory), f"kubegpu.share.{name}", *arguments])
        return self.run(f"inside-{name}", f"{words} -e @{self.home}/extra.json")

    def push(self, archive: Path, *arguments: str, **variables: t.Any) -> Done:
        """Run airgap_push.yml as the page about air gaps has it."""
        given = {
            **{"airgap_archive": str(archive), "airgap_verification_key": str(self.home / "key.asc")},
            **{"airgap_registry": f"{self.registry.host}/gpu", "airgap_registry_auth_file": self.registry.auth_file},
            **{"airgap_registry_ca": self.registry.authority, "airgap_skopeo": real_skopeo.program()},
            **{"airgap_files_host": self.lab.control_planes[0], "airgap_files_address": self.files_address},
        }
        return self.playbook("airgap_push", *arguments, **{**given, **variables})

    def written(self) -> JsonObject:
        return listed(self.inventory.parent / VARIABLES)


def python() -> str:
    """The Python that the environment of the checkout was made by, and that the archive's wheels are for."""
    return str(getattr(sys, "_base_executable", sys.executable))


def trusted(lab: Lab, registry: real_skopeo.Registry, there: bool = True) -> None:
    """Have each node's containerd trust the registry's authority, and know its password."""
    folder = f"/etc/containerd/certs.d/{registry.host}"
    token = json.loads(Path(registry.auth_file).read_text())["auths"][registry.host]["auth"]
    hosts = (
        f'server = "https://{registry.host}"\n[host."https://{registry.host}"]\nca = "{folder}/ca.pem"\n'
        f'[host."https://{registry.host}".header]\nauthorization = "Basic {token}"\n'
    )
    script = f"mkdir -p {folder}\ncat >{folder}/ca.pem <<'EOF'\n{Path(registry.authority).read_text()}EOF\n"
    script += f"cat >{folder}/hosts.toml <<'EOF'\n{hosts}EOF"
    for name in lab.nodes:
        lab.ssh(name, script if there else f"rm -rf {folder}")


# The distribution's own sources, which aren't reached, and their lists: so does who closes a network.
_ASIDE = "/root/sources-aside"
_TAKE = f"mkdir {_ASIDE}; cd /etc/apt; mv sources.list sources.list.d {_ASIDE}/; mkdir sources.list.d"
_LISTS = "rm -rf /var/lib/apt/lists/*"
_GIVE = f"[ ! -d {_ASIDE} ] || {{ cp -a {_ASIDE}/. /etc/apt/; rm -rf {_ASIDE}; }}"


@contextlib.contextmanager
def without_sources(lab: Lab) -> Iterator[None]:
    """Take the distribution's sources off the nodes."""
    try:
        for name in lab.nodes:
            lab.ssh(name, f"{_GIVE}; {_TAKE}; {_LISTS}")
        yield
    finally:
        for name in lab.nodes:
            lab.ssh(name, f"{_GIVE}; {_LISTS}")
