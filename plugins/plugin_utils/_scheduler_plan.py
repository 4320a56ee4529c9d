# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What of a static kube-scheduler has to change, and how; made on the controller from what the machine showed.

The manifest is the user's and kubeadm's: it gets one flag, one mounted folder and one annotation, nothing else, and
loses just these again. Where kube-scheduler has a configuration or policy file already, that file gets our extender
instead and the manifest only the annotation, whose changed value makes kubelet start the scheduler again. A note beside
our own files says so: an upgrade by kubeadm writes the manifest anew, without the annotation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import posixpath
import re
import typing as t

import yaml
from ansible_collections.kubegpu.share.plugins.module_utils import _control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import digest
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan
from ansible_collections.kubegpu.share.plugins.plugin_utils import _merged_file
from ansible_collections.kubegpu.share.plugins.plugin_utils import _scheduler_config as config
from ansible_collections.kubegpu.share.plugins.plugin_utils import _scheduler_policy as policy
from ansible_collections.kubegpu.share.plugins.plugin_utils._kubeadm_plan import PATCHES, Told, patch_files
from ansible_collections.kubegpu.share.plugins.plugin_utils._static_pod_document import StaticPod

Json = dict[str, t.Any]

FLAGS = {"config": "config", "policy": "policy-config-file"}
OWN = {"config": cp.CONFIG, "policy": cp.POLICY}
# From here on the flags of the leader election go before the configuration's.
FLAGS_LEAD_SINCE = 23
# Where the version can't be told.
NEWEST = 99
# With these kube-schedulers take turns by something else than a lease.
NO_LEASE = ("endpoints", "configmaps")


