"""What a pod's specification puts into its containers: environment, arguments and files."""

from __future__ import annotations

import base64
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from namespaces import PRIVATE

from kube.selectors import dig
from kube.store import ObjectStore

_REFERENCE = re.compile(r"\$\$|\$\((\w+)\)")


class MountError(Exception):
    """A container cannot be made yet, such as for want of its Secret."""


def environment(store: ObjectStore, pod: dict, container: dict) -> dict[str, str]:
    """Return the variables of a container."""
    namespace = pod["metadata"]["namespace"]
    env: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        for kind, plural in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
            if kind in source:
                data = _data(store, plural, namespace, source[kind])
                prefix = source.get("prefix", "")
                env |= {prefix + key: value.decode() for key, value in data.items()}
    for entry in container.get("env", ()):
        if "valueFrom" in entry:
            value = _value(store, pod, container, entry["valueFrom"])
            if value is None:
                continue
        else:
            value = expand(entry.get("value") or "", env)
        env[entry["name"]] = value
    return env


def expand(text: str, env: Mapping[str, str]) -> str:
    """Replace `$(NAME)` where there is such a variable, and `$$` by one dollar."""

    def replace(found: re.Match[str]) -> str:
        return env.get(found[1], found[0]) if found[1] else "$"

    return _REFERENCE.sub(replace, text)


def _value(store: ObjectStore, pod: dict, container: dict, source: dict) -> str | None:
    match source:
        case {"fieldRef": {"fieldPath": path}}:
            value = dig(pod, path)
            return "" if value is None else str(value)
        case {"resourceFieldRef": {"resource": path}}:
            value = dig(container.get("resources", {}), path)
            return "" if value is None else str(value)
        case {"secretKeyRef": wanted}:
            plural = "secrets"
        case {"configMapKeyRef": wanted}:
            plural = "configmaps"
        case _:
            raise MountError(f"env: {source} is not known here")
    data = _data(store, plural, pod["metadata"]["namespace"], wanted)
    if wanted["key"] not in data:
        if wanted.get("optional"):
            return None
        raise MountError(f"couldn't find key {wanted['key']} in {plural[:-1]} {wanted['name']}")
    return data[wanted["key"]].decode()


def _data(store: ObjectStore, plural: str, namespace: str, wanted: dict) -> dict[str, bytes]:
    name = wanted.get("name") or wanted.get("secretName")
    found = store.find(plural, namespace, name)
    if found is None:
        if wanted.get("optional"):
            return {}
        raise MountError(f'{plural[:-1]} "{name}" not found')
    if plural == "secrets":
        return {key: base64.b64decode(value) for key, value in found.get("data", {}).items()}
    return {key: value.encode() for key, value in found.get("data", {}).items()}


def make(store: ObjectStore, pod: dict, folder: Path) -> dict[str, Path | str]:
    """Return what each volume of a pod is: a directory, or the options of a tmpfs."""
    made: dict[str, Path | str] = {}
    for volume in pod["spec"].get("volumes", ()):
        name = volume["name"]
        path = folder / "volumes" / pod["metadata"]["uid"] / name
        if "emptyDir" in volume:
            memory = volume["emptyDir"] or {}
            if memory.get("medium") == "Memory":
                made[name] = f"mode=1777{_size(memory.get('sizeLimit'))}"
                continue
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o777)
        elif "hostPath" in volume:
            own = folder / "node" / volume["hostPath"]["path"].lstrip("/")
            path = own if own.exists() else Path(volume["hostPath"]["path"])
        elif "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            if store.find("persistentvolumeclaims", pod["metadata"]["namespace"], claim) is None:
                raise MountError(f'persistentvolumeclaim "{claim}" not found')
            path = folder / "claims" / pod["metadata"]["namespace"] / claim
            path.mkdir(parents=True, exist_ok=True)
        else:
            _write(store, pod, volume, path)
            _share(pod, path)
        made[name] = path
    return made


def _share(pod: dict, path: Path) -> None:
    """Let the pod's fsGroup read the files of a volume."""
    group = pod["spec"].get("securityContext", {}).get("fsGroup")
    for file in path.iterdir() if group is not None else ():
        os.chown(file, -1, group)
        file.chmod(file.stat().st_mode | 0o040)


def _size(limit: str | None) -> str:
    if not limit:
        return ""
    units = {"Ki": "k", "Mi": "m", "Gi": "g"}
    return f",size={limit[:-2]}{units[limit[-2:]]}" if limit[-2:] in units else f",size={limit}"


