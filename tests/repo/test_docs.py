"""What the documentation names exists: settings, files, tests, links; and its commands run.

Of commands that can't run here, the programs, files and options exist.
"""

import ast
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, TESTS
from forked import Forked, finish
from torch.distributed.run import get_args_parser

from benchmarks.__main__ import main as benchmarks
from dist_amp.commands.__main__ import COMMANDS, WITH_SETTINGS, check_early
from dist_amp.config.load import load_config
from dist_amp.config.text import flat, to_toml
from dist_amp.step import train_step

README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *DOCS]
FILES = [*sorted((ROOT / "configs").glob("*.toml")), *sorted((ROOT / "launch").iterdir())]
PROGRAMS = {
    *("python", "python3", "torchrun", "dist_amp", "bash", "source", "pip", "(ulimit"),
    *("sbatch", "scancel", "scontrol", "kubectl", "docker", "ray", "ssh", "taskset"),
    *(".ci/run", ".venv/bin/ruff", ".venv/bin/pip", ".venv/bin/mkdocs"),
    *("wandb", "trackio"),
}

# A command that matches is not run, for this reason; its programs, files and options are checked.
# A test that covers it is named where there is one.
NEEDS = {
    r".*\.\.\.": "what the three dots stand for",
    r"(sbatch|scancel|scontrol) ": "Slurm: tests/repo/test_launch.py",
    r"kubectl ": "a Kubernetes cluster: tests/repo/test_kubernetes.py",
    r"docker ": "docker: tests/repo/test_container.py",
    r"ray start|python launch/ray_train\.py": "Ray: tests/slow/test_ray.py",
    r"torchrun --nproc_per_node=2 my_script\.py": "a script of yours: tests/repo/test_readme.py",
    r"NNODES=2 ": "several machines: tests/repo/test_launch.py",
    r"dist_amp launch --nnodes (2|1:4)": "several machines: tests/features/test_launch_command.py",
    r"python -m benchmarks (gpu|overhead$|amp$|amp --out benchmarks|amp --reduced$)": "a GPU, or "
    "minutes: tests/repo/test_benchmarks.py",
    r"ssh ": "another machine",
    r"(\.venv/bin/)?pip install|.*bash tests/engines\.sh|.* --data\.name user/": "the network",
    r".* '?s3://": "an object store: tests/features/test_sources_s3.py",
    r"python -m dist_amp\.follow|wandb |trackio ": "tests/features/test_follow_trackers.py",
    r"\.venv/bin/mkdocs": "mkdocs: tests/slow/test_site.py",
    r"taskset ": "the number of a process",
    r"(bash )?\.ci/run": "hours: it runs all tests",
    r"\(ulimit": "memory that runs out: tests/features/test_explain.py",
    r"dist_amp (update|adopt muon( --remove ema)?)$": "a project in git: tests/repo/test_update.py",
}


# ---- where commands stand ----


def commands_in(page: Path) -> Iterator[tuple[str, ...]]:
    """The commands of each block of a page, and each that stands in a sentence or table."""
    fence = r"(?ms)^ *```(\w*)\n(.*?)^ *```"
    for language, block in re.findall(fence, page.read_text()):
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        if language == "console":
            yield tuple(without_comment(line[2:]) for line in lines if line.startswith("$ "))
        elif language in ("", "bash"):
            yield tuple(without_comment(line) for line in lines if line.strip())
    for code in re.findall(r"`([^`]+)`", re.sub(fence, "", page.read_text())):
        command = " ".join(code.split())
        if is_command(command) and (" " in command or command == ".ci/run"):
            yield (command,)


def commands_in_header(path: Path) -> Iterator[tuple[str]]:
    """The comment lines, at a file's start, that begin with a program."""
    header = re.match(r"(?:#.*\n)*", path.read_text())
    for line in re.findall(r"(?m)^#\s+(\S.*)$", header[0] if header else ""):
        if is_command(line):
            yield (without_comment(line),)


def blocks() -> dict[tuple[str, ...], str]:
    """{commands to run from top to bottom: the page that has them first}: each once."""
    found: dict[tuple[str, ...], str] = {}
    for paths, read in ((PAGES, commands_in), (FILES, commands_in_header)):
        for path in paths:
            for commands in read(path):
                found.setdefault(commands, path.relative_to(ROOT).as_posix())
    longer = [commands for commands in found if len(commands) > 1]
    return {
        commands: page
        for commands, page in found.items()
        if len(commands) > 1 or not any(commands[0] in block for block in longer)
    }


def is_command(line: str) -> bool:
    return re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line).split(" ")[0] in PROGRAMS


def without_comment(line: str) -> str:
    return re.sub(r"\s+#\s.*", "", line.strip())


