"""`redeqx launch --on`: the files that submit a script, word for word."""

import json
import re
import subprocess

import pytest

from tests.cli.commands import error_of, output_of

SLURM = r"""#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=4 --ntasks-per-node=8 --gpus-per-node=8
#SBATCH --signal=USR1@120 --requeue --open-mode=append
# One task a GPU. Two minutes before the time limit all of them save the same step, and exit with 75.
export REDEQX_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')  # only the tasks of this job join the run
srun python train.py --name 'a b'
code=$?
[ $code -eq 75 ] && scontrol requeue $SLURM_JOB_ID
exit $code
# Submit it with: sbatch job.sh
"""

JOBSET = """apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: train
spec:
  replicatedJobs:
  - name: worker
    template:
      spec:
        completions: 4
        parallelism: 4
        completionMode: Indexed
        backoffLimit: 3
        podFailurePolicy:
          rules:
          - {action: Ignore, onPodConditions: [{type: DisruptionTarget}]}  # the node was taken away
          - {action: Ignore, onExitCodes: {operator: In, values: [75]}}  # preempted: start again
          - {action: FailJob, onExitCodes: {operator: In, values: [1]}}  # an error: do not
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 120
            containers:
            - name: train
              image: IMAGE
              command: ['python', 'train.py', '--name', 'a b']
              env:
              - {name: REDEQX_PROCESSES, value: "4"}
              - {name: REDEQX_HOST0, value: "train-worker-0-0.train:55527"}
              - name: REDEQX_PROCESS_ID
                valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
              - name: REDEQX_TOKEN
                valueFrom: {fieldRef: {fieldPath: "metadata.labels['batch.kubernetes.io/controller-uid']"}}
              resources:
                limits: {nvidia.com/gpu: 8}
# Submit it with: kubectl apply -f job.yaml
"""

SKYPILOT = """name: train
num_nodes: 4
resources:
  accelerators: KIND:8
  job_recovery:
    recover_on_exit_codes: [75]  # preempted: start again
workdir: .
setup: pip install redeqx
run: 'python train.py --name ''a b'''
# Submit it with: sky jobs launch job.yaml
"""


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.mark.parametrize("on", ["slurm", "skypilot"])
def test_script_of_this_folder_exists(capsys, on):
    expected = "`nope.py`: expected a script, got no such file. For a module write `-m nope.py`."
    assert error_of(capsys, "launch", "--on", on, "nope.py") == expected


@pytest.mark.parametrize(("on", "expected"), {"slurm": SLURM, "jobset": JOBSET, "skypilot": SKYPILOT}.items())
def test_file_to_submit(capsys, on, expected):
    shown = output_of(capsys, "launch", "--on", on, "--nodes", "4", "--gpus", "8", "train.py", "--name", "a b")
    assert shown == expected


@pytest.mark.parametrize(("code", "runs"), [(0, []), (75, ["requeue 7"]), (1, []), (137, [])])
def test_slurm_file_requeues_after_code_75_only(capsys, tmp_path, code, runs):
    text = output_of(capsys, "launch", "--on", "slurm", "train.py")
    for name, body in (("srun", f"exit {code}"), ("scontrol", f'echo "$@" >> {tmp_path}/requeued')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", text], env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}, timeout=20, check=False
    )
    assert done.returncode == code
    requeued = tmp_path / "requeued"
    assert (requeued.read_text().splitlines() if requeued.exists() else []) == runs


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "`--processes`: expected the number of processes, or `--on` and a cluster, got none. Pass one."),
        (
            ["--on", "slurm", "--processes", "2"],
            "`--processes`: expected without `--on` and a cluster, got 2. Leave one of them out.",
        ),
        (
            ["--processes", "2", "--nodes", "2"],
            "`--nodes`: expected with `--on` and a cluster, got 2. Leave one of them out.",
        ),
    ],
)
def test_invalid_arguments_are_named(capsys, arguments, expected):
    assert error_of(capsys, "launch", *arguments, "train.py") == expected


def test_names_fit_kubernetes(capsys):
    """The script is in the image, not here."""
    shown = output_of(capsys, "launch", "--on", "jobset", "runs/My_Model.v2.py")
    assert "  name: my-model-v2\n" in shown and "my-model-v2-worker-0-0.my-model-v2:55527" in shown
    assert json.loads(re.search(r"command: (.*)", shown).group(1).replace("'", '"')) == ["python", "runs/My_Model.v2.py"]
