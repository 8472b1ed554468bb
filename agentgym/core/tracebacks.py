"""An exception's message and place: the innermost line of the user's own code, and the traceback as text."""

import sysconfig
import traceback
from pathlib import Path

MOST_FRAMES = 30
LONGEST_TRACEBACK = 10_000
_LIBRARY = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_HERE = str(Path(__file__).resolve().parents[1])


def place_of(error: BaseException, folder: str = "") -> str:
    """The innermost line of the user's own code: "my_env.py:12 in step".

    With a folder, its files are the user's, and without a line of them the innermost of all counts. Without, all files but Python's
    and this package's are, installed packages last; "" if there is no such line.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if folder:
        found = [each for each in frames if _is_below(each[0].co_filename, folder)] or frames
    else:
        outer = [each for each in frames if not _is_installed(each[0].co_filename, (*_LIBRARY, _HERE))]
        found = [each for each in outer if "site-packages" not in each[0].co_filename] or outer
    if not found:
        return "nowhere" if folder else ""
    code, line = found[-1]
    return f"{Path(code.co_filename).name}:{line} in {code.co_name}"


def text_of_error(error: BaseException) -> str:
    """`str(error)`, where somebody's `__str__` lets it be had."""
    try:
        return str(error)
    except Exception as another:
        return f"<its __str__ raises {type(another).__name__}>"


def traceback_of(error: BaseException) -> str:
    """The traceback as Python prints it, from the first line outside this package; the end of a long one."""
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename.startswith(f"{_HERE}/"):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace, limit=-MOST_FRAMES))
    return text if len(text) <= LONGEST_TRACEBACK else f"...\n{text[-LONGEST_TRACEBACK:]}"


def _is_installed(file: str, folders: tuple[str, ...]) -> bool:
    # Other installed packages count as the user's: site-packages lies in the library's folder.
    own = [folder for folder in folders if file.startswith(f"{folder}/")]
    return file.startswith("<frozen") or _HERE in own or bool(own and "site-packages" not in file)


def _is_below(file: str, folder: str) -> bool:
    path = Path(file).resolve()
    return path.is_relative_to(folder) and "site-packages" not in path.relative_to(folder).parts