def is_run(command: str) -> bool:
    return not any(re.match(pattern, command) for pattern in NEEDS)


# ---- how they are run ----

# What stands in for the reader's own things, for eight GPUs and for a port that is free.
STAND_INS = {
    "Qwen/Qwen2.5-0.5B-Instruct": "model",
    "MODEL": "model",
    "my_file:MyTask": "my_file:TinyRegression",
    "--step N": "--step 2",
    "-k NAME": "-k accumulation",
    "--check tokens": "--check other",
    " ARGS": "",
    "torchrun ": "torchrun --standalone --local-addr 127.0.0.1 ",
    "--nproc_per_node=8": "--nproc_per_node=2",
}
RUNS = "RUN A B RUN_A RUN_B runs/a runs/b runs/20260131T093000Z-1f6b2c".split()

# Words added to the commands that match, for less work; of equal options the last one counts.
TRAINS = r".*(dist_amp[. ](train|launch|demo)\b(?!.*--help| -m)|launch/(demo|one_node)\.sh)"
OTHER_TASK = "my_file|hf_finetune|images|examples/"
SMALL_GPT = "--task.args.width 32 --task.args.layers 1 --task.args.heads 2 --task.args.context 32"
LESS_WORK = {
    TRAINS: "--train.steps 4 --train.micro_batch_size 2 --eval.batches 1",
    rf"(?!.*({OTHER_TASK})){TRAINS}": f"{SMALL_GPT} --task.args.sample_bytes 8",
    # Python's own source takes four seconds to read.
    rf"(?!.*({OTHER_TASK}|data\.path))python -m dist_amp\.(train|plan)": "--data.path corpus",
    r".*--config gpt_124m$": "--train.global_batch_size auto",
    r".*gan\.py": "--train.steps 4",
    r"python -m dist_amp\.plan .*gpt_124m": f"{SMALL_GPT} --train.global_batch_size auto",
    r".*-m dist_amp\.verify .*": "--world_sizes 1 --precisions fp32",
    r".*-m dist_amp\.verify --bit_exact": "--world_sizes 1,2",
    r"(\w+=\d+ )?bash launch/test\.sh": "--collect-only -q",
    r"(dist_amp new|python -m dist_amp\.(sample|tokenize|verify))$": "--help",
    r"python -m benchmarks amp ": "--smoke",
    r"python -m benchmarks overhead ": "--rounds 6",
    r"python -m benchmarks pretrained": "--layers 1",
    r"python -m benchmarks packing": "--documents 1000",
    r".*benchmarks[. ](data|activations|checkpoint|collectives|bit_exact|tripwires)": SMALL_GPT,
    r"python -m benchmarks activations": "--task.args.layers 2",  # it recomputes every second block
    r".*benchmarks\.(bit_exact|tripwires)": "--train.steps 4 --train.global_batch_size 16 "
    "--train.micro_batch_size 2",
}

# Tests of these take 1 s; a block with any other command is a slow test.
QUICK = re.compile(
    r"dist_amp (plan|replay|diff|runs|plot|report|train --help)|dist_amp new$"
    r"|python -m dist_amp\.(train|plan|sample|export|tokenize)|python -m benchmarks( packing)?$"
    r"|source "
)
HUGGING_FACE = re.compile("hf_finetune|my_tokenizer")


def small(command: str) -> str:
    """The command with the stand-ins, and with less work."""
    added = [words for pattern, words in LESS_WORK.items() if re.match(pattern, command)]
    for theirs, ours in STAND_INS.items():
        command = command.replace(theirs, ours)
    return " ".join([command, *added])


BLOCKS = blocks()
EVERY_COMMAND = sorted({command for commands in BLOCKS for command in commands})
SETTINGS_ALONE = re.compile(
    r"-m dist_amp\.train|gan\.py|launch/(?:demo|one_node|many_nodes)\.sh|slurm\.sbatch"
    r"|-m benchmarks\.\w+|-m benchmarks (?:data|activations)"
)
# `dist_amp ...`, `python -m dist_amp.NAME ...` or `python -m benchmarks ...`, and no shell syntax.
OF_THIS_PACKAGE = re.compile(r"(?:python -m )?(dist_amp[ .]|benchmarks(?= |$))([^&;|>()]*)$")
NOT_COPIED = shutil.ignore_patterns(
    "__pycache__", ".git", ".venv*", ".*_cache", "runs", "build", "dist_amp"
)


# ---- every command


