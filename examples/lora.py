"""Train a low-rank adapter in place of all weights, and use it: load, merge, serve. It needs `pip install -e '.[lora]'`.

python examples/lora.py [key=value ...]

The learning rate is some ten times that of all weights. The base stays as it is: the tiny one is random, so little is learned here,
and `model.path=DIR` names one that knows something. A checkpoint is an ordinary PEFT folder that names its base model:

vllm serve BASE --enable-lora --max-lora-rank 8 --lora-modules game=runs/NAME/checkpoints/step-000005
agent-train model.path=MERGED ...        go on from the merged model
"""

import json
import sys

from peft import AutoPeftModelForCausalLM
from train import TINY, train
from transformers import AutoTokenizer

import agentgym

LORA = [
    "env.kwargs.shaping=1.0",
    "lora.rank=8",
    "lora.alpha=16",
    "lora.targets=[q_proj,v_proj,up_proj,down_proj]",
    "learner.lr=2e-3",
]


def main(arguments):
    folder = train(*TINY, *LORA, *arguments)
    adapter = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    print(f"adapter {(adapter / 'adapter_model.safetensors').stat().st_size // 1024} KiB in {adapter}")

    model = AutoPeftModelForCausalLM.from_pretrained(adapter)  # the base and the adapter
    merged = model.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    tokenizer.save_pretrained(folder / "merged")
    size = (folder / "merged" / "model.safetensors").stat().st_size // 1024
    print(f"base {base}\nmerged {size} KiB in {folder / 'merged'}")

    observation, _ = agentgym.make("frozen_lake", view="near").reset(seed=0)
    prompt = tokenizer.apply_chat_template(
        observation, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = merged.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    print(f"it says {tokenizer.decode(answer, skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
