"""The Kubernetes manifests: right by the published schemas, and torchrun forms their world from
PET_* alone.
"""

import copy
import json
import os
import platform
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from ranks import on_ranks

from dist_amp.config.load import load_config
from dist_amp.errors import Failure

ROOT = Path(__file__).parent.parent
TESTS = Path(__file__).parent
MANIFESTS = [
    document
    for name in ("kubernetes.yaml", "kubernetes_tensorboard.yaml")
    for document in yaml.safe_load_all((ROOT / "launch" / name).read_text())
]
CLAIM, RUNTIME, JOB, TENSORBOARD = MANIFESTS
TINY = "--task.target tiny:Tiny --train.steps 2 --train.micro_batch_size 2 --eval.batches 1".split()


def check(document):
    """Errors: whatever the schema's own package raises, or AssertionError for a key that it does
    not know.
    """
    if document["kind"] in ("TrainJob", "TrainingRuntime"):
        models = pytest.importorskip(
            "kubeflow_trainer_api.models", reason="bash tests/engines.sh brings it"
        )
        model = getattr(models, f"TrainerV1alpha1{document['kind']}")
        assert model.from_dict(document).to_dict() == document  # it drops unknown keys
    else:
        schemas = pytest.importorskip(
            "kubernetes_validate", reason="bash tests/engines.sh brings it"
        )
        schemas.validate(document, schemas.latest_version(), strict=True)


def pods_of(document):
    """The pod's spec that a manifest makes."""
    spec = document["spec"]
    if document["kind"] == "TrainingRuntime":
        (job,) = spec["template"]["spec"]["replicatedJobs"]
        spec = job["template"]["spec"]
    return spec["template"]["spec"]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("document", MANIFESTS, ids=lambda document: document["kind"])
def test_a_manifest_is_what_its_schema_asks_for(document):
    check(document)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("document", "path", "value"),
    [
        (JOB, ["spec", "trainer", "numNode"], 2),
        (JOB, ["spec", "trainer", "numNodes"], "two"),
        (RUNTIME, ["spec", "template", "spec", "failurePolicy", "maxRestart"], 30),
        (
            RUNTIME,
            ["spec", "template", "spec", "replicatedJobs", 0, "template", "spec", "backoffLimit"],
            "none",
        ),
        (TENSORBOARD, ["spec", "template", "spec", "volume"], []),
        (TENSORBOARD, ["spec", "replicas"], "one"),
        (CLAIM, ["spec", "accessModes"], "ReadWriteMany"),
    ],
)
def test_a_manifest_with_an_unknown_key_or_a_wrong_type_is_refused(document, path, value):
    schemas = pytest.importorskip("kubernetes_validate", reason="bash tests/engines.sh brings it")
    wrong = copy.deepcopy(document)
    inner = wrong
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises((ValueError, AssertionError, schemas.ValidationError)):
        check(wrong)


def test_the_job_and_tensorboard_share_the_claim_where_the_image_keeps_runs():
    for document in (RUNTIME, TENSORBOARD):
        pod = pods_of(document)
        (volume,) = [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
        assert volume["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
        mounts = {
            mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]
        }
        assert mounts[volume["name"]] == "/app/runs"
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "fsGroup": 1000,
        }  # the image's user
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]
    trainer = JOB["spec"]["trainer"]
    assert trainer["image"] == pods_of(TENSORBOARD)["containers"][0]["image"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]


