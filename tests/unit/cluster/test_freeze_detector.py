"""A process that was frozen finds out."""

import pytest

from msrun.cluster.liveness.freeze_detector import FreezeDetector
from msrun.cluster.liveness.lease import Lease, lease


@pytest.mark.parametrize(
    ("seconds", "limit", "pause"),
    [(0, 2.0, 0.5), (1.0, 0.2, 0.2), (5.0, 1.0, 0.5), (10.0, 2.0, 0.5), (60.0, 2.0, 0.5)],
)
def test_a_freeze_is_seen_when_it_matters_to_a_lease(seconds, limit, pause):
    for late, was_frozen in ((limit * 0.99, False), (limit * 1.01, True)):
        freeze_detector = FreezeDetector(lease=lease(seconds), look_at=100.0)
        assert freeze_detector.tick(now=100.0 + late) is was_frozen
        assert freeze_detector.deadline() == 100.0 + late + pause


def test_it_looks_when_it_is_time_and_not_at_each_other_deadline():
    freeze_detector = FreezeDetector(lease=Lease(10.0), look_at=100.0)

    assert not freeze_detector.tick(now=99.9)
    assert freeze_detector.deadline() == 100.0
    assert [freeze_detector.tick(now=now) for now in (100.0, 100.5, 101.0)] == [False] * 3
