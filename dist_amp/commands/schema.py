"""python -m dist_amp.schema > schema.json: the JSON Schema of config files, for editors.

In a config whose first line is `#:schema schema.json`, taplo and VS Code's Even Better TOML then
complete, check and explain settings. --task.target my_file:MyTask adds the arguments of your task.
Exit status: 0 done, 64 the task can't be imported.

Docs: docs/configuration.md
"""

import json
import sys
from collections.abc import Sequence

from dist_amp.config.load import collect, task_in
from dist_amp.config.schema import json_schema
from dist_amp.supervise.command_line import Parser, command


@command()
def main(argv: Sequence[str]) -> None:
    parser = Parser("python -m dist_amp.schema", __doc__)
    _, words = parser.parse_known_args(argv)
    settings = collect(words)
    task = task_in(settings) if "task.target" in settings else None  # None: any task.args are valid
    print(json.dumps(json_schema(task), indent=1))


if __name__ == "__main__":
    sys.exit(main())
