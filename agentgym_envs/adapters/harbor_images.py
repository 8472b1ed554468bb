"""The place of a Harbor task's programs: image, folder, variables, and the files that are put in at the start.

Four kinds of `environment/`, the first that fits:

packages.txt    agentgym's own image files. They stand for the Dockerfile's FROM and RUN lines; its COPY, WORKDIR and ENV hold.
docker_image    in task.toml. One of agentgym's (`agentgym/python`) is used as it is.
Dockerfile      FROM one of agentgym's, with nothing to run: that image, and the files of its COPY lines.
Dockerfile      any other: a Docker Engine builds it, and bubblewrap gets its files.

Programs of a sandbox are not root. What they work on must be theirs: files that the host puts in are, and images that are
built for a task give everyone the working folder. Such an image also tells its WORKDIR and variables, in `TOLD`.
"""

import contextlib
import io
import os
import posixpath
import re
import shlex
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from agentgym.sandbox.images.build import cache_folder, docker_tag, image_names, written_folder
from agentgym_envs.adapters.harbor_tasks import HarborTask, Unsupported

TOLD = "/etc/harbor"  # in a built image: the files workdir and env
OWN_FILES = ("packages.txt", "requirements.txt", "python-version")
_OF_ROOT = ("bin", "boot", "dev", "etc", "home", "lib", "lib64", "proc", "root", "run", "sbin", "sys", "usr", "var")
_OURS = re.compile(r"(?:docker\.io/)?agentgym/([a-z0-9-]+)(?::[\w.-]+)?")
_SAID = ("CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK")  # which change no file
_EPILOGUE = f"""
USER root
RUN mkdir -p {TOLD} && pwd > {TOLD}/workdir && env > {TOLD}/env \\
 && if [ ! -e /usr/bin/python3 ] && [ ! -e /usr/local/bin/python3 ]; then \\
 apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/*; fi \\
 && mkdir -p /workspace /private && if [ "$PWD" != / ]; then chmod -R a+rwX .; fi \\
 && for made in /logs /tests /solution; do if [ -d $made ]; then chmod -R a+rwX $made; fi; done
"""
Instruction = tuple[str, str]  # its word in capitals, and the rest of it


@dataclass
class Place:
    """The place of a task's programs.

    Attributes:
        image: as `SandboxSpec` takes it: a name or a folder.
        workdir: None: the image tells it in `TOLD`, and so the variables.
        files: (file of this machine, path in the sandbox).
    """

    image: str
    workdir: str | None
    variables: dict[str, str] = field(default_factory=dict)
    files: list[tuple[Path, str]] = field(default_factory=list)


def place_of(task: HarborTask) -> Place:
    """Unsupported, or ValueError for a malformed Dockerfile; both name it. What has to be built is not built."""
    dockerfile = task.environment / "Dockerfile"
    lines = instructions(dockerfile.read_text(encoding="utf-8")) if dockerfile.is_file() else []
    try:
        if (task.environment / "packages.txt").is_file():
            place = _applied(lines, task, _own_folder(task))
        elif task.image is not None:
            place = _published(task, task.image)
        elif lines:
            place = _without_build(lines, task) or Place(
                _to_build(task, _with_our_tags(dockerfile.read_text(encoding="utf-8"))), None
            )
        else:
            raise ValueError("environment/ has neither a Dockerfile nor a packages.txt, and task.toml no docker_image")
    except Unsupported as error:
        raise Unsupported(f"{task.folder}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{task.folder}: {error}") from error
    place.workdir = task.workdir or place.workdir
    return place


