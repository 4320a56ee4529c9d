# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write a module's result of many thousand rows, in a fraction of the time of exit_json."""

from __future__ import annotations

import json
import sys
import typing as t

from ansible.module_utils.common import warnings


class Module(t.Protocol):
    """The used part of AnsibleModule."""

    check_mode: bool
    no_log_values: set[str]

    def fail_json(self, msg: str, **kwargs: t.Any) -> t.Any: ...

    def exit_json(self, **kwargs: t.Any) -> t.Any: ...

    def do_cleanup_files(self) -> t.Any: ...


class LargeResult:
    """A module whose exit_json doesn't copy a result without secrets.

    exit_json searches each value for secrets and copies it, which for many thousand values takes longer than everything
    else. This one searches the JSON text, and writes it as it is if it contains no secret.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self.check_mode = module.check_mode

    def fail_json(self, msg: str, **kwargs: t.Any) -> t.Any:
        return self._module.fail_json(msg=msg, **kwargs)

    def exit_json(self, **kwargs: t.Any) -> t.Any:
        # With a kubeconfig file there are no secrets to search for.
        secrets = self._module.no_log_values
        if _has_warnings() or (
            secrets and any(_contains(secret, part) for part in _parts(kwargs) for secret in secrets)
        ):
            whole = {key: "".join(value) if isinstance(value, tuple) else value for key, value in kwargs.items()}
            return self._module.exit_json(**whole)
        self._module.do_cleanup_files()
        sys.stdout.write("\n")
        sys.stdout.writelines(_parts({"changed": False, **kwargs}))
        sys.stdout.write("\n")
        raise SystemExit(0)


def _parts(result: t.Mapping[str, t.Any]) -> t.Iterator[str]:
    """Return the JSON text of a result in parts, so that it isn't in memory twice."""
    before = "{"
    for key, value in result.items():
        yield f"{before}{json.dumps(key)}: "
        before = ", "
        if isinstance(value, tuple):
            yield '"'
            yield from (json.dumps(text)[1:-1] for text in value)
            yield '"'
        elif isinstance(value, list) and value:
            yield "["
            for number, row in enumerate(value):
                yield (", " if number else "") + json.dumps(row)
            yield "]"
        else:
            yield json.dumps(value)
    yield "}"


def _contains(secret: t.Any, part: str) -> bool:
    """Return whether a text contains a secret, also in JSON's notation."""
    text = str(secret)
    return bool(text) and (text in part or json.dumps(text)[1:-1] in part)


def _has_warnings() -> bool:
    """Return whether there are warnings, which exit_json adds to the result."""
    return bool(warnings.get_warning_messages() or warnings.get_deprecation_messages())