class LookAgain(Exception):
    """The plan needs something of the machine that the observation doesn't show.

    :param arguments: those of ``control_plane_info`` that make it show that.
    """

    def __init__(self, **arguments: str) -> None:
        super().__init__(", ".join(f"{name}={value}" for name, value in arguments.items()))
        self.arguments = arguments


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of ``kube_scheduler``.

    :param versions: of the kube-schedulers of all control-plane machines.
    """

    present: bool
    extender: config.Extender
    version: str | None = None
    configuration: str = "auto"
    versions: tuple[str, ...] = ()
    patches_dir: str | None = None


class File(t.NamedTuple):
    """One file and its texts; None where there is none."""

    path: str
    before: str | None
    after: str | None


@dataclasses.dataclass(frozen=True)
class Planned:
    """What to show and what to hand to the machine (the module's option ``plan``).

    :param files: what changes, in the order in which it is written.
    :param config: the --config of the process that has to come up, and ``policy`` its --policy-config-file.
    :param before: the same two of the process that runs with the old files.
    :param lease: namespace and name of the lease that it takes; None where it takes none.
    :param lease_certain: whether it is known to take one.
    """

    plan: Plan
    kind: str = "static_pod"
    files: tuple[File, ...] = ()
    config: str = ""
    policy: str = ""
    before: tuple[str, str] = ("", "")
    urls: tuple[str, ...] = ()
    manifest: str = cp.MANIFEST
    lease: tuple[str, str] | None = None
    lease_certain: bool = True

    @property
    def restarts(self) -> bool:
        """Whether another process than now has to be there afterwards."""
        if self.kind == "static_pod":
            return any(one.path == self.manifest for one in self.files)
        return self.kind == "k3s" or bool(self.files)

    def handed(self) -> Json:
        return self._handed(self.files, self.config, self.policy)

    def back(self) -> Json:
        """The way back from where ``handed`` leads to."""
        files = [File(path, after, before) for path, before, after in reversed(self.files)]
        return self._handed(files, *self.before)

    def _handed(self, files: t.Sequence[File], config_path: str, policy_path: str) -> Json:
        return {
            "kind": self.kind,
            "manifest": self.manifest,
            "files": [{"path": path, "before": digest(before), "after": after} for path, before, after in files],
            "config": config_path,
            "policy": policy_path,
            "urls": list(self.urls),
        }


def changed(files: t.Sequence[File]) -> tuple[File, ...]:
    """Those that change.

    :raises BadInput: one of them holds what can't be written back as it was.
    """
    found = tuple(one for one in files if one.before != one.after)
    for one in found:
        if one.after is not None and "\ufffd" in one.after:
            raise BadInput(f"{one.path} isn't in UTF-8; it is left as it is")
    return found


def changes_of(files: t.Sequence[File], reason: str) -> Plan:
    """The plan that these files make, or, where none changes, the reason to start kube-scheduler again."""
    changes = [Change(path, before or "", after or "") for path, before, after in files]
    if reason and not changes:
        changes = [Change(cp.CONTAINER, f"{reason}\n", "healthy, with this configuration\n")]
    return Plan(tuple(changes))


def make_plan(options: Options, observed: Json) -> Planned:
    """Compare the machine with what is asked for.

    :param observed: what ``control_plane_info`` returned.
    :raises BadInput: this kube-scheduler can't be configured as asked for; nothing was changed.
    :raises LookAgain: look again, with these arguments.
    """
    path = observed.get("manifest_path") or cp.MANIFEST
    if observed["manifest"] is None:
        if options.present:
            runs = f" (it runs {observed['embedded']})" if observed["embedded"] else ""
            raise BadInput(f"scheduler_mode: static_pod needs {path}, and this machine has none{runs}")
        return Planned(Plan())
    if not options.present and not _touched(observed) and not options.patches_dir and not _can_be_merged(observed):
        return Planned(Plan())
    if options.patches_dir and observed.get("patches_dir") != options.patches_dir:
        raise LookAgain(patches_dir=options.patches_dir)
    manifest = StaticPod(observed["manifest"], path)
    flags = manifest.flags()
    minor = config.minor_of(manifest.image, options.version) if options.present else 0
    if options.present:
        _refuse_two(observed)
    files = changed(
        _present(options, observed, manifest, minor) if options.present else _absent(options, observed, manifest)
    )
    if files:
        _refuse_unsafe(options, observed, path)
    named = manifest.flags()
    values = {name: named.get(flag, "") for name, flag in FLAGS.items()}
    plan = changes_of(files, _unproven(observed, values, options.present))
    return Planned(
        plan=plan,
        files=files,
        config=values["config"],
        policy=values["policy"],
        before=(flags.get(FLAGS["config"], ""), flags.get(FLAGS["policy"], "")),
        urls=manifest.urls(options.version),
        manifest=path,
        lease=lease_of(_text_after(observed, files, values["config"]), named, _minor_or_newest(manifest, options)),
    )


def told(options: Options, observed: Json) -> Told:
    """What the manifest names when ``make_plan`` for the same is carried out.

    :raises BadInput: this kube-scheduler can't be configured as asked for.
    """
    manifest = StaticPod(observed["manifest"], _path(observed))
    flags = manifest.flags()
    form = _form(options, flags, config.minor_of(manifest.image, options.version))
    return Told(form, flags.get(FLAGS[form]) or OWN[form])


def _touched(observed: Json) -> bool:
    """Whether anything on the machine is ours."""
    ours = [observed.get("ours"), observed.get("ours_policy"), observed["merged"]]
    return observed["pending"] or ours != [None] * 3 or "kubegpu" in observed["manifest"]


def _can_be_merged(observed: Json) -> bool:
    """Whether a file of the user's own may have our extender, though nothing else of ours is there."""
    try:
        flags = StaticPod(observed["manifest"], _path(observed)).flags()
    except BadInput:
        # Then it wasn't us who wrote it.
        return False
    return any(flags.get(flag) for flag in FLAGS.values())


def _unproven(observed: Json, values: dict[str, str], present: bool) -> str:
    if observed["pending"]:
        return "an earlier run was cut short"
    if not present:
        return ""
    wanted = (values["config"], values["policy"])
    if not any((one["config"], one.get("policy", "")) == wanted for one in observed["running"]):
        return "not running with this configuration"
    return "" if observed["health"] == 200 else "not healthy"


# --------------------------------------------------------------------------- refusals


def _refuse_two(observed: Json) -> None:
    """kubelet runs every file of its folder, backups too."""
    for path, text in (observed.get("others") or {}).items():
        if _is_scheduler(text):
            raise BadInput(
                f"scheduler_mode: {posixpath.dirname(path)} holds a second kube-scheduler pod, "
                f"{posixpath.basename(path)}, which kubelet runs beside the first one; move it out of that folder"
            )


def _is_scheduler(text: str) -> bool:
    try:
        pods = [one for one in yaml.safe_load_all(text) if isinstance(one, dict) and one.get("kind") == "Pod"]
    except yaml.YAMLError:
        # Neither can kubelet read it.
        return False
    for pod in pods:
        containers = (pod.get("spec") or {}).get("containers") or []
        named = [one.get("name") for one in containers if isinstance(one, dict)]
        if (pod.get("metadata") or {}).get("name") == cp.CONTAINER or cp.CONTAINER in named:
            return True
    return False


def _refuse_unsafe(options: Options, observed: Json, path: str) -> None:
    """What makes a change of a static pod dangerous, though it could be made."""
    if observed.get("link"):
        raise BadInput(
            f"scheduler_mode: {path} is a symbolic link to {observed['link']}; put the file itself there, because only "
            "a file can be replaced in one step"
        )
    wanted = _minor(str(observed.get("version") or ""))
    for one in observed["running"]:
        runs = _minor(str(one.get("version") or ""))
        if wanted is not None and runs is not None and runs != wanted:
            raise BadInput(
                f"scheduler_mode: this control plane is half upgraded: {path} asks for kube-scheduler 1.{wanted} and "
                f"1.{runs} is running; finish the upgrade first"
            )
    refuse_versions(options)


def refuse_versions(options: Options) -> None:
    """In the middle of an upgrade its next step would undo the change, or putting back would undo that step."""
    minors = sorted({minor for one in options.versions if (minor := _minor(one)) is not None})
    if len(minors) > 1:
        raise BadInput(
            f"scheduler_mode: this control plane is half upgraded: its kube-schedulers are 1.{minors[0]} to "
            f"1.{minors[-1]}; finish the upgrade first"
        )


def _minor(version: str) -> int | None:
    found = re.match(r"v?1\.([0-9]+)(?:\D|$)", version)
    return int(found.group(1)) if found else None


# --------------------------------------------------------------------------- files


def _present(options: Options, observed: Json, manifest: StaticPod, minor: int) -> list[File]:
    flags = manifest.flags()
    form = _form(options, flags, minor)
    named = flags.get(FLAGS[form], "")
    if any(one in flags.values() and one != named for one in OWN.values()):
        # Ours in the other form, or in the place of what is now the user's own.
        manifest.restore()
    if named and named != OWN[form]:
        path, before = _users(form, named, observed, manifest)
        if before is None:
            raise BadInput(f"{path}, which kube-scheduler's --{FLAGS[form]} names, isn't there")
        noted = _merged_file.read(observed["merged"])
        text, note = _merged_file.put_in(path, form, before, minor, options.extender, noted, manifest.annotated())
        manifest.annotate(_sha256(text))
        users: list[File] = [*_noted(observed, note), File(path, before, text)]
    else:
        path, users = OWN[form], []
        if form == "policy":
            text = policy.new_policy(options.extender)
        else:
            text = config.new_config(minor, flags, options.extender)
        manifest.mount(f"--{FLAGS[form]}={path}")
        manifest.annotate(_sha256(text))
    ours = {name: text if not users and name == form else None for name in OWN}
    new = [one for one in _own_files(observed, ours) if one.after is not None]
    old = [one for one in _own_files(observed, ours) if one.after is None]
    flag = None if users else f"--{FLAGS[form]}={path}"
    patches = _patches(options, observed, patch_files(_sha256(text), flag))
    # The manifest after what it names, and before what it doesn't name any more: kubelet acts on it at once.
    return [*users, *new, *patches, File(_path(observed), observed["manifest"], manifest.done()), *old]


def _absent(options: Options, observed: Json, manifest: StaticPod) -> list[File]:
    files: list[File] = []
    stamp = manifest.annotation()
    note = _merged_file.read(observed["merged"])
    for form, path in _merged_paths(manifest, note):
        text = _text_of(form, path, observed)
        if text is None or not (stamp or note or _merged_file.is_ours(path, form, text, options.extender)):
            continue
        files.append(File(path, text, _merged_file.take_out(path, form, text, options.extender, note)))
    gone = [_sha256(one.after or "") for one in files]
    # What is left of a time when only this annotation could have kube-scheduler started again.
    manifest.restore(annotation=not (stamp in gone and not changed(files)))
    if changed(files) and manifest.done() == observed["manifest"]:
        # The manifest was written anew, without our annotation: kubelet has to see a change to start it again.
        manifest.annotate(_sha256(changed(files)[0].after or ""))
    files += _patches(options, observed, {})
    rest = [*_own_files(observed, {}), *_noted(observed, None)]
    return [*files, File(_path(observed), observed["manifest"], manifest.done()), *rest]


def _merged_paths(manifest: StaticPod, note: _merged_file.Note | None) -> list[tuple[str, str]]:
    """The user's files that may have our extender, each with its form."""
    if note is not None:
        return [(note.form, note.path)]
    flags = manifest.flags()
    found = []
    for form, flag in FLAGS.items():
        named = flags.get(flag, "")
        if not named or named in OWN.values():
            continue
        try:
            found.append((form, manifest.host_path(named)))
        except BadInput:
            if manifest.annotated():
                raise
            # Not a file that we could have changed.
    return found


def _form(options: Options, flags: t.Mapping[str, str], minor: int) -> str:
    """In which of its two ways kube-scheduler gets the extender.

    :raises BadInput: it has something that can't be combined with that way.
    """
    if "policy-configmap" in flags:
        raise BadInput(
            "scheduler_configuration: kube-scheduler has --policy-configmap, and what it takes from a ConfigMap isn't "
            "changed here; give it a file (--policy-config-file or --config)"
        )
    users = {form: flags[flag] for form, flag in FLAGS.items() if flags.get(flag, OWN[form]) != OWN[form]}
    if options.configuration == "auto" and "policy" in users and minor < config.NO_POLICY_SINCE:
        form = "policy"
    else:
        form = config.form_of(minor, options.configuration)
    other = "policy" if form == "config" else "config"
    both = form == "policy" and form in users and minor >= config.CONFIG_SINCE
    if other in users and not both:
        possible = config.CONFIG_SINCE <= minor < config.NO_POLICY_SINCE
        raise BadInput(
            f"scheduler_configuration: kube-scheduler 1.{minor} has --{FLAGS[other]}={users[other]}, with which "
            f"{'a configuration file' if form == 'config' else 'a policy file'} can't be combined; "
            + (f"set scheduler_configuration: {other}, or take that flag out" if possible else "take that flag out")
        )
    return form


def _users(form: str, named: str, observed: Json, manifest: StaticPod) -> tuple[str, str | None]:
    """The user's own file: where it is on the machine, and its text."""
    path = manifest.host_path(named)
    return path, _text_of(form, path, observed)


def _text_of(form: str, path: str, observed: Json) -> str | None:
    if path != observed.get(f"{form}_path"):
        raise LookAgain(**{f"{form}_path": path})
    return t.cast("str | None", observed[form])


def _noted(observed: Json, note: _merged_file.Note | None) -> list[File]:
    return [File(cp.MERGED, observed["merged"], note.text() if note is not None else None)]


def _own_files(observed: Json, after: t.Mapping[str, str | None]) -> list[File]:
    before = {"config": observed.get("ours"), "policy": observed.get("ours_policy")}
    return [File(OWN[form], before[form], after.get(form)) for form in OWN]


def _patches(options: Options, observed: Json, wanted: t.Mapping[str, str]) -> list[File]:
    """Our patches in the folder that kubeadm upgrade is given; the user's own are left alone."""
    if not options.patches_dir:
        return []
    there = observed["patches"]
    paths = {name: posixpath.join(options.patches_dir, name) for name in PATCHES}
    return [File(path, there.get(path), wanted.get(name)) for name, path in paths.items()]


def _path(observed: Json) -> str:
    return str(observed.get("manifest_path") or cp.MANIFEST)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# --------------------------------------------------------------------------- lease


def _minor_or_newest(manifest: StaticPod, options: Options) -> int:
    try:
        return config.minor_of(manifest.image, options.version)
    except BadInput:
        return NEWEST


def _text_after(observed: Json, files: t.Sequence[File], named: str) -> str | None:
    """The configuration that kube-scheduler is left with."""
    if not named:
        return None
    path = named if named == cp.CONFIG else str(observed["config_path"])
    before = observed.get("ours") if named == cp.CONFIG else observed["config"]
    return {one: text for one, _before, text in files}.get(path, before)


def lease_of(text: str | None, flags: t.Mapping[str, str], minor: int) -> tuple[str, str] | None:
    """The lease by which this kube-scheduler and its like take turns: its namespace and name.

    :param text: its configuration; None where it has none.
    """
    try:
        found = (yaml.safe_load(text) or {}).get("leaderElection") if text else None
    except (yaml.YAMLError, AttributeError):
        found = None
    election = dict(found) if isinstance(found, dict) else {}
    if text is None or minor >= FLAGS_LEAD_SINCE:
        said = config.from_flags(flags)["leaderElection"]
        election.update({key: value for key, value in said.items() if set(_FLAGS_OF.get(key, ())) & set(flags)})
    if election.get("leaderElect") is False or election.get("resourceLock") in NO_LEASE:
        return None
    return str(election.get("resourceNamespace") or "kube-system"), str(election.get("resourceName") or cp.CONTAINER)


_FLAGS_OF = {
    "leaderElect": ("leader-elect",),
    "resourceLock": ("leader-elect-resource-lock",),
    "resourceName": ("leader-elect-resource-name", "lock-object-name"),
    "resourceNamespace": ("leader-elect-resource-namespace", "lock-object-namespace"),
}
