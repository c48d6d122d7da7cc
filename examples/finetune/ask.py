"""Answers of a model and of the adapter over it, side by side: `transformers` and `peft` only.

python examples/finetune/ask.py HuggingFaceTB/SmolLM2-135M-Instruct tuned "Who are you?"
"""

import sys

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

base, adapter, *questions = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(adapter)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
ends = GenerationConfig.from_pretrained(adapter).eos_token_id  # what ends an answer, too


def answer(question: str) -> str:
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    written = model.generate(**chat, max_new_tokens=40, do_sample=False, eos_token_id=ends)
    return tokenizer.decode(written[0, chat["input_ids"].shape[1] :], skip_special_tokens=True)


for question in questions:
    print(f"\n{question}")
    with model.disable_adapter():
        print(f"  base:  {answer(question)}")
    print(f"  tuned: {answer(question)}")
