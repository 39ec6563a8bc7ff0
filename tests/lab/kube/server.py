"""The HTTP side of the API server: requests become calls of the store."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable

import yaml

from kube import patches, streams, tables
from kube.access import AccessControl
from kube.failures import ApiError
from kube.resources import discovery
from kube.selectors import has_fields, has_labels
from kube.store import ObjectStore

_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/(?!status$|finalize$)))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>.+))?)?"
)
_TURN = 1.0
"""Seconds after which a watch looks whether its client is still there."""


class ApiServer:
    """Serves a store on a port of 127.0.0.1, which stays the same over `stop` and `start`.

    Attributes:
        pods: Answers what is asked of running pods: `log_of`, `run_in`; None without kubelets.
        fault: Called with method and path before each request; may raise `ApiError`.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.access = AccessControl(store)
        self.pods = None
        self.fault: Callable[[str, str], None] = lambda _method, _path: None
        self.requests: list[str] = []
        self.problems: list[Exception] = []
        self._connections: set[socket.socket] = set()
        self._server: http.server.ThreadingHTTPServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_up(self) -> bool:
        return self._server is not None

    def start(self) -> None:
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = _Listener(("127.0.0.1", self.port), handler)
        self.port = self._server.server_address[1]
        serve = {"target": self._server.serve_forever, "args": (0.05,), "daemon": True}
        threading.Thread(**serve).start()

    def stop(self) -> None:
        """Refuse connections from now on, and break those that there are."""
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        server.server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self.store.changed:
            self.store.changed.notify_all()

    def opened(self, connection: socket.socket) -> None:
        self._connections.add(connection)

    def closed(self, connection: socket.socket) -> None:
        self._connections.discard(connection)


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, _request, _address) -> None:
        """Say nothing: a client that went away is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.api.opened(self.connection)

    def finish(self) -> None:
        self.api.closed(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *_words: object) -> None:
        """Print nothing."""

    def answer(self) -> None:
        try:
            self._answer()
        except ApiError as error:
            self._send(error.as_status(), error.code)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except Exception as error:  # noqa: BLE001 - a mistake of the lab fails its test
            self.api.problems.append(error)
            self._send(ApiError(500, "InternalError", repr(error)).as_status(), 500)

    # One request.

    def _answer(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        self.words = urllib.parse.parse_qs(parts.query).get("command", [])
        path = parts.path.rstrip("/") or "/"
        body = self._body()
        self.api.fault(self.command, path)
        self.api.requests.append(f"{self.command} {path}")
        if path in ("/healthz", "/readyz", "/livez"):
            self._send_bytes(b"ok", "text/plain")
            return
        document = discovery(path, self.api.store.resources.values())
        if document is not None:
            self._send(document)
            return
        found = _PATH.fullmatch(path)
        version = found and ("v1" if found["core"] else found["group"])
        resource = found and self.api.store.resources.get((version, found["plural"]))
        if not resource:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        self.resource = resource
        self.namespace, self.name, self.sub = found["namespace"], found["name"], found["sub"] or ""
        if self.sub and self.sub not in {*resource.subresources, "finalize"}:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        self.dry_run = self.query.get("dryRun") == "All"
        self._authorise()
        handle = getattr(self, f"_{self.command.lower()}")
        handle(body)

    def _authorise(self) -> None:
        is_one = bool(self.name)
        verb = {
            "GET": "watch" if self._is_watch() else "get" if is_one else "list",
            "POST": "create",
            "PUT": "update",
            "PATCH": "patch",
            "DELETE": "delete" if is_one else "deletecollection",
        }[self.command]
        what = "/".join(filter(None, (self.resource.plural, self.sub)))
        header = self.headers.get("Authorization")
        self.api.access.check(
            header,
            verb,
            group=self.resource.group,
            resource=what,
            namespace=self.namespace,
            name=self.name,
        )

    def _is_watch(self) -> bool:
        return self.query.get("watch", "") in ("1", "true", "True")

    def _body(self) -> dict | list | None:
        size = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(size)
        if len(raw) < size:
            raise ConnectionResetError("the client died before its request was whole")
        kind = self.headers.get("Content-Type", "")
        if not raw:
            return None
        if "protobuf" in kind:
            raise ApiError(415, "UnsupportedMediaType", "this server speaks JSON and YAML only")
        try:
            return yaml.safe_load(raw) if "yaml" in kind else json.loads(raw)
        except ValueError as error:
            raise ApiError(400, "BadRequest", str(error)) from None

    def _get(self, _body: object) -> None:
        store = self.api.store
        if self.sub == "log":
            streams.send_log(self, store.get(self.resource, self.namespace, self.name))
        elif self.sub in ("exec", "portforward"):
            streams.run(self, store.get(self.resource, self.namespace, self.name))
        elif self._is_watch():
            self._watch()
        elif self.name:
            self._send_objects([store.get(self.resource, self.namespace, self.name)], one=True)
        else:
            with store.changed:
                self._send_objects(
                    store.list(
                        self.resource,
                        self.namespace,
                        self.query.get("labelSelector"),
                        self.query.get("fieldSelector"),
                    )
                )

    def _post(self, body: dict) -> None:
        store = self.api.store
        if self.sub in ("exec", "portforward"):
            streams.run(self, store.get(self.resource, self.namespace, self.name))
        elif self.sub == "eviction":
            self.api.pods.evict(self.namespace, self.name)
            self._send({"kind": "Status", "apiVersion": "v1", "status": "Success"}, 201)
        elif self.sub == "token":
            token = self.api.access.token(self.namespace, self.name)
            self._send({**body, "status": {"token": token}}, 201)
        elif self.resource.plural == "selfsubjectaccessreviews":
            self._send({**body, "status": {"allowed": True}}, 201)
        else:
            self._send(store.create(self.resource, self.namespace, body, dry_run=self.dry_run), 201)

    def _put(self, body: dict) -> None:
        self._change(lambda _old: body)

    def _patch(self, body: dict) -> None:
        kind = self.headers.get_content_type()
        if "apply-patch" in kind:
            self._apply(body)
            return
        if "json-patch" in kind:
            self._change(lambda old: patches.json_patch(old, body))
        elif "strategic" in kind:
            if self.resource.schema:
                text = "strategic merge patches are for built-in kinds"
                raise ApiError(415, "UnsupportedMediaType", text)
            self._change(lambda old: patches.strategic_merge(_unversioned(old, body), body))
        else:
            self._change(lambda old: patches.merge(_unversioned(old, body), body))

    def _apply(self, body: dict) -> None:
        force = self.query.get("force") in ("1", "true", "True")
        manager = self.query["fieldManager"]
        store = self.api.store
        if not store.list(self.resource, self.namespace, None, f"metadata.name={self.name}"):
            body.setdefault("metadata", {})["name"] = self.name
            new = patches.apply(None, body, manager, force=force)
            made = store.create(self.resource, self.namespace, new, dry_run=self.dry_run)
            self._send(made, 201)
            return
        self._change(lambda old: patches.apply(_unversioned(old, body), body, manager, force=force))

    def _change(self, edit: Callable[[dict], dict]) -> None:
        self._send(
            self.api.store.change(
                self.resource,
                self.namespace,
                self.name,
                edit,
                subresource="status" if self.sub == "status" else "",
                dry_run=self.dry_run,
            )
        )

    def _delete(self, body: dict | None) -> None:
        options = {**self.query, **(body or {})}
        grace = options.get("gracePeriodSeconds")
        how = {
            "grace": None if grace is None else float(grace),
            "propagation": options.get("propagationPolicy"),
            "uid": (options.get("preconditions") or {}).get("uid"),
            "dry_run": self.dry_run or options.get("dryRun") == ["All"],
        }
        store = self.api.store
        if self.name:
            self._send(store.delete(self.resource, self.namespace, self.name, **how))
            return
        labels, fields = self.query.get("labelSelector"), self.query.get("fieldSelector")
        for obj in store.list(self.resource, self.namespace, labels, fields):
            with contextlib.suppress(ApiError):
                where = obj["metadata"].get("namespace"), obj["metadata"]["name"]
                store.delete(self.resource, *where, **how)
        self._send({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    # Watches.

    def _watch(self) -> None:
        store = self.api.store
        initial = self.query.get("sendInitialEvents") in ("true", "True")
        version = self.query.get("resourceVersion") or "0"
        seconds = float(self.query.get("timeoutSeconds", 3600))
        end = time.monotonic() + seconds
        with store.changed:
            seen = store.version if initial or version == "0" else int(version)
            found = [o for o in store.list(self.resource, self.namespace) if self._is_meant(o)]
        self._start_chunks("application/json")
        if initial or version == "0":
            for obj in found:
                self._event("ADDED", obj)
        if initial:
            self._bookmark(seen, {"k8s.io/initial-events-end": "true"})
        while time.monotonic() < end and self.api.is_up:
            try:
                with store.changed:
                    changes, latest = list(store.since(self.resource, seen)), store.version
            except ApiError as error:
                self._event("ERROR", error.as_status())
                break
            for change in changes:
                self._tell(change)
            if not changes and latest > seen and "allowWatchBookmarks" in self.query:
                self._bookmark(latest, {})
            seen = latest
            with store.changed:
                if store.version == seen and self.api.is_up:
                    store.changed.wait(max(0.0, min(_TURN, end - time.monotonic())))
            if _has_ended(self.connection):
                self.close_connection = True
                return
        self._end_chunks()

    def _tell(self, change) -> None:
        """Send a change as it looks through the selectors of this watch."""
        is_meant = self._is_meant(change.obj)
        was_meant = change.before is not None and self._is_meant(change.before)
        if change.kind == "DELETED":
            if was_meant:
                self._event("DELETED", change.obj)
        elif is_meant:
            self._event("MODIFIED" if was_meant else "ADDED", change.obj)
        elif was_meant:
            self._event("DELETED", change.obj)

    def _is_meant(self, obj: dict) -> bool:
        metadata = obj["metadata"]
        return (
            self.namespace in (None, metadata.get("namespace"))
            and self.name in (None, metadata["name"])
            and has_labels(obj, self.query.get("labelSelector"))
            and has_fields(obj, self.query.get("fieldSelector"))
        )

    def _bookmark(self, version: int, annotations: dict) -> None:
        metadata = {"resourceVersion": str(version), "annotations": annotations}
        self._event("BOOKMARK", self._versioned({"metadata": metadata}))

    def _event(self, kind: str, obj: dict) -> None:
        if kind not in ("BOOKMARK", "ERROR"):
            obj = self._versioned(obj)
            if self._wants_table():
                obj = tables.table(self.resource, [obj])
        elif kind == "BOOKMARK" and self._wants_table():
            obj = tables.table(self.resource, [], obj["metadata"])
        self._chunk(json.dumps({"type": kind, "object": obj}).encode() + b"\n")

    def _versioned(self, obj: dict) -> dict:
        """Return an object as the requested API version names it."""
        return {**obj, "apiVersion": self.resource.api_version, "kind": self.resource.kind}

    def _wants_table(self) -> bool:
        return "as=Table" in self.headers.get("Accept", "")

    # Answers.

    def _send_objects(self, objects: list[dict], *, one: bool = False) -> None:
        objects = list(map(self._versioned, objects))
        version = str(self.api.store.version)
        if self._wants_table():
            self._send(tables.table(self.resource, objects, {"resourceVersion": version}))
        elif one:
            self._send(objects[0])
        else:
            kind = {"kind": f"{self.resource.kind}List", "apiVersion": self.resource.api_version}
            self._send({**kind, "metadata": {"resourceVersion": version}, "items": objects})

    def _send(self, document: dict, code: int = 200) -> None:
        self._send_bytes(json.dumps(document).encode(), "application/json", code)

    def _send_bytes(self, data: bytes, kind: str, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _start_chunks(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _end_chunks(self) -> None:
        self.wfile.write(b"0\r\n\r\n")


for _method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
    setattr(_Handler, f"do_{_method}", _Handler.answer)


def _unversioned(old: dict, patch: dict) -> dict:
    """Return `old` without its version, which then is checked only where the patch has one."""
    if "resourceVersion" not in patch.get("metadata", {}):
        old["metadata"].pop("resourceVersion", None)
    return old


def _has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
