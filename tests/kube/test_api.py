"""The API server of the lab, by the real kubectl and the real python client."""

from __future__ import annotations

import json
import threading

import pytest
from kube.failures import ApiError

kubernetes = pytest.importorskip("kubernetes")

pytestmark = pytest.mark.process

COLOURS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "colours.lab.test"},
    "spec": {
        "group": "lab.test",
        "scope": "Namespaced",
        "names": {"plural": "colours", "kind": "Colour", "shortNames": ["co"]},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "additionalPrinterColumns": [
                    {"name": "Red", "type": "integer", "jsonPath": ".spec.red"},
                    {"name": "Seen", "type": "string", "jsonPath": ".status.seen"},
                ],
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "required": ["spec"],
                        "properties": {
                            "spec": {
                                "type": "object",
                                "required": ["red"],
                                "properties": {
                                    "red": {"type": "integer", "minimum": 0, "maximum": 255},
                                    "most": {"type": "integer", "default": 9},
                                    "kind": {"type": "string", "enum": ["rgb", "hsv"]},
                                },
                                "x-kubernetes-validations": [
                                    {
                                        "rule": "!has(self.most) || self.red <= self.most",
                                        "message": "red is at most `most`",
                                    }
                                ],
                            },
                            "status": {
                                "type": "object",
                                "x-kubernetes-preserve-unknown-fields": True,
                            },
                        },
                    }
                },
            }
        ],
    },
}


def config_map(name, **data):
    labels = {"app": "lab", "name": name}
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def colour(name, **spec):
    kind = {"apiVersion": "lab.test/v1", "kind": "Colour"}
    return {**kind, "metadata": {"name": name}, "spec": spec}


def reason(error):
    return error.value.status, json.loads(error.value.body)["reason"]


def test_objects_have_versions_and_stale_writes_conflict(client):
    core = kubernetes.client.CoreV1Api(client)
    made = core.create_namespaced_config_map("default", config_map("a", x="1"))
    with pytest.raises(kubernetes.client.ApiException) as error:
        core.create_namespaced_config_map("default", config_map("a"))
    assert reason(error) == (409, "AlreadyExists")
    core.patch_namespaced_config_map("a", "default", {"data": {"x": "2"}})
    made.data = {"x": "3"}
    with pytest.raises(kubernetes.client.ApiException) as error:
        core.replace_namespaced_config_map("a", "default", made)
    assert reason(error) == (409, "Conflict")
    with pytest.raises(kubernetes.client.ApiException) as error:
        core.read_namespaced_config_map("b", "default")
    assert reason(error) == (404, "NotFound")
    assert core.read_namespaced_config_map("a", "default").data == {"x": "2"}


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("name=a", ["a"]),
        ("name!=a", ["b", "c"]),
        ("name in (a, c),app", ["a", "c"]),
        ("name notin (a)", ["b", "c"]),
        ("!app", []),
    ],
)
def test_selectors_choose(api, selector, expected):
    for name in ("a", "b", "c"):
        api.store.create("configmaps", "default", config_map(name))
    found = api.store.list("configmaps", "default", selector)
    assert [obj["metadata"]["name"] for obj in found] == expected
    if expected == ["a"]:
        words = ("get", "cm", "-l", selector, "--field-selector", "metadata.name=a", "-o", "name")
        assert api.kubectl(*words).stdout == "configmap/a\n"


def test_a_watch_goes_on_from_a_version_and_ends_when_that_is_too_old(api, client):
    core = kubernetes.client.CoreV1Api(client)
    for name in ("a", "b"):
        api.store.create("configmaps", "default", config_map(name))
    version = core.list_namespaced_config_map("default").metadata.resource_version
    api.store.create("configmaps", "default", config_map("c"))
    api.store.delete("configmaps", "default", "a")
    options = {"resource_version": version, "timeout_seconds": 1}
    events = kubernetes.watch.Watch().stream(core.list_namespaced_config_map, "default", **options)
    seen = [(event["type"], event["object"].metadata.name) for event in events]
    assert seen == [("ADDED", "c"), ("DELETED", "a")]
    api.store.expire()
    with pytest.raises(kubernetes.client.ApiException) as error:
        next(kubernetes.watch.Watch().stream(core.list_namespaced_config_map, "default", **options))
    assert error.value.status == 410


