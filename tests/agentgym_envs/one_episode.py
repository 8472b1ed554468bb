"""Plays one episode by a function, for the tests of single environments."""


def play(env, task, answer):
    """Play one episode: the rewards' sum, the turns and the last info."""
    env.reset(options={"task": task})
    total, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, info = env.step(answer(env))
        total += reward
        over = terminated or truncated
    return total, env.unwrapped.turn, info
