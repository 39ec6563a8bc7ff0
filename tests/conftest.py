"""What holds for every test: none leaves a process behind."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
from sampled import of_night

from msrun.supervise import process

# Every process that a test starts inherits this mark, also when its parent is gone.
MARK = "MSRUN_TESTS_SESSION"
# Files whose tests take minutes in all: grids of configurations, clusters, other launchers.
THOROUGH = (
    "tests/cluster/pods/test_pods.py",
    "tests/cluster/test_control.py",
    "tests/cluster/test_data_ports.py",
    "tests/cluster/test_faults.py",
    "tests/cluster/test_fleet.py",
    "tests/cluster/test_forming.py",
    "tests/cluster/test_frozen.py",
    "tests/cluster/test_lab.py",
    "tests/cluster/test_living.py",
    "tests/cluster/test_mindspore.py",
    "tests/cluster/test_scheduler.py",
    "tests/cluster/test_started_by_hand.py",
    "tests/cluster/test_store.py",
    "tests/cluster/test_strangers.py",
    "tests/cluster/test_table.py",
    "tests/cluster/test_weather.py",
    "tests/kube/launcher/test_launcher.py",
    "tests/kube/test_api.py",
    "tests/kube/test_operator.py",
    "tests/kube/test_operator_election.py",
    "tests/kube/test_operator_faults.py",
    "tests/kube/test_operator_odd.py",
    "tests/kube/launcher/test_odd_pods.py",
    "tests/kube/test_launcher.py",
    "tests/kube/test_pods.py",
    "tests/process/api/test_job.py",
    "tests/process/api/test_launch.py",
    "tests/process/api/test_notebook.py",
    "tests/process/api/test_snippets.py",
    "tests/process/commands/test_by_hand.py",
    "tests/process/commands/test_by_hand_refused.py",
    "tests/process/commands/test_console.py",
    "tests/process/commands/test_control.py",
    "tests/process/commands/test_docs.py",
    "tests/process/commands/test_fleet.py",
    "tests/process/commands/test_main_module.py",
    "tests/process/commands/test_main_targets.py",
    "tests/process/commands/test_log_limit.py",
    "tests/process/commands/test_mindspore.py",
    "tests/process/commands/test_mpirun_wrapper.py",
    "tests/process/commands/test_parallel.py",
    "tests/process/commands/test_ranks_by_mpi.py",
    "tests/process/commands/test_slurm.py",
    "tests/process/commands/test_verify.py",
    "tests/process/faults/test_attacks.py",
    "tests/process/faults/test_data_tls.py",
    "tests/process/faults/test_frozen.py",
    "tests/process/faults/test_hang_blame.py",
    "tests/process/faults/test_hangs.py",
    "tests/process/faults/test_leftovers.py",
    "tests/process/faults/test_odd_places.py",
    "tests/process/faults/test_security.py",
    "tests/process/faults/test_torment.py",
    "tests/process/faults/test_two_lives.py",
    "tests/sim/servers/test_server_mutants.py",
    "tests/sim/test_fresh_seeds.py",
    "tests/sim/test_mutants.py",
    "tests/torch/auto/test_auto_norms.py",
    "tests/torch/auto/test_auto.py",
    "tests/torch/auto/test_auto_lowering.py",
    "tests/torch/auto/test_auto_memory.py",
    "tests/torch/auto/test_auto_mesh.py",
    "tests/torch/auto/test_auto_plan_io.py",
    "tests/torch/auto/test_auto_quirks.py",
    "tests/torch/auto/test_auto_rules.py",
    "tests/torch/auto/test_auto_stages.py",
    "tests/torch/auto/test_calibrate.py",
    "tests/torch/auto/test_decided.py",
    "tests/torch/auto/test_draws.py",
    "tests/torch/auto/test_trace.py",
    "tests/torch/auto/test_wishes.py",
    "tests/torch/checkpoint/test_checkpoint_crash.py",
    "tests/torch/checkpoint/test_checkpoint_layouts.py",
    "tests/torch/checkpoint/test_packed_parameters.py",
    "tests/torch/checkpoint/test_resume.py",
    "tests/torch/checkpoint/test_shared_by_stages.py",
    "tests/torch/checkpoint/test_technique_layouts.py",
    "tests/torch/copies/test_copies.py",
    "tests/torch/data_parallel/test_batch_norm.py",
    "tests/torch/data_parallel/test_clip.py",
    "tests/torch/data_parallel/test_copies.py",
    "tests/torch/data_parallel/test_exact_dropout.py",
    "tests/torch/data_parallel/test_gradient_bytes.py",
    "tests/torch/data_parallel/test_optimizer_groups.py",
    "tests/torch/data_parallel/test_optimizer_kinds.py",
    "tests/torch/data_parallel/test_optimizer_lists.py",
    "tests/torch/data_parallel/test_parameter_hooks.py",
    "tests/torch/data_parallel/test_replica_digest.py",
    "tests/torch/data_parallel/test_sparse_embedding.py",
    "tests/torch/data_parallel/test_higher_order.py",
    "tests/torch/data_parallel/test_zero.py",
    "tests/torch/data_parallel/test_zero_models.py",
    "tests/torch/deferred/test_deferred_ranks.py",
    "tests/torch/examples/test_ctr.py",
    "tests/torch/examples/test_digits.py",
    "tests/torch/examples/test_docs.py",
    "tests/torch/examples/test_examples.py",
    "tests/torch/launch/test_early_end.py",
    "tests/torch/launch/test_early_variables.py",
    "tests/torch/launch/test_fork_children.py",
    "tests/torch/launch/test_fork_endings.py",
    "tests/torch/launch/test_store.py",
    "tests/torch/launch/test_fork_like_python.py",
    "tests/torch/launch/test_launched.py",
    "tests/torch/launch/test_preload.py",
    "tests/torch/losses/test_batch_losses.py",
    "tests/torch/losses/test_counted_losses.py",
    "tests/torch/losses/test_step_batches.py",
    "tests/torch/models/test_fuzz_models.py",
    "tests/torch/models/test_fuzz_techniques.py",
    "tests/torch/models/test_model_table.py",
    "tests/torch/models/test_models_pipeline.py",
    "tests/torch/pipeline/test_hooks_later.py",
    "tests/torch/pipeline/test_pipeline.py",
    "tests/torch/pipeline/test_recorded.py",
    "tests/torch/pipeline/test_zero_bubble.py",
    "tests/torch/tensor/test_collectives.py",
    "tests/torch/tensor/test_compiled.py",
    "tests/torch/tensor/test_grids.py",
    "tests/torch/tensor/test_guard.py",
    "tests/torch/tensor/test_layouts.py",
    "tests/torch/tensor/test_lists.py",
    "tests/torch/tensor/test_model_outputs.py",
    "tests/torch/tensor/test_named_plans.py",
    "tests/torch/tensor/test_placements.py",
    "tests/torch/tensor/test_plan_file.py",
    "tests/torch/tensor/test_tensor.py",
    "tests/torch/servers/test_remote_parameters.py",
    "tests/torch/servers/test_server_convex.py",
    "tests/torch/servers/test_server_docs.py",
    "tests/torch/servers/test_server_kills.py",
    "tests/torch/servers/test_server_traffic.py",
    "tests/torch/test_collective_bytes.py",
    "tests/torch/test_grid.py",
    "tests/torch/test_sharded.py",
    "tests/torch/test_stand_in_npu.py",
    "tests/torchrun/test_signals.py",
    "tests/torchrun/test_terminals.py",
    "tests/torchrun/test_verdicts.py",
    "tests/torch/verify/test_verify.py",
    "tests/torch/verify/test_verify_layers.py",
    "tests/torch/verify/test_verify_loop.py",
    "tests/torch/weights/test_state_dicts.py",
    "tests/torch/weights/test_adapters.py",
    "tests/torch/weights/test_pretrained.py",
    "tests/torch/weights/test_pretrained_files.py",
    "tests/torch/weights/test_pretrained_kinds.py",
    "tests/unit/search/test_mesh_choice.py",
    "tests/unit/search/test_search.py",
    "tests/torchrun/test_master_port.py",
    "tests/torchrun/test_timers.py",
)
# Markers of tests whose processes have children of their own.
STARTS_TREES = ("process", "torch", "device")
# What tests/torch/ranks.py calls its processes, which wait for the next test.
WAITING = "warm rank"
# A process that was told to end may need a moment to be gone.
GRACE = 0.5

# A busy machine is no failure, and the same commit must give the same answer.
hypothesis.settings.register_profile("msrun", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("msrun")


def pytest_configure() -> None:
    os.environ[MARK] = uuid.uuid4().hex
    # What is right for this machine's network is wrong on hosts that tests make.
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    # Tests start hundreds of processes, and each would compile what it imports.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path.relative_to(config.rootpath)) in THOROUGH:
            item.add_marker("thorough")
    for item in of_night(items):
        item.add_marker("slow")


@pytest.fixture(autouse=True, scope="session")
def own_jobs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the jobs of this process from those of tests beside it, which list or stop them."""
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def reap(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test when it leaves a live process behind, say which, and end it."""
    with_orphans = any(map(request.node.get_closest_marker, STARTS_TREES))
    before = _living(with_orphans=with_orphans)
    yield
    left = _living(with_orphans=with_orphans) - before
    if not left:
        return
    _, left = map(set, psutil.wait_procs(left, timeout=GRACE))
    lines = [f"  {_describe(member)}" for member in sorted(left, key=lambda p: p.pid)]
    for member in left:
        with contextlib.suppress(psutil.Error):  # ended by itself meanwhile
            member.kill()
    psutil.wait_procs(left, timeout=GRACE)
    if lines:
        pytest.fail("\n".join(["left behind by this test, now killed:", *lines]), pytrace=False)


def _living(*, with_orphans: bool) -> set[psutil.Process]:
    """Return descendants of this process, and with orphans also those that lost their parent."""
    pids = _descendants(os.getpid())
    if with_orphans:
        pids |= set(process.with_variable(f"{MARK}={os.environ[MARK]}".encode())) - {os.getpid()}
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # gone
            found.add(psutil.Process(pid))
    return {member for member in found if _counts(member)}


def _descendants(pid: int) -> set[int]:
    """Return the pids below `pid`, for which psutil would look at every process, twice a test."""
    if not Path("/proc/thread-self/children").exists():  # the kernel was built without
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    found: set[int] = set()
    with contextlib.suppress(OSError):  # ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            children = {int(child) for child in (task / "children").read_text().split()}
            found |= children.union(*map(_descendants, children))
    return found


def _counts(member: psutil.Process) -> bool:
    """Whether `member` runs and is not one that ends by itself, with the tests that share it."""
    try:
        if member.status() == psutil.STATUS_ZOMBIE:
            return False
        if member.name() == WAITING and member.ppid() == os.getpid():
            return False
        return not any("resource_tracker" in argument for argument in member.cmdline())
    except psutil.Error:
        return False


def _describe(member: psutil.Process) -> str:
    try:
        command = " ".join(member.cmdline()) or member.name()
        return f"pid {member.pid}, {member.status()}: {command}"
    except psutil.Error:
        return f"pid {member.pid}"
