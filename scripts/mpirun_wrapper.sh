#!/bin/sh
# Gives the ranks that mpirun or srun started torchrun's variables, for scripts that read those:
#
#   mpirun -n 4 scripts/mpirun_wrapper.sh python train.py
#
# A script that calls msrun.init() needs no wrapper.  PYTHON is a Python that has msrun.
set -eu
if [ $# -eq 0 ]; then
    echo "usage: mpirun ... $0 PROGRAM [ARGS]..." >&2
    exit 2
fi
variables=$("${PYTHON:-python3}" -P -c '
import os, shlex, sys
from msrun.errors import UsageError
from msrun.identity import torchrun_env
try:
    for name, value in torchrun_env(os.environ).items():
        print(f"export {name}={shlex.quote(value)}")
except UsageError as error:
    sys.exit(error.render())
') || exit 2
eval "$variables"
exec "$@"
