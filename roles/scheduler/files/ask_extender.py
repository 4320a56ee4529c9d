# SPDX-License-Identifier: GPL-3.0-or-later
# Follows the text of http_probe.py in a pod. Posts until the extender is ready, and writes the last response as JSON.
# Arguments: the URL, the request, the seconds for it, the folder of the certificates, and the file to write.
# ruff: noqa: F821
import json
import sys
import time


def is_ready(answer):
    """An extender that has just started answers with status 200 and an error, too."""
    try:
        return answer.status == 200 and not json.loads(answer.text).get("Error")
    except (ValueError, AttributeError):
        return False


url, request, seconds, folder, written = sys.argv[1:]
context = ssl.create_default_context(cafile=f"{folder}/ca.crt")
context.load_cert_chain(f"{folder}/tls.crt", f"{folder}/tls.key")
end = time.monotonic() + float(seconds)
while not is_ready(answer := post(url, request, context)) and time.monotonic() < end:
    time.sleep(2)
with open(written, "w") as file:
    # kubelet keeps 4096 bytes of it.
    json.dump({**answer._asdict(), "text": answer.text[:1000]}, file)
