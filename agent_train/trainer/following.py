"""A reference that follows the policy: every `reference.reset_every` steps it takes the policy's weights (ProRL, arXiv 2505.24864).

The weights of those steps are in the run's folder, so that a run goes on, and a step is replayed, with the same reference.
"""

import shutil

from agent_train.config.schema import Config
from agent_train.learner.role_start import Models
from agent_train.trainer.checkpoint import CheckpointError
from agent_train.trainer.run_folder import RunFolder, step_of


def reset_before(config: Config, step: int) -> int:
    """The step whose policy is the reference after `step` steps; 0: the reference is the one that the run started with."""
    every = config.reference.reset_every
    return 0 if every is None else step - step % every


async def reset_reference(config: Config, run: RunFolder, models: Models, step: int) -> None:
    """After a step: give the reference the policy's weights, if it is the step for it; then those go that nothing needs any more."""
    if models.reference is None or step != reset_before(config, step) or not step:
        return
    folder = run.reference_weights(step)
    await models.policy.save(folder)
    await models.reference.load(folder)
    saved = [step_of(path) for path in run.saved_checkpoints()]
    kept = saved[-config.trainer.keep_checkpoints :] or [0]
    needed = {reset_before(config, checkpoint) for checkpoint in saved}  # of `trainer.dump`, too
    for path in folder.parent.glob("[0-9]*"):
        if path.name.isdigit() and int(path.name) < reset_before(config, kept[0]) and int(path.name) not in needed:
            shutil.rmtree(path, ignore_errors=True)


async def restore_reference(config: Config, run: RunFolder, models: Models, step: int) -> None:
    """Give the reference the weights that it had after `step` steps. Raises CheckpointError if they are gone."""
    reset = reset_before(config, step)
    if models.reference is None or not reset:
        return
    folder = run.reference_weights(reset)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is gone, the weights of the reference after step {step}: remove the checkpoints that need it to go "
            "back further"
        )
    await models.reference.load(folder)
