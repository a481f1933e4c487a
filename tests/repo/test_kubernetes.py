"""The Kubernetes manifests: right by the published schemas; storage, stops and restarts."""

import pytest
import yaml
from conftest import ROOT

from dist_amp.config.load import load_config

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
    assert TRAINER["command"] == ["torchrun"]
    module, name, *settings = TRAINER["args"]
    assert (module, name) == ("-m", "dist_amp.train"), "its world is in PET_ variables alone"
    load_config(settings, environ={})
