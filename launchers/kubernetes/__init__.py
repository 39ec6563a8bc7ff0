"""Kubernetes: an Indexed Job whose pods are the nodes, with a headless Service and a Secret.

`manifests` renders what `options` ask for, and `patch` merges the user's own YAML over it.  The
Secret with the job's key is made when the job is submitted, so no plan, file or argument has it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import PurePosixPath

import yaml

from launchers.kubernetes.manifests import (
    SHIP_DIRECTORY,
    PodProgram,
    object_name,
    render_manifests,
    secret_manifest,
    secret_name,
)
from launchers.kubernetes.options import KubernetesOptions, read_options
from launchers.kubernetes.patch import apply_patches, read_patches
from launchers.kubernetes.yaml_text import render_yaml
from msrun.bounded_file import read_bounded
from msrun.cli.output import say
from msrun.errors import ExitCode, UsageError
from msrun.fleet import Fleet, FleetPlan
from msrun.units import parse_duration, quoted, shown

PORT = 29500  # of the scheduler: every pod has ports of its own
_PYTHON = "python"  # of the image
_PATCH_MIB = 1
_SHIP_MIB = 1
_PARALLEL = "--parallel="
_CONFIG_KEY = re.compile(r"(?!\.\.)[A-Za-z0-9._-]{1,253}")


def open_launcher(options: Mapping[str, str]) -> KubernetesLauncher:
    """Return the backend; `options` has fields of `KubernetesOptions` as texts.

    Raises:
        UsageError: There is another option, or a value is none that it takes.
    """
    return KubernetesLauncher(read_options(options))


class KubernetesLauncher:
    """Creates the objects of the job and follows it to its end.

    Args:
        options: What the cluster is asked for.
        read: Returns the bytes of a file at a path, which messages call by the second argument.
    """

    def __init__(
        self, options: KubernetesOptions, *, read: Callable[[str, str], bytes] | None = None
    ) -> None:
        self._options = options
        self._read = read or partial(read_bounded, mebibytes=_SHIP_MIB)

    def plan(self, fleet: Fleet) -> FleetPlan:
        """Return what `submit` would do; reads the files that travel with the job.

        Raises:
            UsageError: The fleet cannot be started this way.
        """
        _check(fleet)
        options, name = self._options, object_name(fleet.job_id)
        manifests = render_manifests(self._program(fleet), options)
        if options.patch:
            cite = f"--k8s-patch {options.patch}"
            text = self._read(options.patch, cite).decode(errors="replace")
            manifests = apply_patches(manifests, read_patches(text, cite), cite)
        files = {f"{each['kind'].lower()}.yaml": render_yaml(each) for each in manifests}
        if fleet.nnodes > 1:
            last = next(reversed(files))
            files[last] = _how_to_make_key(name, options) + files[last]
        return FleetPlan(fleet=fleet, commands=(), files=files)

    def submit(self, plan: FleetPlan, secret: bytes) -> int:
        """Create the objects, follow the job and return its exit code, 0 when detached.

        Raises:
            UsageError: There is no cluster, or it refuses an object; nothing is left there.
        """
        # Neither help nor plan needs the client, which takes a second to load.
        from launchers.kubernetes.api import encode_key, open_cluster
        from launchers.kubernetes.submission import Submission, create_objects

        cluster = open_cluster(namespace=self._options.namespace, context=self._options.context)
        manifests = [yaml.safe_load(text) for text in plan.files.values()]
        if plan.fleet.nnodes > 1:
            name = object_name(plan.fleet.job_id)
            manifests.append(secret_manifest(name, self._options.namespace, encode_key(secret)))
        job = create_objects(cluster, manifests)
        say(f"msrun: {job['kind']} {job['metadata']['name']} in namespace {cluster.namespace}")
        if self._options.detach:
            return ExitCode.OK
        return Submission(cluster, job, say).follow()

    def _program(self, fleet: Fleet) -> PodProgram:
        words, files = list(fleet.words), dict[str, str]()
        if self._options.ship:
            words, files = self._ship(words)
        python = fleet.python or _PYTHON
        nodes = _option(words, "nnodes")
        return PodProgram(
            job_id=fleet.job_id,
            command=(python, "-P", "-m", "msrun"),
            args=tuple(word for word in words if word is not nodes),
            nnodes=fleet.nnodes,
            nnodes_min=int(nodes.partition("=")[2].partition(":")[0]) if nodes else fleet.nnodes,
            port=fleet.master_port or PORT,
            max_restarts=int(_value(words, "max-restarts", "0")),
            grace=parse_duration(_value(words, "grace", "10s")),
            files=files,
        )

    def _ship(self, words: list[str]) -> tuple[list[str], dict[str, str]]:
        """Return `words` with the places of the files in the pods, and the files."""
        number = next((n for n, word in enumerate(words) if not word.startswith("-")), None)
        others = [
            name for name in ("module", "no-python") if _value(words, name, "false") == "true"
        ]
        if number is None or others:
            what = f"--{others[0]} has none" if others else "there is none"
            raise UsageError(f"--ship true sends the script, and {what}")
        moved, files = list(words), dict[str, str]()

        def take(path: str) -> str:
            name = PurePosixPath(path).name
            if not _CONFIG_KEY.fullmatch(name):
                raise UsageError(
                    f"--ship: {quoted(name)} cannot be the name of a file in a ConfigMap",
                    hint="rename it: letters of ASCII, digits, dashes, underscores and dots",
                )
            if name in files:
                raise UsageError(f"--ship: two files are called {quoted(name)}")
            content = self._read(path, f"--ship: {shown(path)}")
            try:
                files[name] = content.decode()
            except UnicodeDecodeError:
                raise UsageError(f"--ship: {shown(path)} is no text in UTF-8") from None
            return f"{SHIP_DIRECTORY}/{name}"

        moved[number] = take(words[number])
        for place, word in enumerate(words[:number]):
            value = word.removeprefix(_PARALLEL)
            if value != word and not value.lstrip().startswith("{"):
                moved[place] = f"{_PARALLEL}{take(value)}"
        return moved, files


def _how_to_make_key(name: str, options: KubernetesOptions) -> str:
    """Return the comment for those who create the objects themselves."""
    place = f" --context {shlex.quote(options.context)}" if options.context else ""
    place += f" -n {options.namespace}" if options.namespace else ""
    return (
        "# The job's key is in no file.  msrun run makes it; without that:\n"
        f"#   kubectl{place} create secret generic {secret_name(name)} "
        "--from-literal=key=$(openssl rand -hex 32)\n"
    )


def _check(fleet: Fleet) -> None:
    if fleet.hosts:
        raise UsageError(
            "--launcher kubernetes takes the nodes that Kubernetes gives",
            hint="choose them with --node-selector, --tolerations and --topology-spread",
        )
    if fleet.master_addr:
        raise UsageError(
            f"--master-addr {shown(fleet.master_addr)} has no place in --launcher kubernetes: "
            "the pod of index 0 has the scheduler"
        )


def _option(words: list[str], name: str) -> str | None:
    """Return the word that gives an option; those of the program come after its first word."""
    for word in words:
        if not word.startswith("-"):
            return None
        if word.startswith(f"--{name}="):
            return word
    return None


def _value(words: list[str], name: str, default: str) -> str:
    word = _option(words, name)
    return word.partition("=")[2] if word else default