def test_the_jobs_runtime_is_the_one_beside_it_and_starts_all_pods_again_when_one_fails():
    assert JOB["spec"]["runtimeRef"] == {
        "kind": RUNTIME["kind"],
        "name": RUNTIME["metadata"]["name"],
    }
    jobset = RUNTIME["spec"]["template"]["spec"]
    (job,) = jobset["replicatedJobs"]
    assert job["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert (job["name"], pods_of(RUNTIME)["containers"][0]["name"]) == ("node", "node"), (
        "the Trainer fills in these"
    )
    assert jobset["failurePolicy"]["maxRestarts"] >= 30, "a month, at an event a day"
    assert (job["template"]["spec"]["backoffLimit"], pods_of(RUNTIME)["restartPolicy"]) == (
        0,
        "Never",
    )
    told = {variable["name"]: variable["value"] for variable in JOB["spec"]["trainer"]["env"]}
    assert int(told["PET_SHUTDOWN_TIMEOUT"]) < pods_of(RUNTIME)["terminationGracePeriodSeconds"], (
        "killed else"
    )


def test_the_job_may_pin_memory_has_shared_memory_and_says_where_rdma_is_requested():
    pod = pods_of(RUNTIME)
    (node,) = pod["containers"]
    assert node["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    shared = next(
        volume for volume in pod["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"
    )
    assert {"name": shared["name"], "mountPath": "/dev/shm"} in node["volumeMounts"]
    settings = {variable["name"]: variable["value"] for variable in JOB["spec"]["trainer"]["env"]}
    assert settings["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    text = (ROOT / "launch/kubernetes.yaml").read_text()
    assert all(
        name in text for name in ("rdma/hca_shared_devices_a", "rdma/ib", "vpc.amazonaws.com/efa")
    )


def test_tensorboard_listens_inside_its_pod_alone():
    assert "--host" not in pods_of(TENSORBOARD)["containers"][0]["command"]
    assert "--bind_all" not in pods_of(TENSORBOARD)["containers"][0]["command"]


@pytest.mark.engine
@pytest.mark.slow
def test_torchrun_forms_the_jobs_world_from_pet_variables_alone(tmp_path):
    trainer = JOB["spec"]["trainer"]
    assert trainer["command"] == ["torchrun"]
    assert trainer["args"][0] == "-m", "no option of torchrun's own"
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"PET_NNODES": trainer["numNodes"], "PET_NPROC_PER_NODE": 2,
             "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}  # fmt: skip
    world |= {variable["name"]: variable["value"] for variable in trainer["env"]}
    pods = []
    for node in range(trainer["numNodes"]):  # as Kubeflow Trainer tells each of the world
        told = {name: str(value) for name, value in {**world, "PET_NODE_RANK": node}.items()}
        pods.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *trainer["args"], *TINY],
                cwd=tmp_path,
                stdout=(tmp_path / f"out{node}").open("w"),
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{TESTS}", **told},
            )
        )
    try:
        statuses = [pod.wait(timeout=600) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    said = [(tmp_path / f"out{node}").read_text() for node in range(2)]
    assert statuses == [0, 0], said
    summary = json.loads((tmp_path / "runs/demo/summary.json").read_text())
    assert (summary["stopped_by"], summary["world_size"], summary["steps"]) == ("completed", 4, 2)
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1, 2, 3]
    assert "on 4 x CPU" in said[0]
    assert "step" not in said[1], "rank 0 speaks for all"


def begin_in_a_folder_of_its_own(world, folder):
    """What make_folder says where each rank's `runs` is another; without the minute that a network
    disk is given.
    """
    from dist_amp.supervise import preflight

    own, before, appears = Path(folder) / f"pod{world.rank}", os.getcwd(), preflight.appears
    own.mkdir()
    os.chdir(own)
    preflight.appears = partial(appears, seconds=0.1)
    try:
        preflight.make_folder(Path("runs/demo"), load_config(), world)
    except Failure as error:
        return str(error)
    finally:
        os.chdir(before)
        preflight.appears = appears


@pytest.mark.bad_input("nodes that do not share run.dir")
def test_pods_that_do_not_share_a_claim_are_told_so(tmp_path):
    assert (
        on_ranks(2, begin_in_a_folder_of_its_own, tmp_path)
        == [
            f"run.dir=runs/demo is not there on {platform.node()}: put it on a disk that all ranks "
            "share"
        ]
        * 2
    )
