# SPDX-License-Identifier: GPL-3.0-or-later
"""Indexes and manifests that anybody may have written, and layouts that aren't what their digests say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import archives
import pytest
from ansible_collections.kubegpu.share.plugins.plugin_utils._airgap import archive, layout, manifests

ROW = {"mediaType": manifests.OCI_MANIFEST, "digest": f"sha256:{'a' * 64}", "size": 3}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"manifests": 1}',
        b'{"manifests": [1]}',
        b'{"layers": {"a": 1}}',
        b'{"config": 1}',
        *(
            json.dumps({"manifests": [{**ROW, **more}]}).encode()
            for more in (
                {"size": -1},
                {"size": True},
                {"size": "3"},
                {"digest": "sha256:../x"},
                {"digest": "sha512:" + "a" * 64},
                {"mediaType": None},
                {"platform": "linux"},
            )
        ),
        json.dumps({"manifests": [ROW] * 501}).encode(),
    ],
)
def test_what_isnt_a_manifest_is_refused(content):
    with pytest.raises(ValueError, match=r"isn't JSON|isn't a mapping|that aren't descriptors"):
        manifests.document(content)


def test_what_a_manifest_says():
    row = {**ROW, "platform": {"architecture": "arm64", "os": "linux", "variant": "v8"}}
    index = manifests.document(json.dumps({"schemaVersion": 2, "manifests": [row], "annotations": {}}).encode())
    assert index.media == manifests.OCI_INDEX and index.layers == () and index.config is None
    assert index.blobs == (manifests.Descriptor(ROW["mediaType"], ROW["digest"], 3, "arm64", "linux"),)
    assert manifests.document(b'{"mediaType": "application/x"}').media == ""
    with pytest.raises(ValueError, match=r"is of type application/x, which isn't supported"):
        manifests.typed_document(b'{"mediaType": "application/x"}')


class Folder:
    """A layout whose files are what their sums say, until a test changes one."""

    def __init__(self, place: Path) -> None:
        maker = archives.Maker(place)
        self.digest = maker.image("r.example.org/a:1")["digest"]
        maker.close()
        self.place = place
        self.sums = archive.read(str(place), "").sums

    @property
    def layout(self) -> layout.Layout:
        return layout.Layout(str(self.place), self.sums.get)

    def blob(self, document: object) -> str:
        content = json.dumps(document).encode()
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        (self.place / layout.blob_path(digest)).write_bytes(content)
        self.sums = {**self.sums, layout.blob_path(digest): digest.removeprefix("sha256:")}
        return digest


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "a")


def test_a_layout_that_is_whole(folder):
    assert folder.layout.architectures(folder.digest) == {"amd64", "arm64"}
    # An index, and for each platform a manifest, a configuration and a layer.
    assert len(folder.layout.parts(folder.digest)) == 7
    assert folder.layout.require("r.example.org/a:1", folder.digest) == sum(folder.layout.parts(folder.digest).values())


def test_what_is_read_is_compared_when_it_is_read(folder):
    path = folder.place / layout.blob_path(folder.digest)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"arm64", b"amd64"))
    with pytest.raises(ValueError, match="has another content"):
        folder.layout.architectures(folder.digest)
    path.unlink()
    path.symlink_to(folder.place / layout.INDEX)
    with pytest.raises(ValueError, match="can't be read"):
        folder.layout.architectures(folder.digest)
    (folder.place / layout.INDEX).write_bytes(b"{}")
    with pytest.raises(archive.Broken, match="has another content"):
        folder.layout.require("r.example.org/a:1", folder.digest)


def test_an_index_in_an_index_ends(folder):
    digest = folder.digest
    for _level in range(layout.DEEPEST + 1):
        size = (folder.place / layout.blob_path(digest)).stat().st_size
        digest = folder.blob({"schemaVersion": 2, "manifests": [{**ROW, "digest": digest, "size": size}]})
    with pytest.raises(ValueError, match="names too many manifests"):
        folder.layout.parts(digest)
    other = folder.blob({"schemaVersion": 2, "manifests": [{**ROW, "digest": folder.digest, "size": 1}]})
    with pytest.raises(ValueError, match="has another size than its manifest says"):
        folder.layout.parts(other)


@pytest.mark.parametrize("rows", [1, [1], [{"annotations": 1}], [{**ROW, "annotations": {layout.NAME: 1}}]])
def test_an_index_that_isnt_one_names_no_images(folder, rows):
    content = json.dumps({"schemaVersion": 2, "manifests": rows}).encode()
    (folder.place / layout.INDEX).write_bytes(content)
    folder.sums = {**folder.sums, layout.INDEX: hashlib.sha256(content).hexdigest()}
    with pytest.raises(ValueError, match=r"isn't the index of a layout|aren't descriptors"):
        folder.layout.images()
