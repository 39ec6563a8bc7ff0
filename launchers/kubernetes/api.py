"""The API server: requests with the user's kubeconfig, or with the account of the pod we run in.

The `kubernetes` client reads the configuration, gets tokens and speaks TLS; the requests are our
own, because its typed methods drop what their version does not know, such as a field that a patch
sets.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from msrun.errors import MsrunError, UnreachableError, UsageError
from msrun.units import shown

Document = dict[str, Any]

_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_SECONDS = 20.0
_TRIES = 3
# What the server answers while it is starting, overloaded, or being replaced.
_BUSY = (429, 500, 502, 503, 504)
_CHUNK = 1 << 16
_REFUSED_FROM = 400
NOT_FOUND, CONFLICT = 404, 409
# Kind -> where its objects are.
PLACES = {
    "Job": ("/apis/batch/v1", "jobs"),
    "MsrunJob": ("/apis/msrun.io/v1", "msrunjobs"),
    "JobSet": ("/apis/jobset.x-k8s.io/v1alpha2", "jobsets"),
    "Service": ("/api/v1", "services"),
    "Secret": ("/api/v1", "secrets"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Pod": ("/api/v1", "pods"),
    "PodGroup": ("/apis/scheduling.volcano.sh/v1beta1", "podgroups"),
    "Event": ("/api/v1", "events"),
}


class ApiError(MsrunError):
    """The API server refused a request.

    Args:
        status: HTTP status.
        message: Its own words.
    """

    exit_code = UsageError.exit_code

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Cluster:
    """One namespace of a cluster.

    Args:
        client: The `ApiClient` of the kubernetes package.
        namespace: The namespace.
    """

    def __init__(self, client: Any, namespace: str) -> None:
        self.client = client
        self.namespace = namespace
        self._pool = client.rest_client.pool_manager
        self._host = str(client.configuration.host).rstrip("/")

    def create(self, manifest: Document) -> Document:
        """Create an object and return it as the server has it.

        Raises:
            ApiError: The server refuses it; `CONFLICT` if there is one of that name.
        """
        group = "/api/v1" if manifest["apiVersion"] == "v1" else f"/apis/{manifest['apiVersion']}"
        path = self._path(manifest["kind"], group=group)
        return self._send("POST", path, body=manifest)

    def get(self, kind: str, name: str) -> Document | None:
        """Return an object, None if there is none."""
        try:
            return self._send("GET", self._path(kind, name))
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def list(self, kind: str, **selectors: str) -> list[Document]:
        """Return the objects of a kind, such as with `labelSelector`."""
        return list(self._send("GET", self._path(kind), query=selectors).get("items") or ())

    def patch(self, kind: str, name: str, changes: Document) -> Document:
        """Change fields of an object by a JSON merge patch; return it."""
        content = "application/merge-patch+json"
        return self._send("PATCH", self._path(kind, name), body=changes, content=content)

    def delete(self, kind: str, name: str) -> None:
        """Have an object deleted with everything that it owns; it may be gone already."""
        options = {"propagationPolicy": "Foreground"}
        try:
            self._send("DELETE", self._path(kind, name), body=options)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise

    def log_lines(self, pod: str, container: str, *, since: str = "") -> Iterator[bytes]:
        """Yield the lines of a container's log as they come, each with its time; to its end.

        Raises:
            ApiError: The server refuses; the container may not have started yet.
            UnreachableError: It does not answer, or the line breaks.
        """
        query = {"container": container, "follow": "true", "timestamps": "true"}
        if since:
            query["sinceTime"] = since
        path = f"{self._path('Pod', pod)}/log"
        import urllib3

        response = self._request("GET", path, query=query, seconds=None)
        rest = b""
        try:
            for chunk in response.stream(_CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._unreachable(error) from None
        finally:
            response.close()
        if rest:
            yield rest

    def _path(self, kind: str, name: str = "", *, group: str = "") -> str:
        usual, plural = PLACES[kind]
        group = group or usual
        tail = f"/{quote(name, safe='')}" if name else ""
        return f"{group}/namespaces/{quote(self.namespace, safe='')}/{plural}{tail}"

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: Document | None = None,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Document:
        response = self._request(method, path, body=body, query=query, content=content)
        try:
            document = json.loads(response.data)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise UnreachableError(f"what answers at {self._host} is no API server of Kubernetes")
        return document

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: Document | None = None,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
        seconds: float | None = _SECONDS,
    ) -> Any:
        """Return the answer; a body is read only where `seconds` limits it."""
        import urllib3

        headers = {"Accept": "application/json", **self._authentication()}
        if body is not None:
            headers["Content-Type"] = content
        url = f"{self._host}{path}" + (f"?{urlencode(query)}" if query else "")
        # A request that changes something may have been carried out where its answer is lost.
        tries = _TRIES if method == "GET" else 1
        try:
            response = self._pool.request(
                method,
                url,
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=urllib3.Timeout(connect=_SECONDS, read=seconds),
                retries=urllib3.Retry(tries - 1, redirect=0, backoff_factor=0.2),
                preload_content=seconds is not None,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._unreachable(error) from None
        if response.status < _REFUSED_FROM:
            return response
        message = _reason(response)
        if response.status in _BUSY:
            raise UnreachableError(f"the API server {self._host} is not ready: {message}")
        raise ApiError(response.status, message)

    def _authentication(self) -> dict[str, str]:
        """Return the headers of this user; a token that has run out is fetched anew."""
        configuration = self.client.configuration
        headers = dict(self.client.default_headers)
        for setting in configuration.auth_settings().values():
            if setting["in"] == "header" and setting["value"]:
                headers[setting["key"]] = setting["value"]
        return headers

    def _unreachable(self, error: Exception) -> UnreachableError:
        reason = str(getattr(error, "reason", None) or error)
        return UnreachableError(f"the API server {self._host} does not answer: {shown(reason)}")


def _reason(response: Any) -> str:
    """Return why the server refused, in its words."""
    try:
        document = json.loads(response.data if response.data is not None else response.read())
    except ValueError:
        document = None
    message = document.get("message") if isinstance(document, dict) else None
    return str(message or f"HTTP status {response.status}")


def open_cluster(*, namespace: str = "", context: str = "") -> Cluster:
    """Return the cluster of the user's kubeconfig, else that of the pod that we run in.

    Args:
        namespace: Namespace; empty takes that of the context, or of the pod.
        context: Context of the kubeconfig; empty takes the current one.

    Raises:
        UsageError: The client is not installed, or there is no configuration.
    """
    try:
        import yaml
        from kubernetes import client, config
    except ImportError as error:
        raise UsageError(
            f"--launcher kubernetes needs the Python package kubernetes: {error}",
            hint='pip install "msrun[kubernetes]", or msrun plan -o DIR and kubectl apply -f DIR',
        ) from None
    try:
        contexts, current = config.list_kube_config_contexts()
    except (config.ConfigException, OSError, yaml.YAMLError) as error:
        return _in_cluster(namespace, context, str(error))
    chosen = next((each for each in contexts if each["name"] == context), current)
    if context and chosen["name"] != context:
        names = ", ".join(each["name"] for each in contexts)
        raise UsageError(f"--context {shown(context)} is not in the kubeconfig (choose {names})")
    configuration = client.Configuration()
    try:
        config.load_kube_config(context=chosen["name"], client_configuration=configuration)
    except (config.ConfigException, OSError, binascii.Error, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"the kubeconfig cannot be used: {reason}") from None
    own = (chosen.get("context") or {}).get("namespace") or "default"
    return Cluster(client.ApiClient(configuration), namespace or own)


def _in_cluster(namespace: str, context: str, why: str) -> Cluster:
    from kubernetes import client, config

    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        reason = " ".join(why.split())
        hint = "set KUBECONFIG, or run in a pod with a service account"
        raise UsageError(f"there is no cluster: {reason}", hint=hint) from None
    if context:
        raise UsageError(f"--context {shown(context)}: this pod has no kubeconfig")
    try:
        own = Path(_NAMESPACE_FILE).read_text().strip()
    except OSError:
        own = "default"
    return Cluster(client.ApiClient(configuration), namespace or own)


def encode_key(secret: bytes) -> str:
    """Return the value of a Secret's key."""
    return base64.b64encode(secret.hex().encode()).decode()
