"""`redeqx launch`: runs a script as several processes of one run, on this machine, or prints the file that submits it.

In each of these files exit code 75, of a run that was preempted after a save, starts the script again; an error does not.
"""

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from ..distributed import launch
from ._scripts import add_script, check_script

_SLURM = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes} --ntasks-per-node={gpus} --gpus-per-node={gpus}
#SBATCH --signal=USR1@120 --requeue --open-mode=append
# One task a GPU. Two minutes before the time limit all of them save the same step, and exit with 75.
export REDEQX_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')  # only the tasks of this job join the run
srun {line}
code=$?
[ $code -eq 75 ] && scontrol requeue $SLURM_JOB_ID
exit $code
"""

_JOBSET = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  replicatedJobs:
  - name: worker
    template:
      spec:
        completions: {nodes}
        parallelism: {nodes}
        completionMode: Indexed
        backoffLimit: 3
        podFailurePolicy:
          rules:
          - {{action: Ignore, onPodConditions: [{{type: DisruptionTarget}}]}}  # the node was taken away
          - {{action: Ignore, onExitCodes: {{operator: In, values: [75]}}}}  # preempted: start again
          - {{action: FailJob, onExitCodes: {{operator: In, values: [1]}}}}  # an error: do not
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 120
            containers:
            - name: train
              image: IMAGE
              command: {listed}
              env:
              - {{name: REDEQX_PROCESSES, value: "{nodes}"}}
              - {{name: REDEQX_HOST0, value: "{name}-worker-0-0.{name}:55527"}}
              - name: REDEQX_PROCESS_ID
                valueFrom: {{fieldRef: {{fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}}}
              - name: REDEQX_TOKEN
                valueFrom: {{fieldRef: {{fieldPath: "metadata.labels['batch.kubernetes.io/controller-uid']"}}}}
              resources:
                limits: {{nvidia.com/gpu: {gpus}}}
"""

_SKYPILOT = """\
name: {name}
num_nodes: {nodes}
resources:
  accelerators: KIND:{gpus}
  job_recovery:
    recover_on_exit_codes: [75]  # preempted: start again
workdir: .
setup: pip install redeqx
run: {quoted}
"""

# By cluster: the file, the command that submits it, and whether the job runs the script of the folder it is submitted from.
_FILES = {
    "slurm": (_SLURM, "sbatch job.sh", True),
    "jobset": (_JOBSET, "kubectl apply -f job.yaml", False),  # it is in the image
    "skypilot": (_SKYPILOT, "sky jobs launch job.yaml", True),
}


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "launch",
        help="run a script as several processes on this machine, or print the file that submits it to a cluster",
        description="Start a script several times on this machine, as the processes of one run. Their output is prefixed "
        "with their index. If one fails, the others end, and its exit code is returned. With --on, print the file that "
        "submits the script to a cluster instead.",
    )
    parser.add_argument("--processes", type=_count, metavar="N", help="the number of processes")
    parser.add_argument("--port", type=int, help="the port of process 0; a free one by default")
    parser.add_argument("--on", choices=tuple(_FILES), help="print the file for this cluster, and start nothing")
    parser.add_argument("--nodes", type=_count, metavar="N", help="with --on: the number of hosts, 1 by default")
    parser.add_argument("--gpus", type=_count, metavar="N", help="with --on: the GPUs of a host, 8 by default")
    add_script(parser)
    parser.set_defaults(run=_run)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return int(text)


def _run(args: argparse.Namespace) -> int:
    others, rule = (("nodes", "gpus"), "with") if args.on is None else (("processes", "port"), "without")
    for name in others:
        if (value := getattr(args, name)) is not None:
            raise ValueError(f"`--{name}`: expected {rule} `--on` and a cluster, got {value}. Leave one of them out.")
    if args.on is not None:
        return _print_file(args)
    if args.processes is None:
        raise ValueError("`--processes`: expected the number of processes, or `--on` and a cluster, got none. Pass one.")
    check_script(args)
    if args.port is not None and not 0 < args.port < 2**16:
        raise ValueError(f"`--port`: expected 1 to 65535, got {args.port}. Leave it out for a free one.")
    return launch(args.processes, [sys.executable, *_script(args)], args.port)


def _script(args: argparse.Namespace) -> list[str]:
    return [*(["-m"] if args.is_module else []), args.script, *args.args]


def _print_file(args: argparse.Namespace) -> int:
    text, submit, is_here = _FILES[args.on]
    if is_here:
        check_script(args)
    stem = args.script.rpartition(".")[2] if args.is_module else Path(args.script).stem
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-") or "train"  # Kubernetes takes these characters only
    command = ["python", *_script(args)]
    line, listed = shlex.join(command), f"[{', '.join(map(_quoted, command))}]"
    print(
        text.format(name=name, nodes=args.nodes or 1, gpus=args.gpus or 8, line=line, quoted=_quoted(line), listed=listed),
        end=f"# Submit it with: {submit}\n",
    )
    return 0


def _quoted(text: str) -> str:
    """Returns a text as a string of YAML."""
    return "'" + text.replace("'", "''") + "'"
