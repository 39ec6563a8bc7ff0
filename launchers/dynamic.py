"""The default backend: this process is the agent of its own node."""

from __future__ import annotations

import sys

from msgspec import structs

from msrun import environ
from msrun.backend import LaunchPlan, WorkerPlan
from msrun.job import JobSpec, ProgramKind, WorkerProgram
from msrun.processes import run_dir
from msrun.supervise import containment, node_plan
from msrun.topology import Machine


class DynamicLauncher:
    """Runs the agent here; with several nodes, the user starts one on each."""

    def plan(self, job: JobSpec, machine: Machine) -> LaunchPlan:
        """Return what `submit` would do.

        Raises:
            UsageError: The job cannot run here; the message says why.
        """
        placement = node_plan.expected(job, str(run_dir.location(job.job_id)))
        workers = node_plan.plan_workers(job, machine, placement, environ.current())
        has_ranks = node_plan.has_ranks(job)
        if not has_ranks:
            workers = tuple(_without_rank(job, machine, worker) for worker in workers)
        return LaunchPlan(
            job=job,
            machine=machine,
            workers=workers,
            argv=_command(job.program),
            containment=containment.describe(machine.cgroup),
            notes=node_plan.plan_affinity(job, machine).notes,
            has_ranks=has_ranks,
        )

    def submit(self, plan: LaunchPlan) -> int:
        """Run the job on this node to its end and return its exit code."""
        from msrun.processes.agent.agent import run  # `plan` needs no ZeroMQ.

        return run(plan)


def _without_rank(job: JobSpec, machine: Machine, worker: WorkerPlan) -> WorkerPlan:
    name = node_plan.log_file(job, machine, node_plan.UNKNOWN_RANK, worker.local_rank)
    return structs.replace(worker, log_file=name)


def _command(program: WorkerProgram) -> tuple[str, ...]:
    if program.kind is ProgramKind.COMMAND:
        return (program.target, *program.args)
    module = ("-m",) if program.kind is ProgramKind.MODULE else ()
    return (sys.executable, *program.interpreter_options, *module, program.target, *program.args)