def _write(store: ObjectStore, pod: dict, volume: dict, path: Path) -> None:
    """Write the files of a Secret, ConfigMap, downward API or projected volume."""
    namespace = pod["metadata"]["namespace"]
    match volume:
        case {"secret": source}:
            data = _data(store, "secrets", namespace, source)
        case {"configMap": source}:
            data = _data(store, "configmaps", namespace, source)
        case {"downwardAPI": source}:
            data = {
                item["path"]: (_value(store, pod, {}, item) or "").encode()
                for item in source["items"]
            }
            source = {**source, "items": None}
        case {"projected": source}:
            for part in source["sources"]:
                _write(store, pod, part, path)
            return
        case _:
            raise MountError(f"volume {volume['name']}: its kind is not known here")
    items = source.get("items") or [{"key": key, "path": key} for key in data]
    path.mkdir(parents=True, exist_ok=True)
    for item in items:
        if item["key"] not in data:
            raise MountError(f"references non-existent key: {item['key']}")
        file = path / item["path"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.write_bytes(data[item["key"]])
        file.chmod(item.get("mode", source.get("defaultMode", 0o644)))


# A directory that does not exist is made in a layer over its nearest parent, which only this pod
# has; in the directories that every host has to itself, it is just made.
_MOUNT = """
set -e
source=$1 target=$2 hosts=$3 is_private=$4
if [ ! -e "$target" ] && [ "$is_private" = no ]; then
    parent=$target
    while [ ! -d "$parent" ]; do parent=$(dirname "$parent"); done
    [ "$parent" != / ] || { echo "$target: a top directory that is not there" >&2; exit 1; }
    layer=/run/layers/$(echo "$parent" | tr / _)
    mkdir -p "$layer/upper" "$layer/work"
    layers="lowerdir=$parent,upperdir=$layer/upper,workdir=$layer/work"
    mount -t overlay overlay -o "$layers" "$parent"
    if [ "$parent" = /etc ]; then
        mount --bind "$hosts" /etc/hosts
        mount --bind /dev/null /etc/resolv.conf
    fi
fi
case $source in
    tmpfs:*) mkdir -p "$target"; mount -t tmpfs -o "${source#tmpfs:}" tmpfs "$target" ;;
    *)  if [ -d "$source" ]; then mkdir -p "$target"
        elif [ ! -e "$target" ]; then mkdir -p "$(dirname "$target")"; : > "$target"; fi
        mount --bind "$source" "$target"
        [ "$5" = no ] || mount -o remount,bind,ro "$target" ;;
esac
"""


# Directories of this machine that only their owner may enter, on the way to its Python.
_PROTECT = """
set -e
for place in $closed; do
    layer=/run/opened$place
    mkdir -p "$layer/upper" "$layer/work"
    layers="lowerdir=$place,upperdir=$layer/upper,workdir=$layer/work"
    mount -t overlay overlay -o "$layers" "$place"
done
[ "$is_protected" = yes ] || exit 0
for place in / /tmp /run /home /dev/shm; do
    case " $* " in *" $place "*) continue ;; esac
    if mountpoint -q "$place"; then mount -o remount,bind,ro "$place"; fi
done
"""


def protect(host, pod: dict, container: dict) -> None:
    """Have a host that is up be as a container's `securityContext` wants it.

    Another user than root can run its Python, and where the root file system is read-only, nobody
    can write anything but volumes.
    """
    asked = container.get("securityContext", {})
    is_protected = bool(asked.get("readOnlyRootFilesystem"))
    user = asked.get("runAsUser", pod["spec"].get("securityContext", {}).get("runAsUser"))
    above = Path(sys.executable).resolve().parents if user else ()
    closed = [str(each) for each in above if not each.stat().st_mode & 0o001]
    if closed or is_protected:
        own = [wanted["mountPath"].rstrip("/") for wanted in container.get("volumeMounts", ())]
        env = {"closed": " ".join(closed), "is_protected": "yes" if is_protected else "no"}
        done = host.run(["sh", "-c", _PROTECT, "sh", *own], cwd="/", env=env)
        if done.returncode:
            raise MountError(done.stderr.strip())


def user_words(pod: dict, container: dict) -> list[str]:
    """Return the words before a command that run it as the user that a pod wants."""
    asked = {**pod["spec"].get("securityContext", {}), **container.get("securityContext", {})}
    if asked.get("runAsUser") is None:
        return []
    groups = [asked["fsGroup"]] if asked.get("fsGroup") is not None else []
    groups = ["--groups", ",".join(map(str, groups))] if groups else ["--clear-groups"]
    who = ["--reuid", str(asked["runAsUser"]), "--regid", str(asked.get("runAsGroup", 0))]
    return ["setpriv", *who, *groups, "--inh-caps=-all", "--no-new-privs"]


def user_problem(pod: dict) -> str:
    """Return why the kubelet starts no container of a pod, whose images all run as root."""
    for container in pod["spec"]["containers"]:
        asked = {**pod["spec"].get("securityContext", {}), **container.get("securityContext", {})}
        if asked.get("runAsNonRoot") and not asked.get("runAsUser"):
            return "container has runAsNonRoot and image will run as root"
    return ""


def mount(host, made: Mapping[str, Path | str], container: dict) -> None:
    """Put volumes where a container wants them, on a host that is up."""
    for wanted in container.get("volumeMounts", ()):
        if wanted["name"] not in made:
            raise MountError(f"volume {wanted['name']} is not of this pod")
        source, target = made[wanted["name"]], wanted["mountPath"]
        word = f"tmpfs:{source}" if isinstance(source, str) else str(source)
        if "subPath" in wanted:
            word += f"/{wanted['subPath']}"
        is_private = any(Path(target).is_relative_to(top) for top in PRIVATE)
        hosts = str(host.lab.folder / "etc" / host.name)
        flags = ["yes" if flag else "no" for flag in (is_private, wanted.get("readOnly"))]
        done = host.run(["sh", "-c", _MOUNT, "sh", word, target, hosts, *flags], cwd="/")
        if done.returncode:
            raise MountError(done.stderr.strip())
