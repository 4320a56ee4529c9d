# SPDX-License-Identifier: GPL-3.0-or-later
"""A real etcd and kube-apiserver (1.37, 1.36 or 1.29) on loopback, which validate objects; ended by their IDs.

A folder of tests imports the fixture in its conftest.py, with ``from real_apiserver import api_server`` and an
``__all__`` that names it; one server serves the whole test run. A test that stops the server, or adds objects that
affect others, uses its own: ``with own_api_server() as server``.

There is no controller manager: namespaces have no default service account (pods don't need one), deleted namespaces
stay, and ClusterRoles aren't aggregated. There is no node either, so containers never run.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import ipaddress
import json
import os
import shutil
import ssl
import subprocess
import tempfile
import threading
import time
import typing as t
from functools import cache, cached_property
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from ports import free_port

from lab import build
from lab.shell import LabError

# Programs of a release whose annotations no policy protects. The tag leaves out cloud providers, whose module is gone.
KUBERNETES_1_29 = build.ToolSet(
    "kubernetes-1.29",
    build.SETS["kubernetes"].module,
    ("kube-apiserver", "kube-scheduler"),
    build.SETS["kubernetes"].ldflags,
    tags="providerless",
)
# Releases beside the lab's own; each takes minutes to build.
OTHERS = {"1.29": KUBERNETES_1_29, "1.36": build.OLDER[0]}
START = 90.0
# Less work for the garbage collector of Go; there is memory enough.
GO = {"GOGC": "400"}
MERGE = "application/merge-patch+json"


class Missing(Exception):
    """The programs are unavailable on this machine; the message has the reason."""


@cache
def programs(release: str = "") -> dict[str, str]:
    """The paths of etcd and of every program of Kubernetes 1.37: LAB_BIN's or the cache's, built if they are missing.

    :param release: one of OTHERS, whose programs are taken instead.
    :raises Missing: they can't be built, because Go or the modules are missing.
    """
    try:
        found = {
            program: str(build.binaries(tools) / program)
            for tools in ("etcd", "kubernetes")
            for program in build.SETS[tools].binaries
        }
        if release:
            folder = build.built(OTHERS[release])
            found |= {program: str(folder / program) for program in OTHERS[release].binaries}
        return found
    except (LabError, OSError) as error:
        raise Missing(f"no kube-apiserver: {error}") from None


class Refused(Exception):
    """The API server refuses a request; ``status`` is the HTTP status, the message is its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _addresses(*texts: str) -> list[x509.IPAddress]:
    return [x509.IPAddress(ipaddress.ip_address(text)) for text in texts]


