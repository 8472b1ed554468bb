"""The environments that come with agentgym; modules are imported when an environment is made."""

_ENVS = (  # id, class, tags, needs
    ("code_mbpp", "code.mbpp:CodeMBPP", "code multi-turn tools sandbox", "sandbox:python"),
    ("code_humaneval", "code.humaneval:CodeHumanEval", "code multi-turn tools sandbox", "sandbox:python"),
    ("frozen_lake", "games.frozen_lake:FrozenLake", "game multi-turn generated", ""),
    ("sokoban", "games.sokoban:Sokoban", "game multi-turn generated", ""),
    ("wordle", "games.wordle:Wordle", "game multi-turn generated", ""),
    ("guess_number", "games.guess_number:GuessNumber", "game multi-turn generated", ""),
    ("tic_tac_toe", "games.tic_tac_toe:TicTacToe", "game multi-turn generated", ""),
    ("tic_tac_toe_self", "games.tic_tac_toe_self:TicTacToeSelf", "game multi-turn players generated", ""),
    ("reference_game", "games.reference_game:ReferenceGame", "game multi-turn players generated", ""),
    ("gsm8k", "math.gsm8k:GSM8K", "math single-turn", ""),
    ("gsm8k_tool", "math.gsm8k_tool:GSM8KTool", "math multi-turn tools", ""),
    ("gsm8k_team", "math.gsm8k_team:GSM8KTeam", "math multi-turn players", ""),
    ("gsm8k_python", "math.gsm8k_python:GSM8KPython", "math multi-turn tools sandbox", "sandbox:python"),
    (
        "math_python",
        "math.math_python:MathPython",
        "math multi-turn tools sandbox",
        "sandbox:python mpmath:agentgym-toolkit[math]",
    ),
    ("countdown", "math.countdown:Countdown", "math multi-turn generated", ""),
    ("search", "search.env:Search", "search multi-turn tools", "bm25s:agentgym-toolkit[search]"),
    ("sql", "sql.env:SQL", "sql multi-turn tools sandbox", "sandbox:sql"),
    ("swe_bench", "swe_bench.env:SWEBench", "code multi-turn tools sandbox data", "sandbox:swe"),
)
_ADAPTERS = (  # prefix, class, what pip installs, an example
    ("gymnasium", "agentgym_envs.adapters.gymnasium:GymnasiumEnv", "gymnasium", "FrozenLake-v1"),
    ("harbor", "agentgym_envs.adapters.harbor:Harbor", "agentgym-toolkit", "./tasks"),
    # agentgym implements OpenEnv's wire protocol, so no OpenEnv package is needed.
    ("openenv", "agentgym.service.openenv.client:OpenEnvEnv", "aiohttp", "http://127.0.0.1:8000"),
    ("pettingzoo", "agentgym_envs.adapters.pettingzoo:PettingZooEnv", "pettingzoo>=1.27", "classic/rps-v2"),
    ("reasoning_gym", "agentgym_envs.adapters.reasoning_gym:ReasoningGymEnv", "reasoning-gym", "chain_sum"),
    ("skyrl_gym", "agentgym_envs.adapters.skyrl_gym:SkyRLGymEnv", "skyrl-gym", "gsm8k"),
    ("verifiers", "agentgym_envs.adapters.verifiers:VerifiersEnv", "verifiers>=0.1.14,<0.4", "wordle"),
)
_DESCRIPTIONS = {
    "code_mbpp": "Write a Python function for a short request, run it on an example, submit it to hidden tests.",
    "code_humaneval": "Write a Python function from its head and docstring, run it, submit it to hidden tests.",
    "frozen_lake": "Cross a frozen lake to the goal without falling into a hole.",
    "sokoban": "Push every box onto a target; boxes cannot be pulled.",
    "wordle": "Find a five-letter word in six guesses, told after each which letters are right.",
    "guess_number": "Find a number, told after each guess that it is too low or too high.",
    "tic_tac_toe": "Three in a row against an opponent that plays at random, perfectly, or a mix of both.",
    "tic_tac_toe_self": "Three in a row of two players; held-out games are against a perfect opponent.",
    "reference_game": "One player describes one of four things in two words, the other finds it.",
    "gsm8k": "School word problems, answered in one message and compared as exact numbers.",
    "gsm8k_tool": "School word problems over several turns, with a calculator to call.",
    "gsm8k_team": "School word problems for three: a solver, a verifier of the solution, and a refiner who answers.",
    "gsm8k_python": "School word problems over several turns, with a Python session in a sandbox.",
    "math_python": "Harder mathematics with a Python session in a sandbox; answers compared symbolically.",
    "countdown": "Reach a target with + - * / and given numbers, each at most once.",
    "search": "Questions over a corpus of passages, with a search tool; scored by exact match or F1.",
    "sql": "Questions about SQLite databases: explore with a tool, then answer with a query.",
    "swe_bench": "Resolve issues of real repositories with a shell and an editor, judged by hidden tests.",
    "gymnasium": "Gymnasium environments with text or few numbers to see",
    "harbor": "task folders of Harbor, in sandboxes",
    "openenv": "environments on OpenEnv servers",
    "pettingzoo": "PettingZoo's environments with several players, in turns or at the same time",
    "reasoning_gym": "Reasoning Gym's generated puzzles",
    "skyrl_gym": "SkyRL-Gym's text environments",
    "verifiers": "environments of verifiers that have load_environment",
}


def register_all() -> None:
    """Register all environments. This is the package's entry point in the group `agentgym.envs`."""
    from agentgym.core.registration import Adapter, register, register_adapter
    from agentgym.datasets import register_data
    from agentgym.sandbox.images.instances import register_instance_images

    for prefix, entry_point, install, example in _ADAPTERS:
        register_adapter(Adapter(prefix, entry_point, install, _DESCRIPTIONS[prefix], example))
    for id, name, tags, needs in _ENVS:
        entry_point = f"agentgym_envs.{name}"
        register(id, entry_point, description=_DESCRIPTIONS[id], tags=tags.split(), needs=needs.split())
    register_data("agentgym_envs.data_sets:data_sets")
    register_instance_images("swe", "agentgym_envs.swe_bench.images:build_file")
