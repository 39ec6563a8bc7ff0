"""What the operator counts, as text that Prometheus reads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_HELP = {
    "msrun_operator_leader": ("gauge", "Whether this operator works: 1, or waits: 0."),
    "msrun_operator_jobs": ("gauge", "Jobs by kind and phase."),
    "msrun_operator_looks_total": ("counter", "Looks at a job, by kind and by how they ended."),
    "msrun_operator_look_seconds": ("histogram", "Seconds that a look at a job took."),
    "msrun_operator_actions_total": ("counter", "What was done in the cluster, by action."),
}

Labels = tuple[tuple[str, str], ...]


class OperatorMetrics:
    """The numbers of one operator; any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_leader = False
        self._phases: dict[tuple[str, ...], tuple[str, str]] = {}
        self._counts: Counter[tuple[str, Labels]] = Counter()
        self._buckets: Counter[float] = Counter()
        self._seconds = 0.0
        self._looks = 0

    def lead(self, *, is_leader: bool) -> None:
        """Note whether this operator works; one that does not knows of no jobs."""
        with self._lock:
            self._is_leader = is_leader
            if not is_leader:
                self._phases.clear()

    def note_look(self, kind: str, result: str, seconds: float) -> None:
        """Count a look that ended as `result` says: ok, conflict or error."""
        with self._lock:
            self._counts["msrun_operator_looks_total", (("kind", kind), ("result", result))] += 1
            self._looks += 1
            self._seconds += seconds
            for limit in _BUCKETS:
                self._buckets[limit] += seconds <= limit

    def note_action(self, action: str) -> None:
        """Count something that was done."""
        with self._lock:
            self._counts["msrun_operator_actions_total", (("action", action),)] += 1

    def note_job(self, key: tuple[str, ...], kind: str, phase: str | None) -> None:
        """Note the phase of a job, None when it is gone."""
        with self._lock:
            if phase is None:
                self._phases.pop(key, None)
            else:
                self._phases[key] = (kind, phase)

    def render(self) -> str:
        """Return all of it in Prometheus' text format, version 0.0.4."""
        with self._lock:
            samples = dict(self._samples())
        lines = list[str]()
        for name, (kind, help_text) in _HELP.items():
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
            lines += [
                f"{sample}{_braced(labels)} {value:g}"
                for (sample, labels), value in sorted(samples.items(), key=_in_order)
                if sample.startswith(name)
            ]
        return "\n".join([*lines, ""])

    def _samples(self) -> Iterator[tuple[tuple[str, Labels], float]]:
        yield ("msrun_operator_leader", ()), float(self._is_leader)
        for (kind, phase), count in Counter(self._phases.values()).items():
            labels = (("kind", kind), ("phase", phase))
            yield ("msrun_operator_jobs", labels), float(count)
        yield from ((key, float(count)) for key, count in self._counts.items())
        name = "msrun_operator_look_seconds"
        for limit in _BUCKETS:
            yield (f"{name}_bucket", (("le", f"{limit:g}"),)), float(self._buckets[limit])
        yield (f"{name}_bucket", (("le", "+Inf"),)), float(self._looks)
        yield (f"{name}_count", ()), float(self._looks)
        yield (f"{name}_sum", ()), self._seconds


def _in_order(sample: tuple[tuple[str, Labels], float]) -> tuple[str, list[tuple[str, float, str]]]:
    """Return what orders samples: buckets by their limits, all else by its labels."""
    (name, labels), _ = sample
    return name, [(k, float(v) if k == "le" else 0.0, v) for k, v in labels]


def _braced(labels: Labels) -> str:
    if not labels:
        return ""
    escaped = (
        (name, text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        for name, text in labels
    )
    return "{" + ",".join(f'{name}="{text}"' for name, text in escaped) + "}"
