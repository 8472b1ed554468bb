"""Players who want the opposite of each other, for runs that are other processes than the tests."""

from agentgym import PlayersEnv, Task, TaskSet

WANTED = {"ann": "left", "bob": "right", "cat": "left"}


class Sides(PlayersEnv):
    """Each says left or right, in turn, and is paid for what it wants: ann left, bob right."""

    players = ("ann", "bob")
    max_turns = 2

    @classmethod
    def default_tasks(cls, split="train"):
        first = {"train": 0, "test": 1000}[split]
        return TaskSet([Task(f"{split}-{n}", seed=n) for n in range(first, first + 64)], name=f"sides/{split}")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        for name in self.players:
            self.tell(f"You are {name}. left or right?", name)
        return self.opening(self.players[0])

    def step(self, action):
        player, said = self.turn_of, self.read(action).strip()
        earned = {player: float(said == WANTED[player])}
        rest = self.players[self.players.index(player) + 1 :]
        return self.pass_to(rest[0], earned) if rest else self.end(earned, success=True)

    def expert_action(self):
        return "left"

    def random_action(self, rng):
        return rng.choice(["left", "right"])


class ThreeSides(Sides):
    """The same with cat, who wants left."""

    players = ("ann", "bob", "cat")
    max_turns = 3
