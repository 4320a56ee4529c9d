# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan the change of a static kube-scheduler on the controller, from the observed control plane. Pure.

The manifest belongs to the user and kubeadm: it gets one flag, one mounted folder and one annotation, and loses exactly
these again. Where kube-scheduler already has a configuration or policy file, the extender is merged into that file and
the manifest gets only the annotation, whose changed value makes kubelet restart the scheduler. A note beside the
collection's own files records that, because an upgrade by kubeadm regenerates the manifest without the annotation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import posixpath
import re
import typing as t

from .._core.digest import digest
from .._core.errors import BadInput
from .._core.libraries import yaml
from .._core.plan import Change, Plan
from .._core.types import JsonObject
from .._documents.yaml_tree import Loader
from . import config
from . import control_plane as cp
from .config import FORMS, FormName
from .constants import CONTAINER
from .control_plane import ControlPlane
from .extenders import BESIDE, Extender
from .kubeadm_edit import PATCHES, ExtenderFile, patch_files
from .static_pod_plan import Stamp, StaticPod

OWN_PATHS = tuple(form.path for form in FORMS.values())
# Where the version is unknown.
NEWEST = 99
# kubespray writes it at every run of its cluster.yml, with the extenders of this variable.
KUBESPRAY_FILE, KUBESPRAY_EXTENDERS = "kubescheduler-config.yaml", "kube_scheduler_extenders"


class ObserveAgain(Exception):
    """The plan needs a file that the observation doesn't have.

    :param arguments: options for ``control_plane_info`` with which it reads that file.
    """

    def __init__(self, **arguments: str) -> None:
        super().__init__(", ".join(f"{name}={value}" for name, value in arguments.items()))
        self.arguments = arguments


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of ``kube_scheduler``.

    :param versions: of the kube-schedulers of all control-plane machines.
    """

    present: bool
    extender: Extender
    version: str | None = None
    configuration: str = "auto"
    versions: tuple[str, ...] = ()
    patches_dir: str | None = None


class File(t.NamedTuple):
    """One file and its texts; None where it doesn't exist."""

    path: str
    before: str | None
    after: str | None


@dataclasses.dataclass(frozen=True)
class SchedulerPlan:
    """What to show, and what to pass to the machine (the module's option ``plan``).

    :param files: the files that change, in the order in which they are written.
    :param config: the --config of the process that has to start, and ``policy`` its --policy-config-file.
    :param before: the same two of the process that runs with the old files.
    :param loads: the path on the machine of the file with the extender, by its path for the process.
    :param lease: namespace and name of the lease that it takes; None where it takes none.
    :param lease_certain: whether it is known to take one.
    :param warnings: what the user has to do beside this change, each a sentence.
    :param extender: the URL of the extender that kube-scheduler asks then; empty where it is removed.
    """

    plan: Plan
    kind: str = "static_pod"
    files: tuple[File, ...] = ()
    config: str = ""
    policy: str = ""
    before: tuple[str, str] = ("", "")
    loads: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    urls: tuple[str, ...] = ()
    manifest: str = cp.MANIFEST
    lease: tuple[str, str] | None = None
    lease_certain: bool = True
    warnings: tuple[str, ...] = ()
    extender: str = ""

    @property
    def restarts(self) -> bool:
        """Whether the change replaces the running process."""
        if self.kind == "static_pod":
            return any(file.path == self.manifest for file in self.files)
        return self.kind == "k3s" or bool(self.files)

    def to_module(self) -> JsonObject:
        """Return the module's option ``plan``."""
        return self._to_module(self.files, self.config, self.policy, self.extender)

    def rollback(self) -> JsonObject:
        """Return the module's option ``plan`` that reverts this plan."""
        files = [File(path, after, before) for path, before, after in reversed(self.files)]
        return self._to_module(files, *self.before)

    def _to_module(self, files: t.Sequence[File], config_path: str, policy_path: str, extender: str = "") -> JsonObject:
        return {
            "kind": self.kind,
            "manifest": self.manifest,
            "files": [{"path": path, "before": digest(before), "after": after} for path, before, after in files],
            "config": config_path,
            "policy": policy_path,
            "loads": dict(self.loads),
            "urls": list(self.urls),
            "extender": extender,
        }


