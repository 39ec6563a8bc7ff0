"""Words of other launchers that are no options here, and what to write instead."""

from __future__ import annotations

_PER_NODE = "--nproc-per-node N starts N workers on each node, --worker-num N in the whole job"
_NNODES = "write --nnodes N"
_SHIM = "`msrun install-shim` lets `accelerate launch` start its workers by msrun"
_SCRIPTS = "if it is the script's, write it behind SCRIPT"
_SBATCH = "with --launcher slurm, --sbatch-args 'WORDS' gives further options to sbatch"
_BINDING = "write --bind-core"
_LEAVE_OUT = "leave it out: workers find LOCAL_RANK in their environment"

INSTEAD = {
    # accelerate launch
    "--num-processes": _PER_NODE,
    "--num-machines": _NNODES,
    "--machine-rank": "write --node-rank N",
    "--main-process-ip": "write --master-addr HOST",
    "--main-process-port": "write --master-port PORT",
    "--gpu-ids": "write CUDA_VISIBLE_DEVICES=0,1 msrun ...",
    "--multi-gpu": "leave it out: each device has a worker unless --nproc-per-node says otherwise",
    "--cpu": "leave it out; CUDA_VISIBLE_DEVICES= msrun ... hides the devices",
    "--num-cpu-threads-per-process": "write OMP_NUM_THREADS=N msrun ...",
    "--enable-cpu-affinity": _BINDING,
    "--config-file": f"--config FILE is a job file of msrun; {_SHIM}",
    "--mixed-precision": _SHIM,
    "--dynamo-backend": _SHIM,
    "--use-fsdp": _SHIM,
    "--use-deepspeed": _SHIM,
    # deepspeed
    "--num-gpus": _PER_NODE,
    "--num-nodes": _NNODES,
    "--deepspeed": _SCRIPTS,
    "--deepspeed-config": _SCRIPTS,
    "--bind-cores-to-rank": _BINDING,
    "--no-local-rank": _LEAVE_OUT,
    "--enable-each-rank-log": "write --log-dir DIR: each rank has a log there",
    # torch.distributed.launch and others
    "--use-env": _LEAVE_OUT,
    "--gpus": _PER_NODE,
    "--nproc-per-machine": _PER_NODE,
    "--devices": _PER_NODE,
    "--verbose": "leave it out: the log directory has all that every rank has written",
    "-v": "write --version for the version",
    # mpirun
    "-np": "write -n N or --worker-num N",
    "-npernode": "write --nproc-per-node N",
    "-ppn": "write --nproc-per-node N",
    "--hosts": "write --hostfile FILE, with --launcher ssh, mpirun or slurm",
    "--host": "write --hostfile FILE, with --launcher ssh, mpirun or slurm",
    # sbatch
    "--ntasks": "write --worker-num N",
    "--ntasks-per-node": "write --nproc-per-node N",
    "--cpus-per-task": "write --cpus-per-node N, which all workers of a node share",
    "--gres": f"write --gpus-per-node N; {_SBATCH}",
    **dict.fromkeys(
        ("--qos", "--constraint", "--mem", "--exclusive", "--nodelist", "--job-name"), _SBATCH
    ),
}
"""A word with hyphens -> the hint."""

# The first words of a line, which are neither verbs nor scripts.
COMMANDS = {
    "help": "msrun --help",
    "version": "msrun --version",
    "launch": "msrun run",
    "start": "msrun run",
    "kill": "msrun stop",
    "cancel": "msrun stop",
    "ps": "msrun ls",
    "list": "msrun ls",
    "jobs": "msrun ls",
    "top": "msrun status --watch",
    "tail": "msrun logs --follow",
}

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "horovodrun")
"""Commands whose place msrun takes."""