def instructions(dockerfile: str) -> list[Instruction]:
    """The instructions of a Dockerfile, continued lines joined, without comments."""
    lines = [line for line in dockerfile.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    split = ([*line.split(None, 1), ""] for line in joined.split("\n") if line.strip())
    return [(word.upper(), rest.strip()) for word, rest, *_ in split]


def archive(files: Iterable[tuple[Path, str]]) -> bytes:
    """A tar archive of files of this machine under other names; scripts can be run. Links inside of it stay links."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for file, name in files:
            member = tarfile.TarInfo(name)
            if file.is_symlink() and (not file.is_file() or not _leads_out(file, name)):
                member.type, member.linkname = tarfile.SYMTYPE, os.readlink(file)
                tar.addfile(member)
                continue
            member.size, member.mtime = file.stat().st_size, int(file.stat().st_mtime)
            member.mode = 0o755 if file.suffix == ".sh" else file.stat().st_mode & 0o755 | 0o644
            with file.open("rb") as data:
                tar.addfile(member, data)
    return made.getvalue()


def files_below(folder: Path) -> list[tuple[Path, str]]:
    """The files and links below a folder, each with its path in it."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file())
    return [(path, path.relative_to(folder).as_posix()) for path in found]


def _leads_out(link: Path, name: str) -> bool:
    """True if a link that is put at `name`, a path in a folder, leads out of that folder."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), os.readlink(link))).startswith(("/", ".."))


def _ours(image: str) -> str | None:
    match = _OURS.fullmatch(image)
    return match[1] if match and match[1] in image_names() else None


def _base(lines: Iterable[Instruction]) -> str:
    words = [rest.split() for word, rest in lines if word == "FROM"]
    if len(words) != 1:
        return ""  # several stages
    return next((word for word in words[0] if not word.startswith("--")), "")


def _without_build(lines: list[Instruction], task: HarborTask) -> Place | None:
    name = _ours(_base(lines))
    if name is None or not all(_is_plain(line) for line in lines):
        return None
    with contextlib.suppress(Unsupported):
        return _applied(lines, task, name)
    return None


def _is_plain(line: Instruction) -> bool:
    """True if an instruction needs no build: the files of COPY can be put into a sandbox as well."""
    word, rest = line
    if word == "COPY":
        return "--from" not in rest and "--chmod" not in rest and not rest.startswith("[") and "$" not in rest
    return word in ("FROM", *_SAID) or (word in ("WORKDIR", "ENV") and "$" not in rest)


def _applied(lines: Iterable[Instruction], task: HarborTask, image: str) -> Place:
    """An image with the COPY, WORKDIR and ENV lines of a Dockerfile applied."""
    workdir, place = PurePosixPath("/workspace"), Place(image, None)
    for word, rest in lines:
        asked = "COPY" if word == "ADD" and "://" not in rest else word
        if asked in ("ADD", "COPY", "WORKDIR", "ENV") and not _is_plain((asked, rest)):
            raise Unsupported(f"a Docker Engine must build it, because of {word} {rest}: leave out packages.txt")
        if asked == "COPY":
            copied = _copied(task.environment, rest, workdir)
            if problem := next(filter(None, (_misplaced(file, path) for file, path in copied)), ""):
                raise Unsupported(
                    f"a Docker Engine must build it, because {word} {rest} {problem}: leave out packages.txt"
                )
            place.files += copied
        elif word == "WORKDIR":
            workdir = PurePosixPath(posixpath.normpath(workdir / rest.strip("\"'")))
        elif word == "ENV":
            place.variables |= _variables(rest)
    place.workdir = str(workdir)
    _check_folder(task.workdir or place.workdir, "a Docker Engine must build it", "leave out packages.txt")
    return place


def _variables(rest: str) -> dict[str, str]:
    with contextlib.suppress(ValueError):  # an open quotation mark
        words = shlex.split(rest)
        if len(words) > 1 and "=" not in words[0]:
            return {words[0]: " ".join(words[1:])}
        if words:
            return dict(word.split("=", 1) for word in words)
    raise Unsupported(f"its Dockerfile has ENV {rest}".rstrip() + ", which sets no variable: write ENV NAME=VALUE")


def _check_folder(workdir: str, what: str, todo: str) -> None:
    if workdir.split("/")[1:2] and workdir.split("/")[1] in _OF_ROOT:
        raise Unsupported(f"{what}, because its working folder {workdir} is root's: {todo}")


def _misplaced(file: Path, path: str) -> str:
    """Why the host, which has the programs' rights, cannot put a file at a path; or ""."""
    top, _, below = path[1:].partition("/")
    if not below:
        return "puts a file into /"
    if top in _OF_ROOT:
        return f"puts a file into /{top}, which is root's"
    return f"copies the link {file}, which leads out of /{top}" if file.is_symlink() and _leads_out(file, below) else ""


def _copied(context: Path, rest: str, workdir: PurePosixPath) -> list[tuple[Path, str]]:
    *sources, last = (word for word in shlex.split(rest) if not word.startswith("--"))
    into, found = PurePosixPath(posixpath.normpath(workdir / last)), []
    is_folder = last.endswith("/") or into in (workdir, *workdir.parents)
    for source in sources:
        listed = [context] if source in (".", "./") else sorted(context.glob(source.lstrip("/")))
        matches = [match for match in listed if match.exists() and match.resolve().is_relative_to(context.resolve())]
        if not matches:
            raise ValueError(f"COPY {rest}: there is no {source} in {context}")
        for match in matches:
            if match.is_dir():
                below = [each for each in files_below(match) if match != context or each[1] not in _beside(context)]
                found += [(file, str(into / path)) for file, path in below]
            else:
                as_folder = is_folder or len(sources) > 1 or len(matches) > 1
                found.append((match.resolve(), str(into / match.name if as_folder else into)))
    ignored = _ignored(context)
    return [(file, name) for file, name in found if not ignored(file)]


def _beside(context: Path) -> tuple[str, ...]:
    """The files of a context that describe the image and do not go into it, unless a COPY names them."""
    own = OWN_FILES if (context / OWN_FILES[0]).is_file() else ()
    return ("Dockerfile", ".dockerignore", *own)


def _ignored(context: Path) -> Callable[[Path], bool]:
    """A test for files that Docker leaves out of a context: the last fitting pattern of `.dockerignore` decides."""
    file, rules = context / ".dockerignore", []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        pattern = line.strip().removeprefix("!").strip()
        if pattern and not line.startswith("#"):
            parts = re.split(r"(\*\*/?|\*|\?|\[[^]]*\]|\\.)", posixpath.normpath(pattern).strip("/"))
            wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
            text = "".join(wild.get(part) or (part if part[:1] in ("[", "\\") else re.escape(part)) for part in parts)
            rules.append((re.compile(f"{text}(?:/.*)?", re.DOTALL), not line.strip().startswith("!")))

    def ignored(path: Path) -> bool:
        below = os.path.relpath(path, context)
        return next((left_out for rule, left_out in reversed(rules) if rule.fullmatch(below)), False)

    return ignored


def _published(task: HarborTask, image: str) -> Place:
    """As Harbor does, `environment/` goes into the working folder where it has no Dockerfile."""
    name = _ours(image)
    if name and task.workdir:
        _check_folder(task.workdir, "it cannot be played", "give another workdir in task.toml")
    place = Place(name, "/workspace") if name else Place(_to_build(task, f"FROM {image}\n", context=False), None)
    if not (task.environment / "Dockerfile").is_file():
        place.files = files_below(task.environment)  # below the working folder
        if link := next((file for file, path in place.files if file.is_symlink() and _leads_out(file, path)), None):
            raise Unsupported(f"the link {link} leads out of environment/")
    return place


def _with_our_tags(dockerfile: str) -> str:
    """With the tags that our images have on this machine."""

    def tag(match: re.Match[str]) -> str:
        name = _ours(match[2])
        return f"{match[1]}{docker_tag(name) if name else match[2]}"

    return re.sub(r"^(\s*FROM\s+(?:--\S+\s+)*)(\S+)", tag, dockerfile, flags=re.IGNORECASE | re.MULTILINE)


def _own_folder(task: HarborTask) -> str:
    files: dict[str, Path | str] = {n: file for n in OWN_FILES if (file := task.environment / n).is_file()}
    below = files_below(task.environment / "files")
    return _folder(task, files | {f"files/{path}": file for file, path in below})


def _to_build(task: HarborTask, dockerfile: str, context: bool = True) -> str:
    kept = files_below(task.environment) if context else []
    files: dict[str, Path | str] = {path: file for file, path in kept}
    return _folder(task, files | {"Dockerfile": dockerfile.rstrip("\n") + "\n" + _EPILOGUE})


def _folder(task: HarborTask, files: Mapping[str, Path | str]) -> str:
    """The folder of an image with these files or texts, beside agentgym's images. Equal ones give the same folder."""
    name = re.sub(r"[^a-z0-9]+", "-", task.folder.name.lower()).strip("-") or "task"
    return str(written_folder(files, lambda digest: cache_folder().parent / "harbor" / f"{name}-{digest}"))
