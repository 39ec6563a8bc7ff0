"""The objects of a cluster, with the rules that hold for each whatever its kind.

Every change gets the next resourceVersion and is kept for watches.  Objects that the store gives
are its own: to change one, pass a function to `change`, which gets a copy.
"""

from __future__ import annotations

import collections
import copy
import datetime as dt
import random
import string
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kube import resources
from kube.failures import ApiError, not_found
from kube.resources import Resource
from kube.selectors import has_fields, has_labels

HISTORY = 20_000
"""Changes that a watch may still ask for."""
_KEPT = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "namespace")


class Change(NamedTuple):
    version: int
    kind: str
    key: str
    obj: dict
    before: dict | None


class ObjectStore:
    """What the API server keeps; any thread may call it.

    Attributes:
        admission: Called with the operation, the kind and the new object before each write; may
            change it, or refuse by raising.
        changed: Notified of each change.
    """

    def __init__(self) -> None:
        self.resources = resources.built_in()
        self.admission: list[Callable[[str, Resource, dict], None]] = []
        self.changed = threading.Condition(threading.RLock())
        self.version = 1
        self.oldest = 0
        self.history: collections.deque[Change] = collections.deque()
        self._objects: dict[str, dict[tuple[str | None, str], dict]] = collections.defaultdict(dict)

    def resource(self, plural: str, api_version: str = "") -> Resource:
        """Return a kind by its plural, and by its API version where several have that."""
        found = (r for (v, p), r in self.resources.items() if p == plural)
        return next(r for r in found if not api_version or r.api_version == api_version)

    # Reading.

    def get(self, resource: Resource, namespace: str | None, name: str) -> dict:
        with self.changed:
            found = self._objects[resource.key].get((namespace, name))
            if found is None:
                raise not_found(resource, name)
            return found

    def find(self, plural: str, namespace: str | None, name: str) -> dict | None:
        with self.changed:
            return self._objects[self.resource(plural).key].get((namespace, name))

    def list(
        self,
        resource: Resource | str,
        namespace: str | None = None,
        labels: str | None = None,
        fields: str | None = None,
    ) -> list[dict]:
        if isinstance(resource, str):
            resource = self.resource(resource)
        with self.changed:
            found = [
                o
                for (where, _), o in self._objects[resource.key].items()
                if namespace in (None, where)
            ]
        return [o for o in found if has_labels(o, labels) and has_fields(o, fields)]

    def everything(self) -> list[tuple[Resource, dict]]:
        """Return every object with its kind."""
        with self.changed:
            kinds = {resource.key: resource for resource in self.resources.values()}
            found = self._objects.items()
            return [(kinds[key], o) for key, objects in found for o in objects.values()]

    def since(self, resource: Resource, version: int) -> Iterator[Change]:
        """Yield the changes to objects of a kind after a version.

        Raises:
            ApiError: That was too long ago.
        """
        with self.changed:
            if version < self.oldest:
                text = f"too old resource version: {version} ({self.oldest})"
                raise ApiError(410, "Expired", text)
            recent = []
            for change in reversed(self.history):
                if change.version <= version:
                    break
                recent.append(change)
        return (change for change in reversed(recent) if change.key == resource.key)

    def expire(self) -> None:
        """Forget all history, so that every watch from a version has to list again."""
        with self.changed:
            self.history.clear()
            self.version += 1
            self.oldest = self.version
            self.changed.notify_all()

    # Writing.

    def create(
        self, resource: Resource | str, namespace: str | None, obj: dict, *, dry_run: bool = False
    ) -> dict:
        """Add an object.

        Raises:
            ApiError: There is one of that name, or the object is refused.
        """
        if isinstance(resource, str):
            resource = self.resource(resource)
        obj = copy.deepcopy(obj)
        metadata = obj.setdefault("metadata", {})
        obj["apiVersion"], obj["kind"] = resource.api_version, resource.kind
        with self.changed:
            if resource.namespaced:
                namespace = namespace or "default"
                if metadata.setdefault("namespace", namespace) != namespace:
                    text = "the namespace of the object does not match that of the request"
                    raise ApiError(400, "BadRequest", text)
                self._check_namespace(namespace)
            if not metadata.get("name"):
                if not metadata.get("generateName"):
                    text = "metadata.name: Required value: name or generateName is required"
                    raise ApiError(422, "Invalid", text)
                letters = string.ascii_lowercase + string.digits
                metadata["name"] = metadata["generateName"] + "".join(random.choices(letters, k=5))
            where = (namespace if resource.namespaced else None, metadata["name"])
            if where in self._objects[resource.key]:
                text = f'{resource.qualified} "{where[1]}" already exists'
                raise ApiError(409, "AlreadyExists", text)
            metadata["uid"] = str(uuid.uuid4())
            metadata["creationTimestamp"] = timestamp()
            metadata["generation"] = 1
            metadata.pop("deletionTimestamp", None)
            metadata.pop("resourceVersion", None)
            if "status" in resource.subresources and resource.plural not in ("nodes", "namespaces"):
                obj.pop("status", None)
            for admit in self.admission:
                admit("CREATE", resource, obj)
            if dry_run:
                return obj
            return self._write("ADDED", resource, where, obj)

    def change(
        self,
        resource: Resource | str,
        namespace: str | None,
        name: str,
        edit: Callable[[dict], dict | None],
        *,
        subresource: str = "",
        dry_run: bool = False,
    ) -> dict:
        """Replace an object by what `edit` makes of a copy; None means the copy itself.

        Raises:
            ApiError: The new one has another resourceVersion than the old, or is refused.
        """
        if isinstance(resource, str):
            resource = self.resource(resource)
        with self.changed:
            old = self.get(resource, namespace, name)
            new = copy.deepcopy(old)
            edited = edit(new)
            new = new if edited is None else copy.deepcopy(edited)
            said = new.get("metadata", {}).get("resourceVersion")
            if said and said != old["metadata"]["resourceVersion"]:
                text = (
                    f'Operation cannot be fulfilled on {resource.qualified} "{name}": the object '
                    "has been modified; please apply your changes to the latest version and try "
                    "again"
                )
                raise ApiError(409, "Conflict", text)
            new = self._merged(resource, old, new, subresource)
            for admit in self.admission:
                admit("STATUS" if subresource else "UPDATE", resource, new)
            if dry_run or old == new:
                return new
            where = (old["metadata"].get("namespace"), name)
            metadata = new["metadata"]
            waits = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
            if metadata.get("deletionTimestamp") and not waits:
                return self._remove(resource, where, new)
            return self._write("MODIFIED", resource, where, new)

    def _merged(self, resource: Resource, old: dict, new: dict, subresource: str) -> dict:
        """Return what of `new` counts for this request."""
        if subresource == "status":
            result = copy.deepcopy(old)
            result["status"] = new.get("status", {})
            return result
        result = {**new, "apiVersion": resource.api_version, "kind": resource.kind}
        metadata = result["metadata"] = {**new.get("metadata", {}), "name": old["metadata"]["name"]}
        for name in _KEPT:
            metadata.pop(name, None)
            if name in old["metadata"]:
                metadata[name] = old["metadata"][name]
        if "status" in resource.subresources:
            result.pop("status", None)
            if "status" in old:
                result["status"] = copy.deepcopy(old["status"])
        ours = ("metadata", "status")
        is_same = all(
            old.get(k) == result.get(k) for k in old.keys() | result.keys() if k not in ours
        )
        metadata["generation"] = old["metadata"].get("generation", 1) + (not is_same)
        return result

    def set_status(self, resource: Resource | str, namespace: str | None, name: str, status: dict):
        """Replace fields of an object's status; without a change, nothing happens."""

        def edit(obj):
            obj["status"] = {**obj.get("status", {}), **copy.deepcopy(status)}

        return self.change(resource, namespace, name, edit, subresource="status")

    def delete(
        self,
        resource: Resource | str,
        namespace: str | None,
        name: str,
        *,
        grace: float | None = None,
        propagation: str | None = None,
        uid: str | None = None,
        dry_run: bool = False,
    ) -> dict:
        """Delete an object as far as that can be now; returns it as it is, or was."""
        if isinstance(resource, str):
            resource = self.resource(resource)
        with self.changed:
            obj = copy.deepcopy(self.get(resource, namespace, name))
            metadata = obj["metadata"]
            if uid and uid != metadata["uid"]:
                text = f"the UID in the precondition ({uid}) does not match the UID in record"
                raise ApiError(409, "Conflict", text)
            if dry_run:
                return obj
            grace = _grace(resource, obj, grace)
            finalizers = list(metadata.get("finalizers", ()))
            for word, finalizer in (("Foreground", "foregroundDeletion"), ("Orphan", "orphan")):
                if propagation == word and finalizer not in finalizers:
                    finalizers.append(finalizer)
            if finalizers:
                metadata["finalizers"] = finalizers
            if resource.plural == "namespaces":
                obj["status"] = {"phase": "Terminating"}
            where = (metadata.get("namespace"), name)
            lasts = finalizers or grace or resource.plural == "namespaces"
            if not lasts:
                return self._remove(resource, where, obj)
            before = metadata.get("deletionGracePeriodSeconds")
            metadata.setdefault("deletionTimestamp", timestamp())
            metadata["deletionGracePeriodSeconds"] = grace if before is None else min(before, grace)
            if obj == self.get(resource, namespace, name):
                return obj
            return self._write("MODIFIED", resource, where, obj)

    def finish(self, resource: Resource, obj: dict) -> None:
        """Remove an object whatever its finalizers say."""
        with self.changed:
            where = (obj["metadata"].get("namespace"), obj["metadata"]["name"])
            if where in self._objects[resource.key]:
                self._remove(resource, where, copy.deepcopy(obj))

    def _check_namespace(self, namespace: str) -> None:
        found = self.find("namespaces", None, namespace)
        if found is None:
            raise not_found(self.resource("namespaces"), namespace)
        if found["metadata"].get("deletionTimestamp"):
            text = f"unable to create new content in namespace {namespace}: it is being terminated"
            raise ApiError(403, "Forbidden", text)

    def _write(self, kind: str, resource: Resource, where: tuple, obj: dict) -> dict:
        before = self._objects[resource.key].get(where)
        self._stamp(kind, resource, obj, before)
        self._objects[resource.key][where] = obj
        if resource.plural == "customresourcedefinitions":
            self._define(obj)
        return obj

    def _remove(self, resource: Resource, where: tuple, obj: dict) -> dict:
        before = self._objects[resource.key].pop(where)
        self._stamp("DELETED", resource, obj, before)
        if resource.plural == "customresourcedefinitions":
            for defined in list(resources.defined_by(obj)):
                self.resources.pop((defined.api_version, defined.plural), None)
                self._objects.pop(defined.key, None)
        return obj

    def _stamp(self, kind: str, resource: Resource, obj: dict, before: dict | None) -> None:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self.history.append(Change(self.version, kind, resource.key, obj, before))
        if len(self.history) > HISTORY:
            self.oldest = self.history.popleft().version
        self.changed.notify_all()

    def _define(self, definition: dict) -> None:
        """Serve the kinds of a CustomResourceDefinition, which says itself that it is ready."""
        for resource in resources.defined_by(definition):
            self.resources[resource.api_version, resource.plural] = resource
        accepted = [
            {"type": kind, "status": "True", "reason": kind, "lastTransitionTime": timestamp()}
            for kind in ("NamesAccepted", "Established")
        ]
        definition.setdefault("status", {}).setdefault("conditions", accepted)
        definition["status"].setdefault("acceptedNames", definition["spec"]["names"])


def timestamp(seconds: float | None = None) -> str:
    when = dt.datetime.fromtimestamp(time.time() if seconds is None else seconds, dt.UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def _grace(resource: Resource, obj: dict, asked: float | None) -> float:
    """Return the seconds that an object may take to end: none but for a pod that runs."""
    if resource.plural != "pods" or not obj["spec"].get("nodeName"):
        return 0
    if obj.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    own = obj["spec"].get("terminationGracePeriodSeconds", 30)
    return own if asked is None else int(asked)
