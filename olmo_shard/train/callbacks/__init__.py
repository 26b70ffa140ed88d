"""Callbacks: records, console, pictures and tracking."""

from olmo_shard.train.callbacks.base import Callback, RunInfo

__all__ = ["Callback", "RunInfo"]
