# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A module's result of many thousand rows, written out in a fraction of the time that exit_json takes for it."""

from __future__ import annotations

import json
import sys
import typing as t

from ansible.module_utils.common import warnings


class Module(t.Protocol):
    """What is taken of AnsibleModule."""

    check_mode: bool
    no_log_values: set[str]

    def fail_json(self, msg: str, **kwargs: t.Any) -> t.Any: ...

    def exit_json(self, **kwargs: t.Any) -> t.Any: ...

    def do_cleanup_files(self) -> t.Any: ...


class LargeResult:
    """A module whose exit_json doesn't copy what has nothing to hide.

    exit_json looks at each value for secrets and copies it, which takes longer than all the rest where there are many
    thousand. Here the text is looked through for the secrets, and written as it is where none is in it.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self.check_mode = module.check_mode

    def fail_json(self, msg: str, **kwargs: t.Any) -> t.Any:
        return self._module.fail_json(msg=msg, **kwargs)

    def exit_json(self, **kwargs: t.Any) -> t.Any:
        # A kubeconfig that is a file leaves nothing to look for.
        secrets = self._module.no_log_values
        if _told() or (secrets and any(_hides(secret, part) for part in _parts(kwargs) for secret in secrets)):
            return self._module.exit_json(**kwargs)
        self._module.do_cleanup_files()
        sys.stdout.write("\n")
        sys.stdout.writelines(_parts({"changed": False, **kwargs}))
        sys.stdout.write("\n")
        raise SystemExit(0)


def _parts(result: t.Mapping[str, t.Any]) -> t.Iterator[str]:
    """The JSON text of a result, each row of its lists for itself, so that the whole isn't needed twice."""
    before = "{"
    for key, value in result.items():
        yield f"{before}{json.dumps(key)}: "
        before = ", "
        if isinstance(value, list) and value:
            yield "["
            for number, row in enumerate(value):
                yield (", " if number else "") + json.dumps(row)
            yield "]"
        else:
            yield json.dumps(value)
    yield "}"


def _hides(secret: t.Any, part: str) -> bool:
    """Whether a text has a secret in it, however JSON writes that."""
    text = str(secret)
    return bool(text) and (text in part or json.dumps(text)[1:-1] in part)


def _told() -> bool:
    """Whether somebody has warned of something, which exit_json passes on."""
    return bool(warnings.get_warning_messages() or warnings.get_deprecation_messages())
