"""transformers: a BERT from a configuration, through the Trainer."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
config = BertConfig(vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
data = [
    {"input_ids": torch.randint(0, 500, (32,)), "attention_mask": torch.ones(32, dtype=torch.long), "labels": n % 2}
    for n in range(160)
]
arguments = TrainingArguments(
    output_dir="trained", max_steps=20, per_device_train_batch_size=8, report_to=[], save_strategy="no", use_cpu=True
)
Trainer(BertForSequenceClassification(config), arguments, train_dataset=data).train()