def test_an_object_that_stops_matching_is_deleted_for_a_watch(api, client):
    core = kubernetes.client.CoreV1Api(client)
    api.store.create("configmaps", "default", config_map("a"))

    def edit(obj):
        obj["metadata"]["labels"] = {}

    threading.Timer(0.1, api.store.change, ("configmaps", "default", "a", edit)).start()
    events = kubernetes.watch.Watch().stream(
        core.list_namespaced_config_map, "default", label_selector="app", timeout_seconds=5
    )
    assert [next(events)["type"], next(events)["type"]] == ["ADDED", "DELETED"]


def test_kubectl_waits_by_bookmarks(api):
    api.store.create("configmaps", "default", config_map("a", x="1"))
    words = ("wait", "configmap/a", "--for=jsonpath={.data.x}=2", "--timeout=10s")

    def edit(obj):
        obj["data"] = {"x": "2"}

    threading.Timer(0.2, api.store.change, ("configmaps", "default", "a", edit)).start()
    assert api.kubectl(*words).stdout == "configmap/a condition met\n"


def test_patches_of_three_kinds(api):
    job = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d", "annotations": {"x": "1"}},
        "spec": {"template": {"spec": {"containers": [{"name": "a", "image": "1"}]}}},
    }
    api.apply(job)
    more = {"spec": {"template": {"spec": {"containers": [{"name": "b", "image": "2"}]}}}}
    api.kubectl("patch", "deploy", "d", "-p", json.dumps(more))
    operations = [{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "3"}]
    api.kubectl("patch", "deploy", "d", "--type=json", "-p", json.dumps(operations))
    api.kubectl("patch", "deploy", "d", "--type=merge", "-p", '{"metadata":{"labels":{"k":"v"}}}')
    api.kubectl("annotate", "deploy", "d", "x-")
    found = api.store.find("deployments", "default", "d")
    containers = found["spec"]["template"]["spec"]["containers"]
    assert containers == [{"name": "a", "image": "3"}, {"name": "b", "image": "2"}]
    assert found["metadata"]["labels"] == {"k": "v"}
    assert "x" not in found["metadata"]["annotations"]


def test_server_side_apply_keeps_book_of_owners(api):
    def apply(manager, *options, **data):
        text = json.dumps(config_map("a", **data))
        words = ("apply", "--server-side", f"--field-manager={manager}", *options, "-f", "-")
        return api.kubectl(*words, stdin=text, check=False)

    def data():
        return api.store.find("configmaps", "default", "a")["data"]

    assert apply("one", x="1", y="1").returncode == 0
    assert apply("two", z="2").returncode == 0
    assert data() == {"x": "1", "y": "1", "z": "2"}
    assert apply("one", x="1").returncode == 0
    assert data() == {"x": "1", "z": "2"}
    refused = apply("two", x="2", z="2")
    assert refused.returncode == 1
    assert 'conflict with "one": .data.x' in refused.stderr.replace("conflicts", "conflict")
    assert apply("two", "--force-conflicts", x="2", z="2").returncode == 0
    assert apply("one").returncode == 0
    assert data() == {"x": "2", "z": "2"}


def test_custom_resources_get_defaults_and_are_checked(api):
    api.apply(COLOURS)
    api.kubectl("wait", "--for=condition=established", "crd/colours.lab.test", "--timeout=5s")
    api.apply(colour("ok", red=3, unknown=1))
    assert api.store.find("colours", "default", "ok")["spec"] == {"red": 3, "most": 9}
    for spec, said in [
        ({}, "spec.red: Required value"),
        ({"red": "3"}, "must be of type integer"),
        ({"red": 256, "most": 300}, "should be less than or equal to 255"),
        ({"red": 3, "kind": "cmyk"}, 'supported values: "rgb", "hsv"'),
        ({"red": 10}, "red is at most `most`"),
    ]:
        refused = api.kubectl(
            "apply", "-f", "-", stdin=json.dumps(colour("no", **spec)), check=False
        )
        assert (refused.returncode, said in refused.stderr) == (1, True), refused.stderr
    patch = ("patch", "co", "ok", "--type=merge")
    api.kubectl(*patch, "-p", '{"status":{"seen":"no"},"spec":{"red":4}}')
    api.kubectl(*patch, "--subresource=status", "-p", '{"status":{"seen":"yes"},"spec":{"red":5}}')
    found = api.store.find("colours", "default", "ok")
    assert (found["spec"]["red"], found["status"], found["metadata"]["generation"]) == (
        4,
        {"seen": "yes"},
        2,
    )
    head, row = api.kubectl("get", "co").stdout.splitlines()
    assert (head.split(), row.split()[:3]) == (["NAME", "RED", "SEEN", "AGE"], ["ok", "4", "yes"])


