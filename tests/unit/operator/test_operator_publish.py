# SPDX-License-Identifier: GPL-3.0-or-later
"""One command puts the operator into a registry: a real registry, and what the real opm reads there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import container_tools
import local_registry
import pytest
import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._host.system import RealSystem
from ansible_collections.kubegpu.share.plugins.module_utils._images import archives, engine, image_archive

from lab import build
from lab.shell import LabError

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "operator"))

import bundle
import files_image
import publish as subject

EPOCH = subject.EPOCH
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
FAR = f"registry.example.org/kubegpu/gpushare@sha256:{'a' * 64}"


def test_an_image_of_files_alone_is_reproducible_and_readable(tmp_path):
    files = {"manifests/a.yaml": b"a: 1\n", "metadata/b/c.yaml": b"c: 2\n"}
    paths = [tmp_path / name for name in ("1.tar", "2.tar")]
    for path in paths:
        files_image.write(str(path), "example.org/x:1", "linux/arm64", files, {"x": "y"}, EPOCH)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    image_archive.require(str(paths[0]), "example.org/x:1")
    assert archives.file_in(str(paths[0]), "metadata/b/c.yaml") == "c: 2\n"
    with tarfile.open(paths[0]) as archive:
        [image] = json.load(archive.extractfile("manifest.json"))
        config = json.load(archive.extractfile(image["Config"]))
        with tarfile.open(fileobj=archive.extractfile(image["Layers"][0])) as layer:
            members = {member.name: (member.isdir(), member.mtime) for member in layer}
    assert config["config"] == {"Labels": {"x": "y"}} and config["architecture"] == "arm64"
    assert members == {
        **dict.fromkeys(("manifests", "metadata", "metadata/b"), (True, EPOCH)),
        **dict.fromkeys(files, (False, EPOCH)),
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--registry", "https://registry.example.org"], "--registry is 'https://registry.example.org'"),
        (["--registry", "registry.example.org/kubegpu:1"], "--registry is"),
        (["--registry", "registry.example.org/x", "--older", "/nonexistent"], "/nonexistent isn't a catalog"),
        (["--registry", "registry.example.org/x", "--image", "x=y:1"], "the image x is 'y:1'"),
        (["--registry", "registry.example.org/x", "--engine", "podman"], "this machine has no podman"),
    ],
)
def test_what_cannot_be_published_is_refused_before_anything_is_pushed(tmp_path, monkeypatch, capsys, words, said):
    ran = []

    def run(argv, **_more):
        ran.append(argv)
        there = argv[0] == "docker" and argv[1] in ("--version", "version")
        return (0, "", "") if there else (127, "", "not found")

    monkeypatch.setattr(subject, "run_command", run)
    given = ["--servers-image", FAR, "--operator-image", FAR, "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["publish.py", *given, *words])
    assert subject.main() == 1
    assert said in capsys.readouterr().err
    assert not [argv for argv in ran if "push" in argv]


def test_the_sources_of_the_operators_image_are_what_its_containerfile_takes(tmp_path):
    subject.sources(tmp_path)
    recipe = (tmp_path / subject.CONTAINERFILE).read_text()
    taken = re.findall(r"^COPY (?!--from)(\S+) ", recipe, re.MULTILINE)
    assert {"operator", "roles", "plugins"} <= set(taken)
    assert [one for one in taken if not (tmp_path / one).exists()] == []
    assert (tmp_path / "operator" / "options.yml").read_text() == (bundle.HERE / "options.yml").read_text()
    # The servers' sources have links, which stay links; nothing is there that Git doesn't know.
    assert next((tmp_path / "images/gpushare/src/gpushare/shared").rglob("*.py")).is_symlink()
    assert {path.name for path in tmp_path.iterdir()} <= {one.split("/")[0] for one in subject.CONTEXT}
    assert subject.MARK in re.search(r"^LABEL (.*)", recipe, re.MULTILINE)[1]


def parts_of(text):
    """The documents of JSON that opm writes one after the other."""
    decoder, text, found = json.JSONDecoder(), text.strip(), []
    while text:
        one, end = decoder.raw_decode(text)
        found.append(one)
        text = text[end:].strip()
    return found


@pytest.mark.parametrize("name", [pytest.param("podman", marks=pytest.mark.long), "buildah"])
def test_one_command_puts_bundle_and_catalog_into_a_registry(tmp_path, name):
    try:
        environment = container_tools.environment(tmp_path)
        opm = build.built(build.OPM) / "opm"
        with local_registry.running(tmp_path / "registry") as registry:
            try:
                publishes(tmp_path, registry, name, environment, opm)
            finally:
                container_tools.unmount(tmp_path)
    except (LookupError, LabError) as error:
        pytest.skip(str(error))


def publishes(folder, registry, name, environment, opm):
    def command(argv, data=None, **_more):
        done = subprocess.run(argv, input=data, capture_output=True, text=True, check=False, env=environment)
        return done.returncode, done.stdout, done.stderr

    tool = engine.Engine(RealSystem(run_command=command), name, tls_verify=False)
    platforms = ("linux/amd64", "linux/arm64")
    beginning = f"{registry.host}/kubegpu"
    # In place of what a build would take minutes for.
    given = subject.Publisher(beginning, folder / "given", tool, platforms)
    images = {one: given.files(one, "1", {"x": one.encode()}, {}) for one in ("gpushare", "kubegpu-operator", "more")}

    def publish(out, *words):
        program = [sys.executable, str(Path(subject.__file__)), "--registry", beginning, "--engine", name]
        program += ["--no-tls-verify", "--servers-image", images["gpushare"]]
        program += ["--operator-image", images["kubegpu-operator"], "--out", str(out), *words]
        done = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[0]

    def rendered(image):
        code, out, error = command([opm, "render", "--use-http", "--migrate", image])
        assert code == 0, error
        return parts_of(out)

    first = publish(folder / "1", "--image", f"kube-scheduler={images['more']}", "--version", "1.4.2")
    written = folder / "1" / "catalog" / bundle.PACKAGE / "catalog.yaml"
    parts = list(yaml.load_all(written.read_text(), LOADER))
    source = yaml.safe_load((folder / "1" / "install" / "catalogsource.yml").read_text())
    assert rendered(first) == rendered(source["spec"]["image"]) == parts
    # What is written here is what opm makes of the bundle.
    assert rendered(parts[2]["image"]) == [parts[2]]
    named = {one["image"] for one in parts[2]["relatedImages"]}
    assert named == {parts[2]["image"], *images.values()}
    for image in (*named, first):
        index = registry.manifest(image)
        assert {f"{one['platform']['os']}/{one['platform']['architecture']}" for one in index["manifests"]} == set(
            platforms
        )
    cache = [opm, "serve", folder / "1" / "catalog", f"--cache-dir={folder / 'cache'}", "--cache-only"]
    done = subprocess.run([*cache, f"--termination-log={folder / 'log'}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    # The same again is the same images, and the next release keeps this one.
    again = publish(folder / "2", "--image", f"kube-scheduler={images['more']}", "--version", "1.4.2")
    assert again == first
    publish(folder / "3", "--older", str(written), "--version", "1.5.0")
    _package, channel, *bundles = rendered(source["spec"]["image"])
    assert [one["name"] for one in channel["entries"]] == ["kubegpu-operator.v1.4.2", "kubegpu-operator.v1.5.0"]
    assert bundles[0] == parts[2]
