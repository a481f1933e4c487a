"""The Kubernetes manifests: right by the published schemas, and torchrun forms their world from
PET_* alone.
"""

import json
import os
import socket
import subprocess
import sys

import pytest
import yaml
from forked import ROOT, TESTS

MANIFESTS = [
    document
    for name in ("kubernetes.yaml", "kubernetes_tensorboard.yaml")
    for document in yaml.safe_load_all((ROOT / "launch" / name).read_text())
]
CLAIM, RUNTIME, JOB, TENSORBOARD = MANIFESTS
TRAINER = JOB["spec"]["trainer"]
SETTINGS = {variable["name"]: variable["value"] for variable in TRAINER["env"]}
NODE = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"][0]
POD = NODE["template"]["spec"]["template"]["spec"]
BOARD_POD = TENSORBOARD["spec"]["template"]["spec"]
TINY = "--task.target tiny:Tiny --train.steps 2 --train.micro_batch_size 2 --eval.batches 1".split()
WHERE = "bash tests/engines.sh brings it"


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("document", MANIFESTS, ids=lambda document: document["kind"])
def test_a_manifest_is_what_its_schema_asks_for(document):
    if document["kind"] in ("TrainJob", "TrainingRuntime"):
        models = pytest.importorskip("kubeflow_trainer_api.models", reason=WHERE)
        model = getattr(models, f"TrainerV1alpha1{document['kind']}")
        assert model.from_dict(document).to_dict() == document  # it drops unknown keys
    else:
        schemas = pytest.importorskip("kubernetes_validate", reason=WHERE)
        schemas.validate(document, schemas.latest_version(), strict=True)


def test_the_job_keeps_its_runs_on_a_claim_saves_before_it_is_killed_and_starts_again():
    for pod in (POD, BOARD_POD):
        (volume,) = [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
        assert volume["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
        mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
        assert mounts[volume["name"]] == "/app/runs"
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]
    (board,) = BOARD_POD["containers"]
    assert not {"--host", "--bind_all"} & set(board["command"]), "inside its pod alone"
    named = {"kind": RUNTIME["kind"], "name": RUNTIME["metadata"]["name"]}
    assert JOB["spec"]["runtimeRef"] == named
    restarts = RUNTIME["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"]
    assert restarts >= 30, "a month, at an event a day"
    assert int(SETTINGS["PET_SHUTDOWN_TIMEOUT"]) < POD["terminationGracePeriodSeconds"]
    assert TRAINER["numProcPerNode"] == TRAINER["resourcesPerNode"]["limits"]["nvidia.com/gpu"]


@pytest.mark.engine
@pytest.mark.slow
def test_torchrun_forms_the_jobs_world_from_pet_variables_alone(tmp_path):
    assert TRAINER["command"] == ["torchrun"]
    assert TRAINER["args"][0] == "-m", "no option of torchrun's own"
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{TESTS}", **SETTINGS}
    world = {"NNODES": TRAINER["numNodes"], "NPROC_PER_NODE": 2}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "torch.distributed.run", *TRAINER["args"], *TINY]
    logs = [tmp_path / f"out{node}" for node in range(TRAINER["numNodes"])]
    pods = []
    for node, log in enumerate(logs):  # as Kubeflow Trainer tells each of the world
        pet = {f"PET_{name}": str(value) for name, value in (world | {"NODE_RANK": node}).items()}
        out = {"stdout": log.open("w"), "stderr": subprocess.STDOUT}
        pods.append(subprocess.Popen(command, cwd=tmp_path, env=environ | pet, **out))
    try:
        statuses = [pod.wait(timeout=600) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    said = [log.read_text() for log in logs]
    assert statuses == [0, 0], said
    summary = json.loads((tmp_path / "runs/demo/summary.json").read_text())
    assert (summary["stopped_by"], summary["world_size"], summary["steps"]) == ("completed", 4, 2)
    assert "step" not in said[1], "rank 0 speaks for all"
