"""For pytest: in the tests of a real GPU an assertion that fails is noted, and the test goes on.

`-p gpu_stand_in.plugin --noted FILE`: a line of JSON per failed assertion of tests/gpu/test_gpu.py,
{"test", "line": its source}. Any other error is a failure, as always.
"""

import ast
import importlib.abc
import importlib.util
import json
import sys
from pathlib import Path

MODULE = "test_gpu"
PATH = Path(__file__).parent.parent / f"gpu/{MODULE}.py"
ASSERTING = {"torch.testing.assert_close"}
_noted: list[str] = []


def pytest_addoption(parser):
    parser.addoption("--noted", type=Path, help="where failed assertions are listed")


def pytest_configure(config):
    sys.meta_path.insert(0, Finder())


def pytest_runtest_teardown(item):
    with item.config.getoption("noted").open("a") as file:
        for line in _noted:
            file.write(json.dumps({"test": item.originalname, "line": line}) + "\n")
    _noted.clear()


class Noting(ast.NodeTransformer):
    """Puts each assertion into `try: ... except AssertionError: note(its source)`."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        source = ast.unparse(ast.Assert(node.test))
        note = ast.parse(f"note({source!r})").body
        handler = ast.ExceptHandler(ast.Name("AssertionError", ast.Load()), None, note)
        return ast.copy_location(ast.Try([node], [handler], [], []), node)

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in ASSERTING:
            note = ast.parse(f"note({ast.unparse(node)!r})").body
            handler = ast.ExceptHandler(ast.Name("AssertionError", ast.Load()), None, note)
            return ast.copy_location(ast.Try([node], [handler], [], []), node)
        return node


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        return importlib.util.spec_from_file_location(name, PATH, loader=self)

    def exec_module(self, module):
        tree = ast.fix_missing_locations(Noting().visit(ast.parse(PATH.read_text())))
        module.note = _noted.append
        exec(compile(tree, PATH, "exec"), vars(module))
