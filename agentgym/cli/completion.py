"""The command `agentgym completion`: scripts for shells, which ask this command what comes next."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys

from agentgym.cli.output import print_json
from agentgym.core.usage_error import UsageError

BASH = r"""# agentgym's completion for bash: eval "$(agentgym completion bash)", in ~/.bashrc
_agentgym() {
    local word
    COMPREPLY=()
    while IFS= read -r word; do
        COMPREPLY+=("$word")
    done < <(printf '%s' "${COMP_LINE:0:COMP_POINT}" |
        AGENTGYM_WORDBREAKS="$COMP_WORDBREAKS" "${COMP_WORDS[0]}" completion --line 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[/:=] ]]; then
        compopt -o nospace 2>/dev/null || return 0  # an old bash has none
    fi
}
complete -F _agentgym agentgym
"""
ZSH = r"""#compdef agentgym
# agentgym's completion for zsh: eval "$(agentgym completion zsh)", after compinit in ~/.zshrc; or a file _agentgym in $fpath
_agentgym() {
    local line word
    local -a closed closed_told open open_told
    while IFS= read -r line; do
        word=${line%%$'\t'*}
        if [[ $word == *[/:=] ]]; then
            open+=("$word")
            open_told+=("${line/$'\t'/  -- }")
        else
            closed+=("$word")
            closed_told+=("${line/$'\t'/  -- }")
        fi
    done < <(printf '%s\n' "${(@Q)words[1,CURRENT-1]}" "${(Q)PREFIX}" | "${(Q)words[1]}" completion --words 2>/dev/null)
    (( $#closed )) && compadd -l -d closed_told -a closed
    (( $#open )) && compadd -l -S '' -d open_told -a open
    return $(( $#closed + $#open == 0 ))
}
if [[ $funcstack[1] == _agentgym ]]; then
    _agentgym "$@"
else
    compdef _agentgym agentgym
fi
"""
FISH = r"""# agentgym's completion for fish: agentgym completion fish > ~/.config/fish/completions/agentgym.fish
function __agentgym_next
    set -l before (commandline -opc)
    printf '%s\n' $before (commandline -ct | string collect --allow-empty) | $before[1] completion --words 2>/dev/null
end
complete -c agentgym -f -a '(__agentgym_next)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
_ABOUT = 70  # characters of a description


def add(commands: argparse._SubParsersAction) -> None:
    """Add `agentgym completion`."""
    completion = commands.add_parser(
        "completion",
        help="a script that makes a shell complete commands, options, environments and runs",
        epilog='for example: eval "$(agentgym completion bash)"',
    )
    completion.add_argument("shell", nargs="?", choices=tuple(SCRIPTS), metavar="SHELL", help=", ".join(SCRIPTS))
    completion.add_argument("--json", action="store_true", help="the script as JSON")
    # What the scripts ask, with the command line on standard input: its words, one a line; or its text, which bash has.
    completion.add_argument("--words", dest="by_words", action="store_true", help=argparse.SUPPRESS)
    completion.add_argument("--line", dest="by_line", action="store_true", help=argparse.SUPPRESS)
    completion.set_defaults(run=_completion)


def _completion(args: argparse.Namespace) -> int:
    if args.by_words:
        _answer_words(sys.stdin.read().removesuffix("\n").split("\n"))
    elif args.by_line:
        _answer_line(sys.stdin.read(), os.environ.get("AGENTGYM_WORDBREAKS", ""))
    elif args.shell is None:
        raise UsageError(f"name a shell: {', '.join(SCRIPTS)}")
    elif args.json:
        print_json({"shell": args.shell, "script": SCRIPTS[args.shell]})
    else:
        print(SCRIPTS[args.shell], end="")
    return 0


def _answer_words(words: list[str]) -> None:
    """Print the candidates, each with a tab and what it is. The first word is the program's name."""
    from agentgym.cli import parser
    from agentgym.cli.candidates import candidates

    for candidate in candidates(parser(words[1:-1]), words[1:]):
        about = " ".join(candidate.about.split())[:_ABOUT]
        print(f"{candidate.word}\t{about}" if about else candidate.word)


def _answer_line(line: str, breaks: str) -> None:
    """Print the candidates as bash takes them: quoted, and without what comes before its last word break."""
    from agentgym.cli import parser
    from agentgym.cli.candidates import candidates

    words = split_line(line)
    last = words[-1] if words else ""
    # bash goes on after the last of these; a blank or a quote among them is not in question inside a word.
    broken = [last.rfind(mark) + 1 for mark in breaks if mark in ":="]
    skipped = max(broken, default=0)
    for candidate in candidates(parser(words[1:-1]), words[1:]):
        print(re.sub(r"([^\w@%+=:,./~-])", r"\\\1", candidate.word[skipped:]))


def split_line(line: str) -> list[str]:
    """The words of an unfinished command line; the last is the one that is being typed, "" after a blank."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        for word in lexer:
            words.append(word)
            if set(word) <= set("|&;"):  # another command begins
                words.clear()
    except ValueError:  # a quote is still open: what it began is the last word
        words.append(lexer.token.lstrip("\"'"))
        return words
    return [*words, ""] if not line or (line[-1].isspace() and not line.endswith("\\ ")) else words
