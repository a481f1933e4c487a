"""Runs on Google's and Azure's object storage: gcsfs and adlfs with servers that stand in for them.

Store is unaware of which it is, so test_storage.py, on a folder and S3, has the rest.
"""

import base64
import importlib.util
import json
import shutil
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import fsspec
import pytest
from test_storage import FSDP, LONGER, WORDS, last_shards, shards, statuses, wait_until

from dist_amp.storage.mirror import MANIFEST, checkpoints_at
from dist_amp.storage.store import Store

NEEDED = {
    "gs": ("gcsfs", "fake-gcs-server"),
    "az": ("adlfs", "azurite-blob"),
}
INSTALL = (
    "pip install -c launch/constraints.txt gcsfs adlfs; on the PATH: fake-gcs-server (a release of "
    "github.com/fsouza/fake-gcs-server), and azurite-blob (npm install -g azurite)"
)
ACCOUNT = f"account:{base64.b64encode(b'key').decode()}"


def server(protocol, port):
    """(words of its command, variables that lead to it)"""
    if protocol == "gs":
        words = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", f"{port}"]
        url = f"http://127.0.0.1:{port}"
        # Without: gcsfs asks Google itself what kind of bucket it is.
        is_plain = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        return [*words, "-external-url", url], {"STORAGE_EMULATOR_HOST": url, **is_plain}
    # adlfs may speak a newer version of the protocol than azurite knows.
    words = ["--inMemoryPersistence", "--skipApiVersionCheck", "--blobPort", f"{port}"]
    account, _, key = ACCOUNT.partition(":")
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={key};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{account};"
    )
    variables = {"AZURE_STORAGE_CONNECTION_STRING": connection, "AZURITE_ACCOUNTS": ACCOUNT}
    return [*words, "--disableTelemetry"], variables


@pytest.fixture(scope="module", params=["gs", "az"])
def bucket(request, tmp_path_factory):
    """The address of a bucket, to whose server the environment leads."""
    package, program = NEEDED[request.param]
    if importlib.util.find_spec(package) is None or shutil.which(program) is None:
        pytest.skip(f"{package} or {program} is not there: {INSTALL}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words, variables = server(request.param, port)
    log = tmp_path_factory.mktemp(request.param) / "log"
    with pytest.MonkeyPatch.context() as patch, log.open("w") as output:
        for name, value in variables.items():
            patch.setenv(name, value)
        started = subprocess.Popen(
            [program, *words], cwd=log.parent, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            wait_until(lambda: answers(port))
            fsspec.filesystem(request.param).mkdir("bucket")
            yield f"{request.param}://bucket"
        finally:
            started.kill()
            started.wait()


def answers(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@pytest.mark.slow
def test_one_of_several_creates_a_file(bucket):
    store = Store(f"{bucket}/created")
    for attempt in range(5):
        name = f"leases/{attempt}"
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda n, name=name: store.create(name, b"%d" % n), range(8)))
        assert sum(made) == 1
        assert store.read(name) == b"%d" % made.index(True)
        assert store.create(name, store.read(name)), "whose answer was lost"
    store.remove("leases/0")
    store.remove("leases/0")
    assert list(store.sizes("leases")) == [f"leases/{attempt}" for attempt in range(1, 5)]


@pytest.mark.slow
def test_a_run_continues_on_an_empty_disk_after_a_kill_and_after_its_end(bucket, launch, tmp_path):
    run = partial(launch.each, 2, *WORDS, *FSDP, DIST_AMP_CACHE="cache")
    whole = run("--run.dir", "whole")
    assert statuses(whole) == [0, 0], whole
    address = ["--run.dir", f"{bucket}/run"]
    store = Store(address[1])
    killed = run(*address, AT="6", NUMBER=str(int(signal.SIGKILL)))
    assert statuses(killed) == [-signal.SIGKILL, -signal.SIGKILL]
    shutil.rmtree(tmp_path / "cache")
    saved = [name for name, files in checkpoints_at(store).items() if files[-1].endswith(MANIFEST)]
    resumed = f"resumed from step {int(max(saved)[5:])}" if saved else "from step 0"

    ended = run(*address)
    assert statuses(ended) == [0, 0], ended
    assert resumed in ended[0].stdout
    manifest = json.loads(store.read(f"checkpoints/step_00000008/{MANIFEST}"))
    assert shards(manifest["files"]) == last_shards(tmp_path / "whole")
    shutil.rmtree(tmp_path / "cache")

    continued = run(*address, *LONGER)
    assert statuses(continued) == [0, 0], continued
    assert "resumed from step 8" in continued[0].stdout
    assert list(checkpoints_at(store)) == ["step_00000006", "step_00000008", "step_00000010"]


@pytest.mark.slow
@pytest.mark.bad_input("gs:// and az://: a missing bucket, a server that is away, no credentials")
def test_a_store_that_can_not_be_used_is_refused_in_one_line(bucket, launch):
    words = [*WORDS, "--run.dir", f"{bucket}-of-nobody/run"]
    variable = {
        "gs://bucket": {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"},  # where nothing listens
        "az://bucket": {"AZURE_STORAGE_CONNECTION_STRING": ""},
    }
    cases = [
        ({}, "make the bucket, or check its name"),
        (variable[bucket], "check the credentials, which must be allowed to read, write and list"),
    ]
    for changed, said in cases:
        done = launch.each(2, *words, DIST_AMP_CACHE="cache", **changed)
        assert statuses(done) == [1, 1], done
        (line,) = [line for one in done for line in one.stderr.splitlines() if "error: " in line]
        assert f"{bucket}-of-nobody/run can't be used: " in line
        assert said in line
