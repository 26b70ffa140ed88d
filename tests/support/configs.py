"""A small config on disk, with data, and what a run opens of it."""

from pathlib import Path

import numpy as np

from olmo_shard.config import Config, load_config
from olmo_shard.data.loader import DataLoader
from olmo_shard.data.validation import ValidationSet, open_validation

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
    """Write ids from which a model can learn: each depends on the one before it."""
    generator = np.random.default_rng(seed)
    steps = generator.integers(1, 4, size=count)
    (np.cumsum(steps) % vocab).astype(np.uint16).tofile(path)
    return path


def write_config(folder: Path, text: str = CONFIG) -> Path:
    """Write config.yaml and tokens.bin into a folder."""
    tokens = write_tokens(folder / "tokens.bin")
    path = folder / "config.yaml"
    path.write_text(text.format(run=folder / "run", data=tokens, vocab=VOCAB), encoding="utf-8")
    return path


def config_at(folder: Path, *overrides: str) -> Config:
    """Write the config into a folder and load it with overrides."""
    return load_config(str(write_config(folder)), list(overrides))


def loader_of(config: Config, rank: int = 0, world_size: int = 1) -> DataLoader:
    """Open a rank's loader as a run opens it."""
    return DataLoader(
        config.data,
        config.train,
        vocab_size=config.model.vocab_size,
        seed=config.run.seed,
        rank=rank,
        world_size=world_size,
    )


def validation_of(config: Config) -> list[ValidationSet]:
    """Open the validation sets as a run opens them."""
    return open_validation(
        config.data,
        tokens=config.eval.tokens,
        micro_batch_tokens=config.train.micro_batch_tokens,
        vocab_size=config.model.vocab_size,
    )
