# SPDX-License-Identifier: GPL-3.0-or-later
"""Build the documentation as a site: the repository's own pages, and the reference by antsibull-docs, through Sphinx.

The pages are copied to a folder with the repository's layout, so that their links work in both places. A warning is an
error. Nothing is read from the network.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import yaml
from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.util.console import nocolor

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
BUILD = ROOT / ".cache" / "docs-site"
COLLECTION = "kubegpu.share"
GALAXY = yaml.safe_load((ROOT / "galaxy.yml").read_text())
# What is copied, besides the folder docs.
OTHERS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md", "lab/README.md")
INDEX = "docs/README.md"
REFERENCE = "docs/reference"
# Pages of the reference that only the site has, by what they are made from, to which the repository's pages link.
MADE_FROM = (
    (re.compile(r"plugins"), "index"),
    (re.compile(r"plugins/modules/(\w+)\.py"), r"\1_module"),
    (re.compile(r"roles/(\w+)/meta/argument_specs\.yml"), r"\1_role"),
)
LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)(#[^)\s]+)?\)")
# Pages have wide tables.
STYLE = ".content { width: 62em } .table-wrapper { overflow-y: hidden }\n"
TITLED = re.compile(r"\[([^\]]+)" + LINK.pattern)
# The theme shows a page's contents beside it, and puts an error into a page that has them itself.
CONTENTS = re.compile(r"^\.\. contents::\n(?: +:.*\n)*", re.MULTILINE)
# Labels of Ansible's own documentation that antsibull-docs refers to. Any other label outside of this site is an error.
ANSIBLE = "https://docs.ansible.com/ansible/latest/"
OUTSIDE = {
    "action_plugins": ("plugins/action.html", "Action plugins"),
    "ansible_collections.community.okd.k8s_auth_module": (
        "collections/community/okd/k8s_auth_module.html",
        "community.okd.k8s_auth",
    ),
    "ansible_configuration_settings": ("reference_appendices/config.html", "Ansible configuration settings"),
    "callback_plugins": ("plugins/callback.html", "Callback plugins"),
    "common_return_values": ("reference_appendices/common_return_values.html", "Common return values"),
}
CONFIGURATION = {
    "project": COLLECTION,
    "extensions": ["myst_parser", "sphinx_antsibull_ext", "sphinx.ext.intersphinx"],
    "myst_heading_anchors": 4,
    "html_theme": "furo",
    "html_show_sphinx": False,
    "html_copy_source": False,
    "pygments_style": "ansible",
    "exclude_patterns": [INDEX],
    "html_css_files": ["site.css"],
    # Examples of commands and their output have no language.
    "highlight_language": "none",
}


def reference(folder: Path) -> None:
    """Write a page per module, plugin and role from their own documentation, by antsibull-docs."""
    folder.mkdir(parents=True, exist_ok=True)
    # antsibull-docs refuses a folder that others may write to.
    folder.chmod(0o755)
    program = (BIN / "antsibull-docs", f"--config-file={ROOT / 'docs' / 'antsibull.cfg'}", "collection")
    options = ("--use-current", "--squash-hierarchy", "--fail-on-error", f"--dest-dir={folder}")
    subprocess.run(
        [*program, *options, COLLECTION],
        check=True,
        env={
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
            "PATH": f"{BIN}:{os.environ['PATH']}",
        },
        stdin=subprocess.DEVNULL,
    )
    for page in folder.glob("*.rst"):
        page.write_text(CONTENTS.sub("", page.read_text()))


def pages() -> list[Path]:
    """Return the files of the site that are in the repository, relative to its root."""
    found = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".svg")]
    found += [ROOT / "docs/reference/preflight_findings.rst", *ROOT.glob("roles/*/README.md")]
    found += [ROOT / name for name in OTHERS if (ROOT / name).exists()]
    return sorted(path.relative_to(ROOT) for path in found)


def on_site(path: str) -> str:
    """Return the page of the reference that is made from a file, and for another file the file itself."""
    for source, page in MADE_FROM:
        match = source.fullmatch(path)
        if match:
            return f"{REFERENCE}/{match.expand(page)}.rst"
    return path


def relinked(text: str, page: Path, staged: set[str], home: str) -> str:
    """Return a page whose links lead to pages of the reference, and to the repository where the site has no such file.

    :param page: where it is, relative to the repository's root.
    :param staged: what the site has.
    :param home: URL of the repository's files.
    """

    def link(match: re.Match[str]) -> str:
        path = os.path.normpath(page.parent / match[1])
        if path == INDEX:
            return f"]({os.path.relpath('index.md', page.parent)})"
        if path in staged or not (ROOT / path).exists():
            return match[0]
        if on_site(path) in staged:
            return f"]({os.path.relpath(on_site(path), page.parent)})"
        return f"]({home}/{path}{match[2] or ''})"

    return LINK.sub(link, text)


def index() -> tuple[str, set[str]]:
    """Return the first page: that of the folder docs, with a table of contents from its sections and links.

    :returns: its text, and the pages in the table.
    """
    text = (ROOT / INDEX).read_text()
    trees, listed = [], set()
    for part in text.split("\n## ")[1:]:
        title, _newline, body = part.partition("\n")
        entries = []
        for match in TITLED.finditer(body):
            path = on_site(os.path.normpath(Path(INDEX).parent / match[2]))
            entries.append(f"{match[1]} <{Path(path).with_suffix('')}>")
            listed.add(path)
        trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *entries, "```", ""]))

    def from_root(match: re.Match[str]) -> str:
        return f"]({os.path.normpath(Path(INDEX).parent / match[1])}{match[2] or ''})"

    return LINK.sub(from_root, text) + "\n" + "\n".join(trees), listed


def outside(file: Path) -> None:
    """Write the inventory of Ansible's labels, in Sphinx' format 2."""
    rows = [f"{label} std:label -1 {page} {title}\n" for label, (page, title) in sorted(OUTSIDE.items())]
    head = "# Sphinx inventory version 2\n# Project: Ansible\n# Version: \n"
    file.write_bytes(
        head.encode()
        + b"# The remainder of this file is compressed using zlib.\n"
        + zlib.compress("".join(rows).encode())
    )


def stage(folder: Path) -> None:
    """Put everything that Sphinx reads into an empty folder."""
    home = f"{GALAXY['repository']}/blob/{GALAXY['version']}"
    reference(folder / "docs" / "reference")
    names = pages()
    staged = {str(path.relative_to(folder)) for path in folder.rglob("*.rst")} | {str(name) for name in names}
    first, listed = index()
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.suffix == ".svg":
            shutil.copyfile(ROOT / name, target)
            continue
        text = (ROOT / name).read_text()
        if name.suffix == ".md":
            text = relinked(text, name, staged, home)
        if str(name) not in listed:
            # Found by links: pages of roles, and what the reference has by itself.
            text = (":orphan:\n\n" if name.suffix == ".rst" else "---\norphan: true\n---\n\n") + text
        target.write_text(text)
    (folder / "index.md").write_text(relinked(first, Path("index.md"), staged, home))


def build(folder: Path, check: bool = False) -> Path:
    """Build the site.

    :param check: read every page and resolve every reference, and write no page.
    :returns: the folder with its first page, index.html.
    :raises SphinxError: a warning, which is an error here.
    """
    shutil.rmtree(folder, ignore_errors=True)
    stage(folder / "source")
    outside(folder / "ansible.inv")
    (folder / "static").mkdir()
    (folder / "static" / "site.css").write_text(STYLE)
    nocolor()
    site = Sphinx(
        srcdir=folder / "source",
        confdir=None,
        outdir=folder / "html",
        doctreedir=folder / "doctrees",
        buildername="dummy" if check else "html",
        confoverrides={
            **CONFIGURATION,
            "html_static_path": [str(folder / "static")],
            "intersphinx_mapping": {"ansible": (ANSIBLE, str(folder / "ansible.inv"))},
            "version": GALAXY["version"],
            "release": GALAXY["version"],
            "html_title": f"{COLLECTION} {GALAXY['version']}",
            "copyright": ", ".join(GALAXY["authors"]),
        },
        warningiserror=True,
        status=None,
        parallel=os.cpu_count() or 1,
    )
    site.build(force_all=True)
    if site.statuscode:
        raise SphinxError("the warnings above are errors")
    return folder / "html"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=BUILD, help="a folder that is replaced (default: .cache/docs-site)")
    parser.add_argument("--check", action="store_true", help="resolve every reference, and write no page")
    arguments = parser.parse_args()
    try:
        html = build(arguments.out.resolve(), arguments.check)
    except SphinxError as error:
        print(f"No site: {error}", file=sys.stderr)
        return 1
    print("every reference is resolved" if arguments.check else f"{html}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