def changed(files: t.Sequence[File]) -> tuple[File, ...]:
    """Return the files that change.

    :raises BadInput: one of them isn't in UTF-8, so it couldn't be restored byte for byte.
    """
    changed_files = tuple(file for file in files if file.before != file.after)
    for file in changed_files:
        if file.after is not None and "\ufffd" in file.after:
            raise BadInput(f"{file.path} isn't in UTF-8; it is left as it is")
    return changed_files


def changes_of(files: t.Sequence[File], reason: str) -> Plan:
    """Return the plan of these files.

    :param reason: why kube-scheduler has to be restarted where no file changes; empty for no restart.
    """
    changes = [Change(path, before or "", after or "") for path, before, after in files]
    if reason and not changes:
        changes = [Change(CONTAINER, f"{reason}\n", "healthy, with this configuration\n")]
    return Plan(tuple(changes))


def make_plan(options: Options, observed: ControlPlane) -> SchedulerPlan:
    """Compare the machine with the options.

    :raises BadInput: this kube-scheduler can't be configured as requested; nothing was changed.
    :raises ObserveAgain: observe again, with these arguments.
    """
    path, text = observed["manifest_path"], observed["manifest"]
    if text is None:
        if options.present:
            runs = f" and runs {observed['embedded']}" if observed["embedded"] else ""
            raise BadInput(f"scheduler_mode: static_pod needs {path}, and this machine has none{runs}; {BESIDE}")
        return SchedulerPlan(Plan())
    touched = options.present or options.patches_dir or _touched(observed, text) or _may_be_merged(observed)
    if not touched:
        return SchedulerPlan(Plan())
    if options.patches_dir and observed["patches_dir"] != options.patches_dir:
        raise ObserveAgain(patches_dir=options.patches_dir)
    manifest = StaticPod(text, path)
    flags = manifest.flags
    minor: int | None = None
    loads: dict[str, str] = {}
    if options.present:
        minor = config.minor_of(manifest.image, options.version)
        _refuse_second_pod(observed)
        wanted_files, loads = _present(options, observed, manifest, minor)
    else:
        with contextlib.suppress(BadInput):
            minor = config.minor_of(manifest.image, options.version)
        wanted_files = _absent(options, observed, manifest)
    files = changed(wanted_files)
    if files:
        _refuse_unsafe(options, observed)
    after = manifest.flags
    named = (after.get(FORMS["config"].flag, ""), after.get(FORMS["policy"].flag, ""))
    return SchedulerPlan(
        plan=changes_of(files, _unproven(observed, named, options.present)),
        files=files,
        config=named[0],
        policy=named[1],
        before=(flags.get(FORMS["config"].flag, ""), flags.get(FORMS["policy"].flag, "")),
        loads=loads,
        urls=manifest.urls(minor),
        manifest=path,
        lease=config.lease_of(_config_after(observed, files, named[0]), after, NEWEST if minor is None else minor),
        warnings=_kubespray_warnings(options, files),
        extender=options.extender.url if options.present else "",
    )


def _kubespray_warnings(options: Options, files: t.Sequence[File]) -> tuple[str, ...]:
    """Name the variable by which kubespray itself keeps the extender in its file, or adds it again."""
    named = [file.path for file in files if posixpath.basename(file.path) == KUBESPRAY_FILE]
    if not named:
        return ()
    if not options.present:
        return (
            f"{named[0]} is kubespray's: remove the extender from {KUBESPRAY_EXTENDERS} in its inventory too, or its "
            "next cluster.yml adds it again",
        )
    entry = yaml.safe_dump([options.extender.entry()], sort_keys=False, default_flow_style=True, width=1 << 20)
    return (
        f"{named[0]} is kubespray's, and its next cluster.yml writes it without the extender: set this variable in its "
        f"inventory, {KUBESPRAY_EXTENDERS}: {entry.strip()}",
    )


