"""A small config on disk, with data, for tests that start from a file."""

from pathlib import Path

import numpy as np

from olmo_shard.config import Config, load_config

VOCAB = 64
CONFIG = """
run:
  dir: {run}
  device: cpu
  threads: 1
  seed: 3
data:
  sequence_length: 16
  sources:
    - path: {data}
      dtype: uint16
      eos_id: 0
  validation:
    held_out: {{path: {data}, dtype: uint16, eos_id: 0}}
model:
  vocab_size: {vocab}
  d_model: 32
  n_layers: 2
  n_heads: 4
  n_kv_heads: 2
  ffn_hidden: 48
  n_dense_layers: 1
  moe:
    num_experts: 4
    top_k: 2
    hidden: 16
    num_shared_experts: 1
    router: {{lb_loss_weight: 0.01, z_loss_weight: 0.001, bias_gamma: 0.001}}
optim:
  lr: 1.0e-2
schedule:
  warmup_steps: 2
train:
  steps: 6
  global_batch_tokens: 256
  micro_batch_tokens: 32
  log_every: 1
eval:
  every: 3
  tokens: 320
checkpoint:
  every: 3
tracking:
  wandb: "off"
"""


def write_tokens(path: Path, count: int = 4002, vocab: int = VOCAB, seed: int = 0) -> Path:
    """Ids with structure enough for a loss to fall: each depends on the one before it."""
    generator = np.random.default_rng(seed)
    steps = generator.integers(1, 4, size=count)
    (np.cumsum(steps) % vocab).astype(np.uint16).tofile(path)
    return path


def write_config(folder: Path, text: str = CONFIG) -> Path:
    """config.yaml and tokens.bin in a folder."""
    tokens = write_tokens(folder / "tokens.bin")
    path = folder / "config.yaml"
    path.write_text(text.format(run=folder / "run", data=tokens, vocab=VOCAB), encoding="utf-8")
    return path


def config_at(folder: Path, *overrides: str) -> Config:
    """That config, loaded with overrides."""
    return load_config(str(write_config(folder)), list(overrides))
