"""Players of an episode that do not learn: each is played by an agent as evaluation knows them."""

from agentgym.evaluate.agents import BUILT_IN, MakePolicy, built_in, chat, policy_maker, python


def maker_of(agent: str) -> MakePolicy:
    """The maker of the policies of an agent: expert, random or null, a model as NAME@URL, or `package.module:name`. Raises ValueError."""
    if agent in BUILT_IN:
        return policy_maker(built_in(agent))
    model, at, url = agent.rpartition("@")
    return policy_maker(chat(model, url) if at else python(agent))
