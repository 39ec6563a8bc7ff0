"""What the cluster is asked for, read from the texts of the options into one typed value."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping

import msgspec

from msrun.errors import UsageError
from msrun.fleet import check_options
from msrun.units import parse_duration, quoted

GPU = "nvidia.com/gpu"
_QUANTITY = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?(m|[kMGTPE]|[KMGTPE]i)?")
# A qualified name of Kubernetes: an optional domain, then up to 63 characters.
_KEY = re.compile(
    r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
)
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_SOURCES = ("pvc", "host", "secret", "configmap", "empty")
_OFF = "off"
_WEEK = 7 * 86400.0


class Kind(enum.Enum):
    """The object that makes the pods."""

    JOB = "job"
    JOBSET = "jobset"


class JobGang(enum.Enum):
    """Who places all pods of a job at once."""

    VOLCANO = "volcano"
    PLUGINS = "scheduler-plugins"


class Toleration(msgspec.Struct, frozen=True, kw_only=True):
    """A taint of nodes that the pods accept.

    Args:
        key: Key of the taint.
        value: Its value; None accepts any.
        effect: Its effect; empty accepts any.
    """

    key: str
    value: str | None = None
    effect: str = ""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Pods are spread evenly over the values of a label of nodes.

    Args:
        key: The label.
        is_required: A pod waits that would make it uneven.
    """

    key: str
    is_required: bool = False


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """A directory of every pod.

    Args:
        source: One of `pvc`, `host`, `secret`, `configmap`, `empty`.
        name: The claim, path, secret or map; of `empty` the limit of its size, or nothing.
        path: Where it is mounted.
        is_read_only: Nobody may write there.
    """

    source: str
    name: str
    path: str
    is_read_only: bool = False


class KubernetesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the cluster is asked for beside the nodes; empty leaves it to the cluster.

    Args:
        image: Image of the pods, which has msrun and the program.
        namespace: Namespace; empty takes that of the context.
        context: Context of the kubeconfig; empty takes the current one.
        kind: The object that makes the pods.
        queue: Kueue's local queue.
        gang: Who places all pods at once; None places each as it fits.
        suspend: The job is created suspended, and something else resumes it.
        time: Seconds until Kubernetes ends the job; inf sets no limit.
        ttl: Seconds for which an ended job stays; inf keeps it.
        resources: Resource of each pod -> quantity.
        shm: Limit of /dev/shm; None leaves the 64 MiB of the container runtime.
        workdir: Working directory; empty takes the image's.
        node_selector: Labels that nodes must have.
        tolerations: Taints that the pods accept.
        topology_spread: How the pods are spread.
        priority_class: Priority class of the pods.
        service_account: Account of the pods.
        image_pull_secrets: Secrets with which the image is pulled.
        volumes: Further directories.
        patch: File that is merged over the objects; empty merges nothing.
        ship: The script and the file of --parallel travel in a ConfigMap.
        detach: Return as soon as the objects are created.
    """

    image: str
    namespace: str = ""
    context: str = ""
    kind: Kind = Kind.JOB
    queue: str = ""
    gang: JobGang | None = None
    suspend: bool = False
    time: float = math.inf
    ttl: float = _WEEK
    resources: dict[str, str] = msgspec.field(default_factory=dict)
    shm: str | None = ""
    workdir: str = ""
    node_selector: dict[str, str] = msgspec.field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    topology_spread: tuple[Spread, ...] = ()
    priority_class: str = ""
    service_account: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    volumes: tuple[Volume, ...] = ()
    patch: str = ""
    ship: bool = False
    detach: bool = False


def read_options(texts: Mapping[str, str]) -> KubernetesOptions:
    """Return the options in `texts`, by their names with dashes.

    Raises:
        UsageError: There is another option, a value is none that it takes, or there is no image.
    """
    check_options("kubernetes", texts, (*_PARSERS, *_ELSEWHERE, "detach"))
    if not texts.get("image"):
        hint = "it has msrun, torch and your program: --image registry/train:1"
        raise UsageError("--launcher kubernetes needs the image of its pods", hint=hint)
    fields: dict[str, object] = {}
    for name, text in texts.items():
        parse = _PARSERS.get(name)
        if parse is None:
            continue
        try:
            fields[_FIELDS.get(name, name.replace("-", "_"))] = parse(text)
        except UsageError as error:
            raise UsageError(f"--{name} {error.message}", hint=error.hint) from None
    fields["detach"] = texts.get("detach") == "true"
    resources = fields.setdefault("resources", {})
    gpus = texts.get("gpus-per-node")
    if gpus is not None and isinstance(resources, dict):
        if not re.fullmatch(r"[0-9]{1,4}", gpus):
            raise UsageError(f"--gpus-per-node {quoted(gpus)} is no number, as {GPU} needs")
        if resources.setdefault(GPU, gpus) != gpus:
            has = f"--resources {GPU}={resources[GPU]}"
            raise UsageError(f"--gpus-per-node {gpus} contradicts {has}")
    return msgspec.convert(fields, KubernetesOptions, strict=True)


def _text(text: str) -> str:
    if not text.isprintable() or " " in text:
        raise UsageError(f"{quoted(text)} has a space or a control character")
    return text


def _named(pattern: re.Pattern[str], what: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not pattern.fullmatch(text):
            raise UsageError(f"{quoted(text)} is no name of {what} in Kubernetes")
        return text

    return parse


def _names(text: str) -> tuple[str, ...]:
    return tuple(_named(_NAME, "a secret")(part) for part in _parts(text))


def _parts(text: str) -> list[str]:
    parts = text.split(",")
    if not all(parts):
        raise UsageError(f"{quoted(text)} has an empty part")
    return parts


def _path(text: str) -> str:
    if not text.startswith("/") or not text.isprintable() or ":" in text:
        raise UsageError(f"{quoted(text)} is no absolute path")
    return text


def _quantity(text: str) -> str:
    if not _QUANTITY.fullmatch(text):
        raise UsageError(f"{quoted(text)} is no quantity (choose such as 8, 500m, 64Gi)")
    return text


def _pairs(value: Callable[[str], str]) -> Callable[[str], dict[str, str]]:
    def parse(text: str) -> dict[str, str]:
        pairs: dict[str, str] = {}
        for part in _parts(text):
            key, separator, rest = part.partition("=")
            if not separator or not _KEY.fullmatch(key):
                raise UsageError(f"{quoted(part)} is no NAME=VALUE")
            if key in pairs:
                raise UsageError(f"{quoted(text)} names {key} twice")
            pairs[key] = value(rest)
        return pairs

    return parse


def _label(text: str) -> str:
    if not _VALUE.fullmatch(text):
        raise UsageError(f"{quoted(text)} is no value of a label")
    return text


def _shm(text: str) -> str | None:
    return None if text == _OFF else _quantity(text)


def _seconds(text: str) -> float:
    seconds = math.inf if text == _OFF else parse_duration(text)
    if not seconds >= 1:
        raise UsageError(f"{quoted(text)} is less than a second")
    return seconds


def _tolerations(text: str) -> tuple[Toleration, ...]:
    return tuple(_toleration(part) for part in _parts(text))


def _toleration(text: str) -> Toleration:
    taint, colon, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value) or (colon and effect not in _EFFECTS):
        choices = ", ".join(_EFFECTS)
        raise UsageError(
            f"{quoted(text)} is no toleration (choose KEY[=VALUE][:EFFECT]; effects: {choices})"
        )
    return Toleration(key=key, value=value if equals else None, effect=effect)


def _spreads(text: str) -> tuple[Spread, ...]:
    return tuple(_spread(part) for part in _parts(text))


def _spread(text: str) -> Spread:
    key, colon, word = text.partition(":")
    if not _KEY.fullmatch(key) or (colon and word != "required"):
        raise UsageError(f"{quoted(text)} is no topology spread (choose LABEL or LABEL:required)")
    return Spread(key=key, is_required=bool(colon))


def _volumes(text: str) -> tuple[Volume, ...]:
    return tuple(_volume(part) for part in _parts(text))


def _volume(text: str) -> Volume:
    match text.split(":"):
        case [source, name, path]:
            mode = "rw"
        case [source, name, path, ("ro" | "rw") as mode]:
            pass
        case _:
            source = name = path = mode = ""
    if source not in _SOURCES:
        sources = ", ".join(_SOURCES)
        raise UsageError(
            f"{quoted(text)} is no volume (choose SOURCE:NAME:PATH[:ro]; sources: {sources})"
        )
    if source == "empty":
        name = _quantity(name) if name else ""
    elif source == "host":
        name = _path(name)
    else:
        name = _named(_NAME, "a volume's source")(name)
    return Volume(source=source, name=name, path=_path(path), is_read_only=mode == "ro")


def _kind(text: str) -> Kind:
    try:
        return Kind(text.lower())
    except ValueError:
        raise UsageError(f"{quoted(text)} is unknown (choose job or jobset)") from None


def _gang(text: str) -> JobGang:
    try:
        return JobGang(text.lower())
    except ValueError:
        raise UsageError(
            f"{quoted(text)} is unknown (choose volcano or scheduler-plugins; for Kueue: "
            "--k8s-queue)"
        ) from None


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UsageError(f"{quoted(text)} is neither true nor false")
    return text.lower() == "true"


# Option -> what its text becomes; the field has the same name with underscores, or that below.
_PARSERS: dict[str, Callable[[str], object]] = {
    "image": _text,
    "namespace": _named(_NAMESPACE, "a namespace"),
    "context": _text,
    "k8s-kind": _kind,
    "k8s-queue": _named(_NAME, "a queue"),
    "k8s-gang": _gang,
    "k8s-patch": str,
    "suspend": _truth,
    "time": _seconds,
    "ttl": _seconds,
    "resources": _pairs(_quantity),
    "shm": _shm,
    "workdir": _path,
    "node-selector": _pairs(_label),
    "tolerations": _tolerations,
    "topology-spread": _spreads,
    "priority-class": _named(_NAME, "a priority class"),
    "service-account": _named(_NAME, "a service account"),
    "image-pull-secrets": _names,
    "volumes": _volumes,
    "ship": _truth,
}
_FIELDS = {"k8s-kind": "kind", "k8s-queue": "queue", "k8s-gang": "gang", "k8s-patch": "patch"}
_ELSEWHERE = ("gpus-per-node",)
