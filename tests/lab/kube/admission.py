"""What the API server fills in and what it refuses, kind by kind."""

from __future__ import annotations

import base64
import copy
import re

from kube.failures import ApiError
from kube.resources import Resource
from kube.schema import admit_custom
from kube.store import ObjectStore

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_CONFIG_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_DATA_MAX = 1 << 20
_COLON_TOO = {"roles", "clusterroles", "rolebindings", "clusterrolebindings"}
JOB_NAME = "batch.kubernetes.io/job-name"
JOB_UID = "batch.kubernetes.io/controller-uid"


def invalid(resource: Resource, obj: dict, text: str) -> ApiError:
    name = obj["metadata"].get("name", "")
    return ApiError(422, "Invalid", f'{resource.kind}.{resource.group} "{name}" is invalid: {text}')


class Admission:
    """The chain that every write passes; put it into the store's `admission`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._addresses = 0

    def __call__(self, operation: str, resource: Resource, obj: dict) -> None:
        name = obj["metadata"]["name"]
        is_good = len(name) <= 253 and _NAME.fullmatch(name)
        if not is_good and resource.plural not in _COLON_TOO:
            text = (
                f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 subdomain must '
                "consist of lower case alphanumeric characters, '-' or '.', and must start and "
                "end with an alphanumeric character"
            )
            raise invalid(resource, obj, text)
        for key, value in (obj["metadata"].get("labels") or {}).items():
            if len(value) > 63 or not _LABEL.fullmatch(value):
                text = (
                    f'metadata.labels: Invalid value: "{value}": must be no more than 63 characters'
                )
                raise invalid(resource, obj, f"{text}, of a label ({key})")
        if operation != "STATUS":
            special = getattr(self, f"_{resource.plural}", None)
            if special and not resource.schema:
                special(operation, resource, obj)
        if resource.schema:
            admit_custom(operation, resource, obj, self._old(resource, obj))
        if operation == "CREATE":
            self._charge(resource, obj)

    def _old(self, resource: Resource, obj: dict) -> dict | None:
        metadata = obj["metadata"]
        found = self._store._objects[resource.key]
        return found.get((metadata.get("namespace"), metadata["name"]))

    def _charge(self, resource: Resource, obj: dict) -> None:
        """Refuse what a ResourceQuota has no room for."""
        namespace = obj["metadata"].get("namespace")
        if namespace is None or resource.plural == "resourcequotas":
            return
        for quota in self._store.list("resourcequotas", namespace):
            for word, limit in quota["spec"].get("hard", {}).items():
                used = sum(_use(word, resource, o) for o in self._store.list(resource, namespace))
                wanted = _use(word, resource, obj)
                if wanted and used + wanted > int(limit):
                    name = obj["metadata"]["name"]
                    text = (
                        f'{resource.plural} "{name}" is forbidden: exceeded quota: '
                        f"{quota['metadata']['name']}, requested: {word}={wanted}, "
                        f"used: {word}={used}, limited: {word}={limit}"
                    )
                    raise ApiError(403, "Forbidden", text)

    # By kind.

    def _pods(self, operation: str, resource: Resource, obj: dict) -> None:
        spec = obj.get("spec", {})
        if not spec.get("containers"):
            raise invalid(resource, obj, "spec.containers: Required value")
        for i, container in enumerate(spec["containers"]):
            if not container.get("name") or not container.get("image"):
                word = "name" if not container.get("name") else "image"
                raise invalid(resource, obj, f"spec.containers[{i}].{word}: Required value")
        if operation == "UPDATE":
            self._check_unchanged(resource, obj, "spec")
            return
        spec.setdefault("restartPolicy", "Always")
        spec.setdefault("terminationGracePeriodSeconds", 30)
        spec.setdefault("schedulerName", "default-scheduler")
        spec.setdefault("serviceAccountName", "default")
        obj["status"] = {"phase": "Pending", "qosClass": "BestEffort"}

    def _check_unchanged(self, resource: Resource, obj: dict, *path: str) -> None:
        old, new = self._old(resource, obj) or {}, obj
        for step in path:
            old, new = old.get(step, {}), new.get(step, {})
        if resource.plural == "pods":  # binding, tolerations and the image may change
            loose = ("nodeName", "tolerations", "schedulingGates", "containers")
            old = {key: value for key, value in old.items() if key not in loose}
            new = {key: value for key, value in new.items() if key not in loose}
        if old != new:
            text = f"{'.'.join(path)}: Invalid value: field is immutable"
            raise invalid(resource, obj, text)

    def _jobs(self, operation: str, resource: Resource, obj: dict) -> None:
        spec = obj.get("spec") or {}
        pod = spec.get("template", {}).get("spec", {})
        if not pod.get("containers"):
            raise invalid(resource, obj, "spec.template.spec.containers: Required value")
        if pod.get("restartPolicy") not in ("Never", "OnFailure"):
            field = "spec.template.spec.restartPolicy"
            text = f'{field}: Required value: valid values: "OnFailure", "Never"'
            raise invalid(resource, obj, text)
        if "podFailurePolicy" in spec and pod["restartPolicy"] != "Never":
            text = (
                "spec.template.spec.restartPolicy: Invalid value: only Never with podFailurePolicy"
            )
            raise invalid(resource, obj, text)
        is_indexed = spec.get("completionMode") == "Indexed"
        if is_indexed and spec.get("completions") is None:
            raise invalid(resource, obj, "spec.completions: Required value: when Indexed")
        if not is_indexed and ("backoffLimitPerIndex" in spec or "successPolicy" in spec):
            text = "spec.backoffLimitPerIndex: Invalid value: requires indexed completion mode"
            raise invalid(resource, obj, text)
        host = f"{obj['metadata']['name']}-{max(spec.get('completions', 1) - 1, 0)}"
        if is_indexed and not _DNS_1123.fullmatch(host):
            text = f"will not be able to create pod with invalid DNS hostname: {host}"
            raise invalid(resource, obj, f"metadata.name: Invalid value: {text}")
        if is_indexed and spec.get("maxFailedIndexes", 0) > spec["completions"]:
            text = "must be less than or equal to completions"
            raise invalid(resource, obj, f"spec.maxFailedIndexes: Invalid value: {text}")
        if operation == "UPDATE":
            self._check_job_update(resource, obj)
            return
        spec.setdefault("parallelism", 1)
        spec.setdefault("completions", spec["parallelism"])
        spec.setdefault("completionMode", "NonIndexed")
        spec.setdefault("suspend", False)
        spec.setdefault("backoffLimit", 2**31 - 1 if "backoffLimitPerIndex" in spec else 6)
        waits = "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed"
        spec.setdefault("podReplacementPolicy", waits)
        labels = spec["template"].setdefault("metadata", {}).setdefault("labels", {})
        ours = {JOB_NAME: obj["metadata"]["name"], JOB_UID: obj["metadata"]["uid"]}
        short = {key.rpartition("/")[2]: value for key, value in ours.items()}
        labels |= ours | short
        spec["selector"] = {"matchLabels": {JOB_UID: obj["metadata"]["uid"]}}

    def _check_job_update(self, resource: Resource, obj: dict) -> None:
        old, new = self._old(resource, obj)["spec"], obj["spec"]
        if not new.get("suspend") or old.get("suspend") != new.get("suspend"):
            self._check_unchanged(resource, obj, "spec", "template")
        if old["completions"] != new.get("completions"):
            is_elastic = new["completions"] == new["parallelism"]
            if new.get("completionMode") != "Indexed" or not is_elastic:
                text = "spec.completions: Invalid value: field is immutable"
                raise invalid(resource, obj, text)
        for name in ("selector", "completionMode", "podFailurePolicy", "backoffLimitPerIndex"):
            if old.get(name) != new.get(name):
                raise invalid(resource, obj, f"spec.{name}: Invalid value: field is immutable")

    def _services(self, operation: str, resource: Resource, obj: dict) -> None:
        name = obj["metadata"]["name"]
        if not _DNS_1035.fullmatch(name):
            text = f'metadata.name: Invalid value: "{name}": a DNS-1035 label must consist of'
            raise invalid(resource, obj, f"{text} lower case alphanumeric characters or '-'")
        spec = obj.setdefault("spec", {})
        spec.setdefault("type", "ClusterIP")
        if operation == "CREATE" and not spec.get("clusterIP"):
            self._addresses += 1
            spec["clusterIP"] = f"10.96.0.{self._addresses}"

    def _configmaps(self, _operation: str, resource: Resource, obj: dict) -> None:
        data = obj.get("data") or {}
        for key in data:
            if not _CONFIG_KEY.fullmatch(key) or key in (".", ".."):
                text = f'data[{key}]: Invalid value: "{key}": a valid config key must consist of'
                raise invalid(resource, obj, f"{text} alphanumeric characters, '-', '_' or '.'")
        if sum(len(text.encode()) for text in data.values()) > _DATA_MAX:
            raise invalid(resource, obj, f"data: Too long: may not be more than {_DATA_MAX} bytes")

    def _secrets(self, operation: str, resource: Resource, obj: dict) -> None:
        for key, text in obj.pop("stringData", {}).items():
            obj.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()
        obj.setdefault("type", "Opaque")
        if operation == "UPDATE" and (self._old(resource, obj) or {}).get("immutable"):
            self._check_unchanged(resource, obj, "data")

    def _namespaces(self, _operation: str, _resource: Resource, obj: dict) -> None:
        obj.setdefault("status", {"phase": "Active"})


def _use(word: str, resource: Resource, obj: dict) -> int:
    """Return how much of a quota's `word` an object takes."""
    if word in (resource.plural, f"count/{resource.qualified}"):
        return int(obj.get("status", {}).get("phase") not in ("Succeeded", "Failed"))
    if word.startswith("requests.") and resource.plural == "pods":
        return requested(obj).get(word.removeprefix("requests."), 0)
    return 0


def requested(pod: dict) -> dict[str, int]:
    """Return the countable resources that a pod asks for, such as GPUs."""
    found: dict[str, int] = {}
    for container in pod["spec"]["containers"]:
        asked = container.get("resources", {})
        for name, amount in {**asked.get("limits", {}), **asked.get("requests", {})}.items():
            if str(amount).isdigit():
                found[name] = found.get(name, 0) + int(amount)
    return copy.copy(found)
