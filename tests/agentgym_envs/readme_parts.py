"""What the README of an environment shows: an episode, and how simple players do."""

import re


def replay(text, env, tasks):
    """Play the README's episode again, of the task that it names or else of the first; the info of its last step.

    A line `...` stands for lines that the README leaves out.
    """
    name, _, transcript = re.search(
        r"^An episode of the (?:task `(\S+)`|first test task):\n\n(````?)text\n(.*?)\n\2$", text, re.DOTALL | re.M
    ).groups()
    task = next(task for task in tasks if name in (None, task.id))
    opening, *parts = re.split(r"^((?:agent>.*\n)+)", transcript, flags=re.M)
    parts[-1], end = parts[-1].split("\nend> ")
    assert_shown(opening.rstrip("\n"), env.reset(options={"task": task})[0])
    total = 0.0
    for reply, expected in zip(parts[::2], parts[1::2], strict=True):
        action = "\n".join(line.removeprefix("agent>").removeprefix(" ") for line in reply.splitlines())
        observation, reward, terminated, _, info = env.step(action)
        assert_shown(expected.rstrip("\n"), observation)
        total += reward
    env.close()
    assert terminated
    assert end == f"terminated, reward {total:g}, success {info['success']}"
    return info


def assert_shown(expected, observation):
    (message,) = observation
    kept = [re.escape(part) for part in re.split(r"^\.\.\.$", expected, flags=re.M)]
    assert message["role"] == "user"
    assert re.fullmatch(".*".join(kept), message["content"], re.DOTALL), f"{message['content']}\nis not\n{expected}"


def players(text):
    """(player, success in percent, mean turns) of each simple player that the README lists."""
    return re.findall(r"\b(expert|null|random) ([\d.]+)%, ([\d.]+)(?=[;.])", " ".join(text.split()))
