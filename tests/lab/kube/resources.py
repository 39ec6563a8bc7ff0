"""The kinds of objects that the API server knows, and how it describes them to clients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]

# group/version, plural, kind, n(amespaced) or c(luster), short names, subresources
_BUILT_IN = """
v1 namespaces Namespace c ns status
v1 nodes Node c no status
v1 pods Pod n po status,log,exec,portforward,eviction,binding
v1 services Service n svc status
v1 endpoints Endpoints n ep -
v1 secrets Secret n - -
v1 configmaps ConfigMap n cm -
v1 events Event n ev -
v1 serviceaccounts ServiceAccount n sa token
v1 persistentvolumeclaims PersistentVolumeClaim n pvc status
v1 resourcequotas ResourceQuota n quota status
v1 limitranges LimitRange n limits -
apps/v1 deployments Deployment n deploy status,scale
apps/v1 replicasets ReplicaSet n rs status,scale
apps/v1 statefulsets StatefulSet n sts status,scale
apps/v1 daemonsets DaemonSet n ds status
batch/v1 jobs Job n - status
batch/v1 cronjobs CronJob n cj status
coordination.k8s.io/v1 leases Lease n - -
discovery.k8s.io/v1 endpointslices EndpointSlice n - -
events.k8s.io/v1 events Event n ev -
networking.k8s.io/v1 networkpolicies NetworkPolicy n netpol -
policy/v1 poddisruptionbudgets PodDisruptionBudget n pdb status
scheduling.k8s.io/v1 priorityclasses PriorityClass c pc -
storage.k8s.io/v1 storageclasses StorageClass c sc -
rbac.authorization.k8s.io/v1 roles Role n - -
rbac.authorization.k8s.io/v1 rolebindings RoleBinding n - -
rbac.authorization.k8s.io/v1 clusterroles ClusterRole c - -
rbac.authorization.k8s.io/v1 clusterrolebindings ClusterRoleBinding c - -
apiextensions.k8s.io/v1 customresourcedefinitions CustomResourceDefinition c crd,crds status
authorization.k8s.io/v1 selfsubjectaccessreviews SelfSubjectAccessReview c - -
authentication.k8s.io/v1 selfsubjectreviews SelfSubjectReview c - -
"""
# Kinds whose objects are kept in the core group under another group's name.
ALIASES = {"events.k8s.io/v1 events": "v1 events"}


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object.

    Attributes:
        api_version: As objects name it: `group/version`, or the version alone.
        schema: OpenAPI schema of a custom resource.
        columns: What `kubectl get` shows of a custom resource.
    """

    api_version: str
    plural: str
    kind: str
    namespaced: bool
    short: tuple[str, ...] = ()
    subresources: frozenset[str] = frozenset()
    singular: str = ""
    schema: dict = field(default_factory=dict, compare=False)
    columns: tuple = field(default=(), compare=False)

    @property
    def group(self):
        return self.api_version.rpartition("/")[0]

    @property
    def version(self):
        return self.api_version.rpartition("/")[2]

    @property
    def qualified(self):
        """Name in messages, such as `jobs.batch`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def key(self):
        """Where the store keeps its objects, the same for every version of the kind."""
        return ALIASES.get(f"{self.api_version} {self.plural}") or f"{self.group} {self.plural}"


def built_in() -> dict[tuple[str, str], Resource]:
    """Return every kind of a fresh cluster by API version and plural."""
    found = {}
    for line in _BUILT_IN.strip().splitlines():
        api_version, plural, kind, scope, short, subresources = line.split()
        found[api_version, plural] = Resource(
            api_version,
            plural,
            kind,
            scope == "n",
            () if short == "-" else tuple(short.split(",")),
            frozenset(() if subresources == "-" else subresources.split(",")),
        )
    found["events.k8s.io/v1", "events"] = found["v1", "events"]
    return found


def defined_by(definition: dict) -> Iterable[Resource]:
    """Yield the kinds that a CustomResourceDefinition adds, one a served version."""
    spec = definition["spec"]
    names = spec["names"]
    for version in spec["versions"]:
        if version.get("served", True):
            yield Resource(
                f"{spec['group']}/{version['name']}",
                names["plural"],
                names["kind"],
                spec["scope"] == "Namespaced",
                tuple(names.get("shortNames", ())),
                frozenset(version.get("subresources", ())),
                names.get("singular", ""),
                version.get("schema", {}).get("openAPIV3Schema", {}),
                tuple(version.get("additionalPrinterColumns", ())),
            )


def discovery(  # noqa: C901, PLR0911 - a table of paths
    path: str, resources: Iterable[Resource]
) -> dict | None:
    """Return the document that describes the API at `path`, None when there is none."""
    versions: dict[str, list[Resource]] = {}
    for resource in dict.fromkeys(resources):
        versions.setdefault(resource.api_version, []).append(resource)
    groups: dict[str, list[str]] = {}
    for api_version in versions:
        groups.setdefault(api_version.rpartition("/")[0], []).append(api_version)
    match path.strip("/").split("/"):
        case ["version"]:
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.0", "platform": "linux/amd64"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            listed = [_group(name, found) for name, found in groups.items() if name]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        case ["apis", name] if name in groups:
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(name, groups[name])}
        case ["api", "v1"]:
            return _resource_list("v1", versions["v1"])
        case ["apis", group, version] if f"{group}/{version}" in versions:
            return _resource_list(f"{group}/{version}", versions[f"{group}/{version}"])
        case ["openapi", "v3"]:
            where = {
                _prefix(v): {"serverRelativeURL": f"/openapi/v3/{_prefix(v)}"} for v in versions
            }
            return {"paths": where}
        case ["openapi", "v3", *rest]:
            found = [v for v in versions if _prefix(v) == "/".join(rest)]
            return _openapi(found[0], versions[found[0]]) if found else None
    return None


def _prefix(api_version: str) -> str:
    return f"{'apis' if '/' in api_version else 'api'}/{api_version}"


def _group(name: str, api_versions: list[str]) -> dict:
    found = [{"groupVersion": v, "version": v.rpartition("/")[2]} for v in api_versions]
    return {"name": name, "versions": found, "preferredVersion": found[0]}


def _resource_list(api_version: str, resources: list[Resource]) -> dict:
    listed = []
    for resource in resources:
        entry = {
            "name": resource.plural,
            "singularName": resource.singular or resource.kind.lower(),
            "namespaced": resource.namespaced,
            "kind": resource.kind,
            "verbs": VERBS,
            "shortNames": list(resource.short),
        }
        listed.append(entry)
        listed += (
            {**entry, "name": f"{resource.plural}/{name}", "shortNames": []}
            for name in sorted(resource.subresources)
        )
    body = {"groupVersion": api_version, "resources": listed}
    return {"kind": "APIResourceList", "apiVersion": "v1", **body}


def _openapi(api_version: str, resources: list[Resource]) -> dict:
    """Return just enough for kubectl to leave validation and dry runs to the server."""
    parameters = [{"name": name, "in": "query"} for name in ("dryRun", "fieldValidation")]
    group, _, version = api_version.rpartition("/")
    paths = {}
    for resource in resources:
        middle = "/namespaces/{namespace}" if resource.namespaced else ""
        kind = {"group": group, "version": version, "kind": resource.kind}
        operation = {"parameters": parameters, "x-kubernetes-group-version-kind": kind}
        paths[f"/{_prefix(api_version)}{middle}/{resource.plural}/{{name}}"] = {"patch": operation}
    return {"openapi": "3.0.0", "info": {"title": "stand-in", "version": "1"}, "paths": paths}
