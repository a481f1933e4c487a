"""Twelve edits that people make to their projects, for the trial of `dist_amp update`.

Each takes the project's folder and returns the texts that must still be there after a merge.
"""

import re
import subprocess
import sys
from pathlib import Path

NAME = "my_project"
MARK = "# of this project"


def rewrite(path: Path, pattern: str, new: str) -> None:
    text, count = re.subn(pattern, new, path.read_text(), count=1, flags=re.MULTILINE)
    assert count, f"{path.name} has no {pattern}"
    path.write_text(text)


def own_task(root: Path) -> list[str]:
    """A task and a config in files of their own; it is the default."""
    (root / NAME / "tasks/mine.py").write_text(f"{MARK}: mine\nclass Mine:\n    pass\n")
    (root / "configs/mine.toml").write_text(f'{MARK}: config\n[task]\ntarget = "mine"\n')
    target = f'target: str = "{NAME}.tasks.mine:Mine"'
    rewrite(root / NAME / "settings.py", r"target: str = .*$", target)
    return [f"{MARK}: mine", f"{MARK}: config", target]


def changed_step(root: Path) -> list[str]:
    """Two lines in the step, before it clears the gradients."""
    line = f"    run.metrics.mine = 1  {MARK}: step\n"
    rewrite(root / NAME / "step.py", r"^(?=.*zero_grad\()", line)
    return [line]


def deleted_diagnostics(root: Path) -> list[str]:
    """The console's lines and two test files are deleted, and what imports them."""
    (root / NAME / "telemetry/console.py").unlink()
    (root / "tests/test_console.py").unlink()
    (root / "tests/test_clock.py").unlink()
    for path in (root / NAME).glob("*.py"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if "telemetry.console" not in line))
    return []


def renamed_setting(root: Path) -> list[str]:
    """A setting has another name, in all files."""
    for path in [*root.rglob("*.py"), *root.rglob("*.toml")]:
        path.write_text(re.sub(r"\bweight_decay\b", "decay", path.read_text()))
    return ["    decay: "]


def changed_defaults(root: Path) -> list[str]:
    rewrite(root / NAME / "settings.py", r"^    lr: (.*) = .*$", r"    lr: \1 = 0.00123")
    rewrite(root / "configs/ddp_bf16.toml", r"\Z", f"{MARK}: ddp\n")
    return [" = 0.00123", f"{MARK}: ddp"]


def hook_in_the_loop(root: Path) -> list[str]:
    line = f"            report.seen = run.step  {MARK}: loop\n"
    rewrite(root / NAME / "train.py", r"^(?=            run\.metrics\.record)", line)
    return [line]


def own_readme(root: Path) -> list[str]:
    (root / "README.md").write_text(f"# Ours\n\n{MARK}: all of it\n")
    return [f"{MARK}: all of it"]


def own_requirements(root: Path) -> list[str]:
    """Of the package: requirements, a description, and a rule of the linter."""
    pyproject = root / "pyproject.toml"
    rewrite(pyproject, r'^    "torch>', '    "einops>=0.8",\n    "torch>')
    rewrite(pyproject, r"^description = .*$", 'description = "Ours"')
    rewrite(pyproject, r'^    "B006",', '    "E741",\n    "B006",')
    return ['"einops>=0.8"', 'description = "Ours"', '"E741"']


def own_scripts(root: Path) -> list[str]:
    rewrite(root / "launch/demo.sh", r"^(?=set -euo)", f"export OURS=1 {MARK}: script\n")
    rewrite(root / "Dockerfile", r"^(?=COPY pyproject)", f"RUN true\n{MARK}: image\n")
    (root / "launch/ours.sh").write_text(f"{MARK}: cluster\n")
    return [f"{MARK}: script", f"{MARK}: image", f"{MARK}: cluster"]


def renamed_file(root: Path) -> list[str]:
    """optim.py has another name, and who imports it follows."""
    (root / NAME / "optim.py").rename(root / NAME / "optimizing.py")
    for path in root.rglob("*.py"):
        path.write_text(path.read_text().replace(f"{NAME}.optim ", f"{NAME}.optimizing "))
    return [f"from {NAME}.optimizing import"]


def another_format(root: Path) -> list[str]:
    """Two files formatted with shorter lines."""
    ruff = [sys.executable, "-m", "ruff", "format", "--quiet", "--isolated", "--line-length=88"]
    files = [root / NAME / name for name in ("train.py", "precision.py")]
    subprocess.run([*ruff, *files], check=True)
    rewrite(files[0], r"\Z", f"{MARK}: format\n")
    return [f"{MARK}: format"]


def own_metric(root: Path) -> list[str]:
    """A method and a test of ours, and another docstring."""
    method = f"\n    def mine(self) -> int:  {MARK}: metric\n        return 1\n"
    rewrite(root / NAME / "telemetry/metrics.py", r"(?=^class Metrics)", f"{MARK}: class\n")
    rewrite(root / NAME / "telemetry/writers.py", r"\Z", method)
    rewrite(root / NAME / "parallel.py", r'^"""', f'"""{MARK}: docstring. ')
    (root / "tests/test_ours.py").write_text(f"{MARK}: test\n")
    return [f"{MARK}: {what}" for what in ("metric", "class", "docstring", "test")]


EDITS = [
    own_task,
    changed_step,
    deleted_diagnostics,
    renamed_setting,
    changed_defaults,
    hook_in_the_loop,
    own_readme,
    own_requirements,
    own_scripts,
    renamed_file,
    another_format,
    own_metric,
]