def test_the_tables_name_no_command_and_no_test_that_is_gone():
    for table in (NEEDS, LESS_WORK):
        for pattern in table:
            assert any(re.match(pattern, command) for command in EVERY_COMMAND), pattern
    for word in (*STAND_INS, *RUNS):
        assert any(word in command for command in EVERY_COMMAND), word
    for path in re.findall(r"tests/[\w/]+\.py", " ".join(NEEDS.values())):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_a_command_parses_and_its_files_options_and_settings_exist(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    command = command.rstrip(")").replace("my_file:TinyRegression", "tiny:Tiny")
    command = command.replace("my_file:MyTask", "tiny:Tiny").replace("C.toml", "configs/demo.toml")
    words = [word for word in shlex.split(command) if word not in ("...", "ARGS")]
    options = {word.partition("=")[0] for word in words if re.match(r"--\w[\w-]*(=|$)", word)}
    options.discard("--config")
    while re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    assert words[0] in PROGRAMS, f"{words[0]}: add it to PROGRAMS, or label the block as `text`"
    if match := re.match(r"(?:dist_amp |python -m dist_amp\.)(\w+)", command):
        name = match[1]
        arguments = shlex.split(command[match.end() :])
        assert name in COMMANDS
        if name in WITH_SETTINGS:
            check_early(arguments, has_options=name != "train")
    for word in words:
        if re.match(r"(?:launch|configs|tests)/[\w./]+$", word):
            assert (ROOT / word).exists(), word
    if match := SETTINGS_ALONE.search(command):
        settings = shlex.split(command[match.end() :])
        load_config([word for word in settings if word not in ("...", "ARGS")], environ={})
    if words[0] == "torchrun":
        get_args_parser().parse_args(words[1:] if len(words) > 1 else [])
    if words[:3] == ["python", "-m", "benchmarks"] and len(words) > 3:
        assert benchmarks([words[3], "--help"]) == 0
        told = capsys.readouterr().out
        assert [option for option in options if option not in told] == []
    if words[1:2] == ["launch/ray_train.py"]:
        text = (ROOT / "launch/ray_train.py").read_text()
        assert [option for option in options if f'"{option}"' not in text] == []


def test_each_config_is_run_by_a_command_and_is_what_its_name_says():
    for name in {path.stem for path in FILES if path.suffix == ".toml"} - {"reference"}:
        pattern = rf".*--config (configs/)?{name}\b"
        assert any(re.match(pattern, each) for each in EVERY_COMMAND if is_run(each)), name
        config = load_config(["--config", name], environ={})
        if name.endswith(("_bf16", "_fp16")):
            assert f"{config.parallel.strategy}_{config.precision.dtype}" == name


# ---- those that can run here


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the clone, with the files and runs of a reader who has followed the pages."""
    folder = tmp_path_factory.mktemp("docs") / "clone"
    shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
    for name, path in {".venv": sys.prefix, "dist_amp": ROOT / "dist_amp"}.items():
        (folder / name).symlink_to(path)
    (folder / "my_file.py").write_text(code_with("class TinyRegression", "README.md"))
    (folder / "gan.py").write_text(code_with("def train(world", "docs/own_loop.md"))
    (folder / "C.toml").write_text("[train]\nsteps = 4\n")
    for name in ("corpus", "rows"):
        (folder / name).mkdir()
        line = '{"text": "%s"}\n' % ("some words, " * 40)
        (folder / name / "a.jsonl").write_text(99 * line)
    subprocess.run(["gzip", "--keep", "a.jsonl"], cwd=folder / "corpus", check=True)
    run("python -m dist_amp.tokenize --data.path rows --data.tokenizer bytes --out other", folder)
    pictures(folder / "pets")
    run(small("python -m dist_amp.train") + " --checkpoint.every 1 --run.dir made", folder)
    for name in RUNS:
        shutil.copytree(folder / "made", folder / name)
    return folder


def code_with(text, page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return next(block for block in blocks if text in block)


def pictures(folder):
    from PIL import Image

    for pet in ("cat", "dog"):
        (folder / pet).mkdir(parents=True)
        for number in range(40):
            picture = Image.new("RGB", (80, 70), (number, 5 * number, 99))
            picture.save(folder / pet / f"{number}.png")


def add_hugging_face(folder):
    import tiny_hf

    tiny_hf.make_model(folder / "model")
    for name in ("model", "my_tokenizer"):
        tiny_hf.make_tokenizer(folder / name)
    tiny_hf.write_rows(folder / "chats.jsonl", tiny_hf.chats())
    pair = {"prompt": "1, 2,", "chosen": " 3", "rejected": " 4"}
    tiny_hf.write_rows(folder / "pairs.jsonl", 40 * [pair])


def run(command, folder):
    """Run a command line in a folder; those of this package in a fork (see forked.py)."""
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    environ |= {"DIST_AMP_PYTHON": sys.executable}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    if match := OF_THIS_PACKAGE.match(command):
        ours = "benchmarks" if match[1] == "benchmarks" else "dist_amp.commands"
        done = finish(Forked(shlex.split(match[2]), folder, environ, f"{ours}.__main__"), 600)
    else:
        shell = ["bash", "-c", command]
        done = subprocess.run(shell, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def blocks_to_run():
    """Blocks of which a command is run, as parameters; the long ones are slow tests."""
    for commands, page in BLOCKS.items():
        if to_run := tuple(filter(is_run, commands)):
            quick = all(QUICK.match(each) and not HUGGING_FACE.search(each) for each in to_run)
            marks = [] if quick else [pytest.mark.slow]
            yield pytest.param(to_run, marks=marks, id=f"{page}: {commands[0]}")


@pytest.mark.parametrize("commands", list(blocks_to_run()))
def test_the_commands_of_a_block_run_from_top_to_bottom(commands, clone, tmp_path):
    folder = shutil.copytree(clone, tmp_path / "clone", symlinks=True)
    if HUGGING_FACE.search(" ".join(commands)):
        add_hugging_face(folder)
    for command in commands:
        run(small(command), folder)


# ---- what the pages name ----

PATHS = r"(?<![\w/.])(?:configs|launch|dist_amp|tests|docs|benchmarks)/[\w./]*\w"
MADE_BY_COMMANDS = {"tests/bad_inputs.md"}
TEXT_OF_TESTS = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
NOT_SETTINGS = {"metrics.jsonl", "parallel.model", "run.metrics.best", "run.schedule.factor"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_fences(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_fences(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_lines(source):
    """A function's statements, one normalised line each: without docstring and annotations."""
    function = ast.parse(source).body[0]
    function.returns = None
    for argument in function.args.args:
        argument.annotation = None
    if ast.get_docstring(function) is not None:
        del function.body[0]
    return ast.unparse(function).splitlines()


def test_the_readme_and_the_screenshot_are_small_and_the_readme_lists_every_page():
    assert len(README.read_text().splitlines()) <= 150
    assert 0 < (ROOT / "docs/images/tensorboard.png").stat().st_size < 150_000
    text = README.read_text()
    assert [page.name for page in DOCS if f"(docs/{page.name})" not in text] == []


def test_the_readmes_training_step_is_the_real_one():
    text = README.read_text()
    (shown,) = re.findall(r"<!-- step\.py: train_step -->\n```py\n(.*?)```", text, re.DOTALL)
    assert code_lines(shown) == code_lines(inspect.getsource(train_step))


@pages
def test_every_relative_link_leads_to_a_file_and_a_heading_that_exist(page):
    links = re.findall(r"\]\((?!\w+:)([^)#]*)(?:#([^)]+))?\)", without_fences(page))
    for path, anchor in links:
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pages
def test_every_setting_path_and_test_that_a_page_names_exists(page):
    text = page.read_text()
    keys = flat(to_toml(load_config([], environ={})))
    sections = {key.partition(".")[0] for key in keys}
    named = re.findall(r"--([a-z_]+\.[a-z_.]*[a-z_])", text)
    named += re.findall(r"`([a-z_]+\.[a-z_.]*[a-z_])(?:=[^`]*| = [^`]*)?`", text)
    for key in named:
        is_key = key.partition(".")[0] in sections and not key.endswith((".py", ".toml", ".sh"))
        if is_key and key not in NOT_SETTINGS:
            assert key in keys or key.startswith(("task.args", "data.sources")), key
    for path in re.findall(PATHS, text):
        assert (ROOT / path).exists() or path in MADE_BY_COMMANDS, path
    for word in re.findall(r"launch/test\.sh (?:-m slow )?-k ([a-z]\w+)", text):
        assert re.search(rf"def test_\w*{word}", TEXT_OF_TESTS), word


def test_the_architecture_page_lists_every_folder_and_top_file():
    text = (ROOT / "docs/architecture.md").read_text()
    package = ROOT / "dist_amp"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)) == folders
    listed = set(re.findall(r"`(\w+\.py)`", text))
    assert {path.name for path in package.glob("*.py")} - listed == {"__init__.py"}


def test_sentences_of_the_docs_have_at_most_30_words():
    for page in PAGES:
        text = re.sub(r"```.*?```|\]\([^)]*\)", " ", page.read_text(), flags=re.DOTALL)
        sentences = re.split(r"\n\s*\n|\n(?=[-*|#])|\||(?<=[.!?:;])\s", text)
        assert [words for words in sentences if len(words.split()) > 30] == [], page.name


def test_names_in_the_package_are_nouns_and_verbs():
    vague = {"others", "theirs", "ours", "given", "taken", "wanted", "said", "one"}
    for path in (ROOT / "dist_amp").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        assert not vague & {getattr(node, "id", getattr(node, "arg", "")) for node in nodes}, path
