# SPDX-License-Identifier: GPL-3.0-or-later
"""Images whose environment asks for cards, as CUDA's images do; they hold only a program that sleeps."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from _lab import ROOT, Lab

from lab import archive

PATH = "PATH=/usr/bin"


@contextlib.contextmanager
def images(lab: Lab, node: str, environments: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """An image for each variable, on a node's containerd.

    :param environments: ``NAME=value`` by the image's tag. :returns: the images' names by tag.
    """
    names = {tag: f"localhost/kubegpu-lab/greedy:{tag}" for tag in environments}
    # A folder that the node sees, too.
    shared = ROOT / lab.nodes[node]["hardware"] / "greedy.tar"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # It is called as what tests look for in /proc.
        program, configuration, nothing = folder / "sleep", folder / "ld.so.conf", folder / "none.conf"
        subprocess.run(["gcc", "-Os", "-static", "-s", "-o", str(program), str(ROOT / "lab" / "pause.c")], check=True)
        configuration.write_text("include /etc/ld.so.conf.d/*.conf\n")
        nothing.touch()
        # The toolkit's hooks write the loader's cache of what they mount.
        files = {"usr/bin/sleep": program, "etc/ld.so.conf": configuration, "etc/ld.so.conf.d/none.conf": nothing}
        layer = archive.layer_of(files, folder / "layer")
        made = [archive.Image(names[tag], (layer,), (PATH, environment)) for tag, environment in environments.items()]
        architecture = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True)
        archive.write(made, shared, architecture.stdout.strip())
    try:
        lab.ssh(node, "ctr -n k8s.io images import /var/lib/kubegpu-lab/hardware/greedy.tar")
        yield names
    finally:
        shared.unlink()
        lab.ssh(node, f"ctr -n k8s.io images rm {' '.join(names.values())}; true")
