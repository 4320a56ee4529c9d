# SPDX-License-Identifier: GPL-3.0-or-later
"""Let those read a page whom the Kubernetes API allows it: a bearer token, TokenReview and SubjectAccessReview.

That takes the rights of the ClusterRole system:auth-delegator. Nobody can make a server ask the API more often than its
limits say: answers are kept for some time, and unknown tokens are asked about at a limited rate, that of one address
below that of all. Tokens that were allowed before, and addresses from which one came, don't share the rate of all, so
that anonymous clients can't delay a Prometheus, nor one whose token was renewed.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from gpushare.api.client import Kube, KubeError
from gpushare.api.rate import Bucket
from gpushare.http.service import Request, Response, answer
from gpushare.shared._core.types import JsonObject

TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
# No longer one is asked about; those of service accounts have about 1 KiB.
TOKEN_LENGTH = 8192
# How long an answer counts. A right that is taken away ends after the first time, a new one counts after the second.
ALLOWED_SECONDS, REFUSED_SECONDS = 120.0, 10.0
# Answers that are kept.
MOST_ALLOWED, MOST_REFUSED, MOST_PEERS = 32, 256, 256
# Reviews of unknown tokens a second, and at once.
RATE, BURST = 2.0, 10
PEER_RATE, PEER_BURST = 0.2, 3

log = logging.getLogger("gpushare.reviews")


class Reviews:
    """A guard of requests: returns why one isn't allowed, or None."""

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        """
        :param clock: monotonic, in seconds.
        """
        self._kube, self._clock, self._lock = kube, clock, threading.Lock()
        self._all = Bucket(RATE, BURST, clock())
        self._peers: OrderedDict[str, Bucket] = OrderedDict()
        # Addresses of readers, the latest one last.
        self._readers: OrderedDict[str, None] = OrderedDict()
        # When an answer ends to count, by path and hash of the token.
        self._allowed: OrderedDict[bytes, float] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[float, Response]] = OrderedDict()

    def __call__(self, request: Request) -> Response | None:
        kind, _space, token = request.authorization.strip().partition(" ")
        token = token.strip()
        if kind.lower() != "bearer" or not token or len(token) > TOKEN_LENGTH:
            return _unauthenticated("a bearer token is needed here")
        key = hashlib.sha256(f"{request.path}\n{token}".encode("utf-8", "replace")).digest()
        with self._lock:
            now = self._clock()
            refused = self._refused.get(key)
            if refused is not None and refused[0] > now:
                return refused[1]
            if self._allowed.get(key, now) > now:
                return None
            if key not in self._allowed and not self._may_ask(request.peer, now):
                refusal = answer({"error": "too many unknown tokens were presented; try again later"}, 429)
                return Response(refusal.status, refusal.body, headers=(("Retry-After", "5"),))
        try:
            refusal_of = self._review(token, request)
        except KubeError as error:
            log.warning("a token can't be reviewed: %s", error)
            return answer({"error": "the Kubernetes API can't review the token now"}, 503)
        with self._lock:
            self._keep(key, request.peer, refusal_of)
        return refusal_of

    def _may_ask(self, peer: str, now: float) -> bool:
        bucket = self._peers.pop(peer, None) or Bucket(PEER_RATE, PEER_BURST, now)
        self._peers[peer] = bucket
        if len(self._peers) > MOST_PEERS:
            self._peers.popitem(last=False)
        return bucket.take(now) and (peer in self._readers or self._all.take(now))

    def _keep(self, key: bytes, peer: str, refusal: Response | None) -> None:
        now = self._clock()
        self._allowed.pop(key, None)
        self._refused.pop(key, None)
        if refusal is None:
            self._allowed[key] = now + ALLOWED_SECONDS
            self._readers[peer] = None
            self._readers.move_to_end(peer)
            for kept in (self._allowed, self._readers):
                if len(kept) > MOST_ALLOWED:
                    kept.popitem(last=False)
        else:
            self._refused[key] = now + REFUSED_SECONDS, refusal
            if len(self._refused) > MOST_REFUSED:
                self._refused.popitem(last=False)

    def _review(self, token: str, request: Request) -> Response | None:
        """Ask the API server.

        :raises KubeError: it doesn't answer, or this server may not ask.
        """
        body: JsonObject = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token},
        }
        status = self._kube.post(TOKEN_REVIEWS, body).get("status") or {}
        if status.get("authenticated") is not True:
            return _unauthenticated("the Kubernetes API doesn't know the token")
        user = status.get("user") or {}
        wanted = {"path": request.path, "verb": "get"}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": user.get("username", ""),
                "uid": user.get("uid", ""),
                "groups": user.get("groups") or [],
                "extra": user.get("extra") or {},
                "nonResourceAttributes": wanted,
            },
        }
        status = self._kube.post(ACCESS_REVIEWS, body).get("status") or {}
        if status.get("allowed") is True:
            return None
        return answer({"error": f"the user may not get the nonResourceURL {request.path}"}, 403)


def _unauthenticated(reason: str) -> Response:
    refusal = answer({"error": reason}, 401)
    return Response(refusal.status, refusal.body, headers=(("WWW-Authenticate", "Bearer"),))
