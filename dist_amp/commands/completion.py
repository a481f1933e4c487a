"""dist_amp --completion bash|zsh|fish: the script by which a shell completes commands and settings.

Docs: docs/configuration.md
"""

import shlex
from collections.abc import Collection, Mapping

from dist_amp.config.help import OPTIONS, described, json_schema
from dist_amp.config.load import DEFAULT_TASK
from dist_amp.config.suggestions import choices_of
from dist_amp.config.task_class import find_task
from dist_amp.files import present
from dist_amp.settings import TaskConfig

BASH = """\
_dist_amp() {{
    local word=$2 before=${{COMP_WORDS[COMP_CWORD-1]}}
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case " {with_settings} " in *" ${{COMP_WORDS[1]}} "*) ;; *) return ;; esac
    case $word in -*)
        COMPREPLY=($(compgen -W "{options}" -- "$word"))
        return
    esac
    case $before in
{choices}
        *) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}}
complete -o filenames -F _dist_amp dist_amp"""
ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"


def script(commands: Mapping[str, str], with_settings: Collection[str], shell: str) -> str:
    """The script of a shell. commands: {name: its meaning}; with_settings: those that take them."""
    task = find_task(TaskConfig.target) if present(DEFAULT_TASK) else None
    settings = described(json_schema(task), [])
    choices: dict[str, list[str]] = {}
    for key, about in settings.items():
        for part in about.get("anyOf", [about]):
            found = ["true", "false"] if part.get("type") == "boolean" else choices_of(part)
            choices[key] = [*choices.get(key, []), *found]
    options = [option.split()[0] for option in OPTIONS if option.startswith("--")]
    if shell == "fish":
        lines = [
            f"complete -c dist_amp -n __fish_use_subcommand -f -a {name} -d {shlex.quote(meaning)}"
            for name, meaning in commands.items()
        ]
        seen = f"'__fish_seen_subcommand_from {' '.join(with_settings)}'"
        lines += [f"complete -c dist_amp -n {seen} -r -l {option[2:]}" for option in options]
        for key, about in settings.items():
            meaning = about.get("description", "")
            values = f" -f -a '{' '.join(choices[key])}'" if choices[key] else ""
            known = f"complete -c dist_amp -n {seen} -r -l {key} -d {shlex.quote(meaning)}"
            lines.append(known + values)
        return "\n".join(lines)
    cases = [
        f'        --{key}) COMPREPLY=($(compgen -W "{" ".join(values)}" -- "$word")) ;;'
        for key, values in choices.items()
        if values
    ]
    text = BASH.format(
        commands=" ".join(commands),
        with_settings=" ".join(with_settings),
        options=" ".join([*options, "--help", *(f"--{key}" for key in settings)]),
        choices="\n".join(cases),
    )
    return ZSH + text if shell == "zsh" else text
