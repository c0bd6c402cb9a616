"""The files that submit a script to a cluster, as text: SLURM's batch script, a JobSet for Kubernetes, a SkyPilot task.

In each of them exit code 75, of a run that was preempted after a save, starts the script again, and an error does not.
"""

import shlex
from collections.abc import Sequence

_SKYPILOT_KINDS = {"a100-40gb": "A100", "a100-80gb": "A100-80GB", "h100-80gb": "H100"}

_SLURM = """\
#!/bin/bash
{comment}#SBATCH --job-name={name}
#SBATCH --nodes={nodes} --ntasks-per-node={gpus} --gpus-per-node={gpus}
#SBATCH --signal=USR1@120 --requeue --open-mode=append
# One task a GPU. Two minutes before the time limit all of them save the same step, and exit with 75.
export REDEQX_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')  # only the tasks of this job join the run
srun {command}
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
              command: {command}
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
run: {command}
"""

SUBMIT = {"slurm": "sbatch job.sh", "jobset": "kubectl apply -f job.yaml", "skypilot": "sky jobs launch job.yaml"}


def job_file(
    on: str, command: Sequence[str], name: str, nodes: int, gpus: int, topology: str = "", verdict: str = ""
) -> str:
    """Returns the file for `on`, a key of `SUBMIT`.

    **Arguments:**

    - `command`: of each process.
    - `nodes`, `gpus`: the number of hosts, and of GPUs of each.
    - `topology`: a machine as for `redeqx dry-run`, which names the kind of the GPUs; `""` if it is not known.
    - `verdict`: of the dry run for that machine, the first comment; `""` for none.
    """
    line = shlex.join(command)
    comment = "".join(f"# {line}\n" for line in verdict.splitlines())
    if on == "slurm":
        return _SLURM.format(comment=comment, name=name, nodes=nodes, gpus=gpus, command=line)
    if on == "jobset":
        listed = "[" + ", ".join("'" + word.replace("'", "''") + "'" for word in command) + "]"
        return _JOBSET.format(comment=comment, name=name, nodes=nodes, gpus=gpus, command=listed)
    kind = topology.split(":")[1] if topology.startswith("gpu:") else ""
    quoted = "'" + line.replace("'", "''") + "'"
    return _SKYPILOT.format(
        comment=comment, name=name, nodes=nodes, gpus=gpus, command=quoted, kind=_SKYPILOT_KINDS.get(kind, "KIND")
    )
