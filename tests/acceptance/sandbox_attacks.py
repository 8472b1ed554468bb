"""Programs that try to turn their own failure into an error of the sandbox; and an agent that plays them. For `--agent`."""

import itertools

from agentgym.core.messages import text_of

ATTACKS = {
    "threads that outlive their leader": """
import ctypes, threading, time
def live():
    while True:
        try:
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        except RuntimeError:
            time.sleep(0.01)
for _ in range(8):
    threading.Thread(target=live, daemon=True).start()
time.sleep(0.5)
ctypes.CDLL(None).syscall(60, 0)
""",
    "extended attributes": """
import os
open('/proc/self/oom_score_adj', 'w').write('-1000') if os.access('/proc/self/oom_score_adj', os.W_OK) else None
for n in range(100_000):
    path = f'/dev/shm/{n}'
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    os.setxattr(path, 'user.a', b'x' * 60_000)
""",
    "a folder in the way of a file": """
import os
for folder in ('/workspace', '/tmp', '/private'):
    for name in ('x.part', '.part', 'input.part', 'main.py.part', 'main.py'):
        try:
            os.mkdir(f'{folder}/{name}')
        except OSError as error:
            print(error)
""",
    "a fork bomb": """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    "a daemon that kills all new processes": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            for name in os.listdir('/proc'):
                if name.isdigit() and int(name) not in (1, os.getpid()):
                    try:
                        os.kill(int(name), 9)
                    except OSError:
                        pass
""",
    "a full disk": """
import os
for folder in ('/workspace', '/tmp', '/dev/shm'):
    try:
        with open(f'{folder}/full', 'wb', 0) as out:
            while True:
                out.write(b'x' * (1 << 20))
    except OSError as error:
        print(error)
    for n in range(1_000_000):
        try:
            os.close(os.open(f'{folder}/{n}', os.O_CREAT))
        except OSError:
            break
""",
    "kill -9 -1": "import os\nos.kill(-1, 9)",
    "a memory bomb": "kept = []\nwhile True: kept.append(bytearray(1 << 24))",
    "a memory bomb that is not to be chosen": """
import os
for pid in [name for name in os.listdir('/proc') if name.isdigit()]:
    for value in ('-1000', '0'):
        try:
            open(f'/proc/{pid}/oom_score_adj', 'w').write(value)
        except OSError:
            pass
while os.fork() >= 0:
    kept = bytearray(b'x' * (1 << 26))
""",
    "no workspace": "import os, shutil\nshutil.rmtree('/workspace', ignore_errors=True)\nos.chmod('/workspace', 0)",
    "a session that stands still": """
import os, signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
os.closerange(3, 256)
for name in os.listdir('/proc'):
    if name.isdigit():
        try:
            os.kill(int(name), signal.SIGSTOP)
        except OSError:
            pass
while True: pass
""",
}


def solutions():
    """The answers of the project's own word problems, by the end of what an agent is shown of them."""
    from agentgym_envs.math.word_problems import load_word_problems

    return {text_of(task.messages[-1]): task.answer for task in load_word_problems("test")}


class Player:
    """Right in every second task; in the others it answers wrongly, and before that attacks its sandbox where it is told to.

    Args:
        attack: whether it does.
    """

    attacks = itertools.count()

    def __init__(self, attack: bool):
        self.attack = attack
        self.replies: list[str] | None = None

    def act(self, messages, tools):
        if self.replies is None:
            known = solutions()
            question = next(q for q in known if q in text_of(messages[-1]))
            if list(known).index(question) % 2:
                self.replies = [f"#### {known[question]}"]
            else:
                programs = ["x = 1", list(ATTACKS.values())[next(self.attacks) % len(ATTACKS)], "print(x)"]
                self.replies = [f"```python\n{code}\n```" for code in programs if self.attack] + ["#### -12345"]
        return self.replies.pop(0)
