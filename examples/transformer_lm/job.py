"""A small GPT-2, trained from scratch on the standard library's source.

headrace train examples/transformer_lm/job.py --strategy mirrored --workers 2 --set steps=100
"""

from __future__ import annotations

import functools

import torch
from stdlib_tokens import bpe, stdlib_text, windows
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, GPT2Config, PreTrainedModel

import headrace as hr


def model(config: GPT2Config) -> PreTrainedModel:
    made = AutoModelForCausalLM.from_config(config)
    made.loss_type = "ForCausalLM"  # what the library takes for GPT-2 anyway, and warns of
    return made


def job(
    steps: int = 300, batch: int = 16, lr: float = 1e-3, layers: int = 4, width: int = 128, length: int = 128,
    vocabulary: int = 2000, modules: int = 28, dropout: float = 0.0,
) -> hr.Job:  # fmt: skip
    text = stdlib_text(modules)
    tokenizer = bpe(text, vocabulary)
    train, test = windows(text, tokenizer, length)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=length, n_embd=width, n_layer=layers, n_head=max(1, width // 32),
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return hr.Job(
        model=functools.partial(model, config),
        task=hr.tasks.own_loss(ignore_index=-100),
        optimizer=functools.partial(torch.optim.AdamW, lr=lr),
        data=hr.data.from_hugging_face(train, collator=collator).shuffle(),
        eval_data=hr.data.from_hugging_face(test, collator=collator),
        global_batch_size=batch,
        steps=steps,
    )