def extender_file(options: Options, observed: ControlPlane) -> ExtenderFile:
    """Return the file that the manifest names once ``make_plan`` with the same options is applied.

    :raises BadInput: this kube-scheduler can't be configured as requested.
    """
    manifest = StaticPod(observed["manifest"] or "", observed["manifest_path"])
    flags = manifest.flags
    form = _form(options, flags, config.minor_of(manifest.image, options.version))
    return ExtenderFile(form, flags.get(FORMS[form].flag) or FORMS[form].path)


def _touched(observed: ControlPlane, manifest: str) -> bool:
    """Return whether anything on the machine is ours."""
    ours = [observed["ours"], observed["ours_policy"], observed["merged"]]
    return observed["pending"] or any(text is not None for text in ours) or "kubegpu" in manifest


def _may_be_merged(observed: ControlPlane) -> bool:
    """Return whether a user's own file may have our extender though nothing else of ours is there."""
    try:
        flags = StaticPod(observed["manifest"] or "", observed["manifest_path"]).flags
    except BadInput:
        # We never wrote such a manifest.
        return False
    return any(flags.get(form.flag) for form in FORMS.values())


def _unproven(observed: ControlPlane, named: tuple[str, str], present: bool) -> str:
    if observed["pending"]:
        return "an earlier run was interrupted"
    if not present:
        return ""
    if not any((process["config"], process["policy"]) == named for process in observed["running"]):
        return "not running with this configuration"
    return "" if observed["health"] == 200 else "not healthy"


# --------------------------------------------------------------------------- refusals


def _refuse_second_pod(observed: ControlPlane) -> None:
    """Refuse a second kube-scheduler: kubelet runs every file of its folder, backups too."""
    for path, text in observed["others"].items():
        if _is_scheduler(text):
            raise BadInput(
                f"scheduler_mode: {posixpath.dirname(path)} holds a second kube-scheduler pod, "
                f"{posixpath.basename(path)}, which kubelet runs beside the first one; move it out of that folder"
            )


def _is_scheduler(text: str) -> bool:
    try:
        return any(_is_scheduler_pod(document) for document in yaml.load_all(text, Loader=Loader))
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError):
        # kubelet can't read it either.
        return False


def _is_scheduler_pod(document: t.Any) -> bool:
    if not isinstance(document, dict) or document.get("kind") != "Pod":
        return False
    containers = (document.get("spec") or {}).get("containers") or []
    named = [container.get("name") for container in containers if isinstance(container, dict)]
    return (document.get("metadata") or {}).get("name") == CONTAINER or CONTAINER in named


def _refuse_unsafe(options: Options, observed: ControlPlane) -> None:
    """Refuse to change a static pod that can't be replaced in one step, or in the middle of an upgrade."""
    path = observed["manifest_path"]
    if observed["link"]:
        raise BadInput(
            f"scheduler_mode: {path} is a symbolic link to {observed['link']}; put the file itself there, because only "
            "a file can be replaced in one step"
        )
    wanted = _minor(observed["version"])
    for process in observed["running"]:
        runs = _minor(process["version"])
        if wanted is not None and runs is not None and runs != wanted:
            raise BadInput(
                f"scheduler_mode: this control plane is half upgraded: {path} asks for kube-scheduler 1.{wanted} and "
                f"1.{runs} is running; finish the upgrade first"
            )
    refuse_half_upgraded(options)


def refuse_half_upgraded(options: Options) -> None:
    """Refuse a change during an upgrade: the upgrade's next step and a rollback would undo each other.

    :raises BadInput: the machines run different minor versions.
    """
    minors = sorted({minor for version in options.versions if (minor := _minor(version)) is not None})
    if len(minors) > 1:
        raise BadInput(
            f"scheduler_mode: this control plane is half upgraded: its kube-schedulers are 1.{minors[0]} to "
            f"1.{minors[-1]}; finish the upgrade first"
        )


def _minor(version: str) -> int | None:
    match = re.match(r"v?1\.([0-9]+)(?:\D|$)", version)
    return int(match.group(1)) if match else None


