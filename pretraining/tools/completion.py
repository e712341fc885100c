"""Completion of flags: eval "$(python main_training.py --completion)" in bash or zsh."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pretraining.config.declaration import OneOf, Resume, Setting, settings_of
from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig


@dataclass(frozen=True)
class CompletionConfig(TrainConfig):
    """A configuration whose flags a shell may complete."""

    # ---- Logging and profiling
    completion: Annotated[Literal["", "bash", "zsh"], Resume.FREE] = ""
    """Print what completes the flags of this script in bash or zsh, and stop: eval "$(python main_training.py
    --completion)" in ~/.bashrc or ~/.zshrc. Without a value: for the shell in $SHELL."""

    @classmethod
    def rewrite(cls, words: Sequence[str]) -> Sequence[str]:
        """See TrainConfig: the shell need not be named."""
        shell = Path(os.environ.get("SHELL", "bash")).name
        return [f"{word}={shell}" if word == "--completion" else word for word in super().rewrite(words)]

    @property
    def reads_data(self) -> bool:
        """See TrainConfig."""
        return super().reads_data and not self.completion


# The shell completes names of files where a setting has no choices. FLAGS and CHOICES are replaced.
BASH = """\
_pretraining_flags() {
    local word=${COMP_LINE:0:COMP_POINT} choices
    word=${word##* }
    [[ $COMP_LINE == *main_training.py* || $COMP_LINE == *train.sh* || $COMP_LINE == *pretrain\\ * ]] || return
    case $word in
        --*=*)
            case ${word%%=*} in
CHOICES
                *) return ;;
            esac
            COMPREPLY=($(compgen -W "$choices" -- "${word#*=}"))
            [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${COMPREPLY[@]/#/${word%%=*}=}")
            ;;
        --*)
            COMPREPLY=($(compgen -W "FLAGS" -- "$word"))
            compopt -o nospace
            ;;
    esac
}
complete -o bashdefault -o default -F _pretraining_flags python python3 bash pretrain
"""
ZSH = """\
_pretraining_flags() {
    local name choices
    [[ "$words" == *(main_training.py|train.sh|pretrain )* ]] || { _files; return }
    case $PREFIX in
        --*=*)
            name=${PREFIX%%=*}
            compset -P 1 '*='
            case $name in
CHOICES
                *) _files; return ;;
            esac
            compadd -- ${=choices}
            ;;
        --*) compadd -S '' -- FLAGS ;;
        *) _files ;;
    esac
}
(( $+functions[compdef] )) || { autoload -U compinit && compinit }
compdef _pretraining_flags python python3 bash pretrain
"""


def print_script(config: CompletionConfig) -> int | None:
    """Print the script and return 0 if the configuration asks for one."""
    if not config.completion:
        return None
    settings = settings_of(type(config)).values()
    flags = " ".join(f"--{each.name}=" for each in settings)
    choices = {each.name: shlex.quote(" ".join(choices_of(each))) for each in settings if choices_of(each)}
    rows = (f"{' ' * 16}--{name}) choices={listed} ;;" for name, listed in choices.items())
    template = BASH if config.completion == "bash" else ZSH
    print(template.replace("FLAGS", flags).replace("CHOICES", "\n".join(rows)))
    return 0


def choices_of(setting: Setting) -> list[str]:
    """Return the values of a setting that has few."""
    if isinstance(setting.constraint, OneOf):
        return [choice for choice in setting.constraint.choices if choice]
    return ["True", "False"] if setting.kind is bool else []


EXTENSION = Extension(configuration=CompletionConfig, instead=print_script)