class _Authority:
    """A certificate authority with its files in a folder.

    :param identifiers: whether its certificates have key identifiers.
    """

    def __init__(self, folder: Path, identifiers: bool = True) -> None:
        self.folder, self._identifiers = folder, identifiers
        folder.mkdir()
        self._key = self.key("ca")
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ca of the tests")])
        self._write("ca", self._certificate(self._name, self._key, None))

    def key(self, name: str) -> ec.EllipticCurvePrivateKey:
        """Create a private key in the file <name>.key, and its public key in <name>.pub."""
        key = ec.generate_private_key(ec.SECP256R1())
        file = self.folder / f"{name}.key"
        file.touch(mode=0o600)
        file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        (self.folder / f"{name}.pub").write_bytes(
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
        return key

    def sign(self, name: str, user: str, groups: t.Sequence[str] = (), server: bool = False) -> tuple[Path, Path]:
        """Create a certificate and its key in the files <name>.crt and <name>.key."""
        parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        subject = x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, user)])
        usage = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
        self._write(name, self._certificate(subject, self.key(name), usage))
        return self.folder / f"{name}.crt", self.folder / f"{name}.key"

    def _certificate(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, usage: x509.ObjectIdentifier | None
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=usage is None, path_length=None), critical=True)
        )
        if self._identifiers:
            issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
            subject_key = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
            builder = builder.add_extension(subject_key, critical=False).add_extension(issuer, critical=False)
        if usage is None:
            every = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment"), False)
            every |= dict.fromkeys(("key_agreement", "encipher_only", "decipher_only"), False)
            signing = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **every)
            builder = builder.add_extension(signing, critical=True)
        else:
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if usage == ExtendedKeyUsageOID.SERVER_AUTH:
            names = [x509.DNSName("localhost"), *_addresses("127.0.0.1", "::1")]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, name: str, certificate: x509.Certificate) -> None:
        (self.folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


class ApiServer:
    """One API server with its etcd; their data is in ``folder``, which is removed at the end."""

    def __init__(self, flags: t.Sequence[str] = (), release: str = "") -> None:
        """
        :param flags: more arguments for kube-apiserver, in place of its usual ones of the same names.
        :param release: one of OTHERS, instead of the lab's own.
        :raises Missing: the programs are unavailable.
        """
        self.programs = programs(release)
        self.folder = Path(tempfile.mkdtemp(prefix="kubegpu-api-"))
        self._authority = _Authority(self.folder / "pki")
        self._authority.sign("serving", "kube-apiserver", server=True)
        self._authority.key("accounts")
        self._flags = list(flags)
        self._running: list[subprocess.Popen[bytes]] = []
        self._namespaces = 0
        # The plural of each kind, and whether it is in namespaces.
        self._resources: dict[tuple[str, str], tuple[str, bool]] = {}
        # A thread's connections by their address.
        self._connections = threading.local()
        self._ports = free_port(), free_port(), free_port()
        self.url = ""

    def __enter__(self) -> ApiServer:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # ----------------------------------------------------------------- start and stop

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of an administrator (group system:masters)."""
        return self.kubeconfig_of("kubernetes-admin", ("system:masters",))

    def start(self) -> None:
        """Start it, or start it again with its data and its address, and wait until it is ready."""
        client, peer, secure = self._ports
        on = [flag.partition("=")[2] for flag in self._flags if flag.startswith("--bind-address=")]
        self.url = f"https://{f'[{on[-1]}]' if on and ':' in on[-1] else '127.0.0.1'}:{secure}"
        etcd, pki = f"http://127.0.0.1:{client}", self._authority.folder
        self._spawn(
            "etcd",
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )
        usual = (
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={secure}",
            # A loopback address can't be an endpoint.
            "--endpoint-reconciler-type=none",
            "--advertise-address=127.0.0.1",
            f"--cert-dir={pki}",
            f"--tls-cert-file={pki}/serving.crt",
            f"--tls-private-key-file={pki}/serving.key",
            f"--client-ca-file={pki}/ca.crt",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki}/accounts.pub",
            f"--service-account-signing-key-file={pki}/accounts.key",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=RBAC",
            # It would wait for accounts that only a controller manager creates.
            "--disable-admission-plugins=ServiceAccount",
            "--allow-privileged=true",
            "--profiling=false",
        )
        # Lists that are given twice add up.
        given = {flag.partition("=")[0] for flag in self._flags}
        self._spawn("kube-apiserver", *(flag for flag in usual if flag.partition("=")[0] not in given), *self._flags)
        end = time.monotonic() + START
        while not self.ready():
            ended = [process for process in self._running if process.poll() is not None]
            if ended or time.monotonic() > end:
                raise RuntimeError(f"the API server of the tests doesn't get ready: {self.log()[-2000:]}")
            time.sleep(0.1)

    def ready(self) -> bool:
        """Whether it answers and its start is complete."""
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            return self.ask("GET", "/readyz")[0] == 200 and self.ask("GET", "/api/v1/namespaces/default")[0] == 200
        return False

    def stop(self) -> None:
        """Stop it; its data and its address are kept for the next start."""
        for process in reversed(self._running):
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        self._running = []

    def remove(self) -> None:
        """Stop it and remove its data."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """The logs of both programs."""
        return "\n".join(file.read_text(errors="replace") for file in sorted(self.folder.glob("*.log")))

    def _spawn(self, program: str, *flags: str) -> None:
        # It ends with the test run, even if that is killed.
        tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with (self.folder / f"{program}.log").open("ab") as log:
            self._running.append(
                subprocess.Popen(
                    [*tied, self.programs[program], *flags],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.folder,
                    env={**os.environ, **GO},
                    start_new_session=True,
                )
            )

    # ----------------------------------------------------------------- users

    def kubeconfig_of(self, user: str, groups: t.Sequence[str] = ()) -> Path:
        """The kubeconfig of a user, with a certificate."""
        name = "".join(letter if letter.isalnum() else "-" for letter in "-".join((user, *groups)))
        file = self.folder / f"kubeconfig-{name}"
        if file.exists():
            return file
        certificate, key = self._authority.sign(f"user-{name}", user, groups)
        cluster = {"server": self.url, "certificate-authority": str(self._authority.folder / "ca.crt")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": user, "user": {"client-certificate": str(certificate), "client-key": str(key)}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": user}}],
            "current-context": "tests",
        }
        file.write_text(yaml.safe_dump(config, sort_keys=False))
        return file

    def may(self, user: str, verb: str, resource: str, namespace: str = "", name: str = "", group: str = "") -> bool:
        """Whether RBAC allows a request of a user, by a SubjectAccessReview.

        :param user: a user's name; ``system:serviceaccount:<namespace>:<name>`` for a service account.
        :param resource: the plural, with its subresource after a slash.
        """
        plural, _slash, subresource = resource.partition("/")
        wanted = {"verb": verb, "group": group, "resource": plural, "subresource": subresource}
        wanted |= {"namespace": namespace, "name": name}
        groups = ["system:authenticated"]
        if user.startswith("system:serviceaccount:"):
            groups += ["system:serviceaccounts", f"system:serviceaccounts:{user.split(':')[2]}"]
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "groups": groups, "resourceAttributes": wanted},
        }
        done = self.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(done["status"]["allowed"])

    # ----------------------------------------------------------------- requests

    @cached_property
    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self._authority.folder / "ca.crt"))
        context.load_cert_chain(*self._authority.sign("requests", "kubernetes-admin", ("system:masters",)))
        return context

    def ask(
        self,
        method: str,
        path: str,
        body: t.Any = None,
        content: str = "application/json",
        user: str = "",
        group: str = "",
    ) -> tuple[int, str]:
        """Send one request and return the HTTP status and the answer's text.

        :param path: with its query.
        :param user: the impersonated user; by default the administrator.
        :param group: that user's group, beside system:authenticated.
        """
        headers = {"Content-Type": content, **({"Impersonate-User": user} if user else {})}
        headers |= {"Impersonate-Group": group} if group else {}
        data = None if body is None else json.dumps(body)
        connection = self._connection()
        # The server may have closed a connection that was idle, or have been restarted.
        kept = connection.sock is not None
        try:
            try:
                return self._exchange(connection, method, path, data, headers)
            except (ConnectionError, ssl.SSLError, http.client.BadStatusLine):
                connection.close()
                if not kept:
                    raise
                return self._exchange(connection, method, path, data, headers)
        except BaseException:
            connection.close()
            raise

    def _connection(self) -> http.client.HTTPSConnection:
        """Return this thread's connection to the present address; a handshake costs more than most requests."""
        host = self.url.partition("//")[2]
        known: dict[str, http.client.HTTPSConnection] = self._connections.__dict__
        if host not in known:
            known[host] = http.client.HTTPSConnection(host, context=self._context, timeout=30)
        return known[host]

    @staticmethod
    def _exchange(
        connection: http.client.HTTPSConnection, method: str, path: str, data: str | None, headers: dict[str, str]
    ) -> tuple[int, str]:
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")

    def request(
        self, method: str, path: str, body: t.Any = None, content: str = "application/json", user: str = ""
    ) -> t.Any:
        """Send a request and return the object in the answer.

        :raises Refused: the API server refuses it.
        """
        status, text = self.ask(method, path, body, content, user)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = {"message": text}
        if status >= 400:
            raise Refused(status, str(answer.get("message", text)))
        return answer

    def kubectl(self, *arguments: str, text: str = "", user: str = "") -> subprocess.CompletedProcess[str]:
        """Run the real kubectl; a failure isn't raised.

        :param text: its standard input, for ``--filename=-``.
        :param user: the impersonated user.
        """
        impersonation = [f"--as={user}"] if user else []
        return subprocess.run(
            [self.programs["kubectl"], f"--kubeconfig={self.kubeconfig}", *impersonation, *arguments],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
        )

    def apply(self, *objects: dict[str, t.Any], manager: str = "tests", dry_run: bool = False, user: str = "") -> None:
        """Server-side apply with strict validation.

        :raises Refused: the API server refuses one of them.
        """
        query = f"fieldManager={manager}&force=true&fieldValidation=Strict{'&dryRun=All' if dry_run else ''}"
        for one in objects:
            self.request("PATCH", f"{self._path(one)}?{query}", one, "application/apply-patch+yaml", user)

    def _path(self, one: dict[str, t.Any]) -> str:
        """Return the path of an object, which is in the namespace default if it names none."""
        version, metadata = one["apiVersion"], one["metadata"]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        key = (version, one["kind"])
        if key not in self._resources:
            for each in self.request("GET", root)["resources"]:
                if "/" not in each["name"]:
                    self._resources[version, each["kind"]] = (each["name"], each["namespaced"])
        plural, namespaced = self._resources[key]
        namespace = f"/namespaces/{metadata.get('namespace', 'default')}" if namespaced else ""
        return f"{root}{namespace}/{plural}/{metadata['name']}"

    def service_account(self, folder: Path, namespace: str = "default", name: str = "server") -> Path:
        """Create a service account with the role cluster-admin.

        :returns: the folder, with its ``token`` and ``ca.crt``.
        """
        self.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})
        self.request(
            "POST",
            "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
            {
                "metadata": {"generateName": f"{name}-"},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
            },
        )
        return self.token(folder, namespace, name)

    def token(self, folder: Path, namespace: str, name: str, pod: str = "") -> Path:
        """Write ``token`` and ``ca.crt`` of a service account into a folder, as kubelet does.

        :param pod: the pod of the account that the token is bound to; by default none.
        :returns: the folder.
        """
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        spec: dict[str, t.Any] = {"expirationSeconds": 7200}
        if pod:
            uid = self.request("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}")["metadata"]["uid"]
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        folder.mkdir(exist_ok=True)
        (folder / "token").write_text(self.request("POST", path, body)["status"]["token"])
        shutil.copy(self.folder / "pki" / "ca.crt", folder)
        return folder

    def namespace(self, prefix: str = "test", labels: dict[str, str] | None = None) -> str:
        """Create a namespace of its own for a test."""
        self._namespaces += 1
        name = f"{prefix}-{self._namespaces}"
        metadata = {"name": name, **({"labels": labels} if labels else {})}
        self.request("POST", "/api/v1/namespaces", {"metadata": metadata})
        return name

    def install(self, *files: Path) -> None:
        """Create custom resource definitions, and wait until they are served."""
        named = [f"--filename={file}" for file in files]
        done = self.kubectl("apply", "--server-side", "--force-conflicts", *named, "--output=name")
        if done.returncode:
            raise Refused(0, done.stderr.strip())
        names = done.stdout.split()
        end = time.monotonic() + 60
        # It fails for a definition that has no status yet.
        while (done := self.kubectl("wait", "--for=condition=Established", "--timeout=60s", *names)).returncode:
            if time.monotonic() > end:
                raise Refused(0, done.stderr.strip())
            time.sleep(0.2)
        for name in names:
            # They are served a moment after they are established.
            while self.kubectl("get", name.partition("/")[2], "--all-namespaces").returncode:
                if time.monotonic() > end:
                    raise Refused(429, f"{name} is not served")
                time.sleep(0.2)


@contextlib.contextmanager
def own_api_server(*flags: str, release: str = "") -> t.Iterator[ApiServer]:
    """Run an API server that no other file uses, as a policy holds in the whole cluster; skip where it can't be had.

    :param release: one of OTHERS, instead of the lab's own.
    """
    try:
        server = ApiServer(flags, release)
    except Missing as missing:
        pytest.skip(str(missing))
    with server:
        yield server


@cache
def _shared() -> ApiServer:
    server = ApiServer()
    try:
        server.start()
    except BaseException:
        server.remove()
        raise
    return server


@pytest.fixture(scope="session")
def api_server(request: pytest.FixtureRequest) -> ApiServer:
    """The API server that all tests of a run share; skipped if its programs are unavailable."""
    try:
        server = _shared()
    except Missing as missing:
        pytest.skip(str(missing))
    # For pytest each file that imports the fixture has another one, so the fixture can't stop the server.
    request.config.add_cleanup(server.remove)
    return server