# --------------------------------------------------------------------------- files


def _present(
    options: Options, observed: ControlPlane, manifest: StaticPod, minor: int
) -> tuple[list[File], dict[str, str]]:
    """Return the files, and the path on the machine of the one with the extender by its path for kube-scheduler."""
    flags = manifest.flags
    name = _form(options, flags, minor)
    form = FORMS[name]
    named = flags.get(form.flag, "")
    if any(own_path in flags.values() and own_path != named for own_path in OWN_PATHS):
        # Ours in the other form, or where the user now has a file of his own.
        manifest.restore()
    if named and named != form.path:
        path = manifest.host_path(named)
        before = _text_of(name, path, observed)
        if before is None:
            raise BadInput(f"{path}, which kube-scheduler's --{form.flag} names, doesn't exist")
        note = config.read(observed["merged"])
        text, noted = config.put_in(path, name, before, minor, options.extender, note, manifest.annotated)
        files, flag = [_note(observed, noted), File(path, before, text)], None
    else:
        path = form.path
        before = _own_texts(observed)[name]
        text = form.new(minor, flags, options.extender)
        files, flag = [], f"--{form.flag}={form.path}"
        manifest.mount(flag)
    restart = text != before or outdated(observed, manifest.flags, name, text)
    stamp = manifest.restamp(digest(text), restart=restart, interrupted=observed["pending"])
    own = _own_files(observed, {} if flag is None else {name: text})
    patches = _patches(options, observed, patch_files(stamp, flag, manifest.volume_names.ours))
    # The manifest after the files that it names and before those that it no longer names: kubelet acts on it at once.
    files = [
        *files,
        *(file for file in own if file.after is not None),
        *patches,
        File(observed["manifest_path"], observed["manifest"], manifest.text()),
        *(file for file in own if file.after is None),
    ]
    return files, {named if flag is None else path: path}


def outdated(observed: ControlPlane, flags: t.Mapping[str, str], form: FormName, text: str) -> bool:
    """Whether kube-scheduler runs with these flags and hasn't loaded this text of the file that it names.

    A file that was changed and changed back looks right, and the process between both has loaded something else.

    :param flags: by their names without dashes.
    :param form: of the file.
    """
    config_path, policy_path = (flags.get(FORMS[name].flag, "") for name in ("config", "policy"))
    path = {"config": config_path, "policy": policy_path}[form]
    mine = [
        process
        for process in observed["running"]
        if (process["config"], process["policy"]) == (config_path, policy_path)
    ]
    sha256 = digest(text)
    loaded = [
        process for process in mine if process["fresh"] is not False and process["loaded"].get(path, sha256) == sha256
    ]
    return bool(mine) and not loaded


def _absent(options: Options, observed: ControlPlane, manifest: StaticPod) -> list[File]:
    files: list[File] = []
    stamp = manifest.stamp.sha256
    note = config.read(observed["merged"])
    for form, path in _merged_paths(manifest, note):
        text = _text_of(form, path, observed)
        if text is None or not (stamp or note or FORMS[form].has(path, text, options.extender)):
            continue
        files.append(File(path, text, config.take_out(path, form, text, options.extender, note)))
    gone = [digest(file.after or "") for file in files]
    # An annotation with the restored text's own digest stays: an earlier removal set it for the restart.
    manifest.restore(annotation=not (stamp in gone and not changed(files)))
    if changed(files) and manifest.text() == observed["manifest"]:
        # The manifest was regenerated without our annotation: kubelet restarts the pod only if it changes.
        manifest.annotate(Stamp(digest(changed(files)[0].after or "")))
    files += _patches(options, observed, {})
    rest = [*_own_files(observed, {}), _note(observed, None)]
    return [*files, File(observed["manifest_path"], observed["manifest"], manifest.text()), *rest]


