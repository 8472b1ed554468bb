"""What a checkpoint of a run is good for, asked of transformers itself."""

import asyncio
from pathlib import Path

from agent_train.weights.collective import checksum
from agent_train.weights.sync import sync


class _Saved:
    """Both ends of a weight sync at once, so that the checksum of a whole is made by the code that the loop uses."""

    connected = True

    def __init__(self, sums: dict[str, int]):
        self.sums = sums

    async def losses(self) -> int:
        return 0

    async def live(self) -> None:
        pass

    def manifest(self) -> list:
        return []

    async def send_weights(self) -> dict[str, int]:
        return self.sums

    async def receive_weights(self, manifest, version: int) -> dict[str, int]:
        return self.sums


def weights_checksum(folder: Path) -> int:
    """The number that a run records as `weights_checksum` when its engine holds the weights of this folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder))
    saved = _Saved({name: checksum(parameter.detach()) for name, parameter in model.named_parameters()})
    return asyncio.run(sync(saved, saved, version=0))


def generates(folder: Path) -> bool:
    """Whether transformers loads the folder, renders a chat with its template and generates from it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder))
    chat = [{"role": "user", "content": "_ P\n_ G"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    return bool(answer.shape[1] == prompt["input_ids"].shape[1] + 4)
