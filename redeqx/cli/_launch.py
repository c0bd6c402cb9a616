"""`redeqx launch`: runs a script as several processes of one run, on this machine, or prints the file that submits it.

In each of these files exit code 75, of a run that was preempted after a save, starts the script again; an error does not.
"""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..distributed import launch
from ._scripts import add_script, check_script

_SKYPILOT_KINDS = {"a100-40gb": "A100", "a100-80gb": "A100-80GB", "h100-80gb": "H100"}

_SLURM = """\
#!/bin/bash
{comment}#SBATCH --job-name={name}
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
{comment}apiVersion: jobset.x-k8s.io/v1alpha2
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
{comment}name: {name}
num_nodes: {nodes}
resources:
  accelerators: {kind}:{gpus}
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
    parser.add_argument("--processes", type=int, metavar="N", help="the number of processes")
    parser.add_argument("--port", type=int, help="the port of process 0; a free one by default")
    parser.add_argument("--on", choices=tuple(_FILES), help="print the file for this cluster, and start nothing")
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="with --on: the number of hosts; that of --topology by default, or 1"
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="with --on: the GPUs of a host; those of --topology by default, or 8"
    )
    parser.add_argument(
        "--topology",
        help="with --on: also compile the script for these devices, as `redeqx dry-run` does, and begin with its verdict "
        "(gpu:h100-80gb:4x8); the exit code is 3 if it does not fit",
    )
    add_script(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.on is not None:
        return _print_file(args)
    for name in ("nodes", "gpus", "topology"):
        if (value := getattr(args, name)) is not None:
            raise ValueError(f"`--{name}`: expected with `--on` and a cluster, got {value} without. Pass `--on slurm`, say.")
    if args.processes is None:
        raise ValueError("`--processes`: expected the number of processes, or `--on` and a cluster, got none. Pass one.")
    if args.processes < 1:
        raise ValueError(f"`--processes`: expected at least 1, got {args.processes}. Pass the number.")
    check_script(args)
    if args.port is not None and not 0 < args.port < 2**16:
        raise ValueError(f"`--port`: expected 1 to 65535, got {args.port}. Leave it out for a free one.")
    return launch(args.processes, [sys.executable, *_script(args)], args.port)


def _script(args: argparse.Namespace) -> list[str]:
    return [*(["-m"] if args.is_module else []), args.script, *args.args]


def _print_file(args: argparse.Namespace) -> int:
    for name in ("processes", "port"):
        if (value := getattr(args, name)) is not None:
            raise ValueError(f"`--{name}`: expected without `--on`, got {value}. Pass `--nodes` and `--gpus`.")
    described = re.fullmatch(r"gpu:[^:]*:(?:([1-9]\d*)x)?([1-9]\d*)", args.topology or "")
    of_topology = (int(described[1] or 1), int(described[2])) if described else (1, 8)
    given = (args.nodes, args.gpus)
    nodes, gpus = (default if value is None else value for value, default in zip(given, of_topology, strict=True))
    for name, value in (("nodes", nodes), ("gpus", gpus)):
        if value < 1:
            raise ValueError(f"`--{name}`: expected at least 1, got {value}. Pass the number.")
    if described and (nodes, gpus) != of_topology:
        raise ValueError(
            f"`--topology`: expected {nodes} hosts of {gpus} GPUs, as `--nodes` and `--gpus` say, got {args.topology}. "
            "Leave those out: the topology says both."
        )
    text, submit, is_here = _FILES[args.on]
    if is_here:
        check_script(args)
    code, verdict = 0, ""
    if args.topology is not None:
        options = ["--topology", args.topology, "--search", "none"]
        command = [sys.executable, "-m", "redeqx", "dry-run", *options, *_script(args)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        code = done.returncode
        if code not in (0, 3):
            return code
        found = re.search(r"^\s*verdict\s+(.*)$", done.stdout, re.MULTILINE)
        verdict = f"redeqx dry-run --topology {args.topology}: {'fits' if code == 0 else 'does not fit'}"
        verdict += f": {found.group(1).strip()}" if found else ""
    stem = args.script.rpartition(".")[2] if args.is_module else Path(args.script).stem
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-") or "train"  # Kubernetes takes these characters only
    kind = (args.topology or "").removeprefix("gpu:").partition(":")[0]
    command = ["python", *_script(args)]
    print(
        text.format(
            comment=f"# {verdict}\n" if verdict else "", name=name, nodes=nodes, gpus=gpus,
            kind=_SKYPILOT_KINDS.get(kind, "KIND"), line=shlex.join(command), quoted=_quoted(shlex.join(command)),
            listed=f"[{', '.join(map(_quoted, command))}]",
        ),
        end=f"# Submit it with: {submit}\n",
    )  # fmt: skip
    return code


def _quoted(text: str) -> str:
    """Returns a text as a string of YAML."""
    return "'" + text.replace("'", "''") + "'"