def _merged_paths(manifest: StaticPod, note: config.Note | None) -> list[tuple[FormName, str]]:
    """Return the user's files that may have our extender, each with its form."""
    if note is not None:
        return [(note.form, note.path)]
    flags = manifest.flags
    paths = []
    for form in FORMS.values():
        named = flags.get(form.flag, "")
        if not named or named in OWN_PATHS:
            continue
        try:
            paths.append((form.name, manifest.host_path(named)))
        except BadInput:
            if manifest.annotated:
                raise
            # Not a file that we could have changed.
    return paths


def _form(options: Options, flags: t.Mapping[str, str], minor: int) -> FormName:
    """Return the form in which kube-scheduler gets the extender.

    :raises BadInput: kube-scheduler has a flag that can't be combined with that form.
    """
    if "policy-configmap" in flags:
        raise BadInput(
            "scheduler_configuration: kube-scheduler has --policy-configmap, and a ConfigMap that it reads isn't "
            "changed here; give it a file (--policy-config-file or --config)"
        )
    users = {
        known.name: flags[known.flag] for known in FORMS.values() if flags.get(known.flag, known.path) != known.path
    }
    if "config" in users and minor < config.CONFIG_SINCE:
        # Beside a configuration these releases ignore a policy's flag.
        users.pop("policy", None)
    wanted = options.configuration
    form: FormName
    if wanted == "auto" and "policy" in users and minor < config.NO_POLICY_SINCE:
        form = "policy"
    elif wanted != "policy" and "config" in users and minor == config.ALPHA_MINOR:
        form = "config"
    else:
        form = config.form_of(minor, wanted)
    other: FormName = "policy" if form == "config" else "config"
    both = form == "policy" and form in users and minor >= config.CONFIG_SINCE
    if other in users and not both:
        # A user's configuration is never given up for the extender.
        if config.ALPHA_MINOR <= minor < config.NO_POLICY_SINCE:
            way_out = f"set scheduler_configuration: {other}"
        elif other == "config":
            way_out = f"1.{config.ALPHA_MINOR} is the first whose configuration file holds extenders too; {BESIDE}"
        else:
            way_out = f"1.{config.NO_POLICY_SINCE} has removed that flag: move its settings to a configuration file"
        raise BadInput(
            f"scheduler_configuration: kube-scheduler 1.{minor} has --{FORMS[other].flag}={users[other]}, with which "
            f"{'a configuration file' if form == 'config' else 'a policy file'} can't be combined; {way_out}"
        )
    return form


def _text_of(form: FormName, path: str, observed: ControlPlane) -> str | None:
    """Return a user's file; None where it doesn't exist."""
    if form == "config":
        if path != observed["config_path"]:
            raise ObserveAgain(config_path=path)
        return observed["config"]
    if path != observed["policy_path"]:
        raise ObserveAgain(policy_path=path)
    return observed["policy"]


def _note(observed: ControlPlane, note: config.Note | None) -> File:
    return File(cp.MERGED, observed["merged"], note.text() if note is not None else None)


def _own_texts(observed: ControlPlane) -> dict[FormName, str | None]:
    return {"config": observed["ours"], "policy": observed["ours_policy"]}


def _own_files(observed: ControlPlane, after: t.Mapping[FormName, str]) -> list[File]:
    before = _own_texts(observed)
    return [File(form.path, before[form.name], after.get(form.name)) for form in FORMS.values()]


def _patches(options: Options, observed: ControlPlane, wanted: t.Mapping[str, str]) -> list[File]:
    """Return our patches in the folder for ``kubeadm upgrade --patches``; the user's own are left alone."""
    if not options.patches_dir:
        return []
    paths = {name: posixpath.join(options.patches_dir, name) for name in PATCHES}
    return [File(path, observed["patches"].get(path), wanted.get(name)) for name, path in paths.items()]


# --------------------------------------------------------------------------- lease


def _config_after(observed: ControlPlane, files: t.Sequence[File], named: str) -> str | None:
    """Return the text of kube-scheduler's configuration after the change."""
    if not named:
        return None
    own = named == FORMS["config"].path
    path, before = (named, observed["ours"]) if own else (observed["config_path"], observed["config"])
    return {changed_path: text for changed_path, _before, text in files}.get(path, before)
