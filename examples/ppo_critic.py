"""PPO with a critic: a second model learns what each token's episode will still earn, and GAE weighs tokens by it.

python examples/ppo_critic.py [key=value ...]

The critic begins as the policy with a new head, so its first values are noise: let it learn alone for some steps. It is of use once
`explained` is well above 0 (1 is perfect, and below 0 the mean return says more), which takes more steps than these. Unlike GRPO,
PPO needs no groups: here each task is played once.
"""

import sys

from train import TINY, steps_of, train

PPO = [
    "algorithm=ppo",  # the recipe: loss, clips, four updates a step
    "algorithm.group_size=1",
    "trainer.groups_per_step=16",
    "algorithm.advantage.gamma=1.0",
    "algorithm.advantage.lam=0.95",  # 1: returns less values, unbiased; lower: the critic counts for more
    "env.kwargs.shaping=1.0",  # rewards on the way, which a critic can tell apart
    "critic.lr=2e-3",
    "critic.alone_steps=2",
    "trainer.steps=12",
]


def main(arguments):
    folder = train(*TINY, *PPO, *arguments)
    print("step  reward  value  return  explained  policy")
    for record in steps_of(folder):
        critic, update = record["critic"], record["update"]  # no update while the critic learns alone
        policy = f"{update['clip_fraction']:.1%} of the tokens clipped" if update else "waits"
        values = f"{critic['value_mean']:5.2f}  {critic['return_mean']:6.2f}  {critic['explained_variance']:9.2f}"
        print(f"{record['step']:4}  {record['reward']:6.2f}  {values}  {policy}")


if __name__ == "__main__":
    main(sys.argv[1:])
