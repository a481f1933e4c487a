"""The image: built for real from the Dockerfile, on a base of Debian's own packages, and used as
its user.

No registry of images is asked: mmdebstrap makes the base. Of this machine the build gets what its
own pip is told: which index, which certificates.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from built_wheel import settings_of_pip
from conftest import ROOT

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
ISOLATION = ["--isolation", "chroot"]
MISSING = [program for program in ("buildah", "mmdebstrap") if shutil.which(program) is None]
needs_an_engine = pytest.mark.skipif(
    bool(MISSING) or os.geteuid() != 0,
    reason=f"takes root, buildah and mmdebstrap (missing: {MISSING}): bash tests/engines.sh",
)


def run(*command, timeout=900, **options):
    """The finished process; what it says is in stdout, errors too."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = [str(word) for word in command]
    return subprocess.run(words, check=False, timeout=timeout, **output | options)


def of_this_machines_pip(folder):
    """Options that mount what this machine's pip is told: a pip.conf, and what it names."""
    settings = settings_of_pip()
    lines = ["[global]", *(f"{key} = {text}" for key, text in settings.items()), ""]
    (folder / "pip.conf").write_text("\n".join(lines))
    mounts = {folder / "pip.conf": "/etc/pip.conf"}
    for word in " ".join(settings.values()).split():
        path = Path(word.removeprefix("file://"))
        path = path.parent if path.name == "simple" else path  # an index links to files beside it
        if path.is_absolute() and path.exists():
            mounts[path] = path
    return [f"--volume={source}:{target}:ro" for source, target in mounts.items()]


class Engine:
    """buildah, with a store of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.context = folder / "context"
        self.options = ["--root", folder / "store", "--runroot", folder / "run"]
        self.options.append("--storage-driver=overlay")
        if self("info").returncode != 0:  # on an overlay already: slower, but works everywhere
            self.options[-1] = "--storage-driver=vfs"
        self.pip = of_this_machines_pip(folder)

    def __call__(self, *command, **options):
        return run("buildah", *self.options, *command, **options)

    def build(self, base):
        words = ["--layers", "--build-arg", f"BASE={base}", *self.pip, "--tag", "dist_amp"]
        return self("build", *ISOLATION, *words, self.context)

    def inside(self, *command, options=()):
        """Run a command in a new container."""
        name = self("from", "dist_amp", stderr=subprocess.DEVNULL).stdout.strip()
        try:
            return self("run", *ISOLATION, *options, name, "--", *command)
        finally:
            self("rm", name)


@pytest.fixture
def engine():
    made = Engine(Path(tempfile.mkdtemp(prefix="image")))
    try:
        make_base(made)
        make_context(made)
        built = made.build("localhost/base")
        assert built.returncode == 0, built.stdout[-3000:]
        yield made
    finally:
        made("rm", "--all")
        made("rmi", "--all", "--force")
        shutil.rmtree(made.folder)


def make_base(engine):
    """This machine's release of Debian, with Python, and with a user 1000 as Ubuntu has one."""
    folder = engine.folder / "base"
    folder.mkdir()
    release = Path("/etc/os-release").read_text()
    codename = re.search(r"^VERSION_CODENAME=(\w+)", release, re.M).group(1)
    sources = [Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")]
    source = next(path for path in sources if path.exists())
    wanted = "--include=python3-venv,ca-certificates"
    made = run("mmdebstrap", "--variant=minbase", wanted, codename, folder / "base.tar", source)
    assert made.returncode == 0, made.stdout
    dockerfile = "FROM scratch\nADD base.tar /\nRUN useradd --uid 1000 --create-home ubuntu\n"
    (folder / "Dockerfile").write_text(dockerfile)
    assert engine("build", *ISOLATION, "--tag", "base", folder).returncode == 0


def make_context(engine):
    """A copy of the project, with what a folder gathers and .dockerignore should leave out."""
    names = (".git", ".venv*", "runs", "__pycache__", ".*_cache", "*.egg-info")
    shutil.copytree(ROOT, engine.context, ignore=shutil.ignore_patterns(*names))
    gathered = ".venv/bin/python runs/old/summary.json .env dist_amp/__pycache__/step.pyc .git/HEAD"
    for name in [*gathered.split(), "uv.lock"]:
        path = engine.context / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not for an image")


# ---- the files ----


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "hadolint Dockerfile",
        "check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml",
    ],
)
def test_a_linter_has_nothing_to_say(words):
    name, *arguments = words.split()
    path = Path(sys.executable).with_name(name)  # where the extra `engines` puts it
    if not path.exists():
        pytest.skip(f"needs {name}: bash tests/engines.sh installs it")
    linted = run(path, *arguments, cwd=ROOT)
    assert linted.returncode == 0, linted.stdout


