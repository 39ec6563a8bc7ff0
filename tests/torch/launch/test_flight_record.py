"""torch's flight recorder, which is on by default, tells the latest collective of each group."""

import torch
import torch.distributed as dist
from ranks import run_ranks

from msrun.parallel.torch_compat import collectives_entered


def _collectives():
    dist.all_reduce(torch.ones(2))
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.ones(2), 0)
    pair = dist.new_group([0, 1])
    dist.barrier(group=pair)
    dist.all_reduce(torch.ones(2))
    return collectives_entered(), pair.group_name


def test_the_latest_collective_of_each_group_is_recorded():
    found = run_ranks(_collectives, 2)

    for entered, pair in found:
        latest = {group: (number, name) for group, number, name in entered}
        assert latest["0"][1] == "all_reduce"
        assert latest[pair] == (1, "barrier")
    assert found[0][0] == found[1][0]


# As torch 2.13's FlightRecorderDetail.hpp writes it in builds for CUDA; no such device is here.
NCCL_RECORD = """{
    "version": "2.10", "comm_lib_version": "2.28", "nccl_comm_state": {}, "entries": [
    {"record_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 1, "p2p_seq_id": 0,
     "is_p2p": false, "profiling_name": "nccl:all_reduce", "state": "completed"},
    {"record_id": 1, "process_group": ["0", "default_pg"], "collective_seq_id": 1, "p2p_seq_id": 1,
     "is_p2p": true, "profiling_name": "nccl:send 0->1", "state": "completed"},
    {"record_id": 2, "process_group": ["0", "default_pg"], "collective_seq_id": 2, "p2p_seq_id": 1,
     "is_p2p": false, "profiling_name": "nccl:_all_gather_base", "state": "scheduled"},
    {"record_id": 3, "process_group": ["7", "tp"], "collective_seq_id": 5, "p2p_seq_id": 0,
     "is_p2p": false, "profiling_name": "nccl:broadcast", "state": "started"}
]}"""
NO_RECORD = '{"version": "2.10", "pg_config": {}}'


def test_nccls_record_counts_by_itself(monkeypatch):
    from torch._C import _distributed_c10d as c10d

    gloos = NCCL_RECORD.replace("nccl:", "gloo:")
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda: gloos)
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda: NCCL_RECORD, raising=False)

    assert collectives_entered() == [
        ("0", 2, "_all_gather_base"),
        ("7", 5, "broadcast"),
        ("0 (nccl)", 2, "_all_gather_base"),
        ("7 (nccl)", 5, "broadcast"),
    ]


def test_there_may_be_no_record(monkeypatch):
    from torch._C import _distributed_c10d as c10d

    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda: NO_RECORD)
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda: NO_RECORD, raising=False)

    assert collectives_entered() == []
