"""Two players who want the opposite, for runs that are other processes than the tests."""

from agentgym import PlayersEnv, Task, TaskSet


class Sides(PlayersEnv):
    """Each of two says left or right; ann is paid for left, and bob for right."""

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
        return self.opening("ann")

    def step(self, action):
        player, said = self.turn_of, self.read(action).strip()
        earned = {player: float(said == {"ann": "left", "bob": "right"}[player])}
        return self.pass_to("bob", earned) if player == "ann" else self.end(earned, success=True)

    def expert_action(self):
        return "left"

    def random_action(self, rng):
        return rng.choice(["left", "right"])