@pytest.mark.parametrize("cascade", ["background", "foreground", "orphan"])
def test_what_an_owner_leaves_behind(api, cascade):
    owner = api.store.create("configmaps", "default", config_map("owner"))
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner"}
    owned = config_map("owned")
    owned["metadata"]["ownerReferences"] = [{**reference, "uid": owner["metadata"]["uid"]}]
    api.store.create("configmaps", "default", owned)
    api.kubectl("delete", "cm", "owner", f"--cascade={cascade}")
    if cascade == "orphan":
        left = api.store.find("configmaps", "default", "owned")
        assert left["metadata"]["ownerReferences"] == []
    else:
        api.await_that(lambda: not api.store.list("configmaps"))


def test_a_finalizer_holds_an_object(api):
    held = config_map("held")
    held["metadata"]["finalizers"] = ["lab.test/wait"]
    api.store.create("configmaps", "default", held)
    api.kubectl("delete", "cm", "held", "--wait=false")
    assert api.store.find("configmaps", "default", "held")["metadata"]["deletionTimestamp"]
    patch = '{"metadata":{"finalizers":null}}'
    api.kubectl("patch", "cm", "held", "--type=merge", "-p", patch)
    assert api.store.list("configmaps") == []


def test_a_dry_run_changes_nothing(api):
    text = json.dumps(config_map("a"))
    done = api.kubectl("apply", "--dry-run=server", "-f", "-", stdin=text)
    assert done.stdout == "configmap/a created (server dry run)\n"
    assert api.store.list("configmaps") == []


def test_a_namespace_takes_along_what_is_in_it(api):
    api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
    api.store.create("configmaps", "team", config_map("a"))
    api.kubectl("delete", "namespace", "team", "--timeout=5s")
    assert api.store.list("configmaps") == []


def test_an_account_may_do_what_its_roles_say(api, client):
    rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list"]}
    api.store.create("roles", "default", {"metadata": {"name": "reader"}, "rules": [rule]})
    subject = {"kind": "ServiceAccount", "name": "bob", "namespace": "default"}
    binding = {"roleRef": {"kind": "Role", "name": "reader"}, "subjects": [subject]}
    api.store.create("rolebindings", "default", {"metadata": {"name": "bob"}, **binding})
    api.store.create("configmaps", "default", config_map("a"))
    # kubectl sends a token over TLS only, which the lab does not speak.
    api.write_kubeconfig(api.kubeconfig, api.server.access.token("default", "bob"))
    kubernetes.config.load_kube_config(
        str(api.kubeconfig), client_configuration=client.configuration
    )
    core = kubernetes.client.CoreV1Api(client)
    assert core.read_namespaced_config_map("a", "default").metadata.name == "a"
    for call, words in (
        (core.delete_namespaced_config_map, ("a", "default")),
        (core.list_namespaced_secret, ("default",)),
        (core.list_namespaced_config_map, ("kube-system",)),
        (core.list_config_map_for_all_namespaces, ()),
    ):
        with pytest.raises(kubernetes.client.ApiException) as error:
            call(*words)
        assert reason(error) == (403, "Forbidden")
    with pytest.raises(ApiError, match="Unauthorized"):
        api.server.access.check(
            "Bearer x", "get", group="", resource="pods", namespace=None, name=None
        )


def test_a_server_comes_back_where_it_was(api, client):
    core = kubernetes.client.CoreV1Api(client)
    with api.server_down():
        refused = api.kubectl("get", "cm", check=False)
        assert (refused.returncode, "refused" in refused.stderr) == (1, True)
    assert core.list_namespaced_config_map("default").items == []


def test_a_quota_refuses_what_it_has_no_room_for(api):
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"configmaps": "1"}}}
    api.store.create("resourcequotas", "default", quota)
    api.apply(config_map("a"))
    refused = api.kubectl("apply", "-f", "-", stdin=json.dumps(config_map("b")), check=False)
    assert "exceeded quota: small, requested: configmaps=1, used: configmaps=1" in refused.stderr