def test_compose_ports_are_local_its_services_share_one_image_and_a_run_may_save():
    services = COMPOSE["services"]
    train = services["train"]
    assert train["environment"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "110"
    assert train["stop_grace_period"] == "2m"
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert {service["image"] for service in services.values()} == {"dist_amp"}
    assert all(service["volumes"][0].startswith("runs:/app/runs") for service in services.values())


def test_the_base_is_pinned_and_the_dev_container_is_the_image_with_this_folder_as_its_user():
    dockerfile = (ROOT / "Dockerfile").read_text()
    (base,) = re.findall(r"^ARG BASE=(.*)$", dockerfile, re.M)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    text = (ROOT / ".devcontainer/devcontainer.json").read_text()
    settings = json.loads(re.sub(r"^ *//.*$", "", text, flags=re.M))
    built = ROOT / ".devcontainer" / settings["build"]["dockerfile"]
    assert built.resolve().samefile(ROOT / "Dockerfile")
    assert f"WORKDIR {settings['workspaceFolder']}\n" in dockerfile
    assert f"--create-home {settings['remoteUser']};" in dockerfile


# ---- the image ----


@pytest.mark.engine
@pytest.mark.slow
@needs_an_engine
def test_the_image_holds_the_project_and_nothing_of_this_machine_and_two_ranks_train_inside(
    engine, tmp_path
):
    shown = (
        "id -u; stat -c %u runs; command -v ip; command -v gcc; command -v numactl; ldconfig -p | "
        "grep -c -E 'lib(ibverbs|rdmacm|mlx5)'; ls -A . runs; find . -name __pycache__; cat "
        "/etc/pip.conf"
    )
    listed = engine.inside("sh", "-c", shown).stdout
    user, owner, ip, compiler, numactl, rdma, *names = listed.splitlines()
    assert (user, owner) == ("1000", "1000")
    assert ip.endswith("/ip"), "launch/many_nodes.sh needs it"
    assert compiler.endswith("/gcc"), "Triton needs it"
    assert numactl.endswith("/numactl"), "torchrun needs it to bind ranks"
    assert int(rdma) >= 3, "NCCL loads them for InfiniBand and RoCE"
    assert {"dist_amp", "launch", "tests", "configs", "runs"} <= set(names)
    assert not {".venv", ".git", ".env", "old", "./dist_amp/__pycache__", "uv.lock"} & set(names)
    assert "[global]" not in names, "pip's settings were lent, not kept"

    os.chown(tmp_path, 1000, 1000)  # a volume that belongs to the image's user
    words = "--train.steps 4 --eval.batches 1 --metrics.log_every 1".split()
    command = COMPOSE["services"]["train"]["command"]
    done = engine.inside(*command, *words, options=["--volume", f"{tmp_path}:/app/runs"])
    assert done.returncode == 0, done.stdout[-3000:]
    path = tmp_path / "demo/summary.json"
    summary = json.loads(path.read_text())
    assert (summary["stopped_by"], summary["world_size"], summary["steps"]) == ("completed", 2, 4)
    assert path.stat().st_uid == 1000
