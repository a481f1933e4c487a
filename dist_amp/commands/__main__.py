"""dist_amp COMMAND ...: the same as python -m dist_amp.COMMAND."""

import runpy
import sys

from dist_amp.config.suggest import nearest_name
from dist_amp.runtime.process import quiet_on_closed_pipe

COMMANDS = {
    "train": "train a task, on one process or under torchrun",
    "verify": "prove on your task and machine that every way of running computes the same step",
    "export": "write a checkpoint's model as one safetensors file",
    "sample": "show what a trained model makes",
    "bench": "measure what things cost: overhead, amp, gpu, collectives, checkpoint, tripwires",
}


def main() -> int:
    """The command; returns the exit status."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        with quiet_on_closed_pipe():
            print("usage: dist_amp COMMAND [ARGUMENTS]   (or python -m dist_amp.COMMAND)\n")
            print("\n".join(f"  {command:<{width}}  {what}" for command, what in COMMANDS.items()))
            print("\ndist_amp COMMAND --help lists a command's arguments.")
        return 0
    if name not in COMMANDS:
        near = nearest_name(name, COMMANDS)
        hint = f"did you mean {near}?" if near else f"the commands are {', '.join(COMMANDS)}"
        print(f"error: there is no command {name}; {hint}", file=sys.stderr)
        return 64
    sys.argv = [f"dist_amp {name}", *rest]
    runpy.run_module(f"dist_amp.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
